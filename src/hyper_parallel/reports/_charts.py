"""Charts of a page as Bokeh figures: curves, stacked bars, lanes; with hover and zoom, on any width of a screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bokeh.models import BasicTickFormatter, FactorRange, HoverTool
from bokeh.plotting import figure
from bokeh.themes import Theme

from hyper_parallel.ir import Span
from hyper_parallel.reports.terms import COLORS, RESUMED
from hyper_parallel.units import GiB, KiB, MiB, format_bytes, format_seconds

MAX_POINTS: Final = 2000
"""Points of a curve that are drawn."""
THEME: Final = Theme(
    json={
        "attrs": {
            "Plot": {
                "background_fill_alpha": 0.0,
                "border_fill_alpha": 0.0,
                "outline_line_color": None,
                "min_border_right": 12,
            },
            "Axis": {
                "axis_label_text_font_style": "normal",
                "axis_label_text_font_size": "12px",
                "major_label_text_font_size": "12px",
                "axis_line_color": None,
                "major_tick_line_color": None,
                "minor_tick_line_color": None,
            },
            "Toolbar": {"logo": None, "autohide": True},
        }
    }
)
"""Nothing has a background, so that the page's own shows; the page's script colours text and grid."""


class Unit(NamedTuple):
    """A unit in which a chart is drawn."""

    name: str
    size: float = 1.0

    @classmethod
    def of(cls, largest: float, units: Sequence[tuple[str, float]]) -> Unit:
        """The largest unit that the largest value fills."""
        return cls(*next((u for u in units if largest >= u[1]), units[-1]))


BYTES: Final = (("GiB", GiB), ("MiB", MiB), ("KiB", KiB), ("B", 1))
SECONDS: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart; predictions are dashed, rare samples (evaluations) are dots without a line."""

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    style: str = "solid"


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure, and the meaning of what is in it: label, colour, style."""

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
    """Lines over training steps, or over another quantity; None where no line has a point.

    Args:
        lines: What is drawn; of long lines every n-th point.
        y_label: What is drawn, for people.
        units: Units to choose from for it.
        x_label: What lies to the right.
        x_unit: Its unit.
        x_range: That of another chart, which then moves along.
        from_zero: The axis begins at 0.
        bands: Spans that lie behind the lines, in the colours of their kinds.
        marks: Places of vertical lines where the run was resumed.
        height: Pixels.
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
        plot.quad(
            left=[s.start_s / x_unit.size for s in bands],
            right=[s.end_s / x_unit.size for s in bands],
            bottom=0,
            top=1.08 * top / unit.size,
            fill_color=[COLORS[s.category] for s in bands],
            fill_alpha=0.18,
            line_color=None,
        )
    if marks:
        places = [x / x_unit.size for x in marks]
        plot.vspan(x=places, line_color=RESUMED, line_dash="dotted", line_width=2)
    names = dict.fromkeys(line.label for line, _ in drawn)
    hovered = []
    for line, points in drawn:
        data = {
            "x": [x / x_unit.size for x, _ in points],
            "y": [y / unit.size for _, y in points],
            "label": [line.label] * len(points),
        }
        if line.style == "dots":
            hovered.append(plot.scatter("x", "y", source=data, size=9, color=line.color))
        else:
            hovered.append(
                plot.line(
                    "x", "y", source=data, color=line.color, line_width=2, line_dash=line.style
                )
            )
    tips = [
        ("", "@label"),
        (x_label, f"@x{{%.6g}} {x_unit.name}"),
        (y_label, f"@y{{%.6g}} {unit.name}"),
    ]
    plot.add_tools(
        HoverTool(renderers=hovered, tooltips=tips, formatters={"@x": "printf", "@y": "printf"})
    )
    styles = {line.label: (line.label, line.color, line.style) for line, _ in drawn}
    kinds = dict.fromkeys(s.category for s in bands)
    keys = [*(styles[n] for n in names), *((k, COLORS[k], "band") for k in kinds)]
    return Chart(plot, [*keys, ("resumed", RESUMED, "dotted")] if marks else keys)


def bars(
    rows: Sequence[tuple[str, Mapping[str, float], Mapping[str, str]]],
    units: Sequence[tuple[str, float]],
    limit: float = 0.0,
) -> Chart:
    """Horizontal stacked bars.

    Args:
        rows: Of each bar its label, the value of every kind in it, and what else is to be said of a kind.
        units: Units to choose from.
        limit: A capacity, drawn where it does not squash the bars; 0: none.
    """
    totals = {label: sum(parts.values()) for label, parts, _ in rows}
    largest = max(totals.values(), default=0.0)
    unit = Unit.of(largest, units)
    text = format_bytes if units is BYTES else format_seconds
    names = [f"{label}: {text(total)}" for label, total in totals.items()]
    plot = _figure(62 + 44 * len(rows), "", unit, y_range=FactorRange(*reversed(names)))
    data: dict[str, list[Any]] = {k: [] for k in ("y", "left", "right", "color", "what", "value")}
    for name, (label, parts, notes) in zip(names, rows, strict=True):
        at = 0.0
        for kind, value in parts.items():
            share = f"{text(value)} ({value / (totals[label] or 1.0):.0%}) {notes.get(kind, '')}"
            row = (name, at / unit.size, (at + value) / unit.size, COLORS[kind], kind, share)
            for column, item in zip(data.values(), row, strict=True):
                column.append(item)
            at += value
    boxes = _boxes(plot, data)
    plot.add_tools(HoverTool(renderers=[boxes], tooltips=[("", "@what"), ("", "@value")]))
    plot.x_range.start = 0
    if largest < limit <= 4 * largest:
        plot.vspan(x=[limit / unit.size], line_color="#e03131", line_dash="dashed", line_width=2)
        plot.x_range.end = 1.03 * limit / unit.size
    kinds = dict.fromkeys(k for _, parts, _ in rows for k, value in parts.items() if value)
    return Chart(plot, [(kind, COLORS[kind], "box") for kind in kinds])


def lanes(spans: Sequence[Span], names: Mapping[str, str]) -> Chart:
    """Spans over time, one colour per kind.

    Args:
        spans: Their category is a kind, their name words for people.
        names: Lanes that are drawn, top to bottom, with their names.
    """
    shown = [s for s in spans if s.duration_s > 0 and s.lane in names]
    unit = Unit.of(max((s.end_s for s in shown), default=0.0), SECONDS)
    order = FactorRange(*reversed(list(names.values())))
    plot = _figure(54 + 28 * len(names), "time", unit, y_range=order)
    boxes = _boxes(
        plot,
        {
            "y": [names[s.lane] for s in shown],
            "left": [s.start_s / unit.size for s in shown],
            "right": [s.end_s / unit.size for s in shown],
            "color": [COLORS[s.category] for s in shown],
            "what": [s.name for s in shown],
            "value": [format_seconds(s.duration_s) for s in shown],
        },
    )
    tips = [("", "@what"), ("takes", "@value"), ("begins", f"@left{{0.000}} {unit.name}")]
    plot.add_tools(HoverTool(renderers=[boxes], tooltips=tips))
    plot.x_range.start = 0
    kinds = {s.category for s in shown}
    return Chart(plot, [(kind, color, "box") for kind, color in COLORS.items() if kind in kinds])


def _boxes(plot: Any, data: dict[str, list[Any]]) -> Any:
    return plot.hbar(
        y="y",
        left="left",
        right="right",
        height=0.72,
        fill_color="color",
        line_color=None,
        source=data,
    )


def _figure(height: int, x_label: str, unit: Unit, **ranges: Any) -> Any:
    """An empty figure as wide as its place; a swipe over it scrolls the page, a tool is chosen first."""
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
        plot.yaxis.formatter = BasicTickFormatter(precision=3, power_limit_low=-2)
    return plot
