"""Pages of predictions and measurements: `page.html` of one run, `comparison.html` of several, both self-contained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final, NamedTuple

from bokeh.embed import components
from bokeh.models import Range1d
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hyper_parallel.errors import printable
from hyper_parallel.ir import Layout, Mesh, Timeline, merge_timelines
from hyper_parallel.reports._charts import (
    BYTES,
    SECONDS,
    THEME,
    Chart,
    Curve,
    Unit,
    bars,
    curves,
    lanes,
)
from hyper_parallel.reports._run_record import RunRecord
from hyper_parallel.reports._submodels import submodel_rows
from hyper_parallel.reports._timeline import one_step, some_steps, steady_steps, steps_of
from hyper_parallel.reports.data_section import data_section
from hyper_parallel.reports.results import (
    conditions,
    deviation,
    differences,
    medians_text,
    part_rows,
    results,
)
from hyper_parallel.reports.terms import (
    MOVING,
    RUNS,
    STATES,
    WHOLE,
    kind_of,
    memory_kind,
    time_kind,
    words,
)
from hyper_parallel.units import format_bytes, format_count, format_seconds

_MAX_LANES: Final = 16
_STEPS_OF_ROLES: Final = 4
_MAX_RANKS: Final = 256
_TIERS: Final = {
    "hbm": "device memory",
    "device": "device memory",
    "dram": "host memory",
    "flash": "files",
}
_COPIES: Final = {
    "store": "device to host",
    "prefetch": "host to device",
    "copy_out": "host to file",
    "copy_in": "file to host",
}
_PLAIN: Final = (("", 1.0),)
_CURVES: Final = (
    ("completion_tokens", "tokens", _PLAIN, "rollout"),
    ("age_mean", "rollouts", _PLAIN, "rollout"),
    ("effective_samples", "share", _PLAIN, "rollout"),
    ("lr", "learning rate", _PLAIN, None),
    ("grad_norm", "gradient norm", _PLAIN, None),
    ("step_s", "step time", SECONDS, None),
    ("tps", "tokens/s per rank", _PLAIN, None),
)
"""Charts of one metric each: key, label and units of the metric, and the nested record with the key (None: the row)."""


class _Source(NamedTuple):
    """Run whose curves are drawn, with the colour of the curves and the prefix of their labels."""

    run: RunRecord
    prefix: str
    color: str

    def curve(self, label: str, key: str, record: str | None = None, style: str = "solid") -> Curve:
        """Return the curve of a metric of training steps; `key` and `record` as for `_points`."""
        return Curve(self.prefix + label, _points(self.run.metrics, key, record), self.color, style)

    def held_out(self, label: str, key: str, record: str | None = None, style: str = "dots") -> Curve:
        """Return the curve of a metric of evaluations; `key` and `record` as for `_points`."""
        return Curve(self.prefix + label, _points(self.run.evals, key, record), self.color, style)


def render(*runs: RunRecord) -> str:
    """Return the page of a run, or a comparison of several runs, as HTML without external references."""
    environment = Environment(
        loader=PackageLoader("hyper_parallel.reports"), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds, "count": format_count}
    environment.filters["printable"] = printable
    charts = _curves(runs)
    if len(runs) == 1:
        charts |= _single(runs[0])
    present = {name: chart for name, chart in charts.items() if chart is not None}
    script, divs = components({name: chart.figure for name, chart in present.items()}, wrap_script=False, theme=THEME)
    values: dict[str, Any] = {
        "runs": runs,
        "names": _names(runs),
        "colors": _run_colors(runs),
        "charts": present,
        "divs": {name: Markup(div) for name, div in divs.items()},
        "scripts": [
            Markup(Resources(mode="inline", components=["bokeh"]).js_raw[0]),
            Markup(script),
        ],
        "results": [results(run) for run in runs],
        "conditions": [conditions(run) for run in runs],
    }
    if len(runs) > 1:
        return environment.get_template("comparison.html").render(
            values,
            settings=differences(runs),
            rows=list(dict.fromkeys(r.name for rows in values["results"] for r in rows)),
            delta=deviation,
        )
    run = runs[0]
    step = Timeline("measured", ()) if run.timeline is None else one_step(run.timeline)
    return environment.get_template("page.html").render(
        values | {"run": run, "plan": run.plan, "mesh": _mesh(run.plan.mesh)},
        layouts=[(name, _layout(x, run.plan.mesh)) for name, x in run.plan.layouts.items()],
        tiers=_TIERS,
        hidden_lanes=len(_working_lanes(step)) - _MAX_LANES,
        offload=_offload_facts(run),
        exposed=_exposed(run),
        balance=_balance(run),
        medians=medians_text(run),
        parts=part_rows(run),
        submodels=submodel_rows(run.plan.submodels, run.timeline),
        data=data_section(run.data),
        loss_title=run.terms.loss[0].upper() + run.terms.loss[1:],
    )


def _exposed(run: RunRecord) -> dict[str, Any] | None:
    """Return medians of the exposed communication over the recorded steps of the last part; None without records.

    `seconds` maps kinds of parallelism to exposed seconds. The fractions `masking_timeline` and `masking_wait` are None
    if no step has them.
    """
    steps = [m["overlap"] for m in run.last.rows if "exposed_s" in m.get("overlap", {})]
    if not steps:
        return None
    kinds = dict.fromkeys(kind for step in steps for kind in step["exposed_s"])
    masked = {
        name: [step[name] for step in steps if step.get(name) is not None]
        for name in ("masking_timeline", "masking_wait")
    }
    return {
        "seconds": {k: median(s["exposed_s"].get(k, 0.0) for s in steps) for k in kinds},
        **{name: median(values) if values else None for name, values in masked.items()},
    }


def _balance(run: RunRecord) -> dict[str, float] | None:
    """Return the mean imbalance of the steps before and after balancing, weighted by media tokens; None without any."""
    steps = [m["balance"] for m in run.last.rows if "balance" in m]
    total = sum(step["media_tokens"] for step in steps)
    if not total:
        return None
    names = ("in_order", "balanced")
    return {name: sum(s[name] * s["media_tokens"] for s in steps) / total for name in names}


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the name of each run: the last components of its path, as many as distinguish all run directories."""
    paths = [run.directory.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def _run_colors(runs: Sequence[RunRecord]) -> list[str]:
    return [RUNS[i % len(RUNS)] for i in range(len(runs))]


def _curves(runs: Sequence[RunRecord]) -> dict[str, Chart | None]:
    """Return charts of one run or several by name; a chart without data is None. Charts over steps share an x range."""
    ends = [(m[0]["step"], m[-1]["step"]) for m in (run.metrics for run in runs) if m]
    first, last = min((a for a, _ in ends), default=1) - 1, max((b for _, b in ends), default=1)
    margin = 0.02 * (last - first)
    across = Range1d(first - margin, last + margin)
    several = len(runs) > 1
    prefixes = [f"{name}, " if several else "" for name in _names(runs)]
    sources = list(map(_Source, runs, prefixes, _run_colors(runs)))
    # With several runs, it would be unclear which of them was resumed at a mark.
    resumed = [] if several else [part.step + 0.5 for part in runs[0].parts[1:]]
    options: dict[str, Any] = {"x_range": across, "marks": resumed}
    losses = [line for s in sources for line in (s.curve("training", "loss"), s.held_out("held out", "loss"))]
    shared = {run.terms.loss for run in runs}
    loss = "loss" if len(shared) > 1 else min(shared)
    charts = {
        "loss": curves(losses, loss, **options, height=320),
        "reward": _reward_chart(sources, **options),
        **_preference_charts(sources, **options),
        "held_out_accuracy": _accuracy_chart(sources, **options),
    }
    for key, y_label, units, record in _CURVES:
        lines = [s.curve("set" if key == "lr" else "measured", key, record) for s in sources]
        if key == "step_s":
            lines += [line for s in sources for line in _predicted_steps(s)]
        charts[key] = curves(lines, y_label, units, **options, from_zero=key != "lr")
    return charts | {"within": _within(sources)}


def _reward_chart(sources: Sequence[_Source], **options: Any) -> Chart | None:
    rewards = [
        s.curve(key.replace("_", " "), key, "rollout", "dashed" if number else "solid")
        for s in sources
        for number, key in enumerate(s.run.rewards)
    ]
    held_out = [s.held_out("held out", "reward", "rollout") for s in sources]
    return curves([*rewards, *held_out], "reward", **options, height=320) if rewards else None


def _preference_charts(sources: Sequence[_Source], **options: Any) -> dict[str, Chart | None]:
    charts = {}
    for key in ("accuracy", "margin"):
        lines = [s.curve("training", key, "preference") for s in sources]
        lines += [s.held_out("held out", key, "preference") for s in sources]
        charts[key] = curves(lines, key, **options, from_zero=key == "accuracy")
    chosen = [s.curve("chosen", "chosen", "preference") for s in sources]
    rejected = [s.curve("rejected", "rejected", "preference", "dashed") for s in sources]
    return charts | {"scores": curves([*chosen, *rejected], "scores", **options)}


def _accuracy_chart(sources: Sequence[_Source], **options: Any) -> Chart | None:
    lines = [
        s.held_out(f"held-out {name}s", f"{name}_accuracy", style=style)
        for s in sources
        for name, style in (("answer", "solid"), ("token", "dashed"))
    ]
    return curves(lines, "accuracy", **options, from_zero=True)


def _predicted_steps(source: _Source) -> Iterator[Curve]:
    """Yield a flat line at the predicted step time of each part that also has measured step times."""
    run = source.run
    for part in run.parts:
        ends = [row["step"] for row in part.rows if row.get("step_s") is not None]
        if ends and part.plan.step_s:
            flat = [(float(x), part.plan.whole_step_s) for x in (ends[0], ends[-1])]
            without = ", without rollouts" if run.rewards and part.plan.roles is None else ""
            yield Curve(f"{source.prefix}predicted{without}", flat, source.color, "dashed")


def _points(rows: Sequence[dict[str, Any]], key: str, record: str | None = None) -> list[tuple[float, float]]:
    """Return (step, value) of the rows with a value under `key`; with `record`, `key` is looked up in this dict."""
    values = ((m["step"], (m if record is None else m.get(record) or {}).get(key)) for m in rows)
    return [(float(step), float(value)) for step, value in values if value is not None]


def _within(sources: Sequence[_Source]) -> Chart | None:
    """Return a chart of each run's memory in its first recorded step, on the rank with the highest recorded memory.

    For a single run, it also shows the phases of the step and the predicted peak. None if no run recorded its memory.
    """
    lines, bands = [], []
    for run, prefix, color in sources:
        rank = run.fullest_rank
        recorded = [] if run.timeline is None else steps_of(run.timeline)
        if run.timeline is None or rank is None or not recorded:  # nothing recorded
            continue
        step = one_step(run.timeline, recorded[0])
        points = [(c.time_s, c.value) for c in step.counters if c.lane == f"{rank}/memory"]
        if len(points) < 3:  # no samples inside the step
            continue
        lines.append(Curve(f"{prefix}measured, {rank}", _stairs(points), color))
        if len(sources) == 1:
            bands = [s for s in _with_labels(step, kind_of) if s.lane.startswith(f"{rank}/")]
            flat = [(x, float(run.plan.memory_bytes)) for x in (points[0][0], points[-1][0])]
            lines.append(Curve("predicted peak", flat, color, "dashed"))
    end = max((x for line in lines for x, _ in line.points), default=0.0)
    unit = Unit.of(end, SECONDS)
    return curves(lines, "memory", BYTES, x_label="time", x_unit=unit, from_zero=True, bands=bands)


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of the step function that holds each sample until the next one."""
    corners = [(after[0], before[1]) for before, after in itertools.pairwise(points)]
    return sorted([*points, *corners], key=lambda p: p[0])


def _single(run: RunRecord) -> dict[str, Chart | None]:
    plan, timeline = run.plan, run.timeline
    charts: dict[str, Chart | None] = {"terms": _terms(run)}
    for tier in dict.fromkeys(t.tier for t in plan.memory):
        charts[f"memory {tier}"] = _memory(run, tier)
    if run.simulated:
        charts["simulated"] = _lanes(run.simulated)
    if timeline is not None:
        charts["measured"] = _lanes(one_step(timeline))
        if run.samplers is not None:
            charts["roles"] = _lanes(some_steps(merge_timelines([timeline, run.samplers]), _STEPS_OF_ROLES))
    for kind, steps in zip(("predicted", "measured"), run.offload or (), strict=False):
        names = {lane: _COPIES.get(lane, lane) for lane in steps.lanes}
        charts[f"offload {kind}"] = lanes(_with_labels(steps, _offload_kind), names)
    for place in ("device", "dram", "flash") if run.offload else ():
        charts[f"offload {place}"] = _tier(run, place)
    return charts


def _lanes(timeline: Timeline) -> Chart:
    drawn = _working_lanes(timeline)[:_MAX_LANES]
    names = {lane: lane.replace("/compute", "").replace("/", " ") for lane in drawn}
    return lanes(_with_labels(timeline, kind_of), names)


def _working_lanes(timeline: Timeline) -> list[str]:
    working = {s.lane for s in timeline.spans if s.duration_s > 0}
    return [lane for lane in timeline.lanes if lane in working]


def _with_labels(timeline: Timeline, kind: Callable[[str, str], str]) -> list[Any]:
    return [replace(s, name=words(s.name), category=kind(s.name, s.category)) for s in timeline.spans]


def _offload_kind(name: str, category: str) -> str:
    return memory_kind(name) if category in _COPIES else kind_of(name, category)


def _terms(run: RunRecord) -> Chart:
    """Return a chart of predicted and measured seconds of a step by kind; hovering over a kind lists its terms."""
    rows = [_by_kind("predicted", {t.name: t.seconds for t in run.plan.cost}, time_kind, format_seconds)]
    if run.timeline is not None:
        rows.append(_by_kind("measured", _phases(run.timeline), time_kind, format_seconds))
    return bars(rows, SECONDS)


def _by_kind(
    label: str, terms: dict[str, float], kind: Callable[[str], str], text: Callable[[float], str]
) -> tuple[str, dict[str, float], dict[str, str]]:
    parts: dict[str, float] = {}
    notes: dict[str, list[str]] = {}
    for name, value in terms.items():
        if value > 0:
            parts[kind(name)] = parts.get(kind(name), 0.0) + value
            notes.setdefault(kind(name), []).append(f"{words(name)} {text(value)}")
    return label, parts, {k: ": " + ", ".join(v) for k, v in notes.items() if len(v) > 1}


def _phases(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of each phase of a step, averaged over ranks and the steps of `steady_steps`."""
    steps = {*steady_steps(timeline)}
    # A collective in flight is no phase: the rank computes or waits meanwhile.
    spans = [s for s in timeline.spans if s.step in steps and s.category != "in flight"]
    rank_steps = len({(s.lane.split("/")[0], s.step) for s in spans}) or 1
    total: dict[str, float] = {}
    for span in spans:
        name = words(span.name).partition(",")[0]
        total[name] = total.get(name, 0.0) + span.duration_s / rank_steps
    return total


def _memory(run: RunRecord, tier: str) -> Chart:
    plan = run.plan
    predicted = {t.name: float(t.bytes) for t in plan.memory if t.tier == tier}
    rows = [_by_kind("predicted", predicted, memory_kind, format_bytes)]
    if tier == "hbm" and run.last.peak_memory_bytes is not None:
        rows.append(("measured", _measured_memory(run), {}))
    elif run.offload is not None and tier in ("dram", "flash"):
        steps = [m["offload"] for m in run.last.rows if "offload" in m]
        peak_bytes = max((step[f"{tier}_bytes"] for step in steps), default=0)
        rows.append(("measured", {"offloaded": float(peak_bytes)}, {}))
    return bars(rows, BYTES, float(plan.memory_capacity_bytes) if tier == "hbm" else 0.0)


def _measured_memory(run: RunRecord) -> dict[str, float]:
    """Return the measured peak bytes by kind of memory; a single entry if the fullest rank recorded no kinds."""
    peak, rank = float(run.last.peak_memory_bytes or 0), run.fullest_rank
    counters = run.timeline.counters if run.timeline else ()
    parts = {kind: c.value for kind in STATES for c in counters if c.lane == f"{rank}/peak {kind}"}
    return parts | {MOVING: peak - sum(parts.values())} if parts else {WHOLE: peak}


def _tier(run: RunRecord, tier: str) -> Chart | None:
    """Return a chart of predicted and measured bytes in a memory tier over one planned step; None if all are 0."""
    lines = []
    for kind, style, timeline in zip(("predicted", "measured"), ("dashed", "solid"), run.offload or (), strict=True):
        points = [(c.time_s, c.value) for c in timeline.counters if c.lane == tier]
        lines.append(Curve(kind, _stairs(points), RUNS[0], style))
    if not any(y for line in lines for _, y in line.points):
        return None
    unit = Unit.of(max(x for line in lines for x, _ in line.points), SECONDS)
    return curves(lines, f"bytes in {_TIERS[tier]}", BYTES, x_label="time", x_unit=unit, from_zero=True)


def _offload_facts(run: RunRecord) -> dict[str, Any] | None:
    if run.offload is None:
        return None
    steps = [m["offload"] for m in run.last.rows if "offload" in m]
    return {
        "last": steps[-1] if run.metrics and "offload" in run.metrics[-1] else None,
        "worst_bytes": max((int(step["difference_bytes"]) for step in steps), default=0),
        "replanned": sum(bool(step["replanned"]) for step in steps),
    }


def _mesh(mesh: Mesh) -> dict[str, Any] | None:
    """Return the table of ranks, with a row per group of the tensor-parallel or else last axes; None for one device."""
    axes = [(n, d) for n, d in mesh.axes if d > 1]
    if not axes:
        return None
    inner = [n for n, _ in axes if n in ("tp_x", "tp_y")] or [axes[-1][0]]
    groups = mesh.groups(inner, max(1, _MAX_RANKS // mesh.degree(inner)))
    rows = []
    for group in (group[:_MAX_RANKS] for group in groups):
        places = [mesh.coordinate(rank) for rank in group]
        outer = ", ".join(f"{n} {places[0][n]}" for n, _ in axes if n not in inner)
        coordinates = [", ".join(f"{n}={p[n]}" for n, _ in axes) for p in places]
        rows.append((outer, list(zip(group, coordinates, strict=True))))
    shown = sum(len(row) for _, row in rows)
    note = f"first {shown} of {mesh.size} ranks" if shown < mesh.size else ""
    return {"inner": " x ".join(inner), "rows": rows, "note": note}


def _layout(layout: Layout, mesh: Mesh) -> dict[str, Any]:
    rows, columns = [*(mesh.degree(axes) for axes in layout.axes[:2]), 1, 1][:2]
    dims = layout.dims or [f"d{i}" for i in range(len(layout.axes))]
    return {
        "dims": list(zip(dims, layout.axes, strict=True)),
        "partial": layout.partial,
        "rows": rows,
        "columns": columns,
    }
