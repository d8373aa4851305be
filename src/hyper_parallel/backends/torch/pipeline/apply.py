"""Executor of one pipeline rank: runs its stages in the order of a schedule.

`mpmd` builds and verifies the schedule; this module executes its actions: F, B, I, W, SEND, RECV and REDUCE_GRAD. An
action uses an input on this rank, or waits for a receive that an earlier action of the schedule has posted. Message
shapes follow from the batch: activations [B, S, D], under tensor parallelism this rank's part of them. Microbatches
accumulate gradients without communication. Data and tensor parallelism reduce gradients once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hyper_parallel.backends.torch.collectives import all_reduce, purpose, send_receive
from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.data.fsdp import (
    complete_gradients,
    defer_reductions,
    end_backward,
    reduce_now,
)
from hyper_parallel.backends.torch.experts.balance_loss import BalanceLoss
from hyper_parallel.backends.torch.layer_flow import flow_error
from hyper_parallel.backends.torch.pass_context import PassShape
from hyper_parallel.backends.torch.pipeline._split_backward import input_gradients
from hyper_parallel.backends.torch.pipeline.stages import StageModules
from hyper_parallel.backends.torch.shared_gradients import divide_gradients, sum_gradients
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.errors import NoLoss
from hyper_parallel.ir import Action, Purpose, Schedule, Strategy
from hyper_parallel.mpmd import forward_schedule, one_by_one, step_schedule

Microbatch = Mapping[str, Any]
LossOf = Callable[[int], Tensor]
"""Function from the index of a microbatch to its loss."""
Span = Callable[[str, str], AbstractContextManager[Any]]
_Key = tuple[int, int]
"""Stage and microbatch."""
_Message = tuple[Tensor, ...]
"""Activations with routing counts, or gradients with derivatives; see `BalanceLoss.messages` for the second tensor."""
_DIRECTIONS = {"F": (1, Purpose.PIPELINE_ACTIVATIONS), "B": (-1, Purpose.PIPELINE_GRADIENTS)}
"""By direction: stage of the receiver minus stage of the sender, and purpose of the message."""
TARGETS = ("labels", "shift_labels")
"""Arguments of a model's forward that only the loss reads."""


@dataclass(frozen=True, slots=True)
class StepActions:
    """Actions and callbacks of a pipeline rank in a step that also runs other parts, such as an image encoder.

    Attributes:
        actions: Actions of this rank for the pipeline and for other parts; None: those of the pipeline's schedule.
        begin: Function called with the index of a microbatch before its forward on a stage that reads media.
        others: Function that runs an action of stage -1, which belongs to another part.
        send: Function that sends the gradients of a microbatch's features to the part that computed the features.
    """

    actions: Sequence[Action] | None
    begin: Callable[[int], None]
    others: Callable[[Action], None]
    send: Callable[[int, Sequence[Tensor | None]], None]


class Pipeline:
    """Executor of the stages of one model on a pipeline rank; `fsdp` are the modules that FSDP manages, root last."""

    def __init__(
        self,
        model: nn.Module,
        stages: StageModules,
        strategy: Strategy,
        tp: TpState | None,
        context: ContextState | None,
        balance: BalanceLoss | None,
        fsdp: Sequence[nn.Module],
    ) -> None:
        self.stages, self.group, self.rank = stages, stages.group, stages.group.rank()
        self.balance = balance
        self.last = strategy.stages - 1
        self._strategy, self.tp, self._context, self._fsdp = strategy, tp, context, fsdp
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        self._shared_are_summed = False
        self._defer_fsdp(model)

    def run(
        self,
        model: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf,
        span: Span,
        train: bool,
        scale: float = 1.0,
        step: StepActions | None = None,
    ) -> Tensor:
        """Run forward and, if `train`, backward; return the summed losses on the last stage's rank, 0 on others.

        Args:
            model: The model.
            microbatches: Arguments of the model's forward per microbatch.
            loss_of: Function from the index of a microbatch to its loss; it runs the model on the last stage.
            span: See `forward_backward`.
            train: Whether to run backward.
            scale: Factor that the losses of `loss_of` include; the router loss is multiplied by it.
            step: Actions and callbacks if other parts of the model run in the same step; None: the pipeline runs alone.
        """
        running = _PipelinePass(self, model, microbatches, loss_of, span, train, scale)
        if not train:
            return running.run(step)
        gradients = None if self.tp is None else self.tp.gradients
        if gradients is not None:
            gradients.defer()
        if self._shared_are_summed:
            # Earlier calls have already summed the accumulated gradients, so each rank keeps an equal share of them.
            divide_gradients(self._shared_parameters(model), len(self._sharing))
        total = running.run(step)
        with span("gradient reduction", "communication"):
            if self._fsdp:
                complete_gradients(self._fsdp[-1], self.stages.running.flow.unused)
            # Reduce modules that the schedule does not reduce, such as embedding and head.
            for module in reversed(self._fsdp):
                reduce_now(module)
            end_backward(self._fsdp[::-1])
            self._defer_fsdp(model)
            if gradients is not None:
                gradients.reduce_deferred()
            # Encoders have no gradients in a step without media.
            encoders = not self.stages.running.flow.unused.isdisjoint(self.stages.shared)
            shared = self._shared_parameters(model)
            sum_gradients(shared, self._sum_shared, optional=encoders)
            self._shared_are_summed = True
        return total

    def forward(self, model: nn.Module, batch: Microbatch, run_last: Callable[[], Tensor]) -> Tensor | None:
        """Run forward of one batch, which is the same on all pipeline ranks.

        Return the result of `run_last`, which runs the model on the last stage; None on ranks without that stage.
        """
        results: list[Tensor] = []

        def loss_of(_: int) -> Tensor:
            results.append(run_last())
            return torch.zeros((), device=self.stages.device)

        self.run(model, [batch], loss_of, lambda *_: nullcontext(), train=False)
        return results[0] if results else None

    def schedule(self, microbatches: int, train: bool) -> Schedule:
        """Return the schedule of all pipeline ranks for a number of microbatches, with backward if `train`."""
        key = (train, microbatches)
        if key not in self._schedules:
            build = step_schedule if train else forward_schedule
            self._schedules[key] = one_by_one(build(self._strategy, microbatches))
        return self._schedules[key]

    def message(self, batch: Microbatch) -> Tensor:
        """Return a receive buffer for a microbatch's activations or their gradient: this rank's part of [B, S, D]."""
        stages = self.stages
        return torch.empty(self._shape(batch), dtype=stages.dtype, device=stages.device)

    def check_activations(self, hidden: Tensor, batch: Microbatch) -> None:
        """Raise HP514 if the activations of a stage do not have as many elements as the next stage receives."""
        shape = self._shape(batch)
        if hidden.numel() != prod(shape):
            raise NoLoss(
                "the activations after a pipeline stage do not match the input tokens",
                got=f"activations {tuple(hidden.shape)} after a pipeline stage",
                allowed=f"{shape}",
            )

    def _shape(self, batch: Microbatch) -> tuple[int, ...]:
        tp, tokens = self.tp, self.tokens(batch)
        if tp is None or tp.replicated_activations:
            return (*tokens, *self.stages.tail)
        return tp.grid_of(tokens).part_shape(*self.stages.tail)

    def tokens(self, batch: Microbatch) -> tuple[int, int]:
        """Return the number of sequences and of local tokens per sequence."""
        sequences, length = batch["input_ids"].shape
        return sequences, length if self._context is None else self._context.cut(length).local

    def splits_backward(self, model: nn.Module) -> bool:
        """Return whether backward runs in two parts, input gradients (I) and weight gradients (W).

        Full recompute and all-gathers in backward prevent a split, because both parts would repeat them. Compiled
        layers prevent a split, because they compute both kinds of gradients at once. Without a split, I computes all
        gradients and W does nothing.
        """
        s = self._strategy
        repeats = s.recompute == "full" or (s.tp > 1 and s.gathered_inputs == "re-gather")
        repeats |= s.tp_y > 1 and "weight" in (s.attention_shape, s.mlp_shape)
        return not repeats and not any(m._compiled_call_impl is not None for m in model.modules())

    def reduce(self, stage: int) -> None:
        """Reduce the gradients of a stage's layers over the data-parallel ranks."""
        for layer in reversed(self.stages.layers[stage]):
            for module in layer.modules():
                if isinstance(module, FSDPModule):
                    reduce_now(module)

    def _defer_fsdp(self, model: nn.Module) -> None:
        previous: dict[int, nn.Module] = {}
        for layers in self.stages.layers.values():
            previous |= {id(layer): layers[i - 1] for i, layer in enumerate(layers) if i}
        defer_reductions(self._fsdp, previous, not self._strategy.frees_gathered, model)

    @property
    def _sharing(self) -> set[int]:
        """Pipeline ranks that hold any of this rank's shared weights, this rank included."""
        return {r for name in self.stages.shared for r in self.stages.holders[name]}

    def _shared_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the shared weights of this rank that are trained, in the same order on all ranks."""
        params = map(model.get_parameter, self.stages.shared)
        return [p for p in params if p.requires_grad]

    def _sum_shared(self, flat: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks that hold shared weights; two ranks exchange their tensors."""
        peers = self._sharing - {self.rank}
        if not flat.numel():
            return flat
        if len(peers) > 1:
            return all_reduce(flat, self.group, Purpose.SHARED_WEIGHT)
        (peer,) = peers
        received, wait = send_receive(flat, peer, peer, self.group, Purpose.SHARED_WEIGHT)
        wait()
        return flat + received


class _PipelinePass:
    """Execution of the actions of one step over its microbatches, with the tensors in flight."""

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
        self._step: StepActions | None = None
        self._pipeline, self._model, self._microbatches = pipeline, model, microbatches
        self._loss_of, self._span, self._train = loss_of, span, train
        self._splits = train and pipeline.splits_backward(model)
        # Evaluation does not compute the auxiliary loss.
        self._balance = pipeline.balance if train else None
        self._total = torch.zeros((), dtype=torch.float64, device=pipeline.stages.device)
        # Messages produced on this rank and messages being received, by direction ("F" forward, "B" backward),
        # receiving stage and microbatch; then all messages being sent.
        self._outgoing: dict[tuple[str, int, int], _Message] = {}
        self._in_flight: dict[tuple[str, int, int], tuple[_Message, list[Any]]] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        # Inputs and backward roots of each forward, kept until its backward.
        self._saved: dict[_Key, tuple[Sequence[Tensor], list[Tensor]]] = {}
        self._weight_steps: dict[_Key, Callable[[], None]] = {}
        # Derivatives of the auxiliary loss by microbatch, kept from the last stage's forward to its backward.
        self._slopes: dict[int, Tensor] = {}

    def run(self, step: StepActions | None) -> Tensor:
        """Run the schedule and wait for all sends; return the loss on the rank of the last stage, 0 on others."""
        self._step, actions = step, None if step is None else step.actions
        if actions is None:
            schedule = self._pipeline.schedule(len(self._microbatches), self._train)
            actions = schedule.ranks[self._pipeline.rank]
        readers = self._pipeline.stages.running.media_stages
        for action in actions:
            for leaf in action.leaves:
                if step is not None and leaf.stage < 0:
                    step.others(leaf)
                    continue
                if step is not None and leaf.kind == "F" and leaf.stage in readers:
                    step.begin(leaf.microbatch)  # type: ignore[arg-type]
                self._do(leaf)
        for work, _ in self._sent:
            work.wait()
        return self._total

    def _do(self, action: Action) -> None:
        kind, stage, i = action.kind, action.stage, action.microbatch
        if kind == "REDUCE_GRAD":
            self._pipeline.reduce(stage)
        if i is None:
            return  # FSDP gathers and frees parameters in its own hooks
        if kind.startswith("SEND"):
            self._send(kind[-1], stage + _DIRECTIONS[kind[-1]][0], i)
        elif kind.startswith("RECV"):
            self._receive(kind[-1], stage, i)
        else:
            message = self._take_message(kind, stage, i)
            run = {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}
            with self._span(str(action), "compute"):
                run[kind](stage, i, message)

    def _forward(self, stage: int, i: int, message: _Message | None) -> None:
        batch, last = self._microbatches[i], self._pipeline.last
        received, *routed = message or (None,)
        if received is not None and self._train:
            received = received.detach().requires_grad_()
        pipeline = self._pipeline
        if pipeline.tp is not None:  # the first layer, which sets the shape, may be on another stage
            pipeline.tp.running.update(shape=PassShape(pipeline.tokens(batch)))
        running = pipeline.stages.running
        with running.run(stage, received), running.trace_media(self._model, batch):
            if stage == last:
                out = self._loss_of(i)
                self._total += out.detach()
            else:
                self._run_stage(batch)
                out = running.output
            features = running.features
        roots, counts = [out], ()
        if self._balance is not None:
            probabilities, total = self._balance.add(*routed or (None,))
            roots += [] if probabilities is None else [probabilities]
            counts = (total,)
            if stage == last:
                share, slope = (self._scale * part for part in self._balance.close(total))
                self._total += share
                self._slopes[i] = slope
        if stage < last:
            pipeline.check_activations(out, batch)
            self._outgoing["F", stage + 1, i] = (out.detach(), *counts)
        if self._train:
            inputs = [*([] if received is None else [received]), *features]
            self._saved[stage, i] = (inputs, roots)

    def _run_stage(self, batch: Microbatch) -> None:
        """Run the model on a stage before the last one; raise HP205 if code after the layers needs the head."""
        inputs = {k: v for k, v in batch.items() if k not in TARGETS}
        try:
            self._model(**{"use_cache": False, **inputs})
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            if self._pipeline.stages.running.output is None:
                raise
            reason = f"{type(error).__name__}: {str(error)[:120]}"
            why = f"code after its layers does not run on stages without the head ({reason})"
            raise flow_error(self._model, why, "pp") from error

    def _pop_backward(self, stage: int, i: int, message: _Message | None) -> tuple[Any, ...]:
        """Return a stage's inputs, roots of its backward, their gradients, and derivatives of the auxiliary loss."""
        inputs, roots = self._saved.pop((stage, i))
        grad, *slopes = message or (None, *([] if self._balance is None else [self._slopes.pop(i)]))
        grads = [grad, *(slope.to(roots[-1].dtype) for slope in slopes)]
        return inputs, roots, grads[: len(roots)], slopes

    def _backward(self, stage: int, i: int, message: _Message | None) -> None:
        inputs, roots, grads, slopes = self._pop_backward(stage, i, message)
        if roots[0].requires_grad:
            torch.autograd.backward(roots, grads)
        self._pass_back(stage, i, [tensor.grad for tensor in inputs], slopes)
        for tensor in inputs:
            tensor.grad = None

    def _input(self, stage: int, i: int, message: _Message | None) -> None:
        # A microbatch of text has no features. Its backward runs here too, because data-parallel ranks with features
        # gather the stage's parameters now, not in W.
        without_features = self._step is not None and not self._saved[stage, i][0]
        if not self._splits or without_features:
            self._backward(stage, i, message)
            return
        inputs, roots, grads, slopes = self._pop_backward(stage, i, message)
        if not roots[0].requires_grad:  # the first stage, with frozen weights only
            return
        input_grads, self._weight_steps[stage, i] = input_gradients(roots, grads, inputs)
        self._pass_back(stage, i, input_grads, slopes)

    def _pass_back(self, stage: int, i: int, grads: Sequence[Tensor | None], slopes: Sequence[Tensor]) -> None:
        """Pass the gradients of a stage's inputs to the stage and to the part of the model that produced them."""
        if stage:
            self._outgoing["B", stage - 1, i] = (*grads[:1], *slopes)  # type: ignore[assignment]
        if (features := grads[1:] if stage else grads) and self._step is not None:
            self._step.send(i, features)

    def _weight(self, stage: int, i: int, message: _Message | None) -> None:
        if (stage, i) in self._weight_steps:
            self._weight_steps.pop((stage, i))()

    def _take_message(self, kind: str, stage: int, i: int) -> _Message | None:
        """Return the message that an action consumes, produced on this rank or received; None if it needs none."""
        direction = "F" if kind == "F" else "B"
        if kind == "W" or stage == (0 if direction == "F" else self._pipeline.last):
            return None
        receive = self._in_flight.pop((direction, stage, i), None)
        if receive is None:
            return self._outgoing.pop((direction, stage, i))
        message, works = receive
        with self._span(f"{stage}RECV_{direction}{i}", "wait"):
            for work in works:
                work.wait()
        return message

    def _receive(self, direction: str, stage: int, i: int) -> None:
        peer = self._pipeline.stages.rank_of[stage - _DIRECTIONS[direction][0]]
        message: _Message = (self._pipeline.message(self._microbatches[i]),)
        if self._balance is not None:
            message += (self._balance.messages()[direction == "B"],)
        works = [dist.irecv(part, group=self._pipeline.group, group_src=peer) for part in message]
        self._in_flight[direction, stage, i] = (message, works)

    def _send(self, direction: str, to: int, i: int) -> None:
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        peer = self._pipeline.stages.rank_of[to]
        for tensor in map(Tensor.contiguous, self._outgoing.pop((direction, to, i))):
            with purpose(_DIRECTIONS[direction][1]):
                work = dist.isend(tensor, group=self._pipeline.group, group_dst=peer)
            self._sent.append((work, tensor))
