"""Token dispatch with a capacity: every expert works on exactly `capacity` rows of every rank.

hidden [N, D], index [N, k]
  slot         each of the N k rows gets a place among the `capacity` of its expert, first tokens first; what is over
               goes to one slot behind all of them, which is cut off
  dispatch     all-to-all with even splits: [ep, E/ep, capacity, D] on each rank, zero where a slot is empty
  experts      the model's own code
  combine      the same all-to-all backwards, rows from their slots, zero for dropped ones

No size depends on the data, so nothing is read by the host, and a step can be captured once and planned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.backends.torch.experts._dispatch import all_to_all
from hyper_parallel.backends.torch.experts._rows import place, take


@dataclass(frozen=True, slots=True)
class CapacityDispatch:
    """Where the rows of one pass go when every expert has as many slots; see `Dispatch`.

    Attributes:
        slot: [N k] slot of each row, in the order of the index; E * capacity when it is dropped.
        counts: [E] rows the router gave each expert, dropped ones included.
        kept: [] rows that are not dropped.
        local_expert: [ep * E/ep * capacity] expert of each row this rank works on, counted from the first it holds.
        group: Expert-parallel ranks; None: every expert is here.
        slots: Slots of all experts, E * capacity.
    """

    slot: Tensor
    counts: Tensor
    kept: Tensor
    local_expert: Tensor
    group: dist.ProcessGroup | None
    slots: int

    @classmethod
    def plan(
        cls, index: Tensor, num_experts: int, group: dist.ProcessGroup | None, capacity: int
    ) -> CapacityDispatch:
        """Give the rows of one pass their slots.

        Args:
            index: [N, k] experts of each token; the ranks of the group hold equal runs of experts in order.
            num_experts: Experts over all ranks.
            group: Expert-parallel ranks; None: one rank has all experts.
            capacity: Rows of this rank that an expert takes.
        """
        flat = index.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=num_experts)
        begins = torch.cumsum(counts, 0) - counts
        expert = flat[order]
        place = torch.arange(len(order), device=order.device) - begins[expert]
        slots = num_experts * capacity
        sorted_slot = torch.where(place < capacity, expert * capacity + place, slots)
        slot = torch.empty_like(flat).index_copy_(0, order, sorted_slot)
        degree = 1 if group is None else group.size()
        local = torch.arange(num_experts // degree, device=flat.device)
        local_expert = local.repeat_interleave(capacity).repeat(degree)
        kept = counts.clamp(max=capacity).sum()
        return cls(slot, counts, kept, local_expert, group, slots)

    def scatter(self, hidden: Tensor) -> Tensor:
        """[ep * E/ep * capacity, D]: the rows of all ranks for the experts of this one, from [N, D]."""
        k = len(self.slot) // max(1, hidden.shape[0])
        repeated = hidden.unsqueeze(1).expand(-1, k, -1).reshape(-1, hidden.shape[-1])
        return self._exchanged(place(repeated, self.slot, self.slots, spare=True))

    def gather(self, results: Tensor) -> Tensor:
        """[N k, D] results of this rank's tokens in the order of the index, zero for dropped rows."""
        return take(self._exchanged(results), self.slot, spare=True)

    def _exchanged(self, rows: Tensor) -> Tensor:
        if self.group is None:
            return rows
        even = [self.slots // self.group.size()] * self.group.size()
        return all_to_all(rows, even, even, self.group)

    @property
    def exchanged(self) -> tuple[int, int]:
        """Rows sent to and received from other ranks, empty slots included."""
        if self.group is None:
            return 0, 0
        degree = self.group.size()
        rows = self.slots // degree * (degree - 1)
        return rows, rows
