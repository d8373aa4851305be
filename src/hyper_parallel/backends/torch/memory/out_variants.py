"""Out variants: variants of recorded calls that write their results into existing tensors.

Most operators of ATen have an `out` overload, which takes the results as further arguments and runs the same kernel.
`out` overloads that torch generates compute into new tensors and copy, so they are not used. This module adds variants
of operators that only allocate, fill or copy bytes, and of a few others. The choice of a variant depends only on the
recorded call, not on tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from hyper_parallel.backends.torch.memory._collectives import bind_collective
from hyper_parallel.backends.torch.memory.operators import Call, HostConstant, View

Bound = Callable[[], Any]
"""Call without arguments that runs an operator on bound tensors."""
OutVariant = Callable[[tuple[Any, ...], dict[str, Any], list[torch.Tensor]], Bound]
"""Function from (positional arguments, keyword arguments, results) to the call that writes the results."""

_OPTIONS: Final = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format"})
"""Arguments that only describe the result tensor."""
_ALLOCATIONS: Final = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_FILL: Final = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1, "full": None,
    "full_like": None, "new_full": None, "scalar_tensor": None,
}  # fmt: skip
"""Fill value by operator; None: the value is an argument."""
_COPY: Final = ("clone", "_to_copy", "lift_fresh", "lift_fresh_copy")
_IN_PLACE: Final = ("masked_fill", "index_put")
"""Operators that are equivalent to a copy of the first argument followed by the in-place operator."""
_RESIZING: Final = (
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
)  # fmt: skip
"""Operators whose `out` kernels resize the result, because they store the loss of every element there first."""
_NUMBERS: Final = ("mul.Scalar", "div.Scalar", "add.Scalar", "sub.Scalar")
"""Operators that are equivalent to the overload that takes a tensor in place of the number."""


def out_variant(call: Call) -> OutVariant | None:
    """Return the out variant of a recorded call; None if the call has no such variant."""
    func, results = call.func, call.results
    if (begin := bind_collective(call)) is not None:
        return begin
    if isinstance(func, HostConstant):
        return _constant_variant(call)
    if not results or getattr(func, "namespace", "") != "aten" or func._opname in _RESIZING:
        return None
    name, views = func._opname, [view for _, view in results]
    first = call.args[0] if call.args else None
    single = len(views) == 1 and results[0][0] == 0
    if single:
        if name in _ALLOCATIONS:
            return _bind_nothing
        if name in _FILL:
            return _fill_variant(call, _FILL[name])
        if name in _COPY:
            return _bind_copy
        same = isinstance(first, View) and (first.dtype, first.size) == (views[0].dtype, views[0].size)
        if name in _IN_PLACE and same:
            change = _same_overload(func, f"{name}_")
            return None if change is None else _in_place_variant(change)
        if name == "rsub":
            return _bind_rsub
        if func is torch.ops.aten.sum.default:
            return _bind_sum
        if name in ("slice_backward", "select_backward"):
            return _scatter_variant(name.removesuffix("_backward"))
        if name == "constant_pad_nd" and min(call.args[1]) >= 0:
            return _bind_pad
        if name == "embedding" and isinstance(call.args[1], View) and _is_contiguous(call.args[1]):
            return _bind_embedding
    if torch.Tag.dynamic_output_shape in func.tags and not _has_fixed_size(call):
        return None
    if name == "native_batch_norm" and (not isinstance(first, View) or first.stride != views[0].stride):
        return None  # this `out` kernel sums in another order if the memory formats differ
    out = _out_overload(func)
    if out is None or [position for position, _ in results] != list(range(len(out[1]))):
        return None
    return _out_overload_variant(*out)


@cache
def _out_overload(func: Any) -> tuple[Any, tuple[str, ...], frozenset[str]] | None:
    """Return the usable `out` overload of an operator, its result names, and the options to omit; None without one."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    plain = [pair for pair in wanted if pair[0] not in _OPTIONS]
    packet = func._overloadpacket
    exact: dict[bool, Any] = {}
    for name in packet.overloads():
        other = getattr(packet, name)
        arguments = other._schema.arguments
        results = [a.name for a in arguments if a.is_out]
        if len(results) != len(func._schema.returns) or torch.Tag.generated in other.tags:
            continue
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if results and rest in (wanted, plain):
            exact[rest == wanted] = (other, tuple(results))
    if not exact:
        if str(func).removeprefix("aten.") in _NUMBERS:
            number = func._overloadpacket.out
            return number, ("out",), frozenset()
        return None
    full = True in exact
    return *exact[full], frozenset() if full else _OPTIONS


def _same_overload(func: Any, name: str) -> Any:
    """Return the overload of the operator called `name` that has the same overload name as `func`, or None."""
    packet = getattr(torch.ops.aten, name, None)
    overload = func._overloadname or "default"
    return getattr(packet, overload) if packet and overload in packet.overloads() else None


def _has_fixed_size(call: Call) -> bool:
    """Return whether a call, tagged as having a data-dependent size, is an indexing without masks, of fixed size."""
    if call.func is not torch.ops.aten.index.Tensor:
        return False
    kinds = [v.dtype for v in call.args[1] if isinstance(v, View)]
    return torch.bool not in kinds and torch.uint8 not in kinds


def _is_contiguous(view: View) -> bool:
    steps, step = [], 1
    for size in reversed(view.size):
        steps.append(step)
        step *= size
    return view.stride == tuple(reversed(steps))


def _out_overload_variant(func: Any, names: tuple[str, ...], without: frozenset[str]) -> OutVariant:
    op = func._op

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[torch.Tensor]) -> Bound:
        named = {k: v for k, v in kwargs.items() if k not in without}
        named.update(zip(names, outs, strict=True))
        return lambda: op(*args, **named)

    return bind


def _bind_nothing(args: Any, kwargs: Any, outs: list[torch.Tensor]) -> Bound:
    return lambda: None


def _fill_variant(call: Call, value: float | None) -> OutVariant:
    names = [a.name for a in call.func._schema.arguments]
    if value is None:
        position = names.index("s" if call.func._opname == "scalar_tensor" else "fill_value")
        value = call.args[position]

    def bind(args: Any, kwargs: Any, outs: list[torch.Tensor]) -> Bound:
        return lambda: outs[0].fill_(value)

    return bind


def _constant_variant(call: Call) -> OutVariant:
    def bind(args: Any, kwargs: Any, outs: list[torch.Tensor]) -> Bound:
        return lambda: outs[0].copy_(call.func.values)

    return bind


def _bind_copy(args: tuple[Any, ...], kwargs: Any, outs: list[torch.Tensor]) -> Bound:
    # Non-blocking only towards the device: the next operator may read a copy to the host.
    non_blocking = bool(kwargs.get("non_blocking")) and outs[0].device.type != "cpu"
    return lambda: outs[0].copy_(args[0], non_blocking=non_blocking)


def _in_place_variant(func: Any) -> OutVariant:
    op = func._op

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[torch.Tensor]) -> Bound:
        def run() -> None:
            outs[0].copy_(args[0])
            op(outs[0], *args[1:], **kwargs)

        return run

    return bind


def _scatter_variant(name: str) -> OutVariant:
    """Return the out variant of the gradient of a slice: fill with zeros, then copy into the slice."""

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[torch.Tensor]) -> Bound:
        part = getattr(torch.ops.aten, name)(outs[0], *args[2:], **kwargs)

        def run() -> None:
            outs[0].zero_()
            part.copy_(args[0])

        return run

    return bind


def _bind_pad(args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[torch.Tensor]) -> Bound:
    """Bind constant padding; its argument lists (before, after) for each dim, beginning with the last dim."""
    inside, pad = outs[0], args[1]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    for position in range(len(pad) // 2):
        dim = args[0].dim() - 1 - position
        inside = inside.narrow(dim, pad[2 * position], args[0].shape[dim])

    def run() -> None:
        outs[0].fill_(value)
        inside.copy_(args[0])

    return run


def _bind_rsub(args: tuple[Any, ...], kwargs: Any, outs: list[torch.Tensor]) -> Bound:
    left, right = args[1], args[0]
    alpha = args[2] if len(args) > 2 else kwargs.get("alpha", 1)
    op = torch.ops.aten.sub.out._op
    return lambda: op(left, right, alpha=alpha, out=outs[0])


def _bind_sum(args: tuple[Any, ...], kwargs: Any, outs: list[torch.Tensor]) -> Bound:
    op = torch.ops.aten.sum.IntList_out._op
    return lambda: op(args[0], [], False, out=outs[0], **kwargs)


def _bind_embedding(args: tuple[Any, ...], kwargs: Any, outs: list[torch.Tensor]) -> Bound:
    rows, width = args[1].reshape(-1), args[0].shape[1]
    table, flat = args[0], outs[0].view(-1, width)
    op = torch.ops.aten.index_select.out._op
    return lambda: op(table, 0, rows, out=flat)
