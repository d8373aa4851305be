"""A chart of one simulated step as text: one line per pipeline rank, time to the right."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hyper_parallel.ir import Plan
from hyper_parallel.planner._simulate import simulate_plan
from hyper_parallel.units import format_seconds

WIDTH: Final = 100
MOST_RANKS: Final = 16
_MARKS: Final = {"F": "F", "B": "B", "I": "I", "W": "W"}


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
    kinds = [mark for mark in _MARKS if mark in name]
    return kinds[0] if kinds else "?"
