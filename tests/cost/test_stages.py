"""Cuts of a model into pipeline stages, and what a pipeline rank holds and sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cost import stage_layers, step_collectives
from hyper_parallel.errors import NotDivisible
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import load_model
from hyper_parallel.shard import family_rules, plan_layouts

pytestmark = pytest.mark.unit


def test_the_head_makes_the_last_stage_shorter():
    model = load_model("llama-3-8b")
    assert stage_layers(model, Strategy(pp=4), 8192) == (8, 9, 9, 6)
    given_cut = Strategy(pp=4, stage_layers=(7, 9, 9, 7))
    assert stage_layers(model, given_cut, 8192) == (7, 9, 9, 7)
    for wrong in ((8, 8, 8), (8, 8, 8, 9), (16, 16, 0, 0)):
        with pytest.raises(NotDivisible) as caught:
            stage_layers(model, replace(given_cut, stage_layers=wrong), 8192)
        assert caught.value.hint == "'parallel.stage_layers=[8, 8, 8, 8]'"


def _sent(strategy, pp_rank):
    model = load_model("llama-3-8b")
    params = [(p.name, p.shape, p.dims) for b in model.blocks for p in b.params]
    layouts = plan_layouts(
        params, family_rules("llama"), strategy, num_heads=32, num_kv_heads=8, head_dim=128,
        vocab_size=model.vocab_size,
    ).layouts  # fmt: skip
    workload = Workload(4096, microbatch=1, accumulation_steps=8).resolve(strategy.dp)
    found = step_collectives(model, layouts, strategy, workload, pp_rank=pp_rank)
    return {item.purpose: (item.count, item.sent_bytes) for item in found}


def test_every_tensor_parallel_rank_sends_its_part_to_the_next_stage():
    piece = 4096 // 4 * 4096 * 2
    first, middle, last = (_sent(Strategy(pp=3, tp_x=4), rank) for rank in range(3))
    assert first["pipeline activations"] == (8, 8 * piece)
    assert "pipeline gradients" not in first
    assert middle["pipeline activations"] == middle["pipeline gradients"] == (8, 8 * piece)
    assert "pipeline activations" not in last
    assert "loss statistics" in last
    assert "loss statistics" not in first
    # On a V the turn stays on its rank: the last rank sends down once and up once, as the first does.
    v = Strategy(pp=3, tp_x=4, schedule="zbv", virtual_stages=2)
    for rank, times in ((0, 1), (1, 2), (2, 1)):
        sent = _sent(v, rank)
        assert sent["pipeline activations"] == (8 * times, 8 * times * piece)
        assert sent["pipeline gradients"] == (8 * times, 8 * times * piece)
