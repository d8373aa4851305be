"""A ledger of storages: who took how many bytes, when they went, and what was live at the peak.

Every change of the live bytes is an entry, so the peak of any part of a run and everything that was live at it can be
found afterwards. Nothing here reads a tensor: `MemoryCounter` writes the ledger while a program runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "recomputed activations",
    "gathered parameters",
    "communication buffers",
    "temporaries",
    "kernel workspace",
    "inputs",
)
"""What a storage can hold, in the order of printing."""


@dataclass(slots=True)
class Record:
    """One storage from birth to death, or the workspace of one kernel.

    Attributes:
        made_by: Operator that made it, or the name of a parameter.
        shape: Shape of the first tensor on it.
        dtype: Number format of that tensor.
        born: Entry of the ledger at which it came.
        segment: Piece of the program (forward, backward, ...) in which it came.
        segment_index: Number of that piece in the run.
        recomputed: Made again inside backward.
        mark: Category that is known, "" when its life tells.
        sent: A collective read or wrote it.
        num_bytes: Bytes now; 0 after death.
        last_segment: Number of the piece in which it went; None while it lives.
    """

    made_by: str
    shape: tuple[int, ...]
    dtype: str
    born: int
    segment: str
    segment_index: int
    recomputed: bool = False
    mark: str = ""
    sent: bool = False
    num_bytes: int = 0
    last_segment: int | None = None

    @property
    def category(self) -> str:
        """What it holds: as marked, else by its life."""
        if self.mark:
            return self.mark
        if self.recomputed:
            return "recomputed activations"
        outlives = self.last_segment is None or self.last_segment > self.segment_index
        if self.segment == "forward" and outlives:
            return "activations"
        return "communication buffers" if self.sent else "temporaries"


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Equal storages that were live at a peak: how many, and what one of them is."""

    count: int
    num_bytes: int
    made_by: str
    shape: tuple[int, ...]
    dtype: str
    category: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment of a part of a run.

    Attributes:
        num_bytes: Live bytes.
        during: Operator that took the last bytes.
        segment: Piece of the program.
        breakdown: Category to live bytes; they add up to `num_bytes`.
        top: Largest live tensors, equal ones together, largest in all first.
    """

    num_bytes: int
    during: str
    segment: str
    breakdown: dict[str, int]
    top: tuple[LiveTensor, ...]


class Ledger:
    """All changes of the live bytes of one memory.

    Args:
        alignment_bytes: Every allocation is rounded up to a multiple of it: 1 counts requested bytes, 512 counts as
            the caching allocators of accelerators do.

    Attributes:
        live: Bytes now.
        segment: Piece of the program that runs now.
        segment_index: Its number.
    """

    def __init__(self, alignment_bytes: int = 1) -> None:
        self._alignment = alignment_bytes
        self._owner: list[Record] = []
        self._delta: list[int] = []
        self.live = 0
        self.segment = "setup"
        self.segment_index = 0

    def enter(self, segment: str) -> None:
        """Say that another piece of the program begins."""
        if segment != self.segment:
            self.segment = segment
            self.segment_index += 1

    @property
    def position(self) -> int:
        """Number of entries so far."""
        return len(self._delta)

    def open(
        self, num_bytes: int, made_by: str, shape: tuple[int, ...], dtype: str, recomputed: bool
    ) -> Record:
        """A new storage."""
        record = Record(
            made_by, shape, dtype, self.position, self.segment, self.segment_index, recomputed
        )
        self.resize(record, num_bytes)
        return record

    def resize(self, record: Record, num_bytes: int) -> None:
        """A storage has another size; 0 when it is gone."""
        old, new = self._rounded(record.num_bytes), self._rounded(num_bytes)
        record.num_bytes = num_bytes
        if new != old:
            self._owner.append(record)
            self._delta.append(new - old)
            self.live += new - old

    def close(self, record: Record) -> None:
        """A storage is gone."""
        record.last_segment = self.segment_index
        self.resize(record, 0)

    def spike(self, num_bytes: int, made_by: str) -> None:
        """Bytes that a kernel takes and gives back before it returns."""
        if num_bytes:
            record = self.open(num_bytes, made_by, (), "", False)
            record.mark = "kernel workspace"
            self.close(record)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment

    def peak(self, begin: int = 0, end: int | None = None, top: int = 12) -> Peak:
        """The fullest moment between two entries.

        Args:
            begin: First entry.
            end: Entry after the last; None: now.
            top: Largest tensors to list.
        """
        end = self.position if end is None else end
        live = np.cumsum(np.asarray(self._delta[:end], dtype=np.int64))
        before = int(live[begin - 1]) if begin else 0
        if end <= begin or int(live[begin:].max()) <= before:
            at, most = begin - 1, before
        else:
            at = begin + int(live[begin:].argmax())
            most = int(live[at])
        held: Counter[int] = Counter()
        records: dict[int, Record] = {}
        for record, delta in zip(self._owner[: at + 1], self._delta[: at + 1], strict=True):
            held[id(record)] += delta
            records[id(record)] = record
        breakdown: Counter[str] = Counter()
        groups: Counter[tuple[int, str, tuple[int, ...], str, str]] = Counter()
        for key, num_bytes in held.items():
            if num_bytes:
                record = records[key]
                breakdown[record.category] += num_bytes
                maker = _generic(record.made_by)
                groups[num_bytes, maker, record.shape, record.dtype, record.category] += 1
        ranked = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[:top]
        last = self._owner[at] if at >= 0 else None
        return Peak(
            most,
            last.made_by if last else "",
            last.segment if last else "",
            {name: breakdown[name] for name in CATEGORIES if breakdown[name]},
            tuple(LiveTensor(count, *group) for group, count in ranked),
        )


def _generic(name: str) -> str:
    """A parameter's name with `*` for the layer index, so that equal ones fall together."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
