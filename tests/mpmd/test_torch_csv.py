"""Schedules cross over to torch.distributed.pipelining and back as CSV."""

import os

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.pipelining.schedules as torch_schedules  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402

from hyper_parallel.ir import Schedule  # noqa: E402
from hyper_parallel.mpmd import (  # noqa: E402
    SCHEDULES,
    in_flight,
    in_flight_limit,
    lower,
    make_schedule,
    verify,
)

pytestmark = pytest.mark.torch
RANKS = 4


@pytest.fixture(scope="module")
def fake_ranks():
    """A process group of four ranks without processes: enough to build schedules, which hold all ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def _stages(schedule_stages, mine):
    return [PipelineStage(torch.nn.Linear(2, 2), s, schedule_stages, torch.device("cpu")) for s in mine]


def _loss(output, target):
    return (output - target).sum()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [8, 12])
def test_torch_reads_our_csv_in_both_forms(name, microbatches, fake_ranks, tmp_path):
    schedule = make_schedule(name, RANKS, microbatches)
    mine = [s for s, rank in schedule.placement().items() if rank == 0]
    for form, ours in (
        ("compute_only", schedule),
        ("compute_comms", lower(schedule)),
        ("compute_comms", lower(schedule, unshard=True)),
    ):
        path = tmp_path / "schedule.csv"
        path.write_text(ours.to_csv())
        runtime = torch_schedules._PipelineScheduleRuntime(_stages(schedule.stages, mine), microbatches, loss_fn=_loss)
        runtime._load_csv(os.fspath(path), format=form)
        assert runtime.stage_index_to_group_rank == schedule.placement()
        read = runtime.pipeline_order if form == "compute_only" else runtime.pipeline_order_with_comms
        assert [[str(a) for a in read[r]] for r in range(RANKS)] == [[str(a) for a in row] for row in ours.ranks]
        # What torch writes again is what we wrote, or what torch made of it by its own lowering.
        runtime._dump_csv(os.fspath(path), format=form)
        assert Schedule.from_csv(path.read_text(), name) == ours
        runtime._dump_csv(os.fspath(path), format="compute_comms")
        verify(Schedule.from_csv(path.read_text()))


@pytest.mark.parametrize(
    ("cls", "name", "mine"),
    [
        ("ScheduleLoopedBFS", None, [0, 4]),
        ("ScheduleInterleaved1F1B", "interleaved_1f1b", [0, 4]),
        ("ScheduleInterleavedZeroBubble", None, [0, 4]),
        ("ScheduleZBVZeroBubble", "zbv", [0, 7]),
        ("ScheduleDualPipeV", "dualpipev", [0, 7]),
    ],
)
@pytest.mark.parametrize("microbatches", [8, 12, 16])
def test_torch_schedules_parse_and_verify(cls, name, mine, microbatches, fake_ranks, tmp_path):
    theirs = getattr(torch_schedules, cls)(_stages(8, mine), microbatches, loss_fn=_loss)
    path = tmp_path / "schedule.csv"
    theirs._dump_csv(os.fspath(path), format="compute_comms")
    lowered = Schedule.from_csv(path.read_text())
    theirs._dump_csv(os.fspath(path), format="compute_only")
    schedule = Schedule.from_csv(path.read_text(), name or cls)
    verify(schedule)
    verify(lowered)
    assert lowered.compute_only().ranks == schedule.ranks
    if name:
        ours = make_schedule(name, RANKS, microbatches)
        assert list(in_flight(schedule)) == list(in_flight_limit(name, RANKS, microbatches, 2))
        if name != "zbv":
            assert ours == schedule
        else:
            # Equal but for the order of weight gradients at the end, which nobody waits for.
            for mine_row, their_row in zip(ours.ranks, schedule.ranks, strict=True):
                assert [a for a in mine_row if a.kind != "W"] == [a for a in their_row if a.kind != "W"]


def test_torch_gpipe_is_ours(fake_ranks):
    order = torch_schedules.ScheduleGPipe(_stages(RANKS, [0])[0], 6, loss_fn=_loss)._get_pipeline_order()
    text = "\n".join(",".join("" if a is None else str(a) for a in order[r]) for r in range(RANKS))
    assert Schedule.from_csv(text, "gpipe").compute_only() == make_schedule("gpipe", RANKS, 6)
