"""What a plan predicts over time: bytes in every tier beside the lanes, and what the peak is made of."""

from __future__ import annotations

from hyper_parallel.ir import COPIES, Counter, MemoryPlan, MemoryTier, StorageKind, Timeline
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._simulate import Clock


def predicted_timeline(plan: MemoryPlan, machine: MemoryMachine) -> Timeline:
    """The step of a plan: spans of compute and copies, and after every action the bytes taken in each tier."""
    clock = Clock(plan.program, machine, record=True)
    holds: list[set[str]] = [
        {home} if storage.at_start else set()
        for storage, home in zip(plan.program.storages, plan.homes, strict=True)
    ]
    live = dict.fromkeys(("device", "dram", "flash"), 0)
    for s, tiers in enumerate(holds):
        for tier in tiers:
            live[tier] += plan.program.sizes[s]
    samples: list[Counter] = []
    for action in plan.actions:
        taken, given = _moves(plan, action.kind, action.target, action.tier)
        for s, tier in taken:
            if tier not in holds[s]:
                holds[s].add(tier)
                live[tier] += plan.program.sizes[s]
        for s, tier in given:
            for one in list(holds[s]) if tier is None else [tier]:
                holds[s].discard(one)
                live[one] -= plan.program.sizes[s]
        clock.apply(action)
        samples += [Counter(tier, clock.now_s, size) for tier, size in live.items()]
    return Timeline("simulated", tuple(clock.spans or ()), tuple(samples))


def peak_by_kind(plan: MemoryPlan) -> dict[StorageKind, int]:
    """Device bytes at the peak, by what they hold."""
    at = plan.replayed.peak_action
    found: dict[StorageKind, int] = {}
    for stay in plan.replayed.residency:
        if stay.start <= at < stay.stop:
            kind = plan.program.storages[stay.storage].kind
            found[kind] = found.get(kind, 0) + plan.program.sizes[stay.storage]
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _moves(
    plan: MemoryPlan, kind: str, target: int, tier: MemoryTier
) -> tuple[list[tuple[int, str]], list[tuple[int, str | None]]]:
    """(storage, tier) that an action takes, and gives back (None: everywhere)."""
    if kind in ("run", "recompute"):
        return [(s, "device") for s in plan.program.operators[target].allocs], []
    if kind in COPIES:
        return [(target, COPIES[kind][1])], []
    if kind == "detach":
        return [], [(target, tier)]
    return [], [(target, None)] if kind == "free" else []
