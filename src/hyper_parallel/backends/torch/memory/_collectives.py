"""Collectives and messages: kinds, groups, sent bytes, results at planned addresses, and batches of messages.

A message is a point-to-point send or receive. A functional collective returns a new tensor that the collective library
also references, until one of its threads releases it. A plan therefore runs the process-group collective with an output
argument. Its result is at the planned address, and the caller owns the only work handle. Sent bytes are the bytes that
one rank sends in a ring algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _resolve_process_group

from hyper_parallel.backends.torch.memory._captured import storages_in, views_in
from hyper_parallel.backends.torch.memory.operators import COMMUNICATION, Call, MessageBatch
from hyper_parallel.backends.torch.tensor_trees import tensors_in
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import Mesh, Operator, Phase
from hyper_parallel.shard import ring_bytes

_KINDS = {
    "allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce",
    "alltoall": "all_to_all", "broadcast": "broadcast", "send": "send_recv",
}  # fmt: skip
"""Kind of a collective or of a send by a part of its operator's name, without underscores."""


def kind_of(name: str) -> str | None:
    """Return the kind of a collective or of a send by its operator's name; None for other operators."""
    plain = name.replace("_", "")
    return next((kind for part, kind in _KINDS.items() if part in plain), None)


def group_of(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group that is an argument of an operator, by name or as an object; None if there is none."""
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
    """Return the bytes that this rank sends in a collective by a ring algorithm; exact for an all-to-all with splits.

    For other operators, such as a receive, return the bytes of the largest argument.
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
    """Return, for one rank, a dict from the ranks of each process group to the mesh axes that the group spans.

    Axes of degree 1 are omitted. If groups of several meshes have the same ranks, the first mesh applies.
    """
    axes: dict[frozenset[int], tuple[str, ...]] = {}
    for mesh in meshes:
        names = [name for name, degree in mesh.axes if degree > 1]
        for count in range(1, len(names) + 1):
            for spanned in combinations(names, count):
                axes.setdefault(frozenset(mesh.group(rank, spanned)), spanned)
    return axes


_REDUCTIONS: Final = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
}  # fmt: skip
_Begin = Callable[[], Any]
Message = tuple[Any, Any, tuple[int, ...]]
"""Operator that sends or receives, its arguments with views in place of tensors, and the storages that it writes."""
SYNCHRONISATION_OPS: Final = ("wait_tensor", "_wrap_tensor_autograd", "record_stream")
"""Operators that only synchronise; a plan has its own waits."""


def refuse_unplaced(func: Any) -> None:
    """Raise HP511 for a functional collective that cannot write its result at a given address."""
    if _is_functional(func) and func._opname.removesuffix("_") not in _FUNCTIONAL:
        raise CaptureUnsupported(
            f"offload does not support the collective `{func}`: "
            "it has no variant that writes into a given output buffer",
            allowed=sorted(_FUNCTIONAL),
            hint="use the torch.distributed collectives on single tensors",
        )


def _is_functional(func: Any) -> bool:
    namespace = getattr(func, "namespace", "")
    return namespace in COMMUNICATION and namespace != "c10d"


def coalesce(messages: Sequence[Message], phase: Phase) -> tuple[Operator, Call]:
    """Return one operator, and its call, for a batch of messages; the operator completes with the last message."""
    calls = tuple(args for _, args, _ in messages)
    writes = tuple(dict.fromkeys(s for *_, written in messages for s in written))
    funcs = tuple(func for func, *_ in messages)
    group = group_of(funcs[0], messages[0][1])
    assert group is not None
    operator = Operator(
        "c10d.messages",
        storages_in(calls),
        writes,
        access_bytes=sum(v.num_bytes for v in views_in(calls)),
        phase=phase,
        ordered=True,
        group=group.group_name,
        message=True,
    )
    return operator, Call(MessageBatch(funcs), calls, {})


def bind_collective(call: Call) -> Callable[[Any, Any, list[torch.Tensor]], _Begin] | None:
    """Return the `OutVariant` that begins a functional collective without a wait; None for other operators."""
    func = call.func
    if not _is_functional(func):
        return None
    begin = _FUNCTIONAL[func._opname.removesuffix("_")]
    names = [argument.name for argument in func._schema.arguments]

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[torch.Tensor]) -> _Begin:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        # In place: the argument is the result.
        return begin(named, outs[0] if outs else named["input"], group_of(func, args))

    return bind


def _all_gather(named: dict[str, Any], out: torch.Tensor, group: dist.ProcessGroup) -> _Begin:
    return lambda: group._allgather_base(out, named["input"])


def _reduce_scatter(named: dict[str, Any], out: torch.Tensor, group: dist.ProcessGroup) -> _Begin:
    options = c10d.ReduceScatterOptions()
    options.reduceOp = _REDUCTIONS[named["reduce_op"]]
    return lambda: group._reduce_scatter_base(out, named["input"], options)


def _all_reduce(named: dict[str, Any], out: torch.Tensor, group: dist.ProcessGroup) -> _Begin:
    options, source = c10d.AllreduceOptions(), named["input"]
    options.reduceOp = _REDUCTIONS[named["reduce_op"]]

    return _in_place(source, out, lambda: group.allreduce([out], options))


def _broadcast(named: dict[str, Any], out: torch.Tensor, group: dist.ProcessGroup) -> _Begin:
    options, source = c10d.BroadcastOptions(), named["input"]
    options.rootRank = named["src"]

    return _in_place(source, out, lambda: group.broadcast([out], options))


def _in_place(source: torch.Tensor, out: torch.Tensor, begin: _Begin) -> _Begin:
    def run() -> Any:
        if source is not out:
            out.copy_(source)
        return begin()

    return run


def _all_to_all(named: dict[str, Any], out: torch.Tensor, group: dist.ProcessGroup) -> _Begin:
    sizes = named["output_split_sizes"], named["input_split_sizes"]
    return lambda: group.alltoall_base(out, named["input"], *sizes, c10d.AllToAllOptions())


_FUNCTIONAL: Final[dict[str, Callable[[dict[str, Any], torch.Tensor, Any], _Begin]]] = {
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_to_all_single": _all_to_all,
}
