"""Recompute: drop a result between two uses and run its operator again before the later one.

A result may be recomputed when its operator is repeatable and its inputs still have the contents of the first run. What
the operator makes besides (the sums of an attention, the statistics of a norm) is dropped and comes back with it. An
input that is dead by then is recomputed too, for the moment only, up to a small depth, or lives on when it is small
against what it gives again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from hyper_parallel.ir import MemoryProgram
from hyper_parallel.memory.def_use import UseDef
from hyper_parallel.memory.host_updates import HostUpdates

MAX_CHAIN = 4


@dataclass
class Recomputes:
    """What is dropped and what is run again where, for one order; and what does not run on the device at all.

    Attributes:
        uses: Accesses per storage in this order, the inputs of recomputed operators included.
        gaps: Per recomputed storage the positions (last use before, first use after) of its drop.
        rerun: Operators to run again before a position, in original order.
        helpers: Results that exist for the moment of a position only.
        seconds: Compute seconds added.
        host: What runs in host memory; it is in no `uses`.
    """

    uses: list[list[int]]
    gaps: dict[int, tuple[int, int]] = field(default_factory=dict)
    rerun: dict[int, list[int]] = field(default_factory=dict)
    helpers: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    host: HostUpdates = field(default_factory=HostUpdates)

    def least_s(self, program: MemoryProgram) -> dict[int, float]:
        """Compute seconds by position that every program with these recomputations adds.

        What other ranks use may still be on the device where it would be made again, so it does not count.
        """
        held = {s for op in program.operators if op.group or op.message for s in op.touched}

        def gone(s: int, position: int) -> bool:
            dropped = s in self.gaps and self.gaps[s][1] == position
            return s not in held and (dropped or self.uses[s][-1] < position)

        return {
            position: sum(
                program.operators[i].seconds
                for i in rerun
                if any(gone(s, position) for s in program.operators[i].allocs)
            )
            for position, rerun in self.rerun.items()
        }


@dataclass(frozen=True)
class Chain:
    """Operators that give a storage again.

    Attributes:
        operators: What to run, in order.
        helpers: Results that exist only while it runs.
        inputs: What must be alive, `kept` included.
        kept: Inputs that would be dead by then and must live on.
        seconds: Compute.
    """

    operators: tuple[int, ...]
    helpers: tuple[int, ...]
    inputs: tuple[int, ...]
    kept: tuple[int, ...]
    seconds: float


class Chains:
    """Finds the chain of every storage; decides which dead inputs live on for the sake of what they give again.

    A float32 copy made inside a norm can be made again from the bfloat16 residual, half its size; but the residual is
    dead by then, and making it again needs a matrix product. So it is kept, and everything that descends from it by
    cheap operators is dropped. An input is kept when the storages that need it are together clearly larger.
    """

    def __init__(self, program: MemoryProgram, chains: UseDef) -> None:
        self.program, self.chains = program, chains
        self.place = _places(chains)
        self.keep: set[int] | None = None  # None: anything may be kept
        needed_by = [0] * len(program.storages)
        for s, size in enumerate(program.sizes):
            chain = self.of_longest_gap(s)
            if chain is not None and not any(program.operators[o].flops for o in chain.operators):
                for x in chain.kept:
                    needed_by[x] += size
        self.keep = {
            x for x, freed in enumerate(needed_by) if 2 * freed >= 3 * program.sizes[x] > 0
        }

    def of_longest_gap(self, storage: int) -> Chain | None:
        """The chain that fills the longest idle gap of a storage again."""
        gap = longest_gap(self.chains.uses[storage])
        if (
            gap is None
            or not self.program.sizes[storage]
            or self.program.storages[storage].at_start
        ):
            return None
        return self.find(storage, gap[1])

    def find(self, storage: int, until: int, depth: int = MAX_CHAIN) -> Chain | None:
        """Operators that give `storage` again before position `until`, or None when that is not possible."""
        program, chains = self.program, self.chains
        maker = chains.maker[storage]
        if maker < 0:
            return None
        op = program.operators[maker]
        # A dead input that has companions would bring those back too, whatever became of them meanwhile.
        alone = len(op.allocs) == 1 or depth == MAX_CHAIN
        if not op.repeatable or op.writes or not alone:
            return None
        if any(w < until for s in op.allocs for w in chains.writes[s]):
            return None
        operators: dict[int, None] = {}
        helpers: dict[int, None] = {}
        inputs: dict[int, None] = {}
        kept: dict[int, None] = {}
        for s in op.reads:
            if any(self.place[maker] < w < until for w in chains.writes[s]):
                return None
            if chains.uses[s][-1] >= until or program.storages[s].at_end:
                inputs[s] = None
                continue
            below = None
            if self.keep is None or s not in self.keep:
                below = self.find(s, until, depth - 1) if depth else None
            if self._better_kept(s, below):
                inputs[s] = kept[s] = None
            elif below is None:
                return None
            else:
                operators.update(dict.fromkeys(below.operators))
                helpers.update(dict.fromkeys((*below.helpers, s)))
                inputs.update(dict.fromkeys(below.inputs))
                kept.update(dict.fromkeys(below.kept))
        operators[maker] = None
        seconds = sum(program.operators[o].seconds for o in operators)
        return Chain(tuple(operators), tuple(helpers), tuple(inputs), tuple(kept), seconds)

    def _better_kept(self, s: int, below: Chain | None) -> bool:
        """A dead input lives on when making it again is impossible, dear, or would keep more bytes than it has."""
        if self.keep is not None:
            return s in self.keep
        if below is None:
            return True
        dear = any(self.program.operators[o].flops for o in below.operators)
        return dear or sum(self.program.sizes[x] for x in below.kept) > self.program.sizes[s]


def choose_recomputes(finder: Chains, chosen: Collection[int]) -> Recomputes:
    """Place the recomputation of the chosen storages.

    Later-made storages go first: what they need again becomes a use of an earlier-made one, whose own drop then ends
    there.
    """
    program, chains, place = finder.program, finder.chains, finder.place
    result = Recomputes([list(u) for u in chains.uses])
    sent = {s for op in program.operators if op.message for s in op.touched}
    for s in sorted(chosen, key=lambda s: -place[chains.maker[s]]):
        gap = None if s in result.gaps else longest_gap(result.uses[s])
        if gap is None:
            continue
        chain = finder.find(s, gap[1])
        others = [x for x in program.operators[chains.maker[s]].allocs if x != s]
        if chain is None or any(program.storages[x].at_end or x in result.gaps for x in others):
            continue
        if others and not sent.isdisjoint((s, *others)):
            continue  # it may not be waited for until its peer has begun too, and all of them are made together
        result.gaps[s] = gap
        rerun = result.rerun.setdefault(gap[1], [])
        rerun += [op for op in chain.operators if op not in rerun]
        rerun.sort(key=place.__getitem__)
        helpers = result.helpers.setdefault(gap[1], [])
        helpers += [h for h in chain.helpers if h not in helpers]
        for x in others:
            uses = result.uses[x]
            if uses[-1] < gap[1]:
                helpers.append(x)
                continue
            if gap[1] not in uses:
                insort(uses, gap[1])
            result.gaps[x] = uses[uses.index(gap[1]) - 1], gap[1]
        for x in chain.inputs:
            if gap[1] not in result.uses[x]:
                result.uses[x].append(gap[1])
                result.uses[x].sort()
        result.seconds += chain.seconds
    return result


def _places(chains: UseDef) -> list[int]:
    place = [0] * len(chains.order)
    for position, index in enumerate(chains.order):
        place[index] = position
    return place


def longest_gap(uses: list[int] | tuple[int, ...]) -> tuple[int, int] | None:
    """Return the two consecutive uses that lie furthest apart; None when all uses are adjacent."""
    gaps = [(b - a, a, b) for a, b in pairwise(uses) if b - a > 1]
    if not gaps:
        return None
    _, a, b = max(gaps)
    return a, b
