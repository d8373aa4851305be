"""The planner: least peak at a bounded slowdown, or least time under a byte budget.

Five passes: an order of the operators; one linear program of what leaves and what is made again; rounding to whole
storages; emission as a program; addresses. Both goals share one step, programs for a target in bytes. The exact replay
and the simulator judge what was emitted: no choice is kept on the strength of an estimate.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from hyper_parallel.errors import BadValue, BudgetImpossible, TierFull
from hyper_parallel.ir import (
    MEMORY_TIERS,
    Choice,
    MemoryPlan,
    MemoryProgram,
    MemoryTier,
    StorageKind,
    replay,
    slab_bytes,
)
from hyper_parallel.memory._address import assign_addresses
from hyper_parallel.memory._clock import clocked
from hyper_parallel.memory._goals import least_peak, least_time
from hyper_parallel.memory._host_sets import defer_host_readers, host_sets
from hyper_parallel.memory._order import order_peak, order_seconds, refine_order
from hyper_parallel.memory._overlap import DEPTHS, overlapped
from hyper_parallel.memory._programs import Search
from hyper_parallel.memory.def_use import identity_actions
from hyper_parallel.memory.emitted_programs import Emitted
from hyper_parallel.memory.host_updates import HostUpdates, hostable
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.rounding import Rounding

_MARGIN = 0.3  # of the bandwidth, for the least peak: a link that was said 30 % too fast still keeps the time limit


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
        budget_bytes: Device bytes the step may take, the arena and what is made beside it; the plan is the fastest one
            found under it.
        max_slowdown: Allowed extra time as a share (0.02 is 2 %); the plan is the one with the least peak found.
        move: Kinds of storages that may leave the device; None: all but inputs and outputs.
        recompute: Results may be dropped and computed again.
        reorder: Operators may change their order (never what they compute).
        bandwidth_margin: The plan keeps its time limit even when every channel is slower than the machine says by the
            factor 1 + margin. None: 0.3 for the least peak, where a plan that fills the channels has no reserve; 0
            under a byte budget. `seconds` are always those of the machine as given.

    Returns:
        A plan whose replay passed; the identity program, with the reason, when nothing pays.

    Raises:
        BadValue: HP102 unless exactly one goal is given.
        BudgetImpossible: HP402 with the least bytes reached and the bound no plan can pass.
        TierFull: HP403 when only the DRAM or flash capacity stands in the way.
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
    with _no_search_for_cycles():
        orders, statement = _orders(program, reorder)
        if not program.communicates:
            return _in_order(program, machine, goal, orders[0], statement)
        return _best_order(program, machine, goal, orders, statement)


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Planning keeps millions of small objects, hardly any in cycles; to look for those takes a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def unmoved_seconds(program: MemoryProgram, *, reorder: bool) -> float:
    """Simulated seconds of a step in which nothing moves; what a slowdown is measured against."""
    if not program.communicates:
        return program.seconds
    return min(order_seconds(program, order) for order in _orders(program, reorder)[0])


def _orders(program: MemoryProgram, reorder: bool) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Orders to plan in, the one that takes fewest bytes when nothing moves among them, and what was found."""
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
    """What `plan_memory` was asked for."""

    budget_bytes: int | None
    max_slowdown: float | None
    move: Collection[StorageKind] | None
    recompute: bool
    margin: float


def _best_order(
    program: MemoryProgram,
    machine: MemoryMachine,
    goal: _Goal,
    orders: Sequence[tuple[int, ...]],
    statement: tuple[str, ...],
) -> MemoryPlan:
    """The best plan over orders that begin what ranks do together more or less early.

    Tried are the fastest order, when nothing moves, and the one that takes fewest bytes.
    """
    alone = {order: _identity(program, order) for order in orders}
    fast = min(orders, key=lambda o: (alone[o].seconds, alone[o].peak))
    small = min(orders, key=lambda o: (alone[o].peak, alone[o].seconds))
    recorded_s = order_seconds(program, range(len(program.operators)))
    comm_statement = (
        f"communication: recorded order {recorded_s:.6g} s, begun early {alone[fast].seconds:.6g} s, of "
        f"{program.seconds:.6g} s computation and {program.comm_seconds:.6g} s on the link; ranks keep one order"
    )
    limit_s = alone[fast].seconds * (1 + (goal.max_slowdown or 0.0))
    plans, errors = list[MemoryPlan](), list[BudgetImpossible | TierFull]()
    for order in dict.fromkeys((fast, small)):
        if goal.max_slowdown is not None and alone[order].seconds > limit_s:
            continue
        if plans and goal.budget_bytes is not None and plans[0].seconds <= alone[order].seconds:
            continue
        try:
            best_s = min((plan.seconds for plan in plans), default=float("inf"))
            plans.append(
                _in_order(
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


def _in_order(
    program: MemoryProgram,
    true_machine: MemoryMachine,
    goal: _Goal,
    order: tuple[int, ...],
    statement: tuple[str, ...],
    limit_s: float | None = None,
    best_s: float = float("inf"),
) -> MemoryPlan:
    """The plan of one order.

    The time limit is that of the order itself unless another is given. Under a budget, plans slower than `best_s` are
    of no use.
    """
    machine = true_machine.derated(goal.margin)
    budget_bytes, max_slowdown = goal.budget_bytes, goal.max_slowdown
    identity = _identity(program, order)
    if budget_bytes is not None and identity.peak + program.staging_bytes <= budget_bytes:
        reason = (
            f"identity: the step takes {identity.peak} bytes and fits the budget; nothing moves"
        )
        whole = _finish(program, true_machine, identity, (*statement, reason))
        if whole.device_bytes <= budget_bytes:
            return whole
    if limit_s is None and max_slowdown is not None:
        limit_s = identity.seconds * (1 + max_slowdown)
    slack_s = None if max_slowdown is None or limit_s is None else limit_s - identity.seconds
    searches = []
    for where in host_sets(program, machine, order, slack_s or 0.0):
        late = defer_host_readers(program, machine, order, where[1])
        rounding = Rounding(
            program, machine, late, where[1], move=goal.move, recompute=goal.recompute
        )
        searches.append(Search(program, machine, late, rounding, where[0], identity))
    if budget_bytes is not None:
        best, plan = least_time(
            searches,
            budget_bytes,
            lambda e: _finish(program, true_machine, e, statement),
            best_s if machine == true_machine else float("inf"),
        )
    else:
        assert limit_s is not None
        best, plan = least_peak(
            searches, identity, limit_s, lambda e: _finish(program, true_machine, e, statement)
        )
    if best is identity:
        statement = (
            *statement,
            f"identity: no plan lowers the peak of {identity.peak} bytes within {max_slowdown:.1%} more time; "
            "nothing moves",
        )
        return replace(plan, statement=statement)
    if best.recomputes is not None and best.recomputes.host.operators:
        statement = (*statement, _on_host(program, true_machine, best.recomputes.host))
    reserve = f", with links {goal.margin:.0%} slower {best.seconds:.6g}" if goal.margin else ""
    outcome = (
        f"peak {identity.peak} -> {best.peak} bytes, seconds {identity.seconds:.6g} -> {plan.seconds:.6g}{reserve} "
        f"({best.statement})"
    )
    return replace(plan, statement=(*statement, outcome))


def _identity(program: MemoryProgram, order: tuple[int, ...]) -> Emitted:
    actions = identity_actions(program, order)
    peaks: dict[MemoryTier, int] = dict.fromkeys(MEMORY_TIERS, 0)
    peaks["device"] = order_peak(program, order)
    seconds = order_seconds(program, order)
    waited_s = np.zeros(len(order) + 1)
    return Emitted(actions, program.on_device, seconds, peaks, 0, (), None, "identity", waited_s)


def _finish(
    program: MemoryProgram,
    machine: MemoryMachine,
    emitted: Emitted,
    statement: tuple[str, ...],
) -> MemoryPlan:
    judged = replay(program, emitted.homes, emitted.actions)
    counted = judged.peak_bytes, slab_bytes(judged.host_buffers)
    assert counted == (emitted.peaks, emitted.dram_bytes), (
        "the emitter and the replay count differently"
    )
    addresses, arena = assign_addresses(judged.residency, program.spans)
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
        choices += _updates(program, emitted.recomputes.host)
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


def _updates(program: MemoryProgram, host: HostUpdates) -> list[Choice]:
    """What is changed in host memory."""
    return [
        Choice(s, "update", positions[0], positions[-1], "dram", "changed in host memory")
        for s, positions in sorted(host.at_home.items())
        if positions and program.sizes[s]
    ]


def _on_host(program: MemoryProgram, machine: MemoryMachine, host: HostUpdates) -> str:
    """A sentence about what runs in host memory."""
    seconds = sum(machine.host_seconds(program.operators[i]) for i in host.operators)
    state = sum(program.sizes[s] for s in host.at_home)
    return (
        f"update on host: {len(host.operators)} of {len(hostable(program))} optimizer operators, on {state} bytes that "
        f"stay in host memory, {seconds:.6g} s beside the compute lane; another processor may round differently"
    )
