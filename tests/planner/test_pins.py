"""The table of keys that can be pinned agrees with the recipe and with the columns that the cost model reads."""

from __future__ import annotations

import json

import pytest

from hyper_parallel.config import DEGREES, Parallel, Recipe
from hyper_parallel.cost import RECOMPUTE, SCHEDULES, SHAPES, Candidates
from hyper_parallel.errors import BadValue, NoLegalStrategy, UnknownKey
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner import plan, plan_recipe
from hyper_parallel.planner.pins import EXCLUDABLE, PINNABLE, check_exclusions, check_pins
from hyper_parallel.units import format_bytes
from tests.cost.machines import machine, small_model

pytestmark = pytest.mark.unit


def test_every_degree_and_choice_of_a_recipe_can_be_pinned():
    left_out = {
        "auto",
        "rules",
        "schedule_file",
        "stage_layers",
        "submodels",
        "world_size",
        "one_order",
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
    with pytest.raises(UnknownKey) as caught:
        check_pins({"tpx": 8})
    assert (caught.value.where, caught.value.hint) == ("--pin", "--pin tp_x=8")
    with pytest.raises(UnknownKey) as caught:
        plan(small_model(), machine(), pins={"tpx": 8})
    assert (caught.value.where, caught.value.hint) == ("pins", 'pins={"tp_x": 8}')


def test_offload_can_be_excluded_and_hints_name_the_section_of_a_key():
    asked = (small_model(), machine(), Workload(512, 512 * 8))
    free = plan(*asked, num_devices=4)
    assert plan(*asked, num_devices=4, exclude=("offload",)).strategy == free.strategy
    with pytest.raises(NoLegalStrategy) as caught:
        plan(*asked, num_devices=4, pins={"microbatch": 3})
    assert caught.value.hint == 'pins={"microbatch": 2}'


def test_an_exclusion_agrees_with_a_pin_of_the_same_value():
    assert check_exclusions(("cp", "recompute"), {"cp": "1", "recompute": "none"}) == {
        "cp": 1,
        "recompute": 0,
    }
    assert check_exclusions(("dp",), {}) == {"dp_replicate": 1, "dp_shard": 1}
    for name, value in (("cp", "2"), ("recompute", "full")):
        with pytest.raises(BadValue, match="excluded and pinned"):
            check_exclusions((name,), {name: value})


def test_a_pin_of_tp_is_a_product_with_a_pin_of_tp_x():
    assert check_pins({"tp": 8}) == {"tp": 8, "tp_y": 1}
    assert check_pins({"tp": 8, "tp_y": 2}) == {"tp_x": 8, "tp_y": 2}
    assert check_pins({"tp": 8, "tp_x": 4}) == {"tp": 8, "tp_x": 4}


def test_a_plan_says_what_space_was_searched():
    chosen = plan(small_model(), machine(), Workload(512, 512 * 8), num_devices=4, pins={"zero": 3})
    (note,) = (n for n in chosen.notes if n.startswith("the space that was searched"))
    for part in ("4 devices", "zero=3", "only what this version runs", "nothing offloaded"):
        assert part in note


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("devices", [4, 8])
def test_a_pinned_stage_of_zero_is_answered_with_ranks_that_share_states(zero, devices):
    """Without the pin, and with it as a mere choice, the fastest plan on slow links has no data parallelism."""
    asked = (small_model(), machine(node_bytes_s=1e9, cluster_bytes_s=1e8), Workload(512, 512 * 8))
    for pins in ({"zero": zero}, {"zero": zero, "microbatch": 1}):
        chosen = plan(*asked, num_devices=devices, pins=pins).strategy
        assert chosen.dp_shard * chosen.cp > 1
        assert chosen.zero_stage == zero


def test_a_stage_of_zero_that_no_ranks_can_share_is_refused_with_a_pin_that_helps():
    asked = (small_model(), machine(), Workload(512, 512 * 8))
    with pytest.raises(NoLegalStrategy, match="zero=2 shards nothing") as caught:
        plan(*asked, num_devices=4, pins={"zero": 2, "tp": 4})
    assert caught.value.hint
    pins = json.loads(caught.value.hint.removeprefix("pins="))
    chosen = plan(*asked, num_devices=4, pins={"zero": 2, "tp": 4, **pins}).strategy
    assert chosen.dp_shard * chosen.cp > 1


def test_a_recipe_says_how_states_are_shared_where_they_are():
    values = {
        "model": {"path": "llama-3-8b"}, "topology": "dgx-b200", "data": {"seq_len": 512},
        "parallel": {"auto": True, "world_size": 1, "reshard_after_forward": False},
    }  # fmt: skip
    assert plan_recipe(Recipe.model_validate(values)).strategy.dp_shard == 1


def test_what_does_not_fit_has_its_full_price_and_fits_in_no_other_way():
    """Under pins the search knew a lower bound of it only: of a pipeline without schedule, stages and sharding."""
    asked = ("llama-3-70b", "dgx-h100")
    chosen = plan(*asked, num_devices=64, pins={"microbatch": 8})
    lost = [r for r in chosen.rejected if r.reason.startswith("does not fit")]
    assert lost
    for one in lost:
        workload = Workload(8192, chosen.workload.tokens_per_step, microbatch=8)
        given = plan(*asked, workload, strategy=one.strategy)
        assert one.step_s == pytest.approx(given.step_s, rel=1e-9)
        assert one.step_s < chosen.step_s
        assert one.memory_bytes > chosen.memory_capacity_bytes
        assert "at microbatch 8" in one.reason
        degrees = {**one.strategy.degrees(), "microbatch": 1}
        if "fits at microbatch 1" in one.reason:
            plan(*asked, num_devices=64, pins=degrees)


def test_the_note_of_offload_names_the_bytes_that_stay_on_the_device():
    model = small_model(4, 1024)
    for objective in ("step-time", "memory"):
        made = plan(
            model, "dgx-h100", Workload(512, 512 * 16), num_devices=2, offload=True, objective=objective,
        )  # fmt: skip
        notes = [note for note in made.notes if note.startswith("offload:")]
        assert all(f"offload: {format_bytes(made.memory_bytes)} on" in note for note in notes)
        assert bool(notes) == (objective == "memory")


def test_a_pin_of_accumulation_steps_is_the_number_of_a_workload_without_tokens():
    workload = Workload(512, microbatch=1)
    chosen = plan(small_model(), machine(), workload, num_devices=4, pins={"accumulation_steps": 4})
    assert chosen.workload.accumulation_steps == 4


@pytest.mark.parametrize(
    ("pins", "hint"),
    [
        ({"schedules": "foo"}, {"schedule": "gpipe"}),
        ({"schedules": "zbv"}, {"schedule": "zbv"}),
        ({"tpx": "8"}, {"tp_x": 8}),
        ({"tpx": "a"}, {"tp_x": 1}),
        ({"tp": "²"}, {"tp": 1}),
        ({"pp": "1" * 5000}, {"pp": 1}),
        ({"vpp": 0}, {"vpp": 1}),
        ({"virtual_stages": 0}, {"virtual_stages": 1}),
    ],
)
def test_the_hint_of_a_refused_pin_is_allowed(pins, hint):
    with pytest.raises((BadValue, UnknownKey)) as caught:
        plan(small_model(), machine(), pins=pins)
    assert caught.value.hint == f"pins={json.dumps(hint)}"
    check_pins(hint)


def test_two_values_of_one_choice_are_refused():
    assert check_pins({"virtual_stages": 2, "vpp": "2"}) == {"vpp": 2}
    with pytest.raises(BadValue, match="another name") as caught:
        plan(small_model(), machine(), pins={"virtual_stages": 2, "vpp": 4})
    assert (caught.value.where, caught.value.hint) == ("pins", "leave out the pin vpp=4")


def test_the_note_of_a_search_for_memory_states_its_accuracy():
    made = plan(small_model(), machine(), Workload(512, 512 * 8), num_devices=4, objective="memory")
    assert any("by at most 1/1024" in note for note in made.notes)
    assert not any("nothing better" in note for note in made.notes)


def test_a_batch_that_cannot_be_divided_is_refused_without_offload():
    with pytest.raises(NoLegalStrategy):
        plan(small_model(), machine(), Workload(4096, tokens_per_step=4097), num_devices=4, exclude=("offload",))


def test_more_recomputed_layers_than_layers_cost_no_more_than_all():
    def step_s(layers: int) -> float:
        strategy = Strategy(dp_shard=8, recompute="full", recompute_layers=layers)
        return plan("llama-3-8b", "dgx-h100", Workload(4096), strategy=strategy).step_s

    assert step_s(100) == step_s(32)
