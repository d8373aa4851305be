"""One optimizer step and one evaluation, the same code on every layout.

The loss of a step is a sum over tokens divided once by the number of valid tokens of the whole step, over all
data-parallel ranks and microbatches. Gradients are summed, never averaged, so neither the layout nor the number of
microbatches nor a ragged tail changes what is learned.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch import accumulate, clip_grad_norm_
from hyper_parallel.errors import LossNotFinite
from hyper_parallel.ir import Plan
from hyper_parallel.trainer._memory import MemoryGauge
from hyper_parallel.trainer._optimizer import set_lr
from hyper_parallel.trainer._spans import SpanRecorder

if TYPE_CHECKING:
    from hyper_parallel.runtime import World
    from hyper_parallel.trainer.data import Batch, Batches


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step measured; equal on every rank.

    Attributes:
        loss: Mean over all valid tokens of the step.
        grad_norm: Global gradient norm before clipping.
        valid_tokens: Tokens the loss counts.
        seconds: Time of the step on this rank.
        memory_bytes: Peak memory of the step on the fullest rank.
    """

    loss: float
    grad_norm: float
    valid_tokens: int
    seconds: float
    memory_bytes: int


class Loop:
    """Runs steps and evaluations of one model on this rank.

    Args:
        model: Model that passed through `parallelize` and holds its weights.
        optimizer: Its optimizer.
        plan: The plan that was applied.
        world: The ranks.
        recorder: Where spans go.
        gauge: Reads peak memory.
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
        coordinate = plan.mesh.coordinate(world.rank)
        strategy = plan.strategy
        self._dp_rank = coordinate["dp_replicate"] * strategy.dp_shard + coordinate["dp_shard"]
        self._dp_size = strategy.dp
        # Ranks that see the same tokens compute the same loss; one of them reports it.
        self._reports = all(coordinate[axis] == 0 for axis in ("pp", "cp", "tp_x", "tp_y"))
        self._microbatch = plan.workload.microbatch or 1

    def step(
        self, step: int, batches: Batches, lr: float, max_grad_norm: float | None
    ) -> StepResult:
        """Run one optimizer step.

        Raises:
            LossNotFinite: HP604 when the loss or the gradient norm is NaN or infinite; no parameter was changed.
        """
        start = time.perf_counter()
        span = self._recorder.span
        self._recorder.begin_step(step)
        self._gauge.start()
        with span("data", "data"):
            parts = self._fetch(batches, step - 1)
            # Every rank counts the whole step from the index, without communication.
            valid_tokens = max(batches.num_valid(step - 1), 1)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for i, batch in enumerate(parts):
            with accumulate(self._model) if i < len(parts) - 1 else nullcontext():
                with span("forward", "compute"):
                    loss = self._loss(batch, valid_tokens)
                with span("backward", "compute"):
                    loss.backward()
            loss_sum += loss.detach()
        with span("gradient norm", "communication"):
            grad_norm = clip_grad_norm_(self._model, max_grad_norm)
        with span("loss", "communication"):
            mean, peaks = self._share(loss_sum)
            norm = grad_norm.item()
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise LossNotFinite(
                "the loss or its gradient is not finite; the step was not applied",
                where=f"step {step}",
                got=f"loss={mean}, grad_norm={norm}",
                hint="training.lr=<a smaller value> training.max_grad_norm=1.0",
            )
        with span("optimizer", "optimizer"):
            set_lr(self._optimizer, lr)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._recorder.memory(self._gauge.peak_bytes())
        return StepResult(mean, norm, valid_tokens, time.perf_counter() - start, peaks)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> tuple[float, int]:
        """Mean loss over the first step of `batches` and how many tokens counted."""
        self._recorder.begin_step(None)
        self._model.eval()
        with self._recorder.span("evaluation", "evaluation"):
            valid_tokens = max(batches.num_valid(0), 1)
            loss_sum = torch.zeros((), dtype=torch.float64, device=self._world.device)
            for batch in self._fetch(batches, 0):
                loss_sum += self._loss(batch, valid_tokens)
            mean, _ = self._share(loss_sum)
        self._model.train()
        return mean, valid_tokens

    def _fetch(self, batches: Batches, index: int) -> list[Batch]:
        rounds = batches.sequences_per_step // (self._dp_size * self._microbatch)
        return batches.microbatches(index, self._dp_rank, self._dp_size, self._microbatch, rounds)

    def _loss(self, batch: Batch, valid_tokens: int) -> Tensor:
        device = self._world.device
        targets = batch.shift_labels.to(device, non_blocking=True)
        output = self._model(
            input_ids=batch.input_ids.to(device, non_blocking=True),
            labels=targets,
            shift_labels=targets,
            num_items_in_batch=valid_tokens,
            use_cache=False,
        )
        return output.loss

    def _share(self, loss_sum: Tensor) -> tuple[float, int]:
        """Sum of the ranks' losses and the largest of their memory peaks, in one all-reduce."""
        size = self._world.world_size
        values = torch.zeros(size + 1, dtype=torch.float64, device=self._world.device)
        if self._reports:
            values[size] = loss_sum
        values[self._world.rank] = float(self._gauge.peak_bytes())
        if size > 1:
            dist.all_reduce(values)
        *peaks, mean = values.tolist()
        return mean, int(max(peaks))
