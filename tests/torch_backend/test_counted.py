"""Counts of collectives and of routed tokens, and log-probabilities of models that have none."""

import copy
import math
from dataclasses import astuple

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

import hyper_parallel as hp
from hyper_parallel.backends.torch import routing_statistics
from hyper_parallel.backends.torch.token_scores import score_every_token
from hyper_parallel.errors import BadValue, NoLoss
from hyper_parallel.ir import Purpose, Strategy
from hyper_parallel.runtime import CommCounter

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.dist
def test_collectives_of_fsdp_are_not_those_of_experts() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    ids = torch.arange(16).view(2, 8)

    def purposes(rank: int) -> set[str]:
        own = copy.deepcopy(model)
        hp.parallelize(own, hp.plan_of(own, "dp_shard=2"))
        with CommCounter(Strategy(dp_shard=2).mesh(), rank) as counter:
            hp.forward_backward(own, [{"input_ids": ids[rank : rank + 1], "labels": ids[rank : rank + 1]}])
        return {c.purpose for c in counter.collectives if c.kind != "all_reduce"}

    for found in hp.launch(purposes, 2, timeout_s=120):
        assert found == {Purpose.FSDP_PARAMETERS, Purpose.FSDP_GRADIENTS}


@pytest.mark.torch
def test_statistics_divide_by_the_experts_of_each_layer() -> None:
    total = torch.full((2, 65), math.nan, dtype=torch.float64)
    total[0, :8], total[0, 0], total[0, -1] = 0.0, 16.0, 16.0
    total[1, :64], total[1, -1] = 2.0, 128.0
    statistics = routing_statistics(total, None)
    assert statistics is not None
    assert astuple(statistics)[:4] == pytest.approx((8.0, 4.5, 0.5, 0.0))


@pytest.mark.torch
def test_a_reward_model_has_no_log_probabilities() -> None:
    model = Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=1, pad_token_id=0))
    score_every_token(model)
    hp.parallelize(model, hp.plan_of(model, ""))
    with pytest.raises(NoLoss, match="next token"):
        hp.token_logprobs(model, input_ids=torch.arange(8)[None])


@pytest.mark.torch
def test_offload_refuses_a_negative_slowdown() -> None:
    with pytest.raises(BadValue, match="negative"):
        hp.offload(lambda: None, max_slowdown=-0.1)
