"""Discrete-event simulation of one step of a plan: microbatches on stages, sends, exposed collectives and the tail.

The inputs are the plan's costs per stage and microbatch, and its schedule file, if any. All ranks of a stage run in
lockstep, so one rank represents them. The tail is the work after the gradient reduction, once per step: gradient norm,
optimizer and host work. It starts when all stages have reduced their gradients, because the norm needs all of them.
Contention of ranks for shared cores is included.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hyper_parallel.cost import COPIES
from hyper_parallel.errors import PlanUnreadable
from hyper_parallel.ir import Plan, Task, TaskGraph, Timeline
from hyper_parallel.mpmd import (
    make_schedule,
    nanoseconds,
    on_shared_cores,
    schedule_name,
    schedule_tasks,
    step_schedule,
)
from hyper_parallel.planner.pricing import STEP_TAIL
from hyper_parallel.sim import simulate
from hyper_parallel.units import format_seconds

WIDTH: Final = 100
"""Default width of a chart in characters, without the names of the ranks."""
MAX_RANKS: Final = 16
_TAIL_CATEGORIES: Final = {
    "gradient norm": "communication",
    "stragglers": "wait",
    "every step": "host",
    COPIES: "copies",
}
"""Timeline category of each cost term of the step's tail except the optimizer."""
_MARKS: Final = ("F", "B", "I", "W")


def plan_tasks(plan: Plan) -> TaskGraph:
    """Return the task graph of one optimizer step of a plan.

    The lanes of pipeline rank r are `rank r/compute`, `rank r/communication` and `link r->q`. The memory counter
    `rank r/device` counts bytes of activations.

    Raises:
        PlanUnreadable: HP306 when the plan does not have one cost per stage; files of earlier versions have none.
        ScheduleError: HP320 when the plan's schedule or schedule file does not match its microbatches.
    """
    s = plan.strategy
    if len(plan.stages) != s.pp * s.virtual_stages:
        raise PlanUnreadable(
            "the plan's stage costs do not match its pipeline stages",
            got=f"{len(plan.stages)} stages",
            allowed=f"{s.pp * s.virtual_stages} stages (pp x virtual_stages)",
            hint="run `hyper-parallel plan` again, to replace the plan file",
        )
    microbatches = plan.workload.accumulation_steps or 1
    if s.schedule_file:
        schedule = step_schedule(s, microbatches).compute_only()
    else:
        schedule = make_schedule(schedule_name(s), s.pp, microbatches, s.virtual_stages)
    costs = [stage.cost for stage in plan.stages]
    microbatch_graph = schedule_tasks(schedule, costs)
    place = schedule.placement()
    tasks = list(microbatch_graph.tasks)
    last = {task.executor: number for number, task in enumerate(tasks)}
    reductions = []
    for stage, cost in enumerate(costs):
        rank = place[stage]
        lane = f"rank {rank}/communication"
        deps = tuple(last[n] for n in (f"rank {rank}/compute", lane) if n in last)
        ns = nanoseconds(cost.reduce_grad_s)
        last[lane] = len(tasks)
        reductions.append(len(tasks))
        tasks.append(Task(f"{stage}REDUCE_GRAD", lane, ns, "communication", deps))
    for stage, cost in enumerate(costs):
        lane = f"rank {place[stage]}/compute"
        for name, seconds in _tail(plan, cost.update_s):
            category, ns = _TAIL_CATEGORIES.get(name, "optimizer"), nanoseconds(seconds)
            tasks.append(Task(f"{stage} {name}", lane, ns, category, tuple(reductions)))
    graph = TaskGraph(tuple(tasks), microbatch_graph.policies, microbatch_graph.initial_bytes)
    return on_shared_cores(graph, plan.pace)


def _tail(plan: Plan, update_s: float) -> list[tuple[str, float]]:
    """Return (name, seconds) of each cost term of the tail on one stage; the seconds add up to `update_s`."""
    terms = [t for t in plan.cost if t.name in STEP_TAIL and t.seconds > 0]
    total = sum(t.seconds for t in terms)
    if not total:
        return [("update", update_s)]
    return [(t.name, t.seconds / total * update_s) for t in terms]


def simulate_plan(plan: Plan) -> Timeline:
    """Return the timeline of one simulated optimizer step; lanes, counters and errors are those of `plan_tasks`."""
    return simulate(plan_tasks(plan))


def gantt(plan: Plan, width: int = WIDTH) -> str:
    """Return a chart of the simulated step as text, with one line per pipeline rank.

    F is a forward, B a backward (I: gradients of inputs, W: of weights), c an exposed collective or the gradient norm,
    u other work of the tail, and a dot idle time. Without a schedule file, the chart is for a step with at most
    max(2 * pp, 4) microbatches; the title says so if the plan has more. With more than `MAX_RANKS` ranks, only the
    first and last `MAX_RANKS / 2` are drawn. A line has `width` characters after the name of the rank. Errors are those
    of `plan_tasks`.
    """
    s, microbatches = plan.strategy, plan.workload.accumulation_steps or 1
    drawn = microbatches if s.schedule_file else min(microbatches, max(2 * s.pp, 4))
    plan = replace(plan, workload=replace(plan.workload, accumulation_steps=drawn))
    timeline = simulate_plan(plan)
    end = timeline.end_s or 1.0
    rows: dict[int, list[str]] = {rank: ["."] * width for rank in range(s.pp)}
    for span in timeline.spans:
        head, _, lane = span.lane.partition("/")
        if lane not in ("compute", "communication") or span.duration_s <= 0:
            continue
        row = rows[int(head.removeprefix("rank "))]
        first, last = (round(t / end * width) for t in (span.start_s, span.end_s))
        for column in range(first, max(last, first + 1)):
            if column < width and (lane == "compute" or row[column] == "."):
                row[column] = _mark(span.name, span.category)
    shown = [*rows]
    if s.pp > MAX_RANKS:
        shown = [*shown[: MAX_RANKS // 2], *shown[-MAX_RANKS // 2 :]]
    lines = []
    for previous, rank in zip([-1, *shown], shown, strict=False):
        if rank != previous + 1:
            lines.append(f"{'...':>8}")
        lines.append(f"rank {rank:>3}  {''.join(rows[rank])}")
    part = f", drawn for {drawn} of {microbatches} microbatches" if drawn < microbatches else ""
    key = "F forward, B backward (I inputs, W weights), c collectives, u update"
    title = f"simulated step, {format_seconds(end)}{part}: {key}"
    return "\n".join([title, *lines])


def _mark(name: str, category: str) -> str:
    if category in ("optimizer", "host", "wait", "copies"):
        return "u"
    if category == "communication":
        return "c"
    return next((mark for mark in _MARKS if mark in name), "?")
