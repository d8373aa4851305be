"""Process groups of a rank whose operators are traced: collectives become operators of the traced program.

No other process exists and nothing is transferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor

from hyper_parallel.backends.step_program import group_name

TRACED: Final = "traced"
"""Name by which the back end is registered in `torch.distributed`."""

_OPERATORS = torch.ops._c10d_functional


class TracedGroup(dist.ProcessGroup):
    """Process group whose collectives call functional operators and are complete when they return.

    `ranks` are the global ranks of the group, and `rank` is the position of this rank among them.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        super().__init__(rank, len(ranks))
        self.axis, self._name = group_name(ranks), name

    @property
    def group_name(self) -> str:
        """Name by which torch finds the group."""
        return self._name

    def getBackendName(self) -> str:
        """Return the name by which torch knows the back end."""
        return TRACED

    def barrier(self, opts: Any = None) -> None:
        """Do nothing, because no other process exists."""

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> None:
        """Reduce each tensor over ranks in place."""
        for tensor in tensors:
            tensor.copy_(_OPERATORS.all_reduce(tensor, _reduction(options), self.axis))

    def all_gather_single(self, out: Tensor, x: Tensor, options: Any = None) -> None:
        """Fill `out` with the rows `x` of all ranks."""
        out.copy_(_OPERATORS.all_gather_into_tensor(x, self.size(), self.axis))

    def reduce_scatter_single(self, out: Tensor, x: Tensor, options: Any = None) -> None:
        """Reduce `x` over ranks and write this rank's slice of the rows to `out`."""
        out.copy_(_OPERATORS.reduce_scatter_tensor(x, _reduction(options), self.size(), self.axis))

    def all_to_all_single(
        self, out: Tensor, x: Tensor, receive: list[int], send: list[int], options: Any = None
    ) -> None:
        """Fill `out` with the rows that all ranks send to this rank; an empty `receive` or `send` means equal parts."""
        even = [x.shape[0] // self.size()] * self.size()
        received = _OPERATORS.all_to_all_single(x, receive or even, send or even, self.axis)
        out.copy_(received)

    # Names in torch 2.11.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _reduction(options: Any) -> str:
    """Return the name of a collective's reduction; back ends refuse the reductions that they do not support."""
    return "sum" if options is None else options.reduceOp.op.name.lower()  # type: ignore[no-any-return]


def _create(options: Any, _: Any) -> TracedGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)  # the default group lists no ranks
    return TracedGroup(ranks, options.group_rank, options.group_id)


dist.Backend.register_backend(TRACED, _create, extended_api=True, devices=["cpu"])
