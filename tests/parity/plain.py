"""A transformer of plain torch modules, split by rules that its user writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch.model_layouts import starred
from hyper_parallel.ir import ModelRef, Plan, Rule, Strategy
from hyper_parallel.shard import plan_layouts
from tests.parity.universal import Setup

RULES = (
    Rule("tokens", "vocab"),
    Rule("positions", "replicate"),
    Rule("blocks.*.attention.query", "colwise"),
    Rule("blocks.*.attention.key", "colwise"),
    Rule("blocks.*.attention.value", "colwise"),
    Rule("blocks.*.attention.out", "rowwise"),
    Rule("blocks.*.mlp.gate_up", "gate_up"),
    Rule("blocks.*.mlp.down", "rowwise"),
    Rule("head", "head"),
)
VOCAB, WIDTH, HEAD = 96, 48, 6


class Output(NamedTuple):
    """What the model returns."""

    loss: Tensor


class Attention(nn.Module):
    """Causal attention; the number of heads follows from the width of what the projections return."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        # Without positions in the scores a bias of the keys changes nothing: its gradient would be rounding alone.
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated, both inputs in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * 80)
        self.down = nn.Linear(80, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * up)


class Block(nn.Module):
    """Attention and MLP, a LayerNorm before each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class PlainTransformer(nn.Module):
    """Learned positions, two blocks, a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, shift_labels: Tensor, num_items_in_batch: int, **_: object) -> Output:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        total = F.cross_entropy(logits, shift_labels.flatten(), reduction="sum")
        return Output(total / num_items_in_batch)


@dataclass(frozen=True)
class Plain(Setup):
    """The plain transformer in place of a family; it has no ModelSpec, so its bytes are not predicted."""

    family: str = "plain nn.Module"
    predicted: ClassVar[bool] = False

    def build(self) -> nn.Module:
        """The model in float64."""
        torch.manual_seed(0)
        return PlainTransformer().double()

    def plan(self, strategy: Strategy) -> Plan:
        """A plan by the user's rules."""
        with torch.device("meta"):
            named = PlainTransformer().named_parameters()
        params = {starred(n): (starred(n), tuple(p.shape), ()) for n, p in named}
        strategy = replace(strategy, rules=RULES)
        layouts = plan_layouts(
            params.values(), (), strategy, num_heads=WIDTH // HEAD, num_kv_heads=WIDTH // HEAD,
            head_dim=HEAD,
            vocab_size=VOCAB,
        ).layouts  # fmt: skip
        workload = self.workload(strategy).resolve(strategy.dp)
        reference = ModelRef("plain", "plain", 0, 0, 0.0, "")
        return Plan(reference, "local", 0.0, workload, strategy, layouts, 0.0, (), (), 0)
