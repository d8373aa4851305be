"""Collectives in flight: a differentiable collective as two autograd nodes, start and finish.

    forward     start issues the collective         finish waits for the result
    backward    start waits for the gradient        finish issues the transposed collective

Code that runs between start and finish overlaps with the collective. Its backward overlaps with the transposed
collective, because autograd runs nodes in the reverse order of their creation. No threads are used. All ranks create
nodes in the same order, so they issue collectives in the same order.

    serial          `collective(launch, transpose, x)`: a single node that blocks
    chunks          `pending = PendingCollective(launch, transpose, x)` ... `pending.finish()`
    half-batches    `Turns`: two halves of a microbatch alternate; each is suspended during its collective

Source of half-batches: Wang et al. 2024 (Domino), section 3.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.collectives import launch_all_reduce, paired
from hyper_parallel.errors import MissingDependency
from hyper_parallel.ir import Purpose

Wait = Callable[[], Any]
"""Function that blocks until a collective is complete, and returns its result."""


class CollectiveLauncher(Protocol):
    """Callable that issues a collective; with `async_op`, it returns before completion."""

    def __call__(self, *tensors: Tensor, async_op: bool) -> Wait:
        """Issue the collective and return a function that waits for its result and returns it."""
        ...


@dataclass(slots=True)
class _Flight:
    """Functions that wait for a collective and for the transposed collective of backward; None: not in flight."""

    forward: Wait | None = None
    backward: Wait | None = None


class _Start(torch.autograd.Function):
    """Autograd node that issues the collective; it returns its inputs, and `_Finish` returns the result."""

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
    """Autograd node that waits for the collective and returns its result.

    The backward of `_Finish` issues the transposed collective. The backward of `_Start` waits for it.
    """

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
        # Autograd requires gradients of the inputs' shapes; the backward of `_Start` ignores their values.
        placeholders = (torch.zeros((), dtype=t, device=d).expand(s) for s, t, d in ctx.inputs)
        return None, None, *placeholders


class PendingCollective:
    """Collective in flight; the constructor issues it, and `finish` must be called once.

    Args:
        launch: The collective, a linear function of the tensors.
        transpose: Transposed collective, applied to the gradients of the results.
        tensors: Inputs; no other code may change them in place before `finish`.
    """

    def __init__(self, launch: CollectiveLauncher, transpose: CollectiveLauncher, *tensors: Tensor) -> None:
        self._flight, self._transpose = _Flight(), transpose
        self._started = _Start.apply(self._flight, launch, *tensors)

    def finish(self, *, leads_to_start: bool = False) -> Any:
        """Wait for the collective and return its result, a tensor or a tuple.

        In a half-batch, the other half-batch computes during the wait.

        Args:
            leads_to_start: Whether the caller starts another collective after little computation, see `offer_turn`.
        """
        if (half := _running_half()) is not None:
            half.turns.suspend(half.index, leads_to_start)
        return _Finish.apply(self._flight, self._transpose, *self._started)


def collective(
    launch: CollectiveLauncher,
    transpose: CollectiveLauncher,
    *tensors: Tensor,
    leads_to_start: bool = False,
) -> Any:
    """Run a collective and return its result; arguments as in `PendingCollective` and its `finish`.

    In a half-batch, the other half-batch computes during the wait. Elsewhere the call blocks.
    """
    if _running_half() is not None:
        pending = PendingCollective(launch, transpose, *tensors)
        return pending.finish(leads_to_start=leads_to_start)
    return _blocking(launch, transpose, *tensors)


def offer_turn() -> None:
    """Suspend this half-batch if the other one will soon start a collective; no effect outside of half-batches."""
    if (half := _running_half()) is not None:
        half.turns.offer(half.index)


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
    """Return the sum of `x` over ranks; backward passes on the gradient, which must be equal on all ranks."""
    return collective(_launch_sum(group, name), _launch_identity, x)  # type: ignore[no-any-return]


def sum_backward(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    """Return the values of `x`; backward sums the gradients over ranks."""
    return collective(_launch_identity, _launch_sum(group, name.backward), x)  # type: ignore[no-any-return]


def sum_both(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    """Return the sum of `x` over ranks; backward sums the gradients too."""
    return collective(_launch_sum(group, name), _launch_sum(group, name.backward), x)  # type: ignore[no-any-return]


def blocking_sum(x: Tensor, group: ProcessGroup, name: Purpose) -> Tensor:
    """Return the result of `sum_both` without running the other half-batch meanwhile.

    Code inside a `TorchFunctionMode` needs this function, because the mode would also apply to the other half-batch.
    """
    return _blocking(_launch_sum(group, name), _launch_sum(group, name.backward), x)  # type: ignore[no-any-return]


class Turns:
    """Scheduler of the calls of two half-batches on one thread: one computes while the other waits for a collective.

    The calls of a half-batch run in the order in which they were added, and half-batches alternate in a fixed order.
    If every rank adds the same calls, all ranks therefore issue collectives in the same order.
    """

    def __init__(self) -> None:
        self._greenlet = _greenlet_module()
        self._calls: tuple[deque[Any], ...] = (deque(), deque())
        self._scheduler = self._greenlet.getcurrent()
        self._soon_starting: set[int] = set()
        self._hooks: tuple[list[saved_tensors_hooks], ...] = ([], [])

    def add(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Add one call per half-batch, and run both until the call of the first half-batch has returned.

        Returns:
            A list with the result of each call. The second item is None until the second call has returned, at the
            latest in `finish`.

        Raises:
            Exception: Any error that a call raises. The other unfinished calls are ended first.
        """
        results: list[Any] = [None, None]
        grad = torch.is_grad_enabled()

        def run(index: int) -> None:
            torch.set_grad_enabled(grad)
            results[index] = calls[index]()

        for index, queue in enumerate(self._calls):
            call = self._greenlet.greenlet(partial(run, index))
            context = contextvars.copy_context()
            context.run(_half.set, Half(index, self))
            call.gr_context = context
            queue.append(call)
        self._give_turns(lambda: self._calls[0])
        return results

    def finish(self) -> None:
        """Run all added calls to their end; raise the same errors as `add`."""
        self._give_turns(lambda: self._calls[0] or self._calls[1])

    def close(self) -> None:
        """End all calls that have not returned, after an error."""
        for queue in self._calls:
            while queue:
                if call := queue.popleft():  # a greenlet is true once it has started
                    call.throw()
        self._soon_starting.clear()

    def suspend(self, index: int, leads_to_start: bool = False) -> None:
        """Suspend the call of half-batch `index`, so that the other one runs; see `PendingCollective.finish`."""
        if leads_to_start:
            self._soon_starting.add(index)
        grad, hooks = torch.is_grad_enabled(), self._hooks[index]
        for applied in reversed(hooks):
            applied.__exit__(None, None, None)
        try:
            self._scheduler.switch()
        finally:  # also if `close` ends the call
            for applied in hooks:
                applied.__enter__()
        torch.set_grad_enabled(grad)
        self._soon_starting.discard(index)

    @contextmanager
    def apply(self, index: int, hooks: saved_tensors_hooks) -> Iterator[None]:
        """Apply hooks to tensors that half-batch `index` saves in this context; the other half-batch is unaffected."""
        applied = self._hooks[index]
        with hooks:
            applied.append(hooks)
            try:
                yield
            finally:
                applied.pop()

    def offer(self, index: int) -> None:
        """Suspend the running call of half-batch `index` if the other half-batch will soon start a collective."""
        if self._soon_starting - {index}:
            self.suspend(index)

    def _give_turns(self, is_needed: Callable[[], Any]) -> None:
        self._scheduler, grad = self._greenlet.getcurrent(), torch.is_grad_enabled()
        try:
            while is_needed():
                for queue in self._calls:
                    if is_needed():
                        _resume(queue)
        except BaseException:
            self.close()
            raise
        finally:
            torch.set_grad_enabled(grad)


def _greenlet_module() -> Any:
    try:
        import greenlet
    except ImportError as error:
        raise MissingDependency(
            "half-batches need the package `greenlet`",
            where="overlap",
            hint="pip install greenlet, or run without it: overlap=none",
        ) from error
    return greenlet


def _resume(calls: deque[Any]) -> None:
    """Run the queued calls of one half-batch in order, until a call suspends itself or all have returned."""
    while calls:
        calls[0].switch()
        if not calls[0].dead:
            return
        calls.popleft()


@dataclass(frozen=True, slots=True)
class Half:
    """Index of a half-batch, 0 or 1, and the scheduler of its calls."""

    index: int
    turns: Turns


_half: ContextVar[Half | None] = ContextVar("half", default=None)


def _running_half() -> Half | None:
    """Return the half-batch whose call is running; None outside of half-batches and in compiled code."""
    return None if torch.compiler.is_compiling() else _half.get()


def apply_hooks(hooks: saved_tensors_hooks) -> AbstractContextManager[None]:
    """Return a context that applies hooks to the tensors that the running half-batch saves for backward."""
    half = _half.get()
    assert half is not None
    return half.turns.apply(half.index, hooks)


def half_index() -> int:
    """Return the index of the running half-batch, 0 or 1; 0 outside of half-batches."""
    half = _running_half()
    return 0 if half is None else half.index


def rows_of_half(x: Tensor) -> Tensor:
    """Return the half of `x` along dim 0 that belongs to the running half-batch; `x` outside of half-batches."""
    half = _running_half()
    return x if half is None else x.chunk(2)[half.index]
