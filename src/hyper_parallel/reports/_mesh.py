"""Drawings of a mesh and of layouts: which ranks form a group, and which part of a tensor a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hyper_parallel.ir import Layout, Mesh
from hyper_parallel.reports._svg import PALETTE

_MAX_RANKS = 256
_MAX_CELLS = 16


def draw_mesh(mesh: Mesh) -> str:
    """Ranks as tiles: one row per position of the outer axes, one column per position of the inner ones.

    Ranks of one colour form one tensor-parallel group (or one group of the innermost axis when there is none).
    """
    axes = [(n, d) for n, d in mesh.axes if d > 1]
    if not axes:
        return '<p class="muted">one device</p>'
    inner = [n for n, _ in axes if n in ("tp_x", "tp_y")] or [axes[-1][0]]
    columns = mesh.degree(inner)
    groups = mesh.groups(inner)[: max(1, _MAX_RANKS // columns)]
    tile = 44 if columns <= 8 else 22
    left = 210
    width, height = left + columns * (tile + 4) + 10, len(groups) * (tile + 4) + 26
    out = [
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" aria-label="mesh">'
    ]
    out.append(f'<text class="tick" x="{left}" y="14">{escape(" x ".join(inner))} -&gt;</text>')
    for i, group in enumerate(groups):
        y = 22 + i * (tile + 4)
        at = mesh.coordinate(group[0])
        where = ", ".join(f"{n} {at[n]}" for n, _ in axes if n not in inner)
        out.append(
            f'<text class="label" x="{left - 8}" y="{y + tile / 2 + 4}" text-anchor="end">{escape(where)}</text>'
        )
        for j, rank in enumerate(group):
            x = left + j * (tile + 4)
            here = ", ".join(
                f"{n}={c}" for n, c in mesh.coordinate(rank).items() if mesh.degree(n) > 1
            )
            out.append(
                f'<rect x="{x}" y="{y}" width="{tile}" height="{tile}" rx="5" fill="{PALETTE[i % len(PALETTE)]}" '
                f'fill-opacity="0.85"><title>rank {rank}: {escape(here)}</title></rect>'
                f'<text class="tile" x="{x + tile / 2}" y="{y + tile / 2 + 4}" text-anchor="middle">{rank}</text>'
            )
    out.append("</svg>")
    shown = sum(len(g) for g in groups)
    more = f'<p class="muted">first {shown} of {mesh.size} ranks</p>' if shown < mesh.size else ""
    return "".join(out) + more


def draw_layout(layout: Layout, mesh: Mesh) -> str:
    """A tensor as a box, cut the way the layout cuts it; the part of rank 0 is filled."""
    rows, columns = _cuts(layout, mesh, 0), _cuts(layout, mesh, 1) if len(layout.axes) > 1 else 1
    size = 46
    shown_rows, shown_columns = min(rows, _MAX_CELLS), min(columns, _MAX_CELLS)
    height, width = size / shown_rows, size / shown_columns
    out = [
        f'<svg class="box" viewBox="-1 -1 {size + 2} {size + 2}" role="img" aria-label="{escape(str(layout))}">'
    ]
    out.append(f'<rect class="held" x="0" y="0" width="{width:.2f}" height="{height:.2f}"/>')
    out += [
        f'<line class="cut" x1="0" x2="{size}" y1="{i * height:.2f}" y2="{i * height:.2f}"/>'
        for i in range(1, shown_rows)
    ]
    out += [
        f'<line class="cut" y1="0" y2="{size}" x1="{i * width:.2f}" x2="{i * width:.2f}"/>'
        for i in range(1, shown_columns)
    ]
    out.append(f'<rect class="frame" x="0" y="0" width="{size}" height="{size}"/>')
    out.append(f"<title>cut into {rows} x {columns}; rank 0 holds the filled part</title></svg>")
    return "".join(out)


def layout_text(name: str, layout: Layout) -> str:
    """`weight[heads:tp_x, embed:dp_shard]`, axes marked."""
    dims = layout.dims or tuple(f"d{i}" for i in range(len(layout.axes)))
    parts = [
        f"{escape(dim)}<b>{'<sub>' + escape('.'.join(axes)) + '</sub>' if axes else ''}</b>"
        for dim, axes in zip(dims, layout.axes, strict=True)
    ]
    partial = f" partial({escape(', '.join(layout.partial))})" if layout.partial else ""
    return f"<code>{escape(name)}</code> [{', '.join(parts)}]{partial}"


def _cuts(layout: Layout, mesh: Mesh, dim: int) -> int:
    axes: Sequence[str] = layout.axes[dim] if dim < len(layout.axes) else ()
    return mesh.degree(axes)
