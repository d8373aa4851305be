"""Counts and examples of a recipe's data, from its first records, without building the model.

    reader -> a batch of records -> idle worker process -> counts

A record is one document, or the two documents of a preference pair. The reader forks the workers when the first batch
is submitted, so they share its tokenizer. Only idle workers receive a batch, so the two ends of a pipe never write at
the same time.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self

from hyper_parallel.config import LoadedRecipe
from hyper_parallel.model import list_weight_files, read_config
from hyper_parallel.trainer.data.counts import DataCounts, Encoded
from hyper_parallel.trainer.data.document import Document
from hyper_parallel.trainer.data.packing import encode
from hyper_parallel.trainer.data.preview import (
    Example,
    LengthHistogram,
    documents_of_records,
    example_of,
    is_used,
)
from hyper_parallel.trainer.data.saved_tokenizer import has_tokenizer, require_tokenizer
from hyper_parallel.trainer.data.sources import Source
from hyper_parallel.trainer.data.summary import notes, summary_rows
from hyper_parallel.trainer.data.tokenizer import open_sources
from hyper_parallel.trainer.hub_models import with_hub_models
from hyper_parallel.units import MiB

MAX_BYTES: Final = 16 * MiB
"""Approximate maximum bytes of text to tokenize, over all sources."""
_BATCH: Final = 256
"""Number of records of a tokenization batch."""
_OWN_RECORDS: Final = 2 * _BATCH
"""Number of records that the reader encodes itself before it starts workers."""
_MAX_PROCESSES: Final = 4
_SUMS: Final = ("used", "cut", "tokens", "target_tokens")

Unit = list[Document]
"""Documents of a record: a single document, or the two documents of a pair."""


def encoded_units(batch: Sequence[Unit], hf: Any, stage: str) -> Iterator[tuple[Unit, list[Encoded]]]:
    """Encode a batch of records; yield each record with its encoded documents."""
    encoded = encode([document for unit in batch for document in unit], hf, stage)
    for unit in batch:
        yield unit, [next(encoded) for _ in unit]


@dataclass
class Tally:
    """Counts of encoded records, and the lengths of their documents."""

    counts: DataCounts
    lengths: LengthHistogram = field(default_factory=LengthHistogram)

    def add(self, unit: Unit, encoded: list[Encoded], stage: str) -> None:
        """Add a record with its encoded documents to the counts and lengths."""
        self.counts.add(unit, encoded, stage)
        for ids, _ in encoded:
            self.lengths.add(len(ids))

    def merge(self, other: Tally) -> None:
        """Add the counts of a worker, except the fields that only the reader counts (records read, ignored keys)."""
        for name in _SUMS:
            setattr(self.counts, name, getattr(self.counts, name) + getattr(other.counts, name))
        self.counts.dropped.update(other.counts.dropped)
        self.counts.remarks.update(other.counts.remarks)
        self.lengths.counts.update(other.lengths.counts)


class EncodingHelpers:
    """Pool of `number` worker processes that encode records; the first call of `submit` starts them.

    Workers copy `seq_len` and `unknown_id` from `counts`.
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
        for connection in (*self._idle, *self._busy):
            connection.close()
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join()

    def submit(self, batch: Sequence[Unit]) -> bool:
        """Send a batch to an idle worker; return False if none is idle. Raise the exception of a failed batch."""
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
        """Wait until all workers are idle and add their counts to `tally`; raise the exception of a failed batch."""
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
        # Threads of the tokenizer do not survive a fork, and the library warns unless this variable is set.
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
        """Run a worker: receive batches, encode them, and send back their `Tally`, until the reader closes the pipe."""
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


@dataclass(frozen=True, slots=True)
class SourceSample:
    """Counts of the first records of a data source.

    Attributes:
        counts: Numbers of records, documents and tokens.
        lengths: Histogram of document lengths in tokens.
        examples: First records that the stage trains on.
        complete: Whether all records of the source were read.
        weight: Weight of the source in a mixture.
    """

    counts: DataCounts
    lengths: LengthHistogram
    examples: tuple[Example, ...]
    complete: bool
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class DataSample:
    """Counts of the first records of all sources.

    Attributes:
        stage: Stage of the recipe.
        sources: Samples of the sources.
        tokenizer: Directory of the tokenizer.
        tokenizer_name: `data.tokenizer` or `model.path` of the recipe; None: the tokenizer is trained on the data.
        tokenizer_notes: Sentences about the tokenizer.
    """

    stage: str
    sources: tuple[SourceSample, ...]
    tokenizer: str
    tokenizer_name: str | None = None
    tokenizer_notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True if all records were read."""
        return all(one.complete for one in self.sources)

    @property
    def counts(self) -> list[DataCounts]:
        """Counts of each source."""
        return [one.counts for one in self.sources]

    @property
    def rows(self) -> dict[str, str]:
        """Summary of the data, as a dict from row title to text."""
        weights = [one.weight for one in self.sources]
        rows = summary_rows(self.stage, self.counts, weights, sampled=not self.complete)
        return rows | {"tokenizer": self.tokenizer_name or f"trained on the data: {self.tokenizer}"}

    @property
    def notes(self) -> list[str]:
        """Sentences about the counts and the tokenizer."""
        return [*notes(self.stage, self.counts), *self.tokenizer_notes]

    def as_dict(self) -> dict[str, Any]:
        """Return the sample as JSON values."""
        from hyper_parallel.serde import encode as plain

        return {
            "stage": self.stage,
            "tokenizer": self.tokenizer,
            "complete": self.complete,
            "notes": self.notes,
            "sources": [
                {
                    **one.counts.as_dict(),
                    "weight": one.weight,
                    "complete": one.complete,
                    "lengths": one.lengths.buckets(),
                    "examples": plain(one.examples),
                }
                for one in self.sources
            ],
        }


def sample_data(loaded: LoadedRecipe, max_records: int, num_examples: int, *, progress: bool = False) -> DataSample:
    """Encode the first records of a recipe's data as training does, and count them.

    `max_records` and 16 MiB of text are divided evenly among the sources, but at least one record of each is read. Each
    source gets at most `num_examples` examples. With `progress`, a progress bar is shown if a tokenizer is trained.

    Raises:
        HyperParallelError: Errors of finding the model's config, reading the data and loading the tokenizer.
        TokenizerMissing: HP706 for pretrained weights without a tokenizer.
    """
    typed = loaded.recipe
    recipe = (loaded := with_hub_models(loaded, weights=False)).recipe
    stage, parts = recipe.stage, recipe.data.parts()
    where = loaded.where("model.path")
    config = read_config(recipe.model.path, where=where)
    values, directory = config.values, config.directory
    if recipe.model.init != "random" and directory and list_weight_files(directory).files:
        require_tokenizer(directory, recipe.data.tokenizer, where)
    tokenizer, sources = open_sources(
        recipe.data,
        stage=stage,
        model_path=recipe.model.path,
        progress=progress,
        vocab_limit=_vocabulary(values),
        model_config=values,
    )
    limits = max(1, max_records // len(sources)), MAX_BYTES // len(sources), num_examples
    samples = [
        replace(_sample(source, tokenizer.hf, *limits), weight=weight)
        for source, (_, weight) in zip(sources, parts, strict=True)
    ]
    own = typed.model.path if has_tokenizer(recipe.model.path) else None
    name = typed.data.tokenizer or own
    return DataSample(stage, tuple(samples), str(tokenizer.directory), name, tokenizer.notes)


def _vocabulary(values: Mapping[str, Any]) -> int | None:
    inner = values.get("text_config")
    size = values.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else None


def _sample(source: Source, hf: Any, max_records: int, max_bytes: int, num_examples: int) -> SourceSample:
    """Encode and count records of a source until `max_records` records or `max_bytes` bytes of text are reached."""
    stage, counts = source.stage, source.counts
    tally, examples = Tally(counts), list[Example]()
    is_text = source.shape == "text"
    if is_text:  # a file is one record, of any length
        source = source.head(max_bytes)
    records = documents_of_records(source)
    num_bytes, seen = 0, 0
    # The tokenizer encodes plain text in threads, so no workers are needed.
    number = 0 if stage == "pt" else min(len(os.sched_getaffinity(0)), _MAX_PROCESSES) - 1
    with EncodingHelpers(hf, stage, counts, number) as helpers:
        while batch := list(_batch(records, min(_BATCH, max_records - seen))):
            # Here: the first records, more until there are enough examples, and batches while all workers are busy.
            if seen < _OWN_RECORDS or len(examples) < num_examples or not helpers.submit(batch):
                for unit, encoded in encoded_units(batch, hf, stage):
                    tally.add(unit, encoded, stage)
                    if len(examples) < num_examples and is_used(source, encoded):
                        examples.append(example_of(hf, source, unit, encoded))
            seen += len(batch)
            num_bytes += sum(document.num_bytes for unit in batch for document in unit)
            if seen >= max_records or num_bytes >= max_bytes:
                break
        helpers.add_to(tally)
    counts = copy.deepcopy(counts)  # copy before the next record is counted
    complete = next(records, None) is None and not (is_text and num_bytes >= max_bytes)
    return SourceSample(counts, tally.lengths, tuple(examples), complete)


def _batch(records: Iterator[list[Document]], size: int) -> Iterator[list[Document]]:
    """Yield at most `size` records, until their text reaches an eighth of `MAX_BYTES`."""
    remaining = MAX_BYTES // 8
    for _ in range(size):
        unit = next(records, None)
        if unit is None:
            return
        yield unit
        remaining -= sum(document.num_bytes for document in unit)
        if remaining <= 0:
            return
