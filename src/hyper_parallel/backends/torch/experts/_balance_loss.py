"""The auxiliary load-balancing loss of experts, over all ranks and all pipeline stages.

The auxiliary loss is the one Hugging Face models compute on one device (Switch Transformer, Fedus et al. 2021,
equations 4 to 6, over all layers at once): with f_e the rows of expert e and P_e the sum of its probabilities, both
over the tokens of all layers, divided by the number n of (layer, token) pairs,

    aux = E * sum_e f_e P_e

It is not a sum over tokens, so f and n are added up over all ranks before backward. f has no gradient; the gradient of
P is a sum over tokens, hence each rank's own share of it is exact and needs no communication in backward.

A pipeline stage has some of the layers. So what was routed travels with the activations, 2 E + 1 numbers per
microbatch, and every stage adds its own. The last stage adds them up over the data-parallel ranks, which gives the
loss and its derivative by the probabilities of each expert; these E numbers travel back with the gradients. Backward of
a stage then has two roots: its output, and the sums of its probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch._collectives import all_reduce
from hyper_parallel.backends.torch.experts._routing import ExpertState, counts_now
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan, Purpose

_ROUTERS = ("gate", "router")


class BalanceLoss:
    """The auxiliary loss of this rank's layers; the ranks of `groups`, one after another, are all of one stage."""

    def __init__(
        self,
        state: ExpertState,
        plan: Plan,
        groups: list[dist.ProcessGroup],
        coefficient: float,
        top_k: int,
    ) -> None:
        self._state, self._groups, self._top_k = state, groups, top_k
        self._weight = coefficient / (plan.workload.accumulation_steps or 1)
        # Ranks whose losses are added up for the loss of the step.
        self._reporting = plan.strategy.dp * plan.strategy.cp
        # Of the running pass: router logits [rows, E] per layer and which rows are tokens (None: all), and the weight
        # of each token (None: all count).
        self._logits: list[tuple[Tensor, Tensor | None]] = []
        self._mask: Tensor | None = None
        # Of the microbatches of the step so far, before weighting, over all ranks.
        self._losses: list[Tensor] = []

    @classmethod
    def of(
        cls, model: nn.Module, state: ExpertState | None, plan: Plan, mesh: DeviceMesh | None
    ) -> BalanceLoss | None:
        """The loss whose weight is the choice, else what the model's config asks for; None when that is none.

        The model is kept from computing its own, which would be that of one rank's tokens.
        """
        if state is None:
            return None
        config, coefficient = getattr(model, "config", None), state.options.aux_loss_coef
        own = getattr(config, "router_aux_loss_coef", None)
        if coefficient is None and getattr(config, "output_router_logits", False):
            coefficient = own
        groups = [] if state.world_group is None else [state.world_group]
        if state.staged and mesh is not None:
            names = [n for n in mesh.mesh_dim_names or () if n != "pp" and mesh[n].size() > 1]
            groups = [mesh.get_group(n) for n in names]
        top_k = config.num_experts_per_tok if coefficient else 0
        balance = cls(state, plan, groups, float(coefficient or 0.0), top_k)
        if own is not None:
            model.register_forward_pre_hook(balance._begin, with_kwargs=True)
        if not coefficient:
            return None
        for name in state.modules:
            balance._record(_router(model, name))
        return balance

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self._logits.clear()
        if kwargs.get("output_router_logits"):
            raise UnsupportedSharding(
                "router logits are not returned; `loss` already has the auxiliary loss of all ranks",
                where=type(module).__name__,
                hint="moe.aux_loss_coef=0.001",
            )
        mask = kwargs.get("attention_mask")
        self._mask = mask.reshape(-1) if isinstance(mask, Tensor) and mask.dim() == 2 else None
        return args, {**kwargs, "output_router_logits": False}

    def _record(self, router: nn.Module) -> None:
        inner = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            if counts_now():
                logits = output[0] if isinstance(output, tuple) else output
                # Taken out later: what recompute makes again must be the same operations.
                kept = self._state.tokens.among(logits.shape[0], logits.device)
                self._logits.append((logits, kept))
            return output

        router.forward = forward

    def messages(self) -> tuple[Tensor, Tensor]:
        """Memory for what comes with activations, [2 E + 1], and for what comes with gradients, [E]."""
        width = self._state.width
        new = torch.empty(2 * width + 1, dtype=torch.float64, device=self._state.device)
        return new, new.new_empty(width)

    def add(self, before: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Add the layers that just ran to [2 E + 1] of the stages before; None: there are none.

        Returns the sums of their probabilities, a root of backward (None: they routed nothing), and [2 E + 1].
        """
        if not self._logits:
            return None, self.messages()[0].zero_() if before is None else before
        own, total = self._routed()
        return own, total if before is None else before + total

    def close(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Behind the last layer: this rank's share of the weighted loss, and [E] its derivative for all stages."""
        for group in self._groups:
            all_reduce(total, group, Purpose.BALANCE_LOSS)
        num_experts = len(total) // 2
        load, probability, number = total.split((num_experts, num_experts, 1))
        slope = num_experts * load / number.square()
        value = (slope * probability).sum()
        self._losses.append(value)
        return self._weight * value / self._reporting, self._weight * slope

    def add_to(self, loss: Tensor) -> Tensor:
        """`loss` of a whole model and this rank's share; its gradient is that of the tokens of this rank."""
        own, total = self.add(None)
        if own is None:
            return loss
        value, slope = self.close(total)
        share = (slope.to(own.dtype) * own).sum()
        share = share + (value - share.double()).to(share.dtype).detach()
        return loss + share.to(loss.dtype)

    def _routed(self) -> tuple[Tensor, Tensor]:
        """What the layers of the running pass routed on this rank; their logits are let go.

        Returns:
            [E] sums of probabilities, with their graph, and [2 E + 1] float64 without: rows of each expert, the same
            sums, and how many (layer, token) pairs there were.
        """
        logits = [every if kept is None else every[kept] for every, kept in self._logits]
        self._logits.clear()
        (tokens, num_experts), like = logits[0].shape, logits[0]
        mask = self._mask
        if mask is not None:
            mask = self._state.tokens.own(mask.to(like.device).double())
        wide = torch.promote_types(like.dtype, torch.float32)
        counts = like.new_zeros(num_experts, dtype=torch.float64)
        own = like.new_zeros(num_experts, dtype=wide)
        for layer in logits:
            probabilities = torch.softmax(layer, dim=-1)
            chosen = torch.topk(probabilities, self._top_k, dim=-1).indices.reshape(-1)
            probabilities = probabilities.to(wide)
            weights = None if mask is None else mask.repeat_interleave(self._top_k)
            counts += torch.bincount(chosen, weights, minlength=num_experts)
            own = own + (probabilities if mask is None else probabilities * mask.unsqueeze(-1)).sum(
                0
            )
        rows = len(logits) * (float(tokens) if mask is None else mask.sum())
        return own, torch.cat((counts, own.detach().double(), counts.new_zeros(1) + rows))

    def mean(self) -> Tensor | None:
        """Of the microbatches of a step, which ends; of a pipeline only the last stage knows it. NaN: none had one."""
        losses, self._losses = self._losses, []
        state = self._state
        if not (losses or state.staged):
            return None
        both = torch.zeros(2, device=state.device, dtype=torch.float64)
        if losses:
            both += torch.stack([torch.stack(losses).mean().double(), both.new_ones(())])
        if state.staged:
            all_reduce(both, state.world_group, Purpose.BALANCE_LOSS)
        return both[0] / both[1]


def _router(model: nn.Module, experts: str) -> nn.Module:
    """The router beside a module of experts."""
    block = model.get_submodule(experts.rpartition(".")[0])
    for name in _ROUTERS:
        if isinstance(router := getattr(block, name, None), nn.Module):
            return router
    raise UnsupportedSharding(
        "no router was found beside the experts",
        where=experts,
        got=", ".join(name for name, _ in block.named_children()),
        allowed=_ROUTERS,
    )
