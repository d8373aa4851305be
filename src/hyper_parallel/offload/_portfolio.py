"""A small portfolio of rules, each emitted as a program and judged by what came out."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.ir import MemoryAction, MemoryProgram, MemoryTier
from hyper_parallel.offload._emit import Emitter
from hyper_parallel.offload._issue import Gap
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._recompute import Recomputes
from hyper_parallel.offload._select import Rank, Selector, assign_tiers

_RANKS: tuple[Rank, ...] = ("idle_per_transfer", "longest_gap", "ring")
_DRAM_SHARES = (0.75, 0.5, 0.25)  # part of the DRAM for what stays there; tried in turn
_WINDOW = 4.0  # reloads at most four own durations early when waits are allowed


@dataclass(frozen=True)
class Emitted:
    """One emitted program with the emitter's own account of it; the chosen one is replayed."""

    actions: tuple[MemoryAction, ...]
    homes: tuple[MemoryTier, ...]
    seconds: float
    peaks: dict[MemoryTier, int]
    gaps: tuple[Gap, ...]
    again: Recomputes | None
    rule: str

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
    selectors: list[tuple[str, Selector]]
    best_seen: Emitted

    def __post_init__(self) -> None:
        # What is at home in DRAM costs less than the channels' account of it where computation waits for them anyway.
        self.rules = [
            (name, s, rank)
            for name, s in self.selectors
            for rank in (*_RANKS, *(("home",) if s.stretch is None else ()))
        ]
        # What a rule gives when it has taken everything it can, by selector and rank: the same for every lower target.
        self.exhausted: dict[tuple[int, Rank], tuple[int, Emitted | None]] = {}

    def portfolio(
        self, target: int, limit_s: float = float("inf"), budget: int | None = None
    ) -> list[Emitted]:
        """Every emitted program for a target that respects the other tiers.

        Once a target is met within the time limit, only the rules that met it go on to the next, lower one.

        Args:
            target: Device bytes that are aimed at.
            limit_s: Programs that take longer are given up on the way.
            budget: Only the fastest program under it is wanted: what is found becomes the time limit.
        """
        found: list[Emitted] = []
        met: list[int] = []
        for index, (name, selector, rank) in enumerate(self.rules):
            aim = target
            last = None
            for _ in range(2):
                last = emitted = self.emit(selector, aim, target, rank, name, limit_s)
                if emitted is None:
                    break
                if not overfull(self.machine, emitted):
                    self.best_seen = min(self.best_seen, emitted, key=lambda e: e.peak)
                    found.append(emitted)
                    if budget is not None and emitted.peak <= budget:
                        limit_s = min(limit_s, emitted.seconds)
                aim -= emitted.peak - target
                if emitted.peak <= target or aim <= 0:
                    break
            kept = last is not None and not overfull(self.machine, last)
            if kept and last is not None and last.peak <= target and last.seconds <= limit_s:
                met.append(index)
        if met:
            self.rules = [self.rules[i] for i in met]
        return found

    def emit(
        self,
        selector: Selector,
        aim: int,
        target: int,
        rank: Rank,
        name: str,
        limit_s: float = float("inf"),
    ) -> Emitted | None:
        """One rule's program for an aim; None when it takes longer than the limit."""
        chosen, planned = selector.select(aim, rank)
        # What the selection cannot reach, waiting for room cannot reach within the time either.
        reached = int(planned.max()) if len(planned) else 0
        missed = limit_s < float("inf") and reached > target and selector.stretch is not None
        key = (id(selector), rank)
        if missed and key in self.exhausted and self.exhausted[key][0] == reached:
            return self.exhausted[key][1]
        # The first span of a candidate ends where its bytes are counted again before the gap's end.
        back = {
            (g.storage, g.last): high
            for c in chosen
            for g, (_, high) in zip(c.gaps, c.spans, strict=False)
            if g.last < selector.n
        }
        emitted: Emitted | None = None
        for share in _DRAM_SHARES:
            gaps = assign_tiers(
                self.program, self.machine, chosen, share, selector.again.host.at_home
            )
            emitter = Emitter(
                self.program,
                self.machine,
                self.order,
                gaps,
                selector.again,
                None if missed else target,
                planned.copy(),
                back,
                window=_WINDOW if selector.stall else None,
            )
            actions = emitter.emit(limit_s * (1 + 1e-9))
            if actions is None:
                emitted = None
                break
            emitted = Emitted(
                actions,
                tuple(emitter.homes),
                emitter.clock.now_s,
                emitter.peaks,
                tuple(gaps),
                selector.again,
                f"{name}, {rank}",
            )
            if self.machine.copy_out is None or not overfull(self.machine, emitted):
                break
        if missed:
            self.exhausted[key] = (reached, emitted)
        return emitted


def overfull(machine: MemoryMachine, emitted: Emitted) -> bool:
    """DRAM or flash cannot hold what the program puts there."""
    caps: dict[MemoryTier, int | None] = {"dram": machine.dram_bytes, "flash": machine.flash_bytes}
    return any(cap is not None and emitted.peaks[t] > cap for t, cap in caps.items())
