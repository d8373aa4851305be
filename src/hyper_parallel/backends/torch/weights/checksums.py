"""Checksums of tensors that ranks read in parts; they do not depend on how the tensors are cut.

The bytes of a tensor, row by row, are 64-bit words. The checksum is the sum of each word times one odd pseudo-random
number for its place along each dim, modulo 2^64. It is linear, so parts add up, and costs one pass of multiplications
over bytes that are in the cache because they were just read. It finds damage and exchange, not malice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyper_parallel.backends.torch.weights.shard_ranges import local

Ranges = tuple[tuple[int, int], ...]
_Words = NDArray[np.uint64]
_WORD: Final = 8  # bytes of a uint64
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PartChecksum:
    """Checksum of the elements of a stored tensor within some ranges.

    Attributes:
        name: Of the tensor.
        dtype: Of its elements.
        shape: Of the whole tensor.
        ranges: Start and stop per dim.
        value: The checksum.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: Ranges
    value: int

    @classmethod
    def of(
        cls, name: str, part: Tensor, shape: tuple[int, ...], ranges: Ranges = ()
    ) -> PartChecksum:
        """Compute the checksum of a part; dims without a range are whole."""
        whole = (*ranges, *((0, size) for size in shape[len(ranges) :]))
        dtype = str(part.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(shape), whole, _checksum(part, [start for start, _ in whole]))

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(stop - start for start, stop in self.ranges)

    def overlaps(self, other: PartChecksum) -> bool:
        """Whether an element is in both; the two are of one tensor."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        return all(a < d and c < b for (a, b), (c, d) in pairs)


def joint_checksum(parts: Iterable[PartChecksum], read_whole: Callable[[str], Tensor]) -> str:
    """Return one checksum of the tensors that all ranks have read together; equal for all layouts.

    Args:
        parts: Parts that ranks have read, those of replicas several times.
        read_whole: Reads a tensor by name, where parts overlap without being equal.
    """
    tensors: dict[str, dict[Ranges, PartChecksum]] = {}
    for part in parts:
        tensors.setdefault(part.name, {})[part.ranges] = part
    lines = []
    for name, found in sorted(tensors.items()):
        disjoint: list[PartChecksum] = []
        for part in sorted(found.values(), key=lambda p: -p.size):
            if not any(part.overlaps(other) for other in disjoint):
                disjoint.append(part)
        first = disjoint[0]
        if sum(part.size for part in disjoint) != math.prod(first.shape):
            disjoint = [PartChecksum.of(name, read_whole(name), first.shape)]
        value = sum(part.value for part in disjoint) & _MASK
        lines.append(f"{name} {first.dtype} {list(first.shape)} {value:016x}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def state_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return one checksum of whole tensors by name, in host memory."""
    parts = [PartChecksum.of(n, t, tuple(t.shape)) for n, t in tensors.items()]
    return joint_checksum(parts, lambda name: tensors[name])


def _checksum(part: Tensor, starts: list[int]) -> int:
    if part.numel() == 0:
        return 0
    dense = local(part).detach().cpu().contiguous()
    dense, starts = (dense, starts) if dense.dim() else (dense.reshape(1), [0])
    raw: NDArray[np.uint8] = dense.view(torch.uint8).numpy()
    raw = raw.reshape(-1, raw.shape[-1])
    skipped = starts[-1] * dense.element_size() % _WORD  # bytes of the first word before this part
    missing = -(skipped + raw.shape[1]) % _WORD
    if skipped or missing:
        raw = np.pad(raw, ((0, 0), (skipped, missing)))
    words = raw.view(np.uint64)
    first = starts[-1] * dense.element_size() // _WORD
    sums: _Words = words @ _multipliers(dense.dim() - 1, first, words.shape[1])
    for dim in reversed(range(dense.dim() - 1)):
        length = dense.shape[dim]
        sums = sums.reshape(-1, length) @ _multipliers(dim, starts[dim], length)
    return int(sums[0])


@lru_cache(maxsize=64)
def _multipliers(dim: int, start: int, count: int) -> _Words:
    """Return `count` odd numbers for the places from `start` on along a dim.

    Source: the finalizer of SplitMix64, Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195.
    """
    places = np.arange(start, start + count, dtype=np.uint64)
    mixed = (places + np.uint64((dim + 1) << 56)) * np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
