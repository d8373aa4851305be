"""How wide an interval must be to hold a share of the runs still to come, from runs that were left out of a fit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def half_width(residual: Array, votes: Array, folds: NDArray[np.str_], share: float = 0.8) -> float:
    """Absolute residual that a share of the votes of runs still to come stays below.

    Runs of a fold are alike, so that k folds tell as much as k runs: of these the share (1 + 1/k) must lie below, at
    most all.

    Source: split conformal prediction, Papadopoulos et al. 2002.
    """
    share = min(1.0, share * (1.0 + 1.0 / len(set(folds))))
    size = np.abs(residual)
    order = np.argsort(size)
    reached = np.cumsum(votes[order]) / votes.sum()
    place = min(int(np.searchsorted(reached, share - 1e-9)), len(size) - 1)
    return float(size[order][place])


def coverage(residual: Array, votes: Array, folds: NDArray[np.str_]) -> float:
    """Share of the votes within the half width that the other folds' residuals give."""
    inside = 0.0
    for name in set(folds):
        mine = folds == name
        width = half_width(residual[~mine], votes[~mine], folds[~mine])
        inside += float(votes[mine & (np.abs(residual) <= width)].sum())
    return inside / float(votes.sum())
