"""Streaming: sequences that are made while a run reads them, from data that is endless or too large to prepare.

    documents, shuffled in blocks -> tokens -> sequences, each with the place behind it -> steps

Every rank makes all sequences of a step and takes its part, so a step's content is the same for every layout. A
checkpoint has the place of the next token, with a checksum of all documents up to there; reading on from there passes
over the same documents, compares the checksum, and tokenises nothing again but one block of documents.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from hyper_parallel.config import Data
from hyper_parallel.errors import CheckpointMismatch, NoData
from hyper_parallel.trainer.data.batches import (
    IGNORE_INDEX,
    Batch,
    Int64,
    check_cut,
    check_position,
)
from hyper_parallel.trainer.data.counts import DataCounts
from hyper_parallel.trainer.data.packing import encode, fill_row, no_target
from hyper_parallel.trainer.data.preview import LengthHistogram
from hyper_parallel.trainer.data.sources import Source

logger = logging.getLogger(__name__)

_BLOCK = 256  # documents that are shuffled together, and all that a resumed run tokenises twice
_KEPT = 4  # steps that can be asked for again

Row = tuple[NDArray[Any], NDArray[Any], NDArray[Any], int]
"""Inputs, shifted labels and positions, [S] each."""


class Place(NamedTuple):
    """Where the next sequence begins: epoch, document in its order, and token or piece of the document.

    With the checksum of all documents of the epoch up to the end of the block of this one; empty: it is not known.
    """

    epoch: int = 0
    document: int = 0
    part: int = 0
    checksum: str = ""

    def is_in(self, other: Place) -> bool:
        """Whether the two are in one document."""
        return (self.epoch, self.document) == (other.epoch, other.document)


class Stream:
    """The endless sequences of a source, epoch after epoch.

    Args:
        source: What to read.
        hf: Tokenizer of transformers.
        data: Section `data` of the recipe.
        stage: `pt` or `sft`.
        seed: Seed of the order of the documents.
        pad_id: Token of the padding.
    """

    def __init__(
        self, source: Source, hf: Any, data: Data, stage: str, seed: int, pad_id: int
    ) -> None:
        self.data, self.seed, self.masked = data, seed, data.masks(stage)
        self._source, self._hf, self._stage, self._pad = source, hf, stage, pad_id
        self._reported: list[str] = []
        self._epoch_counts: DataCounts | None = None
        self.lengths = LengthHistogram()

    @property
    def counts(self) -> DataCounts:
        """Counts of the first whole epoch, or, before its end, of the records up to the last one that was read."""
        return self._epoch_counts or self._source.counts

    def rows(self, at: Place) -> Iterator[tuple[Place, Row]]:
        """Sequences from a place on, each with the place of the next one."""
        whole = self._stage == "sft" or self.masked or not self.data.packing
        return self._documents_in_rows(at) if whole else self._pieces_of_text(at)

    def _documents(self, at: Place) -> Iterator[tuple[Place, Sequence[int], Sequence[bool]]]:
        for epoch in itertools.count(at.epoch):
            number, digest = 0, xxh3_128()
            if self._epoch_counts is None:
                self.lengths.counts.clear()
            documents = self._source.documents()
            while block := list(itertools.islice(documents, _BLOCK)):
                first = at.document - number if epoch == at.epoch else 0
                order = np.arange(len(block))
                if self.data.shuffle:
                    keys = np.random.PCG64([self.seed, 3, epoch, number]).random_raw(len(block))
                    order = np.argsort(keys, kind="stable")
                chosen = [block[i] for i in order[max(first, 0) :]]
                number += len(block)
                for document in block:
                    digest.update(document.content)
                checksum = digest.hexdigest()
                if first > 0:  # the run that stopped had counted them
                    self._source.counts.restart(len(chosen))
                if epoch == at.epoch and at.document < number:
                    self._check_passed(at, checksum)
                    at = at._replace(checksum="")
                encoded = encode(chosen, self._hf, self._stage)
                for index, (document, (ids, learn)) in enumerate(zip(chosen, encoded, strict=True)):
                    self._source.counts.add([document], [(ids, learn)], self._stage)
                    if self._epoch_counts is None:
                        self.lengths.add(len(ids))
                    document_number = number - len(chosen) + index
                    yield Place(epoch, document_number, 0, checksum), ids, learn
                self._report(number)
            whole = epoch > at.epoch or (at.document, at.part) == (0, 0)
            if number == 0 or (whole and not self._source.counts.used):
                raise self._empty()
            if whole and self._epoch_counts is None:
                self._epoch_counts = DataCounts.from_dict(self._source.counts.as_dict())
            if epoch == at.epoch:
                self._report()
                self._check_passed(at, f"{digest.hexdigest()} of {number} documents")

    def _check_passed(self, at: Place, checksum: str) -> None:
        """Refuse data that is not what the run had read up to the place where it continues.

        Raises:
            CheckpointMismatch: HP702.
        """
        if at.checksum not in ("", checksum):
            raise CheckpointMismatch(
                "the streamed data has changed before the place where the run continues",
                where=f"data.source: {self._source.name}, epoch {at.epoch}, document {at.document}",
                got=f"checksum {checksum}",
                allowed=f"checksum {at.checksum}",
                hint="restore the data, or train from the start with `checkpoint.resume=never`",
            )

    def _report(self, number: int | None = None) -> None:
        """Log what is cut and left out: after 256, 512, 1,024, ... documents, and at the end of the epoch."""
        blocks = 0 if number is None else number // _BLOCK
        notes = self.counts.losses
        if blocks & (blocks - 1) or notes == self._reported or os.environ.get("RANK", "0") != "0":
            return
        self._reported = notes
        for note in notes:
            logger.warning("%s: of %d records read: %s", self._source.name, self.counts.read, note)

    def _empty(self) -> NoData:
        what = "the stream has no sequence to learn from"
        if self._stage != "pt" and self.counts.dropped:
            return no_target(what, self.counts, self.data)
        return NoData(what, where=f"data.source: {self._source.name}")

    def _pieces_of_text(self, at: Place) -> Iterator[tuple[Place, Row]]:
        size = self.data.seq_len
        tokens, starts = np.zeros(0, np.int64), list[tuple[int, Place]]()

        def place(index: int) -> Place:
            start, found = next(s for s in reversed(starts) if s[0] <= index)
            return found._replace(part=found.part + index - start)

        for found, ids, _ in self._documents(at):
            part = at.part if found.is_in(at) else 0
            starts.append((len(tokens), found._replace(part=part)))
            tokens = np.concatenate([tokens, np.asarray(ids[part:], np.int64)])
            count = max(0, (len(tokens) - 1) // size)
            for begin in range(0, count * size, size):
                window = tokens[begin : begin + size + 1]
                yield place(begin + size), (window[:-1], window[1:], np.arange(size), size)
            done = count * size
            starts = [(0, place(done)), *((s - done, p) for s, p in starts if s > done)]
            tokens = tokens[done:]

    def _documents_in_rows(self, at: Place) -> Iterator[tuple[Place, Row]]:
        size, row, used = self.data.seq_len, list[tuple[Any, Any]](), 0
        last = at.epoch
        for found, ids, learn in self._documents(at):
            if found.epoch > last + 1:
                raise self._empty()
            ends = range(0, len(ids) - 1, size) if self._stage == "pt" else range(1)
            for part, begin in enumerate(ends):
                tokens = np.asarray(ids[begin : begin + size + 1], np.int64)
                targets = tokens[1:]
                if self._stage == "sft":
                    targets = np.where(learn[1 : size + 1], targets, IGNORE_INDEX)
                earlier = found.is_in(at) and part < at.part
                if earlier or not (targets != IGNORE_INDEX).any():
                    continue
                if row and (not self.data.packing or used + len(targets) > size):
                    yield found._replace(part=part), fill_row(row, size, self._pad)
                    row, used = [], 0
                row.append((tokens[:-1], targets))
                used, last = used + len(targets), found.epoch


class StreamBatches:
    """Steps of a stream; what `Batches` is for packed sequences.

    Args:
        stream: What to read.
        sequences_per_step: Sequences of one step over all data-parallel ranks.
        fingerprint: Hash of what decides the sequences, kept in checkpoints.
    """

    def __init__(self, stream: Stream, sequences_per_step: int, fingerprint: str) -> None:
        self.stream, self.sequences_per_step = stream, sequences_per_step
        self.fingerprint = fingerprint
        self._place, self._next, self._origin = Place(), 0, 0
        self._rows: Iterator[tuple[Place, Row]] | None = None
        self._steps: dict[int, tuple[list[Row], Place]] = {}

    def _step(self, step: int) -> list[Row]:
        if self._rows is None:
            self._rows = self.stream.rows(self._place)
        while step not in self._steps:
            assert step >= self._next, "a stream is not read backwards"
            read = list(itertools.islice(self._rows, self.sequences_per_step))
            self._place = read[-1][0]
            self._steps[self._next] = [row for _, row in read], self._place
            self._steps.pop(self._next - _KEPT, None)
            self._next += 1
        return self._steps[step][0]

    def num_valid(self, step: int) -> int:
        """Labels with loss in a step over all ranks; every rank knows it without communication."""
        return sum(int((labels != IGNORE_INDEX).sum()) for _, labels, *_ in self._step(step))

    def microbatches(
        self, step: int, dp_rank: int, dp_size: int, microbatch: int, accumulation: int
    ) -> list[Batch]:
        """As `Batches.microbatches`."""
        check_cut(self.sequences_per_step, dp_rank, dp_size, microbatch, accumulation)
        rows = self._step(step)
        first = dp_rank * accumulation * microbatch
        batches = []
        for begin in range(first, first + accumulation * microbatch, microbatch):
            inputs, labels, positions, num_real = (
                np.stack(part).astype(np.int64)
                for part in zip(*rows[begin : begin + microbatch], strict=True)
            )
            valid = int((labels != IGNORE_INDEX).sum())
            kept: Int64 | None = positions if self.stream.masked else None
            batches.append(Batch(inputs, labels, valid, kept, num_real))
        return batches

    def sequences_seen(self, step: int) -> int:
        """Sequences read before a step, those of a resumed run's earlier batch sizes included."""
        return self._origin + step * self.sequences_per_step

    def state_dict(self, step: int) -> dict[str, Any]:
        """The place before a step, which is the last one read or one of the few before it."""
        return {
            "step": step,
            "place": list(self._steps[step - 1][1] if step - 1 in self._steps else self._place),
            "sequences_seen": self.sequences_seen(step),
            "sequences_per_step": self.sequences_per_step,
            "fingerprint": self.fingerprint,
            "seed": self.stream.seed,
            "shuffle": self.stream.data.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a checkpoint stopped; tokens per step may change.

        Raises:
            CheckpointMismatch: HP702 when the data or its order differ.
        """
        check_position(state, self.state_dict(0), ("fingerprint", "seed", "shuffle"))
        self._place, self._next = Place(*state["place"]), state["step"]
        self._origin = state["sequences_seen"] - state["step"] * self.sequences_per_step
