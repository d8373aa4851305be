"""Run the stages of one pipeline rank in the order of a schedule.

The schedule is made and verified by `mpmd`, so this file only does what it says: a forward, a backward or one half of
it, a send, a receive. Every action finds what it takes on this rank, or waits for it to arrive; receives were posted
where the schedule lists them. Shapes of messages follow from the batch: [B, S, D] activations, under tensor parallelism
this rank's part of them. Microbatches add up their gradients without communication; what data and tensor parallelism
add over ranks is added once, after the last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hyper_parallel.backends.torch.collectives import all_reduce, purpose, send_receive
from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.data.fsdp import end_backward, hold_reductions, reduce_now
from hyper_parallel.backends.torch.experts.balance_loss import BalanceLoss
from hyper_parallel.backends.torch.pipeline._split_backward import input_gradient
from hyper_parallel.backends.torch.pipeline.stages import StageModules
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.ir import Action, Purpose, Schedule, Strategy
from hyper_parallel.mpmd import forward_schedule, one_by_one, step_schedule

Microbatch = Mapping[str, Any]
LossOf = Callable[[int], Tensor]
"""Loss of a microbatch by its number."""
Span = Callable[[str, str], AbstractContextManager[Any]]
_Key = tuple[int, int]
"""Stage and microbatch."""
_Message = tuple[Tensor, ...]
"""Activations or their gradient, and what the auxiliary loss of experts adds."""
_WAYS = {"F": (1, Purpose.PIPELINE_ACTIVATIONS), "B": (-1, Purpose.PIPELINE_GRADIENTS)}
"""Stages further that a message goes, and what for."""
_TARGETS = ("labels", "shift_labels")


class Pipeline:
    """The pipeline rank of one model; `group` has one rank per pipeline rank, `fsdp` its managed modules, root last."""

    def __init__(
        self,
        model: nn.Module,
        stages: StageModules,
        strategy: Strategy,
        group: dist.ProcessGroup,
        device: torch.device,
        tp: TpState | None,
        context: ContextState | None,
        balance: BalanceLoss | None,
        fsdp: Sequence[nn.Module],
    ) -> None:
        self.stages, self.group, self.rank, self.device = stages, group, group.rank(), device
        self.balance = balance
        self.last = strategy.stages - 1
        self._strategy, self.tp, self._context, self._fsdp = strategy, tp, context, fsdp
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        self._shared_summed = False
        self._hold_fsdp(model)

    def run(
        self,
        model: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf,
        span: Span,
        train: bool,
        scale: float = 1.0,
    ) -> Tensor:
        """Forward and, to train, backward of all microbatches; the loss on the rank of the last stage, 0 elsewhere.

        `scale` is a factor that the losses of `loss_of` have, and that of the routers gets too.
        """
        running = _PipelinePass(self, model, microbatches, loss_of, span, train, scale)
        if not train:
            return running.run()
        gradients = None if self.tp is None else self.tp.gradients
        if gradients is not None:
            gradients.defer()
        if self._shared_summed:
            # What is left of an earlier step is already the sum of both ranks: each goes on with half of it.
            for grad in self._shared_gradients(model):
                grad.div_(len(self._sharing))
        total = running.run()
        with span("gradient reduction", "communication"):
            # What the schedule did not reduce, and the ends of the model.
            for module in reversed(self._fsdp):
                reduce_now(module)
            end_backward(self._fsdp[::-1])
            self._hold_fsdp(model)
            if gradients is not None:
                gradients.reduce_deferred()
            self._sum_shared(model)
        return total

    def schedule(self, microbatches: int, train: bool) -> Schedule:
        """What all ranks do for a number of microbatches."""
        key = (train, microbatches)
        if key not in self._schedules:
            make = step_schedule if train else forward_schedule
            self._schedules[key] = one_by_one(make(self._strategy, microbatches))
        return self._schedules[key]

    def message(self, batch: Microbatch) -> Tensor:
        """Memory for the activations of a microbatch, or their gradient: this rank's part of [B, S, D]."""
        stages, tp, tokens = self.stages, self.tp, self.tokens(batch)
        shape: tuple[int, ...] = (*tokens, *stages.tail)
        if tp is not None:
            shape = tp.grid_of(tokens).part_shape(*stages.tail)
        return torch.empty(shape, dtype=stages.dtype, device=self.device)

    def tokens(self, batch: Microbatch) -> tuple[int, int]:
        """Sequences and tokens of each that this rank's layers see."""
        sequences, length = batch["input_ids"].shape
        return sequences, length if self._context is None else self._context.cut(length).local

    def splits(self, model: nn.Module) -> bool:
        """Whether a backward runs in halves.

        What backward recomputes or gathers again would be made twice, and a compiled layer makes both kinds of
        gradients in one go. The first half then makes both, and nothing is left for the second.
        """
        s = self._strategy
        remakes = s.recompute == "full" or (s.tp > 1 and s.gathered_inputs == "re-gather")
        remakes |= s.tp_y > 1 and "weight" in (s.attention_shape, s.mlp_shape)
        return not remakes and not any(m._compiled_call_impl is not None for m in model.modules())

    def reduce(self, stage: int) -> None:
        """Add the gradients of a stage's layers over the data-parallel ranks."""
        for layer in reversed(self.stages.layers[stage]):
            for module in layer.modules():
                if isinstance(module, FSDPModule):
                    reduce_now(module)

    def _hold_fsdp(self, model: nn.Module) -> None:
        before: dict[int, nn.Module] = {}
        for layers in self.stages.layers.values():
            before |= {id(layer): layers[i - 1] for i, layer in enumerate(layers) if i}
        hold_reductions(self._fsdp, before, not self._strategy.frees_gathered, model)

    @property
    def _sharing(self) -> set[int]:
        """Ranks that hold weights which this rank shares."""
        return {r for name in self.stages.shared for r in self.stages.holders[name]}

    def _shared_gradients(self, model: nn.Module) -> list[Tensor]:
        """Local gradients of the weights that stages share, in the same order on all that do; zero where unused."""
        params = [
            p for name in self.stages.shared if (p := model.get_parameter(name)).requires_grad
        ]
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return [local(p.grad) for p in params if p.grad is not None]

    def _sum_shared(self, model: nn.Module) -> None:
        """Add the gradients of weights that stages share; a + b is b + a, so all ranks have the same sum."""
        grads = self._shared_gradients(model)
        if not grads:
            return
        mine = torch.cat([g.reshape(-1) for g in grads])
        if mine.numel():
            others = self._sharing - {self.rank}
            if len(others) == 1:
                (peer,) = others
                theirs, wait = send_receive(mine, peer, peer, self.group, Purpose.SHARED_WEIGHT)
                wait()
                mine = mine + theirs
            else:
                mine = all_reduce(mine, self.group, Purpose.SHARED_WEIGHT)
            for grad, total in zip(grads, mine.split([g.numel() for g in grads]), strict=True):
                grad.copy_(total.view_as(grad))
        self._shared_summed = True


class _PipelinePass:
    """One pass over the microbatches: what was made and received and is still needed."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf,
        span: Span,
        train: bool,
        scale: float,
    ) -> None:
        self._scale = scale
        self._pipeline, self._model, self._microbatches = pipeline, model, microbatches
        self._loss_of, self._span, self._train = loss_of, span, train
        self._splits = pipeline.splits(model)
        # Evaluation has the cross entropy alone.
        self._balance = pipeline.balance if train else None
        self._total = torch.zeros((), dtype=torch.float64, device=pipeline.device)
        # What goes on ("F") or back ("B") to a stage: made on this rank; coming from another; and what was sent.
        self._made: dict[tuple[str, int, int], _Message] = {}
        self._coming: dict[tuple[str, int, int], tuple[_Message, list[Any]]] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        # Input of forwards whose backward is still to come, and the roots of that backward.
        self._kept: dict[_Key, tuple[Tensor | None, list[Tensor]]] = {}
        self._later: dict[_Key, Callable[[], None]] = {}
        # Derivative of the auxiliary loss, by microbatch, from the last stage's forward to its backward.
        self._slopes: dict[int, Tensor] = {}

    def run(self) -> Tensor:
        """Run the schedule, and wait until everything is sent; the loss on the rank of the last stage."""
        schedule = self._pipeline.schedule(len(self._microbatches), self._train)
        for action in schedule.ranks[self._pipeline.rank]:
            for leaf in action.leaves:
                self._do(leaf)
        for work, _ in self._sent:
            work.wait()
        return self._total

    def _do(self, action: Action) -> None:
        kind, stage, i = action.kind, action.stage, action.microbatch
        if kind == "REDUCE_GRAD":
            self._pipeline.reduce(stage)
        if i is None:
            return  # FSDP gathers and frees parameters by its own hooks
        if kind.startswith("SEND"):
            self._send(kind[-1], stage + _WAYS[kind[-1]][0], i)
        elif kind.startswith("RECV"):
            self._receive(kind[-1], stage, i)
        else:
            taken = self._arrived(kind, stage, i)
            run = {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}
            with self._span(str(action), "compute"):
                run[kind](stage, i, taken)

    def _forward(self, stage: int, i: int, message: _Message | None) -> None:
        batch, last = self._microbatches[i], self._pipeline.last
        received, *routed = message or (None,)
        if received is not None and self._train:
            received = received.detach().requires_grad_()
        pipeline = self._pipeline
        if pipeline.tp is not None:
            # As the model's first layer does, which may be on another stage.
            pipeline.tp.batch = pipeline.tokens(batch)
        running = pipeline.stages.running
        with running.run(stage, received):
            if stage == last:
                out = self._loss_of(i)
                self._total += out.detach()
            else:
                given = {k: v for k, v in batch.items() if k not in _TARGETS}
                self._model(**given, use_cache=False)
                out = running.output
        roots, more = [out], ()
        if self._balance is not None:
            mine, total = self._balance.add(*routed or (None,))
            roots += [] if mine is None else [mine]
            more = (total,)
            if stage == last:
                share, slope = (self._scale * part for part in self._balance.close(total))
                self._total += share
                self._slopes[i] = slope
        if stage < last:
            self._made["F", stage + 1, i] = (out.detach(), *more)
        if self._train:
            self._kept[stage, i] = (received, roots)

    def _roots(self, stage: int, i: int, message: _Message | None) -> tuple[Any, ...]:
        """A stage's input, the roots of its backward, their gradients, and what goes on beside its own gradient."""
        given, roots = self._kept.pop((stage, i))
        grad, *slopes = message or (None, *([] if self._balance is None else [self._slopes.pop(i)]))
        grads = [grad, *(slope.to(roots[-1].dtype) for slope in slopes)]
        return given, roots, grads[: len(roots)], slopes

    def _backward(self, stage: int, i: int, message: _Message | None) -> None:
        given, roots, grads, slopes = self._roots(stage, i, message)
        if roots[0].requires_grad:
            torch.autograd.backward(roots, grads)
        if given is not None:
            self._made["B", stage - 1, i] = (given.grad, *slopes)

    def _input(self, stage: int, i: int, message: _Message | None) -> None:
        if not self._splits:
            self._backward(stage, i, message)
            return
        given, roots, grads, slopes = self._roots(stage, i, message)
        if not roots[0].requires_grad:  # the first stage, where none of its weights is trained
            return
        if given is None:  # the first stage has no input: all of it is weight gradients
            self._later[stage, i] = partial(torch.autograd.backward, roots, grads)
            return
        grad, self._later[stage, i] = input_gradient(roots, grads, given)
        self._made["B", stage - 1, i] = (grad, *slopes)

    def _weight(self, stage: int, i: int, message: _Message | None) -> None:
        if (stage, i) in self._later:
            self._later.pop((stage, i))()

    def _arrived(self, kind: str, stage: int, i: int) -> _Message | None:
        """What an action takes: made on this rank, or received."""
        way = "F" if kind == "F" else "B"
        if kind == "W" or stage == (0 if way == "F" else self._pipeline.last):
            return None
        coming = self._coming.pop((way, stage, i), None)
        if coming is None:
            return self._made.pop((way, stage, i))
        message, works = coming
        with self._span(f"{stage}RECV_{way}{i}", "wait"):
            for work in works:
                work.wait()
        return message

    def _receive(self, way: str, stage: int, i: int) -> None:
        peer = self._pipeline.stages.rank_of[stage - _WAYS[way][0]]
        message: _Message = (self._pipeline.message(self._microbatches[i]),)
        if self._balance is not None:
            message += (self._balance.messages()[way == "B"],)
        works = [dist.irecv(part, group=self._pipeline.group, group_src=peer) for part in message]
        self._coming[way, stage, i] = (message, works)

    def _send(self, way: str, to: int, i: int) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        peer = self._pipeline.stages.rank_of[to]
        for tensor in map(Tensor.contiguous, self._made.pop((way, to, i))):
            with purpose(_WAYS[way][1]):
                work = dist.isend(tensor, group=self._pipeline.group, group_dst=peer)
            self._sent.append((work, tensor))
