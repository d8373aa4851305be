"""A small portfolio of rules, each emitted as a program and judged by what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from hyper_parallel.ir import MemoryAction, MemoryProgram, MemoryTier
from hyper_parallel.memory._emit import Emitter
from hyper_parallel.memory._issue import Gap
from hyper_parallel.memory._memory_machine import MemoryMachine
from hyper_parallel.memory._recompute import Recomputes
from hyper_parallel.memory._select import assign_tiers
from hyper_parallel.memory._selection_rules import SelectionRule, SelectionRules

_NEAR_UNMOVED_STEP = 1.2  # times the step in which nothing moves: no other rules are tried then
_DRAM_SHARES = (0.75, 0.5, 0.25)  # part of the DRAM for what stays there; tried in turn


@dataclass(frozen=True)
class Emitted:
    """One emitted program with the emitter's own account of it; the chosen one is replayed.

    Attributes: `peaks` are bytes that live at the same time, `dram_bytes` what host memory gives for them.
    """

    actions: tuple[MemoryAction, ...]
    homes: tuple[MemoryTier, ...]
    seconds: float
    peaks: dict[MemoryTier, int]
    dram_bytes: int
    gaps: tuple[Gap, ...]
    recomputes: Recomputes | None
    rule: str

    @classmethod
    def by(
        cls,
        emitter: Emitter,
        actions: tuple[MemoryAction, ...],
        gaps: Sequence[Gap],
        recomputes: Recomputes,
        rule: str,
    ) -> Emitted:
        """What an emitter gave, with its account."""
        ledger = emitter.ledger
        return cls(
            actions,
            tuple(emitter.copies.homes),
            ledger.clock.now_s,
            ledger.peaks,
            ledger.dram_bytes,
            tuple(gaps),
            recomputes,
            rule,
        )

    @property
    def peak(self) -> int:
        """Device bytes."""
        return self.peaks["device"]


@dataclass
class Search:
    """All rules of one planning, and what was seen on the way."""

    program: MemoryProgram
    machine: MemoryMachine
    order: tuple[int, ...]
    rules: SelectionRules
    best_seen: Emitted
    # By selector, rank, window, candidates taken and bytes that are waited for: the time limit, and what it gave.
    made: dict[tuple[object, ...], tuple[float, Emitted | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = self.rules.fixed

    def portfolio(
        self,
        target: int,
        limit_s: float = float("inf"),
        budget: int | None = None,
        every: bool = True,
    ) -> list[Emitted]:
        """Emitted programs for a target that respect the other tiers.

        Once a target is met within the time limit, rules that did not meet it are not asked for the next, lower one.

        Args:
            target: Device bytes that are aimed at.
            limit_s: Programs that take longer are given up on the way.
            budget: Only the fastest program under it is wanted: what is found becomes the time limit.
            every: Ask every rule; else only until one meets the target.
        """
        result: list[Emitted] = []
        met: list[SelectionRule] = []
        # Those that may give the fastest programs go first: what they give limits the others.
        left = self.left if budget is None else sorted(self.left, key=lambda r: r.selector.least_s)
        first = self.rules.first(target, lambda: limit_s) if budget is not None else ()
        enough_s = _NEAR_UNMOVED_STEP * self.rules.step_s if budget is not None else 0.0
        asked = set[int]()
        for rule in chain(first, (r for r in left if limit_s > enough_s)):
            asked.add(id(rule))
            if rule.selector.least_s > limit_s * (1 + 1e-9):
                continue
            aim = target
            last = None
            for _ in range(2):
                last = emitted = self.emit(rule, aim, target, limit_s)
                if emitted is None:
                    break
                if not overfull(self.machine, emitted):
                    self.best_seen = min(self.best_seen, emitted, key=lambda e: e.peak)
                    result.append(emitted)
                    if budget is not None and emitted.peak <= budget:
                        limit_s = min(limit_s, emitted.seconds)
                aim -= emitted.peak - target
                if emitted.peak <= target or aim <= 0 or rule.rank == "least_waits":
                    break
            kept = last is not None and not overfull(self.machine, last)
            if kept and last is not None and last.peak <= target and last.seconds <= limit_s:
                met.append(rule)
                if not every:
                    met += [r for r in self.left if id(r) not in asked]
                    break
        self.left = met or self.left
        return result

    def first(self, target: int, fits: Callable[[Emitted], bool]) -> Emitted | None:
        """Any program for a target that respects the other tiers and fits."""
        for rule in chain(self.rules.first(target), self.left):
            emitted = self.emit(rule, target, target)
            if emitted is not None and not overfull(self.machine, emitted) and fits(emitted):
                return emitted
        return None

    def emit(
        self, rule: SelectionRule, aim: int, target: int, limit_s: float = float("inf")
    ) -> Emitted | None:
        """One rule's program for an aim; None when it takes longer than the limit."""
        chosen, planned = rule.selector.select(aim, rule.rank)
        # What the selection cannot reach, waiting for room cannot reach either.
        missed = rule.selector.stretch is not None and planned.max(initial=0) > target
        limit_bytes = None if missed else target
        selector = rule.selector
        key = (id(selector), rule.rank, rule.window, tuple(map(id, chosen)), limit_bytes)
        if key in self.made:
            limited_s, known = self.made[key]
            if known is not None or limit_s <= limited_s:
                return known
        # The first span of a candidate ends where its bytes are counted again before the gap's end.
        back = {
            (g.storage, g.last): high
            for c in chosen
            for g, (_, high) in zip(c.gaps, c.spans, strict=False)
            if g.last < selector.n
        }
        emitted = None
        for share in _DRAM_SHARES:
            gaps = assign_tiers(
                self.program, self.machine, chosen, share, selector.recomputes.host.at_home
            )
            emitter = Emitter(
                self.program,
                self.machine,
                self.order,
                gaps,
                selector.recomputes,
                limit_bytes,
                planned.copy(),
                back,
                window=rule.window,
            )
            actions = emitter.emit(limit_s * (1 + 1e-9))
            if actions is None:
                emitted = None
                break
            emitted = Emitted.by(
                emitter, actions, gaps, selector.recomputes, f"{rule.name}, {rule.rank}"
            )
            if self.machine.copy_out is None or not overfull(self.machine, emitted):
                break
        self.made[key] = limit_s, emitted
        return emitted


def overfull(machine: MemoryMachine, emitted: Emitted) -> bool:
    """DRAM or flash cannot hold what the program puts there."""
    taken = (
        (emitted.dram_bytes, machine.dram_bytes),
        (emitted.peaks["flash"], machine.flash_bytes),
    )
    return any(cap is not None and size > cap for size, cap in taken)
