"""Pool of reusable DRAM buffers, so that a step allocates none."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from hyper_parallel.errors import TierFull
from hyper_parallel.ir import slab_bytes, slabs


class HostPool:
    """Pool of DRAM buffers by size, cut from slabs.

    Args:
        alignment_bytes: Sizes are rounded up to a multiple of this.
        pin: Pin the memory, so that a device copies it asynchronously.
        capacity_bytes: Limit of the slabs' bytes; None: unlimited.

    Attributes:
        buffers: Number of buffers by size.
        reserved_bytes: Bytes of the slabs.
    """

    def __init__(self, alignment_bytes: int, pin: bool, capacity_bytes: int | None = None) -> None:
        self._alignment, self._pin, self._capacity = alignment_bytes, pin, capacity_bytes
        self._free: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self.buffers: Counter[int] = Counter()
        self.reserved_bytes = 0

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Allocate missing buffers until `counts` buffers of every size exist.

        Raises:
            TierFull: HP403 when the slabs exceed the capacity; nothing is allocated then.
        """
        missing = Counter(counts) - self.buffers
        self._check_capacity(slab_bytes(missing))
        self.buffers |= Counter(counts)
        for slab_size, parts in slabs(missing):
            slab, offset = self._slab(slab_size), 0
            for size, count in parts.items():
                ends = range(offset, offset + size * count, size)
                self._free.setdefault(size, []).extend((slab, begin) for begin in ends)
                offset += size * count

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a buffer, which becomes free again when its last reference is dropped.

        Raises:
            TierFull: HP403 when no buffer is free and another one would exceed the capacity.
        """
        size = self._rounded(num_bytes)
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

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment

    def _check_capacity(self, more_bytes: int) -> None:
        wanted = self.reserved_bytes + more_bytes
        if self._capacity is not None and wanted > self._capacity:
            raise TierFull(
                "the DRAM buffers of the plan exceed the dram tier",
                got=f"{wanted} bytes",
                allowed=f"{self._capacity} bytes",
                hint=f"allow at least {wanted} bytes in dram",
            )

    def _slab(self, num_bytes: int) -> torch.UntypedStorage:
        self.reserved_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin).untyped_storage()
