"""Training steps by a memory plan: rehearse one step, capture it, plan it, then run the plan.

Before the first step two steps are rehearsed on a copy of the state and undone: a plain one, whose results the first
planned step must repeat bit for bit, and a recorded one on other data, with another learning rate and another number
of tokens, so that a value that should have been a tensor cannot pass unnoticed. Nothing is lost when no plan fits.

From then on the device of the plan (an accelerator, on a CPU a simulated one) owns parameters and optimizer state.
Checkpoints and the export read them where they have their home. What runs without a plan (the start, rehearsals,
evaluations) has on the device what it uses, within the same budget: a `LruSpillMode` brings the rest from host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch import handle, local
from hyper_parallel.backends.torch.data.fsdp import gathered
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
from hyper_parallel.errors import CaptureUnsupported, HyperParallelError
from hyper_parallel.ir import MemoryPlan, Timeline
from hyper_parallel.memory import (
    MemoryMachine,
    clocked,
    plan_memory_cached,
    predicted_timeline,
    summarise,
)
from hyper_parallel.trainer.engine._offload_budget import (
    largest_update_bytes,
    plan_or_refuse,
    refuse_above,
)
from hyper_parallel.trainer.engine._offload_record import (
    OffloadRecord,
    drift_line,
    excess_line,
    offload_line,
    updates_line,
)
from hyper_parallel.trainer.engine.offload_machine import (
    Assumed,
    measured_machine,
)
from hyper_parallel.trainer.engine.optimizer import set_lr
from hyper_parallel.trainer.engine.step_gauges import PhaseSpans
from hyper_parallel.trainer.engine.step_loop import Loop, StepInputs, statistics
from hyper_parallel.trainer.loop import StepResult

if TYPE_CHECKING:
    from hyper_parallel.trainer.data import Batches, StreamBatches

DRIFT: Final = 0.02
"""Share of a step that waits may take beyond the plan before it is planned again."""
EXCESS: Final = 0.02
"""Share by which a step may take more device memory than predicted before the log says so."""
REPLANS: Final = 3
"""Most new plans of a run: measured bandwidths differ a little in every step, and planning takes seconds."""
_PHASES: Final = {
    "forward": "forward",
    "backward": "backward",
    "gradient norm": "optimizer",
    "optimizer": "optimizer",
    "routing": "optimizer",
}
"""Phase of the program that a piece of the step begins; other pieces are part of the phase they are in."""


class PlannedSteps:
    """Runs the steps of one rank by a memory plan.

    Args:
        loop: What the steps do.
        assumed: Machine and goal.
        flash: Directory of this rank's files, which is made here, or None.
        say: Prints a line on rank 0.
        spill: Has the bytes of model and optimizer until they are planned.

    Attributes:
        plan: The memory plan that runs now.
        notes: What the plan of the run should say about it.
        timelines: Predicted and measured timeline of the first planned step, then of the first after a new plan.
    """

    def __init__(
        self,
        loop: Loop,
        assumed: Assumed,
        flash: Path | None,
        say: Callable[[str], None],
        spill: LruSpillMode,
    ) -> None:
        self._loop, self._model, self._optimizer = loop, loop.model, loop.optimizer
        self._assumed, self._flash, self._say = assumed, flash, say
        self._machine = assumed.planned
        self._where = handle(loop.model).device
        self._on_cpu = self._where.type == "cpu"
        self._budget, self._spill = assumed.budget_bytes, spill
        spill.owned = partial(gathered, handle(loop.model).fsdp)
        self.notes: tuple[str, ...] = ()
        self.timelines: tuple[Timeline, Timeline] | None = None
        self._replans = self._outside_bytes = 0
        self._warned = False
        self._expected: ReferenceStep | None = None

    # -- before the first step -----------------------------------------------------------------

    def prepare(self, first: StepInputs, second: StepInputs) -> None:
        """Rehearse the first step, capture one on the second's data, plan it, and hand the state to the device.

        Args:
            first: The step that comes next; its plain results are kept to be compared with.
            second: Any other step of the same shape.

        Raises:
            CaptureUnsupported: HP511 for a step that cannot be repeated faithfully.
            BudgetImpossible: HP402 with the least budget that every rank could keep.
            TierFull: HP403.
        """
        choice = self._assumed.choice
        if self._flash is not None:
            self._flash.mkdir()
        for line in self._assumed.notes:
            self._note(line)
        self._spill.require(largest_update_bytes(self._model, self._optimizer))
        plain, empty = self._rehearsed(first)
        # Kernels of an accelerator may add in another order every time.
        self._expected = ReferenceStep(plain, None if self._on_cpu else self._rehearsed(first)[0])
        if spread := self._expected.spread:
            self._say(
                f"offload: two plain steps differ by {spread['loss']:.1e} in the loss, because some kernels are not "
                "deterministic; every tensor of the first planned step is compared with ten times its difference, not "
                "bit for bit (training.deterministic=true)"
            )
        with self._undone():
            self._captured = self._capture(second, empty)
        self._program = self._assumed.annotate(self._captured.program)
        # On an accelerator the allocator decides what suffices.
        least = self._spill.least_bytes if self._on_cpu else 0
        self.plan = plan_or_refuse(self._planned, self._budget, least, self._program, self._machine)
        if choice.update_on_host:
            self._say(updates_line(self.plan, bitwise=self._on_cpu))
        self._count("the rehearsal of a step")
        self._open()
        self._say(offload_line(self.plan))

    def _note(self, line: str) -> None:
        self.notes += (line,)
        self._say(line)

    def _rehearsed(self, inputs: StepInputs) -> tuple[StepOutcome, list[Any]]:
        """What a plain step gives, and the storages that it leaves empty; everything is undone."""
        with self._undone():
            with self._spill:
                outputs = self._loop.planned_step(inputs)
            outputs = tree_map_only(Tensor, self._spill.on_current_tier, outputs)
            state = {name: self._spill.on_current_tier(t) for name, t in self._state().items()}
            return StepOutcome.of(outputs, state), self._spill.emptied_storages

    def _count(self, what: str) -> None:
        """Take note of what the device has given outside of planned steps; HP402 when `what` is above the budget."""
        most = self._spill.peak_bytes
        if not self._on_cpu:
            most = torch.accelerator.max_memory_allocated(self._where)
        self._outside_bytes = max(self._outside_bytes, most)
        refuse_above(self._budget, self._spill.peak_bytes, what)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Put everything that a step changes back where it was."""
        self._reshard()
        # In host memory: the device may have no room for a second copy.
        home = self._spill.on_current_tier
        before = {name: home(t).to("cpu", copy=True) for name, t in self._state().items()}
        fresh = not self._optimizer.state
        devices = [] if self._on_cpu else [self._where]
        with torch.random.fork_rng(devices, device_type=self._where.type):
            yield
        with torch.no_grad():
            # By name: the first forward pass gives uneven shards of FSDP new local tensors, with room for padding.
            now = self._state()
            for name, value in before.items():
                home(now[name], write=True).copy_(value)
            if fresh:  # AdamW begins with zeros in every slot
                for tensor, _ in optimizer_state(self._model, self._optimizer).values():
                    home(tensor, write=True).zero_()
        self._reshard()

    def _reshard(self) -> None:
        for module in handle(self._model).fsdp:
            module.reshard()

    def _capture(self, inputs: StepInputs, empty: list[Any]) -> Captured:
        # Other values than any step will have: one that was taken for a constant shows in the first planned step.
        other = StepInputs(inputs.microbatches, inputs.valid_tokens + 1, inputs.lr / 2).as_tensors()
        tensors = other.named()
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
            if piece == "gradient norm":  # backward is over: what it left are the gradients
                for parameter in self._model.parameters():
                    if parameter.grad is not None:
                        recorder.mark(local(parameter.grad), "gradient")

        with recorder, self._spill:
            result = replace(self._loop, recorder=PhaseSpans(begin)).planned_step(other)
        captured: Captured = recorder.captured(
            result, tensors, f"{type(self._model).__name__} train"
        )
        set_lr(self._optimizer, inputs.lr)
        _refuse_hidden_state(captured, set(named))
        return captured

    def _planned(self, budget_bytes: int | None) -> MemoryPlan:
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

    def _open(self) -> None:
        self._device = PlannedDevice(
            self._captured,
            self.plan,
            self._assumed.actual,
            copies="threads",
            flash=self._flash,
            expected=self._expected,
            spill=self._spill,
        )
        self._spill.restore_all()  # what is no state
        self._expected = None
        self._traced = False

    def _state(self) -> dict[str, Tensor]:
        named = {**model_state(self._model), **optimizer_state(self._model, self._optimizer)}
        return {name: tensor for name, (tensor, _) in named.items()}

    # -- steps ---------------------------------------------------------------------------------

    def step(self, step: int, batches: Batches | StreamBatches, lr: float) -> StepResult:
        """Run one planned step, as `Loop.step` runs a plain one; plan again when its waits are not as planned.

        Raises:
            LossNotFinite: HP604; updates may have run before the norm was known.
            StepChanged: HP512 when the plan does not repeat the plain step.
            TransferFailed: HP513. TierFull: HP403.
        """
        start = time.perf_counter()
        loop = self._loop
        loop.recorder.begin_step(step)
        loop.seed(step)
        inputs = loop.inputs(batches, step, lr)
        with loop.recorder.span("planned step", "compute"):
            (loss_sum, grad_norm, routing), measured = self._run(inputs)
        with loop.recorder.span("loss", "communication"):
            shared = loop.share(loss_sum, measured.device_bytes, grad_norm)
        read = loop.read(shared, step, "the run ends here")
        loop.recorder.memory([("memory", time.perf_counter(), measured.device_bytes)])
        record = self._record(measured).over_ranks()
        if record.replanned:
            self._say(drift_line(step, record))
        memory = read.memory_bytes
        if memory > record.pred_memory_bytes * (1 + EXCESS) and not self._warned:
            self._warned = True
            self._say(excess_line(step, record, memory))
        seconds = time.perf_counter() - start
        return read.result(int(inputs.valid_tokens), seconds, statistics(routing), asdict(record))

    def _run(self, inputs: StepInputs) -> tuple[Any, Measured]:
        set_lr(self._optimizer, inputs.lr)  # not used by the program, but saved in checkpoints
        outputs, measured = self._device.step(inputs.as_tensors().named(), trace=not self._traced)
        if measured.timeline is not None:
            both = (predicted_timeline(self.plan, self._machine), measured.timeline)
            self.timelines = (summarise(both[0], self.plan), summarise(both[1], self.plan))
            self._traced = True
        return outputs, measured

    def _record(self, measured: Measured) -> OffloadRecord:
        """What this rank predicted and measured; plans again when the step waited too long."""
        plan, clock = self.plan, clocked(self.plan.program, self._machine, self.plan.actions)
        # Not what lives inside the arena: that is added up by the plan's own actions.
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
            replanned=self._replanned(measured, clock.wait_s),
        )

    def _replanned(self, measured: Measured, planned_s: float) -> bool:
        """Plan again with the measured bandwidth when the step waits longer than planned.

        Only waits count: how long operators take on a real device is not what a plan for copies can change.
        """
        if self._replans == REPLANS or measured.wait_s - planned_s <= DRIFT * measured.seconds:
            return False
        machine = measured_machine(self._machine, measured)
        if machine == self._machine:
            return False
        self._machine: MemoryMachine = machine
        self._replans += 1
        try:
            plan = self._planned(self._budget)
        except HyperParallelError as error:
            self._say(
                f"offload: waits are longer than planned, and no other plan fits: {error.what}"
            )
            return False
        before = self._device
        before.state.materialize_on_use(self._spill)
        self.plan = plan
        self._open()
        before.state.end()
        return True

    @contextmanager
    def streamed(self) -> Iterator[None]:
        """Between steps: what operators use of model and optimizer is on the device, within the budget.

        Raises:
            BudgetImpossible: HP402 when that does not suffice.
        """
        with self._device.materialized(self._spill), self._spill:
            yield
            self._reshard()  # what an evaluation has gathered
        self._spill.restore_all()
        self._count("an evaluation")

    def at_home(self, tensor: Tensor) -> Tensor:
        """A tensor of model or optimizer, between steps or after the last one, on its bytes where they are."""
        if self._device.state.arena is None:
            return self._spill.on_current_tier(tensor)
        live = self._device.hardware.gauge.live_bytes
        self._outside_bytes = max(self._outside_bytes, live)
        return self._device.state.on_home_tier(tensor)

    def finish(self) -> None:
        """After the last step: the device is free, and the state stays where it is."""
        self._device.state.materialize_on_use(self._spill)

    def close(self) -> None:
        """Give everything up for good."""
        self._device.state.end()


def _refuse_hidden_state(captured: Captured, named: set[str]) -> None:
    """State that nobody named would not be undone after the rehearsal, nor saved in a checkpoint."""
    storages = captured.program.storages
    for call in captured.program.operators:
        for s in call.writes:
            if storages[s].at_start and storages[s].name not in named:
                raise CaptureUnsupported(
                    f"`{call.name}` changes a tensor that is no parameter, buffer or optimizer state",
                    hint="train this model with `offload.budget=null offload.max_slowdown=null`",
                )
