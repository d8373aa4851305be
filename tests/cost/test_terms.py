"""Formulas against numbers worked out by hand or published."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hyper_parallel.cost import (
    Candidates,
    Machine,
    ModelNumbers,
    PricingCase,
    StackCard,
    device_card,
    score,
    stack_card,
)
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import load_model, spec_from_config
from hyper_parallel.topology import load_topology, preset_names
from hyper_parallel.units import GiB
from tests.cost.machines import machine, score_strategy, small_model
from tests.topology.group_law import group_bandwidth, group_latency

pytestmark = pytest.mark.unit


def terms(model, supernode, strategy, workload):
    resolved = workload.resolve(strategy.dp)
    return {t.name: t for t in score_strategy(model, supernode, strategy, resolved).cost_at(0)}


def memory(model, supernode, strategy, workload):
    resolved = workload.resolve(strategy.dp)
    scores = score_strategy(model, supernode, strategy, resolved)
    return {t.name: t.bytes for t in scores.memory_at(0)}


def fused(model, strategy, workload):
    """Activations with fused operators, everything at once: what the published formulas count."""
    on = Machine.of(machine(), "bfloat16", stack=StackCard("plain"))
    c = Candidates.of(strategy, workload.resolve(strategy.dp))
    terms = score(PricingCase(ModelNumbers.of(model), on, workload, c)).memory
    return next(float(t.bytes[0]) for t in terms if t.name == "activations")


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "gpt3-175b", "mixtral-8x22b", "deepseek-v3"])
def test_numbers_add_up_to_the_model(name):
    model = load_model(name)
    n = ModelNumbers.of(model)
    layer = n.attention_weights + n.mlp_weights + n.expert_weights + n.vector_weights
    assert n.layers * layer + n.embedding_weights + n.head_params == pytest.approx(model.num_params, rel=1e-12)
    active = n.attention_weights + n.mlp_weights + n.active_expert_weights
    assert n.layers * active + n.head_weights == pytest.approx(model.num_matmul_params, rel=1e-3)


def test_matmul_term_is_the_flops_over_the_reached_rate():
    model, supernode = load_model("llama-3-70b"), machine()
    workload = Workload(8192, tokens_per_step=8192 * 8)
    cost = terms(model, supernode, Strategy(dp_shard=8), workload)
    rate = 400e12 * 0.70
    # 481.4 GFLOP per token with full attention: attention and head are terms of their own.
    matmul = 6 * (model.num_matmul_params - 128256 * 8192) * 8192 / rate
    assert cost["matmul"].seconds == pytest.approx(matmul, rel=0.03)
    reached = 400e12 * 0.6 * 128 / (128 + 32) * 8192 / (8192 + 512)
    attention = 3.5 * 80 * 2 * (8192 / 2) * 64 * 256 * 8192 / reached
    assert cost["attention"].seconds == pytest.approx(attention, rel=1e-9)


def test_sequence_parallel_sends_eight_gathers_a_layer_and_twelve_with_recompute():
    model, supernode = load_model("llama-3-70b"), machine()
    workload = Workload(8192, tokens_per_step=8192)
    gather = 8192 * 8192 * 2 * 7 / 8 / (200e9 * 0.8) + 5e-6
    cost = terms(model, supernode, Strategy(tp_x=8), workload)
    assert cost["tp communication"].seconds == pytest.approx(80 * 8 * gather)
    cost = terms(model, supernode, Strategy(tp_x=8, recompute="full"), workload)
    assert cost["tp communication"].seconds == pytest.approx(80 * 12 * gather)


def test_terms_name_their_formula_and_source():
    strategy = Strategy(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp_x=2, recompute="full")
    workload = Workload(4096, tokens_per_step=4096 * 4 * 4)
    for term in terms(load_model("llama-3-8b"), machine(), strategy, workload).values():
        assert term.seconds > 0
        assert term.formula
        assert term.source


def test_pipeline_bubble_is_p_minus_1_over_m_of_the_stage():
    model, supernode = small_model(layers=8), machine()
    bubble = {}
    for sequences in (8, 16):
        cost = terms(model, supernode, Strategy(pp=4), Workload(512, 512 * sequences, 1))
        bubble[sequences] = cost["pipeline bubble"].seconds
        slowest = cost["pipeline bubble"].inputs["microbatch_s"]
        # Two layers on every stage, and the head on the last and slowest of the four.
        assert 2 * slowest < bubble[sequences] < 3 * slowest
    assert bubble[8] == pytest.approx(bubble[16])


def test_states_are_sixteen_bytes_a_parameter_over_the_shards():
    model = load_model("llama-3-8b")
    # With two microbatches gradients are there in every phase of the step.
    found = memory(model, machine(), Strategy(dp_shard=8), Workload(8192, 16 * 8192, 1))
    for name, width in (("parameters", 4), ("gradients", 4), ("optimizer states", 8)):
        assert found[name] == math.ceil(model.num_params * width / 8)


def test_activations_follow_twelve_h_plus_four_k_plus_six_f():
    model = load_model("llama-3-70b")
    found = fused(model, Strategy(dp_shard=8, tp_x=8), Workload(8192, 64 * 8192, 1))
    width = (12 * 8192 + 4 * 1024 + 6 * 28672) / 8 + 4 * 8192 * 7 / 8
    statistics = 4 * 64 / 8  # log-sum-exp of fused attention
    assert found == pytest.approx(80 * 8192 * (width + statistics), rel=1e-9)


def test_published_activation_memory_ratio_of_full_recompute():
    # 34 s b h per layer without recompute (GPT, sequence parallel, selective), 2 s b h with: about a factor 17.
    model = load_model("gpt3-175b")
    none = fused(model, Strategy(tp_x=8), Workload(2048, 2048))
    full = fused(model, Strategy(tp_x=8, recompute="full"), Workload(2048, 2048))
    one_layer = none / 96
    assert full == pytest.approx(96 * 2 * 2048 * 12288 / 8 + one_layer, rel=1e-6)


@pytest.mark.parametrize("name", preset_names())
def test_bandwidth_law_equals_the_one_of_the_topology(name):
    supernode = load_topology(name)
    card = dataclasses.replace(device_card("none", "npu"), link=1.0, network=1.0)
    numbers = Machine.of(supernode, "bfloat16", card=card)
    limit = supernode.tiers[-1].size or 4096
    for stride in (1, 2, 8, 16):
        for size in (2, 4, 8, 32, 64):
            if size * stride > limit:
                continue
            ranks = [i * stride for i in range(size)]
            s, t = np.array([float(size)]), np.array([float(stride)])
            rate = numbers.ring((s, t)).rate[0]
            if all((tier.size or limit) % stride == 0 for tier in supernode.tiers):
                assert rate == pytest.approx(group_bandwidth(supernode, ranks)), (size, stride)
                latency = numbers.latency((s, t))[0]
                assert latency == pytest.approx(group_latency(supernode, ranks)), (size, stride)


def test_group_across_nodes_drives_one_link_per_local_rank():
    numbers = Machine.of(machine(), "bfloat16")
    sizes, strides = np.array([16.0, 2.0, 4.0]), np.array([1.0, 8.0, 4.0])
    found = numbers.ring((sizes, strides)).rate / 0.8
    assert found == pytest.approx([200e9, 25e9, 50e9])


DEGREES = st.sampled_from([1, 2, 4])


@settings(deadline=None, max_examples=50)
@given(dp=DEGREES, tp=DEGREES, pp=DEGREES, cp=DEGREES, sequences=st.integers(1, 4))
def test_prices_are_monotone(dp, tp, pp, cp, sequences):
    model = small_model()
    strategy = Strategy(pp=pp, dp_shard=dp, cp=cp, tp_x=tp)
    micro = 4 * dp * sequences
    workload = Workload(512, 512 * micro, microbatch=1)

    def seconds(supernode, s=strategy, w=workload):
        return sum(t.seconds for t in terms(model, supernode, s, w).values())

    def peak(s=strategy, w=workload):
        return sum(memory(model, machine(), s, w).values())

    fast, slow = machine(), machine(node_bytes_s=100e9, cluster_bytes_s=10e9)
    assert seconds(fast) <= seconds(slow) * (1 + 1e-12)
    again = dataclasses.replace(strategy, recompute="full")
    assert seconds(fast, again) > seconds(fast)
    twice = Workload(512, 1024 * micro, microbatch=1)
    assert seconds(fast, w=twice) > seconds(fast)
    if pp == 1:  # longer sequences move layers to the stage of the head
        assert peak(w=Workload(1024, 1024 * micro, microbatch=1)) > peak()
    more = dataclasses.replace(strategy, dp_shard=2 * dp)
    assert peak(more, Workload(512, 1024 * micro, microbatch=1)) <= peak() + GiB / 256


def test_accelerators_hold_a_context_and_cpus_do_not():
    workload = Workload(512, 512)
    assert "device context" in memory(small_model(), machine(), Strategy(), workload)
    assert "device context" not in memory(small_model(), machine(kind="cpu"), Strategy(), workload)


class _CountedElements(TorchDispatchMode):
    """Elements that operators other than views read and write; broadcast dims count once."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "detach" not in str(func):
            self.elements += sum(
                math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
                for x in tree_leaves((args, kwargs, result))
                if isinstance(x, torch.Tensor)
            )
        return result


def test_passes_of_an_eager_norm_are_those_of_its_operators():
    x = torch.randn(4, 64, 2048, requires_grad=True)
    with _CountedElements() as forward:
        y = LlamaRMSNorm(2048)(x)
    grad = torch.randn_like(y)
    with _CountedElements() as backward:
        y.backward(grad)
    passes = stack_card("cpu").norm_passes
    # Of the passes over all saved elements, two in forward and three in backward are of the input of a norm.
    assert forward.elements / x.numel() == pytest.approx(passes["forward"] + 2.0, rel=0.01)
    assert backward.elements / x.numel() == pytest.approx(passes["backward"] + 3.0, rel=0.01)


def test_norms_with_a_bias_are_one_kernel():
    config = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 128,
    }
    models = spec_from_config(config, name="gpt2"), load_model("llama-3-8b")
    fused, unfused = (ModelNumbers.of(model) for model in models)
    assert (fused.unfused_norms, unfused.unfused_norms) == (0.0, 2.0)


def test_matmuls_with_few_rows_cost_more_and_those_with_one_or_many_do_not():
    card, model = device_card("", "cpu"), small_model()

    def matmul_s(tokens, few_rows):
        host = dataclasses.replace(card, few_rows=few_rows)
        on = Machine.of(machine(), "float32", card=host, stack=stack_card("cpu"))
        workload = Workload(tokens, microbatch=1, accumulation_steps=1).resolve(1)
        case = PricingCase(ModelNumbers.of(model), on, workload, Candidates.of(Strategy(), workload))
        return next(t.seconds[0] for t in score(case).time if t.name == "matmul")

    ratios = {n: matmul_s(n, card.few_rows) / matmul_s(n, {}) for n in (1, 16, 128, 16384)}
    assert ratios[16] == pytest.approx(1.5)
    assert ratios[128] == pytest.approx(1 + 4 * 0.5 * 8 / 9**2)
    assert 1.0 < ratios[16384] < 1.01
    assert ratios[1] < 1.12
