"""Small SVG charts as strings: lines, stacked bars, lanes. No scripts; a <title> in each mark is the tooltip."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

PALETTE = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#9498a0",
)
"""Categorical colours that stay apart for colour-blind readers and on both backgrounds."""

FULL, HALF = 1080, 510
"""Widths of a chart that fills the page, and of one that shares the row; text is drawn at its CSS size."""
LABEL_LETTER = 8
"""Width of a letter of a label, rounded up: 12 pixels high, sans serif."""

Format = Callable[[float], str]


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
) -> str:
    """Lines over training steps, or with `x_format` over another quantity."""
    left, right, top, bottom = 58, 14, 12, 34
    points = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not points:
        return '<p class="muted">no data</p>'
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = min(p[1] for p in points), max(p[1] for p in points)
    y0 = 0.0 if from_zero else y0 - 0.05 * (y1 - y0)
    y1 = y1 + 0.05 * (y1 - y0) if y1 > y0 else y0 + 1.0
    x1 = x1 if x1 > x0 else x0 + 1
    x_text: Format = x_format or (lambda x: f"{x:g}")

    def sx(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (width - left - right)

    def sy(y: float) -> float:
        return height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom)

    out = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(y_label)} by {escape(x_label)}">'
    ]
    for y in ticks(y0, y1):
        out.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{sy(y):.1f}" y2="{sy(y):.1f}"/>'
        )
        out.append(
            f'<text class="tick" x="{left - 6}" y="{sy(y) + 3.5:.1f}" text-anchor="end">{y_format(y)}</text>'
        )
    out += [
        f'<text class="tick" x="{sx(x):.1f}" y="{height - bottom + 16}" text-anchor="middle">'
        f"{x_format(x) if x_format else int(x)}</text>"
        for x in ticks(x0, x1, width // 90)
        if x_format or x == int(x)
    ]
    out.append(
        f'<text class="tick" x="{width - right}" y="{height - 4}" text-anchor="end">{escape(x_label)}</text>'
    )
    for s in series:
        drawn = [(sx(x), sy(y), x, y) for x, y in s.points if math.isfinite(y)]
        path = " ".join(
            f"{'L' if i else 'M'}{a:.1f},{b:.1f}" for i, (a, b, _, _) in enumerate(drawn)
        )
        dash = ' stroke-dasharray="6 4"' if s.dashed else ""
        if not s.dots:
            out.append(
                f'<path d="{path}" fill="none" stroke="{s.color}" stroke-width="1.8"{dash}/>'
            )
        if s.dots or (len(drawn) <= 60 and x_format is None):
            radius = 4 if s.dots else 2
            out += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}" fill="{s.color}">'
                f"<title>{escape(s.label)}, {escape(x_label)} {x_text(x)}: {y_format(y)}</title></circle>"
                for a, b, x, y in drawn
            ]
    out.append("</svg>")
    return "".join(out) + legend([(s.label, s.color) for s in series])


def stacked_bars(
    bars: Sequence[tuple[str, Sequence[BarPart]]],
    *,
    x_format: Format,
    limit: tuple[str, float] | None = None,
) -> str:
    """Horizontal stacked bars, one row per label, with an optional limit line (a capacity)."""
    width, left, row, right = HALF, 84, 34, 92
    totals = [sum(p.value for p in parts) for _, parts in bars]
    largest = max(totals, default=0.0)
    # A capacity far to the right would squash the bars; it is then said in words only.
    show_limit = limit is not None and limit[1] <= 4 * largest
    x1 = max([largest, limit[1] if limit and show_limit else 0.0]) or 1.0
    height = row * len(bars) + 12

    def sx(x: float) -> float:
        return left + x / x1 * (width - left - right)

    out = [f'<svg viewBox="0 0 {width} {height}" role="img">']
    for i, ((label, parts), total) in enumerate(zip(bars, totals, strict=True)):
        y, at = 6 + i * row, 0.0
        out.append(
            f'<text class="label" x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(label)}</text>'
        )
        for part in parts:
            if part.value <= 0:
                continue
            out.append(
                f'<rect x="{sx(at):.1f}" y="{y}" width="{max(0.5, sx(at + part.value) - sx(at)):.1f}" '
                f'height="{row - 10}" fill="{part.color}"><title>{escape(part.label)}: {x_format(part.value)}'
                f" ({part.value / total:.0%})</title></rect>"
            )
            at += part.value
        out.append(
            f'<text class="label" x="{sx(total) + 6:.1f}" y="{y + 17}">{x_format(total)}</text>'
        )
    if limit and show_limit:
        x = sx(limit[1])
        out.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    out.append("</svg>")
    names = dict.fromkeys((p.label, p.color) for _, parts in bars for p in parts if p.value > 0)
    note = f'<p class="muted">{escape(limit[0])}: {x_format(limit[1])}</p>' if limit else ""
    return "".join(out) + legend(list(names)) + note


def lanes(
    rows: Sequence[tuple[str, Sequence[tuple[str, float, float, str]]]], *, x_format: Format
) -> str:
    """Gantt chart: per lane (name, [(label, start, duration, colour), ...])."""
    width, row, bottom = FULL, 26, 22
    # Names stand left of the lanes: room for the longest, at the width of a wide letter.
    left = max(130, 16 + LABEL_LETTER * max((len(name) for name, _ in rows), default=0))
    end = max((s + d for _, spans in rows for _, s, d, _ in spans), default=1.0) or 1.0
    height = row * len(rows) + bottom

    def sx(x: float) -> float:
        return left + x / end * (width - left - 10)

    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="timeline of one step">']
    for x in ticks(0.0, end * 0.98, 8):
        out.append(
            f'<line class="grid" x1="{sx(x):.1f}" x2="{sx(x):.1f}" y1="0" y2="{height - bottom}"/>'
        )
        out.append(
            f'<text class="tick" x="{sx(x):.1f}" y="{height - 6}" text-anchor="middle">{x_format(x)}</text>'
        )
    for i, (name, spans) in enumerate(rows):
        y = i * row + 3
        out.append(
            f'<text class="label" x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>'
        )
        out += [
            f'<rect x="{sx(start):.1f}" y="{y}" width="{max(0.6, sx(start + length) - sx(start)):.1f}" '
            f'height="{row - 7}" fill="{color}"><title>{escape(label)}: {x_format(length)}</title></rect>'
            for label, start, length, color in spans
        ]
    out.append("</svg>")
    return "".join(out)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Colour keys under a chart."""
    keys = "".join(
        f'<span><i style="background:{c}"></i>{escape(label)}</span>' for label, c in entries
    )
    return f'<div class="legend">{keys}</div>'
