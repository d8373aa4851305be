"""Pipelines repeat one device: loss, norm, every gradient, every rank's bytes; all schedules, with every axis."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import World, launch
from tests.parity.universal import Reference, Setup, check
from tests.slow import slow_cells

pytestmark = [pytest.mark.parity, pytest.mark.timeout(300)]

SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipev": 2,
}  # fmt: skip
FOUR = (("num_hidden_layers", 4),)
# Masks, rotary angles and windows that depend on the layer's index, in an order that no cut respects.
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention",
         "full_attention", "sliding_attention", "sliding_attention", "full_attention"]  # fmt: skip
SETUPS = {
    "llama": Setup("llama", accumulation=4, config=FOUR),
    "qwen3-tied": Setup("qwen3", tied=True, accumulation=4, config=FOUR),
    "qwen3-tied-odd": Setup(
        "qwen3", tied=True, sequences=16, accumulation=4, seq_len=13, packed=True,
        config=(("num_hidden_layers", 5), ("vocab_size", 98), ("intermediate_size", 104)),
    ),
    "gemma3": Setup(
        "gemma3_text", tied=True, accumulation=8,
        config=(("num_hidden_layers", 8), ("layer_types", MIXED)),
    ),
    "mixtral": Setup("mixtral", accumulation=4, config=FOUR),
    "deepseek-dense": Setup(
        "deepseek_v3", accumulation=4, config=(*FOUR, ("first_k_dense_replace", 4))
    ),
}  # fmt: skip


def _all(**degrees: object) -> list[Strategy]:
    return [Strategy(schedule=s, virtual_stages=v, **degrees) for s, v in SCHEDULES.items()]


def _one(schedule: str, **degrees: object) -> Strategy:
    return Strategy(schedule=schedule, virtual_stages=SCHEDULES[schedule], **degrees)


GROUPS: dict[str, tuple[str, int, list[Strategy]]] = {
    "llama-2": ("llama", 2, _all(pp=2)),
    "deepseek-2": ("deepseek-dense", 2, [_one("1f1b", pp=2), _one("zbv", pp=2)]),
    "gemma3-4": ("gemma3", 4, _all(pp=4)),
    "tied-fsdp-4": (
        "qwen3-tied", 4,
        [_one(s, pp=2, dp_shard=2) for s in ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")],
    ),
    "tied-kept-4": (
        "qwen3-tied", 4,
        [_one(s, pp=2, dp_shard=2, reshard_after_forward=False) for s in ("1f1b", "zbv")]
        + [_one(s, pp=2, dp_replicate=2) for s in ("gpipe", "interleaved", "zb-h1")],
    ),
    "tied-tp-4": ("qwen3-tied", 4, [_one(s, pp=2, tp_x=2) for s in ("1f1b", "zbv", "dualpipev")]),
    "recompute-4": (
        "llama", 4,
        [_one("interleaved", pp=2, tp_x=2, recompute="full", recompute_layers=1)]
        + [_one("zb-h1", pp=2, tp_x=2, recompute="full")]
        + [_one(s, pp=2, dp_shard=2, recompute="full") for s in ("1f1b", "dualpipev")],
    ),
    "context-4": (
        "qwen3-tied", 4,
        [
            _one("zb-h1", pp=2, cp=2),
            _one("interleaved", pp=2, cp=2, cp_kind="ulysses"),
            _one("zbv", pp=2, cp=2, cp_kind="all_gather", recompute="full"),
        ],
    ),
    "experts-4": (
        "mixtral", 4,
        [
            _one("zbv", pp=2, dp_shard=2, ep=2, zero=1),
            _one("zb-h1", pp=2, tp_x=2, ep=2),
        ],
    ),
    "more-experts-4": ("mixtral", 4, [_one("1f1b", pp=2, dp_shard=2, ep=2)]),
    "grid-8": ("qwen3-tied", 8, [_one("zb-h1", pp=2, tp_x=2, tp_y=2, attention_shape="weight")]),
    "odd-8": (
        "qwen3-tied-odd", 8,
        [
            _one("dualpipev", pp=2, dp_replicate=2, dp_shard=2),
            _one("1f1b", pp=4, tp_x=2, stage_layers=(1, 2, 1, 1)),
        ],
    ),
}  # fmt: skip

SLOW = (
    "gemma3-4",
    "tied-fsdp-4",
    "tied-kept-4",
    "tied-tp-4",
    "context-4",
    "more-experts-4",
    "grid-8",
    "odd-8",
    "recompute-4",
)


@functools.cache
def _reference(name: str) -> Reference:
    return Reference(SETUPS[name])


@slow_cells("experts-4", "llama-2", *SLOW, "deepseek-2")
@pytest.mark.parametrize("group", GROUPS)
def test_pipelines_repeat_one_device(group: str) -> None:
    name, ranks, strategies = GROUPS[group]
    reference = _reference(name)

    def rank(_: int) -> set[str]:
        held: set[str] = set()
        with World.join("cpu") as world:
            for strategy in strategies:
                held |= set(check(reference, strategy, world).grads)
        return held

    found = launch(rank, ranks, timeout_s=200)
    assert set().union(*found) == set(reference.result.grads)


def test_model_code_may_read_the_device_of_an_embedding_on_another_stage() -> None:
    """Llama 4 moves ids to `embed_tokens.weight.device`, also on stages without the embedding."""
    config = AutoConfig.for_model(
        "llama4_text", vocab_size=96, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.set_experts_implementation("eager")
    ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))

    def step(words: str) -> tuple[float, float]:
        parallel = copy.deepcopy(model)
        hp.parallelize(parallel, hp.plan_of(model, words))
        loss = hp.forward_backward(parallel, [{"input_ids": row, "labels": row} for row in ids[:, None]])
        return loss.item(), hp.clip_grad_norm_(parallel, None).item()

    expected = step("")
    for found in launch(lambda _: step("pp=2 tp=2"), 4, timeout_s=120):
        assert found == pytest.approx(expected, rel=1e-10)
