"""The choice as a linear program: what leaves and what is made again, so that computing waits least.

All candidates and all recomputation are weighed at once, each by the part of it that is chosen. Gradients that wait for
a norm before they are clipped are no special case: they are candidates between their making and the norm.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from hyper_parallel.memory.candidates import Candidate, OffloadCandidates
from hyper_parallel.memory.linear_program import SolverFailed
from hyper_parallel.memory.recompute import MAX_CHAIN, Chain, Chains, longest_gap
from hyper_parallel.memory.residency_lp import Flow, Flowed

_LOG = logging.getLogger(__name__)

_SAMPLES = 128  # positions at first
_BRIEF = 8  # positions: what is kept for no longer hardly leaves meanwhile


class Relaxation:
    """The linear program of the candidates of one order.

    Args:
        candidates: What may leave; nothing is made again yet.
        finder: What may be made again; None: nothing.
        positions: Those that stand for all, in order.

    Attributes:
        homes: By storage, the part that starts and ends the step away.
        away: By storage, (low, high, part): what is away by copy at positions [low, high).
        recomputed: By storage, the part that is dropped and made again.
    """

    def __init__(
        self, candidates: OffloadCandidates, finder: Chains | None, positions: np.ndarray
    ) -> None:
        self.candidates = candidates
        self.sizes = candidates.program.sizes
        self.flow = Flow(candidates.profile, candidates.seconds, candidates.machine, positions)
        self.homes: dict[int, int] = {}
        self.away: dict[int, list[tuple[int, int, int]]] = {}
        self.recomputed: dict[int, int] = {}
        self._kept_by: dict[int, int] = {}  # part of a gap -> part of what must be in DRAM for it
        self._stored: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # content -> part, first position that it leaves
        for c in candidates.all:
            if c.home:
                self.homes[c.storage] = self._home(c)
        for c in candidates.all:
            if not c.home:
                self._gap(c)
        self._host()
        if finder is not None:
            _recompute(self, finder)
        for (s, _), (part, leaves) in self._stored.items():
            self.flow.stored(part, leaves, leaves, self.sizes[s])

    @classmethod
    def sampled(cls, candidates: OffloadCandidates, finder: Chains | None) -> Relaxation:
        """With the fullest position of each of some stretches, half by positions and half by time."""
        profile, ends_s = candidates.profile, np.cumsum(candidates.seconds)
        along = ends_s / max(ends_s[-1], 1e-30) + np.linspace(0.0, 1.0, len(profile))
        edges = np.searchsorted(along, np.linspace(0.0, 2.0, _SAMPLES + 1)[1:-1])
        stretches = np.split(np.arange(len(profile)), np.unique(edges))
        fullest = [part[np.argmax(profile[part])] for part in stretches if len(part)]
        return cls(candidates, finder, np.array(fullest))

    def solve(self, target_bytes: int, reserve: Mapping[int, float]) -> Flowed | None:
        """The optimum for a target; None when it cannot be reached. See `Flow.solve`."""
        try:
            return self.flow.solve(target_bytes, reserve)
        except SolverFailed as error:  # another target may still have an answer
            _LOG.warning("nothing is planned for %d bytes: %s", target_bytes, error)
            return None

    def in_dram(self, s: int, since: int, leaves: int) -> int:
        """The part of a storage whose content since a position is copied to DRAM, to leave at a later one."""
        part, first = self._stored.get((s, since)) or (self.flow.part(), leaves)
        self._stored[s, since] = part, min(first, leaves)
        return part

    def leaves(self, s: int, low: int, high: int, stored: int | None) -> int:
        """The part of a storage that is away at positions [low, high), once another part of it is in DRAM."""
        part = self.flow.part()
        self.flow.away(part, low, high, self.sizes[s])
        clean = stored is None or stored == self.homes.get(s)
        if not clean:
            self.flow.in_dram(part, low, high, self.sizes[s])
        self.flow.within_gap(part, low, high, self.sizes[s], not clean)
        if stored is not None:
            self._kept_by[part] = stored
            self.flow.within([part], stored)
        self.away.setdefault(s, []).append((low, high, part))
        return part

    def comes_early(self, s: int, gap: tuple[int, int, int], wanted: dict[int, list[int]]) -> None:
        """A storage is back before the end of its gap when something is made from it within."""
        low, _, whole = gap
        part = self.leaves(s, low, min(wanted), None)
        self.flow.either([whole, part])
        for p in (p for parts in wanted.values() for p in parts):
            self.flow.either([whole, p])
        if whole in self._kept_by:
            self.flow.within([whole, part], self._kept_by[whole])

    def _home(self, c: Candidate) -> int:
        """A storage that starts and ends the step away."""
        flow, part = self.flow, self.flow.part()
        flow.in_dram(part, 0, self.candidates.n, c.num_bytes)
        *inside, (low, high) = c.spans
        flow.gone(part, low, high, c.num_bytes)
        if inside:
            tail = c.gaps[1]
            flow.away(part, *inside[0], c.num_bytes)
            if self.candidates.changed(c.storage):
                stored = self.in_dram(c.storage, self.candidates.since(tail), tail.first + 1)
                flow.within([part], stored)
        return part

    def _gap(self, c: Candidate) -> None:
        """A storage that leaves between two uses."""
        s, gap = c.storage, c.gaps[0]
        stored = None
        if s not in self.candidates.recomputes.host.at_home:
            stored = self.homes.get(s) if self.candidates.clean(gap) else None
            if stored is None:
                stored = self.in_dram(s, self.candidates.since(gap), gap.first + 1)
        self.leaves(s, gap.first + 1, gap.last, stored)

    def _host(self) -> None:
        """What updates in host memory copy, whatever is chosen."""
        flow, host = self.flow, self.candidates.recomputes.host
        always = flow.lp.variable(1.0, lower=1.0) if host.gaps else 0
        for s in host.at_home:
            flow.in_dram(always, 0, self.candidates.n, self.sizes[s])
        for gap in host.gaps:
            num_bytes = self.sizes[gap.storage]
            if gap.storage not in host.at_home:
                since = self.candidates.since(gap) + 1
                flow.stored(always, since, gap.first + 1, num_bytes)
            elif gap.last < self.candidates.n:
                flow.back(always, gap.last, num_bytes, gap.last)


def _recompute(model: Relaxation, finder: Chains) -> None:
    """Results that are dropped over their longest gap, what runs for it, and what must live on or be back for it."""
    flow, uses = model.flow, finder.chains.uses
    runs: dict[tuple[int, int], int] = {}
    kept: dict[int, dict[int, list[int]]] = {}  # storage -> until when -> parts that need it
    # (storage, gap of it) -> position within -> parts that need it there
    early: dict[tuple[int, tuple[int, int, int]], dict[int, list[int]]] = {}
    chains: dict[int, tuple[Chain, int, int]] = {}
    gaps = {s: list(away) for s, away in model.away.items()}
    for s in range(len(model.sizes)):
        chain, gap = finder.of_longest_gap(s), longest_gap(uses[s])
        if chain is None or gap is None:
            continue
        low, until = gap
        part = model.recomputed[s] = flow.part()
        chains[s] = chain, low, until
        flow.gone(part, low + 1, until, model.sizes[s])
        for operator in chain.operators:
            if (operator, until) not in runs:
                seconds = finder.program.operators[operator].seconds
                runs[operator, until] = flow.part()
                flow.longer(runs[operator, until], until, seconds)
            flow.within([part], runs[operator, until])
        for x in chain.kept:
            kept.setdefault(x, {}).setdefault(until, []).append(part)
        for x in chain.inputs:
            for away in gaps.get(x, ()) if x not in chain.kept else ():
                if away[0] <= until < away[1]:
                    early.setdefault((x, away), {}).setdefault(until, []).append(part)
    for x, needed in kept.items():
        _keep(model, finder, x, needed)
    for (x, away), wanted in early.items():
        model.comes_early(x, away, wanted)
    made: dict[tuple[int, int], int] = {}
    for s, part in model.recomputed.items():
        _make_inputs(model, chains, s, part, chains[s][2], made, MAX_CHAIN)
    for s, part in model.recomputed.items():  # then it is not away as well
        same = [p for low, _, p in model.away.get(s, ()) if low == chains[s][1] + 1]
        if same:
            flow.either([*same, part])


def _make_inputs(
    model: Relaxation,
    chains: Mapping[int, tuple[Chain, int, int]],
    s: int,
    part: int,
    position: int,
    made: dict[tuple[int, int], int],
    depth: int,
) -> None:
    """What is made at a position needs its inputs there: they are made again no later, and stay until they are used.

    Args:
        model: The linear program.
        chains: By storage that may be made again, how, and the positions of its gap.
        s: A storage that is made at the position.
        part: Its part that is.
        position: Where.
        made: By storage and position, parts that were asked for before.
        depth: How far inputs of inputs are followed.
    """
    flow = model.flow
    for x in chains[s][0].inputs if depth else ():
        _, low, until = chains.get(x, (None, 0, 0))
        if not low < position < until or flow.together(position, until):
            continue
        new = (x, position) not in made
        early = made[x, position] = made[x, position] if not new else flow.part()
        # Both are made again only if this one is made early.
        flow.lp.at_least({early: 1.0, part: -1.0, model.recomputed[x]: -1.0}, -1.0)
        if new:
            flow.gone(early, position, until, -model.sizes[x])
            _make_inputs(model, chains, x, early, position, made, depth - 1)


def _keep(model: Relaxation, finder: Chains, x: int, needed: dict[int, list[int]]) -> None:
    """A storage that would be dead lives on until the last of its chains; between them it may leave."""
    flow, size = model.flow, model.sizes[x]
    low, writes = finder.chains.uses[x][-1], finder.chains.writes[x]
    since = max(writes, default=finder.chains.uses[x][0])
    before: int | None = None
    for until in sorted(needed):
        part = flow.part()
        for p in needed[until]:
            flow.within([p], part)
        if before is not None:
            flow.within([part], before)
        flow.gone(part, low + 1, until + 1, -size)
        if x in model.candidates.movable and until - low > _BRIEF:
            away = model.leaves(x, low + 1, until, model.in_dram(x, since, low + 1))
            flow.within([away], part)
        before, low = part, until
