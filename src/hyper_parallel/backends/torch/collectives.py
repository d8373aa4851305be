"""Collectives on local tensors over one process group; every call says what it is for, to whoever records it.

A collective whose result takes part in autograd is a pair of functions: the one that runs forward, and the one that
its gradient goes through. Nothing here dispatches a DTensor operator: in eager mode that costs more than the small
operators themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.ir import Purpose

# torch 2.13 renamed the two calls and deprecates the names that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_current: ContextVar[tuple[Purpose | None, bool]] = ContextVar("purpose", default=(None, False))


def current_purpose() -> Purpose | None:
    """Purpose of the collectives that begin now; None outside of our own wrappers, as in FSDP."""
    return _current.get()[0]


def issued_together() -> bool:
    """The messages that begin now are one exchange: all are sent before one is waited for."""
    return _current.get()[1]


@contextmanager
def purpose(name: Purpose, together: bool = False) -> Iterator[None]:
    """Collectives that begin inside are for this; the innermost context counts."""
    if torch.compiler.is_compiling():  # recorders see eager code only
        yield
        return
    token = _current.set((name, together))
    try:
        yield
    finally:
        _current.reset(token)


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor
    ) -> Any:
        ctx.of_gradients = backward
        return forward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        result = ctx.of_gradients(*grads)
        return (None, None, *(result if isinstance(result, tuple) else (result,)))


def paired(forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
    """`forward` of some tensors; their gradients are `backward`, its transpose, of the gradients of the result.

    A linear function, which returns no input of its own and keeps nothing for backward.
    """
    return _Paired.apply(forward, backward, *tensors)


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, name: Purpose) -> Tensor:
    """Sum over ranks in place; no gradient."""
    with purpose(name):
        dist.all_reduce(x, group=group)
    return x


def all_to_all(
    out: Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    name: Purpose,
    receive: list[int] | None = None,
    send: list[int] | None = None,
) -> Tensor:
    """Fill `out` with the rows that all ranks send this one, in their order; no gradient.

    Rows of `x` are for rank 0, then for rank 1, ...: `send` for each, of which `receive` come; None: equally many.
    """
    with purpose(name):
        dist.all_to_all_single(out, x, receive, send, group=group)
    return out


def launch_all_to_all(
    out: Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    name: Purpose,
    receive: list[int] | None = None,
    send: list[int] | None = None,
    *,
    async_op: bool,
) -> Callable[[], Tensor]:
    """Issue `all_to_all` and return the function that waits for it and returns `out`."""
    with purpose(name):
        work = dist.all_to_all_single(out, x, receive, send, group=group, async_op=async_op)
    return partial(await_collective, "all_to_all", work, out, x, group, name)


def launch_gather_rows(
    x: Tensor, group: dist.ProcessGroup, name: Purpose, *, async_op: bool
) -> Callable[[], Tensor]:
    """Issue `gather_rows` and return the function that waits for it and returns its result."""
    out, x = x.new_empty(group.size() * x.shape[0], *x.shape[1:]), x.contiguous()
    with purpose(name):
        work = _all_gather(out, x, group=group, async_op=async_op)
    stacked = out.view(group.size(), *x.shape)
    return partial(await_collective, "all_gather", work, stacked, x, group, name)


def launch_reduce_into(
    out: Tensor, rows: Tensor, group: dist.ProcessGroup, name: Purpose, *, async_op: bool
) -> Callable[[], Tensor]:
    """Issue `reduce_into` and return the function that waits for it and returns `out`."""
    with purpose(name):
        work = _reduce_scatter(out, rows, group=group, async_op=async_op)
    return partial(await_collective, "reduce_scatter", work, out, rows, group, name)


def launch_all_reduce(
    x: Tensor, group: dist.ProcessGroup, name: Purpose, *, async_op: bool
) -> Callable[[], Tensor]:
    """Issue a sum over ranks of a copy and return the function that waits for it and returns the sum."""
    out = x.contiguous().clone()
    with purpose(name):
        work = dist.all_reduce(out, group=group, async_op=async_op)
    return partial(await_collective, "all_reduce", work, out, out, group, name)


def await_collective(
    kind: str,
    work: dist.Work | None,
    out: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup,
    name: Purpose,
) -> Tensor:
    """Wait for a collective and return `out`.

    `sent` is an argument to keep it alive until then; a monitor reads `kind`, `group` and `name` of a rank that hangs.
    """
    if work is not None:
        work.wait()
    return out


def gather_rows(x: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """Stack every rank's tensor along a new first dim; no gradient."""
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    with purpose(name):
        _all_gather(out, x.contiguous(), group=group)
    return out.view(group.size(), *x.shape)


def reduce_into(out: Tensor, rows: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """Fill `out` with this rank's rows of the sum; no gradient."""
    with purpose(name):
        _reduce_scatter(out, rows, group=group)
    return out


def send_receive(
    sent: Tensor, to: int, source: int, group: dist.ProcessGroup, name: Purpose
) -> tuple[Tensor, Callable[[], None]]:
    """Send a contiguous tensor to one rank of the group while one of its shape comes from another.

    Returns what comes, and how to wait until it is here and `sent` may be overwritten.
    """
    came = torch.empty_like(sent)
    pair = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=to),
        dist.P2POp(dist.irecv, came, group=group, group_peer=source),
    ]
    with purpose(name, together=True):
        works = dist.batch_isend_irecv(pair)

    def wait(sent: Tensor = sent) -> None:  # holds the buffer until it is sent
        for work in works:
            work.wait()

    return came, wait
