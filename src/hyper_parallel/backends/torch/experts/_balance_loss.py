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

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch._collectives import all_reduce
from hyper_parallel.backends.torch.experts._routing import ExpertState
from hyper_parallel.backends.torch.tensor._collectives import piece_size
from hyper_parallel.backends.torch.tensor._state import TpState
from hyper_parallel.ir import Plan, Purpose


def add_aux_loss(loss: Tensor, state: ExpertState | None, tp: TpState | None, plan: Plan) -> Tensor:
    """`loss` and this rank's share of the weighted auxiliary loss of the running microbatch, where one is asked for.

    Its gradient is that of the tokens of this rank. Its value is the loss over all ranks divided by the number of ranks
    whose losses are added up for the loss of the step. A pipeline adds it over the stages instead.
    """
    if state is None or state.staged or not state.aux_loss_coef or not state.logits:
        return loss
    mine, total = routed(state, tp)
    balance = Balance.of(total, state.world_group)
    state.aux_losses.append(balance.value)
    share = (balance.slope.to(mine.dtype) * mine).sum()
    reporting = plan.strategy.dp * plan.strategy.cp
    aux = share + (balance.value / reporting - share.double()).to(share.dtype).detach()
    weight = state.aux_loss_coef / (plan.workload.accumulation_steps or 1)
    return loss + aux.to(loss.dtype) * weight


@dataclass(frozen=True, slots=True)
class Balance:
    """The auxiliary loss of one microbatch over all ranks, before weighting, float64."""

    value: Tensor
    slope: Tensor
    """[E] its derivative by the sum of each expert's probabilities, on any rank."""

    @classmethod
    def of(cls, total: Tensor, group: dist.ProcessGroup | None) -> Balance:
        """From sums as `routed` gives them, over all layers; adds them up over a group, in place."""
        if group is not None:
            all_reduce(total, group, Purpose.BALANCE_LOSS)
        num_experts = len(total) // 2
        load, probability, number = total.split((num_experts, num_experts, 1))
        slope = num_experts * load / number.square()
        return cls((slope * probability).sum(), slope)


def routed(state: ExpertState, tp: TpState | None) -> tuple[Tensor, Tensor]:
    """What the layers of the running pass routed on this rank.

    Returns:
        [E] sums of probabilities, with their graph, and [2 E + 1] float64 without: rows of each expert, the same sums,
        and how many (layer, token) pairs there were. The logits are let go.
    """
    logits = [every if kept is None else every[kept] for every, kept in state.logits]
    num_experts = logits[0].shape[-1]
    mask = _own_mask(state, tp, logits[0])
    counts = logits[0].new_zeros(num_experts, dtype=torch.float64)
    mine: Tensor | float = 0.0
    for layer in logits:
        probabilities = torch.softmax(layer, dim=-1)
        chosen = torch.topk(probabilities, state.top_k, dim=-1).indices.reshape(-1)
        wide = probabilities.to(torch.promote_types(layer.dtype, torch.float32))
        if mask is None:
            counts += torch.bincount(chosen, minlength=num_experts)
            mine = mine + wide.sum(0)
        else:
            weights = mask.repeat_interleave(state.top_k)
            counts += torch.bincount(chosen, weights, minlength=num_experts)
            mine = mine + (wide * mask.unsqueeze(-1)).sum(0)
    assert isinstance(mine, Tensor)
    rows = len(logits) * (float(logits[0].shape[0]) if mask is None else mask.sum())
    state.logits.clear()
    return mine, torch.cat((counts, mine.detach().double(), counts.new_zeros(1) + rows))


def _own_mask(state: ExpertState, tp: TpState | None, logits: Tensor) -> Tensor | None:
    if state.mask is None:
        return None
    mask = state.mask.to(logits.device, torch.float64)
    if tp is None:
        return mask
    if tp.by_sequence:
        places = tp.grid.places(tp.rank).to(mask.device)
        return mask[places[places >= 0]]
    start = tp.rank * piece_size(mask.numel(), tp.degree)
    return mask[start : start + logits.shape[0]]


class StageBalance:
    """The auxiliary loss of one pipeline rank's stages; the axes of `groups`, together, are all ranks of one stage."""

    def __init__(
        self, state: ExpertState, tp: TpState | None, plan: Plan, groups: list[dist.ProcessGroup]
    ) -> None:
        self._state, self._tp, self._groups = state, tp, groups
        self._reporting = plan.strategy.dp * plan.strategy.cp
        self._weight = state.aux_loss_coef / (plan.workload.accumulation_steps or 1)

    @classmethod
    def of(
        cls, state: ExpertState | None, tp: TpState | None, plan: Plan, mesh: DeviceMesh
    ) -> StageBalance | None:
        """The auxiliary loss over the stages of a model; None when there is none."""
        if state is None or not state.aux_loss_coef:
            return None
        names = [n for n in mesh.mesh_dim_names or () if n != "pp" and mesh[n].size() > 1]
        return cls(state, tp, plan, [mesh.get_group(n) for n in names])

    def messages(self) -> tuple[Tensor, Tensor]:
        """Memory for what comes with activations, [2 E + 1], and for what comes with gradients, [E]."""
        width = self._state.width
        new = torch.empty(2 * width + 1, dtype=torch.float64, device=self._state.device)
        return new, new.new_empty(width)

    def add(self, before: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Add the stage that just ran to [2 E + 1] of the stages before; None: there are none.

        Returns the sums of the stage's probabilities, a root of its backward (None: it routed nothing), and [2 E + 1].
        """
        total = self.messages()[0].zero_() if before is None else before
        if not self._state.logits:
            return None, total
        mine, own = routed(self._state, self._tp)
        return mine, total + own

    def close(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """On the last stage: this rank's share of the weighted loss, and [E] its derivative for all stages."""
        for group in self._groups:
            all_reduce(total, group, Purpose.BALANCE_LOSS)
        balance = Balance.of(total, None)
        self._state.aux_losses.append(balance.value)
        return self._weight * balance.value / self._reporting, self._weight * balance.slope
