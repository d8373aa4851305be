"""What leaves and what is made again, decided at once by a linear program: the choice that computing waits for least.

A ranking rule takes one candidate after another at the highest position. Under a tight budget that spends the channels
on what the rule happens to like; the relaxation weighs all candidates, and recomputation with them. Its choice is
rounded to whole storages and emitted as any other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from hyper_parallel.memory._flow import Flow, Flowed
from hyper_parallel.memory._linear import SolverFailed
from hyper_parallel.memory._recompute import Chain, Chains, longest_gap

if TYPE_CHECKING:
    from hyper_parallel.memory._select import Candidate, Selector

_LOG = logging.getLogger(__name__)

_FINE, _COARSE = 400, 100  # positions: to decide what leaves, and what is made again
_HALF = 0.5  # a storage of which so much leaves leaves
_AGAIN = 0.3, 0.6, 0.9  # of which so much is made again is; tried in turn
_BRIEF = 8  # positions: what is kept for no longer hardly leaves meanwhile


@dataclass(frozen=True)
class RelaxedChoice:
    """The optimum.

    Attributes:
        seconds: Of the step in the relaxation.
        recomputed: Storages that are dropped and made again: by a third at least, by more, by nearly all.
    """

    seconds: float
    recomputed: tuple[tuple[int, ...], ...]


class Relaxation:
    """The linear program of a selector's candidates.

    Args:
        selector: Candidates without regard to the time of their copies, recomputations that are given.
        finder: What may be made again besides; None: nothing.
    """

    def __init__(self, selector: Selector, finder: Chains | None = None) -> None:
        self.selector = selector
        self.sizes = selector.program.sizes
        seconds = np.diff(np.concatenate(([0.0], selector.ends_s)))
        for position, extra in selector.recomputes.least_s(selector.program).items():
            seconds[position] += extra
        self.flow = Flow(
            selector.profile,
            seconds.tolist(),
            selector.machine,
            _FINE if finder is None else _COARSE,
        )
        self.candidates: dict[int, Candidate] = {}  # by part
        self.inside: dict[int, list[int]] = {}  # storage -> parts of its gaps inside the step
        self.kept_by: dict[int, int] = {}  # part of a gap -> part of what must be in DRAM for it
        self.recomputed: dict[int, int] = {}  # storage -> part
        self._stored: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # content -> part, first position that it leaves
        homes: dict[int, int] = {}
        for c in selector.candidates:
            if c.home and len(c.gaps) < 3:
                homes[c.gaps[0].storage] = self._home(c)
        for c in selector.candidates:
            if not c.home:
                self._gap(c, homes.get(c.gaps[0].storage))
        self._host()
        if finder is not None:
            _recompute(self, finder)
        for (s, since), (part, leaves) in self._stored.items():
            self.flow.stored(part, since + 1, leaves, self.sizes[s])
        self._flowed = cache(self._solve)

    def _solve(self, target_bytes: int) -> Flowed | None:
        try:
            return self.flow.solve(target_bytes)
        except SolverFailed as error:  # the other rules still choose
            _LOG.warning("nothing is relaxed for %d bytes: %s", target_bytes, error)
            return None

    def solve(self, target_bytes: int) -> RelaxedChoice | None:
        """The optimum for a target; None when it cannot be reached."""
        result = self._flowed(target_bytes)
        if result is None:
            return None
        parts = {s: result.parts[part] for s, part in self.recomputed.items()}
        recomputed = [tuple(s for s, x in parts.items() if x >= least) for least in _AGAIN]
        return RelaxedChoice(result.seconds, tuple(dict.fromkeys(recomputed)))

    def until(self, target_bytes: int) -> tuple[list[Candidate], np.ndarray]:
        """As `Greedy.until`: the optimum in whole storages; nothing when there is none."""
        result = self._flowed(target_bytes)
        if result is None:
            return [], self.selector.profile
        profile = self.selector.profile.copy()
        chosen: list[Candidate] = []
        rest: list[Candidate] = []
        for part in sorted(self.candidates, key=lambda part: -result.parts[part]):
            if result.parts[part] < _HALF:
                rest.append(self.candidates[part])
            else:
                chosen.append(self.candidates[part])
                _take(profile, chosen[-1])
        while len(profile) and profile.max() > target_bytes:
            at = int(np.argmax(profile))
            freed = (c for c in rest if any(low <= at < high for low, high in c.spans))
            pick = next(freed, None)
            if pick is None:
                break
            rest.remove(pick)
            chosen.append(pick)
            _take(profile, pick)
        return chosen, profile

    def in_dram(self, s: int, since: int, leaves: int) -> int:
        """The part of a storage whose content since a position is copied to DRAM, to leave at a later one."""
        part, first = self._stored.get((s, since)) or (self.flow.part(), leaves)
        self._stored[s, since] = part, min(first, leaves)
        return part

    def _home(self, c: Candidate) -> int:
        """A storage that starts and ends the step away."""
        selector, flow = self.selector, self.flow
        part, head = flow.part(), c.gaps[0]
        self.candidates[part] = c
        for low, high in c.spans:
            flow.gone(part, low, high, c.num_bytes)
        if head.last < selector.n:
            flow.back(part, head.last, c.num_bytes)
            tail = c.gaps[1]
            if tail.storage in selector.written:
                final = self.in_dram(tail.storage, selector.since(tail), tail.first + 1)
                flow.within([part], final)
        return part

    def _gap(self, c: Candidate, home: int | None) -> None:
        """A storage that leaves between two uses."""
        gap, part = c.gaps[0], self.flow.part()
        self.candidates[part] = c
        self.inside.setdefault(gap.storage, []).append(part)
        self.flow.gone(part, gap.first + 1, gap.last, c.num_bytes)
        self.flow.back(part, gap.last, c.num_bytes)
        if gap.storage in self.selector.recomputes.host.at_home:
            return
        if home is None or not self.selector.clean(gap):
            home = self.in_dram(gap.storage, self.selector.since(gap), gap.first + 1)
        self.kept_by[part] = home
        self.flow.within([part], home)

    def _host(self) -> None:
        """What updates in host memory copy, whatever is chosen."""
        selector, flow = self.selector, self.flow
        host = selector.recomputes.host
        always = flow.lp.variable(1.0, lower=1.0) if host.gaps else 0
        for gap in host.gaps:
            num_bytes = self.sizes[gap.storage]
            if gap.storage not in host.at_home:
                flow.stored(always, selector.since(gap) + 1, selector.n, num_bytes)
            elif gap.last < selector.n:
                flow.back(always, gap.last, num_bytes)


def _take(profile: np.ndarray, c: Candidate) -> None:
    for low, high in c.spans:
        profile[low:high] -= c.num_bytes


def _recompute(model: Relaxation, finder: Chains) -> None:
    """Results that are dropped over their longest gap, what runs for it, and what must live on or be back for it."""
    flow, uses = model.flow, finder.chains.uses
    runs: dict[tuple[int, int], int] = {}
    kept: dict[int, dict[int, list[int]]] = {}  # storage -> until when -> parts that need it
    early: dict[
        int, dict[int, list[int]]
    ] = {}  # part of a gap -> position within -> parts that need it there
    for s in range(len(model.sizes)):
        chain, gap = finder.of_longest_gap(s), longest_gap(uses[s])
        if chain is None or gap is None:
            continue
        low, until = gap
        part = model.recomputed[s] = flow.part()
        flow.gone(part, low + 1, until, model.sizes[s])
        same = [p for p in model.inside.get(s, ()) if model.candidates[p].gaps[0].first == low]
        if same:
            flow.either([*same, part])
        for operator in chain.operators:
            if (operator, until) not in runs:
                runs[operator, until] = flow.part()
                flow.longer(
                    runs[operator, until], until, finder.program.operators[operator].seconds
                )
            flow.within([part], runs[operator, until])
        for x in chain.kept:
            kept.setdefault(x, {}).setdefault(until, []).append(part)
        for p in _across(model, chain, until):
            early.setdefault(p, {}).setdefault(until, []).append(part)
    for x, needed in kept.items():
        _keep(model, finder, x, needed)
    for p, wanted in early.items():
        _come_early(model, p, wanted)


def _across(model: Relaxation, chain: Chain, position: int) -> list[int]:
    """Parts of gaps of a chain's inputs that reach across the position where it runs."""
    return [
        p
        for x in chain.inputs
        if x not in chain.kept
        for p in model.inside.get(x, ())
        if model.candidates[p].gaps[0].first < position < model.candidates[p].gaps[0].last
    ]


def _keep(model: Relaxation, finder: Chains, x: int, needed: dict[int, list[int]]) -> None:
    """A storage that would be dead lives on until the last of its chains; between them it may leave."""
    flow, size = model.flow, model.sizes[x]
    low, writes = finder.chains.uses[x][-1], finder.chains.writes[x]
    since = max(writes, default=finder.chains.uses[x][0])
    movable = x in set(model.selector.movable)
    before: int | None = None
    for until in sorted(needed):
        part = flow.part()
        for p in needed[until]:
            flow.within([p], part)
        if before is not None:
            flow.within([part], before)
        flow.gone(part, low + 1, until + 1, -size)
        if movable and until - low > _BRIEF:
            away = flow.part()
            flow.within([away], part)
            flow.within([away], model.in_dram(x, since, low + 1))
            flow.gone(away, low + 1, until, size)
            flow.back(away, until, size)
        before, low = part, until


def _come_early(model: Relaxation, gap: int, wanted: dict[int, list[int]]) -> None:
    """A storage is back before the end of its gap when something is made from it within."""
    flow, c = model.flow, model.candidates[gap]
    first = min(wanted)
    part = flow.part()
    flow.gone(part, c.gaps[0].first + 1, first, c.num_bytes)
    flow.back(part, first, c.num_bytes)
    flow.either([gap, part])
    for p in (p for parts in wanted.values() for p in parts):
        flow.either([gap, p])
    if gap in model.kept_by:
        flow.within([gap, part], model.kept_by[gap])
