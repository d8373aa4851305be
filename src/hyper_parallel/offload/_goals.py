"""The two goals of planning in one order of the operators: least time under a budget, least peak within a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from hyper_parallel.errors import BudgetImpossible, TierFull
from hyper_parallel.ir import MemoryPlan
from hyper_parallel.offload._capacity_hint import sufficient_capacity, tier_full
from hyper_parallel.offload._first_fit import GOOD
from hyper_parallel.offload._host import device_part
from hyper_parallel.offload._local_search import LARGEST, polish
from hyper_parallel.offload._portfolio import Emitted, Search
from hyper_parallel.offload._usedef import working_set_bytes
from hyper_parallel.units import format_bytes

_TRIED = 3  # programs whose addresses are looked for at each target; of small programs four times as many
_LARGE_PROGRAM = 300  # operators
_OTHERS = 6  # programs whose addresses are tried when those of the best do not fit together
_LARGE_ACTIONS = 6000  # beyond, two
_TARGETS = 12  # by bisection, until they are so close
_CLOSE = 100
_SQUEEZED = 3  # rules whose choice is emitted again in less room; one that needs so much more than the best is not
_MUCH = 1.25
_ROOMS = 5  # tried for each, by bisection
_LEAST_ROOM = 0.7  # of the peak before
_AIMS = 5  # targets; from the third on lower by half of what addresses took too much
# Parts of the room that are left for gaps between addresses at the first targets; then at least the last one more.
_GAPS = (256, 50)
_ELSEWHERE = 20  # the same while it is asked what DRAM or flash would be enough
# A program that is faster by less is not tried again with more room for gaps; at the first target, by much less.
_NEAR, _AS_FAST = 0.97, 0.998


def least_time(
    searches: Sequence[Search],
    budget: int,
    finish: Callable[[Emitted, int], MemoryPlan],
    limit_s: float = float("inf"),
) -> tuple[Emitted, MemoryPlan]:
    """The fastest program whose arena, with what is made beside it, is within the budget; and its plan.

    Every search has its own part of the updates in host memory, so allowing more of them never gives a slower plan.
    What one has found is the limit of the next.

    Args:
        searches: Tried in turn.
        budget: Device bytes.
        finish: Makes the plan of a program; its arena need not be smaller than the bytes given.
        limit_s: A slower plan is of no use.
    """
    found, errors = list[tuple[Emitted, MemoryPlan]](), list[BudgetImpossible]()
    for search in searches:
        try:
            found.append(_least_time(search, budget, finish, limit_s))
            limit_s = min(limit_s, found[-1][0].seconds)
        except BudgetImpossible as error:
            errors.append(error)
    if not found:
        nearest = min(errors, key=lambda e: e.least_bytes)
        if limit_s < float("inf"):
            raise nearest
        raise _more_elsewhere(searches, budget, finish, nearest) or nearest
    return min(found, key=lambda one: (one[0].seconds, one[1].device_bytes))


def _least_time(
    search: Search,
    budget: int,
    finish: Callable[[Emitted, int], MemoryPlan],
    limit_s: float = float("inf"),
) -> tuple[Emitted, MemoryPlan]:
    room = budget - search.program.staging_bytes
    floor = working_set_bytes(device_part(search.program, search.machine))
    best: tuple[Emitted, MemoryPlan] | None = None
    seen_s = float("inf")  # of the fastest program, whatever its addresses take
    tried = _TRIED if len(search.program.operators) > _LARGE_PROGRAM else 4 * _TRIED
    aim = room - room // _GAPS[0]
    for count in range(1, _AIMS + 1 if floor <= room else 1):
        within_s = best[0].seconds if best else limit_s
        again = replace(search, best_seen=search.best_seen)
        found = [e for e in again.portfolio(aim, within_s, budget=room) if e.peak <= room]
        arenas: list[int] = []
        distinct = list({e.actions: e for e in found}.values())
        for e in sorted(distinct, key=lambda e: (e.seconds, e.peak))[:tried]:
            if best and e.seconds > best[0].seconds:
                break
            seen_s = min(seen_s, e.seconds)
            plan = finish(e, room)
            if plan.device_bytes > budget:
                arenas.append(plan.arena_bytes)
                continue
            best = min(best or (e, plan), (e, plan), key=_quality)
            if plan.arena_bytes <= GOOD * e.peak:
                break  # else one that takes as long may have better addresses
        # Where only its addresses spoil a faster program, a little more room for gaps may save it.
        if best and seen_s > (_AS_FAST if count == 1 else _NEAR) * best[0].seconds:
            break
        if count < len(_GAPS):
            aim = room - room // _GAPS[count]
        else:
            over = max(min(arenas, default=room) - room, 0)
            aim -= max(aim * over // (2 * (room + over)), (count - 1) * room // _GAPS[-1])
    if best is not None:
        return best
    if limit_s < float("inf"):
        raise BudgetImpossible(
            f"no memory plan fits {format_bytes(budget)} in less time than another one",
            got=f"{budget} bytes",
        )
    # Programs that aim at the floor are made for every budget, so their least bytes are what planning finds again.
    again = replace(search, best_seen=search.best_seen)
    lowest = again.portfolio(floor)
    candidates = sorted(lowest, key=lambda e: (e.peak, e.seconds))[:3] or [search.best_seen]
    plans = {id(e): finish(e, 0) for e in candidates}
    others = again.portfolio((floor + room) // 2, budget=room)
    for e in sorted((*lowest, *others), key=lambda e: (e.seconds, e.peak)):
        if e.peak > room:
            continue
        plan = plans.get(id(e)) or finish(e, room)
        if plan.device_bytes <= budget:
            return e, plan
    least = min(plans[id(e)].device_bytes for e in candidates)
    error = BudgetImpossible(
        f"no memory plan fits {format_bytes(budget)}",
        got=f"{budget} bytes",
        allowed=f"at least {least} bytes (the largest operator alone takes {floor})",
        hint=f"set `offload.budget={least}`",
    )
    error.least_bytes = least
    raise error


def _quality(found: tuple[Emitted, MemoryPlan]) -> tuple[float, float]:
    """Time first, then what addresses waste."""
    return found[0].seconds, found[1].arena_bytes / max(found[0].peak, 1)


def _more_elsewhere(
    searches: Sequence[Search],
    budget: int,
    finish: Callable[[Emitted, int], MemoryPlan],
    error: BudgetImpossible,
) -> TierFull | None:
    """What stands in the way, when it is DRAM or flash."""
    program, machine = searches[0].program, searches[0].machine
    room = budget - program.staging_bytes
    if working_set_bytes(device_part(program, machine)) > room:
        return None

    def fits(e: Emitted) -> bool:
        return e.peak <= room and finish(e, room).device_bytes <= budget

    def planned(others: Sequence[Search]) -> Emitted | None:
        for search in others:
            try:
                return _least_time(search, budget, finish)[0]
            except BudgetImpossible:
                continue
        return None

    enough = sufficient_capacity(searches, room - room // _ELSEWHERE, fits, planned)
    if not enough:
        return None
    return tier_full(budget, machine, {**enough, "device": error.least_bytes})


def least_peak(
    searches: Sequence[Search],
    identity: Emitted,
    limit_s: float,
    finish: Callable[[Emitted], MemoryPlan],
) -> tuple[Emitted, MemoryPlan]:
    """The program of least peak within a time, and its plan; the identity when nothing lowers it.

    Where its addresses leave gaps, programs that leave more room for them are tried, and the smallest arena is taken.
    """
    found = _in_turn([e for search in searches for e in _least_peak(search, identity, limit_s)])
    best, plan = found[0], finish(found[0])
    large = len(best.actions) > _LARGE_ACTIONS
    for e in found[1 : 4 if large else _OTHERS]:
        if plan.arena_bytes <= GOOD * best.peak or e.peak >= plan.arena_bytes:
            break
        other = finish(e)
        if other.arena_bytes < plan.arena_bytes:
            best, plan = e, other
    return best, plan


def _in_turn(found: Sequence[Emitted]) -> list[Emitted]:
    """By peak; of equal peaks the fastest program, then the one that waits most: it leaves most gaps elsewhere."""
    turn = []
    ranked = sorted(found, key=lambda e: (e.peak, e.seconds))
    for _, equal in groupby(ranked, key=lambda e: e.peak):
        first, *others = equal
        turn += [first, *(e for e in others[-1:] if e.seconds > first.seconds)]
    return turn


def _least_peak(search: Search, identity: Emitted, limit_s: float) -> list[Emitted]:
    """Programs within the time, and the identity.

    Bisects the target; every success is judged by its real peak, so the answer never depends on monotony. One rule that
    meets a target is enough to go on; the lowest one met is asked of all.
    """
    low, high = working_set_bytes(device_part(search.program, search.machine)), identity.peak
    best = identity
    found = [identity]
    met: int | None = None
    for _ in range(_TARGETS):
        target = (low + high) // 2
        if high - low <= max(high // _CLOSE, search.program.alignment_bytes):
            break
        fine = [
            e
            for e in search.portfolio(target, limit_s, every=False)
            if e.seconds <= limit_s and e.peak < best.peak
        ]
        if fine:
            met = target
            best = min(fine, key=lambda e: (e.peak, e.seconds))
            found += fine
            high = min(best.peak, high)
            if best.peak > target:
                low = target
        else:
            low = target
    if met is not None:
        found += [e for e in search.portfolio(met, limit_s) if e.seconds <= limit_s]
        best = min(found, key=lambda e: (e.peak, e.seconds))
    if len(search.program.operators) <= LARGEST and best.recomputes is not None:
        found.append(polish(search, best, limit_s))
    return found + _squeezed(search, found, limit_s)


def _squeezed(search: Search, found: Sequence[Emitted], limit_s: float) -> list[Emitted]:
    """What the rules of lowest peak chose, emitted in less room.

    A selection ends where its target is reached or cannot be, but waiting may still lower the peak. Where it cannot, it
    lowers the rest of the step, so that the addresses of the peak fit together.
    """
    lowest: dict[int, Emitted] = {}  # of every rule
    most = _MUCH * min(e.peak for e in found)
    for e in sorted(found, key=lambda e: (e.peak, e.seconds)):
        if e.asked is not None and e.peak <= most:
            lowest.setdefault(id(e.asked.rule), e)
    squeezed = []
    for e in list(lowest.values())[:_SQUEEZED]:
        low, high = _LEAST_ROOM, 1.0
        for _ in range(_ROOMS):
            share = (low + high) / 2
            less = search.in_less_room(e, int(e.peak * share), limit_s)
            if less is None:
                low = share
            else:
                high = share
                squeezed.append(less)
    return squeezed
