"""Collectives on local tensors over one process group, each counted and timed under a `Purpose`.

A differentiable collective is a pair of functions: one for the forward, one for the gradient. `launch_` functions with
`async_op=False` block until the collective is complete, as in torch. No function dispatches a DTensor operator, because
in eager mode the dispatch costs more than the small operators themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.ir import Flight, Purpose

# torch 2.13 renamed both functions and deprecates the names of 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_listener: ContextVar[Callable[[Flight], None] | None] = ContextVar("flights", default=None)
_current: ContextVar[tuple[Purpose | None, bool]] = ContextVar("purpose", default=(None, False))


def current_purpose() -> Purpose | None:
    """Return the purpose of the collective that is being issued; None outside of this module, such as in FSDP."""
    return _current.get()[0]


def is_coalesced() -> bool:
    """Return whether the message being issued belongs to a batch of messages that are issued before the first wait."""
    return _current.get()[1]


@contextmanager
def flights_to(listener: Callable[[Flight], None]) -> Iterator[None]:
    """Pass a `Flight` with the times of each collective of this module to `listener`, after the wait for it.

    This covers collectives that the current thread issues inside the context, except in compiled code. Times are
    measured on the host: on an accelerator, a wait may return before the collective is complete.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class _Flight:
    """Start and completion time of one collective, for the listener of `flights_to`."""

    def __init__(self, listener: Callable[[Flight], None]) -> None:
        self._listener = listener
        self.start_s = time.perf_counter()
        self.end_s: float | None = None

    def watch(self, work: dist.Work | None) -> None:
        if work is not None:
            # gloo does not report the completion of reduce-scatters: they count as in flight until the wait ends.
            with suppress(RuntimeError):
                work.get_future().add_done_callback(self._complete)

    def _complete(self, _: Any) -> None:
        self.end_s = time.perf_counter()

    def report(self, kind: str, name: Purpose, sent: Tensor, wait_s: float) -> None:
        """Pass a `Flight` to the listener after the wait, which began at `wait_s`; `sent` is the sent tensor."""
        now = time.perf_counter()
        work = kind, sent.numel() * sent.element_size()
        self._listener(Flight(name, work, self.start_s, wait_s, now, self.end_s or now))


def _new_flight() -> _Flight | None:
    listener = None if torch.compiler.is_compiling() else _listener.get()
    return None if listener is None else _Flight(listener)


@contextmanager
def purpose(name: Purpose, coalesced: bool = False) -> Iterator[None]:
    """Set the results of `current_purpose` and `is_coalesced` in this context; no effect in compiled code."""
    if torch.compiler.is_compiling():  # purposes are read in eager code only
        yield
        return
    token = _current.set((name, coalesced))
    try:
        yield
    finally:
        _current.reset(token)


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.of_gradients = backward
        return forward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        result = ctx.of_gradients(*grads)
        return (None, None, *(result if isinstance(result, tuple) else (result,)))


def paired(forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
    """Return `forward(*tensors)`; autograd calls `backward`, which must be the transpose of `forward`.

    Args:
        forward: Linear function of the tensors; it must not return an input.
        backward: Function from the gradients of the result to the gradients of `tensors`.
        tensors: Inputs; autograd does not save them.
    """
    return _Paired.apply(forward, backward, *tensors)


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, name: Purpose) -> Tensor:
    """Sum `x` over ranks in place and return it; not differentiable."""
    return _launch("all_reduce", partial(dist.all_reduce, x, group=group), x, x, group, name)()


def all_to_all(
    out: Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    name: Purpose,
    receive: list[int] | None = None,
    send: list[int] | None = None,
) -> Tensor:
    """Fill `out` with the rows that all ranks send to this rank, in rank order; not differentiable.

    Args:
        out: Received rows.
        x: Rows to send, first those for rank 0, then those for rank 1, and so on.
        group: Process group.
        name: Purpose of the collective.
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
    """Issue an all-to-all, see `all_to_all`; return a function that waits for it and returns `out`."""
    issue = partial(dist.all_to_all_single, out, x, receive, send, group=group, async_op=async_op)
    return _launch("all_to_all", issue, out, x, group, name)


def launch_gather_rows(x: Tensor, group: dist.ProcessGroup, name: Purpose, *, async_op: bool) -> Callable[[], Tensor]:
    """Issue an all-gather, see `gather_rows`; return a function that waits for it and returns the gathered tensor."""
    out, x = x.new_empty(group.size() * x.shape[0], *x.shape[1:]), x.contiguous()
    issue = partial(all_gather_single, out, x, group=group, async_op=async_op)
    return _launch("all_gather", issue, out.view(group.size(), *x.shape), x, group, name)


def launch_reduce_into(
    out: Tensor, rows: Tensor, group: dist.ProcessGroup, name: Purpose, *, async_op: bool
) -> Callable[[], Tensor]:
    """Issue a reduce-scatter (sum) of `rows` into `out`; return a function that waits for it and returns `out`."""
    issue = partial(_reduce_scatter, out, rows, group=group, async_op=async_op)
    return _launch("reduce_scatter", issue, out, rows, group, name)


def launch_all_reduce(x: Tensor, group: dist.ProcessGroup, name: Purpose, *, async_op: bool) -> Callable[[], Tensor]:
    """Issue an all-reduce of a copy of `x`; return a function that waits for it and returns the sum."""
    out = x.contiguous().clone()
    issue = partial(dist.all_reduce, out, group=group, async_op=async_op)
    return _launch("all_reduce", issue, out, out, group, name)


def _launch(
    kind: str,
    issue: Callable[[], dist.Work | None],
    out: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup | None,
    name: Purpose,
) -> Callable[[], Tensor]:
    flight = _new_flight()
    if torch.compiler.is_compiling():
        work = issue()
    else:  # as in `purpose`, without the cost of a context manager
        token = _current.set((name, False))
        try:
            work = issue()
        finally:
            _current.reset(token)
    if flight is not None:
        flight.watch(work)
    return partial(await_collective, kind, work, out, sent, group, name, flight)


def await_collective(
    kind: str,
    work: dist.Work | None,
    out: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup | None,
    name: Purpose,
    flight: _Flight | None,
) -> Tensor:
    """Wait for a collective and return `out`.

    The argument `sent` keeps the sent tensor alive during the wait. If a rank hangs, `runtime.supervision` reads the
    arguments from the stack frame of this function.
    """
    begin_s = time.perf_counter() if flight is not None else 0.0
    if work is not None:
        work.wait()
    if flight is not None:
        flight.report(kind, name, sent, begin_s if work is not None else flight.start_s)
    return out


def gather_rows(x: Tensor, group: dist.ProcessGroup, name: Purpose) -> Tensor:
    """Return every rank's tensor, stacked along a new first dim; not differentiable."""
    return launch_gather_rows(x, group, name, async_op=False)()


def send_receive(
    sent: Tensor, to: int, source: int, group: dist.ProcessGroup, name: Purpose
) -> tuple[Tensor, Callable[[], None]]:
    """Issue a send of a contiguous tensor to group rank `to`, and a receive of the same shape from group rank `source`.

    Returns:
        The receive buffer, and a function that waits until both transfers are complete.
    """
    received = torch.empty_like(sent)
    pair = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=to),
        dist.P2POp(dist.irecv, received, group=group, group_peer=source),
    ]
    with purpose(name, coalesced=True):
        flight = _new_flight()
        works = dist.batch_isend_irecv(pair)

    # The default value keeps the buffer alive until it is sent.
    def wait(sent: Tensor = sent) -> None:
        begin_s = time.perf_counter()
        for work in works:
            work.wait()
        if flight is not None:
            flight.report("send_recv", name, sent, begin_s)

    return received, wait
