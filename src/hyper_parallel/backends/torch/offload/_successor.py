"""A simulated device that takes over from another one: the same state, another captured step, another plan."""

from __future__ import annotations

from pathlib import Path

import torch

from hyper_parallel.backends.torch.offload._captured import Captured
from hyper_parallel.backends.torch.offload._execute import SimulatedDevice
from hyper_parallel.backends.torch.offload._tiers import FileTier, Meter, new_buffer
from hyper_parallel.errors import TierFull
from hyper_parallel.ir import MemoryPlan, MemoryTier
from hyper_parallel.offload import MemoryMachine


class SuccessorDevice(SimulatedDevice):
    """Moves the state of `before` to the homes of a new plan, storage by storage, within the capacities.

    The meters go on counting, so what the way between two plans takes is measured like everything else. `before` is
    closed by it.

    Args:
        before: An open device between two steps; its persistent storages are known by name.
        captured: The next step.
        plan: A plan for it.
        machine: See `SimulatedDevice`.
        device_bytes: Device bytes the move may take, its own copies included.
        flash: Folder of the file tier, another one than that of `before`.
    """

    def __init__(
        self,
        before: SimulatedDevice,
        captured: Captured,
        plan: MemoryPlan,
        machine: MemoryMachine,
        *,
        device_bytes: int,
        flash: Path | None = None,
    ) -> None:
        self._before, self._device_bytes, self._folder = before, device_bytes, flash
        super().__init__(captured, plan, machine, copies=before.copies, flash=flash)

    def _take_state(self) -> None:
        before = self._before
        self.device, self.dram, self.flash = before.device, before.dram, before.flash
        self._files = FileTier(self._folder or Path(), self.flash)
        for view in before.captured.inputs.values():
            before._on["device"].pop(view.storage, None)
        known = {
            before.plan.program.storages[s].name: s
            for s in before.captured.state
            if s not in {v.storage for v in before.captured.inputs.values()}
        }
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
                    got=f"{self.device.live_bytes} bytes on the device, {self.dram.live_bytes} in dram",
                    hint="allow more DRAM or more device memory",
                )
            waiting = left
        for view in self.captured.inputs.values():
            size = self.plan.program.storages[view.storage].num_bytes
            self._on["device"][view.storage] = new_buffer(size, self.device)
        # The bytes are here now; closing the old device must not touch the tensors that own them.
        before._closed = True

    def _move(self, old: int, new: int) -> bool:
        """One storage from its old home to its new one; False when there is no room for it yet."""
        before, size = self._before, self.plan.program.storages[new].num_bytes
        source, target = before.plan.homes[old], self.plan.homes[new]
        if source == target:
            if source != "flash":
                self._on[source][new] = before._on[source].pop(old)
            else:
                before._files.path(old).replace(self._files.path(new))
                self._files._sizes[new] = before._files._sizes.pop(old)
            return True
        if not self._fits(target, size) or (
            "flash" in (source, target) and source != "dram" and not self._fits("dram", size)
        ):
            return False
        base: torch.UntypedStorage
        if source == "flash":
            base = new_buffer(size, self.dram)
            before._files.read(old, base)
            before._files.drop(old)
        else:
            base = before._on[source].pop(old)
        if target == "flash":
            if source == "device":
                base = _copy(base, self.dram)
            self._files.take(new, size)
            self._files.write(new, base)
        else:
            meter = self.device if target == "device" else self.dram
            # A buffer read from flash is counted in DRAM already.
            staged = source == "flash" and target == "dram"
            self._on[target][new] = base if staged else _copy(base, meter)
        return True

    def _fits(self, tier: MemoryTier, size: int) -> bool:
        meter = {"device": self.device, "dram": self.dram, "flash": self.flash}[tier]
        caps = {
            "device": self._device_bytes,
            "dram": self.machine.dram_bytes,
            "flash": self.machine.flash_bytes,
        }
        cap = caps[tier]
        return cap is None or meter.live_bytes + meter.rounded(size) <= cap


def _copy(base: torch.UntypedStorage, meter: Meter) -> torch.UntypedStorage:
    copy = new_buffer(base.nbytes(), meter)
    copy.copy_(base)
    return copy
