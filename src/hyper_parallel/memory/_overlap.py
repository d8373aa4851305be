"""Communication under computation: collectives are begun early, and what waits for them comes late.

What ranks do together keeps its recorded order on every rank, whatever the rank's memory plan is; only the computation
around it moves. So all ranks begin the same things in the same order (`_comms`). A collective takes with it what
prepares its operands and is no computation, and never passes another one. What it makes lives longer the earlier it is
begun, so it is begun as late as its lane allows, and at most so many uses ahead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from itertools import accumulate

from hyper_parallel.ir import MemoryAction, MemoryProgram, Operator
from hyper_parallel.memory._clock import ProgramClock
from hyper_parallel.memory.def_use import dependencies, use_definitions

DEPTHS = (1, 2)
"""How many collectives of a kind may be under way or unused before the one that is used now; tried in turn."""


def overlapped(program: MemoryProgram, order: Sequence[int], depth: int) -> tuple[int, ...]:
    """The order with communication moved under computation.

    Args:
        program: Operators with their seconds.
        order: A legal order.
        depth: No collective is begun before the one so many places before it, of the same kind, is used; 0: none moves,
            only what waits for one does.
    """
    before = dependencies(program)
    if depth:
        order = _begun_early(program, before, tuple(order), depth)
    return _postpone_waiters(program, before, order)


def _begun_early(
    program: MemoryProgram, before: list[set[int]], order: tuple[int, ...], depth: int
) -> tuple[int, ...]:
    """Collectives with what only prepares them, as late as a serial lane allows."""
    operators = program.operators
    starts = list(accumulate((operators[i].seconds for i in order), initial=0.0))
    place = {index: position for position, index in enumerate(order)}
    collectives = [i for i in order if operators[i].group]
    used = _first_uses(program, order, collectives)
    wanted: dict[int, int] = {}
    free_s = starts[-1]
    for index in reversed(collectives):
        begin = min(starts[used[index]], free_s) - operators[index].comm_s
        wanted[index] = min(max(bisect_right(starts, begin) - 1, 0), place[index])
        free_s = max(begin, 0.0)
    key: dict[
        int, tuple[int, int, int]
    ] = {}  # of what has moved: position, which collective, place
    bound, kinds = 0, dict[tuple[str, str], list[int]]()
    for number, index in enumerate(collectives):
        operator = operators[index]
        kind = kinds.setdefault((operator.name, operator.group), [])
        low = max(bound, wanted[index])
        if len(kind) >= depth:
            low = max(low, used[kind[-depth]])
        position, moved = place[index], [index]
        if not operator.message and low < position:
            position, moved = _reach(operators, before, order, position, low, key)
        for rank, other in enumerate(sorted(moved, key=place.__getitem__)):
            if position < place[index]:
                key[other] = (position, number, rank)
        bound = position if position < place[index] else place[index] + 1
        kind.append(index)
    return tuple(sorted(order, key=lambda i: key.get(i, (place[i], len(order), 0))))


def _first_uses(
    program: MemoryProgram, order: Sequence[int], collectives: Sequence[int]
) -> dict[int, int]:
    """Position that first needs what an operator makes, or changes what it reads; the number of positions if none."""
    chains = use_definitions(program, order)
    place = {index: position for position, index in enumerate(order)}
    first_use = {}
    for index in collectives:
        operator = program.operators[index]
        made = {*operator.writes, *operator.allocs}
        first = len(order)
        for s in operator.touched:
            later = chains.uses[s] if s in made else chains.writes[s]
            at = bisect_right(later, place[index])
            if at < len(later):
                first = min(first, later[at])
        first_use[index] = first
    return first_use


def _reach(
    operators: Sequence[Operator],
    before: list[set[int]],
    order: Sequence[int],
    position: int,
    low: int,
    gone: Container[int],
) -> tuple[int, list[int]]:
    """How far up a collective can go, and what goes with it."""
    index = order[position]
    data = {i for i in before[index] if not (operators[i].group or operators[i].message)}
    needs, moved, reached = data, [index], position
    for at in range(position - 1, low - 1, -1):
        other = order[at]
        operator = operators[other]
        if other in gone:
            reached = at  # it is above the collective that it has moved with
            continue
        if operator.group or operator.message:
            break
        if other in needs:
            light = not (operator.flops or operator.ordered)
            if not light or operator.seconds > operators[index].comm_s:
                break
            needs = needs | before[other]
            moved.append(other)
        reached = at
    return reached, moved


def _postpone_waiters(
    program: MemoryProgram, before: list[set[int]], order: Sequence[int]
) -> tuple[int, ...]:
    """What would wait for a collective and is no computation comes later, as soon as it is done or needed."""
    operators = program.operators
    clock, begun = ProgramClock(program), set[int]()
    result: list[int] = []
    postponed: dict[int, None] = {}  # operators that come later, in their order
    ready_s = [0.0] * len(
        operators
    )  # when everything that an operator needs of other ranks is there

    def run(index: int) -> None:
        postponed.pop(index, None)
        result.append(index)
        clock.stand_until(ready_s[index])
        clock.apply(MemoryAction("run", index))
        if operators[index].group:
            begun.add(index)

    def flush(index: int) -> None:
        """Run what was postponed and is needed."""
        for other in [w for w in postponed if w in before[index]]:
            if other in postponed:
                flush(other)
                run(other)

    for index in order:
        operator = operators[index]
        communicates = bool(operator.group or operator.message)
        data = [i for i in before[index] if not (communicates and operators[i].group)]
        ready_s[index] = max((clock.done_s(i) for i in data if i in begun), default=0.0)
        for other in list(postponed):
            if ready_s[other] <= clock.now_s and before[other].isdisjoint(postponed):
                run(other)
        delayed = any(i in postponed for i in before[index])
        light = not (operator.flops or operator.ordered)
        if light and (delayed or ready_s[index] > clock.now_s):
            postponed[index] = None
            continue
        flush(index)
        run(index)
    for other in list(postponed):
        run(other)
    return tuple(result)
