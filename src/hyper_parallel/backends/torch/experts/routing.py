"""Routing of a mixture-of-experts model: load statistics and balancing of router biases.

The load is counted in rows: one per token and chosen expert. It is counted on the tokens of this rank in forward passes
with gradients, but not in recomputed ones; `end_step` sums it over all ranks once per optimizer step.

Biases without a loss: after each step, bias_e += rate * sign(mean load - load_e) on routers that have
`e_score_correction_bias` (Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch.collectives import all_reduce
from hyper_parallel.backends.torch.experts.router_loss import (
    RouterLoss,
    causal_form,
    router_loss_facts,
)
from hyper_parallel.backends.torch.token_rows import Tokens
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose

_BIAS = "e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class Routing:
    """Options of routing; the defaults reproduce the model.

    Attributes:
        aux_loss_coef: Weight of the auxiliary load-balancing loss. None: the model's own weight, 0 if the model does
            not add the loss.
        bias_update_rate: Step of the router biases after each optimizer step; 0: no update.
        capacity_factor: An expert computes at most ceil(factor * rows / experts) of the rows of one rank and pass, in
            token order; dropped rows contribute zero to their token. None: no limit.
    """

    aux_loss_coef: float | None = None
    bias_update_rate: float = 0.0
    capacity_factor: float | None = None


@dataclass(slots=True)
class LayerRouting:
    """Rows that one layer has routed on this rank since the last step."""

    load: Tensor | None = None
    """Rows per expert, [E]; None before the first pass."""
    num_kept: int | Tensor = 0
    """Number of rows that were not dropped."""
    sent: int = 0
    """Number of rows sent to other ranks."""
    received: int = 0
    """Number of rows received from other ranks."""

    def add(self, load: Tensor, num_kept: int | Tensor, sent: int = 0, received: int = 0) -> None:
        """Add the counts of one pass."""
        self.load = load if self.load is None else self.load + load
        self.num_kept = self.num_kept + num_kept
        self.sent += sent
        self.received += received


@dataclass(slots=True)
class ExpertState:
    """Expert-parallel state of one model.

    Attributes:
        num_experts: Dict from the name of each module of experts, over all stages, to its number of experts.
        options: Options of routing.
        group: Expert-parallel ranks; None if ep is 1.
        world_group: All ranks of the model; None for one rank.
        staged: True if the model is split into pipeline stages.
        device: Device of this rank.
        chunks: Number of chunks of tokens; one is computed while another is exchanged.
        modules: Names of the modules of experts on this rank.
        tokens: Selector of this rank's tokens among the rows of a layer.
        layers: Rows routed since the last step, by name of the module of experts.
    """

    num_experts: dict[str, int]
    options: Routing
    group: dist.ProcessGroup | None
    world_group: dist.ProcessGroup | None
    staged: bool
    device: torch.device
    chunks: int
    modules: tuple[str, ...] = ()
    tokens: Tokens = field(default_factory=Tokens)
    layers: dict[str, LayerRouting] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Maximum number of experts per layer."""
        return max(self.num_experts.values())


@dataclass(frozen=True, slots=True)
class RoutingStatistics:
    """Routing of one optimizer step over all ranks, microbatches, and layers with routed rows.

    Attributes:
        max_load: Rows of the busiest expert divided by the mean over experts, in the worst layer; 1 is perfect balance.
        mean_max_load: The same ratio, averaged over the layers.
        entropy: Entropy of the load divided by its maximum ln E, averaged over the layers; 1 is perfect balance.
        dropped: Fraction of the rows that were dropped, because they exceeded the capacity of their expert.
        aux_loss: Result of `BalanceLoss.mean`: auxiliary loss without its coefficient; None if there is none.
    """

    max_load: float
    mean_max_load: float
    entropy: float
    dropped: float
    aux_loss: float | None = None


def is_first_forward() -> bool:
    """Return whether autograd is enabled outside of backward, so that a running forward is no recomputation."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def check_routing(model: nn.Module, routing: Routing, where: str | None = None) -> str | None:
    """Return a description of the router loss that training adds; None if it adds no such loss.

    Arguments and errors are those of `checked_loss`.
    """
    facts, coefficient = checked_loss(model, routing, where), routing.aux_loss_coef
    if facts is None:
        return None
    own = f"{facts.coefficient:g} (the model's own)"
    weight = own if coefficient is None else f"{coefficient:g}"
    return (
        f"weight {weight}, {len(facts.routers)} routers of {facts.num_experts} experts; "
        "of each microbatch over all data ranks, weighted by its targets"
    )


def checked_loss(
    model: nn.Module, routing: Routing, where: str | None = None, alone: bool = False
) -> RouterLoss | None:
    """Return the router loss that training adds, see `_added_loss`, if the model supports the options of routing.

    `where` is the location of the options, for errors; None: their recipe keys. `alone` is True on one rank.

    Raises:
        UnsupportedSharding: HP205 with the first unsupported option, or for an unknown router loss.
    """
    experts = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    biases = any(name.rpartition(".")[2] == _BIAS for name, _ in model.named_buffers())
    facts = _added_loss(model, routing, alone)
    for key, part, is_present in (
        ("capacity_factor", "routed experts", experts),
        ("aux_loss_coef", "load-balancing loss", facts is not None),
        ("bias_update_rate", "router biases to balance", biases),
    ):
        value = getattr(routing, key)
        if not is_present and (value or (key == "capacity_factor" and value is not None)):
            raise UnsupportedSharding(
                f"`moe.{key}` is set, but the model has no {part}",
                where=where or f"moe.{key}",
                got=f"{key}={value}, {type(model).__name__}",
                hint=f"moe.{key}={'0' if key == 'bias_update_rate' else 'null'}",
            )
    return facts


def _added_loss(model: nn.Module, routing: Routing, alone: bool) -> RouterLoss | None:
    """Return the router loss that training adds; None without one, or if one rank keeps the model's own loss.

    If `aux_loss_coef` is set, a model without a language head, such as a reward model, uses the loss of its causal
    language model. On one rank (`alone`), an unknown loss of the model is kept if `aux_loss_coef` is None. Any other
    unknown loss that would be added raises HP205.
    """
    facts, coefficient = router_loss_facts(model), routing.aux_loss_coef
    if facts is None and coefficient and (causal := causal_form(model)) is not None:
        facts = router_loss_facts(causal)
    if facts is None or not (coefficient if coefficient is not None else facts.requested):
        return None
    if not facts.known and alone and coefficient is None:
        return None
    if not facts.known:
        raise UnsupportedSharding(
            "the load-balancing loss of this model cannot be computed across ranks",
            where="moe.aux_loss_coef",
            got=type(model).__name__,
            allowed="router logits [tokens, experts], and the loss: number of experts x sum over experts of "
            "(fraction of tokens routed to it x its mean router probability)",
            hint="moe.aux_loss_coef=0",
        )
    return facts


def count_rows(index: Tensor, num_experts: int, real: Tensor | None) -> Tensor:
    """Return the number of rows of each expert [E] in `index` [N, k] for tokens with `real` [N] True (None: all)."""
    rows = index.reshape(-1)
    if real is None:
        counted = torch.ones_like(rows, dtype=torch.long)
    else:
        counted = real.unsqueeze(1).expand_as(index).reshape(-1).long()
    return counted.new_zeros(num_experts).index_add_(0, rows, counted)


def collect_routing(model: nn.Module, state: ExpertState) -> Tensor | None:
    """Sum the routing of a step over all ranks, update the router biases, and reset the counters.

    Returns:
        For each layer, the rows of each expert and the number of kept rows: [layers, E + 1] in float64. E is that of
        the layer with the most experts; columns of experts that a layer lacks are NaN. None if no row was routed and
        the model is not split into pipeline stages.
    """
    # Pipeline ranks without routed rows take part too: other stages wait for the all-reduce.
    if not state.staged and all(routed.load is None for routed in state.layers.values()):
        return None
    shape = len(state.num_experts), state.width + 1
    total = torch.zeros(shape, device=state.device, dtype=torch.float64)
    for row, name in zip(total, state.num_experts, strict=True):
        routed = state.layers.get(name)
        if routed is not None and routed.load is not None:
            row[: len(routed.load)] = routed.load
            row[-1] = routed.num_kept
    if state.world_group is not None:
        all_reduce(total, state.world_group, Purpose.EXPERT_LOAD)
    for row, count in zip(total, state.num_experts.values(), strict=True):
        if count < state.width:
            row[count:-1] = math.nan
    if rate := state.options.bias_update_rate:
        for row, (name, count) in zip(total, state.num_experts.items(), strict=True):
            if name not in state.modules:
                continue
            for module in model.get_submodule(name.rpartition(".")[0]).modules():
                bias = module._buffers.get(_BIAS, module._parameters.get(_BIAS))
                if bias is not None:
                    load = row[:count]
                    bias += rate * torch.sign(load.mean() - load).to(bias.dtype)
    state.layers.update({name: LayerRouting() for name in state.layers})
    return total


def routing_statistics(total: Tensor, aux: Tensor | None) -> RoutingStatistics | None:
    """Return the statistics of a result of `collect_routing`; None without routed rows."""
    load, num_kept = total[:, :-1].cpu(), total[:, -1].cpu()
    experts, load = (~load.isnan()).sum(1), load.nan_to_num()
    used = load.sum(1) > 0
    experts, load, num_kept = experts[used], load[used], num_kept[used]
    if not len(load):
        return None
    share = load / load.sum(1, keepdim=True)
    busiest = share.amax(1) * experts
    entropy = torch.special.entr(share).sum(1) / experts.clamp(min=2).log()
    loss = math.nan if aux is None else float(aux)
    return RoutingStatistics(
        float(busiest.max()),
        float(busiest.mean()),
        float(entropy.mean()),
        float(1 - num_kept.sum() / load.sum()),
        None if math.isnan(loss) else loss,
    )
