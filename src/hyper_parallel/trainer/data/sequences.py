"""Packed sequences, and further values per row; written once, read through memory maps.

    DocumentFacts (while tokenizing) -> train_good.npy, train_margins.npy, train_records.jsonl -> PackedSequences

The further values are labels of answers (KTO), target margins of pairs (reward models), record columns (for reward
functions), and references to media. An index of -1 selects a dummy row: padding without labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.errors import NoData
from hyper_parallel.received import Limits
from hyper_parallel.serde import read
from hyper_parallel.trainer.data.chat import answer_of
from hyper_parallel.trainer.data.document import Document
from hyper_parallel.trainer.data.media_arrays import RowMedia, media_arrays

Int64 = NDArray[np.int64]

IGNORE_INDEX: Final = -100
"""Label of a position without loss (the default `ignore_index` of cross entropy)."""


def permutation(count: int, *key: int) -> Int64:
    """Return a permutation of `count` indices that depends only on `count` and `key`, which begins with a seed."""
    # numpy guarantees that the raw bits of PCG64 never change, but not the results of its own `permutation`.
    return np.argsort(np.random.PCG64(key).random_raw(count), kind="stable")


@dataclass
class DocumentFacts:
    """Values of documents that a stage needs besides tokens; keys are offsets of documents in the token stream.

    Attributes:
        good: Whether the answer of the document is labelled desirable.
        margins: Target margin between the scores of the document's pair.
        records: JSON line with the columns and the reference answer of the document's record.
        columns: Ordered set of the column names of all records; all values are None.
        media: JSON line with the text and the references to media of the document.
        media_costs: (number of media in the document, number of their tokens).
    """

    good: dict[int, bool] = field(default_factory=dict)
    margins: dict[int, float] = field(default_factory=dict)
    records: dict[int, bytes] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)
    media: dict[int, bytes] = field(default_factory=dict)
    media_costs: dict[int, tuple[int, int]] = field(default_factory=dict)
    _num_documents: int = 0
    _num_margins: int = 0

    def add(self, start: int, document: Document, stage: str) -> None:
        """Add the values that `stage` needs of the document at offset `start`.

        Raises:
            NoData: HP602 when only some pairs have a margin, or a column is not a JSON value.
        """
        if stage == "kto":
            self.good[start] = document.good
        if document.margin is not None:
            self.margins[start] = document.margin
            self._num_margins += 1
        self._num_documents += 1
        if self._num_margins not in (0, self._num_documents):
            raise NoData(
                "some pairs have a margin and others have none",
                where=document.where,
                got=f"margin: {document.margin}",
                allowed="a finite number under `margin` in every record, or in none",
            )
        if stage == "grpo":
            if document.conversation is None:
                raise TypeError("stage grpo reads conversations")
            record = dict(document.columns)
            answer = answer_of(document.conversation.messages, document.num_context)
            if answer:
                record.setdefault("answer", answer)
            self.columns |= dict.fromkeys(record)
            self.records[start] = _json_line(record, document.where)

    def write(self, path: Path, starts: Sequence[int]) -> None:
        """Write the added values of all rows to files such as `PATH_good.npy` and `PATH_margins.npy`.

        `path` is folder and name of the split; `starts` has, for each row, the offset of its document.
        """
        if self.good:
            good = np.array([self.good[start] for start in starts], np.bool_)
            np.save(path.with_name(f"{path.name}_good.npy"), good)
        if self.margins:
            margins = np.array([self.margins[start] for start in starts], np.float64)
            np.save(path.with_name(f"{path.name}_margins.npy"), margins)
        if self.records:
            lines = [self.records[start] for start in starts]
            _write_records(path.with_name(f"{path.name}_records.jsonl"), lines, [*self.columns])
        if self.media:
            lines = [self.media.get(start, b"{}\n") for start in starts]
            _write_records(path.with_name(f"{path.name}_media.jsonl"), lines, [])
            costs = np.array([self.media_costs.get(start, (0, 0)) for start in starts], np.int64)
            np.save(path.with_name(f"{path.name}_media_costs.npy"), costs)


class RecordFile:
    """JSON Lines file with random access to the object of each row.

    Args:
        path: Path of the file. `PATH.ends.npy` has the end offset of each line, `PATH.keys.json` the column names.
    """

    def __init__(self, path: Path) -> None:
        keys = _with_suffix(path, "keys.json")
        self.columns: tuple[str, ...] = tuple(read(list[str], keys, Limits()))
        self._ends = np.load(_with_suffix(path, "ends.npy"))
        self._bytes = np.memmap(path, np.uint8, mode="r") if len(self._ends) else np.zeros(0)

    def read(self, index: int) -> dict[str, Any]:
        """Return the object of row `index`."""
        start = int(self._ends[index - 1]) if index else 0
        row: dict[str, Any] = json.loads(self._bytes[start : int(self._ends[index])].tobytes())
        return row


def _write_records(path: Path, lines: Sequence[bytes], columns: Sequence[str]) -> None:
    path.write_bytes(b"".join(lines))
    ends = np.cumsum([len(line) for line in lines], dtype=np.int64)
    np.save(_with_suffix(path, "ends.npy"), ends)
    _with_suffix(path, "keys.json").write_text(json.dumps(columns))


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def _json_line(record: dict[str, Any], where: str) -> bytes:
    """Return a record as a JSON line; dates become ISO text. Raise NoData (HP602) for values of other types."""

    def plain(value: Any) -> Any:
        if hasattr(value, "isoformat"):
            return value.isoformat()
        raise NoData(
            "a column of a record is not a JSON value, so reward functions cannot read it",
            where=where,
            got=f"{type(value).__name__}: {value!r:.60}",
            allowed="texts, numbers, booleans, dates, and lists and objects of these",
        )

    return json.dumps(record, default=plain).encode() + b"\n"


class PackedSequences:
    """Training or held-out split of packed data, read through memory maps; cheap to pickle.

    Plain text is one flat stream of tokens. Sequence i is the S + 1 tokens from offset i * S: the first S are its
    inputs, the last S its labels. Adjacent sequences share one token, so every used token of the stream except the
    first is a label exactly once per epoch. A remainder of fewer than S tokens at the end of the stream is not used.

    Conversations, and texts in separate rows, are stored as [N, S] inputs and [N, S] shifted labels. Labels are -100 at
    positions without loss. Rows end with padding. If attention is blocked between documents, there are also [N, S]
    positions, which restart at 0 with each document.

    Args:
        directory: Folder of the arrays.
        split: `train` or `holdout`.
        seq_len: Number of tokens of a row.
        media: (folder of the processor, folder of the media files); None: the conversations have no media.
    """

    def __init__(
        self,
        directory: str | Path,
        split: str,
        seq_len: int,
        media: tuple[Path, Path] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.split = split
        self.seq_len = seq_len
        self._tokens = np.load(self.directory / f"{split}.npy", mmap_mode="r")
        self._labels = self._optional("labels", mmap_mode="r")
        self._positions = self._optional("positions", mmap_mode="r")
        self._num_valid = self._optional("num_valid")
        self._num_real = self._optional("num_real")
        self._good = self._optional("good")
        self._margins = self._optional("margins")
        self._media_costs = self._optional("media_costs")
        records = self.directory / f"{split}_records.jsonl"
        self._records = RecordFile(records) if records.exists() else None
        lines = self.directory / f"{split}_media.jsonl"
        self._media_lines = RecordFile(lines) if lines.exists() else None
        self._media = media

    def _optional(self, name: str, mmap_mode: Literal["r"] | None = None) -> Any:
        path = self.directory / f"{self.split}_{name}.npy"
        return np.load(path, mmap_mode=mmap_mode) if path.exists() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedSequences, (self.directory, self.split, self.seq_len, self._media)

    def __len__(self) -> int:
        if self._labels is not None:
            return len(self._tokens)
        return max(0, (len(self._tokens) - 1) // self.seq_len)

    def num_valid(self, indices: Int64) -> int:
        """Return the number of labels with loss in the sequences `indices`; index -1 is a dummy row."""
        real = indices[indices >= 0]
        return len(real) * self.seq_len if self._num_valid is None else int(self._num_valid[real].sum())

    def read(self, indices: Int64) -> tuple[Int64, Int64]:
        """Return inputs and shifted labels, int64 [len(indices), S] each; index -1 yields token 0 without labels."""
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
        """Return the length of each row before padding, 0 for a dummy row; None for plain text without dummy rows."""
        dummy = indices < 0
        if self._num_real is None and not dummy.any():
            return None
        rows = np.maximum(indices, 0)
        counts = self.seq_len if self._num_real is None else self._num_real[rows].astype(np.int64)
        return np.where(dummy, 0, counts)

    def desirable(self, indices: Int64) -> NDArray[np.bool_]:
        """Return [len(indices)] labels of answers (KTO), True for desirable; a dummy row has an arbitrary label."""
        assert self._good is not None
        labels: NDArray[np.bool_] = self._good[indices]
        return labels

    @property
    def has_margins(self) -> bool:
        """True if the pairs have target margins."""
        return self._margins is not None

    def margins(self, indices: Int64) -> NDArray[np.float64]:
        """Return [len(indices)] target margins between the scores of pairs; 0 without margin and for a dummy row."""
        if self._margins is None:
            return np.zeros(len(indices))
        return np.where(indices < 0, 0.0, self._margins[indices])

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the record columns that reward functions may read."""
        return () if self._records is None else self._records.columns

    def records(self, indices: Int64) -> list[Mapping[str, Any]]:
        """Return, per row, the columns that reward functions may read; only for `stage: grpo`, without dummy rows."""
        assert self._records is not None
        return [self._records.read(int(index)) for index in indices]

    @property
    def has_media(self) -> bool:
        """True if any conversation has media; every row is then one conversation."""
        return self._media_lines is not None

    def media_costs(self, indices: Int64) -> Int64:
        """Return [len(indices), 2]: number of media in each row and number of their tokens; 0 for a dummy row."""
        if self._media_costs is None:
            return np.zeros((len(indices), 2), np.int64)
        return np.where(indices[:, None] < 0, 0, self._media_costs[indices])

    def media(self, indices: Int64) -> list[RowMedia]:
        """Return text and media of each row; a `RowMedia` without `row` for a row without media."""
        if self._media is None:
            return [RowMedia()] * len(indices)
        lines = self._media_lines
        rows = (lines.read(int(i)) if lines is not None and i >= 0 else {} for i in indices)
        return [RowMedia(row, *self._media, self.directory) for row in rows]

    def positions(self, indices: Int64) -> Int64 | None:
        """Return int64 [len(indices), S] positions in the documents; None if attention is not blocked between them."""
        if self._positions is None:
            return None
        positions = self._positions[np.maximum(indices, 0)].astype(np.int64)
        positions[indices < 0] = np.arange(self.seq_len)
        return positions


class JoinedSequences:
    """Concatenation of the sequences of several sources, with the methods of `PackedSequences`.

    Attributes:
        parts: Sequences of each source.
        starts: Index of the first sequence of each source, and total number of sequences.
    """

    def __init__(self, parts: Sequence[PackedSequences]) -> None:
        self.parts, self.split = tuple(parts), parts[0].split
        self.starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _split(self, indices: Int64) -> Iterator[tuple[PackedSequences, Int64, Any]]:
        """Yield (source, indices relative to the source, their positions in `indices`) for each source in `indices`."""
        source = np.searchsorted(self.starts, np.maximum(indices, 0), side="right") - 1
        for number in np.unique(source):
            rows = np.nonzero(source == number)[0]
            local = indices[rows] - self.starts[number]
            yield self.parts[number], np.where(indices[rows] < 0, -1, local), rows

    def num_valid(self, indices: Int64) -> int:
        """Return the number of labels with loss in the sequences `indices`."""
        return sum(part.num_valid(local) for part, local, _ in self._split(indices))

    def read(self, indices: Int64) -> tuple[Int64, Int64]:
        """Return inputs and shifted labels, int64 [len(indices), S] each; see `PackedSequences.read`."""
        gathered = np.empty((2, len(indices), self.parts[0].seq_len), np.int64)
        for part, local, rows in self._split(indices):
            gathered[:, rows] = part.read(local)
        return gathered[0], gathered[1]

    def _gather(self, read: Callable[[PackedSequences, Int64], Any], indices: Int64) -> list[Any] | None:
        """Return the value of a `PackedSequences` method for each row; None if it returns None for a source."""
        gathered: list[Any] = [None] * len(indices)
        for part, local, rows in self._split(indices):
            if (values := read(part, local)) is None:
                return None
            for row, value in zip(rows, values, strict=True):
                gathered[row] = value
        return gathered

    def num_real(self, indices: Int64) -> Int64 | None:
        """Return the length of each row before padding, 0 for a dummy row; None if every source returns None."""
        gathered = np.full(len(indices), self.parts[0].seq_len, np.int64)
        padded = False
        for part, local, rows in self._split(indices):
            if (counts := part.num_real(local)) is not None:
                gathered[rows], padded = counts, True
        return gathered if padded else None

    def desirable(self, indices: Int64) -> NDArray[np.bool_]:
        """Return [len(indices)] labels of the answers, True for desirable."""
        return np.array(self._gather(PackedSequences.desirable, indices), np.bool_)

    @property
    def has_margins(self) -> bool:
        """True if any source has target margins."""
        return any(part.has_margins for part in self.parts)

    def margins(self, indices: Int64) -> NDArray[np.float64]:
        """Return [len(indices)] target margins between the scores of pairs; 0 without margin."""
        return np.array(self._gather(PackedSequences.margins, indices), np.float64)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the record columns of all sources."""
        return tuple(dict.fromkeys(key for part in self.parts for key in part.columns))

    def records(self, indices: Int64) -> list[Mapping[str, Any]]:
        """Return, for each row, the columns of its record that reward functions may read, by name."""
        return self._gather(PackedSequences.records, indices) or []

    @property
    def has_media(self) -> bool:
        """True if any source has media."""
        return any(part.has_media for part in self.parts)

    def media_costs(self, indices: Int64) -> Int64:
        """Return [len(indices), 2]: number of media in each row and number of their tokens."""
        return np.array(self._gather(PackedSequences.media_costs, indices), np.int64).reshape(-1, 2)

    def media(self, indices: Int64) -> list[RowMedia]:
        """Return text and media of each row."""
        return self._gather(PackedSequences.media, indices) or []

    def positions(self, indices: Int64) -> Int64 | None:
        """Return int64 [len(indices), S] positions of tokens in their documents; None if a source stores none."""
        gathered = self._gather(PackedSequences.positions, indices)
        return None if gathered is None else np.stack(gathered)


def media_rows(sequences: PackedSequences | JoinedSequences) -> Int64:
    """Return the indices of the rows with media, sorted by ascending number of media tokens."""
    costs = sequences.media_costs(np.arange(len(sequences)))
    rows = np.flatnonzero(costs[:, 0])
    return rows[np.argsort(costs[rows, 1], kind="stable")]


def media_inputs(sequences: PackedSequences | JoinedSequences, indices: Int64) -> dict[str, NDArray[Any]]:
    """Return token ids and media inputs of rows as a dict from argument name of the model's forward to array."""
    tokens = sequences.read(indices)[0]
    return {"input_ids": tokens, **media_arrays(sequences.media(indices), tokens)}
