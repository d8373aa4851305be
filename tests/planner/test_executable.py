"""What `auto` and this machine may choose: all axes, as far as the layouts say yes, with the recipe's own choices."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hyper_parallel.config import Recipe
from hyper_parallel.cost import SHAPES
from hyper_parallel.errors import (
    Contradiction,
    HyperParallelError,
    NoLegalStrategy,
    NotDivisible,
    UnsupportedSharding,
)
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import spec_from_config
from hyper_parallel.planner import plan, plan_recipe
from hyper_parallel.planner.pins import check_pins
from hyper_parallel.planner.plan_builder import search
from hyper_parallel.planner.refinement import find_best
from hyper_parallel.planner.request import resolve
from hyper_parallel.planner.strategy_space import Space
from tests.cost.machines import machine, small_model
from tests.planner.draws import moe_model
from tests.planner.exhaustive import every_strategy, least

pytestmark = pytest.mark.unit

SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 4096,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
MLA = {
    "model_type": "deepseek_v3", "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 128, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 8,
}  # fmt: skip
MODELS = {
    "dense": small_model,
    "experts": moe_model,
    "latent": lambda: spec_from_config({**SIZES, **MLA}, name="latent"),
    "packed": lambda: spec_from_config({**SIZES, "model_type": "phi3", "pad_token_id": 0}, name="phi3"),
}


def request_of(name, supernode=None, **pins):
    """What this version can run of a small model on 8 devices."""
    request = resolve(MODELS[name](), supernode or machine(), Workload(512, 512 * 16), 8)
    return replace(request, pins=check_pins(pins), executable=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pins", [{}, {"tp_y": 2, "zero": 3}, {"cp": 2, "tp": 4}])
def test_what_is_chosen_has_layouts_and_is_the_best_that_has(name, pins):
    request = request_of(name, machine(cluster_bytes_s=5e9), **pins)
    best = least(request)
    outcome = find_best(request, keep=3)
    assert outcome.fits
    assert np.isfinite(best)
    assert outcome.search.rows["per_token_s"].min() == pytest.approx(best, rel=1e-9)
    for one in outcome.ranked:
        request.shard(one.strategy)
        assert one.strategy.etp is None


def test_both_axes_and_every_kind_of_context_parallelism_may_be_chosen():
    rows = np.array(list(every_strategy(request_of("dense"))))
    assert {*rows[:, 5]} == {1, 2, 4}
    kinds = {(cp, u) for cp, u in rows[:, [3, 10]].tolist()}
    assert {(4, 1), (4, 2), (4, 4), (2, 2)} <= kinds


def test_latent_attention_on_two_axes_keeps_the_one_shape_it_has():
    plan = search(request_of("latent", tp_y=2))
    assert (plan.strategy.tp_y, plan.strategy.attention_shape) == (2, "1d")
    with pytest.raises(NoLegalStrategy, match="latent attention"):
        search(request_of("latent", tp_y=2, attention_shape="2d"))


def test_tensor_parallelism_that_layouts_refuse_is_counted_with_their_reason():
    rules = (("model.layers.*.mlp.up_proj.weight", "colwise"),)
    request = replace(request_of("dense", tp=2), model=replace(small_model(), rules=rules))
    with pytest.raises(NoLegalStrategy, match="no rowwise projection of its layer"):
        search(request)


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))

    def make(devices=8, **parallel):
        values = {
            "model": {"path": str(tmp_path)}, "topology": "dgx-h100", "data": {"seq_len": 512},
            "training": {"microbatch": 1, "accumulation_steps": 4},
            "parallel": {"auto": True, "world_size": devices, **parallel},
        }  # fmt: skip
        return Recipe.model_validate(values)

    return make


@pytest.mark.parametrize(
    "parallel",
    [
        {"cp": 4, "cp_kind": "ring"},
        {"cp": 4, "cp_kind": "ulysses"},
        {"cp": 4, "cp_kind": "hybrid"},
        {"cp": 4, "cp_kind": "hybrid", "cp_ulysses": 2},
        {"cp": 4, "cp_kind": "all_gather"},
        {"tp_x": 2, "tp_y": 2, "attention_shape": "weight"},
        {"tp_x": 2, "tp_y": 2, "attention_shape": "1d", "mlp_shape": "1d"},
        {"tp_x": 2, "tp_y": 2, "mlp_shape": "weight", "gathered_inputs": "re-gather"},
        {"tp_x": 2, "tp_y": 2, "attention_shape": "2d", "attention_scatter": "token"},
        {"pp": 2, "schedule": "zb-h1"},
        {"pp": 2, "stage_layers": [1, 2]},
    ],
)
def test_choices_of_a_recipe_are_kept(recipe, parallel):
    chosen = plan_recipe(recipe(**parallel)).strategy
    for name, value in parallel.items():
        got = getattr(chosen, name)
        assert (list(got) if name == "stage_layers" else got) == value
    if parallel.get("cp_kind") == "hybrid":
        assert chosen.cp_ulysses == 2


def test_virtual_stages_of_a_recipe_are_kept(recipe, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama", "num_hidden_layers": 8}))
    for parallel in (
        {"pp": 2, "schedule": "zbv"},
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 4},
    ):
        chosen = plan_recipe(recipe(**parallel)).strategy
        assert chosen.schedule == parallel["schedule"]
        assert chosen.virtual_stages == parallel.get("virtual_stages", 2)


@pytest.mark.parametrize(
    ("parallel", "error"),
    [
        ({"cp": 4, "cp_kind": "ring", "cp_ulysses": 2}, Contradiction),
        ({"stage_layers": [2, 1]}, Contradiction),
        ({"pp": 2, "stage_layers": [1, 1, 1]}, Contradiction),
        ({"pp": 2, "stage_layers": [4, 4]}, NotDivisible),
        ({"schedule_file": "actions.csv"}, Contradiction),
        ({"virtual_stages": 2}, UnsupportedSharding),
        ({"pp": 2, "schedule": "zbv"}, HyperParallelError),
        ({"cp": 2, "attention_scatter": "token", "attention_shape": "2d", "tp_x": 2, "tp_y": 2},
         NoLegalStrategy),
    ],
)  # fmt: skip
def test_choices_that_cannot_be_are_refused(recipe, parallel, error):
    with pytest.raises(error) as caught:
        plan_recipe(recipe(**parallel))
    assert caught.value.hint


def test_auto_takes_two_axes_where_they_are_faster():
    chosen = plan_recipe(
        Recipe.model_validate(
            {
                "model": {"path": "llama-3-405b"},
                "topology": "cloudmatrix384",
                "data": {"seq_len": 8192},
                "training": {"tokens_per_step": 2048 * 8192},
                "parallel": {"auto": True, "world_size": 2048},
            }
        )
    )
    assert chosen.strategy.tp_y > 1
    assert chosen.layouts


def test_layouts_that_are_pinned_and_refused_are_no_lack_of_memory():
    """Some of these strategies do not fit, those that do need layouts that GPT-2's stacked projections have not."""
    pins = {"tp_x": 4, "tp_y": 2, "cp": 2, "microbatch": 1, "dp_replicate": 1}
    made = plan("megatron-310b", "cloudmatrix384", num_devices=256, pins=pins)
    assert (made.strategy.tp_x, made.strategy.tp_y) == (4, 2)
    assert any("cannot run this plan" in note for note in made.notes)


def whole_attention():
    """A model whose attention no rule cuts: it stays whole under tensor parallelism, which then goes without pp."""
    rules = tuple(
        (f"model.layers.*.mlp.{name}_proj", style)
        for name, style in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))
    )
    return replace(small_model(layers=8), rules=rules)


def test_no_answer_is_a_pipeline_that_the_layouts_refuse():
    """With slow links between nodes a pipeline of tensor-parallel nodes is fastest, and refused (HP205)."""
    asked = (whole_attention(), machine(cluster_bytes_s=1e8), Workload(512, 512 * 64))
    request = resolve(*asked, 16)
    for pins in ({}, {"tp": 2}, {"tp": 4}):
        made = plan(*asked, num_devices=16, pins=pins)
        assert made.layouts
        for strategy in (made.strategy, *(r.strategy for r in made.rejected)):
            assert request.refusal(strategy) is None
    assert made.strategy.pp == 1
    faster = plan(*asked, num_devices=16, pins={"tp": 4}, all_layouts=True)
    assert faster.strategy.pp > 1
    gain = 1.0 - faster.step_s / made.step_s
    (note,) = (n for n in made.notes if "which this version cannot run" in n)
    assert f"{gain:.1%} shorter" in note
    assert "tensor parallelism supports one axis only" in note


@pytest.mark.parametrize("axes", [{"pp": 2}, {"ep": 2}, {"dp_shard": 2}, {"cp": 2}, {}])
def test_the_search_and_the_layouts_refuse_the_same_degrees(axes):
    for model in (whole_attention(), *(make() for make in MODELS.values())):
        request = replace(resolve(model, machine(), Workload(512, 512 * 16), 8), executable=True)
        space = Space(request)
        strategy = Strategy(tp_x=2, **{**axes, **({"dp_shard": 2} if "ep" in axes else {})})
        degrees = (strategy.dp_shard, strategy.cp, 2, 1)
        block = (SHAPES.index("2d"), SHAPES.index("2d"), strategy.ep, 1, 1, 0, 0)
        found = space.refusal_of(*degrees, *block, pp=strategy.pp)
        assert found == request.refusal(strategy)
