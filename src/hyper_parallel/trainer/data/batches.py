"""Global order of packed sequences, and the slice of a step that one data-parallel rank reads.

The order depends only on the seed and the epoch. Step k takes the next `sequences_per_step` sequences. Ranks and
microbatches slice this list, so a step contains the same sequences on every layout (dp: number of ranks; mb: number of
sequences in a microbatch):

    step k        | s0 s1 s2 s3 s4 s5 s6 s7 |
    dp 2, mb 2    | [s0 s1][s2 s3] | [s4 s5][s6 s7] |
    dp 4, mb 1    | [s0][s1] | [s2][s3] | [s4][s5] | [s6][s7] |

If `data.balance` is on, the sequences of a step are reordered for the layout before they are sliced; see `balance`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.errors import BatchMismatch, CheckpointMismatch, NoData
from hyper_parallel.trainer.data.balance import Balance, Grid, arrange
from hyper_parallel.trainer.data.media_arrays import media_arrays
from hyper_parallel.trainer.data.sequences import (
    Int64,
    JoinedSequences,
    PackedSequences,
    permutation,
)

logger = logging.getLogger(__name__)

START_OVER: Final = "checkpoint.resume=never"
"""Recipe override with which a run without `checkpoint.from_dir` starts over."""
_BLOCK = 1024
"""Groups of sequences per block of a mixture. Rounding changes the share of a source by less than 1 / 1024."""


@dataclass(frozen=True)
class Batch:
    """Microbatch of one data-parallel rank.

    Attributes:
        input_ids: [B, S] token ids.
        shift_labels: [B, S] labels: the id of the next token, or -100 at positions without loss.
        num_valid: Number of labels other than -100.
        position_ids: [B, S] positions that restart at 0 with each document; None: positions count from the row's start.
        num_real: [B] number of tokens before the padding; None: no row is padded.
        media: Arrays of images and audio, by argument name of the model's forward.
    """

    input_ids: Int64
    shift_labels: Int64
    num_valid: int
    position_ids: Int64 | None = None
    num_real: Int64 | None = None
    media: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def token_mask(self) -> NDArray[np.bool_] | None:
        """Mask [B, S], False for padding tokens; None if `num_real` is None."""
        if self.num_real is None:
            return None
        mask: NDArray[np.bool_] = np.arange(self.input_ids.shape[1]) < self.num_real[:, None]
        return mask


def check_cut(sequences_per_step: int, dp_rank: int, dp_size: int, microbatch: int, accumulation: int) -> None:
    """Raise BatchMismatch (HP308) for sizes whose product is not `sequences_per_step`, or a `dp_rank` out of range."""
    size = dp_size * microbatch * accumulation
    if size != sequences_per_step:
        raise BatchMismatch(
            "data-parallel ranks x microbatch x accumulation must equal the sequences per step",
            got=f"{dp_size} x {microbatch} x {accumulation} = {size}",
            allowed=sequences_per_step,
        )
    if not 0 <= dp_rank < dp_size:
        raise BatchMismatch(
            "a data-parallel rank is out of range",
            got=dp_rank,
            allowed=f"0 to {dp_size - 1}",
        )


def check_position(
    state: dict[str, Any], current: dict[str, Any], keys: tuple[str, ...], start_over: str = START_OVER
) -> None:
    """Raise CheckpointMismatch (HP702) if the data positions `state` (saved) and `current` differ in any of `keys`.

    The hint sets the saved seed and shuffling, if nothing else differs. Otherwise it is `start_over`, which
    starts the run without the checkpoint.
    """
    changed = [k for k in keys if state.get(k) != current[k]]
    if changed:
        recipe_keys = {"seed": "training.seed", "shuffle": "data.shuffle"}
        if all(key in recipe_keys and key in state for key in changed):
            start_over = " ".join(f"{recipe_keys[key]}={str(state[key]).lower()}" for key in changed)
        raise CheckpointMismatch(
            "the checkpoint was written with different data or data order, so its data position is not valid",
            where=", ".join(dict.fromkeys(recipe_keys.get(key, "data") for key in changed)),
            got=", ".join(f"{k}={current[k]}" for k in changed),
            allowed=", ".join(f"{k}={state.get(k)}" for k in changed),
            hint=start_over,
        )


@dataclass(frozen=True, slots=True)
class Order:
    """Order in which sequences are read; it depends only on the seed and the epoch.

    Attributes:
        seed: Seed of all permutations.
        shuffle: Whether each epoch has a different random order; False: every epoch has the order on disk.
        weights: Weight of each source in a mixture (`JoinedSequences`). Each source then repeats independently. Empty:
            every epoch reads all sequences of all sources once.
        costs: Costs by which ranks are balanced (see `balance`): (cost of an image or recording in its encoder, cost of
            each of its tokens). None: the ranks are not balanced.
    """

    seed: int = 0
    shuffle: bool = True
    weights: Sequence[float] = ()
    costs: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class StepRows:
    """Repetition and grouping of sequences in the rows of a step, for preference stages and GRPO.

    Attributes:
        repeats: Number of consecutive rows with the same sequence, such as the completions of a prompt; a divisor
            of the number of rows of a step.
        iterations: Number of consecutive steps that read the same sequences.
        group_size: Number of adjacent sequences that are never separated, such as the answers of a pair; `repeats *
            group_size` divides the number of rows of a step.
    """

    repeats: int = 1
    iterations: int = 1
    group_size: int = 1

    @property
    def unit(self) -> int:
        """Number of rows that one group of sequences takes in a step."""
        return self.repeats * self.group_size

    def expand(self, groups: Int64) -> Int64:
        """Return the indices of the sequences in `groups` (indices of groups), each repeated `repeats` times."""
        rows = groups[:, None] * self.group_size + np.arange(self.group_size)
        return rows.ravel().repeat(self.repeats)


class Batches:
    """Loader of the steps of a run from packed sequences, in a deterministic order.

    Args:
        sequences: Packed sequences of one source or several.
        sequences_per_step: Number of rows of one step over all data-parallel ranks.
        order: Order of the sequences.
        rows: Repetition and grouping of sequences in the rows of a step.
        tail: Behaviour when an epoch ends inside a step. `wrap`, for training: the step continues with the next epoch.
            `pad`, for evaluation: the step is filled with dummy rows without labels, so every sequence is read exactly
            once.
        limit: Number of sequences (or groups) to use, evenly spaced in the data; None: all. With `order.weights`,
            it changes only `num_sequences`.
        fingerprint: Hash of the data, stored in checkpoints.

    Attributes:
        num_sequences: Number of sequences, or of groups of `rows.group_size` sequences, of an epoch.

    Raises:
        NoData: HP602 when there is no sequence.
        BatchMismatch: HP308 when `sequences_per_step` is below 1.
    """

    def __init__(
        self,
        sequences: PackedSequences | JoinedSequences,
        *,
        sequences_per_step: int,
        order: Order = Order(),
        rows: StepRows = StepRows(),
        tail: Literal["wrap", "pad"] = "wrap",
        limit: int | None = None,
        fingerprint: str = "",
    ) -> None:
        if sequences_per_step < 1:
            problem = "a step must hold at least one sequence"
            raise BatchMismatch(problem, got=sequences_per_step, allowed="1 or more")
        self.sequences = sequences
        self.sequences_per_step = sequences_per_step
        self.order, self.rows, self.tail, self.fingerprint = order, rows, tail, fingerprint
        count = len(sequences) // rows.group_size
        self.num_sequences = count if limit is None else min(limit, count)
        if self.num_sequences == 0:
            raise NoData(
                f"the {'training' if sequences.split == 'train' else 'held-out'} data contains no sequence",
                where="data.source",
                hint="add data to `data.source`",
            )
        # Use sequences from all of the data: the first ones may all belong to one document.
        every = np.arange(self.num_sequences, dtype=np.int64)
        self._picked = every * count // self.num_sequences
        self._origin = 0
        self._shuffled: tuple[int, Int64] = (-1, np.zeros(0, np.int64))
        self._arranged: tuple[tuple[int, Grid] | None, Int64] = (None, self._picked)
        weights = order.weights
        self._shares = np.asarray(weights, np.float64) / sum(weights) if weights else None
        # For each block of a mixture: number of sequences that earlier blocks have read from each source.
        self._before = [np.zeros(len(weights), np.int64)]

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch, rounded up; the steps of `rows.iterations` count as one."""
        return -(-self.num_sequences * self.rows.unit // self.sequences_per_step)

    def step_batch(self, step: int) -> Int64:
        """Return [sequences_per_step] indices of the sequences of a step, over all ranks; -1 is a dummy row."""
        size = self.sequences_per_step
        if self.tail == "pad":
            epoch, within = divmod(step, self.steps_per_epoch)
            part = self.rows.expand(self._epoch(epoch))[within * size : (within + 1) * size]
            return np.concatenate([part, np.full(size - len(part), -1, np.int64)])
        seen = self.sequences_seen(step)
        position, end = seen // self.rows.unit, (seen + size) // self.rows.unit
        length, read = self.num_sequences, self._epoch
        if self._shares is not None:
            length, read = _BLOCK, self._mixture_block
        parts = []
        while position < end:
            block, within = divmod(position, length)
            parts.append(read(block)[within : within + end - position])
            position += len(parts[-1])
        return self.rows.expand(np.concatenate(parts))

    def _mixture_block(self, block: int) -> Int64:
        """Return [_BLOCK] indices of groups of sequences: block number `block` of a mixture of sources.

        After each block, the number of sequences read from a source is its share of all sequences read so far, rounded
        up or down. Within a block, the order of sources is random.
        """
        assert self._shares is not None
        assert isinstance(self.sequences, JoinedSequences)
        while len(self._before) <= block + 1:
            owed = self._shares * len(self._before) * _BLOCK - self._before[-1]
            counts = np.maximum(np.floor(owed), 0).astype(np.int64)
            while (missing := _BLOCK - counts.sum()) != 0:
                counts[np.argmax(owed - counts) if missing > 0 else np.argmax(counts)] += np.sign(missing)
            self._before.append(self._before[-1] + counts)
        first, last = self._before[block], self._before[block + 1]
        mixed = permutation(_BLOCK, self.order.seed, 2, block)
        sources = np.repeat(np.arange(len(first)), last - first)[mixed]
        chosen = np.empty(_BLOCK, np.int64)
        for source, part in enumerate(self.sequences.parts):
            count = len(part) // self.rows.group_size
            epochs, local = np.divmod(np.arange(first[source], last[source]), count)
            for epoch in np.unique(epochs) if self.order.shuffle else ():
                order = permutation(count, self.order.seed, 0, int(epoch), source)
                local[epochs == epoch] = order[local[epochs == epoch]]
            chosen[sources == source] = self.sequences.starts[source] // self.rows.group_size + local
        return chosen

    def _epoch(self, epoch: int) -> Int64:
        if not self.order.shuffle:
            return self._picked
        if self._shuffled[0] != epoch:
            order = permutation(self.num_sequences, self.order.seed, 0, epoch)
            self._shuffled = (epoch, self._picked[order])
        return self._shuffled[1]

    def num_valid(self, step: int) -> int:
        """Return the number of labels with loss in a step over all ranks; needs no communication."""
        return self.sequences.num_valid(self.step_batch(step))

    def microbatches(
        self,
        step: int,
        dp_rank: int,
        dp_size: int,
        microbatch: int,
        accumulation: int,
        grid: Grid | None = None,
    ) -> list[Batch]:
        """Return the microbatches, [microbatch, S] each, of one data-parallel rank in a step.

        Args:
            step: Step, counted from 0.
            dp_rank: Data-parallel rank.
            dp_size: Number of data-parallel ranks.
            microbatch: Number of sequences of a microbatch.
            accumulation: Number of microbatches of a rank in a step.
            grid: Assignment of microbatches to ranks, for load balancing by `order.costs`; None: data order.

        Raises:
            BatchMismatch: HP308 for sizes whose product is not `sequences_per_step`, or a `dp_rank` out of range.
            HyperParallelError: Errors of `media_arrays`.
        """
        check_cut(self.sequences_per_step, dp_rank, dp_size, microbatch, accumulation)
        indices = self.step_batch(step) if grid is None else self._arrange(step, grid)
        local = indices.reshape(dp_size, accumulation, microbatch)[dp_rank]
        return [self._batch(i) for i in local]

    def _arrange(self, step: int, grid: Grid) -> Int64:
        if self._arranged[0] != (step, grid):
            indices = self.step_batch(step)
            self._arranged = (step, grid), indices[arrange(self._costs(indices), grid)]
        return self._arranged[1]

    def balance(self, step: int, grid: Grid) -> Balance:
        """Return the load imbalance of step `step`, from 0, in data order and balanced order; needs `order.costs`."""
        indices = self.step_batch(step)
        tokens = int(self.sequences.media_costs(indices)[:, 1].sum())
        costs = self._costs(indices), self._costs(self._arrange(step, grid))
        return Balance.of(tokens, *costs, grid)

    def _costs(self, indices: Int64) -> Int64:
        assert self.order.costs is not None
        return self.sequences.media_costs(indices) @ np.array(self.order.costs, np.int64)

    def _batch(self, indices: Int64) -> Batch:
        source = self.sequences
        inputs, labels = source.read(indices)
        media = media_arrays(source.media(indices), inputs) if source.has_media else {}
        sizes = source.num_valid(indices), source.positions(indices), source.num_real(indices)
        return Batch(inputs, labels, *sizes, media)

    def sequences_seen(self, step: int) -> int:
        """Return the number of rows read before a step, including those of the runs that this run resumes.

        Rows that several steps share (`StepRows.iterations`) count once.
        """
        return self._origin + step // self.rows.iterations * self.sequences_per_step

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the data position before a step as JSON values; it does not depend on the layout."""
        return {
            "step": step,
            "sequences_seen": self.sequences_seen(step),
            "sequences_per_step": self.sequences_per_step,
            "num_sequences": self.num_sequences,
            "fingerprint": self.fingerprint,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any], start_over: str = START_OVER) -> None:
        """Continue after the sequences read before the checkpoint; `sequences_per_step` may have changed since.

        With `tail` `pad`, only check the data and its order. `start_over` is the recipe override that starts
        the run without the checkpoint, for the hint of the error.

        Raises:
            CheckpointMismatch: HP702 when the data or its order differ.
        """
        order = ("fingerprint", "num_sequences", "seed", "shuffle")
        check_position(state, self.state_dict(0), order, start_over)
        if self.tail == "pad":
            return
        if state["sequences_per_step"] != self.sequences_per_step:
            logger.warning(
                "sequences per step changed from %d to %d; reading continues after the %d sequences already seen",
                state["sequences_per_step"],
                self.sequences_per_step,
                state["sequences_seen"],
            )
        self._origin = 0
        self._origin = state["sequences_seen"] - self.sequences_seen(state["step"])
