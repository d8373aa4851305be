"""Parameters of a step program that are sharded over ranks, and its collectives.

A collective names a mesh axis as its group. All ranks run one program, so shards have equal sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Shards of parameters along dim 0, padded with zeros to equal sizes.

    Attributes:
        ranks: Number of shards; 1: parameters are whole.
        axis: Mesh axis of the ranks.
    """

    ranks: int = 1
    axis: str = "dp_shard"

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a shard."""
        return whole if self.ranks == 1 else (-(-whole[0] // self.ranks), *whole[1:])

    def gather(self, shard: Tensor, rows: int) -> Tensor:
        """Return the parameter, which has this number of rows."""
        rows_of_ranks: Tensor = _OPERATORS.all_gather_into_tensor(shard, self.ranks, self.axis)
        return rows_of_ranks[:rows]

    def reduce(self, grad: Tensor) -> Tensor:
        """Return the shard of the sum of a gradient over the ranks."""
        if self.ranks == 1:
            return grad
        padding = -grad.shape[0] % self.ranks
        padded = F.pad(grad, [0, 0] * (grad.dim() - 1) + [0, padding]) if padding else grad
        shard: Tensor = _OPERATORS.reduce_scatter_tensor(padded, "sum", self.ranks, self.axis)
        return shard
