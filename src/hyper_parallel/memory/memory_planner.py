"""The planner: least peak at a bounded slowdown, or least time under a byte budget.

Five passes: an order of the operators; one linear program for offload and recomputation; rounding to whole storages;
emission of a program; addresses. Both goals search emitted programs for targets in bytes. The exact replay and the
simulator judge each program, so no choice rests on an estimate.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hyper_parallel.errors import BadValue, BudgetImpossible, TierFull
from hyper_parallel.ir import Choice, MemoryPlan, MemoryProgram, StorageKind, replay, slab_bytes
from hyper_parallel.memory._address import assign_addresses
from hyper_parallel.memory._goals import least_peak, least_time
from hyper_parallel.memory._order import DEPTHS, order_seconds, overlapped, refine_order
from hyper_parallel.memory.emitted_programs import EmittedProgram, Search, identity_program
from hyper_parallel.memory.host_updates import (
    defer_host_readers,
    host_statement,
    host_update_sets,
    update_choices,
)
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.rounding import Rounding
from hyper_parallel.memory.timeline import clocked

_MARGIN = 0.3  # share of the bandwidth; a least-peak plan keeps its time limit on links that are 30 % slower


def plan_memory(
    program: MemoryProgram,
    machine: MemoryMachine,
    *,
    budget_bytes: int | None = None,
    max_slowdown: float | None = None,
    move: Collection[StorageKind] | None = None,
    recompute: bool = True,
    reorder: bool = True,
    bandwidth_margin: float | None = None,
) -> MemoryPlan:
    """Plan the memory of one step.

    Args:
        program: Operators with their seconds.
        machine: Channels and capacities.
        budget_bytes: Device bytes for the arena and the staging buffers; the plan is the fastest one found within them.
        max_slowdown: Allowed extra time as a share (0.02 is 2 %); the plan is the one with the least peak found.
        move: Kinds of storages that may leave the device; None: all but inputs and outputs.
        recompute: Results may be dropped and computed again.
        reorder: Operators may change their order (never their results).
        bandwidth_margin: Factor 1 + margin by which every channel may be slower than stated while the plan keeps its
            time limit. None: 0.3 for the least peak, where a plan that fills the channels has no reserve; 0 under a
            byte budget. `seconds` of the plan are always those of the stated machine.

    Returns:
        A plan whose replay passed; the identity program, with the reason, when no plan pays.

    Raises:
        BadValue: HP102 unless exactly one goal is set.
        BudgetImpossible: HP402 with the least bytes reached and the bound that no plan can pass.
        TierFull: HP403 when only the capacity of DRAM or flash is too small.
    """
    if (budget_bytes is None) == (max_slowdown is None):
        raise BadValue(
            "a memory plan needs exactly one goal",
            got=f"budget_bytes={budget_bytes}, max_slowdown={max_slowdown}",
            hint="give budget_bytes=... for the least time, or max_slowdown=0.02 for the least peak",
        )
    margin = bandwidth_margin
    if margin is None:
        margin = _MARGIN if budget_bytes is None else 0.0
    if margin < 0:
        raise BadValue("bandwidth_margin is a share of at least 0", got=margin, allowed="0 or more")
    goal = _Goal(budget_bytes, max_slowdown, move, recompute, margin)
    with _paused_garbage_collection():
        orders, statement = _orders(program, reorder)
        if not program.communicates:
            return _plan_in_order(program, machine, goal, orders[0], statement)
        return _plan_best_order(program, machine, goal, orders, statement)


@contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    """Disable the cycle collector, which takes a quarter of the time on the millions of small objects of planning."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def baseline_seconds(program: MemoryProgram, *, reorder: bool) -> float:
    """Return the simulated seconds of a step in which no storage moves, the baseline of a slowdown."""
    if not program.communicates:
        return program.seconds
    return min(order_seconds(program, order) for order in _orders(program, reorder)[0])


def _orders(program: MemoryProgram, reorder: bool) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Return the orders to plan in, and one sentence per pass of refinement.

    Without communication that is the order of least peak. With it, collectives begin more or less early.
    """
    if not reorder:
        return [tuple(range(len(program.operators)))], ()
    order, statement = refine_order(program)
    if not program.communicates:
        return [order], statement
    return list(
        dict.fromkeys(overlapped(program, order, depth) for depth in (*DEPTHS, 0))
    ), statement


@dataclass(frozen=True)
class _Goal:
    """Arguments of `plan_memory` that do not depend on the order."""

    budget_bytes: int | None
    max_slowdown: float | None
    move: Collection[StorageKind] | None
    recompute: bool
    margin: float


def _plan_best_order(
    program: MemoryProgram,
    machine: MemoryMachine,
    goal: _Goal,
    orders: Sequence[tuple[int, ...]],
    statement: tuple[str, ...],
) -> MemoryPlan:
    """Return the better plan of two orders: the fastest one and the smallest one while no storage moves."""
    unmoved = {order: identity_program(program, order) for order in orders}
    fast = min(orders, key=lambda o: (unmoved[o].seconds, unmoved[o].peak))
    small = min(orders, key=lambda o: (unmoved[o].peak, unmoved[o].seconds))
    recorded_s = order_seconds(program, range(len(program.operators)))
    comm_statement = (
        f"communication: recorded order {recorded_s:.6g} s, begun early {unmoved[fast].seconds:.6g} s, of "
        f"{program.seconds:.6g} s computation and {program.comm_seconds:.6g} s on the link; ranks keep one order"
    )
    limit_s = unmoved[fast].seconds * (1 + (goal.max_slowdown or 0.0))
    plans, errors = list[MemoryPlan](), list[BudgetImpossible | TierFull]()
    for order in dict.fromkeys((fast, small)):
        if goal.max_slowdown is not None and unmoved[order].seconds > limit_s:
            continue
        if plans and goal.budget_bytes is not None and plans[0].seconds <= unmoved[order].seconds:
            continue
        try:
            best_s = min((plan.seconds for plan in plans), default=float("inf"))
            plans.append(
                _plan_in_order(
                    program, machine, goal, order, (*statement, comm_statement), limit_s, best_s
                )
            )
        except (BudgetImpossible, TierFull) as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda e: getattr(e, "least_bytes", 0))
    if goal.budget_bytes is not None:
        return min(plans, key=lambda p: (p.seconds, p.device_bytes))
    return min(plans, key=lambda p: (p.peak_bytes["device"], p.seconds))


def _plan_in_order(
    program: MemoryProgram,
    true_machine: MemoryMachine,
    goal: _Goal,
    order: tuple[int, ...],
    statement: tuple[str, ...],
    limit_s: float | None = None,
    best_s: float = float("inf"),
) -> MemoryPlan:
    """Return the plan of one order.

    Args:
        program: Operators and storages.
        true_machine: Machine as stated; the search runs on it less the margin.
        goal: Goal of the plan.
        order: Order of the operators.
        statement: Sentences about earlier passes.
        limit_s: Seconds allowed for the least peak; None: those of this order with the slowdown.
        best_s: Under a budget, seconds from which on a plan is useless.
    """
    machine = true_machine.derated(goal.margin)
    budget_bytes, max_slowdown = goal.budget_bytes, goal.max_slowdown
    identity = identity_program(program, order)
    if budget_bytes is not None and identity.peak + program.staging_bytes <= budget_bytes:
        reason = (
            f"identity: the step takes {identity.peak} bytes and fits the budget; nothing moves"
        )
        whole = _to_plan(program, true_machine, identity, (*statement, reason))
        if whole.device_bytes <= budget_bytes:
            return whole
    if limit_s is None and max_slowdown is not None:
        limit_s = identity.seconds * (1 + max_slowdown)
    slack_s = None if max_slowdown is None or limit_s is None else limit_s - identity.seconds
    searches = _searches(program, machine, goal, identity, order, slack_s or 0.0)

    def finish(emitted: EmittedProgram) -> MemoryPlan:
        return _to_plan(program, true_machine, emitted, statement)

    if budget_bytes is not None:
        useless_s = best_s if machine == true_machine else float("inf")
        best, plan = least_time(searches, budget_bytes, finish, useless_s)
    else:
        assert limit_s is not None
        best, plan = least_peak(searches, identity, limit_s, finish)
    if best is identity:
        reason = (
            f"identity: no plan lowers the peak of {identity.peak} bytes within {max_slowdown:.1%} more time; "
            "nothing moves"
        )
        return replace(plan, statement=(*statement, reason))
    if best.recomputes is not None and best.recomputes.host.operators:
        statement = (*statement, host_statement(program, true_machine, best.recomputes.host))
    reserve = f", with links {goal.margin:.0%} slower {best.seconds:.6g}" if goal.margin else ""
    outcome = (
        f"peak {identity.peak} -> {best.peak} bytes, seconds {identity.seconds:.6g} -> {plan.seconds:.6g}{reserve} "
        f"({best.statement})"
    )
    return replace(plan, statement=(*statement, outcome))


def _searches(
    program: MemoryProgram,
    machine: MemoryMachine,
    goal: _Goal,
    identity: EmittedProgram,
    order: tuple[int, ...],
    slack_s: float,
) -> list[Search]:
    """Return one search per set of updates in host memory."""
    result = []
    for label, hosted in host_update_sets(program, machine, order, slack_s):
        deferred = defer_host_readers(program, machine, order, hosted)
        rounding = Rounding(
            program, machine, deferred, hosted, movable_kinds=goal.move, recompute=goal.recompute
        )
        result.append(Search(program, machine, deferred, rounding, label, identity))
    return result


def _to_plan(
    program: MemoryProgram,
    machine: MemoryMachine,
    emitted: EmittedProgram,
    statement: tuple[str, ...],
) -> MemoryPlan:
    """Replay a program, assign its addresses, and return it as a plan with the reasons of its choices."""
    replayed = replay(program, emitted.homes, emitted.actions)
    counted = replayed.peak_bytes, slab_bytes(replayed.host_buffers)
    assert counted == (emitted.peaks, emitted.dram_bytes), (
        "the emitter and the replay count differently"
    )
    addresses, arena = assign_addresses(replayed.residency, program.spans)
    choices = [
        Choice(
            g.storage,
            "stream" if g.first < 0 else "offload",
            g.first,
            g.last,
            g.tier,
            f"idle between positions {g.first} and {g.last}",
        )
        for g in emitted.gaps
    ]
    if emitted.recomputes is not None:
        choices += update_choices(program, emitted.recomputes.host)
        choices += [
            Choice(s, "recompute", a, b, "device", "cheaper to run again than to keep or copy")
            for s, (a, b) in sorted(emitted.recomputes.gaps.items())
        ]
    return MemoryPlan(
        program,
        emitted.homes,
        emitted.actions,
        clocked(program, machine, emitted.actions).now_s,
        tuple(choices),
        statement,
        addresses,
        arena,
    )
