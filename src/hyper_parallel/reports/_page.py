"""The report page: one self-contained HTML file, predicted beside measured. The words are in `templates/page.html`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from hyper_parallel.ir import Plan, Timeline
from hyper_parallel.reports._charts import (
    FULL,
    PALETTE,
    BarPart,
    Chart,
    Series,
    colors,
    gantt,
    layout_chart,
    line_chart,
    mesh_chart,
    stacked_bars,
)
from hyper_parallel.reports._run_record import RunRecord
from hyper_parallel.reports._timeline import one_step, predicted_timeline
from hyper_parallel.units import GiB, KiB, MiB, format_bytes, format_count, format_seconds

_MEASURED, _PREDICTED = PALETTE[0], PALETTE[2]
_MAX_LANES: Final = 16
_MAX_POINTS: Final = 1500
_ACTIONS: Final = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "REDUCE_GRAD": "gradient reduction",
}
_UNITS: Final = (("GiB", GiB), ("MiB", MiB), ("KiB", KiB), ("B", 1))
_TIERS: Final = {"device": "device", "dram": "host memory", "flash": "files"}
_OFFLOAD_LANES: Final = {
    "compute": "compute",
    "communication": "communication",
    "host": "host",
    "store": "device to host",
    "prefetch": "host to device",
    "copy_out": "host to file",
    "copy_in": "file to host",
}


def render(run: RunRecord) -> str:
    """The page of a run as HTML text; it refers to nothing outside itself."""
    environment = Environment(
        loader=PackageLoader("hyper_parallel.reports"), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {
        "bytes": format_bytes,
        "seconds": format_seconds,
        "count": format_count,
        "px": lambda x: f"{x:.1f}",
    }
    plan = run.plan
    measured = None if run.timeline is None else one_step(run.timeline)
    facts = run.run_info.items()
    layouts = [
        (
            name,
            list(zip(x.dims or [f"d{i}" for i in range(len(x.axes))], x.axes, strict=True)),
            x.partial,
            layout_chart(x, plan.mesh),
        )
        for name, x in plan.layouts.items()
    ]
    return environment.get_template("page.html").render(
        plan=plan,
        info=", ".join(f"{k} {v}" for k, v in facts if isinstance(v, (str, int, float))),
        tiles=_tiles(run),
        loss=_loss(run),
        predicted_terms=_terms("predicted", {t.name: t.seconds for t in plan.cost}),
        measured_terms=run.timeline and _terms("measured", _phases(run.timeline)),
        step_time=_step_time(run),
        memory=_memory(run),
        grad_norm=line_chart(
            [Series("gradient norm before clipping", _points(run, "grad_norm"), PALETTE[6])],
            y_format=lambda v: f"{v:.3g}",
            y_label="gradient norm",
            from_zero=True,
        ),
        predicted_lanes=_lanes(predicted_timeline(plan)),
        simulated_lanes=run.simulated and _lanes(run.simulated),
        measured_lanes=measured and _lanes(measured),
        hidden_lanes=len(measured.lanes) - _MAX_LANES if measured else 0,
        offload=_offload(run),
        mesh=mesh_chart(plan.mesh),
        layouts=layouts,
        sample=run.sample,
        config=run.config,
    )


def _deviation(measured: float | None, predicted: float) -> str:
    if not measured or not predicted:
        return f"predicted {predicted:.3g}" if predicted else ""
    return f"{(measured / predicted - 1) * 100:+.1f} %"


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Name, value and note of every tile."""
    plan, last = run.plan, run.metrics[-1] if run.metrics else {}
    tokens = float(sum(int(m.get("tokens", 0)) for m in run.metrics))
    tiles = [("steps", f"{len(run.metrics)}", f"{format_count(tokens)} tokens")]
    if "loss" in last:
        tiles.append(("training loss", f"{last['loss']:.3f}", f"from {run.metrics[0]['loss']:.3f}"))
    if run.evals:
        first, final = run.evals[0]["loss"], run.evals[-1]["loss"]
        tiles.append(("held-out loss", f"{final:.3f}", f"from {first:.3f} before training"))
    if (step_s := run.steady("step_s")) is not None:
        note = f"predicted {format_seconds(plan.step_s)} ({_deviation(step_s, plan.step_s)})"
        tiles.append(("step time (median)", format_seconds(step_s), note))
    if (tps := run.steady("tps")) is not None:
        tiles.append(("tokens/s per rank", f"{tps:,.0f}", f"all ranks {tps * plan.mesh.size:,.0f}"))
    if (mfu := run.steady("mfu")) is not None:
        tiles.append(("MFU", f"{mfu * 100:.1f} %", f"predicted {plan.predicted_mfu * 100:.1f} %"))
    if (peak := run.peak_memory_bytes) is not None:
        predicted = plan.memory_bytes
        note = f"predicted {format_bytes(predicted)} ({_deviation(peak, predicted)})"
        tiles.append(("peak memory per rank", format_bytes(peak), note))
    return tiles


def _points(run: RunRecord, key: str) -> list[tuple[float, float]]:
    return [(float(m["step"]), float(m[key])) for m in run.metrics if m.get(key) is not None]


def _loss(run: RunRecord) -> Chart:
    series = [Series("training", _points(run, "loss"), _MEASURED)]
    if run.evals:
        held_out = [(float(e["step"]), float(e["loss"])) for e in run.evals]
        series.append(Series("held out", held_out, PALETTE[1], dots=True))
    return line_chart(series, y_format=lambda v: f"{v:.4g}", y_label="loss", width=FULL, height=300)


def _terms(label: str, seconds: dict[str, float]) -> Chart:
    shades = colors(list(seconds))
    parts = [BarPart(name, value, shades[name]) for name, value in seconds.items()]
    return stacked_bars([(label, parts)], x_format=format_seconds)


def _phases(timeline: Timeline) -> dict[str, float]:
    """Mean seconds of each phase in one step of one rank."""
    spans = [s for s in timeline.spans if s.step is not None]
    rank_steps = len({(s.lane.split("/")[0], s.step) for s in spans}) or 1
    total: dict[str, float] = {}
    for span in spans:
        total[span.name] = total.get(span.name, 0.0) + span.duration_s / rank_steps
    return total


def _step_time(run: RunRecord) -> Chart:
    points = _points(run, "step_s")
    series = [Series("measured", points, _MEASURED)]
    if points and run.plan.step_s:
        flat = [(points[0][0], run.plan.step_s), (points[-1][0], run.plan.step_s)]
        series.append(Series("predicted", flat, _PREDICTED, dashed=True))
    return line_chart(series, y_format=format_seconds, y_label="step time", from_zero=True)


def _memory(run: RunRecord) -> list[tuple[str, Chart]]:
    """Title and chart of every tier."""
    plan = run.plan
    shades = colors([t.name for t in plan.memory])
    charts = []
    for tier in dict.fromkeys(t.tier for t in plan.memory):
        terms = [t for t in plan.memory if t.tier == tier]
        bars = [("predicted", [BarPart(t.name, float(t.bytes), shades[t.name]) for t in terms])]
        measured = run.peak_memory_bytes if tier == "hbm" else None
        if run.offload is not None and tier in ("dram", "flash"):
            measured = max(m["offload"][f"{tier}_bytes"] for m in run.metrics if "offload" in m)
        if measured is not None:
            bars.append(("measured", [BarPart("measured peak", float(measured), PALETTE[-1])]))
        capacity = ("capacity of one rank", float(plan.memory_capacity_bytes))
        limit = capacity if tier == "hbm" else None
        charts.append(
            (_tier_name(plan, tier), stacked_bars(bars, x_format=format_bytes, limit=limit))
        )
    return charts


def _tier_name(plan: Plan, tier: str) -> str:
    if tier != "hbm":
        return tier
    return "memory" if plan.topology.startswith("local") else "device memory"


def _lanes(timeline: Timeline) -> Chart:
    shown = [(lane, lane) for lane in timeline.lanes[:_MAX_LANES]]
    return gantt(timeline, shown, format_seconds, _kind)


def _kind(name: str) -> str:
    """What a span does: pipeline actions (`2F0`) without their stage and microbatch have one colour."""
    action = name.strip("0123456789 ")
    return _ACTIONS.get(action, action) if name[:1].isdigit() else name


def _offload(run: RunRecord) -> dict[str, Any] | None:
    """One planned step of rank 0 by tier and lane; None when the run did not offload."""
    if run.offload is None:
        return None
    steps = [m["offload"] for m in run.metrics if "offload" in m]
    tiers = []
    for tier, name in _TIERS.items():
        predicted, measured = (_curve(timeline, tier) for timeline in run.offload)
        peaks = [max((v for _, v in curve), default=0.0) for curve in (predicted, measured)]
        if any(peaks):
            chart = _tier_chart(name, predicted, measured, max(peaks))
            tiers.append(
                {"name": name, "predicted": peaks[0], "measured": peaks[1], "chart": chart}
            )
    return {
        "last": steps[-1] if run.metrics and "offload" in run.metrics[-1] else None,
        "worst_bytes": max((int(step["difference_bytes"]) for step in steps), default=0),
        "replanned": sum(bool(step["replanned"]) for step in steps),
        "tiers": tiers,
        "lanes": [
            (kind, gantt(timeline, _offload_lanes(timeline), format_seconds))
            for kind, timeline in zip(("predicted", "measured"), run.offload, strict=True)
        ],
    }


def _offload_lanes(timeline: Timeline) -> list[tuple[str, str]]:
    return [(lane, name) for lane, name in _OFFLOAD_LANES.items() if lane in timeline.lanes]


def _tier_chart(
    name: str,
    predicted: Sequence[tuple[float, float]],
    measured: Sequence[tuple[float, float]],
    peak: float,
) -> Chart:
    # Plotted in the unit of the peak, so that the ticks are round numbers of it.
    unit, size = next((u for u in _UNITS if peak >= u[1]), _UNITS[-1])
    return line_chart(
        [
            Series("measured", [(x, y / size) for x, y in measured], PALETTE[0]),
            Series("predicted", [(x, y / size) for x, y in predicted], PALETTE[2], dashed=True),
        ],
        y_format=lambda v: f"{v:.4g} {unit}",
        y_label=f"bytes in {name}",
        from_zero=True,
        width=FULL,
        height=200,
        x_format=format_seconds,
        x_label="time of the step",
    )


def _curve(timeline: Timeline, tier: str) -> list[tuple[float, float]]:
    """Steps of a counter as points; of a long one the highest value of every interval."""
    samples = [(c.time_s, c.value) for c in timeline.counters if c.lane == tier]
    if len(samples) > _MAX_POINTS:
        size = -(-len(samples) // _MAX_POINTS)
        samples = [
            max(samples[i : i + size], key=lambda point: point[1])
            for i in range(0, len(samples), size)
        ]
    points: list[tuple[float, float]] = []
    for time_s, value in samples:
        if points:
            points.append((time_s, points[-1][1]))
        points.append((time_s, value))
    if points:
        points.append((max(timeline.end_s, points[-1][0]), points[-1][1]))
    return points
