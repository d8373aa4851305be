"""The global order of packed sequences, and the slice of a step that one data-parallel rank reads.

The order is a function of the seed and the epoch alone. Step k takes the next `sequences_per_step` sequences of it;
rank and microbatch only cut that list, so a step's content is the same for every layout with equal tokens per step:

    step k        | s0 s1 s2 s3 s4 s5 s6 s7 |
    dp 2, mb 2    | [s0 s1][s2 s3] | [s4 s5][s6 s7] |
    dp 4, mb 1    | [s0][s1] | [s2][s3] | [s4][s5] | [s6][s7] |
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hyper_parallel.errors import BatchMismatch, CheckpointMismatch, NoData
from hyper_parallel.trainer.data._batch import Batch
from hyper_parallel.trainer.data._sequences import (
    IGNORE_INDEX,
    Int64,
    JoinedSequences,
    PackedSequences,
)

__all__ = ["IGNORE_INDEX", "Batch", "Batches", "Int64", "JoinedSequences", "PackedSequences"]

logger = logging.getLogger(__name__)

_BLOCK = 1024  # sequences of a mixture whose shares are exact to one


def check_cut(
    sequences_per_step: int, dp_rank: int, dp_size: int, microbatch: int, accumulation: int
) -> None:
    """Raise HP308 when the three sizes do not multiply to the sequences of a step."""
    size = dp_size * microbatch * accumulation
    if size != sequences_per_step or not 0 <= dp_rank < dp_size:
        raise BatchMismatch(
            "data ranks x microbatch x accumulation must be the sequences of a step",
            got=f"{dp_size} x {microbatch} x {accumulation} = {size}, rank {dp_rank}",
            allowed=sequences_per_step,
        )


def check_position(state: dict[str, Any], mine: dict[str, Any], order: tuple[str, ...]) -> None:
    """Raise HP702 when a checkpoint's place is one in other data; `order` names what must be equal."""
    changed = [k for k in order if state.get(k) != mine[k]]
    if changed:
        raise CheckpointMismatch(
            "the checkpoint was written on other data or another order, so its position means nothing here",
            where=", ".join(changed),
            got=", ".join(f"{k}={mine[k]}" for k in changed),
            allowed=", ".join(f"{k}={state.get(k)}" for k in changed),
            hint="checkpoint.resume=never",
        )


class Batches:
    """Deterministic order over packed sequences, cut into steps.

    Args:
        sequences: What to read.
        sequences_per_step: Sequences of one step over all data-parallel ranks.
        seed: Seed of the order.
        shuffle: False: the order on disk, in every epoch.
        tail: What happens when an epoch ends inside a step. `wrap`: the step goes on with the next epoch (training).
            `pad`: the step is filled with dummy rows without labels and the next step starts the next epoch
            (evaluation: every sequence exactly once, the same number of microbatches on every rank).
        limit: Use so many sequences, spread evenly over those on disk; None: all.
        fingerprint: Hash of the data, kept in checkpoints.
        weights: Shares of the sources of `JoinedSequences`, each of which is read at its own pace; none: all sequences
            are read equally often.
        repeats: Every sequence comes so many times in a row; a divisor of `sequences_per_step`.
        iterations: So many steps in a row read the same sequences.
        together: So many neighbours on disk stay neighbours, and count as one sequence of `num_sequences`; a divisor
            of `sequences_per_step` too.

    Raises:
        NoData: HP602 when there is no sequence.
    """

    def __init__(
        self,
        sequences: PackedSequences | JoinedSequences,
        *,
        sequences_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
        tail: Literal["wrap", "pad"] = "wrap",
        limit: int | None = None,
        fingerprint: str = "",
        weights: Sequence[float] = (),
        repeats: int = 1,
        iterations: int = 1,
        together: int = 1,
    ) -> None:
        if sequences_per_step < 1:
            what = "a step must hold at least one sequence"
            raise BatchMismatch(what, got=sequences_per_step, allowed="1 or more")
        self.sequences = sequences
        self.sequences_per_step = sequences_per_step
        self._repeats, self._iterations, self._together = repeats, iterations, together
        self.seed = seed
        self.shuffle = shuffle
        self.tail = tail
        self.fingerprint = fingerprint
        count = len(sequences) // together
        self.num_sequences = count if limit is None else min(limit, count)
        if self.num_sequences == 0:
            raise NoData("there is no sequence to read", where=f"{sequences.split} data")
        # A limit takes sequences spread over the whole text, not the first ones: those may be one document.
        every = np.arange(self.num_sequences, dtype=np.int64)
        self._picked = every * count // self.num_sequences
        self._origin = 0
        self._order: tuple[int, Int64] = (-1, np.zeros(0, np.int64))
        self._shares = np.asarray(weights, np.float64) / sum(weights) if weights else None
        # Sequences of each source before every block of a mixture.
        self._before = [np.zeros(len(weights), np.int64)]

    @property
    def unit(self) -> int:
        """Rows of a step for each of `num_sequences`."""
        return self._repeats * self._together

    @property
    def steps_per_epoch(self) -> int:
        """Steps that visit every sequence at least once, counted from the start of an epoch."""
        return -(-self.num_sequences * self.unit // self.sequences_per_step)

    def step_batch(self, step: int) -> Int64:
        """Indices of the sequences of a step over all ranks, [sequences_per_step]; -1 is a dummy row."""
        size = self.sequences_per_step
        if self.tail == "pad":
            epoch, within = divmod(step, self.steps_per_epoch)
            part = self._rows(self._epoch(epoch))[within * size : (within + 1) * size]
            return np.concatenate([part, np.full(size - len(part), -1, np.int64)])
        at = self.sequences_seen(step)
        at, end = at // self.unit, (at + size) // self.unit
        parts = []
        while at < end and self._shares is not None:
            block, within = divmod(at, _BLOCK)
            parts.append(self._mixed(block)[within : within + end - at])
            at += len(parts[-1])
        while at < end:
            epoch, within = divmod(at, self.num_sequences)
            parts.append(self._epoch(epoch)[within : within + end - at])
            at += len(parts[-1])
        return self._rows(np.concatenate(parts))

    def _rows(self, sequences: Int64) -> Int64:
        """Indices of all rows of some of `num_sequences`."""
        found = sequences[:, None] * self._together + np.arange(self._together)
        return found.ravel().repeat(self._repeats)

    def _mixed(self, block: int) -> Int64:
        """The sequences of one block of a mixture: exact shares so far, in an order of the seed."""
        assert self._shares is not None
        assert isinstance(self.sequences, JoinedSequences)
        while len(self._before) <= block + 1:
            owed = self._shares * len(self._before) * _BLOCK - self._before[-1]
            counts = np.maximum(np.floor(owed), 0).astype(np.int64)
            while (missing := _BLOCK - counts.sum()) != 0:
                counts[np.argmax(owed - counts) if missing > 0 else np.argmax(counts)] += np.sign(
                    missing
                )
            self._before.append(self._before[-1] + counts)
        first, last = self._before[block], self._before[block + 1]
        keys = np.random.PCG64([self.seed, 2, block]).random_raw(_BLOCK)
        sources = np.repeat(np.arange(len(first)), last - first)[np.argsort(keys, kind="stable")]
        found = np.empty(_BLOCK, np.int64)
        for source, part in enumerate(self.sequences.parts):
            count = len(part) // self._together
            epochs, inside = np.divmod(np.arange(first[source], last[source]), count)
            for epoch in np.unique(epochs) if self.shuffle else ():
                keys = np.random.PCG64([self.seed, 0, int(epoch), source]).random_raw(count)
                order = np.argsort(keys, kind="stable")
                inside[epochs == epoch] = order[inside[epochs == epoch]]
            found[sources == source] = self.sequences.starts[source] // self._together + inside
        return found

    def _epoch(self, epoch: int) -> Int64:
        if not self.shuffle:
            return self._picked
        if self._order[0] != epoch:
            # Raw bits of PCG64 are fixed for ever; numpy may change how `permutation` draws.
            keys = np.random.PCG64([self.seed, 0, epoch]).random_raw(self.num_sequences)
            self._order = (epoch, self._picked[np.argsort(keys, kind="stable")])
        return self._order[1]

    def num_valid(self, step: int) -> int:
        """Labels with loss in a step over all ranks; every rank knows it without communication."""
        return self.sequences.num_valid(self.step_batch(step))

    def microbatches(
        self, step: int, dp_rank: int, dp_size: int, microbatch: int, accumulation: int
    ) -> list[Batch]:
        """The `accumulation` batches of [microbatch, S] of one data-parallel rank in a step, counted from 0.

        Raises:
            BatchMismatch: HP308 when the three sizes do not multiply to `sequences_per_step`.
        """
        check_cut(self.sequences_per_step, dp_rank, dp_size, microbatch, accumulation)
        mine = self.step_batch(step).reshape(dp_size, accumulation, microbatch)[dp_rank]
        read = self.sequences
        return [
            Batch(*read.read(i), read.num_valid(i), read.positions(i), read.num_real(i))
            for i in mine
        ]

    def sequences_seen(self, step: int) -> int:
        """Sequences read before a step, those of a resumed run's earlier batch sizes included."""
        return self._origin + step // self._iterations * self.sequences_per_step

    def state_dict(self, step: int) -> dict[str, Any]:
        """The data position before a step, for a checkpoint: plain values, the same on every rank and layout."""
        return {
            "step": step,
            "sequences_seen": self.sequences_seen(step),
            "sequences_per_step": self.sequences_per_step,
            "num_sequences": self.num_sequences,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a checkpoint stopped: the step after it reads the sequences that would have come next.

        Tokens per step may change; the data and its order may not.

        Raises:
            CheckpointMismatch: HP702 when the data or its order differ.
        """
        order = ("fingerprint", "num_sequences", "seed", "shuffle")
        check_position(state, self.state_dict(0), order)
        if self.tail == "pad":
            return
        if state["sequences_per_step"] != self.sequences_per_step:
            logger.warning(
                "sequences per step changed from %d to %d; the data goes on after the %d sequences already seen",
                state["sequences_per_step"],
                self.sequences_per_step,
                state["sequences_seen"],
            )
        self._origin = 0
        self._origin = state["sequences_seen"] - self.sequences_seen(state["step"])
