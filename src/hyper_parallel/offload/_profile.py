"""What a plan predicts over time: bytes in every tier beside the lanes, and what the peak is made of."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.ir import (
    COPIES,
    MEMORY_TIERS,
    Counter,
    MemoryPlan,
    MemoryTier,
    Span,
    StorageKind,
    Timeline,
)
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._simulate import Clock


def predicted_timeline(plan: MemoryPlan, machine: MemoryMachine) -> Timeline:
    """The step of a plan: spans of all lanes, and after every action the bytes taken in each tier."""
    clock = Clock(plan.program, machine, record=True)
    holds: list[set[MemoryTier]] = [
        {home} if storage.at_start else set()
        for storage, home in zip(plan.program.storages, plan.homes, strict=True)
    ]
    live = dict.fromkeys(MEMORY_TIERS, 0)
    for s, tiers in enumerate(holds):
        for tier in tiers:
            live[tier] += plan.program.sizes[s]
    samples: list[Counter] = []
    for action in plan.actions:
        taken, given = _moves(plan, action.kind, action.target, action.tier)
        for s, into in taken:
            if into not in holds[s]:
                holds[s].add(into)
                live[into] += plan.program.sizes[s]
        for s, out_of in given:
            for one in list(holds[s]) if out_of is None else [out_of]:
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


def summarise(timeline: Timeline, plan: MemoryPlan) -> Timeline:
    """The timeline of a step of `plan`, short enough to draw.

    Neighbouring operators of one phase become one span; copies are named after what they move; counters keep only
    what changes.
    """
    operators = plan.program.operators
    runs = iter(
        [
            a
            for a in plan.actions
            if a.kind in ("run", "recompute") and not operators[a.target].group
        ]
    )
    copies = {kind: iter([a for a in plan.actions if a.kind == kind]) for kind in COPIES}
    spans: list[Span] = []
    last: Span | None = None
    for span in timeline.spans:
        if span.lane == "host":
            spans.append(replace(span, name="update", category="host"))
            continue
        if span.lane == "communication":
            spans.append(replace(span, name=span.name.rpartition(".")[2].strip("_")))
            continue
        if span.lane != "compute":
            kind = plan.program.storages[next(copies[span.lane]).target].kind
            spans.append(replace(span, name=kind, category=span.lane))
            continue
        name = "wait"
        if span.category != "wait":
            operator = operators[next(runs).target]
            name = "recompute" if span.category == "recompute" else operator.phase
        joined = last is not None and last.name == name and last.end_s >= span.start_s * (1 - 1e-9)
        if last is not None and joined:
            last = replace(last, duration_s=span.end_s - last.start_s)
            spans[-1 - next(i for i, x in enumerate(reversed(spans)) if x.lane == "compute")] = last
        else:
            last = Span("compute", name, span.start_s, span.duration_s, name)
            spans.append(last)
    kept: list[Counter] = []
    level: dict[str, float] = {}
    for sample in timeline.counters:
        if level.get(sample.lane) != sample.value:
            level[sample.lane] = sample.value
            kept.append(sample)
    return Timeline(timeline.kind, tuple(spans), tuple(kept))


def _moves(
    plan: MemoryPlan, kind: str, target: int, tier: MemoryTier
) -> tuple[list[tuple[int, MemoryTier]], list[tuple[int, MemoryTier | None]]]:
    """(storage, tier) that an action takes, and gives back (None: everywhere)."""
    if kind in ("run", "recompute"):
        return [(s, "device") for s in plan.program.operators[target].allocs], []
    if kind in COPIES:
        return [(target, COPIES[kind][1])], []
    if kind == "detach":
        return [], [(target, tier)]
    return [], [(target, None)] if kind == "free" else []
