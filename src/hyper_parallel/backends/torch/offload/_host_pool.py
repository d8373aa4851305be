"""DRAM buffers that are taken, given back and taken again, so that a step allocates none.

Pinning memory is slow, and the pinned allocator of a device rounds every request up to a power of two. So buffers are
cut from slabs whose sizes are powers of two, all of them before the first step: for every size as many as the plan
holds at the same time.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Final

import torch

from hyper_parallel.ir import COPIES, MemoryPlan
from hyper_parallel.units import MiB

_SLAB: Final = 64 * MiB


def most_at_once(plan: MemoryPlan) -> Counter[int]:
    """For every rounded size how many DRAM buffers of it a step holds at the same time."""
    sizes = plan.program.sizes
    held = {
        s for s, x in enumerate(plan.program.storages) if x.persistent and plan.homes[s] == "dram"
    }
    now = Counter(sizes[s] for s in held)
    most = Counter(now)
    for action in plan.actions:
        s = action.target
        if action.kind in COPIES and COPIES[action.kind][1] == "dram" and s not in held:
            held.add(s)
            now[sizes[s]] += 1
            most[sizes[s]] = max(most[sizes[s]], now[sizes[s]])
        elif s in held and (
            action.kind == "free" or (action.kind == "detach" and action.tier == "dram")
        ):
            held.remove(s)
            now[sizes[s]] -= 1
    return most


class HostPool:
    """Buffers by size.

    Args:
        alignment_bytes: Sizes are rounded up to a multiple of this.
        pin: The memory is pinned, so that a device copies it without the host.

    Attributes:
        held_bytes: What the pool has taken from the system.
    """

    def __init__(self, alignment_bytes: int, pin: bool) -> None:
        self._alignment, self._pin = alignment_bytes, pin
        self._free: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self.made: Counter[int] = Counter()
        self.held_bytes = 0

    def reserve(self, most: Counter[int]) -> None:
        """Make what is missing until so many buffers of every size exist."""
        missing = most - self.made
        left = [
            size for size in sorted(missing, reverse=True) for _ in range(missing[size]) if size
        ]
        self.made |= most
        while left:
            # The largest power of two that the rest fills, so that little stays unused.
            fills = _power_of_two(sum(left) // 2 + 1)
            room = max(min(_SLAB, fills), _power_of_two(left[0]))
            slab = self._slab(room)
            at, later = 0, []
            for size in left:
                if at + size <= room:
                    self._free.setdefault(size, []).append((slab, at))
                    at += size
                else:
                    later.append(size)
            left = later

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """A buffer; it comes back by itself when nobody refers to it any more."""
        size = -(-num_bytes // self._alignment) * self._alignment
        free = self._free.setdefault(size, [])
        if not free:
            self.made[size] += 1
            free.append((self._slab(size), 0))
        slab, at = free.pop()
        base = slab[at : at + num_bytes]
        assert isinstance(base, torch.UntypedStorage)
        key = id(base)

        def back(_: Any) -> None:
            del self._watch[key]
            free.append((slab, at))

        self._watch[key] = weakref.ref(base, back)
        return base

    def _slab(self, num_bytes: int) -> torch.UntypedStorage:
        self.held_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin).untyped_storage()


def _power_of_two(num_bytes: int) -> int:
    """The smallest one that is no smaller."""
    return 1 << max(num_bytes - 1, 0).bit_length()
