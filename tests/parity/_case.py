"""Tiny models, their plans, and one training run that every layout must repeat."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hyper_parallel.backends.torch._resolve import starred
from hyper_parallel.ir import ModelRef, Plan, Strategy, Workload
from hyper_parallel.runtime import World, accumulate, clip_grad_norm_, parallelize
from hyper_parallel.shard import family_rules, plan_layouts

STEPS = 5


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
    bias: bool = False
    seq_len: int = 16
    sequences: int = 8
    accumulation: int = 1
    ragged: bool = False
    dtype: str = "float64"
    more: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        config_class, model_class = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        }[self.family]
        config = config_class(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.mlp,
            num_hidden_layers=2, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads, tie_word_embeddings=self.tied, max_position_embeddings=64,
            attention_bias=self.bias, pad_token_id=0, **self.more,
        )  # fmt: skip
        torch.manual_seed(0)
        model = model_class(config)
        with torch.no_grad():
            for (
                param
            ) in model.parameters():  # norms too, so that a wrong norm cannot hide behind ones
                param.add_(torch.randn_like(param) * 0.05)
        return model.to(getattr(torch, self.dtype))

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Ids and shifted labels of every step, [sequences, seq_len]."""
        generator = torch.Generator().manual_seed(1)
        out = []
        for _ in range(STEPS):
            ids = torch.randint(0, self.vocab, (self.sequences, self.seq_len), generator=generator)
            labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].clone()
            labels[torch.rand(labels.shape, generator=generator) < 0.1] = -100
            if self.ragged:
                labels[self.sequences // 2 + 1 :] = -100
            out.append((ids, labels))
        return out


def make_plan(model: nn.Module, strategy: Strategy, **formats: str) -> Plan:
    """A plan as planning makes it: starred names, rules of the family table."""
    config = model.config
    params = {starred(n): tuple(p.shape) for n, p in model.named_parameters()}
    planned = plan_layouts(
        [(n, s, ()) for n, s in params.items()], family_rules(config.model_type), strategy,
        num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim, vocab_size=config.vocab_size,
    )  # fmt: skip
    dtype = str(model.dtype).removeprefix("torch.")
    chosen = {"compute_dtype": dtype, "param_dtype": dtype, "reduce_dtype": dtype, **formats}
    workload = Workload(
        seq_len=16, microbatch=1, accumulation_steps=1, recompute=strategy.recompute, **chosen
    )
    reference = ModelRef("tiny", config.model_type, 0, 0, 0.0, "")
    return Plan(
        reference,
        "local",
        0.0,
        workload.resolve(strategy.dp),
        strategy,
        planned.layouts,
        0.0,
        (),
        (),
        0,
    )


def train(
    model: nn.Module, case: Case, dp: int, dp_rank: int, steps: int = STEPS
) -> list[tuple[float, float]]:
    """Loss summed over data ranks and gradient norm of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    curve = []
    micro = case.sequences // dp // case.accumulation
    for ids, labels in case.batches()[:steps]:
        count = int((labels != -100).sum())
        mine = slice(dp_rank * (case.sequences // dp), (dp_rank + 1) * (case.sequences // dp))
        total = 0.0
        for i in range(case.accumulation):
            cut = slice(i * micro, (i + 1) * micro)
            x, y = ids[mine][cut], labels[mine][cut]
            if i + 1 < case.accumulation:
                with accumulate(model):
                    total += _backward(model, x, y, count)
            else:
                total += _backward(model, x, y, count)
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((total, float(norm)))
    return curve


def _backward(model: nn.Module, ids: Tensor, labels: Tensor, count: int) -> float:
    loss = model(
        input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=count, use_cache=False
    ).loss
    loss.backward()
    return float(loss.detach())


def run(
    model: nn.Module, case: Case, strategy: Strategy, world: World, **formats: str
) -> list[tuple[float, float]]:
    """Train a copy of the model on one layout; the loss is this rank's share."""
    mine = copy.deepcopy(model)
    plan = make_plan(mine, strategy, **formats)
    parallelize(mine, plan, world)
    coordinate = strategy.mesh().coordinate(world.rank)
    dp_rank = coordinate["dp_replicate"] * strategy.dp_shard + coordinate["dp_shard"]
    return train(mine, case, strategy.dp, dp_rank)


def variant(case: Case, **changes: Any) -> Case:
    return replace(case, **changes)
