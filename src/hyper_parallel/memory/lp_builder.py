"""Builder of the residency linear program, with fractions of storages to offload and to recompute as its variables.

A position is an index in the order of the operators, and a gap is a range of positions between two uses of a storage. A
store copies a storage from the device to DRAM. One linear program covers all candidates for offload and recomputation.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from hyper_parallel.memory.candidates import OffloadCandidate, OffloadCandidates
from hyper_parallel.memory.recompute import MAX_CHAIN, Chain, ChainFinder, longest_gap
from hyper_parallel.memory.residency_lp import LPOptimum, ResidencyLP, SolverFailed

_LOG = logging.getLogger(__name__)

_SAMPLES = 128  # maximum number of initial sampled positions
_MIN_RETAINED_POSITIONS = 8  # storages retained for fewer positions are not offloaded meanwhile


class LPBuilder:
    """Residency linear program of one order, with the variables of its candidates.

    Args:
        candidates: Candidates for offload if nothing is recomputed.
        finder: Finder of recomputation chains; None: no storage is recomputed.
        positions: Sampled positions, ascending.

    Attributes:
        offloaded_at_start: Dict from storage to the variable for the fraction off the device at both ends of the step.
        offloads: Dict from storage to a list of (low, high, variable), its fractions offloaded at [low, high).
        recomputed: Dict from storage to the variable for the fraction that is dropped and recomputed.
    """

    def __init__(self, candidates: OffloadCandidates, finder: ChainFinder | None, positions: np.ndarray) -> None:
        self.candidates = candidates
        self.sizes = candidates.program.sizes
        self.model = ResidencyLP(candidates.profile, candidates.seconds, candidates.machine, positions)
        self.offloaded_at_start: dict[int, int] = {}
        self.offloads: dict[int, list[tuple[int, int, int]]] = {}
        self.recomputed: dict[int, int] = {}
        # variable of an offloaded fraction -> variable of the stored fraction that limits it
        self._store_of: dict[int, int] = {}
        # (storage, position of its last write) -> (variable of the stored fraction, first position off the device)
        self._stored: dict[tuple[int, int], tuple[int, int]] = {}
        for c in candidates.all:
            if c.starts_offloaded:
                self.offloaded_at_start[c.storage] = self._add_home(c)
        for c in candidates.all:
            if not c.starts_offloaded:
                self._add_gap(c)
        if finder is not None:
            _add_recomputations(self, finder)
        for (s, _), (fraction, leaves) in self._stored.items():
            self.model.add_store(fraction, leaves, leaves, self.sizes[s])

    @classmethod
    def sampled(cls, candidates: OffloadCandidates, finder: ChainFinder | None) -> LPBuilder:
        """Return the linear program for sampled positions: in each interval, the position with the most device bytes.

        All intervals have the same length, measured as fraction of the positions plus fraction of the step time.
        """
        profile, ends_s = candidates.profile, np.cumsum(candidates.seconds)
        along = ends_s / max(ends_s[-1], 1e-30) + np.linspace(0.0, 1.0, len(profile))
        edges = np.searchsorted(along, np.linspace(0.0, 2.0, _SAMPLES + 1)[1:-1])
        intervals = np.split(np.arange(len(profile)), np.unique(edges))
        fullest = [interval[np.argmax(profile[interval])] for interval in intervals if len(interval)]
        return cls(candidates, finder, np.array(fullest))

    def solve(self, target_bytes: int, reserve: Mapping[int, float]) -> LPOptimum | None:
        """Return the optimum of `ResidencyLP.solve`; None if the target is infeasible, or the solver fails (logged)."""
        try:
            return self.model.solve(target_bytes, reserve)
        except SolverFailed as error:  # another target may still be solved
            _LOG.warning("no memory plan for a target of %d bytes: %s", target_bytes, error)
            return None

    def add_store(self, s: int, since: int, leaves: int) -> int:
        """Return the variable for the fraction of a storage that is copied to DRAM after its write at `since`.

        Later calls with the same `since` return the same variable. The storage stays on the device until `leaves`.
        """
        fraction, first = self._stored.get((s, since)) or (self.model.add_fraction(), leaves)
        self._stored[s, since] = fraction, min(first, leaves)
        return fraction

    def add_offload(self, s: int, low: int, high: int, stored: int | None) -> int:
        """Add and return the variable for the fraction of a storage that is offloaded at positions [low, high).

        The fraction is at most the variable `stored`, the fraction copied to DRAM. None: no store is needed.
        """
        fraction = self.model.add_fraction()
        self.model.add_offload(fraction, low, high, self.sizes[s])
        clean = stored is None or stored == self.offloaded_at_start.get(s)
        if not clean:
            self.model.add_dram_bytes(fraction, low, high, self.sizes[s])
        self.model.add_gap_stall(fraction, low, high, self.sizes[s], not clean)
        if stored is not None:
            self._store_of[fraction] = stored
            self.model.add_sum_le([fraction], stored)
        self.offloads.setdefault(s, []).append((low, high, fraction))
        return fraction

    def add_early_return(self, s: int, gap: tuple[int, int, int], wanted: dict[int, list[int]]) -> None:
        """Add the variable for an early end of a gap, because recomputations inside the gap read the storage.

        `gap` is (first position, end, variable of the offloaded fraction). `wanted` maps positions to the variables of
        recomputations there.
        """
        low, _, whole = gap
        fraction = self.add_offload(s, low, min(wanted), None)
        self.model.add_at_most_one([whole, fraction])
        for p in (p for dependents in wanted.values() for p in dependents):
            self.model.add_at_most_one([whole, p])
        if whole in self._store_of:
            self.model.add_sum_le([whole, fraction], self._store_of[whole])

    def _add_home(self, c: OffloadCandidate) -> int:
        """Add and return the variable for the fraction of a storage that is off the device at both ends of the step."""
        model, fraction = self.model, self.model.add_fraction()
        model.add_dram_bytes(fraction, 0, self.candidates.n, c.num_bytes)
        *inside, (low, high) = c.spans
        model.add_absence(fraction, low, high, c.num_bytes)
        if inside:
            tail = c.gaps[1]
            model.add_offload(fraction, *inside[0], c.num_bytes)
            if self.candidates.writes[c.storage]:
                stored = self.add_store(c.storage, self.candidates.content_since(tail), tail.first + 1)
                model.add_sum_le([fraction], stored)
        return fraction

    def _add_gap(self, c: OffloadCandidate) -> None:
        s, gap = c.storage, c.gaps[0]
        stored = self.offloaded_at_start.get(s) if self.candidates.is_unmodified(gap) else None
        if stored is None:
            stored = self.add_store(s, self.candidates.content_since(gap), gap.first + 1)
        self.add_offload(s, gap.first + 1, gap.last, stored)


def _add_recomputations(builder: LPBuilder, finder: ChainFinder) -> None:
    """Add variables for results that may be dropped over their longest gap and recomputed, and for their inputs."""
    model, uses = builder.model, finder.chains.uses
    runs: dict[tuple[int, int], int] = {}
    # storage -> position of recomputation -> variables of the fractions that need it
    retained: dict[int, dict[int, list[int]]] = {}
    # (storage, gap) -> position in the gap -> variables of the fractions that need the storage there
    early: dict[tuple[int, tuple[int, int, int]], dict[int, list[int]]] = {}
    chains: dict[int, tuple[Chain, int, int]] = {}
    gaps = {s: list(offload) for s, offload in builder.offloads.items()}
    for s in range(len(builder.sizes)):
        chain, gap = finder.for_longest_gap(s), longest_gap(uses[s])
        if chain is None or gap is None:
            continue
        low, until = gap
        fraction = builder.recomputed[s] = model.add_fraction()
        chains[s] = chain, low, until
        model.add_absence(fraction, low + 1, until, builder.sizes[s])
        for operator in chain.operators:
            if (operator, until) not in runs:
                seconds = finder.program.operators[operator].seconds
                runs[operator, until] = model.add_fraction()
                model.add_delay(runs[operator, until], until, seconds)
            model.add_sum_le([fraction], runs[operator, until])
        for x in chain.retained:
            retained.setdefault(x, {}).setdefault(until, []).append(fraction)
        for x in chain.inputs:
            for offload in gaps.get(x, ()) if x not in chain.retained else ():
                if offload[0] <= until < offload[1]:
                    early.setdefault((x, offload), {}).setdefault(until, []).append(fraction)
    for x, needed in retained.items():
        _add_retained(builder, finder, x, needed)
    for (x, offload), wanted in early.items():
        builder.add_early_return(x, offload, wanted)
    requested: dict[tuple[int, int], int] = {}
    for s, fraction in builder.recomputed.items():
        _add_chain_inputs(builder, chains, s, fraction, chains[s][2], requested, MAX_CHAIN)
    for s, fraction in builder.recomputed.items():  # a dropped storage is not offloaded as well
        same = [p for low, _, p in builder.offloads.get(s, ()) if low == chains[s][1] + 1]
        if same:
            model.add_at_most_one([*same, fraction])


def _add_chain_inputs(
    builder: LPBuilder,
    chains: Mapping[int, tuple[Chain, int, int]],
    s: int,
    fraction: int,
    position: int,
    requested: dict[tuple[int, int], int],
    depth: int,
) -> None:
    """Add variables for inputs that are dropped at `position`, where the fraction `fraction` of `s` is recomputed.

    These inputs must be recomputed earlier than planned, and are then resident until their next use. `chains` maps a
    storage to its chain and the two positions of its gap. `requested` maps (storage, position) to the variable of an
    earlier call and is extended. Inputs of inputs are followed to `depth`.
    """
    model = builder.model
    for x in chains[s][0].inputs if depth else ():
        _, low, until = chains.get(x, (None, 0, 0))
        if not low < position < until or model.same_sample(position, until):
            continue
        new = (x, position) not in requested
        early = requested[x, position] = requested[x, position] if not new else model.add_fraction()
        # If both storages are recomputed, the input is recomputed early.
        model.lp.at_least({early: 1.0, fraction: -1.0, builder.recomputed[x]: -1.0}, -1.0)
        if new:
            model.add_absence(early, position, until, -builder.sizes[x])
            _add_chain_inputs(builder, chains, x, early, position, requested, depth - 1)


def _add_retained(builder: LPBuilder, finder: ChainFinder, x: int, needed: dict[int, list[int]]) -> None:
    """Add variables that keep a dead storage alive until the last recomputation that reads it.

    The storage may be offloaded meanwhile. `needed` maps positions to the variables of recomputations there.
    """
    model, size = builder.model, builder.sizes[x]
    low, writes = finder.chains.uses[x][-1], finder.chains.writes[x]
    since = max(writes, default=finder.chains.uses[x][0])
    before: int | None = None
    for until in sorted(needed):
        fraction = model.add_fraction()
        for p in needed[until]:
            model.add_sum_le([p], fraction)
        if before is not None:
            model.add_sum_le([fraction], before)
        model.add_absence(fraction, low + 1, until + 1, -size)
        if x in builder.candidates.movable and until - low > _MIN_RETAINED_POSITIONS:
            offload = builder.add_offload(x, low + 1, until, builder.add_store(x, since, low + 1))
            model.add_sum_le([offload], fraction)
        before, low = fraction, until
