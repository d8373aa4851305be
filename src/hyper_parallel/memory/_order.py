"""Execution order: move operators without changing their results.

`refine_order` has three passes. Each proposes an order that respects all dependencies. The proposal is accepted if the
peak does not rise and the mean of device bytes falls. Optimizer updates move into the backward pass, right behind their
gradient and the last reader of their weight. Weight gradients move to their consumer. Operators that free no operand
move to the first use of their results.

With several ranks, `overlapped` then hoists collectives to overlap computation. They keep their recorded order on every
rank, whatever its memory plan is (see `def_use`). Operators without FLOPs that prepare the operands of a collective
move with it. An early collective keeps its result alive for longer, so each collective begins no earlier than needed to
end before the first use of its result. All communication is assumed to run in series.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Sequence
from itertools import accumulate

from hyper_parallel.ir import MemoryAction, MemoryProgram, Operator, replay
from hyper_parallel.memory.def_use import dependencies, identity_actions, use_definitions
from hyper_parallel.memory.timeline import ProgramClock, clocked


def refine_order(program: MemoryProgram) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Apply each pass that lowers the mean of device bytes over time without raising the peak.

    Returns:
        Operator indices in their new order, and sentences: one per proposed change, and one if no optimizer update can
        move into the backward pass.
    """
    before = dependencies(program)
    order = tuple(range(len(program.operators)))
    peak, mean = _measure(program, order)
    statement: list[str] = []
    passes: tuple[tuple[str, Callable[..., tuple[int, ...]]], ...] = (
        ("optimizer updates inside the backward pass", _updates_early),
        ("weight gradients next to their consumer", _gradients_late),
        ("results computed right before their first use", _results_late),
    )
    for label, propose in passes:
        proposal = propose(program, before, order)
        if proposal == order:
            continue
        new_peak, new_mean = _measure(program, proposal)
        accepted = new_peak <= peak and new_mean < mean
        statement.append(
            f"order: {label}: {'' if accepted else 'rejected, '}peak {peak} -> {new_peak} bytes, "
            f"mean {mean:.0f} -> {new_mean:.0f} bytes"
        )
        if accepted:
            order, peak, mean = proposal, new_peak, new_mean
    blocked = _blocked_updates(program, before)
    return order, (*statement, *([blocked] if blocked else []))


def _measure(program: MemoryProgram, order: Sequence[int]) -> tuple[int, float]:
    actions = identity_actions(program, order)
    judged = replay(program, program.on_device, actions)
    seconds = [program.operators[a.target].seconds if a.kind == "run" else 0.0 for a in actions]
    if not any(seconds):  # without seconds, all operators have equal weight
        seconds = [float(a.kind == "run") for a in actions]
    area = sum(s * live for s, live in zip(seconds, judged.profile, strict=True))
    return judged.peak_bytes["device"], area / max(sum(seconds), 1e-30)


def order_peak(program: MemoryProgram, order: Sequence[int]) -> int:
    """Return the peak of device bytes in an order, without offload and recomputation.

    Raises:
        MemoryPlanInvalid: HP404 when the replay refuses the order.
    """
    return _measure(program, order)[0]


def order_seconds(program: MemoryProgram, order: Sequence[int]) -> float:
    """Return the simulated seconds of a step in an order, without offload and recomputation.

    Waits for collectives are included.
    """
    return clocked(program, None, identity_actions(program, order)).now_s


def _updates_early(program: MemoryProgram, before: list[set[int]], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order with every optimizer operator that is not `ordered` right after its last dependency."""
    del order  # the keys below are positions of the original order
    key: list[int] = []
    for index, op in enumerate(program.operators):
        early = op.phase == "optimizer" and not op.ordered
        key.append(max((key[p] for p in before[index]), default=0) if early else index)
    return tuple(sorted(range(len(key)), key=lambda i: (key[i], i)))


def _gradients_late(program: MemoryProgram, before: list[set[int]], order: tuple[int, ...]) -> tuple[int, ...]:
    return _sink(
        program,
        before,
        order,
        lambda op: (
            op.phase == "backward"
            and bool(op.allocs)
            and all(program.storages[s].kind == "gradient" for s in op.allocs)
        ),
    )


def _results_late(program: MemoryProgram, before: list[set[int]], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order with operators that neither free nor change an operand right before their first consumer."""
    last: dict[int, int] = {}
    for index in order:
        for s in program.operators[index].touched:
            last[s] = index

    def frees_nothing(op: Operator) -> bool:
        keeps_operands = all(program.storages[s].at_end or program.operators[last[s]] is not op for s in op.reads)
        return bool(op.allocs) and not op.writes and keeps_operands

    return _sink(program, before, order, frees_nothing)


def _sink(
    program: MemoryProgram, before: list[set[int]], order: tuple[int, ...], movable: Callable[[Operator], bool]
) -> tuple[int, ...]:
    """Return the order with every operator that is `movable`, and not `ordered`, right before its first dependent."""
    place = {index: position for position, index in enumerate(order)}
    after: list[list[int]] = [[] for _ in program.operators]
    for index, deps in enumerate(before):
        for p in deps:
            after[p].append(index)
    key: dict[int, tuple[float, int]] = {}
    for index in reversed(order):
        op = program.operators[index]
        first = min((key[a] for a in after[index]), default=None)
        if movable(op) and not op.ordered and first is not None:
            key[index] = (first[0], first[1] - 1)
        else:
            key[index] = (float(place[index]), 0)
    return tuple(sorted(order, key=lambda i: (key[i], place[i])))


def _blocked_updates(program: MemoryProgram, before: list[set[int]]) -> str | None:
    """Return a sentence if an optimizer operator, such as a gradient norm, needs every gradient; else None.

    None also for fewer than two gradients.
    """
    gradients = [s for s, storage in enumerate(program.storages) if storage.kind == "gradient"]
    bits = {s: 1 << k for k, s in enumerate(gradients)}
    if len(gradients) < 2:
        return None
    everything = (1 << len(gradients)) - 1
    reached: list[int] = []
    for index, op in enumerate(program.operators):
        mask = 0
        for p in before[index]:
            mask |= reached[p] if program.operators[p].phase == "optimizer" else 0
        if op.phase == "optimizer":
            for s in op.reads:
                mask |= bits.get(s, 0)
        reached.append(mask)
        if mask == everything:
            return (
                f"order: optimizer updates stay after the backward pass: operator {index} ({op.name}) needs every "
                "gradient before the first weight may change (global-norm clipping, or one operator for all weights)"
            )
    return None


DEPTHS = (1, 2)
"""Values of `depth` to try in `overlapped`, in addition to 0."""


def overlapped(program: MemoryProgram, order: Sequence[int], depth: int) -> tuple[int, ...]:
    """Return `order`, a legal order, with communication moved to overlap computation.

    `depth` is the maximum number of collectives of one kind (operator and group) whose results await their first use.
    0: collectives stay in place. For any depth, operators without FLOPs that would wait for a collective are delayed.
    """
    before = dependencies(program)
    if depth:
        order = _hoist_collectives(program, before, tuple(order), depth)
    return _sink_bookkeeping(program, before, order)


def _hoist_collectives(
    program: MemoryProgram, before: list[set[int]], order: tuple[int, ...], depth: int
) -> tuple[int, ...]:
    """Return the order with collectives, but not messages, hoisted just early enough to end before their first use.

    Dependencies and `depth` (see `overlapped`) limit how early a collective may begin.
    """
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
    # (new position, collective, old position) of every hoisted operator.
    key: dict[int, tuple[int, int, int]] = {}
    bound, kinds = 0, dict[tuple[str, str], list[int]]()
    for number, index in enumerate(collectives):
        operator = operators[index]
        kind = kinds.setdefault((operator.name, operator.group), [])
        low = max(bound, wanted[index])
        if len(kind) >= depth:
            low = max(low, used[kind[-depth]])
        position, moved = place[index], [index]
        if not operator.message and low < position:
            position, moved = _hoist_limit(operators, before, order, position, low, key)
        for rank, member in enumerate(sorted(moved, key=place.__getitem__)):
            if position < place[index]:
                key[member] = (position, number, rank)
        bound = position if position < place[index] else place[index] + 1
        kind.append(index)
    return tuple(sorted(order, key=lambda i: key.get(i, (place[i], len(order), 0))))


def _first_uses(program: MemoryProgram, order: Sequence[int], collectives: Sequence[int]) -> dict[int, int]:
    chains = use_definitions(program, order)
    place = {index: position for position, index in enumerate(order)}
    first_use = {}
    for index in collectives:
        operator = program.operators[index]
        results = {*operator.writes, *operator.allocs}
        first = len(order)
        for s in operator.touched:
            later = chains.uses[s] if s in results else chains.writes[s]
            behind = bisect_right(later, place[index])
            if behind < len(later):
                first = min(first, later[behind])
        first_use[index] = first
    return first_use


def _hoist_limit(
    operators: Sequence[Operator],
    before: list[set[int]],
    order: Sequence[int],
    position: int,
    low: int,
    hoisted: Container[int],
) -> tuple[int, list[int]]:
    """Return the earliest position that a collective can move to, and the operators that move with it.

    The collective is at `position` now and must not move before `low`. `hoisted` has the operators that were hoisted
    earlier.
    """
    index = order[position]
    data = {i for i in before[index] if not (operators[i].group or operators[i].message)}
    needs, moved, reached = data, [index], position
    for above in range(position - 1, low - 1, -1):
        neighbor = order[above]
        operator = operators[neighbor]
        if neighbor in hoisted:
            reached = above  # the neighbor was hoisted with an earlier collective
            continue
        if operator.group or operator.message:
            break
        if neighbor in needs:
            light = not (operator.flops or operator.ordered)
            if not light or operator.seconds > operators[index].comm_s:
                break
            needs = needs | before[neighbor]
            moved.append(neighbor)
        reached = above
    return reached, moved


def _sink_bookkeeping(program: MemoryProgram, before: list[set[int]], order: Sequence[int]) -> tuple[int, ...]:
    """Return the order with operators without FLOPs delayed while a collective that they depend on is in flight.

    Operators with `ordered` are not delayed. A delayed operator runs when the collective is done, or when another
    operator needs its result.
    """
    operators = program.operators
    clock, running = ProgramClock(program), set[int]()
    result: list[int] = []
    deferred: dict[int, None] = {}  # deferred operators, in order
    # time at which the results of collectives that an operator reads are complete
    ready_s = [0.0] * len(operators)

    def run(index: int) -> None:
        deferred.pop(index, None)
        result.append(index)
        clock.wait_until(ready_s[index])
        clock.apply(MemoryAction("run", index))
        if operators[index].group:
            running.add(index)

    def flush(index: int) -> None:
        for waiter in [w for w in deferred if w in before[index]]:
            if waiter in deferred:
                flush(waiter)
                run(waiter)

    for index in order:
        operator = operators[index]
        communicates = bool(operator.group or operator.message)
        data = [i for i in before[index] if not (communicates and operators[i].group)]
        ready_s[index] = max((clock.done_s[i] for i in data if i in running), default=0.0)
        for waiter in list(deferred):
            if ready_s[waiter] <= clock.now_s and before[waiter].isdisjoint(deferred):
                run(waiter)
        delayed = any(i in deferred for i in before[index])
        light = not (operator.flops or operator.ordered)
        if light and (delayed or ready_s[index] > clock.now_s):
            deferred[index] = None
            continue
        flush(index)
        run(index)
    for waiter in list(deferred):
        run(waiter)
    return tuple(result)
