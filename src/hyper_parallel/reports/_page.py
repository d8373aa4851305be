"""The report page: one self-contained HTML file, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from hyper_parallel.ir import Plan, Timeline
from hyper_parallel.reports._mesh import draw_layout, draw_mesh, layout_text
from hyper_parallel.reports._offload import offload_section
from hyper_parallel.reports._run import RunRecord
from hyper_parallel.reports._svg import (
    FULL,
    PALETTE,
    BarPart,
    Series,
    colors,
    lanes,
    legend,
    line_chart,
    stacked_bars,
)
from hyper_parallel.reports._timeline import one_step, predicted_timeline
from hyper_parallel.units import format_bytes, format_count, format_seconds

_MEASURED, _PREDICTED = PALETTE[0], PALETTE[2]
_MAX_LANES = 16
_ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "REDUCE_GRAD": "gradient reduction",
}


def render(run: RunRecord) -> str:
    """The page of a run as HTML text; it refers to nothing outside itself."""
    plan = run.plan
    style = files("hyper_parallel.reports").joinpath("_style.css").read_text(encoding="utf-8")
    body = [
        _header(run),
        _tiles(run),
        _section("Loss", _loss(run)),
        _two(("Step time by term", _step_terms(run)), ("Step time", _step_time(run))),
        _two(("Memory by tier", _memory(run)), ("Gradient norm", _grad_norm(run))),
        _section("One step on the executors", _lanes(run)),
        offload_section(run),
        _two(("Mesh", _mesh(plan)), ("Communication", _collectives(plan))),
        _section("Layouts", _layouts(plan)),
        _section("Why this plan", _runners_up(plan)),
        _sample(run),
        _section("How the prediction was made", _formulas(plan)),
        _section(
            "Recipe",
            f"<details><summary>resolved configuration</summary><pre>{escape(run.config)}</pre></details>",
        ),
    ]
    title = f"{plan.model.name} on {plan.topology}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)} - HyperParallel</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _two(left: tuple[str, str], right: tuple[str, str]) -> str:
    return f'<div class="two">{_section(*left)}{_section(*right)}</div>'


def _header(run: RunRecord) -> str:
    plan = run.plan
    facts = [
        f"{format_count(plan.model.num_params)} parameters",
        f"{plan.mesh.size} rank{'s' * (plan.mesh.size != 1)}: {plan.strategy}",
        f"{format_count(plan.workload.tokens_per_step or 0)} tokens per step, sequence {plan.workload.seq_len}",
        plan.workload.compute_dtype,
        f"plan {plan.fingerprint}",
    ]
    info = ", ".join(
        f"{k} {v}" for k, v in run.run_info.items() if isinstance(v, (str, int, float))
    )
    title = f"<h1>{escape(plan.model.name)} on {escape(plan.topology)}</h1>"
    sub = f'<div class="sub">{escape(" - ".join(facts))}</div>'
    return title + sub + (f'<div class="muted">{escape(info)}</div>' if info else "")


def _deviation(measured: float | None, predicted: float) -> str:
    if not measured or not predicted:
        return f"predicted {predicted:.3g}" if predicted else ""
    return f"{(measured / predicted - 1) * 100:+.1f} %"


def _tiles(run: RunRecord) -> str:
    plan, last = run.plan, run.metrics[-1] if run.metrics else {}
    tiles: list[tuple[str, str, str]] = [
        ("steps", f"{len(run.metrics)}", f"{format_count(_tokens(run))} tokens")
    ]
    if "loss" in last:
        tiles.append(("training loss", f"{last['loss']:.3f}", f"from {run.metrics[0]['loss']:.3f}"))
    if run.evals:
        first, final = run.evals[0], run.evals[-1]
        tiles.append(
            ("held-out loss", f"{final['loss']:.3f}", f"from {first['loss']:.3f} before training")
        )
    step_s = run.steady("step_s")
    if step_s is not None:
        note = f"predicted {format_seconds(plan.step_s)} ({_deviation(step_s, plan.step_s)})"
        tiles.append(("step time (median)", format_seconds(step_s), note))
    tps, mfu = run.steady("tps"), run.steady("mfu")
    if tps is not None:
        tiles.append(("tokens/s per rank", f"{tps:,.0f}", f"all ranks {tps * plan.mesh.size:,.0f}"))
    if mfu is not None:
        tiles.append(("MFU", f"{mfu * 100:.1f} %", f"predicted {plan.predicted_mfu * 100:.1f} %"))
    peak = run.peak_memory_bytes
    if peak is not None:
        note = (
            f"predicted {format_bytes(plan.memory_bytes)} ({_deviation(peak, plan.memory_bytes)})"
        )
        tiles.append(("peak memory per rank", format_bytes(peak), note))
    cards = "".join(
        f'<div class="tile-card"><div class="name">{escape(n)}</div><div class="value">{escape(v)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for n, v, note in tiles
    )
    return f'<div class="tiles">{cards}</div>'


def _tokens(run: RunRecord) -> float:
    return float(sum(int(m.get("tokens", 0)) for m in run.metrics))


def _points(run: RunRecord, key: str) -> list[tuple[float, float]]:
    return [(float(m["step"]), float(m[key])) for m in run.metrics if m.get(key) is not None]


def _loss(run: RunRecord) -> str:
    series = [Series("training", _points(run, "loss"), _MEASURED)]
    if run.evals:
        held_out = [(float(e["step"]), float(e["loss"])) for e in run.evals]
        series.append(Series("held out", held_out, PALETTE[1], dots=True))
    return line_chart(
        series, y_format=lambda v: f"{v:.4g}", y_label="loss", width=FULL, height=300
    ) + ('<p class="muted">Mean over the valid tokens of all ranks, in nats per token.</p>')


def _step_terms(run: RunRecord) -> str:
    terms = run.plan.cost
    shades = colors([t.name for t in terms])
    predicted = [BarPart(t.name, t.seconds, shades[t.name]) for t in terms]
    out = "<h3>predicted</h3>" + stacked_bars([("predicted", predicted)], x_format=format_seconds)
    if run.timeline is not None:
        phases = _measured_step(run.timeline)
        shades = colors(list(phases))
        measured = [BarPart(name, seconds, shades[name]) for name, seconds in phases.items()]
        out += "<h3>measured, mean over ranks</h3>"
        out += stacked_bars([("measured", measured)], x_format=format_seconds)
    return out


def _measured_step(timeline: Timeline) -> dict[str, float]:
    """Mean seconds of each phase in one step of one rank."""
    spans = [s for s in timeline.spans if s.step is not None]
    rank_steps = len({(s.lane.split("/")[0], s.step) for s in spans}) or 1
    total: dict[str, float] = {}
    for span in spans:
        total[span.name] = total.get(span.name, 0.0) + span.duration_s / rank_steps
    return total


def _step_time(run: RunRecord) -> str:
    points = _points(run, "step_s")
    series = [Series("measured", points, _MEASURED)]
    if points and run.plan.step_s:
        flat = [(points[0][0], run.plan.step_s), (points[-1][0], run.plan.step_s)]
        series.append(Series("predicted", flat, _PREDICTED, dashed=True))
    return line_chart(series, y_format=format_seconds, y_label="step time", from_zero=True)


def _grad_norm(run: RunRecord) -> str:
    return line_chart(
        [Series("gradient norm before clipping", _points(run, "grad_norm"), PALETTE[6])],
        y_format=lambda v: f"{v:.3g}",
        y_label="gradient norm",
        from_zero=True,
    )


def _memory(run: RunRecord) -> str:
    plan = run.plan
    shades = colors([t.name for t in plan.memory])
    charts = []
    for tier in dict.fromkeys(t.tier for t in plan.memory):
        parts = [
            BarPart(t.name, float(t.bytes), shades[t.name]) for t in plan.memory if t.tier == tier
        ]
        bars: list[tuple[str, Sequence[BarPart]]] = [("predicted", parts)]
        if tier == "hbm" and run.peak_memory_bytes:
            bars.append(
                ("measured", [BarPart("measured peak", float(run.peak_memory_bytes), PALETTE[-1])])
            )
        if run.offload is not None and tier in ("dram", "flash"):
            sizes = [m["offload"][f"{tier}_bytes"] for m in run.metrics if "offload" in m]
            bars.append(("measured", [BarPart("measured peak", float(max(sizes)), PALETTE[-1])]))
        limit = (
            ("capacity of one rank", float(plan.memory_capacity_bytes)) if tier == "hbm" else None
        )
        charts.append(
            f"<h3>{escape(_tier_name(plan, tier))}</h3>"
            + stacked_bars(bars, x_format=format_bytes, limit=limit)
        )
    return "".join(charts)


def _tier_name(plan: Plan, tier: str) -> str:
    return (
        "device memory"
        if tier == "hbm" and not plan.topology.startswith("local")
        else tier.replace("hbm", "memory")
    )


def _lanes(run: RunRecord) -> str:
    out = "<h3>predicted</h3>" + _gantt(predicted_timeline(run.plan))
    if run.simulated is not None:
        out += "<h3>simulated, one lane per pipeline rank</h3>" + _gantt(run.simulated)
    if run.timeline is None:
        return out + '<p class="muted">No measured timeline in this run.</p>'
    measured = one_step(run.timeline)
    out += "<h3>measured</h3>" + _gantt(measured)
    hidden = len(measured.lanes) - _MAX_LANES
    more = f" {hidden} more lanes are not drawn." if hidden > 0 else ""
    return (
        out
        + f'<p class="muted">All recorded steps are in trace.json: open it in Perfetto.{more}</p>'
    )


def _gantt(timeline: Timeline) -> str:
    shown = [s for s in timeline.spans if s.duration_s > 0]
    shades = colors([_kind(s.name) for s in shown])
    rows = [
        (
            lane,
            [
                (s.name, s.start_s, s.duration_s, shades[_kind(s.name)])
                for s in shown
                if s.lane == lane
            ],
        )
        for lane in timeline.lanes[:_MAX_LANES]
    ]
    return lanes(rows, x_format=format_seconds) + legend(list(shades.items()))


def _kind(name: str) -> str:
    """What a span does: pipeline actions (`2F0`) without their stage and microbatch have one colour."""
    action = name.strip("0123456789 ")
    return _ACTIONS.get(action, action) if name[:1].isdigit() else name


def _mesh(plan: Plan) -> str:
    return (
        draw_mesh(plan.mesh)
        + '<p class="muted">Ranks of one colour are neighbours on the innermost axis.</p>'
    )


def _collectives(plan: Plan) -> str:
    if not plan.collectives:
        return '<p class="muted">One rank: nothing is communicated.</p>'
    rows = [
        (
            escape(c.purpose),
            escape(c.kind),
            escape(" x ".join(c.axes)),
            f"{c.count:,}",
            format_bytes(c.sent_bytes),
        )
        for c in plan.collectives
    ]
    total = sum(c.sent_bytes for c in plan.collectives)
    note = f'<p class="muted">Per rank and step, by formula: {format_bytes(total)} sent.</p>'
    return _table(("what for", "collective", "axes", "calls", "sent"), rows, numbers=2) + note


def _layouts(plan: Plan) -> str:
    cells = "".join(
        f"<div>{draw_layout(layout, plan.mesh)}<span>{layout_text(name, layout)}</span></div>"
        for name, layout in plan.layouts.items()
    )
    note = '<p class="muted">Cut lines show how the mesh axes divide a tensor; the filled part lies on rank 0.</p>'
    return f'<div class="layouts">{cells}</div>{note}'


def _runners_up(plan: Plan) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    out = f"<ul>{notes}</ul>" if notes else ""
    if not plan.rejected:
        return out + '<p class="muted">The degrees were given; nothing else was considered.</p>'
    rows = [
        (
            escape(str(r.strategy)),
            format_seconds(r.step_s) if r.step_s else "-",
            format_bytes(r.memory_bytes) if r.memory_bytes else "-",
            escape(r.reason),
        )
        for r in plan.rejected
    ]
    chosen = (
        f"<b>{escape(str(plan.strategy))}</b>",
        format_seconds(plan.step_s),
        format_bytes(plan.memory_bytes),
        "chosen",
    )
    return out + _table(
        ("strategy", "predicted step", "predicted memory", "why not"), [chosen, *rows]
    )


def _formulas(plan: Plan) -> str:
    rows = [
        (
            escape(t.name),
            format_seconds(t.seconds),
            f"<code>{escape(t.formula)}</code>",
            escape(t.source),
        )
        for t in plan.cost
    ]
    memory = [
        (escape(t.name), format_bytes(t.bytes), f"<code>{escape(t.formula)}</code>", "")
        for t in plan.memory
    ]
    table = _table(("term", "value", "formula", "source of the constants"), [*rows, *memory])
    return f"<details><summary>terms, formulas, sources</summary>{table}</details>"


def _sample(run: RunRecord) -> str:
    if not run.sample:
        return ""
    return _section("Sample", f"<pre>{escape(run.sample)}</pre>")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """A table; the last `numbers` columns are right-aligned."""
    first = len(head) - numbers
    cls = ["" if i < first else ' class="n"' for i in range(len(head))]
    top = "".join(f"<th{c}>{escape(h)}</th>" for c, h in zip(cls, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{cell}</td>" for c, cell in zip(cls, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"
