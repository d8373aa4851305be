"""Recomputation: a result is dropped between two uses, and its operator runs again before the later use.

A result may be recomputed if its operator is repeatable and the inputs still have the contents of the first run. Other
results of the operator (such as the statistics of a norm) are dropped and recomputed with it. An input that is dead at
that position is recomputed too, for that position only and up to a small depth. It is retained instead if it is small
compared with the storages that depend on it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from hyper_parallel.ir import MemoryProgram
from hyper_parallel.memory.def_use import UseDef

MAX_CHAIN = 4  # maximum depth of recomputed inputs


@dataclass
class Recomputes:
    """Recomputed storages in one order of the operators, and the operators to run again at each position.

    Attributes:
        uses: Positions that access each storage, including reads by recomputed operators.
        gaps: Dict from recomputed storage to (last use before it is dropped, first use after).
        rerun: Dict from position to the operators to run again before it, in the order of their first run.
        helpers: Dict from position to recomputed results that exist only there.
    """

    uses: list[list[int]]
    gaps: dict[int, tuple[int, int]] = field(default_factory=dict)
    rerun: dict[int, list[int]] = field(default_factory=dict)
    helpers: dict[int, list[int]] = field(default_factory=dict)

    @property
    def dropped(self) -> set[int]:
        """Storages that are dropped before their recomputation, including results that only recomputation needs."""
        return {*self.gaps, *(h for helpers in self.helpers.values() for h in helpers)}

    def added_seconds(self, program: MemoryProgram) -> dict[int, float]:
        """Return, per position, a lower bound of the compute seconds that recomputation adds to a program.

        An operator counts if one of its results is certainly absent: dropped, or past its last use. Storages that
        collectives or messages access do not count, because they may still be on the device.
        """
        communicated = {s for op in program.operators if op.group or op.message for s in op.touched}

        def is_absent(s: int, position: int) -> bool:
            dropped = s in self.gaps and self.gaps[s][1] == position
            return s not in communicated and (dropped or self.uses[s][-1] < position)

        return {
            position: sum(
                program.operators[i].seconds
                for i in rerun
                if any(is_absent(s, position) for s in program.operators[i].allocs)
            )
            for position, rerun in self.rerun.items()
        }


@dataclass(frozen=True)
class Chain:
    """Operators that together recompute a storage.

    Attributes:
        operators: Operators to run, in order.
        helpers: Results that exist only while the chain runs.
        inputs: Storages that must be alive when the chain runs, `retained` included.
        retained: Inputs that would be dead when the chain runs, so they are kept alive.
        seconds: Compute seconds of the chain.
    """

    operators: tuple[int, ...]
    helpers: tuple[int, ...]
    inputs: tuple[int, ...]
    retained: tuple[int, ...]
    seconds: float


class ChainFinder:
    """Finder of the recomputation chain of a storage, and of the dead inputs to retain for it.

    A dead input is retained if the storages that are recomputed from it without FLOPs have together at least 1.5 times
    its bytes. Example: the bfloat16 residual, from which the float32 copy inside a norm is recomputed.
    """

    def __init__(self, program: MemoryProgram, chains: UseDef) -> None:
        self.program, self.chains = program, chains
        self.place = {index: position for position, index in enumerate(chains.order)}
        self.retained: set[int] | None = None  # None: anything may be retained
        dependent_bytes = [0] * len(program.storages)
        for s, size in enumerate(program.sizes):
            chain = self.for_longest_gap(s)
            if chain is not None and not any(program.operators[o].flops for o in chain.operators):
                for x in chain.retained:
                    dependent_bytes[x] += size
        self.retained = {x for x, freed in enumerate(dependent_bytes) if 2 * freed >= 3 * program.sizes[x] > 0}

    def for_longest_gap(self, storage: int) -> Chain | None:
        """Return the chain that recomputes a storage at the end of its longest gap between uses; None without one."""
        gap = longest_gap(self.chains.uses[storage])
        if gap is None or not self.program.sizes[storage] or self.program.storages[storage].at_start:
            return None
        return self.find(storage, gap[1])

    def find(self, storage: int, until: int, depth: int = MAX_CHAIN) -> Chain | None:
        """Return the chain that recomputes `storage` before position `until`; None if it cannot be recomputed.

        The chain also recomputes dead inputs, up to `depth` levels.
        """
        program, chains = self.program, self.chains
        producer = chains.producer[storage]
        if producer < 0:
            return None
        op = program.operators[producer]
        # Recomputing a dead input also recomputes the other results of its operator, which may be in any state by then.
        sole_result = len(op.allocs) == 1 or depth == MAX_CHAIN
        if not op.repeatable or op.writes or not sole_result:
            return None
        if any(w < until for s in op.allocs for w in chains.writes[s]):
            return None
        operators: dict[int, None] = {}
        helpers: dict[int, None] = {}
        inputs: dict[int, None] = {}
        retained: dict[int, None] = {}
        for s in op.reads:
            if any(self.place[producer] < w < until for w in chains.writes[s]):
                return None
            if chains.uses[s][-1] >= until or program.storages[s].at_end:
                inputs[s] = None
                continue
            chain = None
            if self.retained is None or s not in self.retained:
                chain = self.find(s, until, depth - 1) if depth else None
            if self._better_retained(s, chain):
                inputs[s] = retained[s] = None
            elif chain is None:
                return None
            else:
                operators.update(dict.fromkeys(chain.operators))
                helpers.update(dict.fromkeys((*chain.helpers, s)))
                inputs.update(dict.fromkeys(chain.inputs))
                retained.update(dict.fromkeys(chain.retained))
        operators[producer] = None
        seconds = sum(program.operators[o].seconds for o in operators)
        return Chain(tuple(operators), tuple(helpers), tuple(inputs), tuple(retained), seconds)

    def _better_retained(self, s: int, chain: Chain | None) -> bool:
        """Return whether to retain a dead input `s` instead of recomputing it by `chain` (None: impossible).

        During construction, when `self.retained` is None, an input is retained if `chain` is None, needs FLOPs, or
        retains more bytes than `s`. Later, exactly the storages in `self.retained` are.
        """
        if self.retained is not None:
            return s in self.retained
        if chain is None:
            return True
        expensive = any(self.program.operators[o].flops for o in chain.operators)
        return expensive or sum(self.program.sizes[x] for x in chain.retained) > self.program.sizes[s]


def choose_recomputes(finder: ChainFinder, chosen: Collection[int]) -> Recomputes:
    """Return the recomputation of the storages in `chosen`; storages that cannot be recomputed are omitted.

    Storages are added from the latest producer to the earliest, because recomputation reads results of earlier ones.
    """
    program, chains, place = finder.program, finder.chains, finder.place
    result = Recomputes([list(u) for u in chains.uses])
    message_storages = {s for op in program.operators if op.message for s in op.touched}
    for s in sorted(chosen, key=lambda s: -place[chains.producer[s]]):
        gap = None if s in result.gaps else longest_gap(result.uses[s])
        if gap is None:
            continue
        chain = finder.find(s, gap[1])
        siblings = [x for x in program.operators[chains.producer[s]].allocs if x != s]
        if chain is None or any(program.storages[x].at_end or x in result.gaps for x in siblings):
            continue
        if siblings and not message_storages.isdisjoint((s, *siblings)):
            continue  # a message must not be awaited before its peer begins, and siblings are recomputed together
        result.gaps[s] = gap
        rerun = result.rerun.setdefault(gap[1], [])
        rerun += [op for op in chain.operators if op not in rerun]
        rerun.sort(key=place.__getitem__)
        helpers = result.helpers.setdefault(gap[1], [])
        helpers += [h for h in chain.helpers if h not in helpers]
        for x in siblings:
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
    return result


def longest_gap(uses: list[int] | tuple[int, ...]) -> tuple[int, int] | None:
    """Return the two consecutive uses with the most positions between them; None if no position is between any two."""
    gaps = [(b - a, a, b) for a, b in pairwise(uses) if b - a > 1]
    if not gaps:
        return None
    _, a, b = max(gaps)
    return a, b
