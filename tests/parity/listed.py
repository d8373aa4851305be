"""A decoder whose experts are a list of modules that their block calls one by one, the form of older models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch.model_layouts import starred
from hyper_parallel.ir import ModelRef, Plan, Strategy
from hyper_parallel.shard import family_rules, plan_layouts
from tests.parity.universal import Setup

WIDTH, EXPERTS, TOP_K = 64, 8, 2


class Expert(nn.Module):
    """A small gated MLP with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SparseBlock(nn.Module):
    """Experts with tokens are called one by one, the others not at all; a shared projection beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, WIDTH)
        weights, index = torch.softmax(self.gate(flat), -1).topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        mask = F.one_hot(index, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(flat)
        for number in mask.sum((1, 2)).nonzero()[:, 0].tolist():
            choice, rows = torch.where(mask[number])
            part = self.experts[number](flat[None, rows].reshape(-1, WIDTH))
            out.index_add_(0, rows, part * weights[rows, choice, None])
        return (out + self.shared(flat)).view_as(hidden)


@dataclass(frozen=True)
class Listed(Setup):
    """Llama with such blocks in place of its MLPs; it has no ModelSpec, so its bytes are not predicted."""

    predicted: ClassVar[bool] = False

    def build(self) -> nn.Module:
        """The model in float64."""
        model = super().build()
        for layer in model.model.layers:
            layer.mlp = SparseBlock().double()
        return model

    def plan(self, strategy: Strategy) -> Plan:
        """A plan by the rules of the family and what is known of experts."""
        with torch.device("meta"):
            named = self.build().named_parameters()
        params = {starred(n): (starred(n), tuple(p.shape), ()) for n, p in named}
        layouts = plan_layouts(
            params.values(), family_rules("llama"), strategy, num_heads=8, num_kv_heads=4, head_dim=8,
            vocab_size=96,
        ).layouts  # fmt: skip
        workload = self.workload(strategy).resolve(strategy.dp)
        reference = ModelRef("listed", "llama", 0, 0, 0.0, "")
        return Plan(reference, "local", 0.0, workload, strategy, layouts, 0.0, (), (), 0)
