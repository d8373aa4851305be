"""Checksums of tensors that ranks read in parts, independent of the partition.

The bytes along the last dim of a tensor are 64-bit words, padded with zeros. Each dim has an odd pseudo-random number
for each index. The checksum is the sum over all words of the word times its numbers in all dims, modulo 2^64. It is
linear, so the checksums of parts add up. It detects accidental differences, not attacks.
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
from hyper_parallel.ir import Box, Ranges, overlap

_Words = NDArray[np.uint64]
_WORD: Final = 8  # bytes of a uint64
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PartChecksum:
    """Checksum of a part of a stored tensor.

    Attributes:
        box: Name of the tensor, and the index range of the part in each dim.
        dtype: Dtype of the elements.
        shape: Shape of the full tensor.
        value: The checksum.
    """

    box: Box
    dtype: str
    shape: tuple[int, ...]
    value: int

    @classmethod
    def of(cls, name: str, part: Tensor, shape: tuple[int, ...], ranges: Ranges = ()) -> PartChecksum:
        """Return the checksum of `part`, the elements within `ranges` of a tensor; other dims are complete."""
        box = Box(name, (*ranges, *((0, size) for size in shape[len(ranges) :])))
        dtype = str(part.dtype).removeprefix("torch.")
        return cls(box, dtype, tuple(shape), _checksum(part, list(box.offset)))


def joint_checksum(parts: Iterable[PartChecksum], read_whole: Callable[[str], Tensor]) -> str:
    """Return one checksum, 32 hex digits, of all tensors that the ranks have read in parts; equal for every layout.

    Args:
        parts: Parts read by all ranks, with repetitions for replicas.
        read_whole: Function that reads a full tensor by name; used for tensors that no disjoint parts cover.
    """
    tensors: dict[str, dict[Box, PartChecksum]] = {}
    for part in parts:
        tensors.setdefault(part.box.name, {})[part.box] = part
    lines = []
    for name, by_box in sorted(tensors.items()):
        disjoint: list[PartChecksum] = []
        for part in sorted(by_box.values(), key=lambda p: -p.box.size):
            if not any(overlap(part.box, other.box) for other in disjoint):
                disjoint.append(part)
        first = disjoint[0]
        if sum(part.box.size for part in disjoint) != math.prod(first.shape):
            disjoint = [PartChecksum.of(name, read_whole(name), first.shape)]
        value = sum(part.value for part in disjoint) & _MASK
        lines.append(f"{name} {first.dtype} {list(first.shape)} {value:016x}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def state_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum that `joint_checksum` returns for these tensors if ranks read them in parts."""
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
    """Return `count` odd numbers for the indices from `start` along a dim.

    Source: the finalizer of SplitMix64, Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195.
    """
    indices = np.arange(start, start + count, dtype=np.uint64)
    bits = (indices + np.uint64((dim + 1) << 56)) * np.uint64(_GOLDEN)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))) | np.uint64(1)
