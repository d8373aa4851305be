"""The table of keys that can be pinned agrees with the recipe and with the columns that the cost model reads."""

from __future__ import annotations

import pytest

from hyper_parallel.config import DEGREES, Parallel
from hyper_parallel.cost import RECOMPUTE, SCHEDULES, SHAPES, Candidates
from hyper_parallel.errors import BadValue, NoLegalStrategy
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner import plan
from hyper_parallel.planner._pins import EXCLUDABLE, PINNABLE, check_pins
from tests.cost.machines import machine, small_model

pytestmark = pytest.mark.unit


def test_every_degree_and_choice_of_a_recipe_can_be_pinned():
    left_out = {
        "auto",
        "rules",
        "schedule_file",
        "stage_layers",
        "world_size",
        "reshard_after_forward",
    }
    assert {*Parallel.model_fields} - {*PINNABLE} == left_out
    for name in DEGREES:
        assert PINNABLE[name].recipe_key == f"parallel.{name}"
        assert check_pins({name: 2}) == {name: 2}
    assert PINNABLE["microbatch"].recipe_key == "training.microbatch"
    assert PINNABLE["virtual_stages"] is PINNABLE["vpp"]


def test_values_are_in_the_order_of_their_columns():
    columns = {"schedule": SCHEDULES, "attention_shape": SHAPES, "recompute": RECOMPUTE}
    for name, values in columns.items():
        assert PINNABLE[name].values == values
        assert name in Candidates.__slots__
        for index, value in enumerate(values):
            assert check_pins({name: value}) == {name: index}
    usual = Strategy()
    for name in EXCLUDABLE:
        if name in PINNABLE:
            assert PINNABLE[name].values[0] == getattr(usual, name)
    with pytest.raises(BadValue):
        check_pins({"schedule": "fastest"})


def test_offload_can_be_excluded_and_hints_name_the_section_of_a_key():
    asked = (small_model(), machine(), Workload(512, 512 * 8))
    free = plan(*asked, num_devices=4)
    assert plan(*asked, num_devices=4, exclude=("offload",)).strategy == free.strategy
    with pytest.raises(NoLegalStrategy) as caught:
        plan(*asked, num_devices=4, pins={"microbatch": 3})
    assert caught.value.hint == "--pin microbatch=2"


def test_a_plan_says_what_space_was_searched():
    chosen = plan(small_model(), machine(), Workload(512, 512 * 8), num_devices=4, pins={"zero": 3})
    (note,) = (n for n in chosen.notes if n.startswith("the space that was searched"))
    for part in ("4 devices", "zero=3", "only what this version runs", "nothing offloaded"):
        assert part in note
