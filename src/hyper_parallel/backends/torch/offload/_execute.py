"""The CPU-simulated device: run a memory plan for real and measure it.

Operators are torch's own, buffers are really freed, copied and recomputed, results are the model's. Simulated are the
names of the tiers (all of them are host memory or files here) and the time, which a virtual clock keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch.offload._calls import Mail, View, is_message, let_go, references
from hyper_parallel.backends.torch.offload._captured import Captured
from hyper_parallel.backends.torch.offload._copies import Copies, CopyLanes
from hyper_parallel.backends.torch.offload._tiers import FileTier, Meter, new_buffer
from hyper_parallel.errors import (
    HyperParallelError,
    MemoryPlanInvalid,
    StepChanged,
    TransferFailed,
)
from hyper_parallel.ir import COPIES, Counter, MemoryAction, MemoryPlan, Timeline
from hyper_parallel.offload import Clock, Copied, MemoryMachine


@dataclass(frozen=True, slots=True)
class Measured:
    """What one executed step took.

    Attributes:
        peak_bytes: Highest counted bytes per tier.
        seconds: Virtual time, on the machine the executor was given.
        wait_s: Virtual seconds the compute lane waited for copies.
        copied: Per kind of copy how many there were, their bytes, and the seconds their lane was busy.
        timeline: Spans of the lanes and counters of the tiers, when they were asked for.
    """

    peak_bytes: dict[str, int]
    seconds: float
    wait_s: float
    copied: dict[str, Copied]
    timeline: Timeline | None = None


class SimulatedDevice:
    """Runs the steps of one plan; owns the state's bytes until it is closed.

    Args:
        captured: The recorded step.
        plan: A plan for its program.
        machine: The machine whose time the virtual clock keeps.
        copies: When the bytes of a copy really move: when it is issued, at the last moment (when it is waited for), or
            on one thread per direction. A correct plan gives the same bits in all three.
        flash: Folder of the file tier; needed when the plan uses it.
    """

    def __init__(
        self,
        captured: Captured,
        plan: MemoryPlan,
        machine: MemoryMachine,
        *,
        copies: Copies = "at_wait",
        flash: Path | None = None,
    ) -> None:
        if plan.program.storages != captured.program.storages or len(plan.program.operators) != len(
            captured.calls
        ):
            raise MemoryPlanInvalid(
                "the plan was made for another program",
                got=plan.program.name,
                allowed=captured.program.name,
                hint="plan the captured program again",
            )
        unit = plan.program.alignment_bytes
        self.captured, self.plan, self.machine, self.copies = captured, plan, machine, copies
        self.device = Meter("device", unit)
        self.dram = Meter("dram", unit, machine.dram_bytes)
        self.flash = Meter("flash", unit, machine.flash_bytes)
        _ = plan.replayed  # an illegal plan is refused before anything moves
        if plan.peak_bytes["flash"] and flash is None:
            raise MemoryPlanInvalid(
                "the plan uses the flash tier, but no folder was given for it",
                hint="pass flash=Path(...)",
            )
        self._files = FileTier(flash or Path(), self.flash)
        self._on: dict[str, dict[int, torch.UntypedStorage]] = {"device": {}, "dram": {}}
        self._lanes = CopyLanes(copies)
        self._mail = Mail()
        self._failed = False
        self._closed = False
        self._take_state()

    def _take_state(self) -> None:
        """Move the state's bytes into buffers of the device, and empty the tensors that owned them.

        A storage that another tensor still holds would not be free when the plan detaches it.
        """
        for s, tensor in self.captured.state.items():
            home = self.plan.homes[s]
            base = tensor.untyped_storage()
            mine = new_buffer(base.nbytes(), self.device if home == "device" else self.dram)
            mine.copy_(base)
            if home == "flash":
                self._files.take(s, mine.nbytes())
                self._files.write(s, mine)
            else:
                self._on[home][s] = mine
            if self.plan.program.storages[s].kind != "input":
                # All tensors on this storage share it, so emptying it in place frees the bytes of all of them. Inputs
                # stay with the caller, who may pass the very same tensors again.
                base.resize_(0)

    def _give_state(self) -> None:
        """Give the state's bytes back to the tensors that owned them."""
        given = {view.storage for view in self.captured.inputs.values()}
        for s, tensor in self.captured.state.items():
            home = self.plan.homes[s]
            if s not in given:
                base = tensor.untyped_storage()
                base.resize_(self.captured.program.storages[s].num_bytes)
                if self._failed:
                    base.fill_(0xFF)
                elif home == "flash":
                    self._files.read(s, base)
                else:
                    base.copy_(self._on[home][s])
        self._files.clear()
        self._on = {"device": {}, "dram": {}}

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Between two steps, give the state back to the model and the optimizer for the time of this context.

        Whatever reads or changes their tensors here (an evaluation, a checkpoint) sees and sets the real ones. What it
        takes is not counted.
        """
        self._check_usable()
        with self._moving():
            self._give_state()
        try:
            yield
        finally:
            with self._moving():
                self._take_state()

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """State that was moved in part only must not pass for good: the device can then only be closed."""
        try:
            yield
        except BaseException as error:
            self._failed = True
            if isinstance(error, HyperParallelError) or not isinstance(error, Exception):
                raise
            raise TransferFailed(
                "the state could not be moved between memory tiers",
                got=f"{type(error).__name__}: {error}",
            ) from error

    def close(self) -> None:
        """Give the state's bytes back to the tensors that owned them.

        After a failed step they are filled with ones in every bit (NaN as floating point): a half-updated state must
        not pass for a good one.
        """
        if self._closed:
            return
        self._closed = True
        self._lanes.close()
        with self._moving():
            self._give_state()

    def __enter__(self) -> SimulatedDevice:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def step(
        self, inputs: Mapping[str, torch.Tensor], *, trace: bool = False
    ) -> tuple[Any, Measured]:
        """Run the planned step on new inputs.

        Args:
            inputs: New values of the captured inputs.
            trace: Also measure the timeline.

        Returns:
            What the recorded step returned, and what was measured.

        Raises:
            StepChanged: HP512 when an input or a captured branch does not fit the recording.
            TransferFailed: HP513 when a copy failed; the step is stopped and the device can only be closed.
            TierFull: HP403 when a tier's capacity is exceeded.
        """
        self._check_usable()
        self._write_inputs(inputs)
        clock = Clock(self.plan.program, self.machine, record=trace)
        samples: list[Counter] = []
        for meter in (self.device, self.dram, self.flash):
            meter.reset_peak()
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                for action in self.plan.actions:
                    self._apply(action)
                    clock.apply(action)
                    if trace:
                        samples += [
                            Counter(meter.name, clock.now_s, meter.live_bytes)
                            for meter in (self.device, self.dram, self.flash)
                        ]
                outputs = tree_map_only(
                    View, lambda v: v.on(self._base(v.storage)).clone(), self.captured.outputs
                )
        except BaseException:
            self._failed = True
            raise
        for s, storage in enumerate(self.plan.program.storages):
            if storage.at_end and not storage.at_start:
                del self._on["device"][s]
        peaks = {
            "device": self.device.peak_bytes,
            "dram": self.dram.peak_bytes,
            "flash": self.flash.peak_bytes,
        }
        timeline = Timeline("measured", tuple(clock.spans or ()), tuple(samples)) if trace else None
        return outputs, Measured(peaks, clock.now_s, clock.wait_s, clock.copied, timeline)

    def _check_usable(self) -> None:
        if self._closed or self._failed:
            raise StepChanged(
                "the device was closed or a step on it failed; capture and plan again"
            )

    def read_state(self, name: str) -> torch.Tensor:
        """A copy of a named persistent tensor, wherever it lives between steps."""
        storage, view, base = self._state(name)
        if base is None:
            base = torch.UntypedStorage(self.plan.program.storages[storage].num_bytes)
            self._files.read(storage, base)
        return view.on(base).clone()

    def write_state(self, name: str, value: torch.Tensor) -> None:
        """Overwrite a named persistent tensor between steps: reset a cache, load a checkpoint."""
        storage, view, base = self._state(name)
        if base is not None:
            view.on(base).copy_(value)
            return
        staged = torch.UntypedStorage(self.plan.program.storages[storage].num_bytes)
        self._files.read(storage, staged)
        view.on(staged).copy_(value)
        self._files.write(storage, staged)

    def _state(self, name: str) -> tuple[int, View, torch.UntypedStorage | None]:
        """Storage, view and bytes (None: in a file) of a persistent tensor."""
        for s, tensor in self.captured.state.items():
            if self.plan.program.storages[s].name == name:
                size, stride = tuple(tensor.shape), tuple(tensor.stride())
                view = View(s, tensor.dtype, size, stride, int(tensor.storage_offset()))
                home = self.plan.homes[s]
                return s, view, None if home == "flash" else self._on[home][s]
        raise StepChanged(
            f"the captured step has no state named `{name}`",
            allowed=[self.plan.program.storages[s].name for s in self.captured.state][:20],
        )

    def _write_inputs(self, inputs: Mapping[str, torch.Tensor]) -> None:
        expected = self.captured.inputs
        if set(inputs) != set(expected):
            raise StepChanged(
                "the inputs are not those of the captured step",
                got=sorted(inputs),
                allowed=sorted(expected),
            )
        for name, value in inputs.items():
            view = expected[name]
            if tuple(value.shape) != view.size or value.dtype != view.dtype:
                raise StepChanged(
                    f"input `{name}` does not have the captured shape",
                    got=f"{tuple(value.shape)} {value.dtype}",
                    allowed=f"{view.size} {view.dtype}",
                    hint="capture and plan a step of this shape, or pad to the captured one",
                )
            view.on(self._base(view.storage)).copy_(value)

    def _base(self, storage: int) -> torch.UntypedStorage:
        return self._on["device"][storage]

    def _apply(self, action: MemoryAction) -> None:
        s = action.target
        if action.kind not in ("run", "recompute"):
            self._mail.arrive(s)
        if action.kind in ("run", "recompute"):
            self._run(action.target)
        elif action.kind in COPIES:
            self._copy(action)
        elif action.kind == "wait":
            self._lanes.wait(s, action.tier)
        elif action.kind == "detach":
            self._drop(s, action.tier)
        else:
            for tier in ("device", "dram"):
                if s in self._on[tier]:
                    del self._on[tier][s]
            if s in self._files._sizes:
                self._files.drop(s)

    def _drop(self, s: int, tier: str) -> None:
        if tier == "flash":
            self._files.drop(s)
        else:
            del self._on[tier][s]

    def _run(self, index: int) -> None:
        call = self.captured.calls[index]
        for s in self._touched(index):
            self._mail.arrive(s)
        shared = [self._base(s) for s in self._touched(index)] if call.talks else []
        held = references(shared)
        out = call.run(self._base)
        if is_message(call.func):
            (s,) = self._touched(index)
            self._mail.add(s, shared[0], held[0], out)
            return
        if call.talks:
            out = out if call.made else []  # the work, and the arguments again
            let_go(shared, held)
        for value in out:
            if isinstance(value, torch.Tensor):
                self.device.adopt(value.untyped_storage())
        for (position, s), size in zip(call.made, call.sizes, strict=True):
            base = out[position].untyped_storage()
            planned = self.plan.program.storages[s].num_bytes
            if base.nbytes() != planned or tuple(out[position].shape) != size:
                raise StepChanged(
                    f"`{call.func}` made a result of another size than in the captured step",
                    got=f"{tuple(out[position].shape)}, {base.nbytes()} bytes",
                    allowed=f"{size}, {planned} bytes",
                    hint="the size depends on the data; for experts use `experts_implementation='grouped_mm'`",
                )
            self._on["device"][s] = base
        for position, value in call.guards:
            if out[position] != value:
                raise StepChanged(
                    f"the captured step took a branch because `{call.func}` gave {value}; it gives {out[position]} now",
                    where=f"operator {index}",
                    hint="capture again; for an optimizer keep the step count in tensors with `fused=True`",
                )

    def _touched(self, index: int) -> tuple[int, ...]:
        operator = self.plan.program.operators[index]
        return tuple(s for s in operator.touched if s not in operator.allocs)

    def _copy(self, action: MemoryAction) -> None:
        s = action.target
        src, dst = COPIES[action.kind]
        num_bytes = self.plan.program.storages[s].num_bytes
        move: Callable[[], None]
        if dst == "flash":
            self._files.take(s, num_bytes)
            source = self._on["dram"][s]

            def move() -> None:
                self._files.write(s, source)

        else:
            target = self._on[dst].get(s)
            if target is None:
                meter = self.device if dst == "device" else self.dram
                target = self._on[dst][s] = new_buffer(num_bytes, meter)
            into = target
            if src == "flash":

                def move() -> None:
                    self._files.read(s, into)

            else:
                source = self._on[src][s]

                def move() -> None:
                    into.copy_(source)

        self._lanes.start(s, action.kind, move)
