"""Routing of a mixture-of-experts model: what was routed, and the balancing of router biases.

Load is what the router decided, counted in rows: one per token and chosen expert. It is counted in forward passes that
keep gradients, once (not when recompute makes them again), on the tokens of this rank; `end_step` adds it up over all
ranks, once per optimizer step.

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
    """Choices about routing; the defaults are what the model does by itself.

    Attributes:
        aux_loss_coef: Weight of the auxiliary load-balancing loss. None: the weight with which the model itself adds
            that loss, 0 when it does not.
        bias_update_rate: Step of the router biases after each optimizer step; 0 leaves them.
        capacity_factor: An expert takes at most ceil(factor * rows / experts) of the rows of one rank and pass, first
            tokens first; the others add nothing to their token. None: no limit.
    """

    aux_loss_coef: float | None = None
    bias_update_rate: float = 0.0
    capacity_factor: float | None = None


@dataclass(slots=True)
class LayerRouting:
    """Rows that one layer routed since the last step, on this rank; `sent` and `received` are those of other ranks."""

    load: Tensor | None = None
    """[E] rows per expert; None before the first pass."""
    kept: int | Tensor = 0
    """Rows that were not dropped."""
    sent: int = 0
    received: int = 0

    def add(self, load: Tensor, kept: int | Tensor, sent: int = 0, received: int = 0) -> None:
        """Count one pass."""
        self.load = load if self.load is None else self.load + load
        self.kept = self.kept + kept
        self.sent += sent
        self.received += received


@dataclass(slots=True)
class ExpertState:
    """Experts of one model.

    Attributes:
        num_experts: Name of a module that holds experts to their number, over all pipeline stages, in model order.
        group: Expert-parallel ranks; None when ep is 1.
        world_group: All ranks of the model; None on one.
        staged: The model is cut into pipeline stages.
        modules: Those of the names that are on this rank.
    """

    num_experts: dict[str, int]
    options: Routing
    group: dist.ProcessGroup | None
    world_group: dist.ProcessGroup | None
    staged: bool
    device: torch.device
    modules: tuple[str, ...] = ()
    tokens: Tokens = field(default_factory=Tokens)
    layers: dict[str, LayerRouting] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Experts of the layer with the most."""
        return max(self.num_experts.values())


@dataclass(frozen=True, slots=True)
class RoutingStatistics:
    """Routing of one optimizer step over all ranks and microbatches.

    Attributes:
        max_load: Rows of the busiest expert over the mean, in the worst layer; 1 is perfect balance.
        mean_max_load: The same, mean over the layers.
        entropy: Entropy of the load over its largest value ln E, mean over the layers; 1 is perfect balance.
        dropped: Share of the rows above the capacity.
        aux_loss: Auxiliary loss before weighting, mean over the microbatches; None when it is not asked for.
    """

    max_load: float
    mean_max_load: float
    entropy: float
    dropped: float
    aux_loss: float | None = None


def counts_now() -> bool:
    """Whether the running pass is a first forward pass of training."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def check_routing(
    model: nn.Module, routing: Routing, where: str | None = None, alone: bool = False
) -> str | None:
    """Refuse choices about routing that a model has nothing for.

    Args:
        model: On any device, meta included.
        routing: The choices.
        where: Where they were made, for errors.
        alone: As of `balanced_loss`.

    Returns:
        The loss that a step adds for the routers, in words; None: it adds none.

    Raises:
        UnsupportedSharding: HP205 with the first of them, and for a router loss that is not known.
    """
    experts = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    biases = any(name.rpartition(".")[2] == _BIAS for name, _ in model.named_buffers())
    facts = balanced_loss(model, routing, alone)
    for key, what, has in (
        ("capacity_factor", "routed experts", experts),
        ("aux_loss_coef", "load-balancing loss", facts is not None),
        ("bias_update_rate", "router biases to balance", biases),
    ):
        asked = getattr(routing, key)
        if not has and (asked or (key == "capacity_factor" and asked is not None)):
            raise UnsupportedSharding(
                f"this model has no {what}",
                where=where or type(model).__name__,
                got=f"{key}={asked}",
                hint=f"moe.{key}={'0' if key == 'bias_update_rate' else 'null'}",
            )
    return None if facts is None else _in_words(facts, routing.aux_loss_coef)


def _in_words(facts: RouterLoss, wanted: float | None) -> str:
    """Return what a step adds for the routers of a model, in words."""
    weight = f"{facts.coefficient:g} (the model's own)" if wanted is None else f"{wanted:g}"
    return (
        f"weight {weight}, {len(facts.routers)} routers of {facts.num_experts} experts; "
        "of each microbatch over all data ranks, weighted by its targets"
    )


def balanced_loss(model: nn.Module, routing: Routing, alone: bool = False) -> RouterLoss | None:
    """Return the router loss that a step adds; None when it adds none, or when the model adds its own on one rank.

    A model without a language head, such as a reward model, has the loss of its causal language model on request.

    Args:
        model: On any device, meta included.
        routing: The choices.
        alone: There is one rank, where a loss that is not known can stay the model's own.

    Raises:
        UnsupportedSharding: HP205 when the model adds a loss that is not known.
    """
    facts, wanted = router_loss_facts(model), routing.aux_loss_coef
    if facts is None and wanted and (causal := causal_form(model)) is not None:
        facts = router_loss_facts(causal)
    if facts is None or not (wanted if wanted is not None else facts.requested):
        return None
    if not facts.known and alone and wanted is None:
        return None
    if not facts.known:
        raise UnsupportedSharding(
            "the router loss of this model is none that can be computed over ranks",
            where=type(model).__name__,
            allowed="the load-balancing loss of routers [tokens, experts], E * sum of f_e P_e",
            hint="moe.aux_loss_coef=0",
        )
    return facts


def count_rows(index: Tensor, num_experts: int, real: Tensor | None) -> Tensor:
    """Return the [E] rows of each expert among `index` [N, k]; of real tokens [N] only, None: all are."""
    if real is None:
        return torch.bincount(index.reshape(-1), minlength=num_experts)
    counted = real.unsqueeze(1).expand_as(index).reshape(-1).long()
    return counted.new_zeros(num_experts).index_add_(0, index.reshape(-1), counted)


def collect_routing(model: nn.Module, state: ExpertState) -> Tensor | None:
    """Add up the routing of a step over all ranks, balance the router biases, and begin to count anew.

    [layers, E + 1] load and kept rows of all layers, float64; None: nothing was routed.
    """
    # Ranks of other stages may have routed something, and wait here.
    if not state.staged and all(routed.load is None for routed in state.layers.values()):
        return None
    shape = len(state.num_experts), state.width + 1
    total = torch.zeros(shape, device=state.device, dtype=torch.float64)
    for row, name in zip(total, state.num_experts, strict=True):
        routed = state.layers.get(name)
        if routed is not None and routed.load is not None:
            row[: len(routed.load)] = routed.load
            row[-1] = routed.kept
    if state.world_group is not None:
        all_reduce(total, state.world_group, Purpose.EXPERT_LOAD)
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
    """The statistics of what `count_routing` returned; None when nothing was routed."""
    load, kept = total[:, :-1].cpu(), total[:, -1].cpu()
    load, kept = load[load.sum(1) > 0], kept[load.sum(1) > 0]
    if not len(load):
        return None
    share = load / load.sum(1, keepdim=True)
    busiest = share.amax(1) * share.shape[1]
    entropy = torch.special.entr(share).sum(1) / math.log(max(2, share.shape[1]))
    loss = math.nan if aux is None else float(aux)
    return RoutingStatistics(
        float(busiest.max()),
        float(busiest.mean()),
        float(entropy.mean()),
        float(1 - kept.sum() / load.sum()),
        None if math.isnan(loss) else loss,
    )
