"""Tensor parallelism on two axes against one device: every shape, family and combination, a world size per fork."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch

from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import BLOCK_SHAPES, Strategy
from hyper_parallel.runtime import World, clip_grad_norm_, forward_backward, launch, parallelize
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from tests.parity.universal import Setup, check_on_ranks
from tests.slow import slow_cells

pytestmark = pytest.mark.parity

LLAMA = Setup("llama", sequences=4, accumulation=2)
UNEVEN = Setup("llama", tied=True, sequences=3, seq_len=13)
BIAS = Setup("qwen2", sequences=4, accumulation=2)
HEAD_NORMS = Setup("qwen3", sequences=2, seq_len=13, config=(("num_key_value_heads", 2),))
GEMMA2 = Setup("gemma2", sequences=2)
GEMMA3 = Setup("gemma3_text", sequences=2, packed=True)
ONE_KEY_HEAD = Setup("mistral", sequences=2, config=(("num_key_value_heads", 1),))
ODD_VOCABULARY = Setup("llama", sequences=2, config=(("vocab_size", 97),))
PACKED_MLP = Setup("glm4", sequences=2, seq_len=13)
PACKED = Setup("phi3", sequences=2, seq_len=13)
NORMED_HEADS = Setup("olmo2", sequences=2, seq_len=13, config=(("num_key_value_heads", 2),))
SINKS = Setup("gpt_oss", sequences=2, config=(("experts_implementation", "eager"),))
MOE = Setup("qwen3_moe", sequences=4, seq_len=13)
LATENT = Setup("deepseek_v3", sequences=4, seq_len=13)
SIXTEEN = Setup(
    "llama", sequences=2, seq_len=11, tied=True, config=(("num_attention_heads", 16), ("num_hidden_layers", 1))
)  # fmt: skip

PAIRS = list(itertools.product(BLOCK_SHAPES, BLOCK_SHAPES))


def two(x: int, y: int, attention: str = "2d", mlp: str = "2d", **more: object) -> Strategy:
    return Strategy(tp_x=x, tp_y=y, attention_shape=attention, mlp_shape=mlp, **more)


TOKEN = {"attention_scatter": "token"}
AGAIN = {"gathered_inputs": "re-gather"}
FULL = {"recompute": "full"}

SHAPES = [(UNEVEN, two(2, 2, a, m, **AGAIN)) for a, m in PAIRS]
SHAPES += [(UNEVEN, two(2, 2, "2d", m, **TOKEN, **AGAIN)) for m in BLOCK_SHAPES]

CASES: dict[str, tuple[int, list[tuple[Setup, Strategy]]]] = {
    "every pair of shapes": (4, SHAPES),
    "one axis gathers again": (4, [(UNEVEN, Strategy(tp_x=4, **AGAIN)), (UNEVEN, Strategy(tp_x=4, **AGAIN, **FULL))]),
    "families": (4, [
        (BIAS, two(2, 2, "2d", "weight", **TOKEN, **FULL)),
        (GEMMA3, two(2, 2, "weight", "1d", **FULL)),
        (ODD_VOCABULARY, two(2, 2)),
    ]),
    "more families": (4, [
        (HEAD_NORMS, two(2, 2, "weight", "2d")),
        (ONE_KEY_HEAD, two(2, 2, "1d", "2d", **AGAIN)),
        (PACKED, two(2, 2)),
        (BIAS, two(2, 2, "weight", "weight", **FULL)),
        (HEAD_NORMS, two(2, 2, **FULL)),
        (GEMMA2, two(2, 2, **FULL)),
        (GEMMA2, two(2, 2, "2d", "1d", **TOKEN)),
        (GEMMA3, two(2, 2, **AGAIN)),
        (ONE_KEY_HEAD, two(2, 2)),
        (ONE_KEY_HEAD, two(2, 2, "weight", "weight")),
        (PACKED_MLP, two(2, 2, **AGAIN)),
        (PACKED, two(2, 2, "1d", "1d")),
        (NORMED_HEADS, two(2, 2, **FULL)),
        (NORMED_HEADS, two(2, 2, "1d", "weight")),
    ]),
    "experts": (4, [
        (MOE, two(2, 2, ep=4)),
        (MOE, two(2, 2, "weight", "weight", ep=2)),
        (MOE, two(2, 2, "1d", "1d", **FULL)),
        (LATENT, two(2, 2, "1d", "2d", ep=2)),
        (LATENT, two(2, 2, "1d", "weight", **FULL)),
        (SINKS, two(2, 2)),
        (SINKS, two(2, 2, "2d", "1d", **TOKEN)),
    ]),
    "eight ranks": (8, [
        (UNEVEN, two(2, 4)),
        (LLAMA, two(4, 2, **TOKEN, **AGAIN)),
        (LLAMA, two(2, 2, "weight", "weight", dp_shard=2, zero=1, recompute_layers=1, **FULL)),
        (LLAMA, two(2, 2, "weight", "2d", pp=2)),
    ]),
    "sixteen ranks": (16, [
        (SIXTEEN, two(8, 2, "2d", "weight", **AGAIN)),
    ]),
}  # fmt: skip


@slow_cells(
    "every pair of shapes",
    "more families",
    "experts",
    "eight ranks",
    "sixteen ranks",
    "one axis gathers again",
)
@pytest.mark.parametrize(
    "name",
    CASES,
)
def test_two_axes_repeat_one_device(name: str) -> None:
    world_size, cases = CASES[name]
    check_on_ranks(world_size, cases, timeout_s=110)


@pytest.mark.slow
def test_outputs_are_whole_and_text_is_the_same() -> None:
    setup = Setup("qwen3", config=(("num_key_value_heads", 2),))
    model = setup.build().eval()
    ids = setup.batch()["input_ids"][:2, :7]
    alone = parallelize(copy.deepcopy(model), setup.plan(Strategy()), World.join("cpu"))
    expected = alone(input_ids=ids).logits
    text = alone.generate(ids, max_new_tokens=3, do_sample=False)

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            for shapes in (("2d", "2d"), ("1d", "2d"), ("weight", "weight")):
                plan = setup.plan(two(2, 2, *shapes))
                split = parallelize(copy.deepcopy(model), plan, world)
                found = split(input_ids=ids, use_cache=False).logits
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
                if shapes[0] != "weight":
                    assert torch.equal(split.generate(ids, max_new_tokens=3, do_sample=False), text)
                else:
                    with pytest.raises(UnsupportedSharding, match="keys and values for generation"):
                        split.generate(ids, max_new_tokens=3, do_sample=False)

    launch(rank, 4, timeout_s=100)


@pytest.mark.slow
def test_checkpoints_move_between_one_and_two_axes(tmp_path: Path) -> None:
    setup = Setup("qwen3", tied=True)
    model = setup.build()
    chain = [
        Strategy(tp_x=4),
        two(2, 2),
        two(2, 2, "weight", "1d"),
        Strategy(dp_shard=2, tp_x=2),
    ]

    def whole(split: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        found = {}
        for name, param in split.named_parameters():
            for key, value in ("", param), *optimizer.state[param].items():
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{name}/{key}"] = full.detach().clone()
        return found

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            kept: dict[str, torch.Tensor] = {}
            for number, strategy in enumerate(chain):
                split = parallelize(copy.deepcopy(model), setup.plan(strategy), world)
                optimizer = torch.optim.AdamW(split.parameters(), lr=1e-2, fused=True)
                saver = Checkpointer(tmp_path / str(number), keep=1, asynchronous=False, fingerprint={"model": "m"})
                if number == 0:
                    batch = setup.batch()
                    forward_backward(split, [batch], int((batch["shift_labels"] != -100).sum()))
                    clip_grad_norm_(split, 1.0)
                    optimizer.step()
                    kept = whole(split, optimizer)
                else:
                    before = Checkpointer(
                        tmp_path / str(number - 1), keep=1, asynchronous=False,
                        fingerprint={"model": "m"},
                    )  # fmt: skip
                    before.load(split, optimizer)
                    for name, value in whole(split, optimizer).items():
                        assert torch.equal(value, kept[name]), f"{strategy}: {name}"
                saver.save(1, split, optimizer, {})

    launch(rank, 4, timeout_s=100)
