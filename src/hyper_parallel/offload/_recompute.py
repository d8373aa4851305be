"""Recompute: drop a result between two uses and run its operator again before the later one.

A result may be recomputed when its operator is repeatable, makes nothing else, and its inputs still have the contents
of the first run. An input that is dead by then is recomputed too, for the moment only, up to a small depth. A result
is judged by its recompute density: seconds of compute per byte it frees.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from hyper_parallel.ir import MemoryProgram
from hyper_parallel.offload._usedef import UseDef

MAX_CHAIN = 4


@dataclass
class Recomputes:
    """What is dropped and what is run again where, for one order.

    Attributes:
        uses: Accesses per storage in this order, the inputs of recomputed operators included.
        gaps: Per recomputed storage the positions (last use before, first use after) of its drop.
        rerun: Operators to run again before a position, in original order.
        helpers: Results that exist for the moment of a position only.
        seconds: Compute seconds added.
    """

    uses: list[list[int]]
    gaps: dict[int, tuple[int, int]] = field(default_factory=dict)
    rerun: dict[int, list[int]] = field(default_factory=dict)
    helpers: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class _Chain:
    operators: tuple[int, ...]
    helpers: tuple[int, ...]
    inputs: tuple[int, ...]
    seconds: float


def _chain(
    program: MemoryProgram, chains: UseDef, place: list[int], storage: int, until: int, depth: int
) -> _Chain | None:
    """Operators that give `storage` again before position `until`, or None when that is not possible."""
    maker = chains.maker[storage]
    if maker < 0:
        return None
    op = program.operators[maker]
    if not op.repeatable or op.writes or op.allocs != (storage,):
        return None
    if any(w < until for w in chains.writes[storage]):
        return None
    operators: list[int] = []
    helpers: list[int] = []
    inputs: list[int] = []
    seconds = op.seconds
    for s in op.reads:
        if any(place[maker] < w < until for w in chains.writes[s]):
            return None
        alive = chains.uses[s][-1] >= until or program.storages[s].at_end
        if alive:
            inputs.append(s)
            continue
        below = _chain(program, chains, place, s, until, depth - 1) if depth else None
        if below is None:
            return None
        helpers.append(s)
        for at, item in enumerate(below.operators):
            if item not in operators:
                operators.append(item)
                seconds += program.operators[below.operators[at]].seconds
        helpers += [h for h in below.helpers if h not in helpers]
        inputs += below.inputs
    return _Chain((*operators, maker), tuple(dict.fromkeys(helpers)), tuple(inputs), seconds)


def recompute_density(program: MemoryProgram, chains: UseDef) -> dict[int, float]:
    """Seconds per freed byte of every storage that may be recomputed over its longest idle gap."""
    place = _places(chains)
    density = {}
    for s, size in enumerate(program.sizes):
        gap = _longest_gap(chains.uses[s])
        if gap is None or not size or program.storages[s].at_start:
            continue
        chain = _chain(program, chains, place, s, gap[1], MAX_CHAIN)
        if chain is not None:
            density[s] = chain.seconds / size
    return density


def choose_recomputes(
    program: MemoryProgram, chains: UseDef, chosen: Collection[int]
) -> Recomputes:
    """Place the recomputation of the chosen storages.

    Later-made storages go first: what they need again becomes a use of an earlier-made one, whose own drop then ends
    there.
    """
    place = _places(chains)
    found = Recomputes([list(u) for u in chains.uses])
    for s in sorted(chosen, key=lambda s: -place[chains.maker[s]]):
        gap = _longest_gap(found.uses[s])
        if gap is None:
            continue
        chain = _chain(program, chains, place, s, gap[1], MAX_CHAIN)
        if chain is None:
            continue
        found.gaps[s] = gap
        rerun = found.rerun.setdefault(gap[1], [])
        rerun += [op for op in chain.operators if op not in rerun]
        rerun.sort(key=place.__getitem__)
        helpers = found.helpers.setdefault(gap[1], [])
        helpers += [h for h in chain.helpers if h not in helpers]
        for x in chain.inputs:
            if gap[1] not in found.uses[x]:
                found.uses[x].append(gap[1])
                found.uses[x].sort()
        found.seconds += chain.seconds
    return found


def _places(chains: UseDef) -> list[int]:
    place = [0] * len(chains.order)
    for position, index in enumerate(chains.order):
        place[index] = position
    return place


def _longest_gap(uses: list[int] | tuple[int, ...]) -> tuple[int, int] | None:
    gaps = [(b - a, a, b) for a, b in pairwise(uses) if b - a > 1]
    if not gaps:
        return None
    _, a, b = max(gaps)
    return a, b
