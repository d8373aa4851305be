"""Candidates: many strategies as columns of numbers, so that all of them are priced at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.ir import Strategy, Workload

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Strategies with their batch numbers; every field is a column of the same length, as float64.

    Attributes:
        pp: Pipeline stages.
        dp_replicate: Replicas.
        dp_shard: FSDP ranks.
        cp: Context-parallel ranks.
        tp: Tensor-parallel ranks, 1-D with sequence parallelism.
        ep: Expert-parallel ranks.
        microbatch: Sequences per microbatch and data-parallel rank.
        accumulation: Microbatches per step.
        recompute: 1 where the layers are recomputed in backward.
        reshard: 1 where gathered parameters are freed after forward.
    """

    pp: Array
    dp_replicate: Array
    dp_shard: Array
    cp: Array
    tp: Array
    ep: Array
    microbatch: Array
    accumulation: Array
    recompute: Array
    reshard: Array

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]] | NDArray[np.float64]) -> Candidates:
        """Candidates from rows in field order."""
        table = np.asarray(rows, dtype=np.float64).reshape(len(rows), len(fields(cls)))
        return cls(*table.T)

    @classmethod
    def of(cls, strategy: Strategy, workload: Workload) -> Candidates:
        """One strategy with a resolved workload."""
        assert workload.microbatch is not None, "the workload must be resolved"
        assert workload.accumulation_steps is not None, "the workload must be resolved"
        row = (
            strategy.pp, strategy.dp_replicate, strategy.dp_shard, strategy.cp, strategy.tp, strategy.ep,
            workload.microbatch, workload.accumulation_steps,
            int(strategy.recompute == "full"), int(strategy.reshard_after_forward),
        )  # fmt: skip
        return cls.of_rows([row])

    def __len__(self) -> int:
        return len(self.pp)

    def take(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> Candidates:
        """The candidates a mask or an index list selects."""
        return Candidates(*(getattr(self, f.name)[which] for f in fields(self)))

    def at(self, index: int, base: Strategy, workload: Workload) -> tuple[Strategy, Workload]:
        """One candidate as a strategy and its resolved workload.

        Args:
            index: Row.
            base: Strategy whose rules are kept.
            workload: Workload whose sequence length and number formats are kept.
        """
        row = {f.name: int(getattr(self, f.name)[index]) for f in fields(self)}
        strategy = replace(
            base,
            pp=row["pp"], dp_replicate=row["dp_replicate"], dp_shard=row["dp_shard"], cp=row["cp"],
            tp_x=row["tp"], tp_y=1, ep=row["ep"],
            recompute="full" if row["recompute"] else "none",
            reshard_after_forward=bool(row["reshard"]),
        )  # fmt: skip
        resolved = replace(
            workload,
            microbatch=row["microbatch"],
            accumulation_steps=row["accumulation"],
        ).resolve(strategy.dp)
        return strategy, resolved
