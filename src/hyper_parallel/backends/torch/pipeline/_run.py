"""One pass of a pipeline rank over the microbatches of a step, action by action.

Every action finds what it takes on this rank, or waits for it to arrive; receives were posted where the schedule lists
them. What a stage made goes to the stage after it, what its backward made to the stage before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch._purpose import purpose
from hyper_parallel.backends.torch.pipeline._split_backward import WeightGradients, input_gradient
from hyper_parallel.ir import Action, Purpose

if TYPE_CHECKING:
    from hyper_parallel.backends.torch.pipeline._apply import Pipeline

Microbatch = Mapping[str, Any]
LossOf = Callable[[Microbatch], Tensor]
Span = Callable[[str, str], AbstractContextManager[Any]]
_Key = tuple[int, int]
"""Stage and microbatch."""
_Message = tuple[Tensor, ...]
"""Activations or their gradient, and what the auxiliary loss of experts adds."""
_TARGETS = ("labels", "shift_labels")


class PipelineRun:
    """One pass over the microbatches: what was made and received and is still needed."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf,
        span: Span,
    ) -> None:
        self._pipeline = pipeline
        self._model = model
        self._microbatches = microbatches
        self._loss_of = loss_of
        self._span = span
        self._splits = pipeline.splits(model)
        # Evaluation has the cross entropy alone.
        self._balance = pipeline.balance if torch.is_grad_enabled() else None
        self._total = torch.zeros((), dtype=torch.float64, device=pipeline._found.device)
        # Activations and gradients on their way, by the stage that takes them.
        self._activations: dict[_Key, _Message] = {}
        self._gradients: dict[_Key, _Message] = {}
        self._coming: dict[tuple[str, _Key], tuple[_Message, list[Any]]] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        # Input of forwards whose backward is still to come, and the roots of that backward.
        self._kept: dict[_Key, tuple[Tensor | None, list[Tensor]]] = {}
        self._weights: dict[_Key, WeightGradients] = {}
        # Derivative of the auxiliary loss, by microbatch, from the last stage's forward to its backward.
        self._slopes: dict[int, Tensor] = {}

    def do(self, action: Action) -> None:
        """Run one action."""
        kind, stage, i = action.kind, action.stage, action.microbatch
        if kind == "REDUCE_GRAD":
            self._pipeline.reduce(stage)
        if i is None:
            return  # FSDP gathers and frees parameters by its own hooks
        if kind.startswith("SEND"):
            step = 1 if kind == "SEND_F" else -1
            name = Purpose.PIPELINE_ACTIVATIONS if step > 0 else Purpose.PIPELINE_GRADIENTS
            table = self._activations if step > 0 else self._gradients
            self._send(table.pop((stage + step, i)), stage + step, name)
        elif kind.startswith("RECV"):
            self._receive(kind[-1], stage, i)
        else:
            taken = self._arrived(kind, stage, i)
            with self._span(str(action), "compute"):
                {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}[
                    kind
                ](stage, i, taken)

    def finish(self) -> Tensor:
        """Wait until everything is sent; the loss on the rank of the last stage."""
        for work, _ in self._sent:
            work.wait()
        return self._total

    def _forward(self, stage: int, i: int, message: _Message | None) -> None:
        batch, last = self._microbatches[i], self._pipeline.last
        received, *routed = message or (None,)
        if received is not None and torch.is_grad_enabled():
            received = received.detach().requires_grad_()
        passing = self._pipeline.stages.passing
        passing.stage, passing.received, passing.output = stage, received, None
        passing.enter = self._pipeline.enter(batch)
        try:
            if stage == last:
                out = self._loss_of(batch)
                self._total += out.detach()
            else:
                given = {k: v for k, v in batch.items() if k not in _TARGETS}
                self._model(**given, use_cache=False)
                assert passing.output is not None
                out = passing.output
        finally:
            passing.stage, passing.received, passing.output = -1, None, None
        roots, more = [out], ()
        if self._balance is not None:
            mine, total = self._balance.add(*routed or (None,))
            roots += [] if mine is None else [mine]
            more = (total,)
            if stage == last:
                share, slope = self._balance.close(total)
                self._total += share
                self._slopes[i] = slope
        if stage < last:
            self._activations[stage + 1, i] = (out.detach(), *more)
        if torch.is_grad_enabled():
            self._kept[stage, i] = (received, roots)

    def _roots(self, stage: int, i: int, message: _Message | None) -> tuple[_Message, list[Any]]:
        """What goes on to the stage before beside the gradient of its output, and the gradients of the roots."""
        grad, *more = message or (None, *([] if self._balance is None else [self._slopes.pop(i)]))
        _, roots = self._kept[stage, i]
        slopes = [slope.to(roots[-1].dtype) for slope in more]
        return tuple(more), [grad, *slopes][: len(roots)]

    def _backward(self, stage: int, i: int, message: _Message | None) -> None:
        more, grads = self._roots(stage, i, message)
        given, roots = self._kept.pop((stage, i))
        torch.autograd.backward(roots, grads)
        if given is not None:
            assert given.grad is not None
            self._gradients[stage - 1, i] = (given.grad, *more)

    def _input(self, stage: int, i: int, message: _Message | None) -> None:
        if not self._splits:
            self._backward(stage, i, message)
            return
        given, roots = self._kept[stage, i]
        if given is None:
            # The first stage has no input: all of it is weight gradients.
            if message is not None:
                self._gradients[stage, i] = message
            return
        more, grads = self._roots(stage, i, message)
        grad, self._weights[stage, i] = input_gradient(roots, grads, given)
        self._gradients[stage - 1, i] = (grad, *more)
        del self._kept[stage, i]

    def _weight(self, stage: int, i: int, message: _Message | None) -> None:
        if (stage, i) in self._weights:
            self._weights.pop((stage, i)).run()
        elif (stage, i) in self._kept:
            self._backward(stage, i, self._gradients.pop((stage, i), None))

    def _arrived(self, kind: str, stage: int, i: int) -> _Message | None:
        """What an action takes: made on this rank, or received."""
        if kind == "W" or (kind == "F" and stage == 0):
            return None
        if kind != "F" and stage == self._pipeline.last:
            return None
        coming = self._coming.pop(("F" if kind == "F" else "B", (stage, i)), None)
        if coming is None:
            return (self._activations if kind == "F" else self._gradients).pop((stage, i))
        message, works = coming
        with self._span(f"{stage}RECV_{'F' if kind == 'F' else 'B'}{i}", "wait"):
            for work in works:
                work.wait()
        return message

    def _receive(self, way: str, stage: int, i: int) -> None:
        peer = self._pipeline.rank_of[stage - 1 if way == "F" else stage + 1]
        rooms: _Message = (self._pipeline.message(self._microbatches[i]),)
        if self._balance is not None:
            rooms += (self._balance.rooms()[way == "B"],)
        works = [dist.irecv(room, group=self._pipeline.group, group_src=peer) for room in rooms]
        self._coming[way, (stage, i)] = (rooms, works)

    def _send(self, message: _Message, to: int, name: Purpose) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        peer = self._pipeline.rank_of[to]
        for tensor in map(Tensor.contiguous, message):
            with purpose(name):
                work = dist.isend(tensor, group=self._pipeline.group, group_dst=peer)
            self._sent.append((work, tensor))
