"""Charts of a report as full-width Bokeh figures with hover and zoom: curves, stacked bars, and timelines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bokeh.models import FactorRange, HoverTool, PrintfTickFormatter
from bokeh.plotting import figure
from bokeh.themes import Theme

from hyper_parallel.ir import Span
from hyper_parallel.reports.terms import COLORS, RESUMED
from hyper_parallel.units import GiB, KiB, MiB, format_bytes, format_seconds

MAX_POINTS: Final = 2000
"""Maximum number of drawn points per curve."""
_ATTRIBUTES: Final = {
    "Plot": {
        "background_fill_alpha": 0.0, "border_fill_alpha": 0.0, "outline_line_color": None, "min_border_right": 12,
    },
    "Axis": {
        "axis_label_text_font_style": "normal", "axis_label_text_font_size": "12px",
        "major_label_text_font_size": "12px", "axis_line_color": None, "major_tick_line_color": None,
        "minor_tick_line_color": None,
    },
    "Toolbar": {"logo": None, "autohide": True},
}  # fmt: skip
THEME: Final = Theme(json={"attrs": _ATTRIBUTES})
"""Bokeh theme with a transparent background, for light and dark pages. The page's script colours text and grid."""


class Unit(NamedTuple):
    """Unit of a chart axis."""

    name: str
    size: float = 1.0

    @classmethod
    def of(cls, largest: float, units: Sequence[tuple[str, float]]) -> Unit:
        """Return the largest of `units` that is at most `largest`, else the last; `units` are in descending order."""
        return cls(*next((u for u in units if largest >= u[1]), units[-1]))


BYTES: Final = (("GiB", GiB), ("MiB", MiB), ("KiB", KiB), ("B", 1))
SECONDS: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


@dataclass(frozen=True, slots=True)
class Curve:
    """Line of a chart; `style` is `solid`, `dashed`, or `dots` for sparse points that are not connected."""

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    style: str = "solid"


@dataclass(frozen=True, slots=True)
class Chart:
    """Bokeh figure, and its legend entries as tuples of label, colour and style."""

    figure: Any
    keys: Sequence[tuple[str, str, str]]


def curves(
    lines: Sequence[Curve],
    y_label: str,
    units: Sequence[tuple[str, float]] = (("", 1.0),),
    *,
    x_label: str = "step",
    x_unit: Unit | None = None,
    x_range: Any = None,
    from_zero: bool = False,
    bands: Sequence[Span] = (),
    marks: Sequence[float] = (),
    height: int = 260,
) -> Chart | None:
    """Return a chart of lines over training steps or another quantity; None when no line has a point.

    Args:
        lines: Lines to draw. Points whose y is not finite are omitted; of long lines, every n-th point is drawn.
        y_label: Label of the y axis.
        units: Candidate units of the y axis, in descending order of size.
        x_label: Label of the x axis.
        x_unit: Unit by which x values are divided; None: they have no unit.
        x_range: Range of another chart's x axis; both charts then pan and zoom together.
        from_zero: Start the y axis at 0.
        bands: Spans drawn behind the lines, in the colours of their kinds.
        marks: Positions of vertical lines at which the run was resumed.
        height: Height in pixels.
    """
    x_unit = x_unit or Unit("")
    drawn = [(line, [p for p in line.points if math.isfinite(p[1])]) for line in lines]
    drawn = [(line, points[:: -(-len(points) // MAX_POINTS)]) for line, points in drawn if points]
    if not drawn:
        return None
    top = max(abs(y) for _, points in drawn for _, y in points)
    unit = Unit.of(top, units)
    plot = _figure(height, x_label, x_unit, **({"x_range": x_range} if x_range else {}))
    plot.yaxis.axis_label = f"{y_label}, {unit.name}" if unit.name else y_label
    if from_zero:
        plot.y_range.start, plot.y_range.end = 0, 1.08 * top / unit.size or 1
    if bands:
        _draw_bands(plot, bands, x_unit, 1.08 * top / unit.size)
    if marks:
        places = [x / x_unit.size for x in marks]
        plot.vspan(x=places, line_color=RESUMED, line_dash="dotted", line_width=2)
    renderers = [_draw_line(plot, line, points, x_unit, unit) for line, points in drawn]
    tips = [
        ("", "@label"),
        (x_label, f"@x{{%.6g}} {x_unit.name}"),
        (y_label, f"@y{{%.6g}} {unit.name}"),
    ]
    formatters = {"@x": "printf", "@y": "printf"}
    plot.add_tools(HoverTool(renderers=renderers, tooltips=tips, formatters=formatters))
    return Chart(plot, _legend([line for line, _ in drawn], bands, resumed=bool(marks)))


def _draw_bands(plot: Any, bands: Sequence[Span], x_unit: Unit, top: float) -> None:
    plot.quad(
        left=[s.start_s / x_unit.size for s in bands],
        right=[s.end_s / x_unit.size for s in bands],
        bottom=0,
        top=top,
        fill_color=[COLORS[s.category] for s in bands],
        fill_alpha=0.18,
        line_color=None,
    )


def _draw_line(plot: Any, line: Curve, points: Sequence[tuple[float, float]], x_unit: Unit, unit: Unit) -> Any:
    data = {
        "x": [x / x_unit.size for x, _ in points],
        "y": [y / unit.size for _, y in points],
        "label": [line.label] * len(points),
    }
    if line.style == "dots":
        return plot.scatter("x", "y", source=data, size=9, color=line.color)
    return plot.line("x", "y", source=data, color=line.color, line_width=2, line_dash=line.style)


def _legend(lines: Sequence[Curve], bands: Sequence[Span], *, resumed: bool) -> list[tuple[str, str, str]]:
    styles = {line.label: (line.label, line.color, line.style) for line in lines}
    kinds = dict.fromkeys(s.category for s in bands)
    keys = [*styles.values(), *((k, COLORS[k], "band") for k in kinds)]
    return [*keys, ("resumed", RESUMED, "dotted")] if resumed else keys


def bars(
    rows: Sequence[tuple[str, Mapping[str, float], Mapping[str, str]]],
    units: Sequence[tuple[str, float]],
    limit: float = 0.0,
) -> Chart:
    """Return a chart of horizontal stacked bars.

    Args:
        rows: One row per bar: label, value per kind, and a note for some kinds.
        units: Candidate units of the axis: `BYTES` or `SECONDS`.
        limit: Capacity to draw as a line if it is 1 to 4 times the length of the longest bar; 0: none.
    """
    totals = {label: sum(parts.values()) for label, parts, _ in rows}
    largest = max(totals.values(), default=0.0)
    unit = Unit.of(largest, units)
    text = format_bytes if units is BYTES else format_seconds
    names = [f"{label}: {text(total)}" for label, total in totals.items()]
    plot = _figure(62 + 44 * len(rows), "", unit, y_range=FactorRange(*reversed(names)))
    drawn = []
    for name, (label, parts, notes) in zip(names, rows, strict=True):
        offset = 0.0
        for kind, value in parts.items():
            share = f"{text(value)} ({value / (totals[label] or 1.0):.0%}) {notes.get(kind, '')}"
            left, right = offset / unit.size, (offset + value) / unit.size
            drawn.append((name, left, right, COLORS[kind], kind, share))
            offset += value
    boxes = _boxes(plot, drawn)
    plot.add_tools(HoverTool(renderers=[boxes], tooltips=[("", "@what"), ("", "@value")]))
    plot.x_range.start = 0
    if largest < limit <= 4 * largest:
        plot.vspan(x=[limit / unit.size], line_color="#e03131", line_dash="dashed", line_width=2)
        plot.x_range.end = 1.03 * limit / unit.size
    kinds = dict.fromkeys(k for _, parts, _ in rows for k, value in parts.items() if value)
    return Chart(plot, [(kind, COLORS[kind], "box") for kind in kinds])


def lanes(spans: Sequence[Span], names: Mapping[str, str]) -> Chart:
    """Return a timeline: a chart with one row (lane) per executor, and one colour per kind of span.

    Args:
        spans: Spans whose category is a kind (key of `COLORS`), and whose name is a readable label.
        names: Label of each lane to draw, by lane, top to bottom.
    """
    visible = [s for s in spans if s.duration_s > 0 and s.lane in names]
    unit = Unit.of(max((s.end_s for s in visible), default=0.0), SECONDS)
    order = FactorRange(*reversed(list(names.values())))
    plot = _figure(54 + 28 * len(names), "time", unit, y_range=order)
    drawn = []
    for s in visible:
        left, right, length = s.start_s / unit.size, s.end_s / unit.size, format_seconds(s.duration_s)
        drawn.append((names[s.lane], left, right, COLORS[s.category], s.name, length))
    boxes = _boxes(plot, drawn)
    tips = [("", "@what"), ("takes", "@value"), ("begins", f"@left{{0.000}} {unit.name}")]
    plot.add_tools(HoverTool(renderers=[boxes], tooltips=tips))
    plot.x_range.start = 0
    kinds = {s.category for s in visible}
    return Chart(plot, [(kind, color, "box") for kind, color in COLORS.items() if kind in kinds])


def _boxes(plot: Any, boxes: Sequence[tuple[str, float, float, str, str, str]]) -> Any:
    """Draw boxes, given as tuples of row, left, right, colour, label and value."""
    names = ("y", "left", "right", "color", "what", "value")
    data = {name: [box[i] for box in boxes] for i, name in enumerate(names)}
    edges = {name: name for name in ("y", "left", "right")}
    return plot.hbar(**edges, height=0.72, fill_color="color", line_color=None, source=data)


def _figure(height: int, x_label: str, unit: Unit, **ranges: Any) -> Any:
    """Return an empty full-width figure, without an active drag or scroll tool, so that touch scrolls the page."""
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools="box_zoom,pan,wheel_zoom,reset,save",
        active_drag=None,
        active_scroll=None,
        toolbar_location="above",
        **ranges,
    )
    plot.xaxis.axis_label = f"{x_label}, {unit.name}".strip(", ") if unit.name else x_label
    plot.xaxis.ticker.desired_num_ticks = 5
    plot.ygrid.visible = "y_range" not in ranges
    if "y_range" not in ranges:
        plot.yaxis.formatter = PrintfTickFormatter(format="%.6g")
    return plot
