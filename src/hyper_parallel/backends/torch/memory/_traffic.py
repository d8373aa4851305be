"""Traffic of collectives: their kinds, groups and mesh axes, and the bytes that a rank sends in ring algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from hyper_parallel.backends.torch.memory.operators import COMMUNICATION, tensors_in
from hyper_parallel.ir import Mesh
from hyper_parallel.shard import ring_bytes

_KINDS = (
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("send", "send_recv"),
)


def kind_of(name: str) -> str | None:
    """Return the kind of a collective by the name of its operator; a message between two ranks counts at its sender."""
    return next((kind for part, kind in _KINDS if part in name), None)


def group_of(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group of an operator, None for one without; c10d passes an object, others mostly a name."""
    if getattr(func, "namespace", "") not in COMMUNICATION:
        return None
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in ("process_group", "group_name"):
            if isinstance(value, str):
                return _resolve_process_group(value)
            return value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)
    assert kind_of(func.__name__) is None, f"`{func}` without a process group would go uncounted"
    return None


def sent_bytes(func: Any, args: tuple[Any, ...], group: dist.ProcessGroup) -> int:
    """Return the bytes that this rank sends in ring algorithms; for an all-to-all with splits, the exact bytes.

    An operator without a kind, such as the receipt of a message, counts with all its bytes.
    """
    kind, ranks = kind_of(func.__name__), group.size()
    if kind == "all_to_all":
        return _sent_to_others(args, group)
    # Results may be arguments too; the larger side is the full tensor.
    whole = max(sum(t.nbytes for t in tensors_in(arg)) for arg in args)
    if kind == "all_gather" and func.namespace != "c10d":  # its only argument is this rank's shard
        whole *= ranks
    return whole if kind is None else ring_bytes(kind, whole, ranks)


def _sent_to_others(args: tuple[Any, ...], group: dist.ProcessGroup) -> int:
    """Return the bytes that an all-to-all sends to other ranks; splits count rows of the first dim."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not tensors:  # one tensor per rank: outputs, inputs
        inputs = next(a for a in args[1:] if isinstance(a, (list, tuple)))
        return sum(t.nbytes for i, t in enumerate(inputs) if i != group.rank())
    sent = tensors[-1]
    lists = [a for a in args if isinstance(a, (list, tuple))]
    splits = lists[1] if len(lists) > 1 else []
    if not splits:
        return ring_bytes("all_to_all", sent.nbytes, group.size())
    row = sent.nbytes // max(1, sent.shape[0])
    return (sum(splits) - splits[group.rank()]) * row


def group_axes(rank: int, *meshes: Mesh) -> dict[frozenset[int], tuple[str, ...]]:
    """Map the ranks of each group of a rank to the axes (degree > 1) that span it; the first mesh has priority."""
    axes: dict[frozenset[int], tuple[str, ...]] = {}
    for mesh in meshes:
        for ranks, names in _named_groups(mesh, rank):
            axes.setdefault(ranks, names)
    return axes


def _named_groups(mesh: Mesh, rank: int) -> Iterator[tuple[frozenset[int], tuple[str, ...]]]:
    names = [name for name, degree in mesh.axes if degree > 1]
    for mask in range(1, 1 << len(names)):
        axes = tuple(name for i, name in enumerate(names) if mask >> i & 1)
        yield frozenset(mesh.group(rank, axes)), axes
