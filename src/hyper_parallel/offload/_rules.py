"""Which rules are tried: what is computed again, how far copies are counted on, and which of them go first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache

from hyper_parallel.ir import MemoryProgram, StorageKind
from hyper_parallel.offload._host import HostUpdates
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._recompute import (
    Chains,
    Recomputes,
    cheapest_at_peak,
    choose_recomputes,
    recompute_density,
)
from hyper_parallel.offload._relax import Relaxation, Relaxed
from hyper_parallel.offload._select import Rank, Selector
from hyper_parallel.offload._usedef import UseDef, use_definitions

_LARGE = 1500  # operators; below, trying everything takes a few seconds
_SHARES = (0.25, 0.6, 0.95)  # of the allowed time, spent on recomputation
_SHORT, _LONG = 1 / 256, 8.0  # more time that is counted on, as a share of the step
_HALVED = 4  # times that the range of the least such share is halved
_SLOWER = (
    0.1,
    0.25,
)  # channels of the relaxation, which flows more smoothly than whole storages do
_CLOSE = 1.5  # times the relaxation's extra time: near enough for what counts on copies in time
_ENOUGH = 1.005  # times the step in which nothing moves: not worth a linear program
_RANKS: tuple[Rank, ...] = ("idle_per_transfer", "longest_gap", "ring")
_WINDOW = 4.0  # reloads at most four own durations early when waits are allowed
_WINDOWS = (None, 64.0, 4.0)  # the same for what the relaxation chose, tried in turn


@dataclass(frozen=True)
class Rule:
    """What is made again and may leave, which of it does, and how early it may come back.

    Attributes:
        window: No reload begins earlier than this many own durations before it is due.
    """

    name: str
    selector: Selector
    rank: Rank
    window: float | None = None


class Rules:
    """All rules for one set of updates in host memory.

    Args:
        program: Operators with their seconds.
        machine: Channels and capacities.
        order: Order of the operators.
        step_s: The step in which nothing moves.
        slack_s: Seconds by which the step may become longer; None: the least time under a budget is wanted.
        where: Updates in host memory, and what they are called.
        move: Kinds of storages that may leave the device; None: all but inputs and outputs.
        recompute: Results may be computed again.
    """

    def __init__(
        self,
        program: MemoryProgram,
        machine: MemoryMachine,
        order: tuple[int, ...],
        step_s: float,
        slack_s: float | None,
        where: tuple[str, frozenset[int]],
        *,
        move: Collection[StorageKind] | None,
        recompute: bool,
    ) -> None:
        self._program, self._machine, self._order, self.step_s = program, machine, order, step_s
        self._on_host, self._hosted = where
        self._chains = use_definitions(program, order, self._hosted)
        self._finder = Chains(program, self._chains)
        self._density = recompute_density(self._finder) if recompute else {}
        self._movable = [
            s
            for s, storage in enumerate(program.storages)
            if (
                storage.kind in move
                if move is not None
                else storage.kind not in ("input", "output")
            )
            and (storage.persistent or not storage.at_start)
        ]
        self._under_budget = slack_s is None
        self._again = cache(self._recomputes)
        self._selector = cache(self._make)
        self.relaxation = cache(self._choose)
        self.fixed = list(self._fixed(slack_s))

    def first(
        self, target: int, limit_s: Callable[[], float] = lambda: float("inf")
    ) -> Iterator[Rule]:
        """Those that may give the fastest programs under a budget.

        Args:
            target: Device bytes.
            limit_s: What is slower is of no use, as far as is known when the next one is asked for.
        """
        if self._under_budget:
            yield from self._shortest(self._cheapest, target)
            yield from self._relaxed(target, limit_s)

    def _make(
        self, chosen: tuple[int, ...], stall: bool, stretch: float | None, slower: float = 0.0
    ) -> Selector:
        machine, again = self._machine.derated(slower), self._again(chosen)
        return Selector(
            self._program, machine, self._order, again, self._movable, stall=stall, stretch=stretch
        )

    def _recomputes(self, chosen: tuple[int, ...]) -> Recomputes:
        again = choose_recomputes(self._finder, chosen)
        again.host = HostUpdates.of(self._program, self._order, self._hosted, again.uses)
        return again

    def _fixed(self, slack_s: float | None) -> Iterator[Rule]:
        # Gaps shorter than their copies cost waits: for a budget they may be needed, for a time limit they rarely pay.
        anyway: list[tuple[str, bool, float | None]] = [
            (", copies as if alone", False, None),
            (", waits allowed", True, None),
        ]
        for name, chosen in recompute_sets(
            self._program, self._machine, self._chains, self._density, slack_s
        ):
            ways = anyway
            if slack_s is not None:
                ways = [("", False, 1 + slack_s / max(self.step_s, 1e-30))]
                if len(self._program.operators) <= _LARGE:
                    ways += anyway
            for label, stall, stretch in ways:
                selector = self._selector(tuple(chosen), stall, stretch)
                # What is at home in DRAM costs less than the channels' account of it where computation waits anyway.
                ranks = _RANKS if stretch is not None else (*_RANKS, "home")
                for rank in ranks:
                    window = _WINDOW if stall else None
                    yield Rule(name + label + self._on_host, selector, rank, window)

    def _cheapest(self, share: float) -> tuple[int, ...]:
        """What is made again when a share of the step is spent on it."""
        return tuple(
            cheapest_at_peak(self._program, self._chains, self._density, share * self.step_s)
        )

    def _shortest(
        self, again: Callable[[float], tuple[int, ...]], target: int, least: float = 0.0
    ) -> list[Rule]:
        """The rules that count on the shortest step in which recomputation and copies together reach a target.

        More recomputation keeps more inputs as well, so the range is doubled until the target is first reached. None do
        when that takes too long; then waiting for copies is left.

        Args:
            again: What is made again in a step that is longer by a share.
            target: Device bytes.
            least: The first share that is tried.
        """
        low = high = least
        while not any(self._reaching(again(high), high, target)):
            low, high = high, max(2 * high, _SHORT)
            if high > _LONG:
                return []
        for _ in range(_HALVED if high > least else 0):
            middle = (low + high) / 2
            reached = any(self._reaching(again(middle), middle, target))
            low, high = (low, middle) if reached else (middle, high)
        return list(self._reaching(again(high), high, target))

    def _reaching(self, again: tuple[int, ...], share: float, target: int) -> Iterator[Rule]:
        """The rules that reach a target in a step that is longer by a share; copies have that time as well."""
        selector = self._selector(again, False, 1 + share)
        for rank in _RANKS:
            if selector.select(target, rank)[1].max(initial=0) <= target:
                what = "copies and recompute" if again else "copies"
                name = f"{what} in {share:.1%} more time{self._on_host}"
                yield Rule(name, selector, rank)

    def _relaxed(self, target: int, limit_s: Callable[[], float]) -> Iterator[Rule]:
        """What the linear program makes again, with what the channels carry in time, or with the least waits."""
        for slower in _SLOWER:
            if limit_s() <= _ENOUGH * self.step_s:
                return
            found = self.relaxation(target, slower)
            if found is None or found.seconds > limit_s():
                return
            again = tuple(found.again)
            share = max(found.seconds / max(self.step_s, 1e-30) - 1, 0.0)
            counted = self._shortest(_always(again), target, share)
            yield from counted
            if counted and (counted[0].selector.stretch or 1.0) <= 1 + _CLOSE * share:
                continue  # hardly any waits are left
            selector = self._selector(again, True, None)
            for window in _WINDOWS:
                yield Rule(f"least waits{self._on_host}", selector, "least_waits", window)

    def _choose(self, target: int, slower: float) -> Relaxed | None:
        """The relaxation with slower channels."""
        selector = self._selector((), True, None, slower)
        return Relaxation(selector, self._finder if self._density else None).solve(target)


def _always(again: tuple[int, ...]) -> Callable[[float], tuple[int, ...]]:
    return lambda _: again


def recompute_sets(
    program: MemoryProgram,
    machine: MemoryMachine,
    chains: UseDef,
    density: dict[int, float],
    slack_s: float | None,
) -> list[tuple[str, list[int]]]:
    """Sets of storages to recompute that are worth trying.

    Under a time limit recomputation may spend a part of the slack only: every second of it is exposed, and what is left
    must absorb the copies. Under a budget there are limits to the seconds per byte: far below a copy's, a copy's, none.
    """
    sets: list[tuple[str, list[int]]] = [("copies only", [])]
    if slack_s is not None:
        for share in _SHARES:
            chosen = cheapest_at_peak(program, chains, density, share * slack_s)
            sets.append((f"recompute for {share:.0%} of the allowed time", chosen))
    else:
        ranked = sorted(density, key=lambda s: (density[s], -program.sizes[s], s))
        transfer = 1 / machine.prefetch.bytes_s
        for name, limit in (
            ("recompute far cheaper than a copy", transfer / 8),
            ("recompute cheaper than a copy", transfer),
            ("recompute everything repeatable", float("inf")),
        ):
            sets.append((name, [s for s in ranked if density[s] <= limit]))
    distinct = {tuple(chosen): (name, chosen) for name, chosen in reversed(sets)}
    return list(reversed(distinct.values()))
