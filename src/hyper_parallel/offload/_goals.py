"""The two goals of planning in one order of the operators: least time under a budget, least peak within a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hyper_parallel.errors import BudgetImpossible, TierFull
from hyper_parallel.ir import MemoryPlan, MemoryTier
from hyper_parallel.offload._address import GOOD
from hyper_parallel.offload._host import device_part
from hyper_parallel.offload._polish import LARGEST, polish
from hyper_parallel.offload._portfolio import Emitted, Search
from hyper_parallel.offload._usedef import working_set_bytes
from hyper_parallel.units import format_bytes

_OTHERS = 6  # programs whose addresses are tried when those of the best do not fit together
_LARGE_ACTIONS = 6000  # beyond, two
_GAPS = (256, 50, 20, 8)  # part of the room that is left for gaps between addresses, tried in turn


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
    found, errors = list[tuple[Emitted, MemoryPlan]](), list[BudgetImpossible | TierFull]()
    for search in searches:
        try:
            found.append(_least_time(search, budget, finish, limit_s))
            limit_s = min(limit_s, found[-1][0].seconds)
        except (BudgetImpossible, TierFull) as error:
            errors.append(error)
    if not found:
        raise min(errors, key=lambda e: getattr(e, "least_bytes", 0))
    return min(found, key=lambda one: (one[0].seconds, one[1].device_bytes))


def _least_time(
    search: Search, budget: int, finish: Callable[[Emitted, int], MemoryPlan], limit_s: float
) -> tuple[Emitted, MemoryPlan]:
    room = budget - search.program.staging_bytes
    plans: dict[int, MemoryPlan] = {}

    def first(found: list[Emitted]) -> tuple[Emitted, MemoryPlan] | None:
        lowest = room + 1
        for e in sorted((e for e in found if e.peak <= room), key=lambda e: (e.seconds, e.peak)):
            if e.peak >= lowest and len(e.actions) > _LARGE_ACTIONS:
                continue  # the addresses of what is faster and lower did not fit
            lowest = min(lowest, e.peak)
            plan = plans[id(e)] = plans.get(id(e)) or finish(e, room)
            if plan.device_bytes <= budget:
                return e, plan
        return None

    found: list[Emitted] = []
    floor = working_set_bytes(device_part(search.program, search.machine))
    for part in _GAPS if floor <= room else ():
        aim = max(room - room // part, 0)
        found += replace(search, best_seen=search.best_seen).portfolio(aim, limit_s, budget=aim)
        if (best := first(found)) is not None:
            return best
    if limit_s < float("inf"):
        raise BudgetImpossible(
            f"no memory plan fits {format_bytes(budget)} in less time than another one",
            got=f"{budget} bytes",
        )
    # Programs that aim at the floor are made for every budget, so their least bytes are what planning finds again.
    again = replace(search, best_seen=search.best_seen)
    lowest = again.portfolio(floor)
    found += [*lowest, *again.portfolio((floor + room) // 2, budget=room)]
    candidates = sorted(lowest, key=lambda e: (e.peak, e.seconds))[:3] or [search.best_seen]
    plans |= {id(e): finish(e, 0) for e in candidates}
    if (best := first(found)) is not None:
        return best
    least = min(plans[id(e)].device_bytes for e in candidates)
    if more := _more_elsewhere(search, room, floor):
        machine = search.machine
        raise TierFull(
            "the device budget needs more bytes in DRAM or flash than the machine allows",
            got=f"budget {budget}, dram {machine.dram_bytes}, flash {machine.flash_bytes}",
            hint=f"set `{more}`, or `offload.budget={least}`",
        )
    error = BudgetImpossible(
        f"no memory plan fits {format_bytes(budget)}",
        got=f"{budget} bytes",
        allowed=f"at least {least} bytes (the largest operator alone takes {floor})",
        hint=f"set `offload.budget={least}`",
    )
    error.least_bytes = least
    raise error


def _more_elsewhere(search: Search, room: int, floor: int) -> str:
    """Settings of DRAM and flash with which a program would live in the room; empty when they are not what is short."""
    machine = search.machine
    caps: dict[MemoryTier, int | None] = {"dram": machine.dram_bytes, "flash": machine.flash_bytes}
    if all(most is None for most in caps.values()):
        return ""
    unlimited = replace(machine, dram_bytes=None, flash_bytes=None)
    free = Search(search.program, unlimited, search.order, search.selectors, search.best_seen)
    for target in (room, floor):
        fitting = [e for e in free.portfolio(target, budget=room) if e.peak <= room]
        if fitting:
            needs = min(fitting, key=lambda e: (e.peaks["flash"], e.peaks["dram"])).peaks
            return " ".join(
                f"offload.{tier}={needs[tier]}"
                for tier, most in caps.items()
                if most is not None and needs[tier] > most
            )
    return ""


def least_peak(
    searches: Sequence[Search],
    identity: Emitted,
    limit_s: float,
    finish: Callable[[Emitted], MemoryPlan],
) -> tuple[Emitted, MemoryPlan]:
    """The program of least peak within a time, and its plan; the identity when nothing lowers it.

    It is another one when its addresses do not fit together and those of the other do.
    """
    found = [e for search in searches for e in _least_peak(search, identity, limit_s)]
    found.sort(key=lambda e: (e.peak, e.seconds))
    best, plan = found[0], finish(found[0])
    large = len(best.actions) > _LARGE_ACTIONS
    for e in found[1 : 3 if large else _OTHERS]:
        if plan.arena_bytes <= GOOD * best.peak or e.peak >= plan.arena_bytes:
            break
        other = finish(e)
        if other.arena_bytes < plan.arena_bytes:
            best, plan = e, other
    return best, plan


def _least_peak(search: Search, identity: Emitted, limit_s: float) -> list[Emitted]:
    """Programs within the time, and the identity.

    Bisects the target; every success is judged by its real peak, so the answer never depends on monotony.
    """
    low, high = working_set_bytes(device_part(search.program, search.machine)), identity.peak
    best = identity
    found = [identity]
    for _ in range(10):
        target = (low + high) // 2
        if high - low <= max(identity.peak // 200, search.program.alignment_bytes):
            break
        fine = [
            e
            for e in search.portfolio(target, limit_s)
            if e.seconds <= limit_s and e.peak < best.peak
        ]
        if fine:
            best = min(fine, key=lambda e: (e.peak, e.seconds))
            found += fine
            high = min(best.peak, high)
            if best.peak > target:
                low = target
        else:
            low = target
    if len(search.program.operators) <= LARGEST and best.again is not None:
        found.append(polish(search, best, limit_s))
    return found
