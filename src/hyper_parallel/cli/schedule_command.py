"""Output of a plan's pipeline: stages and schedule grid as text, and the schedule as CSV in torch's format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.errors import Contradiction, written

if TYPE_CHECKING:
    from hyper_parallel.ir import Plan

MOST_RANKS = 16
MOST_COLUMNS = 120


def pipeline_text(plan: Plan) -> str:
    """Return the layers of every stage and a grid of one step's actions, as text.

    F, I and W take one slot of the grid, B two. At most 120 columns and 16 ranks are shown.
    """
    from hyper_parallel.ir import grid
    from hyper_parallel.mpmd import in_flight, step_schedule, unit_starts

    strategy = plan.strategy
    schedule = step_schedule(strategy, plan.workload.accumulation_steps or 1)
    compute = schedule.compute_only()
    starts = unit_starts(compute)
    lines = grid(compute, rows="ranks", starts=starts).splitlines()
    width = max(map(len, lines))
    shown = [line[:MOST_COLUMNS].rstrip() for line in lines[: MOST_RANKS + 1]]
    slots = max(
        s + a.slots for row, acts in zip(starts, compute.ranks, strict=True) for s, a in zip(row, acts, strict=True)
    )
    limits = []
    if width > MOST_COLUMNS:
        limits.append(f"the first {MOST_COLUMNS} columns of {width}")
    if len(lines) > len(shown):
        limits.append(f"{MOST_RANKS} ranks of {strategy.pp}")
    return "\n".join(
        [
            f"pipeline: {strategy.stages} stages on {strategy.pp} ranks, schedule {schedule.name},"
            f" {schedule.microbatches} microbatches, {slots} slots,"
            f" at most {max(in_flight(schedule))} activations on a rank",
            f"layers per stage: {', '.join(map(str, strategy.stage_layers))}",
            *shown,
            *([f"({'; '.join(limits)})"] if limits else []),
        ]
    )


def check_schedule_file(path: Path) -> None:
    """Raise OutputNotWritable (HP105) if the file exists and is not a schedule."""
    from hyper_parallel.ir import Schedule
    from hyper_parallel.owned_folder import check_output_file

    first = lambda text: bool(Schedule.from_csv(text.partition("\n")[0]).ranks)  # noqa: E731
    check_output_file(path, first, "a schedule", "--schedule-csv")


def write_schedule(plan: Plan, path: Path, hint: str) -> None:
    """Write the actions of all pipeline ranks as CSV, one row per rank.

    Raises:
        Contradiction: HP104, with `hint`, for a plan without a pipeline.
        OutputNotWritable: HP105 if the file exists and is not a schedule, or cannot be written.
    """
    from hyper_parallel.mpmd import step_schedule
    from hyper_parallel.serde import write_text

    if plan.strategy.pp == 1:
        raise Contradiction(
            "the plan has no pipeline, so there is no schedule to write",
            where="--schedule-csv",
            got="pp=1",
            hint=hint,
        )
    check_schedule_file(path)
    schedule = step_schedule(plan.strategy, plan.workload.accumulation_steps or 1)
    with written(path):
        write_text(path, schedule.to_csv())
