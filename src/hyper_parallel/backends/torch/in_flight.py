"""Collectives in flight: a differentiable collective as two autograd nodes, start and finish.

    forward     start issues the collective         finish waits for the result
    backward    start waits for the gradient        finish issues the transposed collective

Whatever runs between start and finish overlaps with the collective, and so does its backward: autograd runs nodes in
the reverse order of their creation, so between the backward of finish and that of start it runs the backward of what
lay between them. No thread takes part. The order of issue is the same on every rank, because it follows from the
order of creation alone.

    serial      `collective(launch, transpose, x)`                  one node, as without this module
    chunks      `pending = start(launch, transpose, x)` ... `pending.finish()`
    halves      `interleave(calls)`: calls take turns; each is suspended while its collective is in flight

Sources: Wang et al. 2024 (Domino), section 3, for half-batches; the schedule of backward is ours.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.collectives import launch_all_reduce, paired
from hyper_parallel.ir import Purpose

Wait = Callable[[], Any]
"""Blocks until a collective is complete, and returns its result."""


class CollectiveLauncher(Protocol):
    """Callable that issues a collective; with `async_op`, it returns before completion."""

    def __call__(self, *tensors: Tensor, async_op: bool) -> Wait:
        """Return the function that waits for the result."""
        ...


class _Flight:
    """Waits of a collective in flight, and of its transpose in backward; None: not in flight."""

    def __init__(self) -> None:
        self.forward: Wait | None = None
        self.backward: Wait | None = None


class _Start(torch.autograd.Function):
    """Issue the collective; the results stand for it until `_Finish` replaces them."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, launch: CollectiveLauncher, *tensors: Tensor) -> Any:
        ctx.flight, ctx.num_tensors = flight, len(tensors)
        flight.forward = launch(*tensors, async_op=True)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.flight.backward = ctx.flight.backward(), None
        return None, None, *(grads if isinstance(grads, tuple) else (grads,))


class _Finish(torch.autograd.Function):
    """Wait for the collective; backward issues its transpose, whose result the backward of `_Start` returns."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, transpose: CollectiveLauncher, *started: Tensor) -> Any:
        ctx.flight, ctx.transpose = flight, transpose
        ctx.inputs = [(x.shape, x.dtype, x.device) for x in started]
        assert flight.forward is not None
        result, flight.forward = flight.forward(), None
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.backward = ctx.transpose(*grads, async_op=True)
        # Autograd asks for a gradient of this shape; `_Start` replaces it.
        stand_ins = (torch.zeros((), dtype=t, device=d).expand(s) for s, t, d in ctx.inputs)
        return None, None, *stand_ins


class PendingCollective:
    """Collective in flight; `finish` must be called once."""

    def __init__(
        self, launch: CollectiveLauncher, transpose: CollectiveLauncher, *tensors: Tensor
    ) -> None:
        self._flight, self._transpose = _Flight(), transpose
        self._started = _Start.apply(self._flight, launch, *tensors)

    def finish(self, *, leads_to_start: bool = False) -> Any:
        """Return the result, a tensor or a tuple; another half-batch computes while the collective is in flight.

        Args:
            leads_to_start: The next collective starts after little computation, see `offer_turn`.
        """
        if (halves := _interleaved.get()) is not None:
            halves.switch(leads_to_start)
        return _Finish.apply(self._flight, self._transpose, *self._started)


def start(
    launch: CollectiveLauncher, transpose: CollectiveLauncher, *tensors: Tensor
) -> PendingCollective:
    """Issue a collective.

    Args:
        launch: The collective, a linear function of the tensors.
        transpose: Its transpose, applied to the gradients of the results.
        tensors: Inputs, of which nothing else may be changed in place before `finish`.
    """
    return PendingCollective(launch, transpose, *tensors)


def collective(
    launch: CollectiveLauncher,
    transpose: CollectiveLauncher,
    *tensors: Tensor,
    leads_to_start: bool = False,
) -> Any:
    """Return the result of a collective; arguments as in `start` and `PendingCollective.finish`.

    It is in flight while another half-batch computes, inside of `interleave`; elsewhere the call blocks.
    """
    if _interleaved.get() is not None:
        return start(launch, transpose, *tensors).finish(leads_to_start=leads_to_start)
    return _blocking(launch, transpose, *tensors)


def offer_turn() -> None:
    """Let another half-batch go on if it soon starts its next collective, in the middle of a long computation.

    Without this, a half whose collective is complete would not start the next one before the computation ends, and the
    link would be idle.
    """
    if (halves := _interleaved.get()) is not None:
        halves.offer()


def _blocking(launch: CollectiveLauncher, transpose: CollectiveLauncher, *tensors: Tensor) -> Any:
    def run(*inputs: Tensor) -> Any:
        return launch(*inputs, async_op=False)()

    def run_transpose(*grads: Tensor) -> Any:
        return transpose(*grads, async_op=False)()

    return paired(run, run_transpose, *tensors)


def _launch_identity(x: Tensor, *, async_op: bool) -> Wait:
    return lambda: x.view_as(x)


def _launch_sum(group: ProcessGroup, name: Purpose) -> CollectiveLauncher:
    return partial(launch_all_reduce, group=group, name=name)


def sum_forward(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    """Sum over ranks; the gradient, equal on all ranks, passes unchanged."""
    return collective(_launch_sum(group, name), _launch_identity, x)  # type: ignore[no-any-return]


def sum_backward(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    """Return the same values; the ranks' gradients are summed."""
    return collective(_launch_identity, _launch_sum(group, name.backward), x)  # type: ignore[no-any-return]


def sum_both(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    """Sum over ranks, forward and backward."""
    return collective(_launch_sum(group, name), _launch_sum(group, name.backward), x)  # type: ignore[no-any-return]


def blocking_sum(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    """Return `sum_both` without a turn of another half-batch, for use inside of a context of this thread."""
    return _blocking(_launch_sum(group, name), _launch_sum(group, name.backward), x)  # type: ignore[no-any-return]


class _Interleaved:
    """Calls that take turns on one thread."""

    def __init__(self, on_turn: Callable[[int], None]) -> None:
        self._on_turn = on_turn
        self._scheduler = getcurrent()
        self._running = 0
        self._soon_starting: set[int] = set()

    def switch(self, leads_to_start: bool = False) -> None:
        """Suspend the running call until the others had their turn."""
        index = self._running
        if leads_to_start:
            self._soon_starting.add(index)
        self._scheduler.switch()
        self._soon_starting.discard(index)

    def offer(self) -> None:
        """Suspend the running call if another one soon starts its next collective."""
        if self._soon_starting - {self._running}:
            self._scheduler.switch()

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of the calls."""
        results: list[Any] = [None] * len(calls)

        def keep_result(index: int) -> None:
            results[index] = calls[index]()

        turns = [greenlet(partial(keep_result, index)) for index in range(len(calls))]
        for turn in turns:
            turn.gr_context = contextvars.copy_context()
        try:
            while any(not turn.dead for turn in turns):
                for index, turn in enumerate(turns):
                    if not turn.dead:
                        self._running = index
                        self._on_turn(index)
                        turn.switch()
        finally:
            for turn in turns:
                if turn:  # suspended when another one failed
                    turn.throw()
        return results


_interleaved: ContextVar[_Interleaved | None] = ContextVar("interleaved", default=None)


def interleave(
    calls: Sequence[Callable[[], Any]], on_turn: Callable[[int], None] = lambda index: None
) -> list[Any]:
    """Return the results of calls that take turns: one computes while the collectives of the others are in flight.

    The order of turns is fixed, so collectives are issued in one order on all ranks if every rank runs the same calls.

    Args:
        calls: Functions without arguments. They may not be inside of `interleave` themselves.
        on_turn: Called with the index of a call before it starts or resumes.

    Raises:
        Exception: The first error of a call; the others are ended.
    """
    halves = _Interleaved(on_turn)
    token = _interleaved.set(halves)
    try:
        return halves.run(calls)
    finally:
        _interleaved.reset(token)
