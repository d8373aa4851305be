"""Parameters of a step program that are sharded over ranks, and its collectives.

A collective names a mesh axis as its group. All ranks run one program, so shards have equal sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed._functional_collectives
import torch.nn.functional as F
from torch import Tensor

_OPERATORS = torch.ops._c10d_functional


def sum_over(x: Tensor, axis: str) -> Tensor:
    """Return the sum over the ranks of an axis."""
    total: Tensor = _OPERATORS.all_reduce(x, "sum", axis)
    return total


@dataclass(frozen=True, slots=True)
class Shards:
    """Shards of parameters along one dim, padded with zeros to equal sizes.

    Attributes:
        ranks: Number of shards; 1: parameters are whole.
        axis: Mesh axis of the ranks.
        dim: Sharded dim.
        others: Parameter name to its shards, where they differ.
    """

    ranks: int = 1
    axis: str = "dp_shard"
    dim: int = 0
    others: Mapping[str, Shards] = field(default_factory=dict)

    def of(self, name: str) -> Shards:
        """Return the shards of a parameter."""
        return self.others.get(name, self)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a shard."""
        if self.ranks == 1:
            return whole
        return (*whole[: self.dim], -(-whole[self.dim] // self.ranks), *whole[self.dim + 1 :])

    def gather(self, shard: Tensor, size: int) -> Tensor:
        """Return the parameter, whose sharded dim has this size."""
        rows = _OPERATORS.all_gather_into_tensor(self._first(shard), self.ranks, self.axis)
        return self._first(rows[:size])

    def reduce(self, grad: Tensor) -> Tensor:
        """Return the shard of the sum of a gradient over the ranks."""
        if self.ranks == 1:
            return grad
        rows = self._first(grad)
        padding = -rows.shape[0] % self.ranks
        padded = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, padding]) if padding else rows
        return self._first(_OPERATORS.reduce_scatter_tensor(padded, "sum", self.ranks, self.axis))

    def _first(self, x: Tensor) -> Tensor:
        """Exchange the sharded dim with the first one."""
        return x.transpose(0, self.dim) if self.dim else x
