"""Host memory of a plan: buffers by size, carved from slabs.

Pinning memory is slow, so a step allocates none: for every size, the maximum number of buffers in use is allocated
before the step. Pinned allocators round requests up to a power of two, so buffers are carved from slabs of such sizes.
Planner and executor share `slabs`, so planned and allocated bytes agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class HostBuffers:
    """Buffers of every size: how many are in use, and the most that ever were.

    Args:
        reserved: By size, buffers that no other size gets the bytes of.

    Attributes:
        most: By size, buffers that must exist.
    """

    def __init__(self, reserved: Mapping[int, int] | None = None) -> None:
        self._now: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self._reserved = Counter(reserved or {})
        self._fitting: dict[tuple[int, int], bool] = {}  # forgotten when `most` grows

    def take(self, size: int) -> None:
        """Count one more buffer of a size as in use."""
        self._now[size] += 1
        if self._now[size] > self.most[size]:
            self.most[size] += 1
            self._fitting.clear()

    def give(self, size: int) -> None:
        """Count one buffer of a size as free."""
        self._now[size] -= 1

    def fits(self, size: int, capacity_bytes: int) -> bool:
        """Return whether one more buffer of a size keeps the slabs within a capacity."""
        if self._now[size] < max(self.most[size], self._reserved[size]):
            return True
        asked = size, capacity_bytes
        if asked not in self._fitting:
            more = (self.most | self._reserved) + Counter({size: 1})
            self._fitting[asked] = slab_bytes(more) <= capacity_bytes
        return self._fitting[asked]


def slabs(buffers: Mapping[int, int]) -> list[tuple[int, dict[int, int]]]:
    """Return the slabs for a number of buffers of every size.

    Returns:
        Bytes of every slab, a power of two, and how many buffers of every size are cut from it, one after the other.
    """
    left = {size: buffers[size] for size in sorted(buffers, reverse=True) if size}
    result = []
    while any(left.values()):
        largest = next(size for size, count in left.items() if count)
        total = sum(size * count for size, count in left.items())
        # The largest power of two that the rest fills, so that little stays unused.
        slab = max(1 << (total.bit_length() - 1), 1 << (largest - 1).bit_length())
        parts, free = dict[int, int](), slab
        for size in left:
            if count := min(left[size], free // size):
                parts[size] = count
                left[size] -= count
                free -= size * count
        result.append((slab, parts))
    return result


def slab_bytes(buffers: Mapping[int, int]) -> int:
    """Return the bytes of the slabs for a number of buffers of every size."""
    return sum(slab for slab, _ in slabs(buffers))
