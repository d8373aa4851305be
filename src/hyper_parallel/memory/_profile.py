"""What a plan predicts over time: bytes in every tier beside the lanes, and what the peak is made of."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.ir import (
    COPIES,
    Counter,
    MemoryPlan,
    Span,
    StorageKind,
    Timeline,
)


def peak_by_kind(plan: MemoryPlan) -> dict[StorageKind, int]:
    """Device bytes at the peak, by what they hold."""
    at = plan.replayed.peak_action
    result: dict[StorageKind, int] = {}
    for stay in plan.replayed.residency:
        if stay.start <= at < stay.stop:
            kind = plan.program.storages[stay.storage].kind
            result[kind] = result.get(kind, 0) + plan.program.sizes[stay.storage]
    return dict(sorted(result.items(), key=lambda item: -item[1]))


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
