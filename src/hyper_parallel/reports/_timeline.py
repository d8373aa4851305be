"""Timelines of a report: a plan's predicted step, measured steps, and both as a Perfetto trace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from hyper_parallel.ir import Counter, Plan, Span, Timeline, merge_timelines

_MOST_EVENTS: Final = 200_000
"""Maximum number of predicted events, and of arrows, in a trace."""


def predicted_timeline(plan: Plan) -> Timeline:
    """Return a plan's predicted step as consecutive spans, one per cost term; terms count exposed time only."""
    spans, now = [], 0.0
    for term in plan.cost:
        if term.seconds > 0:
            spans.append(Span("predicted/step", term.name, now, term.seconds, term.name))
            now += term.seconds
    return Timeline("predicted", tuple(spans))


def steps_of(timeline: Timeline) -> list[int]:
    """Return the numbers of the recorded steps, ascending."""
    return sorted({span.step for span in timeline.spans if span.step is not None})


def steady_steps(timeline: Timeline) -> list[int]:
    """Return the numbers of the recorded steps without the first, which may be slower; a single step is kept."""
    return steps_of(timeline)[1:] or steps_of(timeline)


def one_step(timeline: Timeline, step: int | None = None) -> Timeline:
    """Return `step` (None: the middle step) of a timeline, shifted to time 0; the whole timeline if it has no steps."""
    steps = steps_of(timeline)
    if not steps:
        return timeline
    return _cut(timeline, [steps[len(steps) // 2] if step is None else step])


def some_steps(timeline: Timeline, count: int) -> Timeline:
    """Return the `count` middle steps of a timeline, or all steps if it has fewer, shifted to time 0."""
    steps = steps_of(timeline)
    middle = max(0, (len(steps) - count) // 2)
    return _cut(timeline, steps[middle : middle + count])


def _cut(timeline: Timeline, steps: Sequence[int]) -> Timeline:
    spans = [span for span in timeline.spans if span.step in steps]
    start = min((span.start_s for span in spans), default=0.0)
    end = max((span.end_s for span in spans), default=0.0)
    samples = [c for c in timeline.counters if start <= c.time_s <= end]
    return Timeline(
        timeline.kind,
        tuple(replace(s, start_s=s.start_s - start) for s in spans),
        tuple(replace(c, time_s=c.time_s - start) for c in samples),
    )


def chrome_trace(
    measured: Timeline | None,
    plan: Plan,
    simulated: Timeline | None = None,
    samplers: Timeline | None = None,
) -> dict[str, Any]:
    """Return predicted and measured timelines in the Chrome JSON trace format of Perfetto.

    Predicted and measured lanes are two processes. The predicted step, with its cost terms and simulated pipeline
    ranks, is repeated at the start of every measured step, so that both align. If a step has very many events, the
    number of repetitions is limited.

    Args:
        measured: Spans of some steps; None without measurements.
        plan: Plan of the run.
        simulated: Simulated events of one step of the plan; None without simulation.
        samplers: Spans of sampling ranks, drawn if `measured` is set; None without sampling ranks. Arrows connect the
            completions of a step with the ranks that train on them.

    Source: Trace Event Format, duration ("X"), counter ("C"), flow ("s", "f") and metadata ("M") events; times in
        microseconds.
    """
    events: list[dict[str, Any]] = []
    _process(events, 1, f"predicted ({plan.strategy})")
    starts = _step_starts(measured) if measured else [(0, 0.0)]
    predicted = predicted_timeline(plan)
    repeated = len(predicted.spans)
    if simulated is not None:
        repeated += len(simulated.spans) + len(simulated.counters)
    starts = starts[: max(1, _MOST_EVENTS // max(1, repeated))]
    for step, start in starts:
        _spans(events, 1, predicted.spans, {"predicted/step": 1}, start, step)
    events.append(_thread(1, 1, "step"))
    if simulated is not None:
        lanes = {lane: number for number, lane in enumerate(simulated.lanes, 2)}
        events += [_thread(1, number, f"pipeline {lane}") for lane, number in lanes.items()]
        for step, start in starts:
            _spans(events, 1, simulated.spans, lanes, start, step)
            _counters(events, 1, simulated.counters, start, "activations")
    if measured is not None:
        _process(events, 2, "measured")
        joint = measured if samplers is None else merge_timelines([measured, samplers])
        lanes = {lane: number for number, lane in enumerate(joint.lanes, 1)}
        events += [_thread(2, number, lane) for lane, number in lanes.items()]
        _spans(events, 2, joint.spans, lanes, 0.0, None)
        _counters(events, 2, joint.counters, 0.0, "bytes")
        if samplers is not None:
            _flows(events, 2, samplers.spans, measured.spans, lanes)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"plan": plan.fingerprint}}


def _flows(
    events: list[dict[str, Any]],
    pid: int,
    samplers: Sequence[Span],
    learners: Sequence[Span],
    lanes: dict[str, int],
) -> None:
    """Append trace arrows from each span that samples completions to the spans of the same step that consume them."""
    takes: dict[int | None, list[Span]] = {}
    for span in learners:
        if span.name == "rollout":
            takes.setdefault(span.step, []).append(span)
    pairs = ((a, b) for a in samplers if a.name == "rollout" for b in takes.get(a.step, ()))
    for number, (source, target) in enumerate(itertools.islice(pairs, _MOST_EVENTS)):
        for phase, span in (("s", source), ("f", target)):
            # A flow event belongs to the span that encloses its time.
            event = {"ph": phase, "pid": pid, "tid": lanes[span.lane], "ts": span.end_s * 1e6 - 0.5}
            event |= {"id": number, "name": "completions", "cat": "rollout"}
            events.append(event | ({"bp": "e"} if phase == "f" else {}))


def _step_starts(timeline: Timeline) -> list[tuple[int, float]]:
    starts: dict[int, float] = {}
    for span in timeline.spans:
        if span.step is not None:
            starts[span.step] = min(span.start_s, starts.get(span.step, span.start_s))
    return sorted(starts.items()) or [(0, 0.0)]


def _counters(events: list[dict[str, Any]], pid: int, counters: Sequence[Counter], offset_s: float, unit: str) -> None:
    for c in counters:
        event = {"ph": "C", "pid": pid, "name": c.lane, "ts": (c.time_s + offset_s) * 1e6}
        events.append(event | {"args": {unit: c.value}})


def _process(events: list[dict[str, Any]], pid: int, name: str) -> None:
    events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
    events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _spans(
    events: list[dict[str, Any]],
    pid: int,
    spans: tuple[Span, ...],
    lanes: dict[str, int],
    offset_s: float,
    step: int | None,
) -> None:
    for span in spans:
        span_step = span.step if span.step is not None else step
        events.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": lanes[span.lane],
                "name": span.name,
                "cat": span.category,
                "ts": (span.start_s + offset_s) * 1e6,
                "dur": span.duration_s * 1e6,
                "args": {} if span_step is None else {"step": span_step},
            }
        )
