"""Choosing: legality, the pick against brute force, runners-up, errors with a remedy."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_parallel as hp
from hyper_parallel.errors import (
    BatchMismatch,
    DegreesMismatch,
    DoesNotFit,
    NoLegalStrategy,
    NotDivisible,
    PlanMismatch,
    PlanUnreadable,
    UnknownKey,
)
from hyper_parallel.ir import Overlap, Plan, Strategy, Workload
from hyper_parallel.model import load_model
from hyper_parallel.planner import check_saved_plan, plan
from hyper_parallel.topology import Quantity, load_topology, preset_names
from hyper_parallel.units import format_seconds
from tests.cost.machines import machine, small_model
from tests.slow import slow_cells

pytestmark = pytest.mark.unit


@settings(max_examples=25, deadline=None)
@given(devices=st.sampled_from([1, 2, 3, 4, 8, 12, 16]), layers=st.integers(1, 6))
def test_every_plan_adds_up(devices, layers):
    chosen = plan(small_model(layers=layers), machine(), num_devices=devices)
    assert chosen.strategy.world_size == devices
    assert chosen.step_s == pytest.approx(sum(t.seconds for t in chosen.cost))
    w = chosen.workload
    sequences = w.microbatch * w.accumulation_steps * chosen.strategy.dp
    assert sequences * w.seq_len == w.tokens_per_step
    assert all(r.strategy.world_size == devices for r in chosen.rejected)
    fitting = [r for r in chosen.rejected if r.memory_bytes <= chosen.memory_capacity_bytes]
    assert all(r.step_s >= chosen.step_s * (1 - 1e-9) for r in fitting)


def test_a_machine_beyond_any_other_has_finite_steps():
    """With a peak of 1e24 FLOP/s no product is large enough to be fast: a step has over 2^63 nanoseconds."""
    h100 = load_topology("dgx-h100")
    peaks = {**h100.device.peak_flops, "bfloat16": Quantity(1e24, "test", "inferred")}
    device = replace(h100.device, peak_flops=peaks)
    made = plan("llama-3-8b", replace(h100, device=device), pins={"pp": 2})
    assert 1e8 < made.step_s < math.inf


def test_runners_up_say_why():
    chosen = plan("llama-3-70b", "dgx-h100", num_devices=64)
    assert 5 <= len(chosen.rejected) <= 7
    meshes = {tuple(r.strategy.degrees().items()) for r in chosen.rejected}
    assert len(meshes) == len(chosen.rejected)
    for r in chosen.rejected:
        assert r.reason.startswith(("slower by", "does not fit", "as fast"))


def test_terms_of_runners_up_are_compared_for_equal_tokens():
    """Microbatch and accumulation are fixed, so the tokens of a step are proportional to the data-parallel ranks."""
    best = plan("llama-3-8b", "dgx-h100", Workload(4096, microbatch=1, accumulation_steps=8), num_devices=8)
    compared = [r for r in best.rejected if " against " in r.reason and r.strategy.dp != best.strategy.dp]
    assert compared
    for r in compared:
        text, _, winner = r.reason.partition(": ")[2].partition(" against ")
        seconds = next(t.seconds for t in best.cost if text.startswith(t.name))
        assert winner == format_seconds(seconds * r.strategy.dp / best.strategy.dp)


def test_pins_are_kept_and_named():
    chosen = plan("llama-3-70b", "cloudmatrix384", num_devices=64, pins={"tp": 4, "pp": 2})
    assert (chosen.strategy.tp, chosen.strategy.pp) == (4, 2)
    with pytest.raises(UnknownKey, match="HP101"):
        plan("llama-3-8b", machine(), pins={"sharding": 3})


def test_not_executable_plans_say_so_and_executable_ones_have_layouts():
    later = plan("llama-3-8b", machine(), num_devices=16, pins={"zero": 0, "dp_shard": 4})
    assert not later.layouts
    assert any("cannot run this plan yet (zero=0" in n for n in later.notes)
    now = plan(
        "llama-3-8b", machine(), num_devices=16,
        pins={"pp": 1, "tp_y": 1, "zero": 3, "recompute": "none"},
    )  # fmt: skip
    assert set(now.layouts) == {p.name for b in load_model("llama-3-8b").blocks for p in b.params}
    assert not any("cannot run" in n for n in now.notes)


def test_given_strategy_is_priced_as_it_is():
    workload = Workload(512, 512 * 8)
    one = plan(small_model(), machine(), workload, strategy=Strategy(dp_shard=2, tp_x=4))
    assert one.strategy == Strategy(dp_shard=2, tp_x=4)
    assert str(one.layouts["model.layers.*.mlp.up_proj.weight"]) == "[mlp:tp_x.dp_shard, embed] @ hbm"
    assert not one.rejected


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        (Strategy(tp_x=3), NotDivisible),
        (Strategy(tp_x=2, tp_y=3), NotDivisible),
        (Strategy(pp=8), NotDivisible),
        (Strategy(cp=3, cp_kind="ulysses"), NotDivisible),
        (Strategy(dp_shard=4, ep=2), NotDivisible),
        (Strategy(dp_shard=3), BatchMismatch),
        (Strategy(pp=4, dp_shard=4), BatchMismatch),
    ],
)
def test_illegal_strategies_are_refused_with_a_hint(strategy, error):
    with pytest.raises(error) as caught:
        plan(small_model(), machine(), Workload(512, 512 * 8), strategy=strategy)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("overlap", "hint"), [(Overlap(), "parallel.ep=1"), (Overlap(ep_chunks=2), "parallel.ep=1 overlap=none")]
)
def test_expert_parallelism_needs_experts(overlap, hint):
    with pytest.raises(NotDivisible, match="ep=2 needs a mixture of experts") as caught:
        plan(small_model(), machine(), Workload(512, 512 * 8), strategy=Strategy(dp_shard=4, ep=2, overlap=overlap))
    assert caught.value.hint == hint


def test_degrees_that_do_not_multiply():
    with pytest.raises(DegreesMismatch) as caught:
        plan(small_model(), machine(), num_devices=8, strategy=Strategy(dp_shard=2, tp_x=2))
    assert caught.value.hint == "parallel.dp_shard=4"


def test_nothing_legal_names_the_nearest_pin_and_it_works():
    with pytest.raises(NoLegalStrategy) as caught:
        plan(small_model(), machine(), num_devices=16, pins={"tp_x": 16})
    assert caught.value.hint == 'pins={"tp_x": 8}'
    plan(small_model(), machine(), num_devices=16, pins={"tp_x": 8})


def test_batch_that_divides_nowhere_names_one_that_does():
    with pytest.raises(NoLegalStrategy) as caught:
        plan(small_model(), machine(), Workload(512, 1000), num_devices=8)
    assert caught.value.hint == "tokens_per_step=4096"


def test_nothing_fits_names_devices_that_do():
    with pytest.raises(DoesNotFit) as caught:
        plan("llama-3-405b", "cloudmatrix384", num_devices=8)
    name, devices = caught.value.hint.split("=")
    assert name == "num_devices"
    chosen = plan("llama-3-405b", "cloudmatrix384", num_devices=int(devices))
    assert chosen.memory_bytes <= chosen.memory_capacity_bytes
    with pytest.raises(DoesNotFit):
        plan("llama-3-405b", "cloudmatrix384", num_devices=int(devices) // 2)


def test_model_too_large_for_this_machine_names_another():
    with pytest.raises(DoesNotFit) as caught:
        plan("megatron-310b", "local", num_devices=2)
    assert caught.value.hint.startswith("a smaller model, or the topology dgx-h100 (machines: ")
    assert all(name in caught.value.hint for name in preset_names())


def test_given_strategy_that_does_not_fit_says_so():
    one = plan("llama-3-70b", machine(), Workload(8192, 8192), strategy=Strategy())
    assert any("exceeds the device's" in n for n in one.notes)


def test_plan_file_round_trip(tmp_path):
    chosen = plan("qwen3-30b-a3b", "dgx-h100", num_devices=16)
    chosen.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == chosen
    assert chosen.diff(again) == ""
    assert again.explain() == chosen.explain()


def test_a_plan_whose_order_is_not_one_of_the_axes_is_refused():
    text = plan(small_model(), machine(), num_devices=4).to_json()
    for wrong in ('"c"', '"pp"'):
        with pytest.raises(PlanUnreadable, match="strategy"):
            Plan.from_json(text.replace('"cp"', wrong))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step_s", 0.0),
        ("submodels", {"parts": [], "step_s": 1.0, "bubble": 0.0, "lower_s": 1.0}),
    ],
)
def test_a_plan_without_time_or_parts_is_refused(key, value):
    data = json.loads(plan(small_model(), machine(), num_devices=4).to_json())
    with pytest.raises(PlanUnreadable, match=key):
        Plan.from_json(json.dumps(data | {key: value}))


def test_a_plan_with_memory_of_an_unknown_tier_is_refused():
    text = plan(small_model(), machine(), num_devices=4).to_json()
    assert '"tier": "hbm"' in text
    with pytest.raises(PlanUnreadable, match="memory"):
        Plan.from_json(text.replace('"tier": "hbm"', '"tier": "h"', 1))


def test_a_plan_file_with_a_layout_that_uses_an_axis_twice_is_named(tmp_path):
    path = tmp_path / "plan.json"
    data = json.loads(plan(small_model(), machine(), num_devices=4).to_json())
    layout = next(v for v in data["layouts"].values() if len(v["axes"]) == 2)
    layout["axes"] = [["tp_x"], ["tp_x"]]
    path.write_text(json.dumps(data))
    with pytest.raises(PlanUnreadable) as caught:
        Plan.load(path)
    assert caught.value.where == str(path)


def test_saved_plan_of_another_model_or_strategy_is_refused():
    saved = plan(small_model(), machine(), num_devices=4)
    other_model = plan(small_model(layers=6), machine(), num_devices=4)
    other_strategy = plan(small_model(), machine(), num_devices=4, strategy=Strategy(tp_x=4))
    for other, difference in ((other_model, "model"), (other_strategy, "strategy")):
        with pytest.raises(PlanMismatch, match=f"HP307.*differ in {difference}"):
            check_saved_plan(saved, other, "plan.json")
    check_saved_plan(saved, saved, "plan.json")


def test_explanation_holds_every_part():
    text = plan("llama-3-70b", "dgx-h100", num_devices=64, pins={"pp": 1, "cp": 1}).explain()
    for part in (
        "step time",
        "peak memory",
        "why not",
        "layouts",
        "MFU",
        "notes",
        "workload assumed",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines()) < 240


@slow_cells("gpt3-175b", "qwen3-235b-a22b", "mixtral-8x22b")
@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral-8x22b", "qwen3-235b-a22b", "gpt3-175b"])
def test_well_known_models_get_a_plan_that_fits(name):
    chosen = hp.plan(name, "cloudmatrix384", num_devices=768)
    assert chosen.memory_bytes <= chosen.memory_capacity_bytes
    assert 0.1 < chosen.predicted_mfu < 0.7
