"""From parts to whole storages: what the linear program chose to at least a half is chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hyper_parallel.ir import MemoryProgram, StorageKind
from hyper_parallel.memory._flow import Flowed
from hyper_parallel.memory._host import HostUpdates
from hyper_parallel.memory._memory_machine import MemoryMachine
from hyper_parallel.memory._movable import Candidate, OffloadCandidates
from hyper_parallel.memory._recompute import Chains, choose_recomputes
from hyper_parallel.memory._relaxation import Relaxation
from hyper_parallel.memory._usedef import use_definitions

_DOUBTS = 40
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
    """

    candidates: OffloadCandidates
    chosen: tuple[Candidate, ...]
    profile: np.ndarray
    again: tuple[int, ...]
    relaxed: Flowed

    @property
    def peak(self) -> int:
        """Device bytes, copies not counted."""
        return int(self.profile.max(initial=0))


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
    def relaxation(self) -> Relaxation:
        """The linear program."""
        return Relaxation(self._candidates_of(()), self._finder if self._recompute else None)

    def fresh(self) -> Rounding:
        """The same, whatever has been asked before: a solver that starts elsewhere may end at another optimum."""
        return self.on(self._machine)

    def on(self, machine: MemoryMachine) -> Rounding:
        """The same with other capacities."""
        other = copy(self)
        other.__dict__.pop("relaxation", None)
        other._machine, other._candidates = machine, {}
        return other

    def choice(
        self,
        target_bytes: int,
        reserve: Mapping[int, float],
        limit_s: float = float("inf"),
        least: float = 0.5,
    ) -> WholeChoice | None:
        """The optimum for a target in whole storages; None when it is out of reach or takes longer than the limit.

        Args:
            target_bytes: Device bytes.
            reserve: By sample of the linear program, bytes that are left free.
            limit_s: Seconds of the step.
            least: What is made again to this part counts as made again.
        """
        relaxed = self.relaxation.solve(target_bytes, reserve)
        if relaxed is None or relaxed.seconds > limit_s * (1 + 1e-9):
            return None
        again = (s for s, p in self.relaxation.recomputed.items() if relaxed.parts[p] >= least)
        return self._whole(relaxed, target_bytes, tuple(again))

    def reaches(self, target_bytes: int, limit_s: float) -> bool:
        """Whether the linear program reaches a target within a time."""
        relaxed = self.relaxation.solve(target_bytes, {})
        return relaxed is not None and relaxed.seconds <= limit_s * (1 + 1e-9)

    def pauses_s(self, choice: WholeChoice) -> np.ndarray:
        """Seconds that computing waits at every position, by the linear program."""
        result = np.zeros(len(self._order))
        result[self.relaxation.flow.positions] = self._expected_s(choice)[:-1]
        return result

    def missed(self, choice: WholeChoice, target_bytes: int) -> dict[int, float]:
        """By sample of the linear program, bytes by which whole storages miss a target."""
        over = self.relaxation.flow.most_by_sample(choice.profile - target_bytes)
        return {j: float(x) for j, x in enumerate(over) if x > 0}

    def unexpected(self, choice: WholeChoice, waited_s: np.ndarray) -> dict[int, float]:
        """By sample of the linear program, bytes that are copied while computing waits although it should not.

        The sample before has to leave as much free.

        Args:
            choice: What was emitted.
            waited_s: What its program waits at every position, and at the end.
        """
        flow = self.relaxation.flow
        more = (flow.by_sample(waited_s[:-1]) - self._expected_s(choice))[:-1]
        more[more <= _NOTHING * flow.step_s] = 0.0
        more[:-1] = np.maximum(more[:-1], more[1:])
        return {j: x * self._machine.store.bytes_s for j, x in enumerate(more.tolist()) if x}

    def _expected_s(self, choice: WholeChoice) -> np.ndarray:
        """By sample of the linear program, seconds that computing waits and does not compute again."""
        again_s = np.zeros(len(self._order))
        for position, seconds in choice.candidates.recomputes.least_s(self._program).items():
            again_s[position] = seconds
        waits: np.ndarray = choice.relaxed.waits - self.relaxation.flow.by_sample(again_s)
        return waits.clip(0.0)

    def doubts(self, choice: WholeChoice) -> list[int | Candidate]:
        """Storages that are made again or not, and candidates; those first about which least is decided."""
        relaxed = choice.relaxed
        again = {s: float(relaxed.parts[p]) for s, p in self.relaxation.recomputed.items()}
        leave = {c: self._part(relaxed, c) for c in choice.candidates.all}
        return [
            *sorted(again, key=lambda s: abs(again[s] - 0.5))[:_DOUBTS],
            *sorted(leave, key=lambda c: abs(leave[c] - 0.5))[:_DOUBTS],
        ]

    def other(self, choice: WholeChoice, doubt: int | Candidate, target_bytes: int) -> WholeChoice:
        """The choice when one of its doubts is decided the other way."""
        if isinstance(doubt, int):
            again = set(choice.again) ^ {doubt}
            ordered = (s for s in self.relaxation.recomputed if s in again)
            return self._whole(choice.relaxed, target_bytes, tuple(ordered))
        parts = dict.fromkeys(choice.candidates.all, 0.0)  # its parts gave the choice
        if doubt not in parts:  # what is made again has changed since
            return choice
        chosen = tuple(c for c in choice.chosen if c != doubt)
        if len(chosen) == len(choice.chosen):
            chosen = (*chosen, doubt)
        return self._filled(replace(choice, chosen=chosen), parts, target_bytes, doubt)

    def _whole(self, relaxed: Flowed, target_bytes: int, again: tuple[int, ...]) -> WholeChoice:
        candidates = self._candidates_of(again)
        parts = {c: self._part(relaxed, c) for c in candidates.all}
        choice = WholeChoice(
            candidates, tuple(_diffused(parts)), candidates.profile, again, relaxed
        )
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

    def _part(self, relaxed: Flowed, c: Candidate) -> float:
        """The part of a candidate that the linear program chose."""
        if c.home:
            return float(relaxed.parts[self.relaxation.homes[c.storage]])
        low, high = c.spans[0]
        away = self.relaxation.away.get(c.storage, ())
        # What is away for most of the time counts; the ends of a gap may differ by what is made again within.
        near = (p for a, b, p in away if 2 * (min(b, high) - max(a, low)) > high - low)
        return float(sum(relaxed.parts[p] for p in near))

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
