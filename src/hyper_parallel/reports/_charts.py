"""Where the marks of a chart lie: lines, bars, lanes, a mesh, a cut tensor. `templates/charts.html` draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hyper_parallel.ir import Layout, Mesh, Timeline

PALETTE: Final = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
)  # fmt: skip
"""Categorical colours that stay apart for colour-blind readers and on both backgrounds."""

FULL, HALF = 1080, 510
"""Widths of a chart that fills the page, and of one that shares the row; text is drawn at its CSS size."""
LETTER_WIDTH = 8
"""Width of a letter of a label, rounded up: 12 pixels high, sans serif."""
BOX = 46
"""Side of the drawing of a tensor."""
MAX_RANKS, MAX_CELLS = 256, 16

Format = Callable[[float], str]
Chart = dict[str, Any]
"""Positions and texts by the names that the macro of the chart reads."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; predictions are dashed, rare samples (evaluations) are dots without a line."""

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class BarPart:
    """One part of a stacked bar."""

    label: str
    value: float
    color: str


def colors(labels: Sequence[str]) -> dict[str, str]:
    """A colour per label, in order of first appearance."""
    return {label: PALETTE[i % len(PALETTE)] for i, label in enumerate(dict.fromkeys(labels))}


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover an interval."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    series: Sequence[Series],
    *,
    y_format: Format,
    y_label: str,
    from_zero: bool = False,
    width: int = HALF,
    height: int = 240,
    x_format: Format | None = None,
    x_label: str = "step",
) -> Chart:
    """Lines over training steps, or with `x_format` over another quantity."""
    points = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not points:
        return {"series": ()}
    left, right, top, bottom = 58, width - 14, 12, height - 34
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = min(p[1] for p in points), max(p[1] for p in points)
    y0 = 0.0 if from_zero else y0 - 0.05 * (y1 - y0)
    y1 = y1 + 0.05 * (y1 - y0) if y1 > y0 else y0 + 1.0
    x1 = x1 if x1 > x0 else x0 + 1

    def sx(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (right - left)

    def sy(y: float) -> float:
        return bottom - (y - y0) / (y1 - y0) * (bottom - top)

    def drawn(s: Series) -> Chart:
        places = [(x, y) for x, y in s.points if math.isfinite(y)]
        path = (f"{'L' if i else 'M'}{sx(x):.1f},{sy(y):.1f}" for i, (x, y) in enumerate(places))
        marked = s.dots or (len(places) <= 60 and x_format is None)
        marks = [
            (sx(x), sy(y), f"{s.label}, {x_label} {x:g}: {y_format(y)}")
            for x, y in (places if marked else ())
        ]
        return {
            "color": s.color, "dashed": s.dashed, "dots": s.dots, "path": " ".join(path), "marks": marks,
        }  # fmt: skip

    x_ticks = [x for x in ticks(x0, x1, width // 90) if x_format or x == int(x)]
    return {
        "width": width, "height": height, "left": left, "right": right, "bottom": bottom,
        "x_label": x_label, "y_label": y_label,
        "y_ticks": [(sy(y), y_format(y)) for y in ticks(y0, y1)],
        "x_ticks": [(sx(x), x_format(x) if x_format else int(x)) for x in x_ticks],
        "series": [drawn(s) for s in series],
        "legend": [(s.label, s.color) for s in series],
    }  # fmt: skip


def stacked_bars(
    bars: Sequence[tuple[str, Sequence[BarPart]]],
    *,
    x_format: Format,
    limit: tuple[str, float] | None = None,
) -> Chart:
    """Horizontal stacked bars, one row per label, with an optional limit line (a capacity)."""
    left, right, row = 84, HALF - 92, 34
    totals = [sum(p.value for p in parts) for _, parts in bars]
    largest = max(totals, default=0.0)
    # A capacity far to the right would squash the bars; then only the note has it.
    show_limit = limit is not None and limit[1] <= 4 * largest
    x1 = max([largest, limit[1] if limit and show_limit else 0.0]) or 1.0

    def sx(x: float) -> float:
        return left + x / x1 * (right - left)

    rows = []
    for i, ((label, parts), total) in enumerate(zip(bars, totals, strict=True)):
        at, drawn = 0.0, []
        for part in parts:
            if part.value <= 0:
                continue
            title = f"{part.label}: {x_format(part.value)} ({part.value / total:.0%})"
            wide = max(0.5, sx(at + part.value) - sx(at))
            drawn.append((sx(at), wide, part.color, title))
            at += part.value
        rows.append(
            {"y": 6 + i * row, "label": label, "parts": drawn, "end": sx(total), "total": x_format(total)}
        )  # fmt: skip
    keys = dict.fromkeys((p.label, p.color) for _, parts in bars for p in parts if p.value > 0)
    return {
        "width": HALF, "height": row * len(bars) + 12, "left": left, "bars": rows, "legend": list(keys),
        "limit_x": sx(limit[1]) if limit and show_limit else None,
        "note": f"{limit[0]}: {x_format(limit[1])}" if limit else "",
    }  # fmt: skip


def gantt(
    timeline: Timeline,
    lanes: Sequence[tuple[str, str]],
    x_format: Format,
    kind_of: Callable[[str], str] = str,
) -> Chart:
    """The spans of some lanes over time, one colour per kind of span.

    Args:
        timeline: The spans.
        lanes: Lane of the timeline and the name it is drawn with, top to bottom.
        x_format: Seconds as text.
        kind_of: From the name of a span to what has one colour.
    """
    shown = [s for s in timeline.spans if s.duration_s > 0]
    shades = colors([kind_of(s.name) for s in shown])
    row, bottom = 26, 22
    drawn = {lane for lane, _ in lanes}
    end = max((s.start_s + s.duration_s for s in shown if s.lane in drawn), default=1.0) or 1.0
    # Names stand left of the lanes: as wide as the longest, at the width of a wide letter.
    left = max(130, 16 + LETTER_WIDTH * max((len(name) for _, name in lanes), default=0))

    def sx(x: float) -> float:
        return left + x / end * (FULL - left - 10)

    rows = []
    for i, (lane, name) in enumerate(lanes):
        spans = []
        for s in shown:
            if s.lane == lane:
                width = max(0.6, sx(s.start_s + s.duration_s) - sx(s.start_s))
                title = f"{s.name}: {x_format(s.duration_s)}"
                spans.append((sx(s.start_s), width, shades[kind_of(s.name)], title))
        rows.append({"y": i * row + 3, "name": name, "spans": spans})
    return {
        "width": FULL, "height": row * len(lanes) + bottom, "left": left, "rows": rows,
        "x_ticks": [(sx(x), x_format(x)) for x in ticks(0.0, end * 0.98, 8)],
        "legend": list(shades.items()),
    }  # fmt: skip


def mesh_chart(mesh: Mesh) -> Chart:
    """Ranks as tiles: one row per position of the outer axes, one column per position of the inner ones.

    Ranks of one colour form one tensor-parallel group (or one group of the innermost axis when there is none). Empty
    for one device.
    """
    axes = [(n, d) for n, d in mesh.axes if d > 1]
    if not axes:
        return {}
    inner = [n for n, _ in axes if n in ("tp_x", "tp_y")] or [axes[-1][0]]
    columns = mesh.degree(inner)
    groups = mesh.groups(inner)[: max(1, MAX_RANKS // columns)]
    tile, left = 44 if columns <= 8 else 22, 210
    rows = []
    for i, group in enumerate(groups):
        at = mesh.coordinate(group[0])
        tiles = []
        for j, rank in enumerate(group):
            place = mesh.coordinate(rank).items()
            where = ", ".join(f"{n}={c}" for n, c in place if mesh.degree(n) > 1)
            tiles.append((left + j * (tile + 4), rank, where))
        name = ", ".join(f"{n} {at[n]}" for n, _ in axes if n not in inner)
        color = PALETTE[i % len(PALETTE)]
        rows.append({"y": 22 + i * (tile + 4), "name": name, "color": color, "tiles": tiles})
    shown = sum(len(g) for g in groups)
    return {
        "width": left + columns * (tile + 4) + 10, "height": len(groups) * (tile + 4) + 26, "left": left,
        "tile": tile, "axes": " x ".join(inner), "rows": rows,
        "note": f"first {shown} of {mesh.size} ranks" if shown < mesh.size else "",
    }  # fmt: skip


def layout_chart(layout: Layout, mesh: Mesh) -> Chart:
    """A tensor as a box, cut the way the layout cuts its first two dims; the part of rank 0 is filled."""
    degrees = [mesh.degree(axes) for axes in layout.axes[:2]]
    rows, columns = [*degrees, 1, 1][:2]
    height, width = BOX / min(rows, MAX_CELLS), BOX / min(columns, MAX_CELLS)
    return {
        "rows": rows, "columns": columns, "text": str(layout), "width": width, "height": height,
        "row_cuts": [i * height for i in range(1, min(rows, MAX_CELLS))],
        "column_cuts": [i * width for i in range(1, min(columns, MAX_CELLS))],
    }  # fmt: skip
