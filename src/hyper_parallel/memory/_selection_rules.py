"""Which rules are tried: what is computed again, how far copies are counted on, and which of them go first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache

from hyper_parallel.ir import MemoryProgram, StorageKind
from hyper_parallel.memory._host import HostUpdates
from hyper_parallel.memory._memory_machine import MemoryMachine
from hyper_parallel.memory._recompute import (
    Chains,
    Recomputes,
    cheapest_at_peak,
    choose_recomputes,
    recompute_density,
)
from hyper_parallel.memory._relaxation import Relaxation
from hyper_parallel.memory._select import Rank, Selector
from hyper_parallel.memory._usedef import UseDef, use_definitions

_LARGE_PROGRAM = 1500  # operators; up to here trying everything takes a few seconds
_SHARES = (0.25, 0.6, 0.95)  # of the allowed time, spent on recomputation
_SHORTEST_SHARE, _LONGEST_SHARE = (
    1 / 256,
    8.0,
)  # more time that is counted on, as a share of the step
_BEYOND_LIMIT = 4  # times the share that is of use: emission may take less than what was counted on
_SHARE_PRECISION = 1 / 32  # of itself: how closely the least such share is looked for
# Channels of the relaxation, which flows more smoothly than whole storages do, are slower by this.
_CHANNEL_MARGINS = (0.1, 0.25)
_NEAR_RELAXED_TIME = (
    1.5  # times the relaxation's extra time: near enough for what counts on copies in time
)
_NEAR_LEAST_TIME = 1.005  # times what no choice is expected to be below: not worth a linear program
_RANKS: tuple[Rank, ...] = ("idle_per_transfer", "longest_gap", "ring")
_WINDOW = 4.0  # reloads at most four own durations early when waits are allowed
_WINDOWS = (None, 64.0, 4.0)  # the same for what the relaxation chose, tried in turn


@dataclass(frozen=True)
class SelectionRule:
    """What is made again and may leave, which of it does, and how early it may come back.

    Attributes:
        window: No reload begins earlier than this many own durations before it is due.
    """

    name: str
    selector: Selector
    rank: Rank
    window: float | None = None


class SelectionRules:
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
        self._program, self._machine, self._order = program, machine, order
        self.step_s = max(step_s, 1e-30)
        self._large = len(program.operators) > _LARGE_PROGRAM
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
        self._recomputes_of = cache(self._recomputes)
        self._cheapest = cache(self._cheapest_recomputed)
        self._selector = cache(self._make)
        self.relaxation = cache(self._relax)
        self.fixed = list(self._fixed(slack_s))

    def first(
        self, target: int, limit_s: Callable[[], float] = lambda: float("inf")
    ) -> Iterator[SelectionRule]:
        """Those that may give the fastest programs under a budget.

        Args:
            target: Device bytes.
            limit_s: What is slower is of no use, as far as is known when the next one is asked for.
        """
        if not self._under_budget:
            return
        yield from self._shortest(self._cheapest, target, 0.0, (0.0, _SHORTEST_SHARE))
        if limit_s() <= _NEAR_LEAST_TIME * self.step_s:
            return
        least_s = self.step_s
        for slower in _CHANNEL_MARGINS:
            result = self.relaxation(slower).solve(target)
            if result is None:
                break
            least_s = max(least_s, result.seconds)
            if least_s > limit_s():
                break
            # What is made again in part as well may need more than that part of its inputs.
            for recomputed in result.recomputed:
                yield from self._relaxed(recomputed, least_s, target, limit_s())
            if limit_s() <= _NEAR_LEAST_TIME * least_s:
                break
        share, limit = (seconds / self.step_s - 1 for seconds in (least_s, limit_s()))
        within = _SHORTEST_SHARE, _BEYOND_LIMIT * limit
        yield from self._shortest(self._cheapest, target, min(share, limit), within)

    def _make(
        self, chosen: tuple[int, ...], stall: bool, stretch: float | None, slower: float = 0.0
    ) -> Selector:
        machine, recomputed = self._machine.derated(slower), self._recomputes_of(chosen)
        return Selector(
            self._program,
            machine,
            self._order,
            recomputed,
            self._movable,
            stall=stall,
            stretch=stretch,
        )

    def _recomputes(self, chosen: tuple[int, ...]) -> Recomputes:
        recomputed = choose_recomputes(self._finder, chosen)
        recomputed.host = HostUpdates.of(self._program, self._order, self._hosted, recomputed.uses)
        return recomputed

    def _fixed(self, slack_s: float | None) -> Iterator[SelectionRule]:
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
                ways = [("", False, 1 + slack_s / self.step_s)]
                if not self._large:
                    ways += anyway
            for label, stall, stretch in ways:
                selector = self._selector(tuple(chosen), stall, stretch)
                # What is at home in DRAM costs less than the channels' account of it where computation waits anyway.
                ranks = _RANKS if stretch is not None else (*_RANKS, "home")
                for rank in ranks:
                    window = _WINDOW if stall else None
                    yield SelectionRule(name + label + self._on_host, selector, rank, window)

    def _cheapest_recomputed(self, share: float) -> tuple[int, ...]:
        """What is made again when a share of the step is spent on it."""
        return tuple(
            cheapest_at_peak(self._program, self._chains, self._density, share * self.step_s)
        )

    def _shortest(
        self,
        recomputed: Callable[[float], tuple[int, ...]],
        target: int,
        first: float,
        within: tuple[float, float],
    ) -> list[SelectionRule]:
        """The rules that count on the shortest step in which recomputation and copies together reach a target.

        More recomputation keeps more inputs as well, so the range grows until the target is first reached. None do when
        that takes too long; then waiting for copies is left.

        Args:
            recomputed: What is made again in a step that is longer by a share.
            target: Device bytes.
            first: The first share that is tried; smaller ones follow where it reaches the target.
            within: The smallest and the largest one.
        """
        least, most = within[0], min(within[1], _LONGEST_SHARE)

        ranks = _RANKS

        def reached(share: float) -> bool:
            nonlocal ranks
            rule = next(self._reaching(recomputed(share), share, target, ranks), None)
            if rule and self._large:
                ranks = (rule.rank,)  # that none of three does takes three times as long to find
            return rule is not None

        low = high = first
        step = _SHORTEST_SHARE
        if reached(first):
            while low > least and reached(low := max(high - step, least)):
                high = low
                step *= 2
        else:
            while low < most and not reached(high := min(low + step, most)):
                low = high
                step *= 2
            if low >= most:
                return []
        while high - low > _SHARE_PRECISION * max(high, _SHORTEST_SHARE):
            middle = (low + high) / 2
            low, high = (low, middle) if reached(middle) else (middle, high)
        return list(self._reaching(recomputed(high), high, target))

    def _reaching(
        self,
        recomputed: tuple[int, ...],
        share: float,
        target: int,
        ranks: tuple[Rank, ...] = _RANKS,
    ) -> Iterator[SelectionRule]:
        """The rules that reach a target in a step that is longer by a share; copies have that time as well."""
        selector = self._selector(recomputed, False, 1 + share)
        for rank in ranks:
            if selector.select(target, rank)[1].max(initial=0) <= target:
                what = "copies and recompute" if recomputed else "copies"
                name = f"{what} in {share:.1%} more time{self._on_host}"
                yield SelectionRule(name, selector, rank)

    def _relaxed(
        self, recomputed: tuple[int, ...], seconds: float, target: int, limit_s: float
    ) -> list[SelectionRule]:
        """What the linear program makes again, with what the channels carry in time, or with the least waits.

        Args:
            recomputed: What it makes again.
            seconds: Of its step.
            target: Device bytes; without rules it cannot be reached.
            limit_s: What is slower is of no use.
        """
        share = max(seconds / self.step_s - 1, 0.0)
        within = share, _BEYOND_LIMIT * (limit_s / self.step_s - 1)
        rules = self._shortest(lambda _: recomputed, target, share, within)
        if rules and (rules[0].selector.stretch or 1.0) <= 1 + _NEAR_RELAXED_TIME * share:
            return rules  # hardly any waits are left
        selector = self._selector(recomputed, True, None)
        if selector.select(target, "least_waits")[1].max(initial=0) <= target:
            name = f"least waits{self._on_host}"
            rules += [SelectionRule(name, selector, "least_waits", window) for window in _WINDOWS]
        return rules

    def _relax(self, slower: float) -> Relaxation:
        """The linear program with channels that are slower by a share."""
        selector = self._selector((), True, None, slower)
        return Relaxation(selector, self._finder if self._density else None)


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
