"""Changes in hints that remove a parallel axis, with the settings that need the axis."""

import pytest

from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Overlap, Strategy
from hyper_parallel.shard import completed_changes, without_axes

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("strategy", "axes", "changes"),
    [
        (Strategy(cp=2, dp_shard=2), ("cp",), {"parallel.cp": 1, "parallel.dp_shard": 4}),
        (Strategy(tp_x=2, tp_y=2), ("tp",), {"parallel.tp_x": 1, "parallel.tp_y": 1, "parallel.dp_shard": 4}),
        (
            Strategy(pp=2, virtual_stages=2, stage_layers=(1, 1, 1, 1)),
            ("pp",),
            {"parallel.pp": 1, "parallel.dp_shard": 2, "parallel.virtual_stages": 1, "parallel.stage_layers": ()},
        ),
        (
            Strategy(pp=2, schedule_file="a.csv"),
            ("pp",),
            {"parallel.pp": 1, "parallel.dp_shard": 2, "parallel.schedule_file": ""},
        ),
        (
            Strategy(tp_x=2, overlap=Overlap(tp_chunks=2)),
            ("tp",),
            {"parallel.tp_x": 1, "parallel.tp_y": 1, "parallel.dp_shard": 2, "overlap": "none"},
        ),
        (
            Strategy(tp_x=2, ep=2, overlap=Overlap(tp_chunks=2, ep_chunks=2)),
            ("ep",),
            {"parallel.ep": 1, "overlap.ep": "none"},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_the_ranks_of_an_axis_become_ranks_of_fsdp(strategy, axes, changes):
    assert without_axes(strategy, *axes) == changes


def test_an_error_that_removes_an_axis_keeps_its_other_changes():
    with (
        pytest.raises(UnsupportedSharding) as caught,
        completed_changes(Strategy(ep=2, dp_shard=2, overlap=Overlap(ep_chunks=2))),
    ):
        raise UnsupportedSharding("no", changes={"parallel.ep": 1, "moe.capacity_factor": "null"})
    assert caught.value.hint == "parallel.ep=1 overlap=none moe.capacity_factor=null"


def test_other_changes_stay_as_they_are():
    with pytest.raises(UnsupportedSharding) as caught, completed_changes(Strategy(tp_x=2)):
        raise UnsupportedSharding("no", changes={"parallel.cp_kind": "ring"})
    assert caught.value.hint == "parallel.cp_kind=ring"
