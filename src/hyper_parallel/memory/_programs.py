"""Programs for a target: the optimum of a target a little lower, emitted within the target itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hyper_parallel.ir import MemoryProgram
from hyper_parallel.memory.emitted_programs import Emitted, emit
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.rounding import Rounding, WholeChoice

_LARGE_PROGRAM = 300  # operators
# Storages that are on their way beyond what the linear program counts; the second for programs that are emitted fast.
_HEADROOMS, _FINER_HEADROOMS, _FAST_PROGRAM = (0, 2), (0, 1, 2, 4), 3000
_POLISHED, _PASSES = 1, 3
_ROUNDS = 6  # of the linear program for one target
# Of programs with collectives every rank plans its own, while the others wait: a large one takes seconds a round.
_SHARED_HEADROOMS, _SHARED_ROUNDS = (0,), 2
_NEAR = 1.25  # times the limit: a program that is slower by more tells nothing


@dataclass
class Search:
    """The emitted programs of one order.

    Attributes:
        program: Operators and storages.
        machine: Channels and capacities.
        order: Order of the operators.
        rounding: What is chosen for a target.
        label: What its updates in host memory are called.
        identity: The program in which nothing moves.
    """

    program: MemoryProgram
    machine: MemoryMachine
    order: tuple[int, ...]
    rounding: Rounding
    label: str
    identity: Emitted
    # By choice, device bytes and waits: the time limit, and what it gave.
    _made: dict[tuple[object, ...], tuple[float, Emitted | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.best_seen = self.identity  # of all programs, the one of least peak

    def fresh(self) -> Search:
        """The same, whatever has been asked before."""
        return replace(self, rounding=self.rounding.fresh(), _made={})

    def on(self, machine: MemoryMachine) -> Search:
        """The same with other capacities."""
        return replace(self, machine=machine, rounding=self.rounding.on(machine), _made={})

    def reaches(self, target: int, limit_s: float) -> bool:
        """Whether the linear program has a target within a time."""
        return self.rounding.reaches(target, limit_s)

    def programs(
        self, target: int, limit_s: float = float("inf"), lowers: bool = False
    ) -> list[Emitted]:
        """Emitted programs for a target that respect the other tiers.

        Args:
            target: Device bytes that are aimed at.
            limit_s: Programs that take longer are given up on the way.
            lowers: Only the fastest program is wanted: what is found becomes the time limit.
        """
        result: list[Emitted] = []
        made: list[tuple[WholeChoice, Emitted]] = []
        large = len(self.program.operators) > _LARGE_PROGRAM
        copied_bytes = 0
        for headroom in self._headrooms:
            if headroom and not copied_bytes:
                break  # nothing was emitted
            for choice, e in self._refined(target - headroom * copied_bytes, target, limit_s):
                copied_bytes = copied_bytes or choice.copied_bytes
                made.append((choice, e))
                if e.overfull(self.machine):
                    continue
                result.append(e)
                if e.peak <= target and e.seconds <= limit_s * (1 + 1e-9):
                    if not lowers:
                        return result
                    limit_s = e.seconds
        if not large:
            made.sort(key=lambda one: self._misses(one[1], target))
            enough = 0, 0, 0.0 if lowers else limit_s
            polished = (self._polished(*one, target, limit_s, enough) for one in made[:_POLISHED])
            result += [e for e in polished if not e.overfull(self.machine)]
        return result

    @property
    def _is_fast(self) -> bool:
        return len(self.program.operators) <= _FAST_PROGRAM

    @property
    def _headrooms(self) -> tuple[int, ...]:
        if self._is_fast:
            return _FINER_HEADROOMS
        return _SHARED_HEADROOMS if self.program.communicates else _HEADROOMS

    def _misses(self, emitted: Emitted, target: int) -> tuple[int, int, float]:
        """By how much a program misses the capacities and a target, and then its seconds."""
        return emitted.overfull(self.machine), max(emitted.peak - target, 0), emitted.seconds

    def _polished(
        self,
        choice: WholeChoice,
        best: Emitted,
        target: int,
        limit_s: float,
        enough: tuple[int, int, float],
    ) -> Emitted:
        """The program when doubts are decided the other way, as long as it is better then."""
        for _ in range(_PASSES):
            before = best
            for doubt in self.rounding.doubts(choice):
                other = self.rounding.other(choice, doubt, target)
                if other.peak > target:
                    continue
                missed = self._misses(best, target)
                e = self._emit(other, target, _NEAR * limit_s if any(missed[:2]) else missed[2])
                if e and self._misses(e, target) < missed:
                    best, choice = e, other
                    if self._misses(best, target) <= enough:
                        return best
            if best is before:
                break
        self.best_seen = min(self.best_seen, best, key=lambda e: (e.overfull(self.machine), e.peak))
        return best

    def _refined(
        self, aim: int, target: int, limit_s: float
    ) -> Iterator[tuple[WholeChoice, Emitted]]:
        """Programs of an aim, each with more bytes free where the one before waited unexpectedly."""
        reserve: dict[int, float] = {}
        few = self.program.communicates and not self._is_fast
        for _ in range(_SHARED_ROUNDS if few else _ROUNDS):
            choice = self.rounding.choice(aim, reserve, limit_s)
            if choice is None:
                return
            more = self.rounding.missed(choice, target)
            if not more:
                emitted = self._emit(choice, target, _NEAR * limit_s)
                if emitted is None:
                    return
                yield choice, emitted
                if not emitted.overfull(self.machine):
                    self.best_seen = min(self.best_seen, emitted, key=lambda e: e.peak)
                    if emitted.peak <= target:
                        limit_s = min(limit_s, emitted.seconds)
                more = self.rounding.unexpected(choice, emitted.waited_s)
            if not more:
                return
            for j, num_bytes in more.items():
                reserve[j] = reserve.get(j, 0.0) + num_bytes

    def _emit(self, choice: WholeChoice, target: int, limit_s: float) -> Emitted | None:
        """The program of a choice; None when it takes longer than the limit."""
        again = choice.candidates.recomputes.gaps
        key = (tuple(again.items()), frozenset(choice.chosen), target, tuple(choice.relaxed.waits))
        if key in self._made:
            limited_s, known = self._made[key]
            if known is not None or limit_s <= limited_s:
                return known
        what = "copies and recompute" if again else "copies"
        emitted = emit(
            self.program,
            self.machine,
            self.order,
            choice,
            target,
            limit_s,
            self.rounding.pauses_s(choice),
            f"{what} in {choice.relaxed.seconds:.6g} s by the linear program{self.label}",
        )
        self._made[key] = limit_s, emitted
        return emitted
