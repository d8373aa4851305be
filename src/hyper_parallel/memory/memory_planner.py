"""Memory planner and a cache of its plans in files.

The goal is the least peak at a bounded slowdown, or the least time under a byte budget. There are five passes: ordering
of operators, a linear program for offload and recomputation, rounding to whole storages, emission of actions, and
address assignment. Each candidate is judged by simulation of its actions, and the plan is replayed.

A cache file is named by the fingerprint of the inputs of a plan (program, machine, goal, planner version) and holds the
decisions. Reading it replays and times the actions and checks the addresses. If a check fails, the failure is logged
and the step is planned again.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hyper_parallel.errors import BadValue, BudgetImpossible, MemoryPlanInvalid, TierFull
from hyper_parallel.ir import (
    OF_OPERATORS,
    Choice,
    MemoryAction,
    MemoryPlan,
    MemoryProgram,
    MemoryTier,
    StorageKind,
    replay,
    slab_bytes,
)
from hyper_parallel.memory._address import assign_addresses, wrong_address
from hyper_parallel.memory._goals import least_peak, least_time
from hyper_parallel.memory._order import DEPTHS, order_seconds, overlapped, refine_order
from hyper_parallel.memory.emitted_programs import EmittedProgram, Search, identity_program
from hyper_parallel.memory.memory_machine import MemoryMachine, with_seconds
from hyper_parallel.memory.rounding import Rounding
from hyper_parallel.memory.timeline import clocked
from hyper_parallel.received import Limits
from hyper_parallel.serde import encode, read, write_text
from hyper_parallel.topology import cache_dir
from hyper_parallel.units import MiB

_MARGIN = 0.3  # a least-peak plan keeps its time limit on channels that are slower by this fraction


@dataclass(frozen=True)
class _Goal:
    """Goal and options of `plan_memory`, see there; part of the fingerprint of a cached plan."""

    budget_bytes: int | None
    max_slowdown: float | None
    recompute: bool
    reorder: bool
    move: Collection[StorageKind] | None = None
    bandwidth_margin: float | None = None

    @property
    def margin(self) -> float:
        """Fraction by which the search assumes slower channels."""
        if self.bandwidth_margin is not None:
            return self.bandwidth_margin
        return _MARGIN if self.budget_bytes is None else 0.0


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
    """Return a memory plan of one training step.

    Args:
        program: Operators with their seconds.
        machine: Channels and capacities.
        budget_bytes: Device bytes for the arena and the staging buffers; the result is the fastest plan found.
        max_slowdown: Allowed extra time as a fraction (0.02 is 2 %) of the time without offload and recomputation; the
            result is the plan of least peak found.
        move: Kinds of storages that may leave the device; None: all but inputs and outputs.
        recompute: Whether results may be dropped and recomputed.
        reorder: Whether operators may be reordered; results do not change.
        bandwidth_margin: The search assumes channels slower by the factor 1 + margin, as a reserve. None: 0.3 for
            `max_slowdown`, 0 for `budget_bytes`. `seconds` of the plan assume the channels of `machine`.

    Returns:
        A plan that replay has checked. If offload and recomputation are not needed or do not help, they are absent, and
        `statement` has the reason.

    Raises:
        BadValue: HP102 unless exactly one goal is set, or if the slowdown or the margin is negative.
        BudgetImpossible: HP402 when no plan was found within the budget; the error states a budget that suffices.
        TierFull: HP403 when only the capacity of DRAM or flash is too small.
    """
    if (budget_bytes is None) == (max_slowdown is None):
        raise BadValue(
            "a memory plan needs exactly one goal",
            got=f"budget_bytes={budget_bytes}, max_slowdown={max_slowdown}",
            hint="give budget_bytes=... for the least time, or max_slowdown=0.02 for the least peak",
        )
    for name, value in (("max_slowdown", max_slowdown), ("bandwidth_margin", bandwidth_margin)):
        if value is not None and value < 0:
            raise BadValue(f"`{name}` must not be negative", got=value, allowed="0 or more")
    goal = _Goal(budget_bytes, max_slowdown, recompute, reorder, move, bandwidth_margin)
    with paused_garbage_collection():
        orders, statement = _orders(program, reorder)
        if not program.communicates:
            return _plan_in_order(program, machine, goal, orders[0], statement)
        return _plan_best_order(program, machine, goal, orders, statement)


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Disable garbage collection of cycles inside the context, because it slows planning."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def baseline_seconds(program: MemoryProgram, *, reorder: bool) -> float:
    """Return the simulated seconds of a step without offload and recomputation, the baseline of `max_slowdown`."""
    if not program.communicates:
        return program.seconds
    return min(order_seconds(program, order) for order in _orders(program, reorder)[0])


def _orders(program: MemoryProgram, reorder: bool) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Return the operator orders to try, and the sentences of `refine_order` about its changes.

    Without `reorder`, the only order is the recorded one; without communication, the refined one. With communication,
    there is one per depth of `overlapped`; equal orders are merged.
    """
    if not reorder:
        return [tuple(range(len(program.operators)))], ()
    order, statement = refine_order(program)
    if not program.communicates:
        return [order], statement
    return list(dict.fromkeys(overlapped(program, order, depth) for depth in (*DEPTHS, 0))), statement


def _plan_best_order(
    program: MemoryProgram,
    machine: MemoryMachine,
    goal: _Goal,
    orders: Sequence[tuple[int, ...]],
    statement: tuple[str, ...],
) -> MemoryPlan:
    """Plan the order that is fastest without offload and the order of least peak, and return the better plan."""
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
            plans.append(_plan_in_order(program, machine, goal, order, (*statement, comm_statement), limit_s, best_s))
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
    """Return the plan of one order; `statement` has sentences about earlier passes.

    When the peak is minimized, `limit_s` limits the seconds of the step; None: it follows from `max_slowdown` and this
    order. With a budget and no margin, the search is limited to plans that take at most `best_s`.
    """
    machine = true_machine.derated(goal.margin)
    budget_bytes, max_slowdown = goal.budget_bytes, goal.max_slowdown
    identity = identity_program(program, order)
    if budget_bytes is not None and identity.peak + program.staging_bytes <= budget_bytes:
        reason = f"identity: the step takes {identity.peak} bytes and fits the budget; nothing moves"
        whole = _to_plan(program, true_machine, identity, (*statement, reason))
        if whole.device_bytes <= budget_bytes:
            return whole
    if limit_s is None and max_slowdown is not None:
        limit_s = identity.seconds * (1 + max_slowdown)
    rounding = Rounding(program, machine, order, movable_kinds=goal.move, recompute=goal.recompute)
    search = Search(program, machine, order, rounding, identity)

    def finish(emitted: EmittedProgram) -> MemoryPlan:
        return _to_plan(program, true_machine, emitted, statement)

    if budget_bytes is not None:
        useless_s = best_s if machine == true_machine else float("inf")
        best, plan = least_time(search, budget_bytes, finish, useless_s)
    else:
        assert limit_s is not None
        best, plan = least_peak(search, limit_s, finish)
    if best is identity:
        reason = (
            f"identity: no plan lowers the peak of {identity.peak} bytes within {max_slowdown:.1%} more time; "
            "nothing moves"
        )
        return replace(plan, statement=(*statement, reason))
    reserve = f", with links {goal.margin:.0%} slower {best.seconds:.6g}" if goal.margin else ""
    outcome = (
        f"peak {identity.peak} -> {best.peak} bytes, seconds {identity.seconds:.6g} -> {plan.seconds:.6g}{reserve} "
        f"({best.statement})"
    )
    return replace(plan, statement=(*statement, outcome))


def _to_plan(
    program: MemoryProgram, machine: MemoryMachine, emitted: EmittedProgram, statement: tuple[str, ...]
) -> MemoryPlan:
    replayed = replay(program, emitted.homes, emitted.actions)
    counted = replayed.peak_bytes, slab_bytes(replayed.host_buffers)
    assert counted == (emitted.peaks, emitted.dram_bytes), "the emitter and the replay count differently"
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


PLANNER = 17
"""Version of planner and file format; it is part of the fingerprint, so files of other versions are not used."""

_log = logging.getLogger(__name__)


_LIMITS: Final = Limits(256 * MiB, num_elements=20_000_000)
"""Size limits of a cache file, for plans of about a million actions."""


@dataclass(frozen=True)
class _CachedPlan:
    """Content of a cache file; `seconds` are the measured seconds of the operators, None if they were not measured."""

    fingerprint: str
    homes: tuple[MemoryTier, ...]
    actions: tuple[MemoryAction, ...]
    choices: tuple[Choice, ...]
    statement: tuple[str, ...]
    offsets: tuple[int, ...]
    arena_bytes: int
    seconds: tuple[float, ...] | None


def plan_memory_cached(
    program: MemoryProgram,
    machine: MemoryMachine,
    *,
    cache: Path | None = None,
    measured: Sequence[float] | None = None,
    budget_bytes: int | None = None,
    max_slowdown: float | None = None,
    recompute: bool = True,
    reorder: bool = True,
) -> MemoryPlan:
    """Return the result of `plan_memory`, read from the cache if an earlier call with equal arguments has written it.

    `cache` is the directory of the cache; None: `plans` in the user's cache directory. `measured` has measured seconds
    of the operators; None: those of `program`. Measured seconds vary between runs, so they need not be equal: a cached
    plan keeps the seconds with which it was planned.

    Raises:
        HyperParallelError: See `plan_memory`. A failure to read or write the cache is logged, not raised.
    """
    goal = _Goal(budget_bytes, max_slowdown, recompute, reorder)
    key = fingerprint(program, machine, (goal, measured is not None))
    path = (cache or cache_dir() / "plans") / f"{key[:32]}.json"
    if path.exists():
        try:
            return _read(path, key, program, machine, goal)
        except (ValueError, MemoryPlanInvalid, OSError) as error:
            _log.warning("the cached memory plan %s is ignored: %s", path, error)
    plan = plan_memory(
        with_seconds(program, measured),
        machine,
        budget_bytes=budget_bytes,
        max_slowdown=max_slowdown,
        recompute=recompute,
        reorder=reorder,
    )
    try:
        _write(path, key, plan, timed=measured is not None)
    except OSError as error:
        _log.warning("the memory plan could not be cached in %s: %s", path, error)
    return plan


def fingerprint(program: MemoryProgram, machine: MemoryMachine, goal: object) -> str:
    """Return the hash of program, machine and goal as text; equal inputs give equal hashes in every process."""
    # `repr` of a frozen dataclass of numbers is exact, but slow for thousands of operators.
    units = program.alignment_bytes, program.address_bytes
    digest = hashlib.sha256(repr((PLANNER, machine, goal, units)).encode())
    digest.update(json.dumps(encode((program.storages, program.operators))).encode())
    return digest.hexdigest()


def _write(path: Path, key: str, plan: MemoryPlan, timed: bool) -> None:
    cached = _CachedPlan(
        key,
        plan.homes,
        plan.actions,
        plan.choices,
        plan.statement,
        tuple(e.offset_bytes for e in plan.addresses),
        plan.arena_bytes,
        tuple(op.seconds for op in plan.program.operators) if timed else None,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(encode(cached), separators=(",", ":")))


def _read(path: Path, key: str, program: MemoryProgram, machine: MemoryMachine, goal: _Goal) -> MemoryPlan:
    """Return the replayed and timed plan in a cache file; raise ValueError or MemoryPlanInvalid if it is not usable."""
    cached = read(_CachedPlan, path, _LIMITS)
    if cached.fingerprint != key:
        raise ValueError("it belongs to another program, machine, goal or planner")
    if len(cached.homes) != len(program.storages):
        raise ValueError("it has another number of storages")
    for action in cached.actions:
        targets = program.operators if action.kind in OF_OPERATORS else program.storages
        if not 0 <= action.target < len(targets):
            raise ValueError(f"an action refers to {action.target}, which does not exist")
    if min(cached.offsets, default=0) < 0:
        raise ValueError("an address is negative")
    program = with_seconds(program, cached.seconds)
    ranges = MemoryPlan(program, cached.homes, cached.actions, 0.0).replayed.residency
    plan = MemoryPlan(
        program,
        cached.homes,
        cached.actions,
        clocked(program, machine, cached.actions).now_s,
        cached.choices,
        cached.statement,
        tuple(replace(e, offset_bytes=offset) for e, offset in zip(ranges, cached.offsets, strict=True)),
        cached.arena_bytes,
    )
    _check(plan, machine, goal)
    return plan


def _check(plan: MemoryPlan, machine: MemoryMachine, goal: _Goal) -> None:
    if goal.budget_bytes is not None and plan.device_bytes > goal.budget_bytes:
        raise ValueError(f"it takes {plan.device_bytes} bytes of the device, above the budget")
    if goal.max_slowdown is not None:
        unmoved_s = baseline_seconds(plan.program, reorder=goal.reorder)
        limit_s = unmoved_s * (1 + goal.max_slowdown) * (1 + 1e-9)
        if plan.seconds > limit_s:
            raise ValueError(f"it takes {plan.seconds} s where {limit_s} s are allowed")
    for tier, size, cap in (
        ("dram", plan.dram_bytes, machine.dram_bytes),
        ("flash", plan.peak_bytes["flash"], machine.flash_bytes),
    ):
        if cap is not None and size > cap:
            raise ValueError(f"it takes {size} bytes of {tier}, the machine has {cap}")
    if wrong := wrong_address(plan):
        raise ValueError(wrong)
