"""Other families of decoders keep their gradients and send the bytes of the formula under tensor parallelism."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.cost import step_collectives
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import spec_from_config
from hyper_parallel.runtime import CommCounter, World, clip_grad_norm_, launch, parallelize
from hyper_parallel.shard import family_rules, plan_layouts
from tests.parity._case import Case
from tests.slow import slow_cells

pytestmark = pytest.mark.parity

# Biases, sliding windows, norms after the products, scaled embeddings, capped logits; granite is not among the
# families whose embedding may be summed at the first layer.
FAMILIES = ("mistral", "qwen2", "gemma2", "gemma3_text", "granite")
IDS = torch.randint(0, 96, (2, 13), generator=torch.Generator().manual_seed(3))


def _build(family: str) -> nn.Module:
    config = AutoConfig.for_model(
        family, vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    # Gemma caps attention scores, which the fused attention cannot.
    attention = "eager" if family.startswith("gemma") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model


def _gradients(model: nn.Module, family: str, strategy: Strategy, world: World):
    spec = spec_from_config(model.config.to_dict(), name=family)
    params = [p for b in spec.blocks for p in b.params if not p.tied_to]
    planned = plan_layouts(
        [(p.name, p.shape, p.dims) for p in params], family_rules(spec.family), strategy,
        num_heads=8, num_kv_heads=2, head_dim=8, vocab_size=96,
    )  # fmt: skip
    workload = Workload(
        13, microbatch=2, accumulation_steps=1, compute_dtype="float64", param_dtype="float64",
        reduce_dtype="float64",
    )  # fmt: skip
    plan = dataclasses.replace(Case().plan(Strategy()), strategy=strategy, layouts=planned.layouts, workload=workload)
    parallelize(model, plan, world)
    counter = CommCounter(strategy.mesh(), world.rank)
    with counter:
        out = model(input_ids=IDS, labels=IDS, use_cache=False)
        out.loss.backward()
        clip_grad_norm_(model, None)
    grads: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        grads[name] = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
    formula: dict[tuple[str, tuple[str, ...]], int] = {}
    for item in step_collectives(spec, planned.layouts, strategy, workload):
        key = (item.kind, item.axes)
        formula[key] = formula.get(key, 0) + item.sent_bytes
    return float(out.loss.detach()), grads, dict(counter.sent_bytes), formula


@slow_cells("mistral", "qwen2", "gemma2", "granite", "gemma3_text")
@pytest.mark.parametrize("family", FAMILIES)
def test_family_repeats_one_device(family: str) -> None:
    model = _build(family)
    with World.join("cpu") as world:
        loss, expected, _, _ = _gradients(copy.deepcopy(model), family, Strategy(), world)

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            for strategy in (Strategy(tp_x=4), Strategy(dp_replicate=2, tp_x=2, recompute="full")):
                found = _gradients(copy.deepcopy(model), family, strategy, world)
                assert found[0] == pytest.approx(loss, rel=1e-10, abs=0)
                for name, grad in expected.items():  # data ranks see the same batch and add up
                    error = (found[1][name] - grad * strategy.dp).abs().max() / grad.abs().max()
                    assert error < 1e-10, name
                assert found[2] == found[3]

    launch(rank, 4, timeout_s=100)
