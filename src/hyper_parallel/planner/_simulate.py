"""A step of a plan, event by event: every stage and microbatch, transfers, exposed collectives, and the step's tail.

The plan's stages hold what a microbatch costs on them, so a plan file alone is enough. One rank stands for all ranks of
its stage: they do the same at the same time. The tail follows when every stage has its gradients, because the gradient
norm is over all of them. Ranks that share cores do so here too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hyper_parallel.errors import PlanUnreadable
from hyper_parallel.ir import Plan, Task, TaskGraph, Timeline, simulate
from hyper_parallel.mpmd import (
    make_schedule,
    on_shared_cores,
    schedule_name,
    schedule_tasks,
    step_schedule,
)
from hyper_parallel.units import format_seconds

WIDTH: Final = 100
"""Columns of a chart."""
MOST_RANKS: Final = 16
_MARKS: Final = ("F", "B", "I", "W")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def plan_tasks(plan: Plan) -> TaskGraph:
    """The task graph of one optimizer step of a plan.

    Lanes per pipeline rank r: `rank r/compute`, `rank r/communication`, `link r->q`, `rank r/copy`; the memory counter
    `rank r/device` holds activations.

    Args:
        plan: A plan with stages.

    Raises:
        PlanUnreadable: HP306 when the plan has no stages, as files of earlier versions.
        ScheduleError: HP320 when its schedule cannot run its microbatches.
    """
    s = plan.strategy
    if len(plan.stages) != s.pp * s.virtual_stages:
        raise PlanUnreadable(
            "the plan does not say what its stages cost",
            got=f"{len(plan.stages)} stages",
            allowed=s.pp * s.virtual_stages,
            hint=f"hyper-parallel plan {plan.model.name} --topology {plan.topology} -o plan.json",
        )
    microbatches = plan.workload.accumulation_steps or 1
    if s.schedule_file:
        schedule = step_schedule(s, microbatches).compute_only()
    else:
        schedule = make_schedule(schedule_name(s), s.pp, microbatches, s.virtual_stages)
    costs = [stage.cost for stage in plan.stages]
    graph = schedule_tasks(schedule, costs)
    place = schedule.placement()
    tasks = list(graph.tasks)
    last: dict[str, int] = {}
    for number, task in enumerate(tasks):
        last[task.executor] = number
    reduced = []
    for stage, cost in enumerate(costs):
        rank = place[stage]
        lane = f"rank {rank}/communication"
        deps = tuple(last[n] for n in (f"rank {rank}/compute", lane) if n in last)
        ns = _nanoseconds(cost.reduce_grad_s)
        last[lane] = len(tasks)
        reduced.append(len(tasks))
        tasks.append(Task(f"{stage}REDUCE_GRAD", lane, ns, "communication", deps))
    for stage, cost in enumerate(costs):
        lane, ns = f"rank {place[stage]}/compute", _nanoseconds(cost.update_s)
        tasks.append(Task(f"{stage} update", lane, ns, "optimizer", tuple(reduced)))
    whole = TaskGraph(tuple(tasks), graph.policies, graph.initial_bytes)
    return on_shared_cores(whole, plan.pace)


def simulate_plan(plan: Plan) -> Timeline:
    """One simulated optimizer step of a plan, with activation memory per pipeline rank; see `plan_tasks`."""
    return simulate(plan_tasks(plan))


def gantt(plan: Plan, width: int = WIDTH) -> str:
    """The schedule of a plan: F forward, B backward (I, W its halves), c exposed collectives, u update, . idle.

    A step of many microbatches is drawn for two per stage, and says so; of many ranks the first and the last are drawn.

    Args:
        plan: A plan with stages.
        width: Columns.
    """
    s, microbatches = plan.strategy, plan.workload.accumulation_steps or 1
    few = min(microbatches, max(2 * s.pp, 4))
    if few < microbatches:
        short = replace(plan.workload, accumulation_steps=few)
        plan = replace(plan, workload=short)
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
    shown = (
        [*rows]
        if s.pp <= MOST_RANKS
        else [*range(MOST_RANKS // 2), *range(s.pp - MOST_RANKS // 2, s.pp)]
    )
    lines = []
    for previous, rank in zip([-1, *shown], shown, strict=False):
        if rank != previous + 1:
            lines.append(f"{'...':>8}")
        lines.append(f"rank {rank:>3}  {''.join(rows[rank])}")
    part = f", drawn for {few} of {microbatches} microbatches" if few < microbatches else ""
    key = "F forward, B backward (I inputs, W weights), c collectives, u update"
    title = f"simulated step, {format_seconds(end)}{part}: {key}"
    return "\n".join([title, *lines])


def _mark(name: str, category: str) -> str:
    if category == "optimizer":
        return "u"
    if category == "communication":
        return "c"
    return next((mark for mark in _MARKS if mark in name), "?")
