"""Byte counters, buffers and copies in flight of one device, simulated on the CPU or with its own streams."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.backends.torch.memory._tiers import AllocatorGauge, Meter, tier_full
from hyper_parallel.backends.torch.memory.streams import DeviceApi, StreamLanes
from hyper_parallel.backends.torch.memory.tier_copies import Copies, CopyLanes
from hyper_parallel.backends.torch.tensor_trees import tensors_in
from hyper_parallel.errors import TierFull
from hyper_parallel.ir import slab_bytes, slabs
from hyper_parallel.memory import MemoryMachine
from hyper_parallel.units import round_up


class HostPool:
    """Pool of DRAM buffers by size, cut from slabs.

    Sizes are rounded up to a multiple of `alignment_bytes`. `pin` allocates pinned memory, for asynchronous copies.

    Attributes:
        buffers: Number of buffers by size in bytes.
        reserved_bytes: Total bytes of the slabs; at most `capacity_bytes`, unless that is None.
    """

    def __init__(self, alignment_bytes: int, pin: bool, capacity_bytes: int | None = None) -> None:
        self._alignment, self._pin, self._capacity = alignment_bytes, pin, capacity_bytes
        self._free: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self.buffers: Counter[int] = Counter()
        self.reserved_bytes = 0

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Allocate buffers until at least `counts[size]` buffers of every size exist, free or in use.

        Raises:
            TierFull: HP403 when the slabs exceed the capacity; nothing is allocated then.
        """
        missing = Counter(counts) - self.buffers
        wanted = self.reserved_bytes + slab_bytes(missing)
        if self._capacity is not None and wanted > self._capacity:
            what = "the DRAM buffers of the plan exceed the dram tier"
            raise tier_full(what, "dram", wanted, self._capacity)
        self.buffers |= Counter(counts)
        self.reserved_bytes = wanted
        for slab_size, parts in slabs(missing):
            empty = torch.empty(slab_size, dtype=torch.uint8, pin_memory=self._pin)
            slab, offset = empty.untyped_storage(), 0
            for size, count in parts.items():
                ends = range(offset, offset + size * count, size)
                self._free.setdefault(size, []).extend((slab, begin) for begin in ends)
                offset += size * count

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a buffer, which becomes free again when its last reference is dropped.

        Raises:
            TierFull: HP403 when no buffer is free and another one would exceed the capacity.
        """
        size = round_up(num_bytes, self._alignment)
        free = self._free.setdefault(size, [])
        if not free:
            self.reserve({size: self.buffers[size] + 1})
        slab, offset = free.pop()
        base = slab[offset : offset + num_bytes]
        assert isinstance(base, torch.UntypedStorage)
        key = id(base)

        def release(_: Any) -> None:
            del self._watch[key]
            free.append((slab, offset))

        self._watch[key] = weakref.ref(base, release)
        return base


FILLED: Final = 0.8
"""Share of a device that storages may fill; the rest is for workspaces and fragmentation. An estimate."""

CopyMode = Copies | DeviceApi
"""Streams and events of a device; or, for a simulated device, the time at which copies move their bytes.

The results of a valid plan do not depend on it."""


class _Watch(TorchDispatchMode):
    """Mode that passes the outputs of every operator to `on_results`; no tensor of a planned step is a DTensor."""

    def __init__(self, on_results: Callable[[Any], None]) -> None:
        super().__init__()
        self._count_results = on_results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a planned step compiles nothing; torch's default takes longer than a small operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        self._count_results(out)
        return out


class Hardware:
    """The three memory tiers of a device, and the copies between them.

    Args:
        device: Device of the operators.
        machine: Capacities.
        alignment_bytes: Every allocation counts as a multiple of it, rounded up.
        copies: See `CopyMode`; on an accelerator, other values than a `DeviceApi` mean the streams of `device`.

    Attributes:
        gauge: Counter of allocated device bytes: the allocator of an accelerator; on a CPU, the sum of the arena and of
            operator results outside of it.
        num_operators: Number of operators that the dispatcher has seen inside `watched`.
        counts: True if the latest `watched` context counts the operators.
        inside: Counter of the bytes of storages in the arena.
        lanes: Copies in flight.
        pool: DRAM buffers.
    """

    def __init__(self, device: torch.device, machine: MemoryMachine, alignment_bytes: int, copies: CopyMode) -> None:
        if not isinstance(copies, DeviceApi) and device.type != "cpu":
            copies = DeviceApi.of(device)
        self.device = device
        self.num_operators, self.counts = 0, False
        self._counts_results = True
        self._mode = _Watch(self._count_results)
        self._arena = range(0)  # addresses of the arena
        self.dram = Meter("dram", alignment_bytes)
        self.flash = Meter("flash", alignment_bytes, machine.flash_bytes)
        self.inside = Meter("device", alignment_bytes)
        self._tiers = (self.inside, self.dram, self.flash)
        self.gauge: Meter | AllocatorGauge = Meter("device", alignment_bytes)
        self.lanes: CopyLanes | StreamLanes
        self.lanes = StreamLanes(copies) if isinstance(copies, DeviceApi) else CopyLanes(copies)
        self.pool = HostPool(alignment_bytes, device.type != "cpu", machine.dram_bytes)
        module: Any = copies.module if isinstance(copies, DeviceApi) else None
        if hasattr(module, "max_memory_allocated"):
            self.gauge = AllocatorGauge(module, device)
            _allocate_workspaces(device)

    @property
    def timed(self) -> StreamLanes | None:
        """Copies in flight that measure time by events; None if a virtual clock computes the time."""
        return self.lanes if isinstance(self.lanes, StreamLanes) else None

    def arena(self, num_bytes: int) -> torch.UntypedStorage:
        """Allocate and return the arena, the device buffer with the addresses of a plan's storages."""
        if isinstance(self.gauge, AllocatorGauge):
            return self.gauge.arena(num_bytes)
        base = torch.UntypedStorage(num_bytes, device=self.device)
        self.gauge.adopt(base)
        self._arena = range(base.data_ptr(), base.data_ptr() + num_bytes)
        return base

    @contextmanager
    def watched(self, every: bool) -> Iterator[None]:
        """Return a context that counts the operators of a step and the storages that they allocate.

        If an accelerator's allocator counts the bytes, the context does nothing unless `every`, to save host time.
        """
        self.counts = every or isinstance(self.gauge, Meter)
        with self._mode if self.counts else nullcontext():
            yield

    @contextmanager
    def in_library(self) -> Iterator[None]:
        """Return a context whose allocations are not counted, because they are buffers of the collective library."""
        self._counts_results = False
        try:
            yield
        finally:
            self._counts_results = True

    def _count_results(self, out: Any) -> None:
        self.num_operators += 1
        if type(out) is torch.Tensor and out.data_ptr() in self._arena:
            return  # most results: one tensor, in the arena
        for tensor in tensors_in(out) if self._counts_results else ():
            base = tensor.untyped_storage()
            elsewhere = base in self.dram or base.device.type != self.device.type
            if not elsewhere and base.data_ptr() not in self._arena:
                self.gauge.adopt(base)

    def in_dram(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a DRAM buffer and count its bytes until it is destroyed.

        Raises:
            TierFull: HP403 when the capacity is exceeded.
            TransferFailed: HP513 instead of HP403, if a copy on the simulated device has failed before.
        """
        try:
            base = self.pool.allocate(num_bytes)
        except TierFull:
            if isinstance(self.lanes, CopyLanes):
                self.lanes.refuse_failed()
            raise
        self.dram.adopt(base)
        return base

    def reset_peaks(self) -> None:
        """Restart the measurement of the peaks of all tiers."""
        for meter in (self.gauge, *self._tiers):
            meter.reset_peak()

    @property
    def peaks(self) -> dict[str, int]:
        """Highest bytes per tier since `reset_peaks`; for the device, those of storages in the arena."""
        return {meter.name: meter.peak_bytes for meter in self._tiers}

    @property
    def live(self) -> tuple[tuple[str, int], ...]:
        """Bytes in use now, per tier."""
        return tuple((meter.name, meter.live_bytes) for meter in self._tiers)


def _allocate_workspaces(device: torch.device) -> None:
    """Run a matrix product, so that the matrix library allocates its permanent workspace before a step is measured."""
    small = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    torch.addmm(small[0], small, small @ small)


def allocatable_bytes(device: torch.device) -> int:
    """Return the bytes that torch's allocator on an accelerator has reserved or can still reserve."""
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device))


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Return whether an accelerator has room for `num_bytes` within the fraction `FILLED`; False for a CPU."""
    if device.type == "cpu":
        return False
    allocated = torch.get_device_module(device).memory_allocated(device)
    return bool(allocated + num_bytes <= FILLED * allocatable_bytes(device))
