"""Operators of torch that run a collective and the adjacent matrix products together, over symmetric memory.

This module alone uses the names of `torch.distributed._symmetric_memory`, which are not public.

Source: torch 2.13, `torch/distributed/_symmetric_memory/__init__.py`; torchtitan's asynchronous tensor parallelism
compiles to the same operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.collectives import purpose
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose


@dataclass(frozen=True, slots=True)
class FusedOperators:
    """Operators of torch that fuse a collective with matmuls, for one type of device.

    Attributes:
        all_gather_matmul: Function of (shard, matrices, gather dim, group name) that returns the gathered tensor and
            its products with the matrices.
        matmul_reduce_scatter: Function of (tensor, matrix, reduction, scatter dim, group name) that returns this rank's
            slice of the reduced product.
    """

    all_gather_matmul: Callable[..., tuple[Tensor, list[Tensor]]]
    matmul_reduce_scatter: Callable[..., Tensor]


OPERATORS: Final[dict[str, FusedOperators]] = {
    "cuda": FusedOperators(
        torch.ops.symm_mem.fused_all_gather_matmul,
        torch.ops.symm_mem.fused_matmul_reduce_scatter,
    )
}
"""Operators by type of device."""


def gather_and_multiply(
    part: Tensor, matrices: Sequence[Tensor], group: ProcessGroup, name: Purpose
) -> tuple[Tensor, list[Tensor]]:
    """Gather the rows of all ranks and multiply them by matrices; not differentiable.

    Args:
        part: Rows of this rank, [n, D].
        matrices: Matrices [D, F].
        group: Process group of P ranks.
        name: Purpose of the collective.

    Returns:
        Rows [P n, D] in rank order, and the products [P n, F].
    """
    run = OPERATORS[part.device.type].all_gather_matmul
    with purpose(name):
        return run(part.contiguous(), list(matrices), 0, group.group_name)


def multiply_and_scatter(x: Tensor, matrix: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    """Return this rank's rows [n, D] of the sum over ranks of `x @ matrix`; not differentiable.

    Args:
        x: Rows [P n, F].
        matrix: Matrix [F, D].
        group: Process group of P ranks.
        name: Purpose of the collective.
    """
    run = OPERATORS[x.device.type].matmul_reduce_scatter
    with purpose(name):
        return run(x.contiguous(), matrix, "sum", 0, group.group_name)


def check_symmetric_memory(group: ProcessGroup, device: torch.device) -> None:
    """Raise HP205 if the devices of a group cannot use symmetric memory; every rank of the group must call this.

    The check allocates a workspace of one byte, which the operators enlarge.
    """

    def refusal(problem: str, got: str) -> UnsupportedSharding:
        changes = {"overlap.tp": "chunks"}
        return UnsupportedSharding(problem, where="overlap", got=got, changes=changes)

    if device.type not in OPERATORS:
        raise refusal("`overlap.tp=symmetric` needs CUDA devices", f"a device of type {device.type}")
    if device.type == "cuda":
        try:
            # This call also exchanges the addresses of the ranks.
            symmetric_memory.get_symm_mem_workspace(cast("str", group.group_name), 1)
        except RuntimeError as error:
            raise refusal(
                "the devices of a tensor-parallel group have no symmetric memory",
                str(error).partition("\n")[0],
            ) from error
