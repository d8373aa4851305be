"""Rounding of the solution of `residency_lp`: fractions of storages become whole storages to offload or recompute.

A position is an index in the order of the operators. The linear program has rows for a sample of the positions only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hyper_parallel.ir import MemoryProgram, StorageKind
from hyper_parallel.memory.candidates import OffloadCandidate, OffloadCandidates
from hyper_parallel.memory.def_use import use_definitions
from hyper_parallel.memory.lp_builder import LPBuilder
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.recompute import ChainFinder, choose_recomputes
from hyper_parallel.memory.residency_lp import LPOptimum

_NUM_FRACTIONAL = 6  # maximum number of decisions of each kind to flip
_MAX_REFINEMENTS = 12  # maximum number of refinements of the sampled positions per target
_NEGLIGIBLE_WAIT = 1e-5  # fraction of the step time
_NEARLY_WHOLE = 0.98  # larger fractions count as 1 and leave no rounding error


@dataclass(frozen=True)
class ResidencyChoice:
    """Storages to offload and to recompute, rounded from an optimum.

    Attributes:
        candidates: Storages that can be offloaded, given that `recomputed` are recomputed.
        offloaded: Candidates that are offloaded.
        profile: Device bytes at every position in the order of operators.
        recomputed: Storages to recompute.
        optimum: Fractional solution that was rounded.
        builder: Builder of the linear program that `optimum` solves.
    """

    candidates: OffloadCandidates
    offloaded: tuple[OffloadCandidate, ...]
    profile: np.ndarray
    recomputed: tuple[int, ...]
    optimum: LPOptimum
    builder: LPBuilder

    @property
    def peak(self) -> int:
        """Peak device bytes, without bytes of copies in flight."""
        return int(self.profile.max(initial=0))

    @property
    def mean_offload_bytes(self) -> int:
        """Mean size of the offloaded storages, weighted by size."""
        sizes = [c.num_bytes for c in self.offloaded]
        return sum(size * size for size in sizes) // max(sum(sizes), 1)


class Rounding:
    """Residency linear program of one order of operators, with optima rounded to whole storages.

    `movable_kinds` are the storage kinds that may be offloaded; None: all except inputs and outputs.
    """

    def __init__(
        self,
        program: MemoryProgram,
        machine: MemoryMachine,
        order: tuple[int, ...],
        *,
        movable_kinds: Collection[StorageKind] | None,
        recompute: bool,
    ) -> None:
        self._program, self._machine, self._order = program, machine, order
        self._finder = ChainFinder(program, use_definitions(program, order))
        self._lp_finder = self._finder if recompute else None
        self._movable = [
            s
            for s, storage in enumerate(program.storages)
            if (storage.kind in movable_kinds if movable_kinds is not None else storage.kind not in ("input", "output"))
            and (storage.persistent or not storage.at_start)
        ]
        self._candidates: dict[tuple[int, ...], OffloadCandidates] = {}

    @cached_property
    def _builder(self) -> LPBuilder:
        return LPBuilder.sampled(self._candidates_for(()), self._lp_finder)

    def _solve(self, target_bytes: int, reserve: Mapping[int, float], limit_s: float) -> LPOptimum | None:
        """Return the optimum for a target in device bytes; None if it is infeasible or the step exceeds `limit_s`.

        The program is solved for sampled positions, then again with the positions where the optimum exceeds the target.
        """
        for refinement in range(_MAX_REFINEMENTS + 1):
            optimum = self._builder.solve(target_bytes, reserve)
            if optimum is None:
                return None
            violated = self._builder.model.violated_positions(optimum, target_bytes)
            # Emission judges the remaining excess
            if not len(violated) or refinement == _MAX_REFINEMENTS:
                break
            positions = np.union1d(self._builder.model.positions, violated)
            self._builder = LPBuilder(self._candidates_for(()), self._lp_finder, positions)
        assert optimum is not None
        return optimum if optimum.seconds <= limit_s * (1 + 1e-9) else None

    def for_machine(self, machine: MemoryMachine) -> Rounding:
        """Return a copy for another machine, without the solver's last solution, because results may depend on it."""
        copied = copy(self)
        copied.__dict__.pop("_builder", None)
        copied._machine, copied._candidates = machine, {}
        return copied

    def choice(
        self, target_bytes: int, reserve: Mapping[int, float], limit_s: float = float("inf")
    ) -> ResidencyChoice | None:
        """Return the rounded optimum for a target; None if the target is infeasible or the step exceeds `limit_s`.

        `reserve` maps positions to bytes to keep free there.
        """
        optimum = self._solve(target_bytes, reserve, limit_s)
        if optimum is None:
            return None
        recomputed = self._round_recompute(optimum)
        return self._residency_choice(self._builder, optimum, target_bytes, recomputed)

    def _round_recompute(self, optimum: LPOptimum) -> tuple[int, ...]:
        """Round the recomputed fractions to whole storages with about the same bytes in total."""
        result: list[int] = []
        missing = 0.0
        for s, fraction in self._builder.recomputed.items():
            missing += optimum.fractions[fraction] * self._program.sizes[s]
            if optimum.fractions[fraction] > 1 - _NEARLY_WHOLE and missing >= self._program.sizes[s] / 2:
                missing -= self._program.sizes[s]
                result.append(s)
        return tuple(result)

    def feasible(self, target_bytes: int, limit_s: float) -> bool:
        """Return whether the linear program meets a target in device bytes within `limit_s`."""
        return self._solve(target_bytes, {}, limit_s) is not None

    def expected_waits_s(self, choice: ResidencyChoice) -> np.ndarray:
        """Return the seconds of waits at every position according to the linear program; 0 at unsampled positions."""
        result = np.zeros(len(self._order))
        result[choice.builder.model.positions] = self._expected_waits_s(choice)[:-1]
        return result

    def excess_by_position(self, choice: ResidencyChoice, target_bytes: int) -> dict[int, float]:
        """Return, per sample that exceeds the target, the largest excess in bytes since the previous sample."""
        model = choice.builder.model
        excess = model.max_by_sample(choice.profile - target_bytes)
        return {position: x for position, x in zip(model.positions.tolist(), excess.tolist(), strict=True) if x > 0}

    def unexpected_waits(self, choice: ResidencyChoice, waited_s: np.ndarray) -> dict[int, float]:
        """Return a dict from position to bytes to keep free, because an emitted program waits there unexpectedly.

        A wait is unexpected if the optimum of the linear program does not include it. The bytes are those that the
        store channel could copy during the wait. The sample before the wait gets at least as many bytes. `waited_s` has
        the seconds that the emitted program waits at every position, and at the end.
        """
        model = choice.builder.model
        excess_s = model.sum_by_sample(waited_s[:-1]) - self._expected_waits_s(choice)
        excess_s[-1] += waited_s[-1]
        excess_s[excess_s <= _NEGLIGIBLE_WAIT * model.step_s] = 0.0
        excess_s[:-2] = np.maximum(excess_s[:-2], excess_s[1:-1])
        positions = [*model.positions.tolist(), len(self._order)]
        by_position = zip(positions, (excess_s * self._machine.store.bytes_s).tolist(), strict=True)
        return {position: num_bytes for position, num_bytes in by_position if num_bytes}

    def _expected_waits_s(self, choice: ResidencyChoice) -> np.ndarray:
        """Return, per sample, the seconds of waits according to the linear program, without recomputation."""
        recompute_s = np.zeros(len(self._order))
        for position, seconds in choice.candidates.recomputes.added_seconds(self._program).items():
            recompute_s[position] = seconds
        waits: np.ndarray = choice.optimum.waits_s - choice.builder.model.sum_by_sample(recompute_s)
        return waits.clip(0.0)

    def most_fractional(self, choice: ResidencyChoice) -> list[int | OffloadCandidate]:
        """Return the storages to recompute and the candidates for offload whose fractions are closest to 0.5.

        Up to `_NUM_FRACTIONAL` of each kind are returned.
        """
        recomputed = {s: float(choice.optimum.fractions[fraction]) for s, fraction in choice.builder.recomputed.items()}
        offloaded = _fractions(choice.builder, choice.optimum, choice.candidates)
        return [
            *sorted(recomputed, key=lambda s: abs(recomputed[s] - 0.5))[:_NUM_FRACTIONAL],
            *sorted(offloaded, key=lambda c: abs(offloaded[c] - 0.5))[:_NUM_FRACTIONAL],
        ]

    def flip(self, choice: ResidencyChoice, decision: int | OffloadCandidate, target_bytes: int) -> ResidencyChoice:
        """Return the choice with one decision reversed, and with more offloads if the target needs them.

        `decision` is a storage to recompute or a candidate for offload. `choice` is returned if the candidate does not
        exist any more.
        """
        if isinstance(decision, int):
            flipped = set(choice.recomputed) ^ {decision}
            recomputed = tuple(s for s in choice.builder.recomputed if s in flipped)
            return self._residency_choice(choice.builder, choice.optimum, target_bytes, recomputed)
        # All fractions are set to 0, so that filling to the target does not undo the flip.
        fractions = dict.fromkeys(choice.candidates.all, 0.0)
        if decision not in fractions:  # an earlier flip has changed the recomputation
            return choice
        chosen = tuple(c for c in choice.offloaded if c != decision)
        if len(chosen) == len(choice.offloaded):
            chosen = (*chosen, decision)
        return self._fill_to_target(replace(choice, offloaded=chosen), fractions, target_bytes, decision)

    def _residency_choice(
        self, builder: LPBuilder, optimum: LPOptimum, target_bytes: int, recomputed: tuple[int, ...]
    ) -> ResidencyChoice:
        candidates = self._candidates_for(recomputed)
        fractions = _fractions(builder, optimum, candidates)
        chosen = tuple(_error_diffusion_round(fractions))
        choice = ResidencyChoice(candidates, chosen, candidates.profile, recomputed, optimum, builder)
        return self._fill_to_target(choice, fractions, target_bytes)

    def _fill_to_target(
        self,
        choice: ResidencyChoice,
        fractions: Mapping[OffloadCandidate, float],
        target_bytes: int,
        without: OffloadCandidate | None = None,
    ) -> ResidencyChoice:
        """Return the choice with more storages offloaded, until the target is met or no candidate is left.

        Candidates with the largest fractions come first; among equal fractions, the size closest to the excess comes
        first. The candidate `without` is never added.
        """
        chosen = list(choice.offloaded)
        selected = {without, *chosen}
        rest = {c: None for c in fractions if c not in selected}
        profile = choice.candidates.profile.copy()
        for c in chosen:
            _subtract(profile, c)
        while len(profile) and (excess := profile.max() - target_bytes) > 0:
            fullest = int(np.argmax(profile))
            helps = [c for c in rest if any(low <= fullest < high for low, high in c.spans)]
            if not helps:
                break
            pick = min(helps, key=lambda c: (-round(fractions[c], 2), abs(c.num_bytes - excess)))
            del rest[pick]
            chosen.append(pick)
            _subtract(profile, pick)
        return replace(choice, offloaded=tuple(chosen), profile=profile)

    def _candidates_for(self, recomputed: tuple[int, ...]) -> OffloadCandidates:
        if recomputed not in self._candidates:
            recomputes = choose_recomputes(self._finder, recomputed)
            self._candidates[recomputed] = OffloadCandidates(
                self._program, self._machine, self._order, recomputes, self._movable
            )
        return self._candidates[recomputed]


def _fractions(builder: LPBuilder, optimum: LPOptimum, candidates: OffloadCandidates) -> dict[OffloadCandidate, float]:
    values = optimum.fractions.tolist()
    return {c: _fraction(builder, values, c) for c in candidates.all}


def _fraction(builder: LPBuilder, fractions: Sequence[float], c: OffloadCandidate) -> float:
    if c.starts_offloaded:
        return fractions[builder.offloaded_at_start[c.storage]]
    low, high = c.gaps[0].first + 1, c.gaps[0].last
    result = 0.0
    for a, b, fraction in builder.offloads.get(c.storage, ()):
        # Recomputation inside a gap may shift its ends, so a fraction counts if it is offloaded for most of the gap.
        if (a == low and b == high) or (2 * (min(b, high) - max(a, low)) > max(high - low, b - a)):
            result += fractions[fraction]
    return result


def _error_diffusion_round(fractions: Mapping[OffloadCandidate, float]) -> list[OffloadCandidate]:
    """Return the candidates to offload: round fractions in the order of reload and carry the error in bytes."""
    chosen: list[OffloadCandidate] = []
    missing = 0.0  # rounding error: bytes of the fractions less bytes of the chosen candidates
    for c in sorted(fractions, key=lambda c: c.gaps[0].last):
        if fractions[c] >= _NEARLY_WHOLE:
            chosen.append(c)
        elif fractions[c] > 1 - _NEARLY_WHOLE:
            missing += fractions[c] * c.num_bytes
            if missing >= c.num_bytes / 2:
                missing -= c.num_bytes
                chosen.append(c)
    return chosen


def _subtract(profile: np.ndarray, c: OffloadCandidate) -> None:
    for low, high in c.spans:
        profile[low:high] -= c.num_bytes
