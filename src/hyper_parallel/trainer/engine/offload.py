"""Training steps with offload: warm-up, recording of a step, memory planning, and execution of the memory plan.

A memory plan lists, for the operators of a recorded step, the tensors to evict, prefetch and recompute. Steps that run
by the plan are called planned steps. Planned steps run on the accelerator, or on a simulated device if the rank has
only a CPU. Between steps, parameters and optimizer state live on a tier: device memory, DRAM or flash.

Warm-up steps run before training and are rolled back: an eager step, which accelerators repeat, and a recorded step.
The first planned step must repeat the results of the eager step, up to the nondeterminism measured on accelerators. The
recorded step uses other data, another learning rate and another token count. If it captures a value as a constant, the
results of the first planned step therefore differ from the eager step.

Work outside planned steps (start, warm-up, evaluations) runs in a `LruSpillMode`, which evicts the least recently used
tensors to host memory within the same budget. Every planned step yields an `OffloadRecord`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch import handle, local
from hyper_parallel.backends.torch.data.fsdp import gathered_parameters
from hyper_parallel.backends.torch.memory import (
    Captured,
    LruSpillMode,
    Measured,
    PlannedDevice,
    ReferenceStep,
    StepCapture,
    StepOutcome,
    model_state,
    optimizer_state,
)
from hyper_parallel.errors import BudgetImpossible, CaptureUnsupported, HyperParallelError
from hyper_parallel.ir import MemoryPlan, MemoryTerm, Plan, Timeline
from hyper_parallel.memory import (
    MemoryMachine,
    clocked,
    order_peak,
    order_seconds,
    peak_by_kind,
    plan_memory_cached,
    predicted_timeline,
    summarise,
)
from hyper_parallel.runtime import agree_on_plan, gather_objects
from hyper_parallel.trainer.engine.offload_machine import (
    OffloadMachine,
    budget_too_small,
    measured_machine,
)
from hyper_parallel.trainer.engine.optimizer import set_lr
from hyper_parallel.trainer.engine.step_gauges import PhaseSpans
from hyper_parallel.trainer.engine.step_loop import Loop, StepInputs, statistics
from hyper_parallel.trainer.files import write_timeline
from hyper_parallel.trainer.loop import StepResult
from hyper_parallel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hyper_parallel.trainer.data import Batches, StreamBatches

DRIFT: Final = 0.02
"""Maximum unplanned wait for copies, as a share of the step's seconds, before the memory is planned again."""
EXCESS: Final = 0.02
"""Relative excess of measured device memory over the prediction above which a line is logged."""
REPLANS: Final = 3
"""Maximum attempts to plan again in a run: measured bandwidths vary in every step, and planning takes seconds."""
_PHASES: Final = {
    "forward": "forward",
    "backward": "backward",
    "gradient norm": "optimizer",
    "optimizer": "optimizer",
    "routing": "optimizer",
}
"""Phase of the recorded program that a timeline span starts, by span name; other spans start no phase."""


class PlannedSteps:
    """Runner of one rank's planned steps: training steps that a memory plan controls.

    Args:
        loop: Loop that runs training steps without a memory plan.
        assumed: Machine model and goal of the memory plan.
        flash: Directory for this rank's offload files, created by `prepare`; None: no flash tier.
        say: Function that prints a line on rank 0.
        spill: Mode that evicts and fetches model and optimizer tensors outside planned steps.
    """

    def __init__(
        self,
        loop: Loop,
        assumed: OffloadMachine,
        flash: Path | None,
        say: Callable[[str], None],
        spill: LruSpillMode,
    ) -> None:
        self._loop, self._model, self._optimizer = loop, loop.model, loop.optimizer
        self._assumed, self._flash, self._say = assumed, flash, say
        self._machine = assumed.planned
        self._torch_device = handle(loop.model).device
        self._on_cpu = self._torch_device.type == "cpu"
        self._budget, self._spill = assumed.budget_bytes, spill
        spill.owned = partial(gathered_parameters, handle(loop.model).fsdp)
        # Predicted and measured timelines of the first step of the current memory plan.
        self._timelines: tuple[Timeline, ...] = ()
        self._replans = self._outside_bytes = 0
        self._warned = False
        self._expected: ReferenceStep | None = None

    # -- before the first step -----------------------------------------------------------------

    def prepare(self, first: StepInputs, second: StepInputs) -> None:
        """Run `first` eagerly, record a step on `second`, plan its memory, and move model and optimizer to their tiers.

        Args:
            first: Inputs of the next step. Its eager results are the reference for the first planned step. On an
                accelerator, it runs twice to measure how much its results vary.
            second: Inputs of another step with the same shapes.

        Raises:
            CaptureUnsupported: HP511 for a step that cannot be replayed from its recorded operators.
            BudgetImpossible: HP402 when the memory plan or a warm-up step of a rank exceeds the budget.
            TierFull: HP403 when a tier has no space for the plan or the state.
        """
        if self._flash is not None:
            self._flash.mkdir()
        for line in self._assumed.notes:
            self._say(line)
        self._spill.require(self._largest_update_bytes())
        eager, empty = self._run_and_roll_back(first)
        # Accelerator kernels may be nondeterministic, so a second eager step measures the differences.
        self._expected = ReferenceStep(eager, None if self._on_cpu else self._run_and_roll_back(first)[0])
        if spread := self._expected.spread:
            self._say(
                f"offload: two eager steps differ by {spread['loss']:.1e} in the loss, because some kernels are not "
                "deterministic; the first planned step may differ from them by up to ten times as much per tensor "
                "(training.deterministic=true: by no bit)"
            )
        with self._rollback():
            self._captured = self._capture(second, empty)
        assumed = self._assumed
        self._program = assumed.roofline.annotate(self._captured.program, assumed.link)
        self._plan = self._plan_or_refuse()
        self._record_outside_peak("a warm-up step")
        self._open_device()
        self._say(offload_line(self._plan))

    def _run_and_roll_back(self, inputs: StepInputs) -> tuple[StepOutcome, list[Any]]:
        """Run an eager step and roll it back; return its results, and the storages that the step resized to 0 bytes."""
        with self._rollback():
            with self._spill:
                outputs = self._loop.planned_step(inputs)
            outputs = tree_map_only(Tensor, self._spill.on_current_tier, outputs)
            state = {name: self._spill.on_current_tier(t) for name, t in self._state().items()}
            return StepOutcome.of(outputs, state), self._spill.emptied_storages

    def _record_outside_peak(self, activity: str) -> None:
        """Update the peak device bytes outside planned steps; collective.

        Raise BudgetImpossible (HP402) if `spill` exceeded the budget on any rank.
        """
        most = self._spill.peak_bytes
        if not self._on_cpu:
            most = torch.accelerator.max_memory_allocated(self._torch_device)
        self._outside_bytes = max(self._outside_bytes, most)
        most, budget = max(gather_objects(self._spill.peak_bytes)), self._budget
        if budget is not None and most > budget:
            text = f"{activity} does not fit the device budget of {format_bytes(budget)}"
            raise budget_too_small(text, budget, most)

    def _largest_update_bytes(self) -> int:
        """Return the device bytes of the largest optimizer operator: a parameter with gradient and moments."""
        trained = [local(p).nbytes for p in self._model.parameters() if p.requires_grad]
        moments = 2 if isinstance(self._optimizer, torch.optim.Adam) else 0
        return max(trained, default=0) * (2 + moments)

    @contextmanager
    def _rollback(self) -> Iterator[None]:
        """Restore model, optimizer and random state at the end of a context that raises no error."""
        self._reshard()
        # Copies in host memory: the device may lack memory for a second copy.
        home = self._spill.on_current_tier
        before = {name: home(t).to("cpu", copy=True) for name, t in self._state().items()}
        is_new = not self._optimizer.state
        devices = [] if self._on_cpu else [self._torch_device]
        with torch.random.fork_rng(devices, device_type=self._torch_device.type):
            yield
        with torch.no_grad():
            # Look tensors up by name: the first forward replaces the local tensors of uneven FSDP shards.
            current = self._state()
            for name, value in before.items():
                home(current[name], write=True).copy_(value)
            if is_new:  # AdamW starts with zeros in every slot
                for tensor, _ in optimizer_state(self._model, self._optimizer).values():
                    home(tensor, write=True).zero_()
        self._reshard()

    def _reshard(self) -> None:
        for module in handle(self._model).fsdp:
            module.reshard()

    def _capture(self, inputs: StepInputs, empty: list[Any]) -> Captured:
        # With other values, a value captured as a constant fails the check of the first planned step.
        changed = StepInputs(inputs.microbatches, inputs.valid_tokens + 1, inputs.lr / 2).as_tensors()
        tensors = changed.named()
        named: dict[str, Any] = {
            **{name: (tensor, "input") for name, tensor in tensors.items()},
            **model_state(self._model),
            **optimizer_state(self._model, self._optimizer),
        }
        recorder: Any = StepCapture(
            named,
            training=True,
            alignment_bytes=512,
            empty=empty,
            make_resident=self._spill.make_resident,
        )

        def begin(piece: str) -> None:
            recorder.part = _PHASES.get(piece, recorder.part)
            if piece == "gradient norm":  # backward has finished, so all gradients exist
                for parameter in self._model.parameters():
                    if parameter.grad is not None:
                        recorder.mark(local(parameter.grad), "gradient")

        with recorder, self._spill:
            result = replace(self._loop, recorder=PhaseSpans(begin)).planned_step(changed)
        captured: Captured = recorder.captured(result, tensors, f"{type(self._model).__name__} train")
        set_lr(self._optimizer, inputs.lr)
        _refuse_hidden_state(captured, set(named))
        return captured

    def _make_plan(self, budget_bytes: int | None) -> MemoryPlan:
        choice = self._assumed.choice
        return plan_memory_cached(
            self._program,
            self._machine,
            measured=self._captured.seconds,
            budget_bytes=budget_bytes,
            max_slowdown=choice.max_slowdown,
            recompute=choice.recompute,
            reorder=choice.reorder,
        )

    def _plan_or_refuse(self) -> MemoryPlan:
        """Return this rank's memory plan of the recorded step; collective. Raise HP402 on all ranks if any has none."""
        budget = self._budget
        # Minimum of a step without a plan; on an accelerator the allocator determines it.
        least = max(gather_objects(self._spill.least_bytes if self._on_cpu else 0))
        planned = budget if budget is None else max(budget, least)
        try:
            plan = agree_on_plan(lambda: self._make_plan(planned), self._program, self._machine, planned)
        except BudgetImpossible as error:
            if planned == budget:
                raise
            least = error.least_bytes
        if budget is not None and planned != budget:
            text = f"a step without a plan does not fit the device budget of {format_bytes(budget)}"
            raise budget_too_small(text, budget, least)
        return plan

    def _open_device(self) -> None:
        self._device = PlannedDevice(
            self._captured,
            self._plan,
            self._assumed.actual,
            copies="threads",
            flash=self._flash,
            check=True if self._expected is None else self._expected,
            source=self._spill,
        )
        self._spill.restore_all()  # tensors other than state
        self._expected = None
        self._traced = False

    def _state(self) -> dict[str, Tensor]:
        named = {**model_state(self._model), **optimizer_state(self._model, self._optimizer)}
        return {name: tensor for name, (tensor, _) in named.items()}

    # -- steps ---------------------------------------------------------------------------------

    def step(self, step: int, batches: Batches | StreamBatches, lr: float) -> StepResult:
        """Run one planned step like `Loop.step`; make a new plan if waits for copies exceed the prediction.

        Raises:
            LossNotFinite: HP604 for a non-finite loss or norm; parameters may already be updated.
            StepChanged: HP512 when the step differs from the recorded step.
            TransferFailed: HP513 when a copy between tiers fails.
            TierFull: HP403 when a tier runs out of space.
        """
        start = time.perf_counter()
        loop = self._loop
        loop.recorder.begin_step(step)
        loop.seed(step)
        inputs = loop.inputs(batches, step, lr)
        with loop.recorder.span("planned step", "compute"):
            (loss_sum, grad_norm, routing), measured = self._run(inputs)
        with loop.recorder.span("loss", "communication"):
            shared = loop.reduce_step_log(loss_sum, measured.device_bytes, grad_norm)
        read = loop.read(shared, step, "the run ends here")
        loop.recorder.memory([("memory", time.perf_counter(), measured.device_bytes)])
        record = self._record(measured).over_ranks()
        if record.replanned:
            self._say(
                f"offload: step {step} took {format_seconds(record.sim_step_s)} instead of the planned "
                f"{format_seconds(record.pred_sim_step_s)}, waiting {format_seconds(record.wait_s)} for copies; "
                "planned again with the measured bandwidth"
            )
        memory = read.memory_bytes
        if memory > record.pred_memory_bytes * (1 + EXCESS) and not self._warned:
            self._warned = True
            self._say(
                f"offload: step {step} used {format_bytes(memory)} of device memory instead of the predicted "
                f"{format_bytes(record.pred_memory_bytes)}: memory is allocated outside of the plan"
            )
        seconds = time.perf_counter() - start
        return replace(
            read,
            valid_tokens=int(inputs.valid_tokens),
            step_s=seconds,
            routing=statistics(routing),
            offload=asdict(record),
        )

    def _run(self, inputs: StepInputs) -> tuple[Any, Measured]:
        set_lr(self._optimizer, inputs.lr)  # unused by the program, but saved in checkpoints
        outputs, measured = self._device.step(inputs.as_tensors().named(), trace=not self._traced)
        if measured.timeline is not None:
            both = (predicted_timeline(self._plan, self._machine), measured.timeline)
            self._timelines = (summarise(both[0], self._plan), summarise(both[1], self._plan))
            self._traced = True
        return outputs, measured

    def _record(self, measured: Measured) -> OffloadRecord:
        """Return this rank's predicted and measured numbers; make a new plan if the step waited too long for copies."""
        plan = self._plan
        clock = clocked(plan.program, self._machine, plan.actions)
        # The arena's live bytes are left out, because they are computed from the plan, not measured.
        peaks = [(measured.peak_bytes[tier], plan.peak_bytes[tier]) for tier in ("dram", "flash")]
        peaks += [
            (measured.device_bytes, plan.device_bytes),
            (measured.dram_bytes, plan.dram_bytes),
        ]
        return OffloadRecord(
            pred_memory_bytes=plan.device_bytes,
            difference_bytes=max(abs(a - b) for a, b in peaks),
            outside_bytes=self._outside_bytes,
            dram_bytes=measured.dram_bytes,
            flash_bytes=measured.peak_bytes["flash"],
            sim_step_s=measured.seconds,
            pred_sim_step_s=plan.seconds,
            wait_s=measured.wait_s,
            pred_wait_s=clock.wait_s,
            join_s=measured.join_s,
            pred_join_s=clock.join_s,
            replanned=self._replan(measured, clock.wait_s),
        )

    def _replan(self, measured: Measured, planned_s: float) -> bool:
        """Replace the memory plan if a step waited longer for copies than planned; return whether it was replaced.

        The new plan uses the measured bandwidths. The plan is kept if the bandwidths are as assumed, if no new plan
        fits, or after `REPLANS` attempts.
        """
        if self._replans == REPLANS or measured.wait_s - planned_s <= DRIFT * measured.seconds:
            return False
        machine = measured_machine(self._machine, measured)
        if machine == self._machine:
            return False
        self._machine: MemoryMachine = machine
        self._replans += 1
        try:
            plan = self._make_plan(self._budget)
        except HyperParallelError as error:
            self._say(f"offload: waits are longer than planned, and no new plan fits: {error.what}")
            return False
        previous = self._device
        previous.state.materialize_on_use(self._spill)
        self._plan = plan
        self._open_device()
        previous.state.end()
        return True

    @contextmanager
    def streamed(self) -> Iterator[None]:
        """Fetch model and optimizer tensors to the device when they are used inside the context.

        Raises:
            BudgetImpossible: HP402 when the work inside the context exceeds the device budget.
        """
        with self._device.materialize_state(self._spill), self._spill:
            yield
            self._reshard()  # free parameters that an evaluation gathered
        self._spill.restore_all()
        self._record_outside_peak("an evaluation")

    def on_current_tier(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the current values of a model or optimizer tensor, on the tier where it lives."""
        if self._device.state.arena is None:
            return self._spill.on_current_tier(tensor)
        live = self._device.hardware.gauge.live_bytes
        self._outside_bytes = max(self._outside_bytes, live)
        return self._device.state.on_home_tier(tensor)

    def plan_with_memory(self, plan: Plan) -> Plan:
        """Return `plan` with the predicted memory of the rank that uses most device memory; collective over all ranks.

        Notes about offload, and the lines in which the memory planner explains its plan, are appended to the notes.
        """
        fullest = max(
            gather_objects(_memory_terms(self._plan)),
            key=lambda terms: sum(t.bytes for t in terms if t.tier == "hbm"),
        )
        lines = tuple(f"offload: {line}" for line in self._plan.statement)
        return replace(plan, memory=fullest, notes=(*plan.notes, *self._assumed.notes, *lines))

    def write_timelines(self, directory: Path) -> None:
        """Write offload_predicted.json and offload_measured.json, timelines of one planned step, if there is one."""
        for timeline, name in zip(self._timelines, ("predicted", "measured"), strict=False):
            write_timeline(timeline, directory / f"offload_{name}.json")

    def finish(self) -> None:
        """Release the device memory of the plan after the last step; `on_current_tier` still returns the state."""
        self._device.state.materialize_on_use(self._spill)

    def close(self) -> None:
        """Free the memory of the planned device."""
        self._device.state.end()


def _refuse_hidden_state(captured: Captured, named: set[str]) -> None:
    """Raise HP511 if the step changes tensors outside `named`, which rollback and checkpoints would miss."""
    storages = captured.program.storages
    for call in captured.program.operators:
        for s in call.writes:
            if storages[s].at_start and storages[s].name not in named:
                raise CaptureUnsupported(
                    f"`{call.name}` writes to a tensor that is neither parameter, buffer nor optimizer state",
                    hint="train this model with `offload=null`",
                )


@dataclass(frozen=True, slots=True)
class OffloadRecord:
    """Predicted and measured offload numbers of one step, on one rank or, after `over_ranks`, the maximum over ranks.

    Attributes:
        pred_memory_bytes: Predicted device memory of the fullest rank: arena and staging buffers. The step's
            `memory_bytes` is its measured counterpart.
        difference_bytes: Largest difference between predicted and measured peak of any tier on any rank.
        outside_bytes: Peak device bytes so far outside planned steps: start, warm-up, evaluations, checkpoints.
        dram_bytes: Host memory of the offload buffers on the fullest rank.
        flash_bytes: Measured peak of the offload files of the fullest rank.
        sim_step_s: Time of the step on the slowest rank: on the simulated device's clock, or on accelerators measured
            by events.
        pred_sim_step_s: Predicted `sim_step_s`.
        wait_s: Seconds of the step in which the compute lane waited for copies.
        pred_wait_s: Predicted `wait_s`.
        join_s: Seconds of the step in which the compute lane waited for other ranks.
        pred_join_s: Predicted `join_s`.
        replanned: Whether a rank made a new plan after this step.
    """

    pred_memory_bytes: int
    difference_bytes: int
    outside_bytes: int
    dram_bytes: int
    flash_bytes: int
    sim_step_s: float
    pred_sim_step_s: float
    wait_s: float
    pred_wait_s: float
    join_s: float
    pred_join_s: float
    replanned: bool

    def over_ranks(self) -> OffloadRecord:
        """Return the maximum of every number over all ranks; collective over all ranks."""
        return OffloadRecord(*map(max, zip(*map(astuple, gather_objects(self)), strict=True)))


def _memory_terms(plan: MemoryPlan) -> tuple[MemoryTerm, ...]:
    """Return a rank's predicted bytes per tier and kind of tensor, as memory terms of a `Plan`."""
    unused, staging = plan.arena_bytes - plan.peak_bytes["device"], plan.program.staging_bytes
    flash, kinds = plan.peak_bytes["flash"], peak_by_kind(plan)
    terms = [
        *((k, "hbm", n, "bytes of this kind at the device peak") for k, n in kinds.items()),
        ("gaps", "hbm", unused, "gaps between buffers of the memory plan"),
        ("staging", "hbm", staging, "staging buffers outside the memory plan"),
        ("offloaded to dram", "dram", plan.dram_bytes, "buffers, reserved before the first step"),
        ("offloaded to flash", "flash", flash, "peak of the tier"),
    ]
    return tuple(
        MemoryTerm(name, tier, size, f"memory plan: {why}") for name, tier, size, why in terms if size or name in kinds
    )


def offload_line(plan: MemoryPlan) -> str:
    """Return a log line with the predicted peak bytes and step time of a memory plan."""
    recorded = range(len(plan.program.operators))
    recorded_peak = order_peak(plan.program, recorded)
    recorded_s = order_seconds(plan.program, recorded)
    most = {"device": plan.device_bytes, "dram": plan.dram_bytes, "flash": plan.peak_bytes["flash"]}
    tiers = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in most.items() if size)
    return (
        f"offload: predicted peak {tiers} (without: {format_bytes(recorded_peak)}); simulated step "
        f"{format_seconds(plan.seconds)} (without: {format_seconds(recorded_s)})"
    )
