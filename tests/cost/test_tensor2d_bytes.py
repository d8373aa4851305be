"""Bytes of two tensor-parallel axes against numbers worked out elsewhere; parity tests compare them with real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cost import step_collectives
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import ModelSpec, load_model
from hyper_parallel.shard import family_rules, plan_layouts

pytestmark = pytest.mark.unit

ONCE = ("gradients of whole parameters", "gradient norm")


def layouts_of(spec: ModelSpec, strategy: Strategy):
    params = {p.name: p for block in spec.blocks for p in block.params}
    attention = next(b.attention for b in spec.blocks if b.attention)
    return plan_layouts(
        [(p.name, p.shape, p.dims) for p in params.values()], family_rules(spec.family), strategy,
        num_heads=attention.num_heads, num_kv_heads=attention.num_kv_heads,
        head_dim=attention.qk_head_dim, vocab_size=spec.vocab_size,
    ).layouts  # fmt: skip


def layer_bytes(spec: ModelSpec, strategy: Strategy, tokens: int) -> int:
    """Bytes of a layer in forward and backward, inputs gathered again, from models of two layers and of one."""
    strategy = replace(strategy, gathered_inputs="re-gather")
    workload = Workload(tokens, microbatch=1, accumulation_steps=1)
    sent = []
    for layers in (2, 1):
        blocks = tuple(replace(b, layers=b.layers[:layers]) for b in spec.blocks)
        cut = replace(spec, blocks=blocks)
        found = step_collectives(cut, layouts_of(cut, strategy), strategy, workload)
        sent.append(sum(c.sent_bytes for c in found if c.purpose not in ONCE))
    return sent[0] - sent[1]


@pytest.mark.parametrize(
    ("model", "x", "y", "change"),
    [
        ("llama-3-8b", 4, 2, -13.6), ("llama-3-70b", 4, 2, -14.3), ("llama-3.1-405b", 4, 2, -17.1),
        ("llama-3-70b", 2, 2, 33.3), ("llama-3-8b", 2, 2, 35.0),
        # with keys and values summed over y, because there are fewer of their heads than ranks: +0.3 points
        ("llama-3-70b", 8, 2, -33.0), ("llama-3.1-405b", 8, 2, -34.5),
    ],
)  # fmt: skip
def test_pure_two_dimensions_against_one(model: str, x: int, y: int, change: float) -> None:
    spec = load_model(model)
    line = layer_bytes(spec, Strategy(tp_x=x * y), 8192)
    assert 100 * (layer_bytes(spec, Strategy(tp_x=x, tp_y=y), 8192) / line - 1) == pytest.approx(change, abs=0.06)


def test_moved_weights_win_from_many_tokens_on() -> None:
    """Forward and backward, the MLP's weights cost as much as its activations at T = 9 / 7 of the width."""
    spec = load_model("llama-3-70b")

    def gain(tokens: int) -> int:
        plane = layer_bytes(spec, Strategy(tp_x=4, tp_y=2, attention_shape="1d"), tokens)
        moved = Strategy(tp_x=4, tp_y=2, attention_shape="1d", mlp_shape="weight")
        # the plane's relayout is not the block's
        return plane - 4 * tokens * 8192 * 2 // 16 - layer_bytes(spec, moved, tokens)

    assert gain(10496) < 0 < gain(10576)
    line = layer_bytes(spec, Strategy(tp_x=8), 16384)
    both = Strategy(tp_x=4, tp_y=2, attention_shape="weight", mlp_shape="weight")
    assert layer_bytes(spec, both, 16384) / line - 1 < -0.28


def test_kept_inputs_save_a_fifth_of_one_dimension() -> None:
    spec = load_model("llama-3-70b")
    strategy = Strategy(tp_x=8)
    workload = Workload(8192, microbatch=1, accumulation_steps=1)
    kept, again = (
        sum(
            c.sent_bytes
            for c in step_collectives(spec, layouts_of(spec, s), s, workload)
            if c.purpose == "sequence gather"
        )
        for s in (strategy, replace(strategy, gathered_inputs="re-gather"))
    )
    # Six gathers a layer instead of four; embedding and final norm gather once each.
    assert again * (4 * 80 + 2) == kept * (6 * 80 + 2)
