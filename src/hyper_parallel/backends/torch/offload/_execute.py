"""The executor: run a memory plan for real and measure it.

Operators are torch's own, buffers are really freed, copied and recomputed, results are the model's. On an accelerator
copies run on streams, time is measured by events and the peak by the allocator. On a CPU the device is simulated: all
tiers are host memory or files, every buffer is counted, and a virtual clock keeps the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch.offload._calls import Mail, View, let_go, references
from hyper_parallel.backends.torch.offload._captured import Captured
from hyper_parallel.backends.torch.offload._copies import Copies
from hyper_parallel.backends.torch.offload._held_state import HeldState
from hyper_parallel.backends.torch.offload._prepared import Prepared
from hyper_parallel.backends.torch.offload._streams import DeviceApi
from hyper_parallel.errors import StepChanged
from hyper_parallel.ir import COPIES, Counter, MemoryAction, MemoryPlan, Timeline
from hyper_parallel.offload import Clock, Copied, MemoryMachine


@dataclass(frozen=True, slots=True)
class Measured:
    """What one executed step took.

    Attributes:
        peak_bytes: Highest bytes per tier: counted, on an accelerator as the allocator says.
        seconds: Time of the step: of the virtual clock, on an accelerator measured by events.
        wait_s: Of it, seconds the compute lane waited for copies.
        copied: Per kind of copy how many there were, their bytes, and the seconds their lane was busy.
        timeline: Spans of the lanes and counters of the tiers, when they were asked for.
    """

    peak_bytes: dict[str, int]
    seconds: float
    wait_s: float
    copied: dict[str, Copied]
    timeline: Timeline | None = None


class PlannedDevice(HeldState):
    """Runs the steps of one plan; owns the state's bytes until it is closed.

    Args:
        captured: The recorded step.
        plan: A plan for its program.
        machine: Capacities; on the simulated device also the machine whose time the virtual clock keeps.
        copies: On the simulated device, when the bytes of a copy really move: when it is issued, at the last moment
            (when it is waited for), or on one thread per direction. A correct plan gives the same bits in all three.
        flash: Folder of the file tier; needed when the plan uses it.
        queues: Streams and events to run on. None: those of the device that the step was captured on; a CPU has none.
    """

    def __init__(
        self,
        captured: Captured,
        plan: MemoryPlan,
        machine: MemoryMachine,
        *,
        copies: Copies = "at_wait",
        flash: Path | None = None,
        queues: DeviceApi | None = None,
    ) -> None:
        super().__init__(captured, plan, machine, copies, flash, queues)
        self._mail = Mail(counted=self.hardware.timed is None)
        self._ready = [
            Prepared(call, operator, self._resident)
            for call, operator in zip(captured.calls, plan.program.operators, strict=True)
        ]
        self._clock = Clock(plan.program, machine)
        if self.hardware.timed is None:
            for action in plan.actions:
                self._clock.apply(action)

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
        hardware, timed = self.hardware, self.hardware.timed
        clock = self._clock
        if trace and timed is None:
            clock = Clock(self.plan.program, self.machine, record=True)
        samples: list[tuple[Any, tuple[tuple[str, int], ...]]] = []
        hardware.reset_peaks()
        if timed is not None:
            timed.begin(self.plan.program, trace)
        try:
            with torch.no_grad(), self._without_autocast():
                for action in self.plan.actions:
                    begin = timed.now() if trace and timed is not None else None
                    self._apply(action)
                    if not trace:
                        continue
                    if timed is None:
                        clock.apply(action)
                        samples.append((clock.now_s, hardware.live))
                    else:
                        if action.kind in ("run", "recompute"):
                            timed.ran(action, begin)
                        samples.append((timed.now(), hardware.live))
                outputs = tree_map_only(
                    View, lambda v: v.on(self._base(v.storage)).clone(), self.captured.outputs
                )
            times = clock if timed is None else timed.times()
        except BaseException:
            self._failed = True
            raise
        for s, storage in enumerate(self.plan.program.storages):
            if storage.at_end and not storage.at_start:
                self._resident.drop(s)
        timeline = None
        if trace:
            counters = [
                Counter(name, at if timed is None else timed.seconds(at), live)
                for at, tiers in samples
                for name, live in tiers
            ]
            timeline = Timeline("measured", tuple(times.spans or ()), tuple(counters))
        return outputs, Measured(hardware.peaks, times.now_s, times.wait_s, times.copied, timeline)

    @contextmanager
    def _without_autocast(self) -> Iterator[None]:
        """Casts were recorded as operators."""
        with ExitStack() as stack:
            for kind in {"cpu", self.hardware.device.type}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield

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
        s, kind = action.target, action.kind
        if kind in ("run", "recompute"):
            self._run(s)
            return
        self._mail.arrive(s)
        if kind in COPIES:
            self._copy(s, kind)
        elif kind == "wait":
            self.hardware.lanes.wait(s, action.tier)
        elif kind == "detach":
            self._drop(s, action.tier)
        else:
            if s in self._resident.bytes:
                self._resident.drop(s)
            self._on["dram"].pop(s, None)
            if s in self._files:
                self._files.drop(s)

    def _drop(self, s: int, tier: str) -> None:
        if tier == "device":
            self._resident.drop(s)
        elif tier == "dram":
            del self._on[tier][s]
        else:
            self._files.drop(s)

    def _run(self, index: int) -> None:
        ready = self._ready[index]
        self._mail.arrive_all(ready.touched)
        adopt = self.hardware.gauge.adopt
        if not ready.talks:
            out = ready.run()
        elif self.hardware.timed is not None and not ready.message:
            # The compute stream waits for the collective; its library may let go of the buffers later.
            out = ready.run()
            out = out if ready.made else ()
        else:
            shared = [self._base(s) for s in ready.touched]
            owners = references(shared)
            out = ready.run()
            if ready.message:
                self._mail.add(ready.touched[0], shared[0], owners[0], list(out))
                return
            out = out if ready.made else ()  # the work, and the arguments again
            let_go(shared, owners)
        for value in out:
            if isinstance(value, torch.Tensor):
                adopt(value.untyped_storage())
        storages = self.plan.program.storages
        for position, s, size in ready.made:
            base = out[position].untyped_storage()
            planned = storages[s].num_bytes
            if base.nbytes() != planned or out[position].shape != size:
                raise StepChanged(
                    f"`{ready.func}` made a result of another size than in the captured step",
                    got=f"{tuple(out[position].shape)}, {base.nbytes()} bytes",
                    allowed=f"{size}, {planned} bytes",
                    hint="the size depends on the data; for experts use `experts_implementation='grouped_mm'`",
                )
        ready.keep(out)
        for position, value in ready.guards:
            if out[position] != value:
                raise StepChanged(
                    f"the captured step took a branch because `{ready.func}` gave {value}, and now {out[position]}",
                    where=f"operator {index}",
                    hint="capture again; for an optimizer keep the step count in tensors with `fused=True`",
                )

    def _copy(self, s: int, kind: str) -> None:
        src, dst = COPIES[kind]
        size = self.plan.program.storages[s].num_bytes
        move: Callable[[], None]
        if dst == "flash":
            self._files.take(s, size)
            source = self._on["dram"][s]

            def move() -> None:
                self._files.write(s, source)

        else:
            into = self._on[dst].get(s)
            if into is None:
                new = self._device_buffer(s) if dst == "device" else self.hardware.in_dram(size)
                into = self._on[dst][s] = new
            target = into
            if src == "flash":

                def move() -> None:
                    self._files.read(s, target)

            else:
                source = self._on[src][s]

                def move() -> None:
                    target.copy_(source, non_blocking=True)

        self.hardware.lanes.start(s, kind, move, size)
