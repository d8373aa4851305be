"""Count the collectives that really run, by kind and mesh axes, in ring-sent bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class CommCounter(TorchDispatchMode):
    """Context in which every collective is counted.

    A message between two ranks counts where it is sent. Groups of one rank send nothing and are left out. A group that
    is no group of the mesh is listed with the axes `("other",)`, so that nothing goes uncounted.

    Args:
        mesh: Mesh that names the groups.
        rank: Rank of this process on the mesh.
        others: Further meshes over the same ranks, for groups that the first has no name for.

    Attributes:
        calls: (kind, axes) to the number of calls.
        sent_bytes: (kind, axes) to the bytes this rank sends in ring algorithms; for an all-to-all with splits, what
            it really sends to other ranks.
    """

    def __init__(self, mesh: Mesh, rank: int, *others: Mesh) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.sent_bytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._axes: dict[frozenset[int], tuple[str, ...]] = {}
        for named in (mesh, *others):
            for ranks, axes in _named_groups(named, rank):
                self._axes.setdefault(ranks, axes)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in _NAMESPACES:
            self._count(func.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        kind = next((kind for part, kind in _KINDS if part in name), None)
        if kind is None:
            return
        group = _group(args)
        if group.size() == 1:
            return
        ranks = frozenset(dist.get_process_group_ranks(group))
        axes = self._axes.get(ranks, ("other",))
        if kind == "all_to_all":
            self.add(kind, axes, _sent_to_others(args, group))
            return
        tensors = [a for a in tree_leaves(args) if isinstance(a, Tensor)]
        sizes = [t.numel() * t.element_size() for t in tensors]
        if name.startswith(("_allgather_base_", "_reduce_scatter_base_")):
            whole = max(sizes)  # output and input are both listed; the larger one is the whole
        elif name.startswith("alltoall_base_"):
            whole = sizes[1]
        elif kind == "all_gather" and len(tensors) == 1:
            whole = sizes[0] * group.size()
        else:
            whole = sum(sizes)
        self.add(kind, axes, ring_bytes(kind, whole, group.size()))

    def add(self, kind: str, axes: tuple[str, ...], sent_bytes: int) -> None:
        """Count one collective; a subclass may look at who called."""
        self.calls[kind, axes] += 1
        self.sent_bytes[kind, axes] += sent_bytes


def _sent_to_others(args: tuple[Any, ...], group: dist.ProcessGroup) -> int:
    """Bytes of the input of an all-to-all that leave this rank; splits count rows of the first dim."""
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


def _named_groups(mesh: Mesh, rank: int) -> Iterator[tuple[frozenset[int], tuple[str, ...]]]:
    """Ranks of each group the rank is in, with the axes of degree above one that span it."""
    names = [name for name, degree in mesh.axes if degree > 1]
    for mask in range(1, 1 << len(names)):
        axes = tuple(name for i, name in enumerate(names) if mask >> i & 1)
        yield frozenset(mesh.group(rank, axes)), axes


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group among the arguments of a collective: an object in c10d, a name in functional ones."""
    for arg in reversed(args):
        if isinstance(arg, str):
            return dist.distributed_c10d._resolve_process_group(arg)
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    raise AssertionError("a collective without a process group")
