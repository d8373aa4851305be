"""Tiny models, their plans, and one training run that every layout must repeat."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hyper_parallel.ir import Plan, Strategy, Workload
from hyper_parallel.model import ModelSpec, spec_from_config
from hyper_parallel.runtime import (
    CommCounter,
    World,
    clip_grad_norm_,
    forward_backward,
    parallelize,
)
from tests.parity.planned import ByGroup, by_group, make_plan, whole

STEPS = 3
COUNTED_STEP = 1
_CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@dataclass(frozen=True)
class Case:
    """One model and one batch shape."""

    family: str = "llama"
    tied: bool = False
    vocab: int = 96
    hidden: int = 64
    mlp: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 8
    bias: bool = False
    seq_len: int = 16
    sequences: int = 8
    accumulation: int = 1
    ragged: bool = False
    dtype: str = "float64"
    reduce_dtype: str | None = None
    compute_dtype: str | None = None

    def config(self):
        config_class, _ = _CLASSES[self.family]
        return config_class(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.mlp,
            num_hidden_layers=2, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim, tie_word_embeddings=self.tied, max_position_embeddings=64,
            attention_bias=self.bias, pad_token_id=0,
        )  # fmt: skip

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = _CLASSES[self.family][1](self.config())
        with torch.no_grad():
            for param in model.parameters():  # norms too: a wrong one must not hide behind ones
                param.add_(torch.randn_like(param) * 0.05)
        return model.to(getattr(torch, self.dtype))

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config(self.config().to_dict(), name="tiny")

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Ids and shifted labels of every step, [sequences, seq_len]."""
        generator = torch.Generator().manual_seed(1)
        out = []
        for _ in range(STEPS):
            ids = torch.randint(0, self.vocab, (self.sequences, self.seq_len), generator=generator)
            labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].clone()
            labels[torch.rand(labels.shape, generator=generator) < 0.1] = -100
            if self.ragged:  # with two or more data ranks, the last has padding only
                labels[self.sequences // 2 - 1 :] = -100
            out.append((ids, labels))
        return out

    def plan(self, strategy: Strategy) -> Plan:
        """A plan as planning makes it: starred names, rules of the family table, no framework."""
        workload = Workload(
            seq_len=self.seq_len,
            microbatch=self.sequences // strategy.dp // self.accumulation,
            accumulation_steps=self.accumulation,
            compute_dtype=self.compute_dtype or self.dtype,
            param_dtype=self.dtype,
            reduce_dtype=self.reduce_dtype or self.dtype,
        )
        return make_plan(self.spec, strategy, workload)


@dataclass
class Run:
    """What one rank saw of a training run."""

    losses: list[float]  # this rank's share; the sum over all ranks is the loss
    norms: list[float]
    counted: ByGroup
    planned: ByGroup
    gradient_error: float = 0.0


class Reference:
    """The run of one device, with the gradients of its first step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = case.build()

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        self._run(kept)
        return kept

    @cached_property
    def run(self) -> Run:
        return self._run(None)

    def _run(self, kept: dict[str, Tensor] | None) -> Run:
        with World.join("cpu") as world:
            model = copy.deepcopy(self.model)
            parallelize(model, self.case.plan(Strategy()), world)
            return _train(model, self.case, Strategy(), 0, keep=kept)


def run(
    reference: Reference,
    strategy: Strategy,
    world: World,
    gradients: bool = True,
    fused: bool = False,
    steps: int = STEPS,
) -> Run:
    """Train a copy of the reference's model on one layout.

    Args:
        reference: Of the same case.
        strategy: Its layout.
        world: Joined by as many ranks.
        gradients: Compare those of the first step one by one.
        fused: With the trainer's optimizer, which updates all parameters in one operation. The plain one does ten on
            each parameter, and DTensor first works out for each of them, on each rank, how the result lies.
        steps: How many of the reference's.
    """
    case = reference.case
    model = copy.deepcopy(reference.model)
    plan = case.plan(strategy)
    parallelize(model, plan, world)
    expected = reference.gradients if gradients else None
    return _train(model, case, strategy, world.rank, plan, expected, fused=fused, steps=steps)


def _train(
    model: nn.Module,
    case: Case,
    strategy: Strategy,
    rank: int,
    plan: Plan | None = None,
    expected: dict[str, Tensor] | None = None,
    keep: dict[str, Tensor] | None = None,
    fused: bool = False,
    steps: int = STEPS,
) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    where = strategy.mesh().coordinate(rank)
    share = case.sequences // strategy.dp
    first = (where["dp_replicate"] * strategy.dp_shard + where["dp_shard"]) * share
    result = Run([], [], {}, by_group(plan.collectives if plan else ()))
    for number, (ids, labels) in enumerate(case.batches()[:steps]):
        count = int((labels != -100).sum())
        data = ids[first : first + share], labels[first : first + share]
        if number == COUNTED_STEP:
            counter = CommCounter(strategy.mesh(), rank)
            with counter:
                loss, norm = _step(model, *data, count, case.accumulation, clip=1.0)
            result.counted = by_group(counter.collectives)
        elif number == 0 and (expected or keep is not None):
            loss, norm = _step(model, *data, count, case.accumulation, clip=None)
            found = {n: whole(p.grad) for n, p in model.named_parameters()}
            if keep is not None:
                keep.update(found)
            else:
                result.gradient_error = max(_distance(found[n], expected[n]) for n in found)
            clip_grad_norm_(model, 1.0)
        else:
            loss, norm = _step(model, *data, count, case.accumulation, clip=1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(loss)
        result.norms.append(norm)
    return result


def _step(
    model: nn.Module, ids: Tensor, labels: Tensor, count: int, accumulation: int, clip: float | None
) -> tuple[float, float]:
    pairs = zip(ids.chunk(accumulation), labels.chunk(accumulation), strict=True)
    parts = [{"input_ids": x, "shift_labels": y} for x, y in pairs]
    share = forward_backward(model, parts, count)
    return float(share), float(clip_grad_norm_(model, clip))


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((a - b).abs().max() / b.abs().max())


def strategies(world_size: int, **more: object) -> list[Strategy]:
    """Every (dp_replicate, dp_shard, tp) whose product is the world size."""
    sizes = [2**i for i in range(world_size.bit_length())]
    return [
        Strategy(dp_replicate=r, dp_shard=s, tp_x=world_size // (r * s), **more)
        for r in sizes
        for s in sizes
        if world_size % (r * s) == 0
    ]
