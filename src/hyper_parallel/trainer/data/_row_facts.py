"""Facts of documents beside their tokens: whether an answer is good, the margin of a pair, columns of a record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.errors import NoData
from hyper_parallel.received import Limits
from hyper_parallel.serde import read
from hyper_parallel.trainer.data.chat import answer_of
from hyper_parallel.trainer.data.sources import Document


@dataclass
class DocumentFacts:
    """Facts that a stage reads, by the place where a document begins in the stream of tokens.

    Attributes:
        good: Whether its answer is a good one.
        margins: Wanted difference of the two scores of its pair.
        records: Columns of its record, its answer among them, as a line of JSON.
        columns: Names of the columns of all records, in their order.
    """

    good: dict[int, bool] = field(default_factory=dict)
    margins: dict[int, float] = field(default_factory=dict)
    records: dict[int, bytes] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)
    _num_documents: int = 0
    _num_margins: int = 0

    def add(self, start: int, document: Document, stage: str) -> None:
        """Keep the facts of a document that `stage` reads.

        Raises:
            NoData: HP602 when some pairs have a margin and others have none, or a column is no JSON value.
        """
        if stage == "kto":
            self.good[start] = document.good
        if document.margin is not None:
            self.margins[start] = document.margin
            self._num_margins += 1
        self._num_documents += 1
        if self._num_margins not in (0, self._num_documents):
            raise NoData(
                "some pairs have a margin, and others have none",
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
        """Write the facts of the rows of `path`, each of which is the document that begins at one of `starts`."""
        if self.good:
            good = np.array([self.good[start] for start in starts], np.bool_)
            np.save(path.with_name(f"{path.name}_good.npy"), good)
        if self.margins:
            margins = np.array([self.margins[start] for start in starts], np.float64)
            np.save(path.with_name(f"{path.name}_margins.npy"), margins)
        if self.records:
            lines = [self.records[start] for start in starts]
            _write_records(path.with_name(f"{path.name}_records.jsonl"), lines, [*self.columns])


class RecordFile:
    """One JSON object for each row of a split, read by number.

    Args:
        path: File of lines; `PATH.ends.npy` holds the offset where each ends, and `PATH.keys.json` the column names.
    """

    def __init__(self, path: Path) -> None:
        self.columns: tuple[str, ...] = tuple(read(list[str], _beside(path, "keys.json"), Limits()))
        self._ends = np.load(_beside(path, "ends.npy"))
        self._bytes = np.memmap(path, np.uint8, mode="r") if len(self._ends) else np.zeros(0)

    def read(self, index: int) -> dict[str, Any]:
        """Return the object of a row."""
        start = int(self._ends[index - 1]) if index else 0
        found: dict[str, Any] = json.loads(self._bytes[start : int(self._ends[index])].tobytes())
        return found


def _write_records(path: Path, lines: Sequence[bytes], columns: Sequence[str]) -> None:
    path.write_bytes(b"".join(lines))
    np.save(_beside(path, "ends.npy"), np.cumsum([len(line) for line in lines], dtype=np.int64))
    _beside(path, "keys.json").write_text(json.dumps(columns))


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def _json_line(record: dict[str, Any], where: str) -> bytes:
    """Return a record as a line of JSON; parquet may hold dates, which become text."""

    def plain(value: Any) -> Any:
        if hasattr(value, "isoformat"):
            return value.isoformat()
        raise NoData(
            "a column of a record is no JSON value, so it cannot be given to rewards",
            where=where,
            got=f"{type(value).__name__}: {value!r:.60}",
            allowed="texts, numbers, booleans, dates, lists and objects of such",
        )

    return json.dumps(record, default=plain).encode() + b"\n"
