"""One optimizer step and one evaluation, the same code on every layout.

The loss of a step is a sum over tokens divided once by the number of valid tokens of the whole step, over all
data-parallel ranks and microbatches. Gradients are summed, never averaged, so neither the layout nor the number of
microbatches nor a ragged tail changes what is learned.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch import (
    clip_grad_norm_,
    count_routing,
    forward_backward,
    forward_loss,
    handle,
    purpose,
    routing_statistics,
)
from hyper_parallel.errors import LossNotFinite
from hyper_parallel.ir import Plan, Purpose
from hyper_parallel.trainer.engine._gauges import MemoryGauge, SpanRecorder
from hyper_parallel.trainer.engine._model import set_lr, step_unless
from hyper_parallel.trainer.engine._offload import PlannedSteps
from hyper_parallel.trainer.engine._offload_record import StepInputs, over_ranks
from hyper_parallel.trainer.loop import StepResult

if TYPE_CHECKING:
    from hyper_parallel.runtime import World
    from hyper_parallel.trainer.data import Batch, Batches


class Loop:
    """Runs steps and evaluations of one model on this rank.

    Args:
        model: Model that passed through `parallelize` and holds its weights.
        optimizer: Its optimizer.
        plan: The plan that was applied.
        world: The ranks.
        recorder: Where spans go.
        gauge: Reads peak memory.

    Attributes:
        planned: Runs the steps by a memory plan; None: as PyTorch does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        world: World,
        recorder: SpanRecorder,
        gauge: MemoryGauge,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._world = world
        self._recorder = recorder
        self._gauge = gauge
        self.planned: PlannedSteps | None = None
        coordinate = plan.mesh.coordinate(world.rank)
        strategy = plan.strategy
        self._dp_rank = coordinate["dp_replicate"] * strategy.dp_shard + coordinate["dp_shard"]
        self._dp_size = strategy.dp
        self._microbatch = plan.workload.microbatch or 1

    def step(
        self, step: int, batches: Batches, lr: float, max_grad_norm: float | None
    ) -> StepResult:
        """Run one optimizer step.

        Raises:
            LossNotFinite: HP604 when the loss or the gradient norm is NaN or infinite; no parameter was changed,
                except by a planned step, whose updates may run before the norm is known.
        """
        with self._gauge.step():
            return self._step(step, batches, lr, max_grad_norm)

    def _step(
        self, step: int, batches: Batches, lr: float, max_grad_norm: float | None
    ) -> StepResult:
        start = time.perf_counter()
        span = self._recorder.span
        self._recorder.begin_step(step)
        with span("data", "data"):
            inputs = self.inputs(batches, step, lr)
        measured = counted = None
        if self.planned is None:
            loss_sum, grad_norm = self.gradients(
                inputs.microbatches, inputs.valid_tokens, max_grad_norm
            )
        else:
            with span("planned step", "compute"):
                (loss_sum, grad_norm, counted), measured = self.planned.step(inputs)
        memory = measured.device_bytes if measured else self._gauge.peak_bytes()
        with span("loss", "communication"):
            shared = self.share(loss_sum, memory, grad_norm)
        if measured is None:
            # The device decides; the host reads once, while it is busy with the update.
            self.update(lr, skip=~torch.isfinite(shared[-2:]).all())
        with span("loss", "communication"):
            mean, norm, peaks = _read(shared)
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise LossNotFinite(
                "the loss or its gradient is not finite; "
                + ("the step was not applied" if measured is None else "the run ends here"),
                where=f"step {step}",
                got=f"loss={mean}, grad_norm={norm}",
                hint="training.lr=<a smaller value> training.max_grad_norm=1.0",
            )
        if measured is None:
            counted = self.count_routing()
        routing = None if counted is None else asdict(routing_statistics(*counted))
        self._recorder.memory(memory if measured else self._gauge.peak_bytes())
        offload = None
        if self.planned is not None and measured is not None:
            offload = asdict(over_ranks(self.planned.record(measured)))
        seconds = time.perf_counter() - start
        return StepResult(mean, norm, inputs.valid_tokens, seconds, peaks, routing, offload)

    def inputs(self, batches: Batches, step: int, lr: float) -> StepInputs:
        """What this rank reads in a step, counted from 1."""
        parts = self._fetch(batches, step - 1)
        # Every rank counts the whole step from the index, without communication.
        valid_tokens = max(batches.num_valid(step - 1), 1)
        return StepInputs([self._inputs(batch) for batch in parts], valid_tokens, lr)

    def gradients(
        self,
        inputs: list[dict[str, Tensor]],
        valid_tokens: int | Tensor,
        max_grad_norm: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Forward, backward and clipping of one step; reads no value, so that it can also be traced.

        Returns:
            This rank's share of the loss, and the global gradient norm before clipping.
        """
        loss_sum = forward_backward(self._model, inputs, valid_tokens, self._recorder.span)
        with self._recorder.span("gradient norm", "communication"):
            return loss_sum, clip_grad_norm_(self._model, max_grad_norm)

    def update(self, lr: float | Tensor, skip: Tensor | None = None) -> None:
        """The optimizer's step; gradients are gone afterwards.

        Args:
            lr: Learning rate.
            skip: Scalar on the device; where it is true, parameters and optimizer state stay as they are. None: never.
        """
        with self._recorder.span("optimizer", "optimizer"):
            set_lr(self._optimizer, lr)
            step_unless(self._optimizer, skip)
            self._optimizer.zero_grad(set_to_none=True)

    def count_routing(self) -> tuple[Tensor, Tensor | None] | None:
        """What the experts of the step were given; None for a model without experts."""
        if handle(self._model).experts is None:
            return None
        with self._recorder.span("routing", "communication"):
            return count_routing(self._model)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> tuple[float, int]:
        """Mean loss over the first step of `batches` and how many tokens counted."""
        self._recorder.begin_step(None)
        self._model.eval()
        with self._recorder.span("evaluation", "evaluation"):
            valid_tokens = max(batches.num_valid(0), 1)
            inputs = [self._inputs(batch) for batch in self._fetch(batches, 0)]
            loss_sum = forward_loss(self._model, inputs, valid_tokens)
            mean, _, _ = _read(self.share(loss_sum, self._gauge.peak_bytes()))
        self._model.train()
        return mean, valid_tokens

    def _fetch(self, batches: Batches, index: int) -> list[Batch]:
        rounds = batches.sequences_per_step // (self._dp_size * self._microbatch)
        return batches.microbatches(index, self._dp_rank, self._dp_size, self._microbatch, rounds)

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        device = self._world.device
        return {
            "input_ids": torch.from_numpy(batch.input_ids).to(device, non_blocking=True),
            "shift_labels": torch.from_numpy(batch.shift_labels).to(device, non_blocking=True),
        }

    def share(self, loss_sum: Tensor, memory_bytes: int, grad_norm: float | Tensor = 0.0) -> Tensor:
        """Every rank's memory peak, the sum of the ranks' losses (one all-reduce), and the gradient norm.

        Args:
            loss_sum: This rank's share of the loss.
            memory_bytes: Peak memory of this rank.
            grad_norm: Already equal on every rank.

        Returns:
            [ranks + 2] on the device.
        """
        size = self._world.world_size
        values = torch.zeros(size + 2, dtype=torch.float64, device=self._world.device)
        values[size] = loss_sum
        values[self._world.rank] = float(memory_bytes)
        if size > 1:
            with purpose(Purpose.STEP_LOG):
                dist.all_reduce(values[: size + 1])
        values[size + 1] = grad_norm
        return values


def _read(shared: Tensor) -> tuple[float, float, int]:
    """The mean loss, the gradient norm and the largest peak of what `Loop.share` returned."""
    *peaks, mean, norm = shared.tolist()
    return mean, norm, int(max(peaks))
