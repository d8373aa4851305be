"""Collectives and messages: writing results at planned addresses, and coalescing batches of messages.

A functional collective returns a fresh tensor that the collective library also references, until one of its threads
releases it. Here it runs as the in-place collective that torch maps it to. The result is then at its address, and the
caller owns the only handle to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hyper_parallel.backends.torch.memory._captured import storages_in, views_in
from hyper_parallel.backends.torch.memory._traffic import group_of
from hyper_parallel.backends.torch.memory.operators import COMMUNICATION, Call, MessageBatch
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import Operator, Phase

_REDUCTIONS: Final = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
}  # fmt: skip
_Begin = Callable[[], Any]
Message = tuple[Any, Any, tuple[int, ...]]
"""Send or receive function, its arguments with views for tensors, and the storages that it writes."""
SYNCHRONISATION_OPS: Final = ("wait_tensor", "_wrap_tensor_autograd", "record_stream")
"""Operators that only synchronise; a plan has its own waits."""


def refuse_unplaced(func: Any) -> None:
    """Refuse a functional collective that cannot write at a given address.

    Raises:
        CaptureUnsupported: HP511.
    """
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
    """Return one operator and call for a batch of messages; it ends when all of them have ended."""
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
    """Return a binder of a functional collective to the tensor of its result; None for any other operator."""
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
    """Return a call that copies the input to `out` and begins an in-place collective on it."""

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
