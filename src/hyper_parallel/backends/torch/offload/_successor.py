"""A device that takes over from another one: the same state, another captured step, another plan."""

from __future__ import annotations

from pathlib import Path

import torch

from hyper_parallel.backends.torch.offload._captured import Captured
from hyper_parallel.backends.torch.offload._execute import PlannedDevice
from hyper_parallel.backends.torch.offload._hardware import Hardware
from hyper_parallel.backends.torch.offload._streams import DeviceApi
from hyper_parallel.errors import TierFull
from hyper_parallel.ir import MemoryPlan, MemoryTier
from hyper_parallel.offload import MemoryMachine


class SuccessorDevice(PlannedDevice):
    """Moves the state of `before` to the homes of a new plan, storage by storage, within the capacities.

    The meters go on counting, so what the way between two plans takes is measured like everything else. `before` is
    closed by it.

    Args:
        before: An open device between two steps; its persistent storages are known by name.
        captured: The next step.
        plan: A plan for it.
        machine: See `PlannedDevice`.
        device_bytes: Device bytes the move may take, its own copies included.
        flash: Folder of the file tier, another one than that of `before`.
    """

    def __init__(
        self,
        before: PlannedDevice,
        captured: Captured,
        plan: MemoryPlan,
        machine: MemoryMachine,
        *,
        device_bytes: int,
        flash: Path | None = None,
    ) -> None:
        self._before, self._device_bytes = before, device_bytes
        super().__init__(captured, plan, machine, copies=before.copies, flash=flash)

    def _find_hardware(self, queues: DeviceApi | None) -> Hardware:
        return self._before.hardware  # its meters go on counting

    def _take_state(self) -> None:
        before = self._before
        for view in before.captured.inputs.values():
            before._resident.drop(view.storage)
        known = {
            before.plan.program.storages[s].name: s
            for s in before.captured.state
            if s not in {v.storage for v in before.captured.inputs.values()}
        }
        before._resident.tensors.clear()
        waiting = []
        for s in self.captured.state:
            name = self.plan.program.storages[s].name
            if name in known:
                waiting.append((known.pop(name), s))
        assert not known, f"the next step does not know {sorted(known)}"
        while waiting:
            left = [pair for pair in waiting if not self._move(*pair)]
            if len(left) == len(waiting):
                self._failed = before._failed = True
                name = self.plan.program.storages[left[0][1]].name
                raise TierFull(
                    f"`{name}` cannot change its tier between two steps: both ends are full",
                    got=", ".join(f"{live} bytes in {tier}" for tier, live in self.hardware.live),
                    hint="allow more DRAM or more device memory",
                )
            waiting = left
        for view in self.captured.inputs.values():
            self._on["device"][view.storage] = self._device_buffer(view.storage)
        # The bytes are here now; closing the old device must not touch the tensors that own them.
        before._closed = True

    def _move(self, old: int, to: int) -> bool:
        """One storage from its old home to its new one; False when there is no room for it yet."""
        before, size = self._before, self.plan.program.storages[to].num_bytes
        source, target = before.plan.homes[old], self.plan.homes[to]
        if source == target:
            if source != "flash":
                self._on[source][to] = before._on[source].pop(old)
            else:
                before._files.path(old).replace(self._files.path(to))
                self._files._sizes[to] = before._files._sizes.pop(old)
            return True
        if not self._fits(target, size) or (
            "flash" in (source, target) and source != "dram" and not self._fits("dram", size)
        ):
            return False
        base: torch.UntypedStorage
        if source == "flash":
            base = self.hardware.in_dram(size)
            before._files.read(old, base)
            before._files.drop(old)
        else:
            base = before._on[source].pop(old)
        if target == "flash":
            if source == "device":
                base = _filled(self.hardware.in_dram(size), base)
            self._files.take(to, size)
            self._files.write(to, base)
        else:
            # A buffer read from flash is in DRAM already.
            if source != "flash" or target != "dram":
                new = self.hardware.on_device if target == "device" else self.hardware.in_dram
                base = _filled(new(size), base)
            self._on[target][to] = base
        return True

    def _fits(self, tier: MemoryTier, size: int) -> bool:
        hardware = self.hardware
        meter = {"device": hardware.gauge, "dram": hardware.dram, "flash": hardware.flash}[tier]
        caps = {
            "device": self._device_bytes,
            "dram": self.machine.dram_bytes,
            "flash": self.machine.flash_bytes,
        }
        cap = caps[tier]
        return cap is None or meter.live_bytes + meter.rounded(size) <= cap


def _filled(new: torch.UntypedStorage, base: torch.UntypedStorage) -> torch.UntypedStorage:
    new.copy_(base)
    return new
