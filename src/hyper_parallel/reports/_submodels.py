"""Table of predicted and measured seconds of a multimodal model's sub-models, and of the bubbles of a step."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from hyper_parallel.ir import SubmodelsPlan, Timeline
from hyper_parallel.reports._timeline import steady_steps

_FORWARD: Final = re.compile(r"(tower )?(forward|\d+F\d+)")
_BACKWARD: Final = re.compile(r"(tower )?(backward|\d+[BIW]\d+)")


class PartRow(NamedTuple):
    """Row of the table: seconds of a sub-model in one step on its busiest rank, or of the whole step.

    Attributes:
        name: Name of the sub-model; `step` for the whole step.
        where: Degrees and ranks of a sub-model, or the kind of schedule of the step.
        predicted: Seconds of forward and of backward; for the step, its seconds and the fraction of bubbles.
        measured: The same values, measured; None if they were not measured.
    """

    name: str
    where: str
    predicted: tuple[float, float]
    measured: tuple[float, float] | None


def submodel_rows(plan: SubmodelsPlan | None, timeline: Timeline | None) -> list[PartRow]:
    """Return one row per sub-model, and one for the step; empty for a plan without sub-models."""
    if plan is None:
        return []
    rows = []
    for part in plan.parts:
        where = f"{part.degrees}, ranks {', '.join(map(str, part.ranks))}"
        of_tower = part.name != "language"
        # Spans do not name the encoder: the times of several encoders on one rank cannot be told apart.
        others = {r for p in plan.parts if p.name not in (part.name, "language") for r in p.ranks}
        mixed = of_tower and others.intersection(part.ranks)
        measured = None if timeline is None or mixed else _part_s(timeline, part.ranks, of_tower)
        rows.append(PartRow(part.name, where, (part.forward_s, part.backward_s), measured))
    step = None if timeline is None else _step_s(timeline)
    where = "joint schedule" if plan.schedule else "in rounds"
    return [*rows, PartRow("step", where, (plan.step_s, plan.bubble), step)]


def _part_s(timeline: Timeline, ranks: tuple[int, ...], of_tower: bool) -> tuple[float, float] | None:
    """Return (forward, backward) in mean seconds per step on the sub-model's busiest rank; None without spans."""
    steps, seconds = steady_steps(timeline), {rank: [0.0, 0.0] for rank in ranks}
    for span in timeline.spans:
        rank = int(span.lane.split("/")[0].removeprefix("rank "))
        if span.step not in steps or rank not in seconds:
            continue
        for number, pattern in enumerate((_FORWARD, _BACKWARD)):
            match = pattern.fullmatch(span.name)
            if match and bool(match[1]) == of_tower:
                seconds[rank][number] += span.duration_s / len(steps)
    forward, backward = max(seconds.values(), key=sum)
    return (forward, backward) if forward else None


def _step_s(timeline: Timeline) -> tuple[float, float] | None:
    """Return (mean seconds from first to last computation of a step, fraction of bubbles); None without spans."""
    lengths, busy = [], 0.0
    passes = [s for s in timeline.spans if _FORWARD.fullmatch(s.name) or _BACKWARD.fullmatch(s.name)]
    ranks = {span.lane.split("/")[0] for span in passes}
    for step in steady_steps(timeline):
        spans = [span for span in passes if span.step == step]
        if spans:
            lengths.append(max(s.end_s for s in spans) - min(s.start_s for s in spans))
            busy += sum(span.duration_s for span in spans)
    total = sum(lengths)
    return (total / len(lengths), 1.0 - busy / (len(ranks) * total)) if total else None
