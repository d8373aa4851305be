"""Packed sequences on disk, read through memory maps, and what is stored beside each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.trainer.data._row_facts import RecordFile

Int64 = NDArray[np.int64]

IGNORE_INDEX: Final = -100
"""Label of a position that carries no loss (the default `ignore_index` of cross entropy)."""


class PackedSequences:
    """The training or the held-out part of packed data (`split`), read through memory maps; cheap to pickle.

    Plain text is one flat stream of tokens; sequence i reads the S + 1 tokens from i * S on: its inputs are the first
    S, its labels the last S. Neighbours share one token, so every token of the stream except the first is a label
    exactly once per epoch. Fewer than S tokens at the end of the stream are not used. Conversations, and
    texts that are kept apart, are stored as [N, S] inputs and [N, S] labels, already shifted, -100 where there is
    nothing to learn, and [N, S] positions that begin at 0 with each where attention is blocked between them. The rest
    of a row is padding.
    """

    def __init__(self, directory: str | Path, split: str, seq_len: int) -> None:
        self.directory = Path(directory)
        self.split = split
        self.seq_len = seq_len
        self._tokens = np.load(self.directory / f"{split}.npy", mmap_mode="r")
        labels = self.directory / f"{split}_labels.npy"
        self._labels = np.load(labels, mmap_mode="r") if labels.exists() else None
        counts = self.directory / f"{split}_num_valid.npy"
        self._num_valid = np.load(counts) if counts.exists() else None
        good = self.directory / f"{split}_good.npy"
        self._good = np.load(good) if good.exists() else None
        margins = self.directory / f"{split}_margins.npy"
        self._margins = np.load(margins) if margins.exists() else None
        records = self.directory / f"{split}_records.jsonl"
        self._records = RecordFile(records) if records.exists() else None
        real = self.directory / f"{split}_num_real.npy"
        self._num_real = np.load(real) if real.exists() else None
        positions = self.directory / f"{split}_positions.npy"
        self._positions = np.load(positions, mmap_mode="r") if positions.exists() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return (PackedSequences, (self.directory, self.split, self.seq_len))

    def __len__(self) -> int:
        if self._labels is not None:
            return len(self._tokens)
        return max(0, (len(self._tokens) - 1) // self.seq_len)

    def __repr__(self) -> str:
        return f"PackedSequences({self.split}, {len(self)} x {self.seq_len})"

    def num_valid(self, indices: Int64) -> int:
        """Labels that carry loss in the sequences `indices`; -1 stands for a dummy row."""
        real = indices[indices >= 0]
        return (
            len(real) * self.seq_len
            if self._num_valid is None
            else int(self._num_valid[real].sum())
        )

    def read(self, indices: Int64) -> tuple[Int64, Int64]:
        """Inputs and shifted labels, int64 [len(indices), S] each; index -1 gives a row of token 0 without labels."""
        real = indices >= 0
        rows = np.where(real, indices, 0)
        if self._labels is None:
            window = self._tokens[rows[:, None] * self.seq_len + np.arange(self.seq_len + 1)]
            inputs, labels = window[:, :-1].astype(np.int64), window[:, 1:].astype(np.int64)
        else:
            inputs = self._tokens[rows].astype(np.int64)
            labels = self._labels[rows].astype(np.int64)
        inputs[~real] = 0
        labels[~real] = IGNORE_INDEX
        return inputs, labels

    def num_real(self, indices: Int64) -> Int64 | None:
        """Tokens of each row before its padding, none of a dummy row; None: no row is padded."""
        dummy = indices < 0
        if self._num_real is None and not dummy.any():
            return None
        rows = np.maximum(indices, 0)
        found = self.seq_len if self._num_real is None else self._num_real[rows].astype(np.int64)
        return np.where(dummy, 0, found)

    def desirable(self, indices: Int64) -> NDArray[np.bool_]:
        """Whether the answer of each row is a good one; the data is labelled."""
        assert self._good is not None
        found: NDArray[np.bool_] = self._good[indices]
        return found

    @property
    def has_margins(self) -> bool:
        """Whether the pairs have wanted differences of their scores."""
        return self._margins is not None

    def margins(self, indices: Int64) -> NDArray[np.float64]:
        """Wanted difference of the two scores of the pair of each row; 0 without one, and of a dummy row."""
        if self._margins is None:
            return np.zeros(len(indices))
        return np.where(indices < 0, 0.0, self._margins[indices])

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of the records of all rows that rewards may read."""
        return () if self._records is None else self._records.columns

    def records(self, indices: Int64) -> list[Mapping[str, Any]]:
        """Columns of the record of each row."""
        assert self._records is not None
        return [self._records.read(int(index)) for index in indices]

    def positions(self, indices: Int64) -> Int64 | None:
        """Position of every input in its document, int64 [len(indices), S]; None: sequences are not told apart."""
        if self._positions is None:
            return None
        found = self._positions[np.maximum(indices, 0)].astype(np.int64)
        found[indices < 0] = np.arange(self.seq_len)
        return found


class JoinedSequences:
    """The sequences of several sources, one source after another."""

    def __init__(self, parts: Sequence[PackedSequences]) -> None:
        self.parts, self.split = tuple(parts), parts[0].split
        self.starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _each(self, indices: Int64) -> Iterator[tuple[PackedSequences, Int64, Any]]:
        """Every source, the places of `indices` that are in it, and their sequences there."""
        source = np.searchsorted(self.starts, np.maximum(indices, 0), side="right") - 1
        for number in np.unique(source):
            at = np.nonzero(source == number)[0]
            inside = indices[at] - self.starts[number]
            yield self.parts[number], np.where(indices[at] < 0, -1, inside), at

    def num_valid(self, indices: Int64) -> int:
        """As `PackedSequences.num_valid`."""
        return sum(part.num_valid(inside) for part, inside, _ in self._each(indices))

    def read(self, indices: Int64) -> tuple[Int64, Int64]:
        """As `PackedSequences.read`."""
        found = np.empty((2, len(indices), self.parts[0].seq_len), np.int64)
        for part, inside, at in self._each(indices):
            found[:, at] = part.read(inside)
        return found[0], found[1]

    def num_real(self, indices: Int64) -> Int64 | None:
        """As `PackedSequences.num_real`."""
        found = np.full(len(indices), self.parts[0].seq_len, np.int64)
        padded = False
        for part, inside, at in self._each(indices):
            if (counts := part.num_real(inside)) is not None:
                found[at], padded = counts, True
        return found if padded else None

    def desirable(self, indices: Int64) -> NDArray[np.bool_]:
        """As `PackedSequences.desirable`."""
        found = np.empty(len(indices), np.bool_)
        for part, inside, at in self._each(indices):
            found[at] = part.desirable(inside)
        return found

    @property
    def has_margins(self) -> bool:
        """Whether a source has margins."""
        return any(part.has_margins for part in self.parts)

    def margins(self, indices: Int64) -> NDArray[np.float64]:
        """As `PackedSequences.margins`."""
        found = np.zeros(len(indices))
        for part, inside, at in self._each(indices):
            found[at] = part.margins(inside)
        return found

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of the records of all sources."""
        return tuple(dict.fromkeys(key for part in self.parts for key in part.columns))

    def records(self, indices: Int64) -> list[Mapping[str, Any]]:
        """As `PackedSequences.records`."""
        found: list[Mapping[str, Any]] = [{}] * len(indices)
        for part, inside, at in self._each(indices):
            for place, record in zip(at, part.records(inside), strict=True):
                found[place] = record
        return found

    def positions(self, indices: Int64) -> Int64 | None:
        """As `PackedSequences.positions`; sources of one recipe have them all or none."""
        rows: list[Any] = [None] * len(indices)
        for part, inside, at in self._each(indices):
            if (found := part.positions(inside)) is None:
                return None
            for row, place in zip(found, at, strict=True):
                rows[place] = row
        return np.stack(rows)
