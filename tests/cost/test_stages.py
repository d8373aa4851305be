"""Cuts of a model into pipeline stages: exact against every cut, and what a pipeline rank holds and sends."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.cost import cut_layers, stage_layers, step_collectives
from hyper_parallel.errors import NotDivisible
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import load_model
from hyper_parallel.shard import family_rules, plan_layouts

pytestmark = pytest.mark.unit


def _stage_costs(costs, layers, first, last):
    ends = [0, *itertools.accumulate(layers)]
    found = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
    found[0] += first
    found[-1] += last
    return max(found), sum(c * c for c in found)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_no_cut_is_better(costs, stages, first, last):
    if stages > len(costs):
        with pytest.raises(NotDivisible, match="HP203"):
            cut_layers(costs, stages)
        return
    found = cut_layers(costs, stages, first, last)
    assert min(found) >= 1
    assert sum(found) == len(costs)
    every = (
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    best = min(_stage_costs(costs, cut, first, last) for cut in every)
    assert _stage_costs(costs, found, first, last) == best


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
