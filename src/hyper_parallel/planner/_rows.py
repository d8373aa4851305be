"""What a search is for, and what it finds: complete strategies with their prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.planner._space import Columns

Array = NDArray[np.float64]

TIE = 1e-9
"""Values that differ by less, relatively, are equal: the rest is rounding."""

_KEY: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "ep")
BLOCKS: Final = (
    "attention_shape", "mlp_shape", "ep", "etp", "cp_ulysses", "attention_tokens", "cp_gather",
)  # fmt: skip
"""Columns of a row of `Space.blocks`."""


@dataclass(slots=True)
class PricedRows:
    """Complete strategies with their prices.

    Attributes:
        columns: Columns of `cost.Candidates`.
        per_token_s: Seconds per token, with as little recomputation as makes it fit.
        memory_bytes: Peak memory with it.
        layers: Layers of a rank that are recomputed, -1 for all; column `recompute` says in which way.
        least_s: Seconds per token without recomputation, whether that fits or not.
    """

    columns: Columns
    per_token_s: Array
    memory_bytes: Array
    layers: Array
    least_s: Array

    def __len__(self) -> int:
        return len(self.per_token_s)

    def take(self, which: NDArray[np.intp] | NDArray[np.bool_]) -> PricedRows:
        """Some of them."""
        columns = {name: column[which] for name, column in self.columns.items()}
        values = (self.per_token_s, self.memory_bytes, self.layers, self.least_s)
        return PricedRows(columns, *(v[which] for v in values))

    @classmethod
    def join(cls, parts: Sequence[PricedRows]) -> PricedRows:
        """All of several."""
        names = parts[0].columns
        return cls(
            {n: np.concatenate([p.columns[n] for p in parts]) for n in names},
            np.concatenate([p.per_token_s for p in parts]),
            np.concatenate([p.memory_bytes for p in parts]),
            np.concatenate([p.layers for p in parts]),
            np.concatenate([p.least_s for p in parts]),
        )

    def ranked(self) -> NDArray[np.intp]:
        """Positions, fastest first; ties go to smaller tp, cp, pp and ep, then to less memory and plainer choices."""
        c, value = self.columns, self.per_token_s
        rounded = np.round(value / value.min() / TIE) if len(value) else value
        plain = [c[n] for n in sorted(c)]
        keys = (*plain, self.layers, self.memory_bytes, c["ep"], c["pp"], c["cp"])
        return np.lexsort((*keys, c["tp_x"] * c["tp_y"], rounded))

    def meshes(self) -> list[tuple[int, ...]]:
        """Degrees of every strategy."""
        return self._rows(_KEY)

    def laid_out(self) -> list[tuple[int, ...]]:
        """What layouts depend on, as arguments of `Space.refusal_of`."""
        return self._rows(("dp_shard", "cp", "tp_x", "tp_y", *BLOCKS))

    def _rows(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        table = np.column_stack([self.columns[n] for n in names]).astype(int)
        return [tuple(row) for row in table.tolist()]


def closed_form_s(rows: PricedRows, position: int) -> float:
    """Seconds per token of one row as the search prices it."""
    return float(rows.per_token_s[position])


@dataclass(frozen=True, slots=True)
class SearchGoal:
    """What is searched for: least seconds per token under limits.

    Attributes:
        capacity_bytes: Memory of a device.
        at_most_s_per_token: Upper limit of the seconds per token, or None.
        keep: How many strategies to keep, of distinct degrees.
        full_s: Full price of a row, seconds per token, never less than the closed form of the search; its closed form
            where nothing is simulated.
    """

    capacity_bytes: float
    at_most_s_per_token: float | None = None
    keep: int = 1
    full_s: Callable[[PricedRows, int], float] = closed_form_s


@dataclass(slots=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        rows: The complete strategies within the limits, unsorted: all of them whose price is at most `bound`.
        priced: Complete strategies that were priced.
        cut: Partial strategies that were cut, by reason.
        too_big: Of those cut for memory, the ones that would be fastest, as lean as they get.
        bound: Seconds per token that everything that was not completed exceeds.
        meshes: Legal combinations of degrees and microbatch; 0: nothing is legal.
    """

    rows: PricedRows
    priced: int
    cut: Counter[str]
    too_big: PricedRows
    bound: float
    meshes: int
