"""Training step, loss scale and evaluation, with the same code on every layout.

Without a learning stage (such as DPO), the loss of a step is the cross entropy summed over the valid tokens of all
data-parallel ranks and microbatches, divided by the number of these tokens. Gradients are summed over ranks and
microbatches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from hyper_parallel.backends.torch import (
    clip_grad_norm_,
    count_routing,
    data_share,
    forward_backward,
    forward_loss,
    handle,
    local,
    microbatch_sources,
    overlap_counts,
    purpose,
    routing_statistics,
)
from hyper_parallel.backends.torch.held_out_predictions import count_predictions
from hyper_parallel.backends.torch.token_rows import TOKEN_MASK
from hyper_parallel.errors import LossNotFinite
from hyper_parallel.ir import Plan, Purpose
from hyper_parallel.trainer.data import Batches
from hyper_parallel.trainer.engine.cost_balance import TowerMicrobatches, cost_grid
from hyper_parallel.trainer.engine.optimizer import set_lr, step_unless
from hyper_parallel.trainer.engine.step_checks import first_not_finite
from hyper_parallel.trainer.engine.step_gauges import MemoryGauge, SpanRecorder
from hyper_parallel.trainer.loop import EvalResult, StepResult

if TYPE_CHECKING:
    from hyper_parallel.runtime import World
    from hyper_parallel.trainer.data import Grid, StreamBatches
    from hyper_parallel.trainer.stages import LearningStage

MAX_CONSECUTIVE_SKIPS: Final = 20
"""Consecutive skipped steps that end the run; 16 overflows already lower float16's loss scale from 65536 to 1."""

GROWTH_STEPS: Final = 2000
"""Steps without overflow after which the loss scale doubles, as in torch.amp.GradScaler."""

Routing = tuple[Tensor, Tensor | None] | None
"""(tokens per expert in a step, auxiliary loss or None) from `count_routing`; None if no tokens were counted."""


@dataclass
class LossScale:
    """Dynamic loss scale, a power of two: halved when gradients overflow, doubled after `GROWTH_STEPS` finite steps.

    Source: dynamic loss scaling, Micikevicius et al., arXiv:1710.03740; constants of torch.amp.GradScaler.

    Attributes:
        value: Scale of the next step.
        good_steps: Number of finite steps since the last change.
    """

    value: float = 65536.0
    good_steps: int = 0

    def after(self, finite: bool) -> None:
        """Update the scale after a step; `finite` tells whether loss and gradients of the step were finite."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a training step on one rank.

    Attributes:
        microbatches: Model inputs by name, for each microbatch of this rank; with sub-models, None for a microbatch
            without inputs on this rank.
        valid_tokens: Number by which the summed loss is divided: target tokens in the step, over all ranks; at least 1.
        lr: Learning rate.
    """

    microbatches: list[dict[str, Tensor]]
    valid_tokens: int | Tensor
    lr: float | Tensor = 0.0

    def as_tensors(self) -> StepInputs:
        """Return a copy with numbers as tensors, because a captured step takes only tensors as inputs."""
        return StepInputs(
            [{name: t.clone() for name, t in part.items()} for part in self.microbatches],
            torch.as_tensor(self.valid_tokens),
            torch.as_tensor(self.lr, dtype=torch.float64),
        )

    def named(self) -> dict[str, Any]:
        """Return all inputs by name: `valid_tokens`, `lr`, and `NAME.INDEX` for the tensors of each microbatch."""
        parts = enumerate(self.microbatches)
        named: dict[str, Any] = {f"{name}.{i}": t for i, part in parts for name, t in part.items()}
        return {**named, "valid_tokens": self.valid_tokens, "lr": self.lr}


@dataclass
class SkipPolicy:
    """Rule for skipping steps; a skipped step changes neither parameters nor optimizer states.

    Attributes:
        nonfinite: Whether a non-finite loss or gradient norm skips the step. If False, it ends the run, unless the loss
            scale of float16 can still be lowered.
        max_norm: Gradient norm above which a step is skipped; None: no limit.
        num_consecutive: Number of consecutive steps skipped until now.
    """

    nonfinite: bool = False
    max_norm: float | None = None
    num_consecutive: int = 0

    @property
    def on(self) -> bool:
        """True if the rule is enabled."""
        return self.nonfinite or self.max_norm is not None

    def skips(self, shared: Tensor) -> Tensor:
        """Return whether loss or gradient norm is not finite, or the norm exceeds `max_norm`, as a bool scalar tensor.

        `shared` is the result of `Loop.reduce_step_log`.
        """
        skip = ~torch.isfinite(shared[-2:]).all()
        return skip if self.max_norm is None else skip | (shared[-1] > self.max_norm)

    def after(self, output: StepResult, step: int, rejected: bool = False) -> bool:
        """Count a finished step, which the learning stage may have `rejected`; return whether it was skipped.

        Raises:
            LossNotFinite: HP604 after `MAX_CONSECUTIVE_SKIPS` skipped steps in a row. While the rule is disabled, steps
                skipped by the loss scale are not counted.
        """
        spike = self.max_norm is not None and output.grad_norm > self.max_norm
        skipped = spike or rejected or not output.finite
        self.num_consecutive = self.num_consecutive + 1 if skipped and (self.on or rejected) else 0
        if self.num_consecutive == MAX_CONSECUTIVE_SKIPS:
            raise LossNotFinite(
                f"{MAX_CONSECUTIVE_SKIPS} steps in a row were skipped, so training makes no progress",
                where=f"step {step}",
                got=f"loss={output.loss}, grad_norm={output.grad_norm}",
                hint="grpo.min_effective_samples=null"
                if rejected
                else "training.on_nonfinite=stop training.skip_grad_norm=null",
            )
        return skipped


@dataclass
class Loop:
    """Training steps and evaluations of one model on this rank.

    Attributes:
        model: Model passed through `parallelize`, with weights.
        optimizer: Optimizer of the model.
        plan: Plan passed to `parallelize`.
        world: Ranks of the process group, and this rank's device.
        recorder: Recorder of timeline spans.
        gauge: Gauge of peak memory.
        max_grad_norm: Maximum norm for gradient clipping; None: no clipping.
        scale: Dynamic loss scale of float16; None: no loss scaling.
        wishes: Function that returns (stop, save): whether this rank requests the end of the run, and whether it
            requests a checkpoint, after the current step.
        seed: Function that seeds the random generators, given the step.
        policy: Rule for skipping steps.
        stage: Learning stage, such as DPO or GRPO; None: cross entropy on the data.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan
    world: World
    recorder: SpanRecorder
    gauge: MemoryGauge
    max_grad_norm: float | None
    scale: LossScale | None = None
    wishes: Callable[[], tuple[bool, bool]] = lambda: (False, False)
    seed: Callable[[int], None] = lambda step: None
    policy: SkipPolicy = field(default_factory=SkipPolicy)
    stage: LearningStage | None = None
    _grids: dict[int, Grid] = field(default_factory=dict)

    def step(self, step: int, batches: Batches | StreamBatches, lr: float) -> StepResult:
        """Run optimizer step number `step`, counted from 1.

        Raises:
            LossNotFinite: HP604 for a non-finite loss or gradient norm that neither `policy` nor `scale` permits, or
                after too many consecutive skipped steps. This step has changed no parameter.
        """
        start = time.perf_counter()
        self.recorder.begin_step(step)
        self.seed(step)
        with self.gauge.step(), self.recorder.collectives():
            inputs = self.inputs(batches, step, lr)
            if self.stage is not None:
                rows = self._rows(batches, step - 1)
                with self.recorder.span(*self.stage.inputs_span):
                    microbatches, count = self.stage.inputs(inputs.microbatches, rows, batches, step)
                count = inputs.valid_tokens if count is None else count
                inputs = replace(inputs, microbatches=microbatches, valid_tokens=count)
            loss_sum, grad_norm = self.gradients(inputs)
            with self.recorder.span("loss", "communication"):
                shared = self.reduce_step_log(loss_sum, self.gauge.peak_bytes(), grad_norm)
            # `skip` stays on the device, so fused optimizers need no synchronization with the host.
            rejected = None if self.stage is None else self.stage.rejects()
            self.update(lr, skip=self.policy.skips(shared) | bool(rejected))
            result = self.read(shared, step, "the step was not applied", partial(self._locate, inputs, step))
            routing = statistics(self.count_routing())
        self.recorder.memory(self.gauge.samples)
        seconds = time.perf_counter() - start
        overlap = overlap_counts(self.model) | self.recorder.overlap()
        result = replace(
            result,
            valid_tokens=int(inputs.valid_tokens),
            step_s=seconds,
            routing=routing,
            overlap=overlap or None,
            balance=self._balance(batches, step),
            **({} if self.stage is None else self.stage.record()),
        )
        skipped = self.policy.after(result, step, bool(rejected))
        if self.scale is not None:
            result = replace(result, loss_scale=self.scale.value)
            self.scale.after(result.finite)
        elif not self.policy.on and rejected is None:
            return result
        return replace(result, skipped=int(skipped))

    def _locate(self, inputs: StepInputs, step: int) -> str | None:
        """Rerun a step and describe its first non-finite value; return None with sub-models or if all are finite."""
        if handle(self.model).submodels is not None:
            return None
        self.seed(step)
        stage = self.plan.mesh.coordinate(self.world.rank)["pp"]
        return first_not_finite(self.model, lambda: self.gradients(inputs), stage)

    def planned_step(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Routing]:
        """Run a step without reading tensor values on the host, as the recording for a memory plan requires.

        Returns:
            This rank's share of the loss, the gradient norm, and the result of `count_routing`.
        """
        loss_sum, grad_norm = self.gradients(inputs)
        self.update(inputs.lr)
        return loss_sum, grad_norm, self.count_routing()

    @torch.no_grad()
    def evaluate(self, batches: Batches | StreamBatches) -> EvalResult:
        """Evaluate the held-out rows, which are the only step of `batches`; return the mean loss and other metrics."""
        self.recorder.begin_step(None)
        self.model.eval()
        with self.recorder.span("evaluation", "evaluation"):
            inputs = self._fetch(batches, 0)
            count, parts = int(inputs.valid_tokens), inputs.microbatches
            accuracies: dict[str, float] = {}
            if self.stage is None:
                with count_predictions(self.plan.strategy.cp == 1) as predictions:
                    loss_sum = self.held_out_loss(parts, count)
                accuracies = predictions.accuracies(count, self.world.device)
            else:
                parts, tokens = self.stage.inputs(parts, self._rows(batches, 0), batches, None)
                count = count if tokens is None else tokens
                step_loss = forward_loss(self.model, parts, objective=self.stage.objective)
                loss_sum = step_loss / self.world.world_size
            mean = self.reduce_step_log(loss_sum, 0)[-2].item()
            record = {} if self.stage is None else self.stage.record()
        self.model.train()
        return EvalResult(mean, count, record.get("preference"), record.get("rollout"), **accuracies)

    def held_out_loss(self, parts: list[dict[str, Tensor]], count: int) -> Tensor:
        """Return this rank's part of the held-out loss over `count` valid tokens; the loss is the sum over ranks."""
        return forward_loss(self.model, parts, count)

    def inputs(self, batches: Batches | StreamBatches, step: int, lr: float, share: int | None = None) -> StepInputs:
        """Return the inputs of step number `step`, counted from 1, of data-parallel rank `share` (None: this rank)."""
        with self.recorder.span("data", "data"):
            return self._fetch(batches, step - 1, lr, share)

    def gradients(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Run forward and backward, and clip the gradients.

        Returns:
            This rank's share of the loss, and the global gradient norm before clipping.
        """
        span = self.recorder.span
        scale = 1.0 if self.scale is None else self.scale.value
        if self.stage is None:
            loss_sum = forward_backward(self.model, inputs.microbatches, inputs.valid_tokens, span, scale=scale)
        else:
            step_loss = forward_backward(
                self.model,
                inputs.microbatches,
                span=span,
                objective=self.stage.objective,
                scale=scale,
            )
            # Every rank computes the full loss of the step; `reduce_step_log` sums over ranks.
            loss_sum = step_loss / self.world.world_size
        with span("gradient norm", "communication"):
            if self.scale is not None:
                grads = [p.grad for p in self.model.parameters() if p.grad is not None]
                torch._foreach_mul_([local(grad) for grad in grads], 1 / scale)
            return loss_sum, clip_grad_norm_(self.model, self.max_grad_norm)

    def reduce_step_log(self, loss_sum: Tensor, memory_bytes: int, grad_norm: float | Tensor = 0.0) -> Tensor:
        """Combine the peak memory, stop and save requests, and loss shares of all ranks in one all-reduce.

        `grad_norm` is already equal on every rank.

        Returns:
            [ranks + 4] tensor on the device: peak bytes of each rank, number of stop requests, number of save requests,
            loss, gradient norm.
        """
        size = self.world.world_size
        values = torch.zeros(size + 4, dtype=torch.float64, device=self.world.device)
        values[self.world.rank] = float(memory_bytes)
        for place, wish in enumerate(self.wishes(), start=size):
            if wish:
                values[place] = 1.0
        values[size + 2] = loss_sum
        if size > 1:
            with purpose(Purpose.STEP_LOG):
                dist.all_reduce(values[: size + 3])
        values[size + 3] = grad_norm
        return values

    def update(self, lr: float | Tensor, skip: Tensor | None = None) -> None:
        """Run the optimizer step, then clear the gradients.

        If the bool scalar `skip` is True, parameters and optimizer state do not change. None: never skip.
        """
        with self.recorder.span("optimizer", "optimizer"):
            set_lr(self.optimizer, lr)
            step_unless(self.optimizer, skip)
            self.optimizer.zero_grad(set_to_none=True)

    def read(
        self,
        shared: Tensor,
        step: int,
        outcome: str,
        locate: Callable[[], str | None] = lambda: None,
    ) -> StepResult:
        """Copy the result of `reduce_step_log` to the host, as a `StepResult` without token count and seconds.

        The error contains `outcome`, the consequence of a non-finite loss, and the result of `locate`, which describes
        the first non-finite value; None: it is not known.

        Raises:
            LossNotFinite: HP604 for a non-finite loss or norm, unless the policy skips non-finite steps or the loss
                scale can be lowered.
        """
        with self.recorder.span("loss", "communication"):
            *peaks, stop, save, loss, norm = shared.tolist()
        output = StepResult(loss, norm, 0, 0.0, int(max(peaks)), stop=stop > 0, save=save > 0)
        skips = self.policy.nonfinite or (self.scale is not None and self.scale.value > 1)
        if not output.finite and not skips:
            raise LossNotFinite(
                f"the loss or its gradient is not finite; {outcome}",
                where=f"step {step}",
                got=f"loss={loss}, grad_norm={norm}" + ("" if (name := locate()) is None else f"; first: {name}"),
            )
        return output

    def count_routing(self) -> Routing:
        """Return tokens per expert, summed over ranks, and the auxiliary loss of the step; None without router counts.

        Router biases are updated, and counts are reset; see `backends.torch.count_routing`.
        """
        if not handle(self.model).routes:
            return None
        with self.recorder.span("routing", "communication"):
            return count_routing(self.model)

    def _rows(self, batches: Any, index: int) -> NDArray[np.int64]:
        """Return the dataset indices of this rank's sequences in step `index`, counted from 0; -1 for padding."""
        rows: NDArray[np.int64] = batches.step_batch(index)
        share, num_shares = data_share(self.model)
        return rows.reshape(num_shares, -1)[share]

    def _grid(self, batches: Batches | StreamBatches) -> Grid | None:
        """Return the ranks and microbatches over which media work is balanced (`cost_grid`); None without balancing."""
        if not isinstance(batches, Batches) or batches.order.costs is None:
            return None
        if (size := batches.sequences_per_step) not in self._grids:
            submodels, tower = handle(self.model).submodels, None
            if submodels is not None:
                joint = submodels.joint
                tower = TowerMicrobatches(submodels.owners, None if joint is None else joint.schedule)
            self._grids[size] = cost_grid(self.plan, batches, tower)
        return self._grids[size]

    def _balance(self, batches: Batches | StreamBatches, step: int) -> dict[str, Any] | None:
        grid = self._grid(batches)
        if grid is None or not isinstance(batches, Batches):
            return None
        return asdict(batches.balance(step - 1, grid))

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        """Copy an array to the device; floating-point arrays, such as pixel values, get the parameters' dtype."""
        tensor = torch.from_numpy(array)
        dtype = next(self.model.parameters()).dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.world.device, dtype, non_blocking=True)

    def _fetch(
        self,
        batches: Batches | StreamBatches,
        index: int,
        lr: float = 0.0,
        share: int | None = None,
    ) -> StepInputs:
        dp, microbatch = self.plan.strategy.dp, self.plan.workload.microbatch or 1
        rounds = batches.sequences_per_step // (dp * microbatch)
        sources = microbatch_sources(self.model, rounds)
        if share is not None:
            sources = [(share, i) for i in range(rounds)]
        shares = {source[0] for source in sources if source is not None}
        grid = self._grid(batches)
        cut = {s: batches.microbatches(index, s, dp, microbatch, rounds, *([grid] if grid else [])) for s in shares}
        parts = [None if source is None else cut[source[0]][source[1]] for source in sources]
        names = ["input_ids", "shift_labels", "position_ids"]
        names += [TOKEN_MASK] if handle(self.model).routes else []
        arrays = [b and {n: a for n in names if (a := getattr(b, n)) is not None} | b.media for b in parts]
        tensors = [part and {name: self._on_device(a) for name, a in part.items()} for part in arrays]
        # The data index contains the token counts of all ranks, so no communication is needed.
        return StepInputs(tensors, max(batches.num_valid(index), 1), lr)


def statistics(routing: Routing) -> dict[str, Any] | None:
    """Convert the tokens per expert of a step to the statistics in its record; return None without counts."""
    counted = None if routing is None else routing_statistics(*routing)
    return None if counted is None else asdict(counted)
