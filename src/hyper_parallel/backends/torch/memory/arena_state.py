"""Model and optimizer state of planned steps: its bytes are in the memory tiers, and its tensors are empty.

The tensors of model and optimizer are called owner tensors. The home tier of a storage is the tier that holds it
between steps. The arena is the device buffer of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from hyper_parallel.backends.torch.memory._captured import Captured, as_view
from hyper_parallel.backends.torch.memory._lru_spill import LruSpillMode, read_content
from hyper_parallel.backends.torch.memory._owners import Owners
from hyper_parallel.backends.torch.memory._tiers import FileTier
from hyper_parallel.backends.torch.memory.action_binder import Act, ActionBinder
from hyper_parallel.backends.torch.memory.hardware import Hardware, has_room
from hyper_parallel.backends.torch.memory.tier_copies import finish
from hyper_parallel.errors import HyperParallelError, MemoryPlanInvalid, StepChanged, TierFull, TransferFailed
from hyper_parallel.ir import MemoryPlan
from hyper_parallel.memory import wrong_address

_HOST = torch.device("cpu")
StorageBytes = dict[int, torch.UntypedStorage]
"""Bytes by storage index."""


def check_plan(captured: Captured, plan: MemoryPlan, flash: Path | None) -> None:
    """Raise MemoryPlanInvalid (HP404) for a plan of another program, or a plan that cannot run.

    `flash` is the folder of the file tier; None: there is none.
    """
    if plan.program.storages != captured.program.storages or len(plan.program.operators) != len(captured.calls):
        raise MemoryPlanInvalid(
            "the storages or operators of the plan differ from those of the captured step",
            got=f"`{plan.program.name}`, {len(plan.program.operators)} operators",
            allowed=f"`{captured.program.name}`, {len(captured.calls)} operators",
            hint="plan the captured program again",
        )
    if wrong := wrong_address(plan):  # replays the plan: raises HP404 for an illegal action
        raise MemoryPlanInvalid(
            f"the buffer addresses of the memory plan are invalid: {wrong}", where=plan.program.name, hint="plan again"
        )
    if plan.peak_bytes["flash"] and flash is None:
        raise MemoryPlanInvalid(
            "the plan uses the flash tier, but no folder was given for it",
            hint="pass flash=Path('/a/folder/on/an/ssd') to PlannedDevice",
        )


class ArenaState:
    """Owner of the bytes of a step's state; between steps, each storage is in its home tier.

    See `PlannedDevice` for `captured`, `plan` and `flash`. `spill` is the mode that has evicted owner tensors; None:
    none is evicted.

    Attributes:
        hardware: Byte counters, buffers and copies in flight.
        files: The file tier.
        storages: Bytes on the device and in DRAM, by storage.
        actions: Actions of the plan, bound to their buffers.
        arena: Device buffer of the plan's `arena_bytes`; None: not allocated.
        owners: Owner tensors.
        failed: True after a failed step or a partial move of the state; the state can then only be closed.
        closed: True after `close` or `end`; no further step runs.
    """

    def __init__(
        self,
        captured: Captured,
        plan: MemoryPlan,
        hardware: Hardware,
        flash: Path | None,
        spill: LruSpillMode | None = None,
    ) -> None:
        self.captured, self.plan = captured, plan
        self.hardware = hardware
        hardware.pool.reserve(plan.replayed.host_buffers)
        self.files = FileTier(flash or Path(), hardware.flash)
        self.storages: dict[str, StorageBytes] = {"device": {}, "dram": {}}
        self._device, self._inside = self.storages["device"], self.hardware.inside
        self._sizes = plan.program.sizes
        self.actions: list[Act] = []
        self.arena: torch.UntypedStorage | None = None
        self._numbers = {t.untyped_storage()._cdata: s for s, t in captured.state.items()}
        self.failed = False
        self.closed = False
        self.owners, self._spill = Owners(captured), spill
        self._acquire()

    def _is_input(self, storage: int) -> bool:
        return self.plan.program.storages[storage].kind == "input"

    def mark_resident(self, s: int, base: torch.UntypedStorage) -> None:
        """Mark a storage as resident in its range of the arena."""
        self._device[s] = base
        self._inside.add(self._sizes[s])

    def release(self, s: int) -> None:
        """Release a storage's range of the arena."""
        del self._device[s]
        self._inside.add(-self._sizes[s])

    def _release_device(self) -> None:
        for s in list(self.storages["device"]):
            self.release(s)
        self.actions, self.arena = [], None

    def _allocate_arena(self) -> StorageBytes:
        self.arena = self.hardware.arena(self.plan.arena_bytes)
        binder = ActionBinder(self, self.arena)
        self.actions = [binder.bind(position) for position in range(len(self.plan.actions))]
        return binder.at_start

    def _acquire(self) -> None:
        try:
            self.owners.check()
        except StepChanged:
            self.end()  # the recorded tensors no longer belong to the model
            raise
        self._acquire_from_owners()
        self.owners.make_stubs()

    def _acquire_from_owners(self) -> None:
        """Move the state's bytes into buffers of the tiers, and empty the owner tensors.

        If a move fails, the owner tensors get their bytes back and the planned device is closed.
        """
        staged: StorageBytes = {}
        spill, self._spill = self._spill, None
        staging = self._staging_device(spill)
        try:
            self.owners.check_bytes(torch.UntypedStorage.nbytes if spill is None else spill.num_bytes)
        except StepChanged:
            self.end()
            raise
        try:
            for s, tensor in self.captured.state.items():
                base = tensor.untyped_storage()
                content = base if spill is None else spill.pop_content(base)
                if not (callable(content) and s in self.files):  # else the content is in its own file already
                    self._move_to_home(s, read_content(content), base, staged, staging)
                if not self._is_input(s):
                    # All tensors on this storage share it, so emptying it in place frees the bytes of all of them.
                    # Inputs keep their bytes: the caller may pass the same tensors in the next step.
                    base.resize_(0)
            for s, target in self._allocate_arena().items():
                target.copy_(staged[s])
                self.mark_resident(s, target)
                del staged[s]
        except BaseException as error:
            with self._failing_on_partial_move():
                self._restore_partial_move(staged, spill)
                if isinstance(error, torch.OutOfMemoryError):
                    raise self._out_of_memory(error) from error
                raise

    def _staging_device(self, spill: LruSpillMode | None = None) -> torch.device:
        """Return the device for temporary copies: the accelerator if it has room and `spill` is None, else the host."""
        device = self.hardware.device
        return device if spill is None and has_room(device, self.plan.arena_bytes) else _HOST

    def _move_to_home(
        self,
        s: int,
        source: torch.UntypedStorage,
        base: torch.UntypedStorage,
        staged: StorageBytes,
        staging: torch.device,
    ) -> None:
        """Move a storage's bytes to a buffer or file of its home tier, from `source`: `base` itself, or its host copy.

        If the home tier is the device, the bytes are copied into `staged` on the device `staging`, because there is no
        arena yet.
        """
        home, size = self.plan.homes[s], self._num_bytes(s)
        if self._is_input(s) and not base.nbytes():
            base.resize_(size)
            base.copy_(source)
        if home == "dram":
            buffer = self.storages[home].get(s)
            if buffer is None:
                buffer = self.storages[home][s] = self.hardware.in_dram(size)
            if buffer is not source:
                buffer.copy_(source)
            return
        if home == "device":
            staged[s] = _copy(source, staging) if source is base else source
        else:
            self.files.reserve(s, size)
            self.files.write(s, _copy(source, _HOST) if source is base else source)

    def _restore_partial_move(self, staged: StorageBytes, spill: LruSpillMode | None) -> None:
        for s, tensor in self.captured.state.items():
            base = tensor.untyped_storage()
            num_bytes = base.nbytes() if spill is None else spill.num_bytes(base)
            if num_bytes != self._num_bytes(s):
                base.resize_(self._num_bytes(s))
                base.copy_(staged[s] if s in staged else self._bytes(s))
        self.end()

    def _num_bytes(self, s: int) -> int:
        return self.captured.program.storages[s].num_bytes

    def _return_state(self) -> None:
        self.owners.restore_tensors()
        tensors = {s: t for s, t in self.captured.state.items() if not self.owners.kept_by_caller(s)}
        copies: StorageBytes = {}
        if not self.failed:
            resident, staging = self.storages["device"], self._staging_device()
            copies = {s: _copy(resident[s], staging) for s in tensors if self.plan.homes[s] == "device"}
        self._release_device()
        for s, tensor in tensors.items():
            base = tensor.untyped_storage()
            base.resize_(self._num_bytes(s))
            if self.failed:
                base.fill_(0xFF)
            else:
                base.copy_(copies.pop(s) if s in copies else self._bytes(s))
        self.files.clear()
        self.storages["dram"].clear()

    def end(self) -> None:
        """Close the planned device without returning the state; no further step runs."""
        if self.closed:
            return
        self.closed = True
        self.hardware.lanes.close()
        self._release_device()
        self.files.clear()
        self.storages["dram"].clear()

    def _out_of_memory(self, error: BaseException) -> TierFull:
        module = torch.get_device_module(self.hardware.device)
        free, total = module.mem_get_info(self.hardware.device)
        return TierFull(
            "the device has too little free memory for the buffer of the memory plan",
            where=str(self.hardware.device),
            got=f"{self.plan.arena_bytes} bytes wanted, {free} of {total} free: {error}",
            hint="plan with a smaller budget, or end other programs on the device",
        )

    @contextmanager
    def materialize(self, spill: LruSpillMode | None = None) -> Iterator[None]:
        """Return the bytes to the owner tensors while this context is active, between two steps.

        Code inside the context, such as an evaluation or a checkpoint, may read and write these tensors. Memory that it
        allocates is not counted. `spill` makes each tensor resident on use; None: all are resident at once.

        Raises:
            StepChanged: HP512 for a closed or failed device. HP512 at the end of the context when owner tensors were
                replaced, or model or optimizer differ from the recording. The owner tensors then keep their bytes, and
                the device is closed.
            TransferFailed: HP513 when an error without a code interrupts a move of the state.
            TierFull: HP403 when a tier has too little memory for the state.
        """
        self.check_usable()
        with self._failing_on_partial_move():
            if spill is None:
                self._return_state()
            else:
                self.materialize_on_use(spill)
        self._spill = spill
        try:
            yield
        finally:
            self._acquire()

    def materialize_on_use(self, spill: LruSpillMode) -> None:
        """Hand the state to `spill`, which makes each tensor resident on use, and release the arena.

        Bytes in DRAM and in files stay there; bytes in the arena move to host memory.
        """
        self.owners.restore_tensors()
        for s, tensor in self.captured.state.items():
            if self.owners.kept_by_caller(s):
                continue
            home, base = self.plan.homes[s], tensor.untyped_storage()
            base.resize_(0)  # the bytes of input state that stayed with the caller may be outdated
            content = partial(self._bytes, s) if home == "flash" else self.storages[home][s]
            if home == "device":
                content = _copy(content, _HOST)
            spill.track_offloaded(base, self._num_bytes(s), content)
        self._release_device()

    @contextmanager
    def _failing_on_partial_move(self) -> Iterator[None]:
        """Mark the planned device as failed if an error in this context interrupts a move of the state.

        Raises:
            TransferFailed: HP513 in place of an error without a code.
        """
        try:
            yield
        except BaseException as error:
            self.failed = not self.closed
            if isinstance(error, HyperParallelError) or not isinstance(error, Exception):
                raise
            raise TransferFailed(
                "the state could not be moved between memory tiers",
                got=f"{type(error).__name__}: {error}",
                hint="fix this error, and continue from the last checkpoint",
            ) from error

    def close(self) -> None:
        """Return the state's bytes to the owner tensors.

        After a failure all bits of the owner tensors are set to one (NaN as floating point), because the state may be
        partially updated.
        """
        if self.closed:
            return
        with self._failing_on_partial_move():
            self.hardware.lanes.close()
            self._return_state()
            self.closed = True

    def check_usable(self) -> None:
        """Raise StepChanged (HP512) if the planned device was closed or a step on it failed."""
        if self.closed or self.failed:
            raise StepChanged(
                "the planned device was closed, or a step on it failed", hint="capture and plan the step again"
            )

    def on_home_tier(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the bytes of an owner tensor in its home tier; from the file tier, a copy.

        For a tensor that keeps its own bytes, such as an input, return it detached. Call it between two steps.
        """
        with torch._C.DisableTorchFunctionSubclass():
            s = self._numbers.get(tensor.untyped_storage()._cdata)
            if s is None or self.owners.kept_by_caller(s):
                return tensor.detach()
            return as_view(tensor, s).as_tensor(self._bytes(s))

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor in the home tier) of the named state; for the file tier, read one file at a time."""
        for name, view in self.captured.named.items():
            yield name, view.as_tensor(self._bytes(view.storage))

    def _bytes(self, storage: int) -> torch.UntypedStorage:
        """Return the bytes of a storage in its home tier, between two steps; from the file tier, a copy."""
        home = self.plan.homes[storage]
        if home != "flash":
            return self.storages[home][storage]
        base = torch.UntypedStorage(self.plan.program.storages[storage].num_bytes)
        finish(partial(self.files.read, storage, base))
        return base


def _copy(base: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage(base.nbytes(), device=device).copy_(base)
