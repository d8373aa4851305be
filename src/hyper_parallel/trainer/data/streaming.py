"""Streaming: a run packs sequences while it reads documents, for data that is endless or too large to prepare.

    documents, shuffled in blocks -> tokens -> sequences, each with the position after it -> steps

Every rank packs all sequences of a step and keeps its own slice, so a step contains the same sequences on every layout.
A checkpoint stores the position of the next token, and a checksum of all documents before it. A resumed run reads these
documents again without tokenizing them, and compares the checksum.
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

from hyper_parallel.errors import CheckpointMismatch, NoData
from hyper_parallel.trainer.data.batches import START_OVER, Batch, check_cut, check_position
from hyper_parallel.trainer.data.counts import DataCounts
from hyper_parallel.trainer.data.packing import encode, fill_row, no_target
from hyper_parallel.trainer.data.preview import LengthHistogram
from hyper_parallel.trainer.data.sequences import IGNORE_INDEX, Int64, permutation
from hyper_parallel.trainer.data.sources import Source

logger = logging.getLogger(__name__)

_BLOCK = 256
"""Documents per shuffle block."""
_CACHED_STEPS = 4
"""Number of newest steps that can be read again."""

Row = tuple[NDArray[Any], NDArray[Any], NDArray[Any], int]
"""Inputs, shifted labels and positions, [S] each, and number of tokens before the padding."""


class Place(NamedTuple):
    """Position in a stream at which the next sequence begins.

    Attributes:
        epoch: Epoch, from 0.
        document: Index of the document in the order of the epoch.
        part: Position in the document: a token index for concatenated text, a piece index for padded rows.
        checksum: Checksum of all documents of the epoch up to the end of this document's shuffle block; "": unknown.
    """

    epoch: int = 0
    document: int = 0
    part: int = 0
    checksum: str = ""

    def is_in(self, other: Place) -> bool:
        """Return whether both positions are in the same document."""
        return (self.epoch, self.document) == (other.epoch, other.document)


class Stream:
    """Endless stream of packed sequences from a data source, epoch after epoch.

    Args:
        source: Data source of stage `pt` or `sft`.
        hf: Tokenizer of transformers.
        seed: Seed of the order of documents.
        pad_id: Padding token.

    Attributes:
        lengths: Histogram of document lengths in the epoch to which `counts` refers.
        masked: Whether attention is blocked between documents of a row.
        start_over: Recipe override that starts the run without a checkpoint, for hints.
    """

    def __init__(self, source: Source, hf: Any, seed: int, pad_id: int) -> None:
        self.data, self._stage, self.seed = source.data, source.stage, seed
        self.masked = self.data.masks(self._stage)
        self._source, self._hf, self._pad = source, hf, pad_id
        self._reported: list[str] = []
        self._epoch_counts: DataCounts | None = None
        self.lengths = LengthHistogram()
        self.start_over = START_OVER

    @property
    def counts(self) -> DataCounts:
        """Counts of the records in the first complete epoch; before its end, of the records read so far."""
        return self._epoch_counts or self._source.counts

    def rows(self, start: Place) -> Iterator[tuple[Place, Row]]:
        """Yield (position after the sequence, sequence) for each sequence from position `start` on.

        Raises:
            NoData: HP602 when a record is invalid, or an epoch has no sequence.
            CheckpointMismatch: HP702 when the data before `start` has changed since the checkpoint.
        """
        whole = self._stage == "sft" or self.masked or not self.data.packing
        return self._documents_in_rows(start) if whole else self._pieces_of_text(start)

    def _documents(self, start: Place) -> Iterator[tuple[Place, Sequence[int], Sequence[bool]]]:
        """Yield (position, token ids, target mask) of documents from `start` on, without end, and count them."""
        for epoch in itertools.count(start.epoch):
            number, digest = 0, xxh3_128()
            if self._epoch_counts is None:
                self.lengths.counts.clear()
            documents = self._source.documents()
            while block := list(itertools.islice(documents, _BLOCK)):
                first = start.document - number if epoch == start.epoch else 0
                order = np.arange(len(block))
                if self.data.shuffle:
                    order = permutation(len(block), self.seed, 3, epoch, number)
                chosen = [block[i] for i in order[max(first, 0) :]]
                number += len(block)
                for document in block:
                    digest.update(document.content)
                checksum = digest.hexdigest()
                if first > 0:  # the interrupted run has already counted the skipped documents
                    self._source.counts.restart(len(chosen))
                if epoch == start.epoch and start.document < number:
                    self._check_skipped(start, checksum)
                    start = start._replace(checksum="")
                encoded = encode(chosen, self._hf, self._stage)
                for index, (document, (ids, learn)) in enumerate(zip(chosen, encoded, strict=True)):
                    self._source.counts.add([document], [(ids, learn)], self._stage)
                    if self._epoch_counts is None:
                        self.lengths.add(len(ids))
                    document_number = number - len(chosen) + index
                    yield Place(epoch, document_number, 0, checksum), ids, learn
                self._report(number)
            whole = epoch > start.epoch or (start.document, start.part) == (0, 0)
            if number == 0 or (whole and not self._source.counts.used):
                raise self._empty()
            if whole and self._epoch_counts is None:
                self._epoch_counts = DataCounts.from_dict(self._source.counts.as_dict())
            if epoch == start.epoch:
                self._report()
                self._check_skipped(start, f"{digest.hexdigest()} of {number} documents")

    def _check_skipped(self, start: Place, checksum: str) -> None:
        if start.checksum not in ("", checksum):
            place = f"epoch {start.epoch}, document {start.document}"
            raise CheckpointMismatch(
                "the streamed data has changed before the position at which the run resumes",
                where=f"data.source: {self.data.source}, {place}",
                got=f"checksum {checksum}",
                allowed=f"checksum {start.checksum}",
                hint=f"restore the data, or train without this checkpoint: {self.start_over}",
            )

    def _report(self, number: int | None = None) -> None:
        """Log notes on truncated or dropped text on rank 0, after 256, 512, 1,024, ... documents and one epoch."""
        blocks = 0 if number is None else number // _BLOCK
        notes = self.counts.losses
        if blocks & (blocks - 1) or notes == self._reported or os.environ.get("RANK", "0") != "0":
            return
        self._reported = notes
        for note in notes:
            logger.warning("%s: of %d records read: %s", self.data.source, self.counts.read, note)

    def _empty(self) -> NoData:
        problem = "the stream has no sequence to learn from"
        if self._stage != "pt" and self.counts.dropped:
            return no_target(problem, self.counts, self.data)
        got = f"{self.counts.read} records read"
        return NoData(problem, where=f"data.source: {self.data.source}", got=got)

    def _pieces_of_text(self, start: Place) -> Iterator[tuple[Place, Row]]:
        """Yield sequences from the concatenated tokens of all documents; see plain text in `PackedSequences`.

        The remainder of an epoch that is shorter than a sequence continues with the next epoch.
        """
        size = self.data.seq_len
        tokens, starts = np.zeros(0, np.int64), list[tuple[int, Place]]()

        def place(index: int) -> Place:
            first, begun = next(s for s in reversed(starts) if s[0] <= index)
            return begun._replace(part=begun.part + index - first)

        for document, ids, _ in self._documents(start):
            part = start.part if document.is_in(start) else 0
            starts.append((len(tokens), document._replace(part=part)))
            tokens = np.concatenate([tokens, np.asarray(ids[part:], np.int64)])
            count = max(0, (len(tokens) - 1) // size)
            for begin in range(0, count * size, size):
                window = tokens[begin : begin + size + 1]
                yield place(begin + size), (window[:-1], window[1:], np.arange(size), size)
            done = count * size
            starts = [(0, place(done)), *((s - done, p) for s, p in starts if s > done)]
            tokens = tokens[done:]

    def _documents_in_rows(self, start: Place) -> Iterator[tuple[Place, Row]]:
        """Yield padded rows, each with one conversation or piece of a text; with `data.packing`, with as many as fit.

        Conversations and pieces without a target are dropped.
        """
        size, row, used = self.data.seq_len, list[tuple[Any, Any]](), 0
        last = start.epoch
        for document, ids, learn in self._documents(start):
            if document.epoch > last + 1:
                raise self._empty()
            ends = range(0, len(ids) - 1, size) if self._stage == "pt" else range(1)
            for part, begin in enumerate(ends):
                tokens = np.asarray(ids[begin : begin + size + 1], np.int64)
                targets = tokens[1:]
                if self._stage == "sft":
                    targets = np.where(learn[1 : size + 1], targets, IGNORE_INDEX)
                earlier = document.is_in(start) and part < start.part
                if earlier or not (targets != IGNORE_INDEX).any():
                    continue
                if row and (not self.data.packing or used + len(targets) > size):
                    yield document._replace(part=part), fill_row(row, size, self._pad)
                    row, used = [], 0
                row.append((tokens[:-1], targets))
                used, last = used + len(targets), document.epoch


class StreamBatches:
    """Loader of the steps of a run from a stream, with the methods of `Batches` that training and checkpoints need.

    Args:
        stream: Stream that yields the sequences.
        sequences_per_step: Number of sequences of one step over all data-parallel ranks.
        fingerprint: Hash of the settings that determine the sequences, stored in checkpoints.
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
            assert step >= self._next, "a stream cannot be read backwards"
            read = list(itertools.islice(self._rows, self.sequences_per_step))
            self._place = read[-1][0]
            self._steps[self._next] = [row for _, row in read], self._place
            self._steps.pop(self._next - _CACHED_STEPS, None)
            self._next += 1
        return self._steps[step][0]

    def num_valid(self, step: int) -> int:
        """Return the number of labels with loss in a step over all ranks; needs no communication."""
        return sum(int((labels != IGNORE_INDEX).sum()) for _, labels, *_ in self._step(step))

    def microbatches(self, step: int, dp_rank: int, dp_size: int, microbatch: int, accumulation: int) -> list[Batch]:
        """Return the `accumulation` microbatches, [microbatch, S] each, of one data-parallel rank in a step.

        Raises:
            BatchMismatch: HP308 for sizes whose product is not `sequences_per_step`, or a `dp_rank` out of range.
            HyperParallelError: Errors of `Stream.rows`.
        """
        check_cut(self.sequences_per_step, dp_rank, dp_size, microbatch, accumulation)
        rows = self._step(step)
        first = dp_rank * accumulation * microbatch
        batches = []
        for begin in range(first, first + accumulation * microbatch, microbatch):
            inputs, labels, positions, num_real = (
                np.stack(part).astype(np.int64) for part in zip(*rows[begin : begin + microbatch], strict=True)
            )
            valid = int((labels != IGNORE_INDEX).sum())
            position_ids: Int64 | None = positions if self.stream.masked else None
            batches.append(Batch(inputs, labels, valid, position_ids, num_real))
        return batches

    def sequences_seen(self, step: int) -> int:
        """Return the number of sequences read before a step, including those of the runs that this run resumes."""
        return self._origin + step * self.sequences_per_step

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the data position before a step, one of the newest `_CACHED_STEPS` steps, as JSON values."""
        return {
            "step": step,
            "place": list(self._steps[step - 1][1] if step - 1 in self._steps else self._place),
            "sequences_seen": self.sequences_seen(step),
            "sequences_per_step": self.sequences_per_step,
            "fingerprint": self.fingerprint,
            "seed": self.stream.seed,
            "shuffle": self.stream.data.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any], start_over: str = START_OVER) -> None:
        """Continue after the sequences read before the checkpoint; `sequences_per_step` may have changed since.

        `start_over` is the recipe override that starts the run without the checkpoint, for the hint of the error.

        Raises:
            CheckpointMismatch: HP702 when settings or order of the data differ. `Stream.rows` checks the data itself.
        """
        check_position(state, self.state_dict(0), ("fingerprint", "seed", "shuffle"), start_over)
        self.stream.start_over = start_over
        self._place, self._next = Place(*state["place"]), state["step"]
        self._origin = state["sequences_seen"] - state["step"] * self.sequences_per_step
