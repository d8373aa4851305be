"""Planning goals for one order of the operators: least time within a byte budget, or least peak within a time limit.

Both goals search programs: lists of actions such as run, copy and free. A target is a number of device bytes that the
search tries not to exceed. A program is judged by its simulated time and by the arena, the device buffer that its
addresses need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hyper_parallel.errors import BudgetImpossible, HyperParallelError, TierFull
from hyper_parallel.ir import MemoryPlan
from hyper_parallel.memory.def_use import working_set_bytes
from hyper_parallel.memory.emitted_programs import EmittedProgram, Search
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.units import format_bytes

_PACKING_SLACK_OK = 1.02  # ratio of arena to live peak up to which no further program is tried
_PROGRAMS_PER_TARGET = 3  # maximum of programs that get addresses, per target; four times as many if small
_LARGE_PROGRAM = 300  # maximum number of operators of a small program
_MAX_TARGETS = 5  # maximum number of targets tried for a budget
# The budget divided by these is left free for gaps between addresses: at the first target, and at later ones.
_PACKING_RESERVES = (256, 50)
# The search ends if the fastest emitted program takes more than this fraction of the time of the best program that fits
# the budget; at the first target, the second fraction applies.
_FAST_ENOUGH, _FAST_ENOUGH_AT_FIRST = 0.97, 0.998
_MAX_BISECTIONS = 12
# Bisection ends when its interval is at most 1/100 of its upper bound, and 1/40 of the largest possible saving.
_PEAK_RESOLUTION, _SAVING_RESOLUTION = 100, 40
# An error message only needs sufficient bytes, so its search is coarser and raises targets in larger steps.
_REFUSAL_RESOLUTION, _REFUSAL_GROWTH = 32, 4

_PlannedProgram = tuple[EmittedProgram, MemoryPlan]
_Finish = Callable[[EmittedProgram], MemoryPlan]
_PlanFor = Callable[[MemoryMachine], EmittedProgram | None]


def least_time(search: Search, budget: int, finish: _Finish, limit_s: float = float("inf")) -> _PlannedProgram:
    """Return the fastest program found whose arena and staging buffers fit the budget, with its plan.

    `finish` assigns addresses to a program and returns its plan. Programs that take longer than `limit_s` are excluded.

    Raises:
        BudgetImpossible: HP402 when no program is found that fits the budget and the time.
        TierFull: HP403 when, without a time limit, a program would fit with more DRAM or flash.
    """
    best = _fastest_within(search, budget, finish, limit_s)
    if best is not None:
        return best
    if limit_s < float("inf"):
        raise BudgetImpossible(
            f"no memory plan within {format_bytes(budget)} takes at most {limit_s:.4g} s per step",
            got=f"budget {budget} bytes, time limit {limit_s:.4g} s",
            hint="raise the budget or the time limit",
        )
    try:
        return _fallback_within_budget(search, budget, finish)
    except BudgetImpossible as error:
        raise _capacity_error(search, budget, finish, error) or error from None


def _fastest_within(search: Search, budget: int, finish: _Finish, limit_s: float) -> _PlannedProgram | None:
    """Return the fastest program found whose arena and staging buffers fit the budget, with its plan; else None.

    Gaps between addresses also take bytes of the budget, so the target peak is lowered in steps.
    """
    arena_budget = budget - search.program.staging_bytes
    best: _PlannedProgram | None = None
    fastest_s = float("inf")  # of all programs tried, whether their arenas fit or not
    tries = _PROGRAMS_PER_TARGET * (1 if len(search.program.operators) > _LARGE_PROGRAM else 4)
    aim = arena_budget - arena_budget // _PACKING_RESERVES[0]
    fits = working_set_bytes(search.program) <= arena_budget
    for count in range(1, _MAX_TARGETS + 1 if fits else 1):
        within_s = best[0].seconds if best else limit_s
        programs = [e for e in search.programs(aim, within_s, lowers=True) if e.peak <= arena_budget]
        arenas: list[int] = []
        distinct = list({e.actions: e for e in programs}.values())
        for e in sorted(distinct, key=lambda e: (e.seconds, e.peak))[:tries]:
            if best and e.seconds > best[0].seconds:
                break
            fastest_s = min(fastest_s, e.seconds)
            plan = finish(e)
            if plan.device_bytes > budget:
                arenas.append(plan.arena_bytes)
                continue
            best = min(best or (e, plan), (e, plan), key=_quality)
            if plan.arena_bytes <= _PACKING_SLACK_OK * e.peak:
                break  # else an equally fast program may pack better
        # If a faster program failed only by its addresses, a slightly lower target may make it fit.
        enough = _FAST_ENOUGH_AT_FIRST if count == 1 else _FAST_ENOUGH
        if best and fastest_s > enough * best[0].seconds:
            break
        if count < len(_PACKING_RESERVES):
            aim = arena_budget - arena_budget // _PACKING_RESERVES[count]
        else:
            excess = max(min(arenas, default=arena_budget) - arena_budget, 0)
            aim -= max(
                aim * excess // (2 * (arena_budget + excess)), (count - 1) * arena_budget // _PACKING_RESERVES[-1]
            )
    return best


def _fallback_within_budget(search: Search, budget: int, finish: _Finish) -> _PlannedProgram:
    """Return the fastest program that fits the budget, with its plan: of least peak, or for one lower target.

    The lower target is halfway between the working set and the budget. The search for the least peak does not depend on
    the budget.

    Raises:
        BudgetImpossible: HP402 with the smallest sufficient budget that the search has found.
    """
    arena_budget = budget - search.program.staging_bytes
    floor = working_set_bytes(search.program)
    fresh = search.for_machine(search.machine)
    last = _descending_peaks(fresh, float("inf"), refused=True)[-1]
    lowest = {id(e): e for e in (last, fresh.best_seen)}
    plans = {key: finish(e) for key, e in lowest.items()}
    programs = (*lowest.values(), *fresh.programs((floor + arena_budget) // 2, lowers=True))
    for e in sorted(programs, key=lambda e: (e.seconds, e.peak)):
        if e.peak > arena_budget:
            continue
        plan = plans.get(id(e)) or finish(e)
        if plan.device_bytes <= budget:
            return e, plan
    least = min(plan.device_bytes for plan in plans.values())
    error = BudgetImpossible(
        f"no memory plan fits {format_bytes(budget)}",
        got=f"{budget} bytes",
        allowed=f"at least {least} bytes (the largest operator alone takes {floor})",
        hint=f"set `offload.budget={least}`",
    )
    error.least_bytes = least
    raise error


def _quality(result: _PlannedProgram) -> tuple[float, float]:
    return result[0].seconds, result[1].arena_bytes / max(result[0].peak, 1)


def least_peak(search: Search, limit_s: float, finish: _Finish) -> _PlannedProgram:
    """Return the program of least peak found that takes at most `limit_s` seconds, with its plan.

    If a program with a slightly higher peak needs a smaller arena, that program is returned. If no program is better
    than `search.identity` (no offload and no recomputation), identity is returned, even if it exceeds `limit_s`.
    `finish` assigns addresses to a program and returns its plan.
    """
    identity = search.identity
    programs = {identity.actions: identity}
    if identity.seconds <= limit_s:
        programs |= {e.actions: e for e in _descending_peaks(search, limit_s)}
    best = min(programs.values(), key=lambda e: (e.peak, e.seconds))
    plans = [(best, finish(best))]
    if plans[0][1].arena_bytes > _PACKING_SLACK_OK * best.peak:
        # A program with a slightly higher peak may pack better.
        slightly_larger = search.programs(int(_PACKING_SLACK_OK * best.peak), limit_s, lowers=True)
        programs |= {e.actions: e for e in slightly_larger if e.seconds <= limit_s}
        del programs[best.actions]
        ranked = sorted(programs.values(), key=lambda e: (e.peak, e.seconds))
        plans += [(e, finish(e)) for e in ranked[:_PROGRAMS_PER_TARGET]]
    return min(plans, key=lambda result: (result[1].device_bytes, result[0].peak))


def _descending_peaks(search: Search, limit_s: float, *, refused: bool = False) -> list[EmittedProgram]:
    """Return `search.identity`, then programs with descending peaks that take at most `limit_s` seconds.

    The target is bisected twice: first with the linear program alone, then with emitted programs. The peak of an
    emitted program may differ from its target. With `refused`, the bisection is coarser and tries fewer infeasible
    targets, because these take longest.
    """
    best = search.identity
    low, high = working_set_bytes(search.program), best.peak
    start = high
    result = [best]

    def close() -> bool:
        near = min(high // _PEAK_RESOLUTION, (start - low) // _SAVING_RESOLUTION)
        near = high // _REFUSAL_RESOLUTION if refused else near
        return high - low <= max(near, search.program.alignment_bytes)

    for _ in range(_MAX_BISECTIONS):
        if close():
            break
        target = (low + high) // 2
        if search.rounding.feasible(target, limit_s):
            high = target
        else:
            low = target
    step, high = high - low, start
    for _ in range(_MAX_BISECTIONS):
        if close():
            break
        target = min(low + step, (low + high) // 2)
        lower = [e for e in search.programs(target, limit_s) if e.seconds <= limit_s and e.peak < best.peak]
        if lower:
            best = min(lower, key=lambda e: (e.peak, e.seconds))
            result.append(best)
            high = min(best.peak, high)
            if best.peak > target:
                low = target
        else:
            low = target
            step *= _REFUSAL_GROWTH if refused else 2
    return result


# -- capacities of the other tiers -------------------------------------------------------------


def _capacity_error(search: Search, budget: int, finish: _Finish, error: BudgetImpossible) -> TierFull | None:
    program, machine = search.program, search.machine
    if working_set_bytes(program) > budget - program.staging_bytes:
        return None

    def plan(changed: MemoryMachine) -> EmittedProgram | None:
        fresh = search.for_machine(changed)
        best = _fastest_within(fresh, budget, finish, float("inf"))
        try:
            return (best or _fallback_within_budget(fresh, budget, finish))[0]
        except BudgetImpossible:
            return None

    sufficient = _sufficient_capacity(machine, plan)
    if not sufficient:
        return None
    dram = "unlimited" if machine.dram_bytes is None else f"{machine.dram_bytes} bytes"
    flash = "unlimited" if machine.flash_bytes is None else f"{machine.flash_bytes} bytes"
    if machine.copy_out is None:
        flash = "none"
    refusal = TierFull(
        "the device budget needs more bytes in DRAM or flash than the machine allows",
        got=f"budget {budget} bytes, dram {dram}, flash {flash}",
    )
    return with_capacity_hint(refusal, {**sufficient, "device": error.least_bytes})


def _sufficient_capacity(machine: MemoryMachine, plan: _PlanFor) -> dict[str, int]:
    """Return, per tier (`dram`, `flash`), a capacity in bytes with which `plan` succeeds; the other tier is unchanged.

    A tier is omitted if its capacity is unlimited, or if no sufficient capacity was found. `plan` plans for a machine,
    and returns None on failure.
    """

    def plan_with(tier: str, num_bytes: int | None) -> EmittedProgram | None:
        dram = tier == "dram"
        return plan(replace(machine, dram_bytes=num_bytes) if dram else replace(machine, flash_bytes=num_bytes))

    result = dict[str, int]()
    limited = {"dram": machine.dram_bytes, "flash": None if machine.copy_out is None else machine.flash_bytes}
    for tier, capacity in limited.items():
        if capacity is None:
            continue
        unlimited = plan_with(tier, None)
        if unlimited is None:
            continue
        used = unlimited.dram_bytes if tier == "dram" else unlimited.peaks["flash"]
        most = max(used, capacity + 1)
        # With a limit, the search may choose other storages, and buffers for flash copies also take DRAM. So each
        # capacity is tried.
        sizes = (most, 2 * most, 4 * most)
        enough = next((n for n in sizes if plan_with(tier, n) is not None), None)
        if enough is not None:
            result[tier] = enough
    return result


def with_capacity_hint(error: TierFull, sufficient: Mapping[str, int]) -> TierFull:
    """Set hint and `enough_bytes` of `error` in place, and return `error`; one key of the hint is enough.

    `sufficient` maps tiers (`dram`, `flash`, `device`) to sufficient bytes.
    """
    keys = {"dram": "dram", "flash": "flash", "device": "budget"}
    options = [f"`offload.{key}={sufficient[tier]}`" for tier, key in keys.items() if tier in sufficient]
    error.enough_bytes = dict(sufficient)
    error.hint = f"set {', or '.join(options)}"
    return error


def merge_errors(errors: Sequence[HyperParallelError]) -> HyperParallelError | None:
    """Return one error for several failed plans; None for []. Hints of TierFull errors are changed in place.

    If all are TierFull, the hint has the largest capacity of each tier that all of them state. Otherwise, more DRAM or
    flash does not help every plan, so the result is the error that requires the most device bytes.
    """
    full = [error for error in errors if isinstance(error, TierFull)]
    other_errors = [error for error in errors if error not in full]
    if other_errors or not full:  # more DRAM does not resolve all errors
        budgets = [with_capacity_hint(e, {"device": e.enough_bytes["device"]}) for e in full]
        return max((*other_errors, *budgets), key=sufficient_device_bytes, default=None)
    shared = [t for t in full[0].enough_bytes if all(t in e.enough_bytes for e in full)]
    return with_capacity_hint(full[0], {t: max(e.enough_bytes[t] for e in full) for t in shared})


def sufficient_device_bytes(error: HyperParallelError) -> int:
    """Return the device bytes with which planning succeeds, according to an error; 0 if no budget resolves it."""
    if isinstance(error, TierFull):
        return error.enough_bytes["device"]
    return error.least_bytes if isinstance(error, BudgetImpossible) else 0
