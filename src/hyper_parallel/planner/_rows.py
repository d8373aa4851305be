"""Complete strategies with their prices, as rows: columns of `cost.Candidates` and of `PRICES`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import Candidates
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner._space import Columns

PRICES: Final = ("per_token_s", "memory_bytes", "layers")
"""Seconds per token, peak bytes, and layers of a rank that are recomputed as column `recompute` says, -1 for all."""
TIE: Final = 1e-9
"""Values that differ by less, relatively, are equal: the rest is rounding."""
_DEGREES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "ep")


def select(rows: Columns, which: NDArray[np.intp] | NDArray[np.bool_]) -> Columns:
    """Some of the rows."""
    if which.dtype == np.bool_:
        which = np.flatnonzero(which)  # an index is read faster than a mask
    return {name: column[which] for name, column in rows.items()}


def join(parts: Sequence[Columns]) -> Columns:
    """All rows of several; no row of no column when there are none."""
    if not parts:
        return dict.fromkeys((*Candidates.__slots__, *PRICES), np.empty(0))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def count(rows: Columns) -> int:
    """How many rows there are."""
    return len(next(iter(rows.values())))


def tuples(rows: Columns, names: Sequence[str] = _DEGREES) -> list[tuple[int, ...]]:
    """Some columns of every row, as whole numbers: its degrees."""
    table = np.column_stack([rows[name] for name in names]).astype(int)
    return [tuple(row) for row in table.tolist()]


def ranked(rows: Columns) -> NDArray[np.intp]:
    """Positions, fastest first; ties go to smaller tp, cp, pp and ep, then to less memory and plainer choices."""
    value = rows["per_token_s"]
    rounded = np.round(value / value.min() / TIE) if len(value) else value
    plain = [rows[name] for name in sorted(rows) if name not in PRICES]
    keys = (*plain, rows["layers"], rows["memory_bytes"], rows["ep"], rows["pp"], rows["cp"])
    return np.lexsort((*keys, rows["tp_x"] * rows["tp_y"], rounded))


def strategy_at(
    rows: Columns, position: int, base: Strategy, workload: Workload
) -> tuple[Strategy, Workload]:
    """One complete strategy with its resolved workload; arguments as for `Candidates.at`."""
    row = {n: rows[n][[position]] for n in rows if n in Candidates.__slots__}
    strategy, resolved = Candidates.of_columns(**row).at(0, base, workload)
    layers = int(rows["layers"][position])
    return replace(strategy, recompute_layers=layers if layers >= 0 else None), resolved
