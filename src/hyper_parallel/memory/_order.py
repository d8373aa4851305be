"""Execution-order refinement: move operators, never change what they compute.

Each pass proposes an order that respects all dependencies; replay decides whether it is taken. Optimizer updates move
into the backward pass as soon as their gradient and the last reader of their weight are done; weight gradients may
move to their consumer; results that nothing needs yet are made later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hyper_parallel.ir import MemoryProgram, Operator, replay
from hyper_parallel.memory._clock import clocked
from hyper_parallel.memory.def_use import dependencies, identity_actions


def refine_order(program: MemoryProgram) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The order with the least peak (then the least mean) among the proposals, and what was found.

    Returns:
        Operator indices in their new order, and one sentence per pass.
    """
    before = dependencies(program)
    order = tuple(range(len(program.operators)))
    peak, mean = _measure(program, order)
    statement: list[str] = []
    passes: tuple[tuple[str, Callable[..., tuple[int, ...]]], ...] = (
        ("optimizer updates inside the backward pass", _updates_early),
        ("weight gradients next to their consumer", _gradients_late),
        ("results made right before their first use", _results_late),
    )
    for what, propose in passes:
        proposal = propose(program, before, order)
        if proposal == order:
            continue
        new_peak, new_mean = _measure(program, proposal)
        if new_peak <= peak and new_mean < mean:
            statement.append(
                f"order: {what}: peak {peak} -> {new_peak} bytes, mean {mean:.0f} -> {new_mean:.0f} bytes"
            )
            order, peak, mean = proposal, new_peak, new_mean
        else:
            statement.append(
                f"order: {what}: not taken, the peak would be {new_peak} against {peak} bytes"
            )
    blocked = _blocked_updates(program, before)
    return order, (*statement, *([blocked] if blocked else []))


def _measure(program: MemoryProgram, order: Sequence[int]) -> tuple[int, float]:
    """Device peak, and the mean over time of the bytes that are not persistent."""
    actions = identity_actions(program, order)
    judged = replay(program, program.on_device, actions)
    seconds = [program.operators[a.target].seconds if a.kind == "run" else 0.0 for a in actions]
    if not any(seconds):  # not annotated: every operator counts the same
        seconds = [float(a.kind == "run") for a in actions]
    area = sum(s * held for s, held in zip(seconds, judged.profile, strict=True))
    return judged.peak_bytes["device"], area / max(sum(seconds), 1e-30)


def order_peak(program: MemoryProgram, order: Sequence[int]) -> int:
    """Exact device peak of an order without any cache operator."""
    return _measure(program, order)[0]


def order_seconds(program: MemoryProgram, order: Sequence[int]) -> float:
    """Simulated seconds of an order without any cache operator: computation, and what it waits for other ranks."""
    return clocked(program, None, identity_actions(program, order)).now_s


def _updates_early(
    program: MemoryProgram, before: list[set[int]], order: tuple[int, ...]
) -> tuple[int, ...]:
    """Optimizer operators directly after their last dependency."""
    del order  # the keys below are positions of the original order
    key: list[int] = []
    for index, op in enumerate(program.operators):
        early = op.phase == "optimizer" and not op.ordered
        key.append(max((key[p] for p in before[index]), default=0) if early else index)
    return tuple(sorted(range(len(key)), key=lambda i: (key[i], i)))


def _gradients_late(
    program: MemoryProgram, before: list[set[int]], order: tuple[int, ...]
) -> tuple[int, ...]:
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


def _results_late(
    program: MemoryProgram, before: list[set[int]], order: tuple[int, ...]
) -> tuple[int, ...]:
    """Operators whose operands live on anyway: their result only takes bytes, so it is made as late as possible."""
    last: dict[int, int] = {}
    for index in order:
        for s in program.operators[index].touched:
            last[s] = index

    def only_takes(op: Operator) -> bool:
        index_free = all(
            program.storages[s].at_end or program.operators[last[s]] is not op for s in op.reads
        )
        return bool(op.allocs) and not op.writes and index_free

    return _sink(program, before, order, only_takes)


def _sink(
    program: MemoryProgram,
    before: list[set[int]],
    order: tuple[int, ...],
    movable: Callable[[Operator], bool],
) -> tuple[int, ...]:
    """Move the chosen operators right before the first operator that depends on them."""
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
    """A sentence when an operator needs every gradient before any weight may change."""
    gradients = {
        s: 1 << k
        for k, s in enumerate(
            s for s, storage in enumerate(program.storages) if storage.kind == "gradient"
        )
    }
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
                mask |= gradients.get(s, 0)
        reached.append(mask)
        if mask == everything:
            return (
                f"order: optimizer updates stay after the backward pass: operator {index} ({op.name}) needs every "
                "gradient before the first weight may change (global-norm clipping, or one operator for all weights)"
            )
    return None
