"""SequenceCut: which tokens of a sequence each context-parallel rank holds, pure index arithmetic.

cp ranks are a ring of n places with u Ulysses ranks in each; rank r is at place r // u and is Ulysses rank r % u. With
n > 1 the sequence is cut into 2 n chunks and place j holds chunks j and 2 n - 1 - j ("zigzag"), so that under a causal
mask every place has the same work. The u ranks of a place hold equal slices of its chunks, laid end to end:

    n=2, u=1   rank 0: chunks 0 3    rank 1: chunks 1 2
    n=1, u=2   rank 0: first half    rank 1: second half
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.ir.strategy import CpKind, ulysses_degree

Interval = tuple[int, int]
"""Half-open range of positions in a sequence."""


@dataclass(frozen=True)
class SequenceCut:
    """Sharding of sequences of one length over the ranks of context parallelism.

    Attributes:
        seq_len: Tokens of a sequence.
        ring: Places of the ring, n.
        ulysses: Ulysses ranks at each place, u.
    """

    seq_len: int
    ring: int
    ulysses: int = 1

    @classmethod
    def of(cls, seq_len: int, cp: int, kind: CpKind, cp_ulysses: int = 1) -> SequenceCut:
        """Return the sharding for a strategy's `cp`, `cp_kind` and `cp_ulysses`."""
        ulysses = ulysses_degree(cp, kind, cp_ulysses)
        return cls(seq_len, cp // ulysses, ulysses)

    @property
    def unit(self) -> int:
        """Padded lengths are multiples of it: equal chunks on the ring, equal slices of them for Ulysses."""
        return self.ulysses if self.ring == 1 else math.lcm(2 * self.ring, self.ring * self.ulysses)

    @property
    def padded(self) -> int:
        """Tokens of a sequence with its padding."""
        return -(-self.seq_len // self.unit) * self.unit

    @property
    def local(self) -> int:
        """Tokens of a sequence that one rank holds, padding included."""
        return self.padded // (self.ring * self.ulysses)

    @cached_property
    def spans(self) -> tuple[tuple[Interval, ...], ...]:
        """Per place of the ring, the spans of positions it holds, in its order."""
        if self.ring == 1:
            return (((0, self.padded),),)
        chunk, last = self.padded // (2 * self.ring), 2 * self.ring - 1
        return tuple(
            ((j * chunk, (j + 1) * chunk), ((last - j) * chunk, (last - j + 1) * chunk))
            for j in range(self.ring)
        )

    def positions(self, rank: int) -> list[int]:
        """Return the positions that a rank holds, in its order."""
        place, slice_ = divmod(rank, self.ulysses)
        positions = [p for start, stop in self.spans[place] for p in range(start, stop)]
        return positions[slice_ * self.local : (slice_ + 1) * self.local]

    def distances(self, window: int | None) -> tuple[int, ...]:
        """Return the ring distances d at which some place j attends to keys of place j - d.

        Without a window every place attends to all others. A sliding window covers few chunks, so most exchanges are
        omitted.
        """
        return tuple(
            d
            for d in range(1, self.ring)
            if any(
                sees_some(q, k, window)
                for j in range(self.ring)
                for q in self.spans[j]
                for k in self.spans[(j - d) % self.ring]
            )
        )


def sees_some(queries: Interval, keys: Interval, window: int | None) -> bool:
    """Return whether some query of a span attends to some key of another, under a causal or sliding-window mask."""
    return keys[0] < queries[1] and (window is None or queries[0] - (keys[1] - 1) < window)


def sees_all(queries: Interval, keys: Interval, window: int | None) -> bool:
    """Return whether every query of a span attends to every key of another."""
    return keys[1] - 1 <= queries[0] and (window is None or queries[1] - 1 - keys[0] < window)
