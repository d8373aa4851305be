"""The planner: least peak at a bounded slowdown, or least time under a byte budget.

Both goals share one step: for a target in bytes, try a small portfolio (recompute density limits, ranking rules),
emit each as a program, and let the exact replay and the simulator judge what was emitted. No choice is kept on the
strength of an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from hyper_parallel.errors import BadValue, BudgetImpossible, TierFull
from hyper_parallel.ir import (
    MEMORY_TIERS,
    Choice,
    MemoryPlan,
    MemoryProgram,
    MemoryTier,
    StorageKind,
    replay,
)
from hyper_parallel.offload._address import assign_addresses
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._order import order_peak, refine_order
from hyper_parallel.offload._polish import LARGEST, polish
from hyper_parallel.offload._portfolio import Emitted, Search
from hyper_parallel.offload._recompute import (
    cheapest_at_peak,
    choose_recomputes,
    recompute_density,
)
from hyper_parallel.offload._select import Selector
from hyper_parallel.offload._simulate import Clock
from hyper_parallel.offload._usedef import (
    UseDef,
    identity_actions,
    use_definitions,
    working_set_bytes,
)
from hyper_parallel.units import format_bytes

_GAPS = (256, 50, 20, 8)  # part of the room that is left for gaps between addresses, tried in turn
_LARGE = 1500  # operators; below, trying everything takes a few seconds
_SHARES = (0.25, 0.6, 0.95)  # of the allowed time, spent on recomputation
_LONGER = (0.01, 0.03)  # of the step: recomputation under a budget
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
    true_machine, machine = machine, machine.derated(margin)
    order, said = refine_order(program) if reorder else (tuple(range(len(program.operators))), ())
    identity = _identity(program, order)
    if budget_bytes is not None and identity.peak + program.staging_bytes <= budget_bytes:
        reason = (
            f"identity: the step takes {identity.peak} bytes and fits the budget; nothing moves"
        )
        whole = _finish(program, true_machine, identity, (*said, reason))
        if whole.device_bytes <= budget_bytes:
            return whole
    slack_s = None if max_slowdown is None else max_slowdown * identity.seconds
    search = _search(program, machine, order, identity, move, recompute, slack_s)
    plan: MemoryPlan | None = None
    if budget_bytes is not None:
        best, plan = _least_time(
            search,
            budget_bytes,
            lambda e: _finish(program, true_machine, e, said, budget_bytes - program.staging_bytes),
        )
    else:
        assert max_slowdown is not None
        best = _least_peak(search, identity, identity.seconds * (1 + max_slowdown))
    if best is identity:
        said = (
            *said,
            f"identity: no plan lowers the peak of {identity.peak} bytes within {max_slowdown:.1%} more time; "
            "nothing moves",
        )
        return _finish(program, true_machine, best, said)
    plan = plan or _finish(program, true_machine, best, said)
    reserve = f", with links {margin:.0%} slower {best.seconds:.6g}" if margin else ""
    told = (
        f"peak {identity.peak} -> {best.peak} bytes, seconds {identity.seconds:.6g} -> {plan.seconds:.6g}{reserve} "
        f"({best.rule})"
    )
    return replace(plan, statement=(*said, told))


def _identity(program: MemoryProgram, order: tuple[int, ...]) -> Emitted:
    actions = identity_actions(program, order)
    peaks: dict[MemoryTier, int] = dict.fromkeys(MEMORY_TIERS, 0)
    peaks["device"] = order_peak(program, order)
    return Emitted(actions, program.on_device, program.seconds, peaks, (), None, "identity")


def _search(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: tuple[int, ...],
    identity: Emitted,
    move: Collection[StorageKind] | None,
    recompute: bool,
    slack_s: float | None,
) -> Search:
    chains = use_definitions(program, order)
    movable = [
        s
        for s, storage in enumerate(program.storages)
        if (storage.kind in move if move is not None else storage.kind not in ("input", "output"))
        and (storage.persistent or not storage.at_start)
    ]
    large = len(program.operators) > _LARGE
    selectors = []
    for name, chosen in _recompute_sets(program, machine, chains, slack_s, recompute):
        again = choose_recomputes(program, chains, chosen)
        # Gaps shorter than their copies cost waits: for a budget they may be needed, for a time limit they rarely pay.
        stretch = 1 + (slack_s or 0.0) / max(identity.seconds, 1e-30)
        ways: list[tuple[str, bool, float | None]] = [("", False, stretch)]
        if not (large and slack_s is not None):
            ways += [(", copies as if alone", False, None), (", waits allowed", True, None)]
        for label, stall, factor in ways:
            selector = Selector(
                program, machine, order, again, movable, stall=stall, stretch=factor
            )
            selectors.append((name + label, selector))
    return Search(program, machine, order, selectors, identity)


def _recompute_sets(
    program: MemoryProgram,
    machine: MemoryMachine,
    chains: UseDef,
    slack_s: float | None,
    recompute: bool,
) -> list[tuple[str, list[int]]]:
    """Sets of storages to recompute that are worth trying.

    Under a time limit recomputation may spend a part of the slack only: every second of it is exposed, and what is left
    must absorb the copies. Under a budget there are limits to the seconds per byte (well below a copy's, a copy's,
    none) and to the seconds in all.
    """
    sets: list[tuple[str, list[int]]] = [("copies only", [])]
    density = recompute_density(program, chains) if recompute else {}
    ranked = sorted(density, key=lambda s: (density[s], -program.sizes[s], s))
    if slack_s is not None:
        allowed = [(f"recompute for {x:.0%} of the allowed time", x * slack_s) for x in _SHARES]
    else:
        transfer = 1 / machine.prefetch.bytes_s
        for name, limit in (
            ("recompute far cheaper than a copy", transfer / 8),
            ("recompute cheaper than a copy", transfer),
            ("recompute everything repeatable", float("inf")),
        ):
            sets.append((name, [s for s in ranked if density[s] <= limit]))
        allowed = [(f"recompute for {x:.0%} more time", x * program.seconds) for x in _LONGER]
    sets += [(name, cheapest_at_peak(program, chains, density, x)) for name, x in allowed]
    seen: set[tuple[int, ...]] = set()
    distinct = []
    for name, chosen in sets:
        if tuple(chosen) not in seen:
            seen.add(tuple(chosen))
            distinct.append((name, chosen))
    return distinct


def _least_time(
    search: Search, budget: int, finish: Callable[[Emitted], MemoryPlan]
) -> tuple[Emitted, MemoryPlan]:
    """The fastest program whose arena, with what is made beside it, is within the budget; and its plan."""
    room = budget - search.program.staging_bytes
    plans: dict[int, MemoryPlan] = {}

    def first(found: list[Emitted]) -> tuple[Emitted, MemoryPlan] | None:
        for e in sorted((e for e in found if e.peak <= room), key=lambda e: (e.seconds, e.peak)):
            plan = plans[id(e)] = plans.get(id(e)) or finish(e)
            if plan.device_bytes <= budget:
                return e, plan
        return None

    def afresh() -> Search:
        return Search(
            search.program, search.machine, search.order, search.selectors, search.best_seen
        )

    found: list[Emitted] = []
    for part in _GAPS:
        aim = max(room - room // part, 0)
        found += afresh().portfolio(aim, budget=aim)
        if (best := first(found)) is not None:
            return best
    floor = working_set_bytes(search.program)
    # Programs that aim at the floor are made for every budget, so their least bytes are what planning finds again.
    again = Search(search.program, search.machine, search.order, search.selectors, search.best_seen)
    lowest = again.portfolio(floor)
    found += [*lowest, *again.portfolio((floor + room) // 2, budget=room)]
    if (best := first(found)) is not None:
        return best
    candidates = sorted(lowest, key=lambda e: (e.peak, e.seconds))[:3] or [search.best_seen]
    least = min((plans.get(id(e)) or finish(e)).device_bytes for e in candidates)
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


def _least_peak(search: Search, identity: Emitted, limit_s: float) -> Emitted:
    """Bisect the target; every success is judged by its real peak, so the answer never depends on monotony."""
    low, high = working_set_bytes(search.program), identity.peak
    best = identity
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
            high = min(best.peak, high)
            if best.peak > target:
                low = target
        else:
            low = target
    if len(search.program.operators) <= LARGEST and best.again is not None:
        best = polish(search, best, limit_s)
    return best


def _finish(
    program: MemoryProgram,
    machine: MemoryMachine,
    emitted: Emitted,
    said: tuple[str, ...],
    enough: int = 0,
) -> MemoryPlan:
    judged = replay(program, emitted.homes, emitted.actions)
    assert judged.peak_bytes == emitted.peaks, "the emitter and the replay count differently"
    addresses, arena = assign_addresses(judged.residency, program.spans, enough)
    clock = Clock(program, machine)
    for action in emitted.actions:
        clock.apply(action)
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
    if emitted.again is not None:
        choices += [
            Choice(s, "recompute", a, b, "device", "cheaper to run again than to keep or copy")
            for s, (a, b) in sorted(emitted.again.gaps.items())
        ]
    return MemoryPlan(
        program,
        emitted.homes,
        emitted.actions,
        clock.now_s,
        tuple(choices),
        said,
        addresses,
        arena,
    )
