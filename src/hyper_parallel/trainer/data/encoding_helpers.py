"""Worker processes that encode and count records, for commands that count many.

    reader -> a batch of records -> idle worker -> counts

The first batch forks the workers, so that they share the tokenizer. Only an idle worker receives a batch, so the two
ends of a pipe never write at the same time.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self

from hyper_parallel.trainer.data.counts import DataCounts, Encoded
from hyper_parallel.trainer.data.document import Document
from hyper_parallel.trainer.data.packing import encode
from hyper_parallel.trainer.data.preview import LengthHistogram

_SUMS: Final = ("used", "cut", "tokens", "target_tokens")

Unit = list[Document]
"""Documents of one record: one, or the two of a pair."""


def encoded_units(
    batch: Sequence[Unit], hf: Any, stage: str
) -> Iterator[tuple[Unit, list[Encoded]]]:
    """Yield the documents of each record with their tokens."""
    encoded = encode([document for unit in batch for document in unit], hf, stage)
    for unit in batch:
        yield unit, [next(encoded) for _ in unit]


@dataclass
class Tally:
    """Counts of encoded records, and the lengths of their documents."""

    counts: DataCounts
    lengths: LengthHistogram = field(default_factory=LengthHistogram)

    def add(self, unit: Unit, encoded: list[Encoded], stage: str) -> None:
        """Count a record."""
        self.counts.add(unit, encoded, stage)
        for ids, _ in encoded:
            self.lengths.add(len(ids))

    def merge(self, other: Tally) -> None:
        """Add other counts, except those of records read and of ignored keys, which only the reader counts."""
        for name in _SUMS:
            setattr(self.counts, name, getattr(self.counts, name) + getattr(other.counts, name))
        self.counts.dropped.update(other.counts.dropped)
        self.counts.remarks.update(other.counts.remarks)
        self.lengths.counts.update(other.lengths.counts)


class EncodingHelpers:
    """Pool of worker processes that encode records, started by the first batch.

    Args:
        hf: Tokenizer of transformers.
        stage: Stage of the recipe.
        counts: Counts of the source, whose settings the workers share.
        number: Number of processes.
    """

    def __init__(self, hf: Any, stage: str, counts: DataCounts, number: int) -> None:
        self._hf, self._stage, self._number = hf, stage, number
        self._empty = DataCounts(seq_len=counts.seq_len, unknown_id=counts.unknown_id)
        self._idle: list[Connection] = []
        self._busy: list[Connection] = []
        self._processes: list[Any] = []
        self._tally = Tally(DataCounts())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: Any, __: TracebackType | None) -> None:
        """End the processes."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join()

    def submit(self, batch: Sequence[Unit]) -> bool:
        """Send a batch to an idle worker; return False if all workers are busy."""
        if self._number and not self._processes:
            self._start()
        for connection in [c for c in self._busy if c.poll()]:
            self._receive(connection)
        if not self._idle:
            return False
        connection = self._idle.pop()
        connection.send(batch)
        self._busy.append(connection)
        return True

    def add_to(self, tally: Tally) -> None:
        """Wait for all workers and add their counts."""
        for connection in tuple(self._busy):
            self._receive(connection)
        tally.merge(self._tally)

    def _receive(self, connection: Connection) -> None:
        result = connection.recv()
        self._busy.remove(connection)
        self._idle.append(connection)
        if isinstance(result, Exception):
            raise result
        self._tally.merge(result)

    def _start(self) -> None:
        # Threads of the tokenizer do not survive a fork; the library warns unless this variable is set.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        context = multiprocessing.get_context("fork")
        for _ in range(self._number):
            own, other = context.Pipe()
            process = context.Process(target=self._encode_batches, args=(other, own), daemon=True)
            process.start()
            other.close()
            self._processes.append(process)
            self._idle.append(own)

    def _encode_batches(self, connection: Connection, parent: Connection) -> None:
        """Count batches until the reader closes its end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reader terminates its workers
        for inherited in (parent, *self._idle):
            inherited.close()
        while True:
            try:
                batch = connection.recv()
            except EOFError:
                return
            tally = Tally(copy.deepcopy(self._empty))
            try:
                for unit, encoded in encoded_units(batch, self._hf, self._stage):
                    tally.add(unit, encoded, self._stage)
                connection.send(tally)
            except Exception as error:  # the reader raises it
                connection.send(error)
