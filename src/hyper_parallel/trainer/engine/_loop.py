"""One optimizer step and one evaluation, the same code on every layout.

The loss of a step is a sum over tokens divided once by the number of valid tokens of the whole step, over all
data-parallel ranks and microbatches. Gradients are summed, never averaged, so neither the layout nor the number of
microbatches nor a ragged tail changes what is learned.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch import (
    clip_grad_norm_,
    count_routing,
    forward_backward,
    forward_loss,
    handle,
    local,
    purpose,
    routing_statistics,
)
from hyper_parallel.errors import LossNotFinite
from hyper_parallel.ir import Plan, Purpose
from hyper_parallel.trainer.engine._gauges import MemoryGauge, SpanRecorder
from hyper_parallel.trainer.engine._loss_scale import LossScale
from hyper_parallel.trainer.engine._optimizer import set_lr, step_unless
from hyper_parallel.trainer.loop import StepResult

if TYPE_CHECKING:
    from hyper_parallel.runtime import World
    from hyper_parallel.trainer.data import Batches, StreamBatches

Routing = tuple[Tensor, Tensor | None] | None
"""What the experts of a step were given, see `count_routing`; None for a model without experts."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step reads: this rank's microbatches, the valid tokens over all ranks, the learning rate."""

    microbatches: list[dict[str, Tensor]]
    valid_tokens: int | Tensor
    lr: float | Tensor = 0.0

    def as_tensors(self) -> StepInputs:
        """Copies, the two numbers as tensors too: in a captured step whatever changes must be one."""
        return StepInputs(
            [{name: t.clone() for name, t in part.items()} for part in self.microbatches],
            torch.as_tensor(self.valid_tokens),
            torch.as_tensor(self.lr, dtype=torch.float64),
        )

    def named(self) -> dict[str, Any]:
        """All of it by name."""
        parts = enumerate(self.microbatches)
        named: dict[str, Any] = {f"{name}.{i}": t for i, part in parts for name, t in part.items()}
        return {**named, "valid_tokens": self.valid_tokens, "lr": self.lr}


@dataclass
class Loop:
    """Runs steps and evaluations of one model on this rank.

    Attributes:
        model: Model that passed through `parallelize` and holds its weights.
        optimizer: Its optimizer.
        plan: The plan that was applied.
        world: The ranks.
        recorder: Where spans go.
        gauge: Reads peak memory.
        max_grad_norm: Gradients are clipped to it; None: their norm is only measured.
        scale: Scale of the loss; None: 1, and gradients that are not finite end the run.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan
    world: World
    recorder: SpanRecorder
    gauge: MemoryGauge
    max_grad_norm: float | None
    scale: LossScale | None = None

    def step(self, step: int, batches: Batches | StreamBatches, lr: float) -> StepResult:
        """Run one optimizer step, counted from 1.

        Raises:
            LossNotFinite: HP604 when the loss or the gradient norm is NaN or infinite; no parameter was changed.
        """
        start = time.perf_counter()
        self.recorder.begin_step(step)
        with self.gauge.step():
            inputs = self.inputs(batches, step, lr)
            loss_sum, grad_norm = self.gradients(inputs)
            with self.recorder.span("loss", "communication"):
                shared = self.share(loss_sum, self.gauge.peak_bytes(), grad_norm)
            # The device decides; the host reads once, while it is busy with the update.
            self.update(lr, skip=~torch.isfinite(shared[-2:]).all())
            loss, norm, memory = self.read(shared, step, "the step was not applied")
            routing = statistics(self.count_routing())
        self.recorder.memory(self.gauge.samples)
        seconds = time.perf_counter() - start
        result = StepResult(loss, norm, int(inputs.valid_tokens), seconds, memory, routing)
        if self.scale is None:
            return result
        used, skipped = self.scale.value, not (math.isfinite(loss) and math.isfinite(norm))
        self.scale.after(not skipped)
        return replace(result, loss_scale=used, skipped=int(skipped))

    def planned_step(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Routing]:
        """The whole step without reading a value, so that it can be captured and run by a memory plan.

        Returns:
            This rank's share of the loss, the gradient norm, and the routing of the experts.
        """
        loss_sum, grad_norm = self.gradients(inputs)
        self.update(inputs.lr)
        return loss_sum, grad_norm, self.count_routing()

    @torch.no_grad()
    def evaluate(self, batches: Batches | StreamBatches) -> tuple[float, int]:
        """Mean loss over the first step of `batches` and how many tokens counted."""
        self.recorder.begin_step(None)
        self.model.eval()
        with self.recorder.span("evaluation", "evaluation"):
            inputs = self._fetch(batches, 0)
            loss_sum = forward_loss(self.model, inputs.microbatches, int(inputs.valid_tokens))
            mean = self.share(loss_sum, 0)[-2].item()
        self.model.train()
        return mean, int(inputs.valid_tokens)

    def inputs(self, batches: Batches | StreamBatches, step: int, lr: float) -> StepInputs:
        """What this rank reads in a step, counted from 1."""
        with self.recorder.span("data", "data"):
            return self._fetch(batches, step - 1, lr)

    def gradients(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Forward, backward and clipping of one step; reads no value.

        Returns:
            This rank's share of the loss, and the global gradient norm before clipping.
        """
        span = self.recorder.span
        scale = 1.0 if self.scale is None else self.scale.value
        loss_sum = forward_backward(
            self.model, inputs.microbatches, inputs.valid_tokens, span, scale=scale
        )
        with span("gradient norm", "communication"):
            if self.scale is not None:
                grads = [p.grad for p in self.model.parameters() if p.grad is not None]
                torch._foreach_mul_([local(grad) for grad in grads], 1 / scale)
            return loss_sum, clip_grad_norm_(self.model, self.max_grad_norm)

    def share(self, loss_sum: Tensor, memory_bytes: int, grad_norm: float | Tensor = 0.0) -> Tensor:
        """Every rank's memory peak, the sum of the ranks' losses (one all-reduce), and the gradient norm.

        Args:
            loss_sum: This rank's share of the loss.
            memory_bytes: Peak memory of this rank.
            grad_norm: Already equal on every rank.

        Returns:
            [ranks + 2] on the device.
        """
        size = self.world.world_size
        values = torch.zeros(size + 2, dtype=torch.float64, device=self.world.device)
        values[size] = loss_sum
        values[self.world.rank] = float(memory_bytes)
        if size > 1:
            with purpose(Purpose.STEP_LOG):
                dist.all_reduce(values[: size + 1])
        values[size + 1] = grad_norm
        return values

    def update(self, lr: float | Tensor, skip: Tensor | None = None) -> None:
        """The optimizer's step; gradients are gone afterwards.

        Args:
            lr: Learning rate.
            skip: Scalar on the device; where it is true, parameters and optimizer state stay as they are. None: never.
        """
        with self.recorder.span("optimizer", "optimizer"):
            set_lr(self.optimizer, lr)
            step_unless(self.optimizer, skip)
            self.optimizer.zero_grad(set_to_none=True)

    def read(self, shared: Tensor, step: int, outcome: str) -> tuple[float, float, int]:
        """The mean loss, the gradient norm and the largest peak of what `share` returned.

        Raises:
            LossNotFinite: HP604, with what became of the step; not while a loss scale can still be lowered.
        """
        with self.recorder.span("loss", "communication"):
            *peaks, loss, norm = shared.tolist()
        skips = self.scale is not None and self.scale.value > 1
        if not (math.isfinite(loss) and math.isfinite(norm)) and not skips:
            raise LossNotFinite(
                f"the loss or its gradient is not finite; {outcome}",
                where=f"step {step}",
                got=f"loss={loss}, grad_norm={norm}",
                hint="training.lr=<a smaller value> training.max_grad_norm=1.0",
            )
        return loss, norm, int(max(peaks))

    def count_routing(self) -> Routing:
        """What the experts of the step were given."""
        if handle(self.model).experts is None:
            return None
        with self.recorder.span("routing", "communication"):
            return count_routing(self.model)

    def _fetch(self, batches: Batches | StreamBatches, index: int, lr: float = 0.0) -> StepInputs:
        coordinate, strategy = self.plan.mesh.coordinate(self.world.rank), self.plan.strategy
        rank = coordinate["dp_replicate"] * strategy.dp_shard + coordinate["dp_shard"]
        microbatch = self.plan.workload.microbatch or 1
        rounds = batches.sequences_per_step // (strategy.dp * microbatch)
        parts = batches.microbatches(index, rank, strategy.dp, microbatch, rounds)
        tensors = [
            {
                name: torch.from_numpy(array).to(self.world.device, non_blocking=True)
                for name in ("input_ids", "shift_labels", "position_ids")
                if (array := getattr(b, name)) is not None
            }
            for b in parts
        ]
        # Every rank counts the whole step from the index, without communication.
        return StepInputs(tensors, max(batches.num_valid(index), 1), lr)


def statistics(routing: Routing) -> dict[str, Any] | None:
    """The routing of a step as it is recorded."""
    counted = None if routing is None else routing_statistics(*routing)
    return None if counted is None else asdict(counted)
