"""Recipes: explicit degrees are kept, `auto` chooses among what can run."""

from __future__ import annotations

import json

import pytest

from hyper_parallel.config import Recipe
from hyper_parallel.errors import BadValue, DegreesMismatch, DoesNotFit, NotDivisible, UnsupportedSharding
from hyper_parallel.planner import parse_strategy, plan_recipe
from hyper_parallel.units import GiB

pytestmark = pytest.mark.unit


@pytest.fixture
def recipe(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    def make(**sections):
        values = {"model": {"path": str(tmp_path)}, "topology": "local-cpu", **sections}
        return Recipe.model_validate(values)

    return make


def test_auto_chooses_executable_axes_for_one_sequence_per_rank(recipe):
    chosen = plan_recipe(recipe())
    assert chosen.strategy.world_size == 4
    assert (chosen.strategy.pp, chosen.strategy.cp, chosen.strategy.tp_y, chosen.strategy.ep) == (1,) * 4
    assert chosen.layouts
    assert chosen.workload.tokens_per_step == 4 * 512


def test_auto_keeps_what_the_recipe_names(recipe):
    chosen = plan_recipe(
        recipe(
            parallel={"auto": True, "tp": 2, "reshard_after_forward": True},
            training={"recompute": "full", "microbatch": 2, "accumulation_steps": 2},
        ),
        world_size=8,
    )
    assert chosen.strategy.tp_x == 2
    assert chosen.strategy.recompute == "full"
    assert chosen.strategy.reshard_after_forward
    assert (chosen.workload.microbatch, chosen.workload.accumulation_steps) == (2, 2)


def test_explicit_degrees_are_what_runs(recipe):
    chosen = plan_recipe(recipe(parallel={"dp_replicate": 2, "tp": 2}))
    assert chosen.strategy.degrees() | {} == {
        "pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp_x": 2, "tp_y": 1, "ep": 1,
    }  # fmt: skip
    assert chosen.workload.tokens_per_step == 2 * 512
    with pytest.raises(DegreesMismatch) as caught:
        plan_recipe(recipe(parallel={"tp": 2}), world_size=8)
    assert caught.value.hint == "parallel.dp_shard=4"
    assert plan_recipe(recipe(parallel={"cp": 2})).layouts
    with pytest.raises(UnsupportedSharding, match="HP205"):
        plan_recipe(recipe(parallel={"pp": 2, "schedule": "zbv"}))
    with pytest.raises(NotDivisible, match="HP203"):
        plan_recipe(recipe(parallel={"tp": 3}))


def test_number_formats(recipe):
    formats = {}
    for dtype in ("float64", "float32", "bfloat16"):
        w = plan_recipe(recipe(training={"dtype": dtype})).workload
        formats[dtype] = (w.compute_dtype, w.param_dtype, w.reduce_dtype)
    assert formats == {
        "float64": ("float64",) * 3,
        "float32": ("float32",) * 3,
        "bfloat16": ("bfloat16", "float32", "float32"),
    }


def test_rules_reach_the_layouts(recipe):
    rules = {"model.layers.*.mlp.*": "replicate"}
    chosen = plan_recipe(recipe(parallel={"auto": True, "tp": 2, "rules": rules}))
    assert "tp_x" not in chosen.layouts["model.layers.*.mlp.up_proj.weight"].sharding_axes
    assert "tp_x" in chosen.layouts["model.layers.*.self_attn.q_proj.weight"].sharding_axes


SMALL = """
name: small
description: Devices too small for the model, with host memory beside them.
num_devices: 2
device:
  name: cpu
  kind: cpu
  peak_tflops: {{float32: {one}, bfloat16: {one}}}
  memory_gib: {device}
  memory_gb_s: {one}
tiers:
  - {{name: node, size: 0, kind: host, gb_s: {one}, latency_us: {one}}}
pools:
  - {{kind: dram, shared_by: 2, capacity_gb: {host}, gb_s: {one}}}
"""


def test_auto_makes_no_more_layers_again_than_memory_asks_for(recipe, tmp_path):
    one = {"dp_shard": 2, "reshard_after_forward": True}
    again = {"recompute": "full"}
    plain, full = (plan_recipe(recipe(parallel=one, training=t)) for t in ({}, again))
    middle = (plain.memory_bytes + full.memory_bytes) / 2 / GiB
    topology = _machine(tmp_path, middle, 0.001)
    chosen = plan_recipe(recipe(parallel={"auto": True, **one}, topology=topology))
    assert chosen.strategy.recompute_layers == 2
    assert chosen.layouts
    explicit = plan_recipe(recipe(parallel=one, training={**again, "recompute_layers": 2}, topology=topology))
    assert explicit.strategy == chosen.strategy
    assert (explicit.step_s, explicit.memory_bytes) == (chosen.step_s, chosen.memory_bytes)


def _machine(folder, device, host):
    """Path of a topology of two devices; memory in GiB."""
    values = {"one": 1, "device": device, "host": host}
    quantities = {name: f"{{value: {value}, source: test, certainty: general}}" for name, value in values.items()}
    path = folder / "machine.yaml"
    path.write_text(SMALL.format(**quantities))
    return str(path)


def test_with_offload_auto_counts_on_host_memory(recipe, tmp_path):
    """Only when nothing fits the device, and the plan says so."""

    def machine(device, host):
        return {"topology": _machine(tmp_path, device, host)}

    offload = {"budget": "auto"}
    with pytest.raises(DoesNotFit):
        plan_recipe(recipe(**machine(0.01, 8)))
    chosen = plan_recipe(recipe(**machine(0.01, 8), offload=offload))
    assert chosen.memory_bytes <= chosen.memory_capacity_bytes
    assert chosen.strategy.world_size == 2
    away = {t.name: t.bytes for t in chosen.memory if t.tier == "dram"}
    assert sum(away.values()) > 0
    assert any(t.name == "offload copies" for t in chosen.cost)
    assert any("in host memory at the peak" in note for note in chosen.notes)
    with pytest.raises(DoesNotFit):
        plan_recipe(recipe(**machine(0.01, 0.01), offload=offload))
    with pytest.raises(DoesNotFit):
        plan_recipe(recipe(**machine(0.01, 8), offload={**offload, "dram": 10**7}))
    fits = plan_recipe(recipe(**machine(64, 8), offload=offload))
    assert not any("host memory" in note for note in fits.notes)
    # A budget below what is there is kept as well.
    budget = {"budget": fits.memory_bytes * 3 // 4}
    small = plan_recipe(recipe(**machine(64, 8), offload=budget))
    assert small.memory_capacity_bytes == budget["budget"] >= small.memory_bytes
    slow = plan_recipe(recipe(**machine(64, 8), offload={**budget, "bandwidth": 10**6}))
    assert slow.step_s > small.step_s >= fits.step_s


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("tp=2 parallel.tp=4", "is set twice", "parallel.tp=4"),
        ("rules.a=colwise dp_shard=2 rules.a=rowwise", "is set twice", "rules.a=rowwise dp_shard=2"),
        ("dp_shard=2 submodels=auto", "not of a strategy", "dp_shard=2"),
        ("parallel.one_order=false tp=2", "not of a strategy", "tp=2"),
        ("submodels=auto", "not of a strategy", "dp_shard=4 tp=2"),
    ],
)
def test_repeated_keys_and_keys_of_a_recipe_are_refused_in_a_strategy(text, problem, hint):
    with pytest.raises(BadValue, match=problem) as caught:
        parse_strategy(text)
    assert caught.value.hint == hint
    parse_strategy(hint)


def test_a_strategy_refuses_two_sizes_of_one_axis():
    with pytest.raises(BadValue, match="two names of one degree"):
        parse_strategy("tp=2 tp_x=4")
