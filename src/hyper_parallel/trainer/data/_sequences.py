"""Packed sequences on disk, read through memory maps.

Legend: `N` sequences, `S` tokens per sequence.

Plain text is one flat stream of tokens; sequence i reads the S + 1 tokens from i * S on: its inputs are the first S,
its labels the last S. Neighbours share one token, so every token of the stream except the first is a label exactly
once per epoch. Fewer than S tokens at the end of the stream are not used.

Conversations are stored as [N, S] inputs and [N, S] labels, already shifted, -100 where there is nothing to learn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORE_INDEX = -100
"""Label of a position that carries no loss (the default `ignore_index` of cross entropy)."""

Int64 = NDArray[np.int64]


class PackedSequences:
    """The training or the held-out part of packed data; cheap to pickle and to fork.

    Args:
        directory: Cache entry that holds the arrays.
        split: `train` or `holdout`.
        seq_len: Tokens per sequence, S.
    """

    def __init__(self, directory: str | Path, split: str, seq_len: int) -> None:
        self.directory = Path(directory)
        self.split = split
        self.seq_len = seq_len
        self._tokens = np.load(self.directory / f"{split}.npy", mmap_mode="r")
        labels = self.directory / f"{split}_labels.npy"
        self._labels = np.load(labels, mmap_mode="r") if labels.exists() else None
        self._num_valid = (
            np.load(self.directory / f"{split}_num_valid.npy") if labels.exists() else None
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (PackedSequences, (self.directory, self.split, self.seq_len))

    def __len__(self) -> int:
        if self._labels is not None:
            return len(self._tokens)
        return max(0, (len(self._tokens) - 1) // self.seq_len)

    def __repr__(self) -> str:
        return f"PackedSequences({self.split}, {len(self)} x {self.seq_len})"

    @property
    def num_tokens(self) -> int:
        """Positions of all sequences, padding included: N * S."""
        return len(self) * self.seq_len

    def num_valid(self, indices: Int64 | None = None) -> int:
        """Labels that carry loss in the sequences `indices` (None: in all); -1 stands for a dummy row."""
        if indices is not None:
            indices = indices[indices >= 0]
        if self._num_valid is None:
            return (len(self) if indices is None else len(indices)) * self.seq_len
        counts = self._num_valid if indices is None else self._num_valid[indices]
        return int(counts.sum())

    def read(self, indices: Int64) -> tuple[Int64, Int64]:
        """Inputs and shifted labels, int64 [len(indices), S] each.

        An index of -1 gives a dummy row: token 0 everywhere and no label.
        """
        real = indices >= 0
        rows = np.where(real, indices, 0)
        if self._labels is None:
            window = self._tokens[rows[:, None] * self.seq_len + np.arange(self.seq_len + 1)]
            inputs, labels = window[:, :-1].astype(np.int64), window[:, 1:].astype(np.int64)
        else:
            inputs, labels = (
                self._tokens[rows].astype(np.int64),
                self._labels[rows].astype(np.int64),
            )
        inputs[~real] = 0
        labels[~real] = IGNORE_INDEX
        return inputs, labels
