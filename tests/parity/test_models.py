"""Families whose attention or MLP is no Llama's repeat one device: loss, norm, every gradient, bytes.

Packed projections cut part by part or exchanged, norms over all heads, latent attention, sinks, and experts.
"""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hyper_parallel.backends.torch.model_layouts import resolve_layouts
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Rule, Strategy
from hyper_parallel.runtime import World, launch, parallelize
from tests.parity.plain import Plain
from tests.parity.universal import Reference, Setup, check, check_on_ranks
from tests.slow import slow_cells

pytestmark = [pytest.mark.parity, pytest.mark.timeout(200)]


def _of(family: str, **config: object) -> Setup:
    return Setup(family, config=tuple(config.items()))


TP = Strategy(tp_x=4)
FSDP = Strategy(dp_shard=2, tp_x=2)
HSDP = Strategy(dp_replicate=2, tp_x=2, recompute="full")
AGAIN = Strategy(tp_x=4, recompute="full")
FSDP_AGAIN = Strategy(dp_shard=2, tp_x=2, recompute="full")

CASES = {
    "phi3-apart": (_of("phi3", num_key_value_heads=8), (TP, FSDP, HSDP)),
    "phi3-exchanged": (Setup("phi3", tied=True, accumulation=2), (FSDP, AGAIN)),
    "phi3-shared-heads": (_of("phi3", num_key_value_heads=2), (TP, HSDP)),
    # Columns that FSDP does not divide: gate and up are exchanged too; tokens that tp does not divide.
    "phi3-uneven": (Setup("phi3", seq_len=13, config=(("hidden_size", 65),)), (TP, FSDP)),
    "glm4": (Setup("glm4", packed=True), (TP, FSDP_AGAIN)),
    "glm": (_of("glm", num_key_value_heads=2), (FSDP,)),
    "olmo3": (Setup("olmo3"), (FSDP,)),
    "glm4-shared-heads": (_of("glm4", num_key_value_heads=2), (TP,)),
    "olmo2": (Setup("olmo2", tied=True), (TP, FSDP_AGAIN)),
    "olmo2-shared-heads": (_of("olmo2", num_key_value_heads=2), (TP, AGAIN)),
    "latent": (_of("deepseek_v3", first_k_dense_replace=2), (TP, FSDP_AGAIN)),
    "latent-full-query": (
        _of("deepseek_v3", first_k_dense_replace=2, q_lora_rank=None, attention_bias=True),
        (TP, FSDP),
    ),
    "deepseek_v3": (Setup("deepseek_v3", packed=True), (TP, FSDP)),
    "gpt_oss": (_of("gpt_oss", num_key_value_heads=2), (TP, FSDP_AGAIN)),
    "mixtral": (Setup("mixtral"), (TP, FSDP)),
}
REPLICATED = {f"{name}-replicated": (CASES[name][0], (FSDP, HSDP)) for name in ("glm4", "olmo2", "latent", "gpt_oss")}
CASES |= REPLICATED
SLOW = (
    *REPLICATED,
    "phi3-apart", "phi3-uneven", "glm4-shared-heads", "olmo2-shared-heads", "latent-full-query", "deepseek_v3",
    "mixtral",
)  # fmt: skip


@slow_cells("glm4", "glm", "olmo2", "olmo3", "phi3-exchanged", "phi3-shared-heads", *SLOW, "gpt_oss")
@pytest.mark.parametrize("name", CASES)
def test_family_repeats_one_device(name: str) -> None:
    setup, strategies = CASES[name]
    check_on_ranks(4, [(setup, strategy) for strategy in strategies], timeout_s=180)


@slow_cells("strategies0")
@pytest.mark.parametrize(
    "strategies",
    [
        (TP, Strategy(dp_replicate=2, dp_shard=2, recompute="full"), FSDP_AGAIN),
        pytest.param((FSDP,), marks=pytest.mark.slow),
    ],
)
def test_a_plain_module_repeats_one_device_under_rules_of_its_user(
    strategies: tuple[Strategy, ...],
) -> None:
    reference = Reference(Plain(accumulation=2))

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            for strategy in strategies:
                check(reference, strategy, world, bytes_too=False)

    launch(rank, 4, timeout_s=100)


def test_recompute_makes_the_layers_of_a_plain_module_again() -> None:
    setup = Plain()
    runs = {}
    with World.join("cpu") as world:
        for strategy in (Strategy(), Strategy(recompute="full")):
            model, calls = setup.build(), []
            for block in model.blocks:
                block.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            parallelize(model, setup.plan(strategy), world)(**setup.batch(), num_items_in_batch=1).loss.backward()
            runs[strategy.recompute] = len(calls) / len(model.blocks)
        assert runs == {"none": 1, "full": 2}
        plan = dataclasses.replace(
            setup.plan(Strategy(recompute="full")), strategy=Strategy(recompute="full"), layouts={}
        )
        with pytest.raises(UnsupportedSharding, match="a list of layers of one class"):
            parallelize(nn.Sequential(), plan, world)


def test_styles_that_need_a_config_are_refused_for_a_plain_module() -> None:
    model = nn.Sequential()
    model.add_module("qkv", nn.Linear(8, 24))
    model.add_module("out", nn.Linear(8, 8))
    strategy = Strategy(tp_x=2, rules=(Rule("qkv", "qkv"), Rule("out", "rowwise")))
    plan = dataclasses.replace(Plain().plan(strategy), strategy=strategy)

    with pytest.raises(UnsupportedSharding, match="style `qkv` splits at attention heads"):
        resolve_layouts(model, plan)


def test_an_output_that_fsdp_cannot_look_into_is_refused() -> None:
    setup = Plain()
    model = setup.build()
    inner = model.forward
    model.forward = lambda **batch: SimpleNamespace(loss=inner(**batch).loss)

    def rank(_: int) -> str:
        with World.join("cpu") as world:
            parallelize(model, setup.plan(Strategy(dp_shard=2)), world)
            with pytest.raises(UnsupportedSharding, match="cannot traverse") as error:
                model(**setup.batch(), num_items_in_batch=1)
            return str(error.value.got)

    assert launch(rank, 2, timeout_s=180) == ["SimpleNamespace", "SimpleNamespace"]


@slow_cells("deepseek_v3", "olmo2", "phi3")
@pytest.mark.parametrize(
    "setup",
    [
        _of("phi3", num_key_value_heads=2),
        _of("olmo2", num_key_value_heads=2),
        _of("deepseek_v3", first_k_dense_replace=2),
        Setup("gpt_oss"),
    ],
    ids=lambda s: s.family,
)
def test_generation_repeats_one_device(setup: Setup) -> None:
    """The cache holds the heads of a rank; logits are whole on every rank."""
    model = setup.build().eval()
    ids = setup.batch()["input_ids"][:2, :7]
    wanted = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    with World.join("cpu") as world:
        alone = parallelize(copy.deepcopy(model), setup.plan(Strategy()), world)
        expected = alone.generate(ids, output_logits=True, **wanted)

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            split = parallelize(copy.deepcopy(model), setup.plan(TP), world)
            found = split.generate(ids, output_logits=True, **wanted)
        assert torch.equal(found.sequences, expected.sequences)
        for got, want in zip(found.logits, expected.logits, strict=True):
            # Logits to generate with are float32.
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)

    launch(rank, 4, timeout_s=100)
