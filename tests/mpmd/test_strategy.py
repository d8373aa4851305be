"""From a strategy to its schedule: where stages lie, what is refused, evaluation, schedules from files."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from hyper_parallel.errors import (
    BatchMismatch,
    HyperParallelError,
    NotDivisible,
    ScheduleError,
    UnsupportedSharding,
)
from hyper_parallel.ir import Schedule, Strategy
from hyper_parallel.mpmd import check_pipeline, forward_schedule, make_schedule, step_schedule

pytestmark = pytest.mark.unit
STRATEGIES = [
    Strategy(pp=p, schedule=schedule, virtual_stages=v)
    for p in (2, 3, 4)
    for schedule, v in (
        ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2),
    )
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_stages_lie_where_the_schedule_puts_them(strategy):
    schedule = step_schedule(strategy, 2 * strategy.pp)
    place = schedule.placement()
    for rank in range(strategy.pp):
        assert strategy.stages_of(rank) == tuple(s for s in sorted(place) if place[s] == rank)
    for microbatches in (1, 5):
        forward = forward_schedule(strategy, microbatches)
        done = {(a.stage, a.microbatch) for _, _, a in forward.leaves() if a.kind == "F"}
        assert len(done) == strategy.stages * microbatches
        assert not any(a.kind in "BIW" for _, _, a in forward.leaves())


@pytest.mark.parametrize(
    ("strategy", "layers", "microbatches", "error", "hint"),
    [
        (Strategy(pp=4), 3, 8, NotDivisible, "parallel.pp=3"),
        (Strategy(pp=4), 8, 3, BatchMismatch, "training.accumulation_steps=4"),
        (Strategy(pp=2, schedule="zbv"), 8, 8, UnsupportedSharding, "parallel.virtual_stages=2"),
        (Strategy(pp=2, schedule="interleaved"), 8, 8, UnsupportedSharding, "parallel.virtual_stages=2"),
        (Strategy(pp=2, virtual_stages=2), 8, 8, UnsupportedSharding, "parallel.schedule=interleaved"),
        (Strategy(pp=2, schedule="interleaved", virtual_stages=3), 5, 8, NotDivisible,
         "parallel.pp=1 parallel.virtual_stages=1"),
        (Strategy(pp=4, schedule="interleaved", virtual_stages=2), 8, 10, None, None),
        (Strategy(pp=4, schedule="interleaved", virtual_stages=2), 8, 9, BatchMismatch,
         "training.accumulation_steps=10"),
        (Strategy(pp=4, schedule="dualpipev", virtual_stages=2), 8, 7, BatchMismatch,
         "training.accumulation_steps=8"),
        (Strategy(pp=600), 600, 600, BatchMismatch, "parallel.pp=512 training.accumulation_steps=512"),
        (Strategy(pp=300, schedule="dualpipev", virtual_stages=2), 600, 600, BatchMismatch,
         "parallel.pp=256 training.accumulation_steps=512"),
        (Strategy(virtual_stages=2), 8, 8, UnsupportedSharding, "parallel.virtual_stages=1"),
        (Strategy(stage_layers=(8,)), 8, 8, UnsupportedSharding, "'parallel.stage_layers=[]'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_run_is_refused_with_the_nearest_that_can(strategy, layers, microbatches, error, hint):
    if error is None:
        check_pipeline(strategy, layers, microbatches)
        step_schedule(strategy, microbatches)
        return
    with pytest.raises(error) as caught:
        check_pipeline(strategy, layers, microbatches)
    assert caught.value.hint == hint
    changes = {k: int(v) for k, v in (c.split("=") for c in hint.split()) if v.isdecimal()}
    microbatches = changes.pop("training.accumulation_steps", microbatches)
    if changes or error is BatchMismatch:
        fixed = {key.removeprefix("parallel."): value for key, value in changes.items()}
        check_pipeline(replace(strategy, **fixed), layers, microbatches)


@pytest.mark.slow
def test_what_is_checked_can_be_made():
    for strategy in STRATEGIES:
        for microbatches in range(1, 20):
            try:
                check_pipeline(strategy, 99, microbatches)
            except HyperParallelError:
                continue
            step_schedule(strategy, microbatches)


def test_a_schedule_comes_from_a_file(tmp_path):
    path = tmp_path / "mine.csv"
    strategy = Strategy(pp=2, schedule="interleaved", virtual_stages=2, schedule_file=str(path))
    made = step_schedule(replace(strategy, schedule_file=""), 4)
    for text in (made.to_csv(), made.compute_only().to_csv()):
        path.write_text(text)
        assert step_schedule(strategy, 4).ranks == made.ranks
    with pytest.raises(ScheduleError, match="does not match the pipeline"):
        step_schedule(strategy, 6)
    path.write_text(make_schedule("zbv", 2, 4).to_csv())
    with pytest.raises(ScheduleError, match="assigns stages to other ranks"):
        step_schedule(strategy, 4)
    path.write_text(made.to_csv() + "graph,0>1,1>2,2>3\n")
    with pytest.raises(ScheduleError, match="executes only a chain"):
        step_schedule(strategy, 4)
    rows = [list(row) for row in made.compute_only().ranks]
    rows[0].reverse()
    path.write_text(Schedule("mine", 4, 4, tuple(map(tuple, rows))).to_csv())
    with pytest.raises(ScheduleError, match="HP320"):
        step_schedule(strategy, 4)
    with pytest.raises(ScheduleError, match="cannot be read"):
        step_schedule(replace(strategy, schedule_file=str(tmp_path / "none.csv")), 4)


@pytest.mark.parametrize("damage", ["gigabytes", "no text", "pipe"])
def test_a_schedule_file_that_cannot_be_text_is_refused(tmp_path, damage):
    path = tmp_path / "schedule.csv"
    if damage == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"\xff\xfe" * 8)
    if damage == "gigabytes":
        os.truncate(path, 1 << 40)
    with pytest.raises(ScheduleError, match="HP320") as caught:
        step_schedule(Strategy(pp=2, schedule_file=str(path)), 4)
    assert "cannot be read" in str(caught.value)


def test_a_schedule_file_without_gradient_reductions_gets_them(tmp_path):
    """A file that has messages, and no reductions, is the schedule of the strategy."""
    strategy, path = Strategy(pp=2, dp_shard=2), tmp_path / "s.csv"
    made = step_schedule(strategy, 4)
    cells = [row.split(",") for row in made.to_csv().splitlines()]
    kept = [[cell for cell in row if "REDUCE_GRAD" not in cell] for row in cells]
    assert kept != cells
    path.write_text("".join(",".join(row) + "\n" for row in kept))
    read = step_schedule(replace(strategy, schedule_file=str(path)), 4)
    assert any(leaf.kind == "REDUCE_GRAD" for _, _, leaf in read.leaves())


def test_too_few_microbatches_of_dualpipev_name_those_it_supports():
    strategy = Strategy(pp=4, schedule="dualpipev", virtual_stages=2)
    with pytest.raises(BatchMismatch) as caught:
        check_pipeline(strategy, 8, 2)
    check_pipeline(strategy, 8, caught.value.changes["training.accumulation_steps"])


def test_errors_of_a_stage_graph_name_the_file_and_the_row():
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv("0F0,0B0\ngraph,0>x\n", "mine.csv")
    assert caught.value.where == "mine.csv: row 2"
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv("0F0,0B0\ngraph,0>9\n", "mine.csv")
    assert caught.value.where.startswith("mine.csv")
