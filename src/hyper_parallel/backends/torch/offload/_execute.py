"""The CPU-simulated device: run a memory plan for real and measure it.

Operators are torch's own, buffers are really freed, copied and recomputed, results are the model's. Simulated are the
names of the tiers (all of them are host memory or files here) and the time, which a virtual clock keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch.offload._calls import View
from hyper_parallel.backends.torch.offload._record import Captured
from hyper_parallel.backends.torch.offload._tiers import FileTier, Meter, new_buffer
from hyper_parallel.errors import HyperParallelError, MemoryPlanInvalid, StepChanged, TransferFailed
from hyper_parallel.ir import COPIES, MemoryAction, MemoryPlan
from hyper_parallel.offload import Clock, MemoryMachine

Copies = Literal["at_issue", "at_wait", "threads"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one executed step took.

    Attributes:
        peak_bytes: Highest counted bytes per tier.
        seconds: Virtual time, on the machine the executor was given.
        wait_s: Virtual seconds the compute lane waited for copies.
    """

    peak_bytes: dict[str, int]
    seconds: float
    wait_s: float


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
        self._running: dict[tuple[int, str], Callable[[], None] | Future[None]] = {}
        self._lanes = (
            {kind: ThreadPoolExecutor(1, f"hyper-{kind}") for kind in COPIES}
            if copies == "threads"
            else {}
        )
        self._failed = False
        self._closed = False
        self._take_state()

    # -- owning the state ----------------------------------------------------------------------

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

    def close(self) -> None:
        """Give the state's bytes back to the tensors that owned them.

        After a failed step they are filled with ones in every bit (NaN as floating point): a half-updated state must
        not pass for a good one.
        """
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes.values():
            lane.shutdown()
        given = {view.storage for view in self.captured.inputs.values()}
        for s, tensor in self.captured.state.items():
            if s in given:
                continue
            home = self.plan.homes[s]
            base = tensor.untyped_storage()
            base.resize_(self.captured.program.storages[s].num_bytes)
            if self._failed:
                base.fill_(0xFF)
            elif home == "flash":
                self._files.read(s, base)
                self._files.drop(s)
            else:
                base.copy_(self._on[home][s])
        self._on = {"device": {}, "dram": {}}

    def __enter__(self) -> SimulatedDevice:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- one step ------------------------------------------------------------------------------

    def step(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, Measured]:
        """Run the planned step on new inputs.

        Returns:
            What the recorded step returned, and what was measured.

        Raises:
            StepChanged: HP512 when an input or a captured branch does not fit the recording.
            TransferFailed: HP513 when a copy failed; the step is stopped and the device can only be closed.
            TierFull: HP403 when a tier's capacity is exceeded.
        """
        if self._closed or self._failed:
            raise StepChanged(
                "the device was closed or a step on it failed; capture and plan again"
            )
        self._write_inputs(inputs)
        clock = Clock(self.plan.program, self.machine)
        for meter in (self.device, self.dram, self.flash):
            meter.reset_peak()
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                for action in self.plan.actions:
                    self._apply(action)
                    clock.apply(action)
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
        return outputs, Measured(peaks, clock.now_s, clock.wait_s)

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

    # -- actions -------------------------------------------------------------------------------

    def _apply(self, action: MemoryAction) -> None:
        s = action.target
        if action.kind in ("run", "recompute"):
            self._run(action.target)
        elif action.kind in COPIES:
            self._copy(action)
        elif action.kind == "wait":
            self._wait(s, action.tier)
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
        out = call.run(self._base)
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

        self._start(s, src, dst, action.kind, move)

    def _start(self, s: int, src: str, dst: str, lane: str, move: Callable[[], None]) -> None:
        before = self._running.get((s, src))  # a copy that fills the source must be done first
        if self.copies == "at_issue":
            _finish(before)
            move()
            self._running[s, dst] = _nothing
        elif self.copies == "at_wait":

            def late() -> None:
                # What fills the source has not moved yet either; its own wait then finds nothing left to do.
                if (s, src) in self._running:
                    _finish(self._running[s, src])
                    self._running[s, src] = _nothing
                move()

            self._running[s, dst] = late
        else:

            def threaded() -> None:
                _finish(before)
                move()

            self._running[s, dst] = self._lanes[lane].submit(threaded)

    def _wait(self, s: int, tier: str) -> None:
        _finish(self._running.pop((s, tier)))


def _nothing() -> None:
    """A copy that is done."""


def _finish(copy: Callable[[], None] | Future[None] | None) -> None:
    """Complete a running copy, whatever carries it."""
    try:
        if isinstance(copy, Future):
            copy.result()
        elif copy is not None:
            copy()
    except HyperParallelError:
        raise
    except Exception as error:
        raise TransferFailed(
            "a copy between memory tiers failed", got=f"{type(error).__name__}: {error}"
        ) from error
