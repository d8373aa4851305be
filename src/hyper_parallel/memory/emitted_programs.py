"""Search for programs that meet a target in device bytes.

A residency choice states the storages to offload and to recompute. Emission turns it into a program: a list of actions
with its simulated time and peak bytes. Every choice is judged by its emitted program. Decisions of the linear program
are fractions between 0 and 1, which are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hyper_parallel.ir import MEMORY_TIERS, MemoryAction, MemoryProgram, MemoryTier, replay
from hyper_parallel.memory.candidates import OffloadCandidate
from hyper_parallel.memory.copy_issue import Gap
from hyper_parallel.memory.def_use import identity_actions
from hyper_parallel.memory.emission import Emitter
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.recompute import Recomputes
from hyper_parallel.memory.rounding import ResidencyChoice, Rounding
from hyper_parallel.memory.timeline import clocked

# Fractions of DRAM to fill with storages that stay there, tried in turn.
_DRAM_SHARES = (0.75, 0.5, 0.25)
_POLISHED_OPERATORS, _POLISH_PASSES = 300, 3  # programs of up to 300 operators are polished
# Targets of the linear program are lowered by these multiples of the mean size of an offloaded storage. Programs of up
# to `_FAST_PROGRAM` operators try more multiples.
_HEADROOMS, _FINER_HEADROOMS, _FAST_PROGRAM = (0, 2), (0, 1, 2, 4), 3000
_ROUNDS = 6  # maximum number of solutions of the linear program per lowered target
# Every rank plans its own program while the others wait: a large one with collectives takes seconds per round.
_SHARED_HEADROOMS, _SHARED_ROUNDS = (0,), 2
_SLOWER_BY = 1.25  # factor on the time limit: slower programs do not help to find a faster one


@dataclass(frozen=True)
class EmittedProgram:
    """Emitted program with the bytes and seconds counted by the emitter.

    Attributes:
        actions: Actions in order.
        homes: Tier of every storage between steps.
        seconds: Simulated seconds.
        peaks: Peak bytes per tier.
        dram_bytes: Bytes of the host slabs that the DRAM buffers need.
        gaps: Gaps of offloaded storages: ranges of positions during which a storage is off the device.
        recomputes: Recomputed storages; None: nothing is offloaded or recomputed.
        statement: Phrase about the residency choice, for the statement of the plan.
        waited_s: Seconds that the device waits for copies at every position of the order, and at the end.
    """

    actions: tuple[MemoryAction, ...]
    homes: tuple[MemoryTier, ...]
    seconds: float
    peaks: dict[MemoryTier, int]
    dram_bytes: int
    gaps: tuple[Gap, ...]
    recomputes: Recomputes | None
    statement: str
    waited_s: np.ndarray

    @property
    def peak(self) -> int:
        """Peak device bytes."""
        return self.peaks["device"]

    def excess_bytes(self, machine: MemoryMachine) -> int:
        """Return the bytes by which the program exceeds the capacities of DRAM and flash."""
        tiers = ((self.dram_bytes, machine.dram_bytes), (self.peaks["flash"], machine.flash_bytes))
        return sum(max(size - cap, 0) for size, cap in tiers if cap is not None)


def identity_program(program: MemoryProgram, order: tuple[int, ...]) -> EmittedProgram:
    """Return the program of an order without offload and recomputation."""
    actions = identity_actions(program, order)
    peak_bytes = replay(program, program.on_device, actions).peak_bytes
    peaks = {tier: peak_bytes[tier] for tier in MEMORY_TIERS}
    seconds = clocked(program, None, actions).now_s
    waited_s = np.zeros(len(order) + 1)
    return EmittedProgram(actions, program.on_device, seconds, peaks, 0, (), None, "identity", waited_s)


def assign_tiers(
    program: MemoryProgram, machine: MemoryMachine, chosen: Sequence[OffloadCandidate], share: float
) -> list[Gap]:
    """Return the gaps of the chosen candidates, each with the tier to evict to.

    Without flash, or with unlimited DRAM, all storages go to DRAM. Otherwise, DRAM gets the storages with the shortest
    idle times, up to the fraction `share` of its capacity, and flash gets the remaining storages. The rest of the DRAM
    is for copies between device and flash. All chosen candidates are assumed to be off the device at the same time, an
    upper bound.
    """
    flash = machine.copy_out is not None and machine.copy_in is not None
    room = machine.dram_bytes
    tiers: dict[int, MemoryTier] = {}
    if room is not None and flash:
        used = 0
        by_storage: dict[int, float] = {}
        for c in chosen:
            by_storage[c.storage] = max(by_storage.get(c.storage, 0.0), c.idle_s)
        for s in sorted(by_storage, key=lambda s: by_storage[s]):
            if used + program.sizes[s] <= room * share:
                used += program.sizes[s]
            else:
                tiers[s] = "flash"
    return [Gap(g.storage, g.first, g.last, tiers.get(g.storage, "dram")) for c in chosen for g in c.gaps]


@dataclass
class Search:
    """Search for emitted programs in one order of the operators, with a cache.

    Attributes:
        program: Operators and storages.
        machine: Copy channels and capacities.
        order: Operator index at each position.
        rounding: Rounded linear program, which returns the choice for a target.
        identity: Program without offload and recomputation.
        best_seen: Program of least peak so far that respects the capacities of DRAM and flash.
    """

    program: MemoryProgram
    machine: MemoryMachine
    order: tuple[int, ...]
    rounding: Rounding
    identity: EmittedProgram
    # (choice, device bytes, waits) -> (time limit, program).
    _emissions: dict[tuple[object, ...], tuple[float, EmittedProgram | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.best_seen = self.identity
        fast = len(self.program.operators) <= _FAST_PROGRAM
        shared = self.program.communicates and not fast
        self._num_rounds = _SHARED_ROUNDS if shared else _ROUNDS
        self._headrooms = _SHARED_HEADROOMS if shared else _FINER_HEADROOMS if fast else _HEADROOMS

    def for_machine(self, machine: MemoryMachine) -> Search:
        """Return the same search on another machine, with an empty cache."""
        return replace(self, machine=machine, rounding=self.rounding.for_machine(machine), _emissions={})

    def programs(self, target: int, limit_s: float = float("inf"), lowers: bool = False) -> list[EmittedProgram]:
        """Return emitted programs for a target in device bytes that respect the capacities of DRAM and flash.

        The programs may miss the target or the time limit, so the caller must check both. The search ends at the first
        program that meets both. With `lowers`, the search lowers `limit_s` to the time of this program and continues.
        """
        result: list[EmittedProgram] = []
        emissions: list[tuple[ResidencyChoice, EmittedProgram]] = []
        mean_bytes = 0
        for headroom in self._headrooms:
            if headroom and not mean_bytes:
                break  # no program was emitted
            for choice, e in self._refine(target - headroom * mean_bytes, target, limit_s):
                mean_bytes = mean_bytes or choice.mean_offload_bytes
                emissions.append((choice, e))
                if e.excess_bytes(self.machine):
                    continue
                result.append(e)
                if e.peak <= target and e.seconds <= limit_s * (1 + 1e-9):
                    if not lowers:
                        return result
                    limit_s = e.seconds
        if emissions and len(self.program.operators) <= _POLISHED_OPERATORS:
            choice, best = min(emissions, key=lambda pair: self._shortfall(pair[1], target))
            polished = self._polish(choice, best, target, limit_s, lowers=lowers)
            if not polished.excess_bytes(self.machine):
                result.append(polished)
        return result

    def _shortfall(self, emitted: EmittedProgram, target: int) -> tuple[int, int, float]:
        return emitted.excess_bytes(self.machine), max(emitted.peak - target, 0), emitted.seconds

    def _polish(
        self, choice: ResidencyChoice, best: EmittedProgram, target: int, limit_s: float, *, lowers: bool
    ) -> EmittedProgram:
        """Return the best program of a local search that reverses decisions with fractions closest to 0.5.

        The result is `best` if the search does not improve it.
        """
        enough = 0, 0, 0.0 if lowers else limit_s
        for _ in range(_POLISH_PASSES):
            before = best
            for decision in self.rounding.most_fractional(choice):
                flipped = self.rounding.flip(choice, decision, target)
                if flipped.peak > target:
                    continue
                shortfall = self._shortfall(best, target)
                emit_s = _SLOWER_BY * limit_s if any(shortfall[:2]) else shortfall[2]
                e = self._emit(flipped, target, emit_s)
                if e and self._shortfall(e, target) < shortfall:
                    best, choice = e, flipped
                    if self._shortfall(best, target) <= enough:
                        return best
            if best is before:
                break
        self.best_seen = min(self.best_seen, best, key=lambda e: (e.excess_bytes(self.machine), e.peak))
        return best

    def _refine(self, aim: int, target: int, limit_s: float) -> Iterator[tuple[ResidencyChoice, EmittedProgram]]:
        """Yield (choice, program) pairs for one target `aim` of the linear program, which is at most `target`.

        Each round reserves more bytes where the previous choice exceeded `target` or its program waited unexpectedly.
        """
        reserve: dict[int, float] = {}
        for _ in range(self._num_rounds):
            choice = self.rounding.choice(aim, reserve, limit_s)
            if choice is None:
                return
            missing = self.rounding.excess_by_position(choice, target)
            if not missing:
                emitted = self._emit(choice, target, _SLOWER_BY * limit_s)
                if emitted is None:
                    return
                yield choice, emitted
                if not emitted.excess_bytes(self.machine):
                    self.best_seen = min(self.best_seen, emitted, key=lambda e: e.peak)
                    if emitted.peak <= target:
                        limit_s = min(limit_s, emitted.seconds)
                missing = self.rounding.unexpected_waits(choice, emitted.waited_s)
            if not missing:
                return
            for j, num_bytes in missing.items():
                reserve[j] = reserve.get(j, 0.0) + num_bytes

    def _emit(self, choice: ResidencyChoice, target: int, limit_s: float) -> EmittedProgram | None:
        """Return the program of a choice, cached; None if it takes longer than `limit_s`."""
        key = (
            tuple(choice.candidates.recomputes.gaps.items()),
            frozenset(choice.offloaded),
            target,
            tuple(choice.optimum.waits_s),
        )
        if key in self._emissions:
            limited_s, known = self._emissions[key]
            if known is not None or limit_s <= limited_s:
                return known
        emitted = self._emit_anew(choice, target, limit_s)
        self._emissions[key] = limit_s, emitted
        return emitted

    def _emit_anew(self, choice: ResidencyChoice, target: int, limit_s: float) -> EmittedProgram | None:
        """Emit the program of a choice with the largest of `_DRAM_SHARES` that fits the capacities of DRAM and flash.

        If none fits, use the smallest share. Return None if a program takes longer than `limit_s`.
        """
        recomputes, emitted = choice.candidates.recomputes, None
        pauses_s = self.rounding.expected_waits_s(choice)
        label = "copies and recompute" if recomputes.gaps else "copies"
        for share in _DRAM_SHARES:
            gaps = assign_tiers(self.program, self.machine, choice.offloaded, share)
            emitter = Emitter(choice.candidates, gaps, target, choice.profile.copy(), pauses_s)
            actions = emitter.emit(limit_s * (1 + 1e-9))
            if actions is None:
                return None
            ledger = emitter.ledger
            emitted = EmittedProgram(
                actions,
                tuple(emitter.copies.homes),
                ledger.clock.now_s,
                ledger.peaks,
                ledger.dram_bytes,
                tuple(gaps),
                recomputes,
                f"{label} in {choice.optimum.seconds:.6g} s by the linear program",
                emitter.waited_s,
            )
            if self.machine.copy_out is None or not emitted.excess_bytes(self.machine):
                break
        return emitted
