"""Executor of memory plans: runs a plan and measures it.

Operators are torch's own, so results are those of the model. One device buffer, the arena, contains every resident
storage at its planned address. A result that an operator cannot write at its address is staged, copied and freed.

On an accelerator, copies run on streams, events measure the time and the allocator counts the bytes. On a CPU the
device is simulated: all tiers are host memory or files, every buffer is counted, and a virtual clock keeps the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._lru_spill import LruSpillMode
from hyper_parallel.backends.torch.memory.arena_state import ArenaState, check_plan
from hyper_parallel.backends.torch.memory.first_step import ReferenceStep, StepOutcome
from hyper_parallel.backends.torch.memory.hardware import CopyMode, Hardware
from hyper_parallel.backends.torch.memory.operators import View
from hyper_parallel.errors import StepChanged
from hyper_parallel.ir import Counter, MemoryPlan, Timeline
from hyper_parallel.memory import Copied, MemoryMachine, ProgramClock, clocked, predicted_timeline

_Sample = tuple[Any, tuple[tuple[str, int], ...]]
"""(seconds or event, live bytes by tier) between two actions of a step."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured bytes and seconds of one executed step.

    Attributes:
        peak_bytes: Peak bytes per tier; for the device, only storages in the arena count.
        device_bytes: Peak allocated device bytes, including the arena; on an accelerator, from the allocator.
        dram_bytes: Bytes of the host slabs from which the DRAM buffers are cut.
        seconds: Seconds of the step, by the virtual clock or, on an accelerator, by events.
        wait_s: Part of `seconds` in which the operators waited for copies.
        join_s: Part of `seconds` in which the operators waited for other ranks.
        copied: Number of copies, their bytes and their seconds, per kind of copy.
        timeline: Spans of work and byte counters of the tiers, if requested.
    """

    peak_bytes: dict[str, int]
    device_bytes: int
    dram_bytes: int
    seconds: float
    wait_s: float
    join_s: float
    copied: dict[str, Copied]
    timeline: Timeline | None = None


class PlannedDevice:
    """Executor of one plan; it owns the bytes of model and optimizer state until it is closed.

    Args:
        captured: The recorded step.
        plan: Plan of the recorded program.
        machine: Capacities of the tiers; on the simulated device, also the channels of the virtual clock.
        copies: See `CopyMode`. An accelerator always uses streams.
        flash: Folder of the file tier; required when the plan uses it.
        check: True: run the eager step before the first planned step (twice on an accelerator), roll it back, and
            compare the results; a step that was recorded on fake tensors is not checked. A `ReferenceStep`: compare the
            first planned step with it. False: no check.
        source: Mode that has evicted model and optimizer tensors; None: none is evicted.

    Attributes:
        state: State tensors in the tiers.
        hardware: Byte counters, buffers and copies in flight of the device.

    Raises:
        MemoryPlanInvalid: HP404 for a plan of another program or an illegal plan.
        StepChanged: HP512 when model or optimizer have changed, or another planned device owns their bytes.
        TierFull: HP403 when the state or the buffers of the plan do not fit the tiers.
        TransferFailed: HP513 when the state cannot be moved to the tiers.
    """

    def __init__(
        self,
        captured: Captured,
        plan: MemoryPlan,
        machine: MemoryMachine,
        *,
        copies: CopyMode = "at_wait",
        flash: Path | None = None,
        check: bool | ReferenceStep = True,
        source: LruSpillMode | None = None,
    ) -> None:
        self.captured, self.plan, self.machine = captured, plan, machine
        check_plan(captured, plan, flash)
        self.hardware = Hardware(captured.device, machine, plan.program.alignment_bytes, copies)
        self.state = ArenaState(captured, plan, self.hardware, flash, source)
        self._expected = check if isinstance(check, ReferenceStep) else None
        storages = enumerate(plan.program.storages)
        self._results = [s for s, storage in storages if storage.at_end and not storage.at_start]
        self._check = check is not False and (self._expected is not None or captured.run_eager is not None)
        simulated = plan.actions if self.hardware.timed is None else ()
        self._clock = clocked(plan.program, machine, simulated)

    def materialize_state(self, spill: LruSpillMode | None = None) -> AbstractContextManager[None]:
        """Return a context in which the state tensors contain their values; see `ArenaState.materialize`."""
        return self.state.materialize(spill)

    def close(self) -> None:
        """Return the state to its tensors; see `ArenaState.close`."""
        self.state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def step(self, inputs: Mapping[str, torch.Tensor], *, trace: bool = False) -> tuple[Any, Measured]:
        """Run the planned step on new inputs.

        Args:
            inputs: New values of the captured inputs.
            trace: Also measure the timeline.

        Returns:
            The result of the step, and its measurements.

        Raises:
            StepChanged: HP512 before the planned step if the device is closed or failed, or if inputs, model or
                optimizer differ from the recording. HP512 during or after it if a guarded value, a size or an operator
                differs from the recording, or the first results differ from the eager ones; then only close the device.
            TransferFailed: HP513 when a copy failed; the step is stopped and the device can only be closed.
            TierFull: HP403 when a tier's capacity is exceeded.
        """
        self.state.check_usable()
        self.state.owners.check()
        self._check_inputs(inputs)
        if self._check and self._expected is None:
            with self.materialize_state():
                self._expected = ReferenceStep.from_eager_run(self.captured, inputs)
        self._write_inputs(inputs)
        hardware, timed, clock = self.hardware, self.hardware.timed, self._clock
        if trace and timed is None:
            clock = ProgramClock(self.plan.program, self.machine)
        hardware.reset_peaks()
        if timed is not None:
            timed.begin(self.plan.program, trace)
        try:
            with torch.no_grad(), self._without_autocast():
                with hardware.watched(self._check or trace):
                    samples = self._apply_all(clock, trace)
                peaks, device_bytes = hardware.peaks, hardware.gauge.peak_bytes
                outputs = self._outputs()
            times = clock if timed is None else timed.times()
        except BaseException:
            self.state.failed = True
            raise
        for s in self._results:
            self.state.release(s)
        if self._check and self._expected is not None:
            self._compare(outputs, self._expected)
            self._check = False
        return outputs, Measured(
            peaks,
            device_bytes,
            hardware.pool.reserved_bytes,
            times.now_s,
            times.wait_s,
            times.join_s,
            times.copied,
            self._timeline(samples) if trace else None,
        )

    def _outputs(self) -> Any:
        return tree_map_only(View, lambda v: v.as_tensor(self._base(v.storage)).clone(), self.captured.outputs)

    def _timeline(self, samples: list[_Sample]) -> Timeline:
        timed = self.hardware.timed
        counters = tuple(
            Counter(name, moment if timed is None else timed.seconds(moment), live)
            for moment, tiers in samples
            for name, live in tiers
        )
        spans = predicted_timeline(self.plan, self.machine).spans if timed is None else tuple(timed.times().spans or ())
        return Timeline("measured", spans, counters)

    @contextmanager
    def _without_autocast(self) -> Iterator[None]:
        """Disable autocast, because the program contains the casts as operators."""
        with ExitStack() as stack:
            for kind in {"cpu", self.hardware.device.type}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    def _compare(self, outputs: Any, expected: ReferenceStep) -> None:
        try:
            expected.check(StepOutcome.of(outputs, dict(self.state.named())))
        except StepChanged:
            self.state.failed = True
            raise

    def _check_inputs(self, inputs: Mapping[str, torch.Tensor]) -> None:
        expected = self.captured.inputs
        if set(inputs) != set(expected):
            raise StepChanged(
                "the names of the inputs differ from those of the captured step",
                got=sorted(inputs),
                allowed=sorted(expected),
                hint="pass the inputs under the names of the captured step, or capture and plan again",
            )
        for name, value in inputs.items():
            view = expected[name]
            if tuple(value.shape) != view.size or value.dtype != view.dtype:
                raise StepChanged(
                    f"input `{name}` does not have the captured shape or dtype",
                    got=f"{tuple(value.shape)} {value.dtype}",
                    allowed=f"{view.size} {view.dtype}",
                    hint="cast to the captured dtype"
                    if tuple(value.shape) == view.size
                    else "pad to the captured shape, or capture and plan a step of this shape",
                )

    def _write_inputs(self, inputs: Mapping[str, torch.Tensor]) -> None:
        for name, value in inputs.items():
            view = self.captured.inputs[name]
            view.as_tensor(self._base(view.storage)).copy_(value)
        for storage, tensor in self.state.owners.changes():
            self._base(storage).copy_(tensor.untyped_storage())

    def _base(self, storage: int) -> torch.UntypedStorage:
        return self.state.storages["device"][storage]

    def _apply_all(self, clock: ProgramClock, trace: bool) -> list[_Sample]:
        """Apply the plan's actions; with `trace`, return a sample before the first and after each action, else []."""
        ready = self.state.actions
        if not trace:
            for act in ready:
                act()
            return []
        timed = self.hardware.timed
        samples = [(clock.now_s if timed is None else timed.now(), self.hardware.live)]
        for action, act in zip(self.plan.actions, ready, strict=True):
            begin = None if timed is None else timed.now()
            act()
            if timed is None:
                clock.apply(action)
            elif action.kind in ("run", "recompute"):
                timed.ran(action, begin)
            samples.append((clock.now_s if timed is None else timed.now(), self.hardware.live))
        return samples
