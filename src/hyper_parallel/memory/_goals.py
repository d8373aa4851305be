"""The two goals of planning in one order of the operators: least time under a budget, least peak within a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hyper_parallel.errors import BudgetImpossible, TierFull
from hyper_parallel.ir import MemoryPlan
from hyper_parallel.memory._capacity_hint import sufficient_capacity, tier_full
from hyper_parallel.memory._programs import Search
from hyper_parallel.memory.def_use import working_set_bytes
from hyper_parallel.memory.emitted_programs import Emitted
from hyper_parallel.memory.host_updates import device_part
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.units import format_bytes

_GOOD = 1.02  # of the live peak: an arena that is no larger needs no other program
_TRIED = 3  # programs whose addresses are looked for at each target; of small programs four times as many
_LARGE_PROGRAM = 300  # operators
_TARGETS = 12  # by bisection, until they are so close
_TARGET_PARTS, _SAVED_PARTS = 100, 40  # of the target, and of what it saves
# When all that is asked is what would be enough: parts of the target, and by how much more a next one rises.
_REFUSED_PARTS, _REFUSED_GROWTH = 32, 4
_AIMS = 5  # targets; from the third on lower by half of what addresses took too much
# Parts of the room that are left for gaps between addresses at the first targets; then at least the last one more.
_GAPS = (256, 50)
_ELSEWHERE = 20  # the same while it is asked what DRAM would be enough
# A program that is faster by less is not tried again with more room for gaps; at the first target, by much less.
_WORTH_MORE_GAPS, _WORTH_MORE_GAPS_AT_FIRST = 0.97, 0.998


def least_time(
    searches: Sequence[Search],
    budget: int,
    finish: Callable[[Emitted], MemoryPlan],
    limit_s: float = float("inf"),
) -> tuple[Emitted, MemoryPlan]:
    """The fastest program whose arena, with what is made beside it, is within the budget; and its plan.

    Every search has its own part of the updates in host memory, so allowing more of them never gives a slower plan.
    What one has found is the limit of the next.

    Args:
        searches: Tried in turn.
        budget: Device bytes.
        finish: Makes the plan of a program.
        limit_s: A slower plan is of no use.
    """
    result, errors = list[tuple[Emitted, MemoryPlan]](), list[BudgetImpossible]()
    for search in searches:
        try:
            result.append(_least_time(search, budget, finish, limit_s))
            limit_s = min(limit_s, result[-1][0].seconds)
        except BudgetImpossible as error:
            errors.append(error)
    if not result:
        nearest = min(errors, key=lambda e: e.least_bytes)
        if limit_s < float("inf"):
            raise nearest
        raise _more_elsewhere(searches, budget, finish, nearest) or nearest
    return min(result, key=lambda one: (one[0].seconds, one[1].device_bytes))


def _least_time(
    search: Search,
    budget: int,
    finish: Callable[[Emitted], MemoryPlan],
    limit_s: float = float("inf"),
) -> tuple[Emitted, MemoryPlan]:
    arena_budget = budget - search.program.staging_bytes
    floor = working_set_bytes(device_part(search.program, search.machine))
    best: tuple[Emitted, MemoryPlan] | None = None
    seen_s = float("inf")  # of the fastest program, whatever its addresses take
    tried = _TRIED if len(search.program.operators) > _LARGE_PROGRAM else 4 * _TRIED
    aim = arena_budget - arena_budget // _GAPS[0]
    for count in range(1, _AIMS + 1 if floor <= arena_budget else 1):
        within_s = best[0].seconds if best else limit_s
        result = [e for e in search.programs(aim, within_s, lowers=True) if e.peak <= arena_budget]
        arenas: list[int] = []
        distinct = list({e.actions: e for e in result}.values())
        for e in sorted(distinct, key=lambda e: (e.seconds, e.peak))[:tried]:
            if best and e.seconds > best[0].seconds:
                break
            seen_s = min(seen_s, e.seconds)
            plan = finish(e)
            if plan.device_bytes > budget:
                arenas.append(plan.arena_bytes)
                continue
            best = min(best or (e, plan), (e, plan), key=_quality)
            if plan.arena_bytes <= _GOOD * e.peak:
                break  # else one that takes as long may have better addresses
        # Where only its addresses spoil a faster program, a little more room for gaps may save it.
        if (
            best
            and seen_s
            > (_WORTH_MORE_GAPS_AT_FIRST if count == 1 else _WORTH_MORE_GAPS) * best[0].seconds
        ):
            break
        if count < len(_GAPS):
            aim = arena_budget - arena_budget // _GAPS[count]
        else:
            over = max(min(arenas, default=arena_budget) - arena_budget, 0)
            aim -= max(
                aim * over // (2 * (arena_budget + over)), (count - 1) * arena_budget // _GAPS[-1]
            )
    if best is not None:
        return best
    if limit_s < float("inf"):
        raise BudgetImpossible(
            f"no memory plan fits {format_bytes(budget)} in less time than another one",
            got=f"{budget} bytes",
        )
    # The lowest programs are looked for in the same way whatever the budget is, so planning finds them again.
    fresh = search.fresh()
    last = _least_peak(fresh, fresh.identity, float("inf"), refused=True)[-1]
    lowest = {id(e): e for e in (last, fresh.best_seen)}
    plans = {at: finish(e) for at, e in lowest.items()}
    others = fresh.programs((floor + arena_budget) // 2, lowers=True)
    for e in sorted((*lowest.values(), *others), key=lambda e: (e.seconds, e.peak)):
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


def _quality(result: tuple[Emitted, MemoryPlan]) -> tuple[float, float]:
    """Time first, then what addresses waste."""
    return result[0].seconds, result[1].arena_bytes / max(result[0].peak, 1)


def _more_elsewhere(
    searches: Sequence[Search],
    budget: int,
    finish: Callable[[Emitted], MemoryPlan],
    error: BudgetImpossible,
) -> TierFull | None:
    """What stands in the way, when it is DRAM or flash."""
    program, machine = searches[0].program, searches[0].machine
    if working_set_bytes(device_part(program, machine)) > budget - program.staging_bytes:
        return None

    def planned(changed: MemoryMachine) -> Emitted | None:
        for search in searches:
            try:
                return _least_time(search.on(changed), budget, finish)[0]
            except BudgetImpossible:
                continue
        return None

    def tried(changed: MemoryMachine) -> Emitted | None:
        arena_budget = budget - program.staging_bytes
        aim = arena_budget - arena_budget // _ELSEWHERE
        found = (e for s in searches for e in s.on(changed).programs(aim, lowers=True))
        fits = (e for e in found if e.peak <= arena_budget)
        return next((e for e in fits if finish(e).device_bytes <= budget), None)

    sufficient = sufficient_capacity(machine, planned, tried)
    if not sufficient:
        return None
    return tier_full(budget, machine, {**sufficient, "device": error.least_bytes})


def least_peak(
    searches: Sequence[Search],
    identity: Emitted,
    limit_s: float,
    finish: Callable[[Emitted], MemoryPlan],
) -> tuple[Emitted, MemoryPlan]:
    """The program of least peak within a time, and its plan; the identity when nothing lowers it."""
    best, programs = identity, {identity.actions: identity}
    for search in searches:  # what one has found is to be lowered by the next
        lower = best.peak - best.peak // _TARGET_PARTS
        tried = search.programs(lower, limit_s) if best is not identity else [best]
        if any(e.peak <= best.peak and e.seconds <= limit_s for e in tried):
            programs |= {e.actions: e for e in _least_peak(search, best, limit_s)}
            best = min(programs.values(), key=lambda e: (e.peak, e.seconds))
    plans = [(best, finish(best))]
    if plans[0][1].arena_bytes > _GOOD * best.peak:
        # One that takes hardly more may have better addresses.
        for search in searches:
            again = search.programs(int(_GOOD * best.peak), limit_s, lowers=True)
            programs |= {e.actions: e for e in again if e.seconds <= limit_s}
        del programs[best.actions]
        others = sorted(programs.values(), key=lambda e: (e.peak, e.seconds))
        plans += [(e, finish(e)) for e in others[:_TRIED]]
    return min(plans, key=lambda one: (one[1].device_bytes, one[0].peak))


def _least_peak(
    search: Search, best: Emitted, limit_s: float, *, refused: bool = False
) -> list[Emitted]:
    """Programs of ever lower peaks within the time, the one to be lowered first.

    A target that is out of reach takes longest to try, so for a refusal fewer of them are.

    Bisects the target: first that of the linear program alone, which is quick and hardly too high, then from there on
    that of programs. Every success is judged by its real peak, so the answer never depends on monotony.
    """
    low, high = working_set_bytes(device_part(search.program, search.machine)), best.peak
    start = high
    result = [best]

    def close() -> bool:
        near = min(high // _TARGET_PARTS, (start - low) // _SAVED_PARTS)
        near = high // _REFUSED_PARTS if refused else near
        return high - low <= max(near, search.program.alignment_bytes)

    for _ in range(_TARGETS):
        if close():
            break
        target = (low + high) // 2
        if search.reaches(target, limit_s):
            high = target
        else:
            low = target
    step, high = high - low, start
    for _ in range(_TARGETS):
        if close():
            break
        target = min(low + step, (low + high) // 2)
        fine = [
            e
            for e in search.programs(target, limit_s)
            if e.seconds <= limit_s and e.peak < best.peak
        ]
        if fine:
            best = min(fine, key=lambda e: (e.peak, e.seconds))
            result.append(best)
            high = min(best.peak, high)
            if best.peak > target:
                low = target
        else:
            low = target
            step *= _REFUSED_GROWTH if refused else 2
    return result
