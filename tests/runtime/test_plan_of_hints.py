"""Errors of an own loop name the words of its strategy, and their hints work when they are pasted."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.errors import BadValue, HyperParallelError, UnknownKey
from hyper_parallel.ir import Overlap

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 96}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


@pytest.mark.parametrize(
    "words",
    [
        "tp=3", "tp=8", "pp=8", "pp=2 schedule=zbv", "pp=2 virtual_stages=2", "ep=2", "pp=2 stage_layers=[1]",
        "cp=2 cp_ulysses=2", "tp=2 rules.layers.*.up=colwise", "parallel.tp=3", "tp_y=2 tp_x=3",
        "tp=2 overlap.tp=symmetric", "dp_shard=2 overlap.ep=chunks", "pp=2 tp=2 overlap.tp=half-batch",
    ],
)  # fmt: skip
def test_a_pasted_hint_makes_a_plan(model, words):
    with pytest.raises(HyperParallelError) as caught:
        hp.plan_of(model, words)
    hint = caught.value.hint
    assert hint.startswith("hp.plan_of(model, ")
    assert "parallel." not in caught.value.render().replace("parallel.tp=3", "")
    plan = eval(hint, {"hp": hp, "model": model})
    assert plan.strategy.world_size >= 1


@pytest.mark.parametrize(
    ("words", "overlap"),
    [
        ("tp=2 overlap.tp=half-batch", Overlap(half_batch=True)),
        ("tp=2 overlap.tp=chunks overlap.chunks=2", Overlap(tp_chunks=2)),
        ("tp=2 overlap=none", Overlap()),
    ],
)
def test_words_of_a_strategy_set_its_overlap(model, words, overlap):
    assert hp.plan_of(model, words).strategy.overlap == overlap


@pytest.mark.parametrize("words", ["tp=2 overlap=auto", "tp=2 overlap.tpp=chunks"])
def test_an_overlap_that_a_strategy_cannot_have_is_refused(model, words):
    with pytest.raises((BadValue, UnknownKey), match="overlap"):
        hp.plan_of(model, words)


def test_a_printed_plan_has_ten_lines():
    lines = str(hp.plan("llama-3-8b", "dgx-h100")).splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("  strategy")
