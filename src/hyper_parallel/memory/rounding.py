"""From parts to whole storages: what the linear program chose to at least a half is chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hyper_parallel.ir import MemoryProgram, StorageKind
from hyper_parallel.memory.candidates import Candidate, OffloadCandidates
from hyper_parallel.memory.def_use import use_definitions
from hyper_parallel.memory.host_updates import HostUpdates
from hyper_parallel.memory.lp_builder import Relaxation
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.recompute import Chains, choose_recomputes
from hyper_parallel.memory.residency_lp import Flowed

_DOUBTS = 6  # of each kind: with as many small chains are planned within 10 % of what trying everything finds
_GROWN = 12  # times that positions are added for a target
_NOTHING = 1e-5  # of the step
_WHOLE = 0.98  # of one that leaves: what is missing is no other storage


@dataclass(frozen=True)
class WholeChoice:
    """What leaves, with what is made again.

    Attributes:
        candidates: Those that are left once the recomputations are fixed.
        chosen: The ones that leave.
        profile: Device bytes during every position.
        again: Storages that were to be made again.
        relaxed: What was rounded.
        relaxation: The linear program that it is the optimum of.
    """

    candidates: OffloadCandidates
    chosen: tuple[Candidate, ...]
    profile: np.ndarray
    again: tuple[int, ...]
    relaxed: Flowed
    relaxation: Relaxation

    @property
    def peak(self) -> int:
        """Device bytes, copies not counted."""
        return int(self.profile.max(initial=0))

    @property
    def copied_bytes(self) -> int:
        """Size of what a copied byte belongs to, in the mean."""
        sizes = [c.num_bytes for c in self.chosen]
        return sum(size * size for size in sizes) // max(sum(sizes), 1)


class Rounding:
    """The linear program of one order, with its updates in host memory, and its optima in whole storages.

    Args:
        program: Operators with their seconds.
        machine: Its channels.
        order: Order of the operators.
        hosted: Operators that run in host memory.
        move: Kinds of storages that may leave the device; None: all but inputs and outputs.
        recompute: Results may be computed again.
    """

    def __init__(
        self,
        program: MemoryProgram,
        machine: MemoryMachine,
        order: tuple[int, ...],
        hosted: frozenset[int],
        *,
        move: Collection[StorageKind] | None,
        recompute: bool,
    ) -> None:
        self._program, self._machine, self._order, self._hosted = program, machine, order, hosted
        self._recompute = recompute
        self._finder = Chains(program, use_definitions(program, order, hosted))
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
        self._candidates: dict[tuple[int, ...], OffloadCandidates] = {}

    @cached_property
    def _relaxation(self) -> Relaxation:
        return Relaxation.sampled(
            self._candidates_of(()), self._finder if self._recompute else None
        )

    def _solve(self, target_bytes: int, reserve: Mapping[int, float]) -> Flowed | None:
        """The optimum for a target; None when it is out of reach.

        It is asked for at some positions, and then for those as well where the optimum takes more than the target.
        """
        for grown in range(_GROWN + 1):
            relaxed = self._relaxation.solve(target_bytes, reserve)
            if relaxed is None:
                return None
            more = self._relaxation.flow.over(relaxed, target_bytes)
            if not len(more) or grown == _GROWN:  # what is still over is for the emission to tell
                break
            positions = np.union1d(self._relaxation.flow.positions, more)
            finder = self._finder if self._recompute else None
            self._relaxation = Relaxation(self._candidates_of(()), finder, positions)
        return relaxed

    def fresh(self) -> Rounding:
        """The same, whatever has been asked before: a solver that starts elsewhere may end at another optimum."""
        return self.on(self._machine)

    def on(self, machine: MemoryMachine) -> Rounding:
        """The same with other capacities."""
        other = copy(self)
        other.__dict__.pop("_relaxation", None)
        other._machine, other._candidates = machine, {}
        return other

    def choice(
        self,
        target_bytes: int,
        reserve: Mapping[int, float],
        limit_s: float = float("inf"),
    ) -> WholeChoice | None:
        """The optimum for a target in whole storages; None when it is out of reach or takes longer than the limit.

        Args:
            target_bytes: Device bytes.
            reserve: By position, bytes that are left free.
            limit_s: Seconds of the step.
        """
        relaxed = self._solve(target_bytes, reserve)
        if relaxed is None or relaxed.seconds > limit_s * (1 + 1e-9):
            return None
        again = self._again(relaxed)
        return self._whole(self._relaxation, relaxed, target_bytes, again)

    def _again(self, relaxed: Flowed) -> tuple[int, ...]:
        """Whole storages that are made again and add up to what the parts do."""
        result: list[int] = []
        missing = 0.0
        for s, part in self._relaxation.recomputed.items():
            missing += relaxed.parts[part] * self._program.sizes[s]
            if relaxed.parts[part] > 1 - _WHOLE and missing >= self._program.sizes[s] / 2:
                missing -= self._program.sizes[s]
                result.append(s)
        return tuple(result)

    def reaches(self, target_bytes: int, limit_s: float) -> bool:
        """Whether the linear program reaches a target within a time."""
        relaxed = self._solve(target_bytes, {})
        return relaxed is not None and relaxed.seconds <= limit_s * (1 + 1e-9)

    def pauses_s(self, choice: WholeChoice) -> np.ndarray:
        """Seconds that computing waits at every position, by the linear program."""
        result = np.zeros(len(self._order))
        result[choice.relaxation.flow.positions] = self._expected_s(choice)[:-1]
        return result

    def missed(self, choice: WholeChoice, target_bytes: int) -> dict[int, float]:
        """By position, bytes by which whole storages miss a target."""
        flow = choice.relaxation.flow
        over = flow.most_by_sample(choice.profile - target_bytes)
        return {
            at: x for at, x in zip(flow.positions.tolist(), over.tolist(), strict=True) if x > 0
        }

    def unexpected(self, choice: WholeChoice, waited_s: np.ndarray) -> dict[int, float]:
        """By position, bytes that are copied while computing waits although it should not.

        The sample before has to leave as much free.

        Args:
            choice: What was emitted.
            waited_s: What its program waits at every position, and at the end.
        """
        flow = choice.relaxation.flow
        more = flow.by_sample(waited_s[:-1]) - self._expected_s(choice)
        more[-1] += waited_s[-1]
        more[more <= _NOTHING * flow.step_s] = 0.0
        more[:-2] = np.maximum(more[:-2], more[1:-1])
        positions = [*flow.positions.tolist(), len(self._order)]
        found = zip(positions, (more * self._machine.store.bytes_s).tolist(), strict=True)
        return {at: num_bytes for at, num_bytes in found if num_bytes}

    def _expected_s(self, choice: WholeChoice) -> np.ndarray:
        """By sample of the linear program, seconds that computing waits and does not compute again."""
        again_s = np.zeros(len(self._order))
        for position, seconds in choice.candidates.recomputes.least_s(self._program).items():
            again_s[position] = seconds
        waits: np.ndarray = choice.relaxed.waits - choice.relaxation.flow.by_sample(again_s)
        return waits.clip(0.0)

    def doubts(self, choice: WholeChoice) -> list[int | Candidate]:
        """Storages that are made again or not, and candidates; those first about which least is decided."""
        again = {s: float(choice.relaxed.parts[p]) for s, p in choice.relaxation.recomputed.items()}
        parts = choice.relaxed.parts.tolist()
        leave = {c: _part(choice.relaxation, parts, c) for c in choice.candidates.all}
        return [
            *sorted(again, key=lambda s: abs(again[s] - 0.5))[:_DOUBTS],
            *sorted(leave, key=lambda c: abs(leave[c] - 0.5))[:_DOUBTS],
        ]

    def other(self, choice: WholeChoice, doubt: int | Candidate, target_bytes: int) -> WholeChoice:
        """The choice when one of its doubts is decided the other way."""
        if isinstance(doubt, int):
            again = set(choice.again) ^ {doubt}
            ordered = (s for s in choice.relaxation.recomputed if s in again)
            return self._whole(choice.relaxation, choice.relaxed, target_bytes, tuple(ordered))
        parts = dict.fromkeys(choice.candidates.all, 0.0)  # its parts gave the choice
        if doubt not in parts:  # what is made again has changed since
            return choice
        chosen = tuple(c for c in choice.chosen if c != doubt)
        if len(chosen) == len(choice.chosen):
            chosen = (*chosen, doubt)
        return self._filled(replace(choice, chosen=chosen), parts, target_bytes, doubt)

    def _whole(
        self, relaxation: Relaxation, relaxed: Flowed, target_bytes: int, again: tuple[int, ...]
    ) -> WholeChoice:
        candidates = self._candidates_of(again)
        values = relaxed.parts.tolist()
        parts = {c: _part(relaxation, values, c) for c in candidates.all}
        chosen = tuple(_diffused(parts))
        choice = WholeChoice(candidates, chosen, candidates.profile, again, relaxed, relaxation)
        return self._filled(choice, parts, target_bytes)

    def _filled(
        self,
        choice: WholeChoice,
        parts: Mapping[Candidate, float],
        target_bytes: int,
        without: Candidate | None = None,
    ) -> WholeChoice:
        """While the target is missed, the largest parts that help are taken as well, of equal ones what is missing."""
        chosen = list(choice.chosen)
        taken = {without, *chosen}
        rest = {c: None for c in parts if c not in taken}
        profile = choice.candidates.profile.copy()
        for c in chosen:
            _take(profile, c)
        while len(profile) and (over := profile.max() - target_bytes) > 0:
            at = int(np.argmax(profile))
            helps = [c for c in rest if any(low <= at < high for low, high in c.spans)]
            if not helps:
                break
            pick = min(helps, key=lambda c: (-round(parts[c], 2), abs(c.num_bytes - over)))
            del rest[pick]
            chosen.append(pick)
            _take(profile, pick)
        return replace(choice, chosen=tuple(chosen), profile=profile)

    def _candidates_of(self, again: tuple[int, ...]) -> OffloadCandidates:
        """What may leave when these storages are made again."""
        if again not in self._candidates:
            recomputes = choose_recomputes(self._finder, again)
            recomputes.host = HostUpdates.of(
                self._program, self._order, self._hosted, recomputes.uses
            )
            self._candidates[again] = OffloadCandidates(
                self._program, self._machine, self._order, recomputes, self._movable
            )
        return self._candidates[again]


def _part(relaxation: Relaxation, parts: Sequence[float], c: Candidate) -> float:
    """The part of a candidate that the linear program chose."""
    if c.home:
        return parts[relaxation.homes[c.storage]]
    low, high = c.gaps[0].first + 1, c.gaps[0].last
    result = 0.0
    for a, b, part in relaxation.away.get(c.storage, ()):
        # What is away for most of the time counts; the ends of a gap may differ by what is made again within.
        if (a == low and b == high) or (2 * (min(b, high) - max(a, low)) > max(high - low, b - a)):
            result += parts[part]
    return result


def _diffused(parts: Mapping[Candidate, float]) -> list[Candidate]:
    """Whole candidates that add up, up to any position where something comes back, to about what the parts do."""
    chosen: list[Candidate] = []
    missing = 0.0  # bytes that the parts so far have more than what was chosen
    for c in sorted(parts, key=lambda c: c.gaps[0].last):
        if parts[c] >= _WHOLE:
            chosen.append(c)
        elif parts[c] > 1 - _WHOLE:
            missing += parts[c] * c.num_bytes
            if missing >= c.num_bytes / 2:
                missing -= c.num_bytes
                chosen.append(c)
    return chosen


def _take(profile: np.ndarray, c: Candidate) -> None:
    for low, high in c.spans:
        profile[low:high] -= c.num_bytes
