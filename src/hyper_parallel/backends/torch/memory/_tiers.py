"""Byte counters of memory tiers, storages in files, and temporary folders of a run outside of the run directory.

A meter is independent of the plan. It counts a buffer from its allocation until torch destroys it, so a leaked
reference appears as a higher measured peak.
"""

from __future__ import annotations

import os
import secrets
import weakref
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.errors import TierFull, TransferFailed
from hyper_parallel.owned_folder import temporary_folder
from hyper_parallel.units import round_up

_DAMAGED = "run the step again from the last checkpoint; if the error repeats, check the disk"


def tier_full(what: str, tier: str, num_bytes: int, capacity_bytes: int) -> TierFull:
    """Return HP403 with the sentence `what`, for a tier that needs `num_bytes` and has `capacity_bytes`."""
    return TierFull(
        what,
        got=f"{num_bytes} bytes",
        allowed=f"{capacity_bytes} bytes",
        hint=f"allow at least {num_bytes} bytes of {tier} (in a recipe: `offload.{tier}={num_bytes}`)",
    )


class Meter:
    """Counter of the bytes of one tier.

    Attributes:
        live_bytes: Bytes in use now.
        peak_bytes: Highest bytes since `reset_peak`.
    """

    def __init__(self, name: str, alignment_bytes: int, capacity_bytes: int | None = None) -> None:
        self.name = name
        self.live_bytes = 0
        self.peak_bytes = 0
        self._alignment = alignment_bytes
        self._capacity = capacity_bytes
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._known: dict[weakref.ref[Any], tuple[int, int]] = {}

    def rounded(self, num_bytes: int) -> int:
        """Return `num_bytes` rounded up to the alignment: the bytes that an allocation takes."""
        return round_up(num_bytes, self._alignment)

    def adopt(self, base: torch.UntypedStorage) -> None:
        """Count a storage until it is destroyed; do nothing if it is counted already."""
        key = base._cdata
        if key in self._watch:
            return
        size = self.rounded(base.nbytes())
        ref = self._watch[key] = weakref.ref(base, self._on_destroyed)
        self._known[ref] = key, size
        self.add(size)

    def __contains__(self, base: torch.UntypedStorage) -> bool:
        return base._cdata in self._watch

    def _on_destroyed(self, ref: weakref.ref[Any]) -> None:
        key, size = self._known.pop(ref)
        del self._watch[key]
        self.live_bytes -= size

    def add(self, size: int) -> None:
        """Add to the bytes in use; a negative size releases bytes.

        Raises:
            TierFull: HP403 when the capacity is exceeded.
        """
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        if self._capacity is not None and self.live_bytes > self._capacity:
            raise tier_full(f"the {self.name} tier is full", self.name, self.live_bytes, self._capacity)

    def reset_peak(self) -> None:
        """Restart the measurement of the peak."""
        self.peak_bytes = self.live_bytes


class AllocatorGauge:
    """Device bytes of a memory plan on an accelerator, as the allocator counts them.

    Allocations outside of the plan are excluded: permanent workspaces and buffers of libraries, the caller's tensors.
    They are measured at every reset, as all allocated bytes except the arena. `module` is, for example, `torch.cuda`.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._arena_bytes = self._other_bytes = 0

    def adopt(self, base: torch.UntypedStorage) -> None:
        """Do nothing, because the allocator counts the storage."""

    def arena(self, num_bytes: int) -> torch.UntypedStorage:
        """Allocate and return the arena, and count the bytes that the allocator reserves for the arena."""
        allocated_before = self._allocated()
        base = torch.UntypedStorage(num_bytes, device=self._device)
        self._arena_bytes = self._allocated() - allocated_before
        self._other_bytes = allocated_before
        return base

    def _allocated(self) -> int:
        return int(self._module.memory_allocated(self._device))

    @property
    def live_bytes(self) -> int:
        """Bytes in use now."""
        return self._allocated() - self._other_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest bytes since `reset_peak`, workspaces of kernels included."""
        return int(self._module.max_memory_allocated(self._device)) - self._other_bytes

    def reset_peak(self) -> None:
        """Restart the measurement of the peak; call it while a plan uses no device memory except the arena."""
        self._other_bytes = self._allocated() - self._arena_bytes
        self._module.reset_peak_memory_stats(self._device)


class FileTier:
    """Storages in files of one folder, one file per storage, with names that are unique to this tier.

    A file is written under a temporary name, synchronised, then renamed; a read checks the size and a checksum. A full
    disk, or a missing, truncated or changed file, therefore raises TransferFailed (HP513).
    """

    def __init__(self, folder: Path, meter: Meter) -> None:
        self._folder = folder
        self._meter = meter
        self._name = secrets.token_hex(4)
        self._sizes: dict[int, int] = {}
        self._sums: dict[int, int] = {}

    def write(self, storage: int, source: torch.UntypedStorage) -> None:
        """Copy the DRAM buffer of a storage to the storage's file."""
        path = self.path(storage)
        temporary = path.with_suffix(".part")
        data = _bytes_of(source)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            self._sums[storage] = zlib.crc32(data)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise TransferFailed(
                "cannot write a storage to the flash tier",
                where=str(path),
                got=str(error),
                hint=f"free space in {self._folder} and check its permissions, or plan without a flash tier",
            ) from error

    def read(self, storage: int, target: torch.UntypedStorage) -> None:
        """Copy a storage's file to a DRAM buffer."""
        path = self.path(storage)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TransferFailed(
                "a storage could not be read from flash",
                where=str(path),
                got=str(error),
                hint=f"check the disk of {self._folder}, and run the step again from the last checkpoint",
            ) from error
        if len(data) != target.nbytes():
            raise TransferFailed(
                "a flash file has the wrong size",
                where=str(path),
                got=f"{len(data)} bytes",
                allowed=f"{target.nbytes()} bytes",
                hint=_DAMAGED,
            )
        if zlib.crc32(data) != self._sums[storage]:
            raise TransferFailed("a flash file differs from the written data", where=str(path), hint=_DAMAGED)
        if data:
            _bytes_of(target)[:] = data

    def reserve(self, storage: int, num_bytes: int) -> None:
        """Add a storage's file to the tier and count its bytes; call it when the copy into the file is issued."""
        if storage not in self._sizes:
            self._sizes[storage] = self._meter.rounded(num_bytes)
            self._meter.add(self._sizes[storage])

    def __contains__(self, storage: object) -> bool:
        return storage in self._sizes

    def drop(self, storage: int) -> None:
        """Delete a storage's file and release its bytes."""
        path = self.path(storage)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise TransferFailed(
                "cannot delete a file of the flash tier",
                where=str(path),
                got=str(error),
                hint=f"check the disk of {self._folder} and its permissions",
            ) from error
        self._sums.pop(storage, None)
        self._meter.add(-self._sizes.pop(storage))

    def clear(self) -> None:
        """Delete all files."""
        for storage in list(self._sizes):
            self.drop(storage)

    def path(self, storage: int) -> Path:
        """Return the path of a storage's file."""
        return self._folder / f"{self._name}-{storage}.bin"


def _bytes_of(base: torch.UntypedStorage) -> memoryview:
    empty = torch.empty(0, dtype=torch.uint8)
    flat = empty.set_(base, 0, (base.nbytes(),), (1,))  # type: ignore[call-overload]
    return memoryview(flat.numpy())


@contextmanager
def run_folder(parent: Path, name: str, hint: str | None = None) -> Iterator[Path]:
    """Yield a folder for the files of one run; see `temporary_folder`. `hint` replaces the default hint of the error.

    Raises:
        TransferFailed: HP513 when the folder cannot be created.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder(parent, name))
        except OSError as error:
            raise TransferFailed(
                "cannot create a folder for the files of a run",
                where=str(parent),
                got=str(error),
                hint=hint or "use a folder with free space in which this user may write",
            ) from error
        yield folder
