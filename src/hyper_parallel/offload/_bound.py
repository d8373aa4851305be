"""What no plan can beat: a linear relaxation of moving and recomputing storages, for one order of the operators.

A real plan moves whole storages; here fractions may move, copies may be cut and spread freely over their channel, and a
recomputation needs no inputs. What remains is what binds: bytes at every operator, seconds between two positions that a
channel has for what must be copied between them, and seconds of compute. So the optimum is a lower bound for every plan
of that order, with any policy. Updates that may run in host memory cost nothing here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hyper_parallel.ir import MemoryProgram, StorageKind
from hyper_parallel.offload._host import device_part
from hyper_parallel.offload._linear import LinearProgram
from hyper_parallel.offload._memory_machine import MemoryMachine
from hyper_parallel.offload._usedef import use_definitions


def least_time_bound(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: Sequence[int],
    budget_bytes: int,
    most_s: float,
    *,
    move: Collection[StorageKind] | None = None,
    recompute: bool = True,
) -> float:
    """Seconds that every plan of this order takes under a budget.

    Args:
        program: Operators with their seconds; small: the relaxation has a variable per storage and idle position.
        machine: Channels; capacities of DRAM and flash are left out, which keeps the bound valid.
        order: Order of the operators.
        budget_bytes: Device bytes.
        most_s: Seconds of a known plan; the bound is never above it when that plan is legal.
        move: See `plan_memory`.
        recompute: See `plan_memory`.
    """
    program = device_part(program, machine)
    model = _Model(
        program, machine, tuple(order), move, recompute, max(most_s - program.seconds, 0.0)
    )
    model.lp.costs[model.waits[0] :] = [1.0] * len(model.waits)
    for position in range(model.n):
        absent = model.absent_at(position)
        model.lp.at_least(absent, model.base[position] - budget_bytes)
    return program.seconds + max(model.lp.lower_bound(), 0.0)


def least_peak_bound(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: Sequence[int],
    limit_s: float,
    *,
    move: Collection[StorageKind] | None = None,
    recompute: bool = True,
) -> float:
    """Bytes that every plan of this order takes which ends within `limit_s`; see `least_time_bound`."""
    return least_peak_program(
        program, machine, order, limit_s, move=move, recompute=recompute
    ).lower_bound()


def least_peak_program(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: Sequence[int],
    limit_s: float,
    *,
    move: Collection[StorageKind] | None = None,
    recompute: bool = True,
) -> LinearProgram:
    """The linear program of `least_peak_bound`; with its `whole` variables at 0 or 1, whole storages move.

    Solved in whole numbers it is the least peak of any plan of this order but for two freedoms: copies may be cut, and
    recomputation needs no inputs. So its optimum is a bound as well, a higher one.
    """
    program = device_part(program, machine)
    model = _Model(
        program, machine, tuple(order), move, recompute, max(limit_s - program.seconds, 0.0)
    )
    lp = model.lp
    peak = lp.variable(float(max(model.base, default=0)), 1.0)
    for position in range(model.n):
        lp.at_least({**model.absent_at(position), peak: 1.0}, model.base[position])
    lp.at_least(dict.fromkeys(model.waits, -1.0), program.seconds - limit_s)
    for gap in model.gaps:
        decided = (gap.home, gap.dropped, *gap.away)
        lp.whole.update(v for v in decided if v is not None)
    return lp


@dataclass
class _Version:
    """One content of a storage: written at `since` (-1: there at the start), gone after `until`."""

    since: int
    until: int
    num_bytes: int
    stored: list[int] = field(
        default_factory=list
    )  # variable per position since+1 ..: share stored by then


@dataclass
class _Away:
    """One idle gap (first, last) of a storage: share away at each position between."""

    storage: int
    first: int
    last: int
    num_bytes: int
    away: list[int]
    back: list[int]  # share that must still be fetched after each position between
    home: int | None = None
    dropped: int | None = None


class _Model:
    """Variables and rows that both goals share."""

    def __init__(
        self,
        program: MemoryProgram,
        machine: MemoryMachine,
        order: tuple[int, ...],
        move: Collection[StorageKind] | None,
        recompute: bool,
        most_wait_s: float,
    ) -> None:
        self.program, self.machine, self.order, self.n = program, machine, order, len(order)
        self.lp = LinearProgram()
        self.seconds = [program.operators[i].seconds for i in order]
        self.versions: list[_Version] = []
        self.gaps: list[_Away] = []
        chains = use_definitions(program, order)
        self.base = [0.0] * self.n
        reruns: list[tuple[int, int, float]] = []
        for s, storage in enumerate(program.storages):
            uses, writes = chains.uses[s], chains.writes[s]
            if not uses and not storage.persistent:
                continue
            begin = 0 if storage.at_start else uses[0]
            end = self.n - 1 if storage.at_end else uses[-1]
            for position in range(begin, end + 1):
                self.base[position] += program.sizes[s]
            movable = (
                storage.kind in move
                if move is not None
                else storage.kind not in ("input", "output")
            ) and (storage.persistent or not storage.at_start)
            made = program.operators[chains.maker[s]] if chains.maker[s] >= 0 else None
            recomputable = recompute and made is not None and made.repeatable and not made.writes
            if program.sizes[s] and (movable or recomputable):
                self._storage(s, uses, writes, movable)
                if recomputable and made is not None:
                    for gap in self.gaps:
                        if gap.storage == s and gap.home is None:
                            gap.dropped = self.lp.variable(1.0)
                            # One run gives all its results again.
                            reruns.append((gap.last, gap.dropped, made.seconds / len(made.allocs)))
                            for v in gap.away:
                                self.lp.at_least({v: -1.0, gap.dropped: -1.0}, -1.0)
        # A wait before every operator and one at the end; recomputation is part of it.
        self.waits = [self.lp.variable(most_wait_s) for _ in range(self.n + 1)]
        for position in range(self.n):
            row = {self.waits[position]: 1.0}
            for at, variable, seconds in reruns:
                if at == position:
                    row[variable] = -seconds
            if len(row) > 1:
                self.lp.at_least(row, 0.0)
        self._stores()
        self._reloads()

    def absent_at(self, position: int) -> dict[int, float]:
        """Coefficients of the bytes that are gone during a position."""
        row: dict[int, float] = {}
        for gap in self.gaps:
            if gap.first < position < gap.last:
                size = float(self.program.sizes[gap.storage])
                row[gap.away[position - gap.first - 1]] = size
                if gap.dropped is not None:
                    row[gap.dropped] = size
        return row

    def _storage(self, s: int, uses: Sequence[int], writes: Sequence[int], movable: bool) -> None:
        lp, storage = self.lp, self.program.storages[s]
        top = 1.0 if movable else 0.0
        since = -1 if storage.at_start else uses[0]
        begins = sorted({since, *(w for w in writes if w > since)})
        ends = [*begins[1:], self.n if storage.at_end else uses[-1]]
        home = lp.variable(top) if storage.persistent else None
        spans: list[tuple[int, int, int | None]] = [(a, b, None) for a, b in pairwise(uses)]
        if home is not None:
            spans = [
                (-1, uses[0] if uses else self.n, home),
                *spans,
                *([(uses[-1], self.n, home)] if uses else []),
            ]
        versions = []
        for a, b in zip(begins, ends, strict=True):
            version = _Version(a, b, storage.num_bytes)
            version.stored = [lp.variable(top) for _ in range(max(b - a, 0))]
            for before, after in pairwise(version.stored):
                lp.at_least({after: 1.0, before: -1.0}, 0.0)
            versions.append(version)
        for a, b, held in spans:
            away = [lp.variable(top) for _ in range(a + 1, b)]
            back = [lp.variable(top) for _ in range(a + 1, b)] if b < self.n else []
            gap = _Away(s, a, b, storage.num_bytes, away, back, held)
            self.gaps.append(gap)
            content = max((v for v in versions if v.since <= a), key=lambda v: v.since)
            for at, variable in zip(range(a + 1, b), away, strict=True):
                if held is not None:
                    lp.at_least({held: 1.0, variable: -1.0}, 0.0)
                if held is not None and a < 0:
                    continue  # at home: nothing to store
                row = {content.stored[at - content.since - 1]: 1.0, variable: -1.0}
                if home is not None and content.since < 0:
                    row[home] = 1.0
                lp.at_least(row, 0.0)
            for before, after in pairwise(back):
                lp.at_least({before: 1.0, after: -1.0}, 0.0)
            for share, variable in zip(back, away, strict=False):
                lp.at_least({share: 1.0, variable: -1.0}, 0.0)
        if home is not None and versions[-1].since >= 0:
            lp.at_least({versions[-1].stored[-1]: 1.0, home: -1.0}, 0.0)
        self.versions += versions

    def _seconds_between(self, first: int, last: int) -> tuple[dict[int, float], float]:
        """Seconds from the end of position `first` to the start of `last`: waits, and a number."""
        waits = {self.waits[i]: 1.0 for i in range(first + 1, last + 1)}
        return waits, sum(self.seconds[first + 1 : last])

    def _stores(self) -> None:
        for first in sorted({v.since for v in self.versions}):
            for last in range(first + 1, self.n + 1):
                row, constant = self._seconds_between(first, last)
                filled = False
                for v in self.versions:
                    at = min(last, v.until) - v.since - 1
                    if v.since >= first and 0 <= at < len(v.stored):
                        row[v.stored[at]] = -self.machine.store.seconds(v.num_bytes)
                        filled = True
                if filled:
                    self.lp.at_least(row, -constant)

    def _reloads(self) -> None:
        ends = sorted({g.last for g in self.gaps if g.last < self.n})
        for last in ends:
            for first in range(-1, last):
                row, constant = self._seconds_between(first, last)
                filled = False
                for g in self.gaps:
                    if g.last > last or g.last <= first:
                        continue
                    seconds = self.machine.prefetch.seconds(g.num_bytes)
                    variable = None
                    if first < 0 and g.home is not None and g.first < 0:
                        variable = g.home
                    elif g.back:
                        variable = g.back[max(first - g.first - 1, 0)]
                    if variable is not None:
                        row[variable] = row.get(variable, 0.0) - seconds
                        filled = True
                if filled:
                    self.lp.at_least(row, -constant)
