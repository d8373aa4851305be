"""Collectives on local tensors over one process group; every call has a purpose, which recorders read.

A differentiable collective is a pair of functions: one for the forward, one for the gradient. No function dispatches a
DTensor operator: in eager mode the dispatch costs more than the small operators themselves.
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

# torch 2.13 renamed both functions and deprecates the names of 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_current: ContextVar[tuple[Purpose | None, bool]] = ContextVar("purpose", default=(None, False))


def current_purpose() -> Purpose | None:
    """Return the purpose of collectives issued now; None outside the functions of this package, as in FSDP."""
    return _current.get()[0]


def is_coalesced() -> bool:
    """Return whether messages issued now are coalesced: all are issued before the first wait."""
    return _current.get()[1]


@contextmanager
def purpose(name: Purpose, coalesced: bool = False) -> Iterator[None]:
    """Set the purpose of collectives issued in this context; of nested contexts the innermost one applies."""
    if torch.compiler.is_compiling():  # recorders see eager code only
        yield
        return
    token = _current.set((name, coalesced))
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
    """Apply a linear function to tensors, with its transpose as the backward function.

    Args:
        forward: Linear function of the tensors; it must not return an input.
        backward: Function from the gradients of the result to those of the tensors. No tensors are saved.
        tensors: Inputs.
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
    """Fill `out` with the rows that all ranks send to this rank, in rank order; no gradient.

    Args:
        out: Received rows.
        x: Rows to send, first those for rank 0, then those for rank 1, and so on.
        group: Process group.
        name: Purpose.
        receive: Number of rows from each rank; None: equal numbers.
        send: Number of rows to each rank; None: equal numbers.
    """
    return launch_all_to_all(out, x, group, name, receive, send, async_op=False)()


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
    return launch_gather_rows(x, group, name, async_op=False)()


def reduce_into(out: Tensor, rows: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """Fill `out` with this rank's rows of the sum; no gradient."""
    return launch_reduce_into(out, rows, group, name, async_op=False)()


def send_receive(
    sent: Tensor, to: int, source: int, group: dist.ProcessGroup, name: Purpose
) -> tuple[Tensor, Callable[[], None]]:
    """Send a contiguous tensor to one rank of the group and receive one of the same shape from another rank.

    Returns:
        The received tensor, and a function that waits until it is complete and `sent` may be overwritten.
    """
    received = torch.empty_like(sent)
    pair = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=to),
        dist.P2POp(dist.irecv, received, group=group, group_peer=source),
    ]
    with purpose(name, coalesced=True):
        works = dist.batch_isend_irecv(pair)

    def wait(
        sent: Tensor = sent,
    ) -> None:  # the default value keeps the buffer alive until it is sent
        for work in works:
            work.wait()

    return received, wait
