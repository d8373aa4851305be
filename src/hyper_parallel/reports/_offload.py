"""The offload section of the page: bytes of every tier, and lanes beside compute, predicted and measured."""

from __future__ import annotations

from html import escape

from hyper_parallel.ir import Timeline
from hyper_parallel.reports._run import RunRecord
from hyper_parallel.reports._svg import FULL, PALETTE, Series, colors, lanes, legend, line_chart
from hyper_parallel.units import GiB, KiB, MiB, format_bytes, format_seconds

_UNITS = (("GiB", GiB), ("MiB", MiB), ("KiB", KiB), ("B", 1))
_MOST_POINTS = 1500
_TIERS = {"device": "device", "dram": "host memory", "flash": "files"}
_LANES = {
    "compute": "compute",
    "communication": "communication",
    "host": "host",
    "store": "device to host",
    "prefetch": "host to device",
    "copy_out": "host to file",
    "copy_in": "file to host",
}


def offload_section(run: RunRecord) -> str:
    """One planned step of rank 0 by tier and lane; empty when the run did not offload."""
    if run.offload is None:
        return ""
    predicted, measured = run.offload
    last = run.metrics[-1]["offload"] if run.metrics and "offload" in run.metrics[-1] else {}
    out = [f'<p class="muted">{escape(_sentence(run, last))}</p>'] if last else []
    for tier, name in _TIERS.items():
        curves = [_curve(timeline, tier) for timeline in (predicted, measured)]
        peaks = [max((value for _, value in curve), default=0.0) for curve in curves]
        if not any(peaks):
            continue
        out.append(
            f"<h3>{name}: predicted peak {format_bytes(peaks[0])}, measured {format_bytes(peaks[1])}</h3>"
        )
        # Plotted in the unit of the peak, so that the ticks are round numbers of it.
        unit, size = next((u for u in _UNITS if max(peaks) >= u[1]), _UNITS[-1])
        scaled = [[(x, y / size) for x, y in curve] for curve in curves]
        out.append(
            line_chart(
                [
                    Series("measured", scaled[1], PALETTE[0]),
                    Series("predicted", scaled[0], PALETTE[2], dashed=True),
                ],
                y_format=lambda v, unit=unit: f"{v:.4g} {unit}",  # type: ignore[misc]
                y_label=f"bytes in {name}",
                from_zero=True,
                width=FULL,
                height=200,
                x_format=format_seconds,
                x_label="time of the step",
            )
        )
    for kind, timeline in (("predicted", predicted), ("measured", measured)):
        out.append(
            f"<h3>{kind}: compute, communication, host and copy engines</h3>" + _gantt(timeline)
        )
    out.append(
        '<p class="muted">One planned step of rank 0. Bytes are counted as buffers really come and go; time is the '
        "virtual clock of the simulated device.</p>"
    )
    return f"<section><h2>Offload</h2>{''.join(out)}</section>"


def _sentence(run: RunRecord, last: dict[str, float]) -> str:
    worst = max(int(m["offload"]["difference_bytes"]) for m in run.metrics if "offload" in m)
    again = sum(bool(m["offload"]["replanned"]) for m in run.metrics if "offload" in m)
    return (
        f"Largest distance between predicted and measured peak, over all steps, tiers and ranks: {worst} bytes. "
        f"Simulated step {format_seconds(last['sim_step_s'])}, predicted "
        f"{format_seconds(last['pred_sim_step_s'])}; waiting for copies {format_seconds(last['wait_s'])}, predicted "
        f"{format_seconds(last['pred_wait_s'])}, for other ranks {format_seconds(last.get('join_s', 0.0))}, predicted "
        f"{format_seconds(last.get('pred_join_s', 0.0))}. Planned again: {again} times."
    )


def _curve(timeline: Timeline, tier: str) -> list[tuple[float, float]]:
    """Steps of a counter as points; of a long one the highest value of every interval."""
    samples = [(c.time_s, c.value) for c in timeline.counters if c.lane == tier]
    if len(samples) > _MOST_POINTS:
        size = -(-len(samples) // _MOST_POINTS)
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


def _gantt(timeline: Timeline) -> str:
    shown = [s for s in timeline.spans if s.duration_s > 0]
    shades = colors([s.name for s in shown])
    rows = [
        (
            label,
            [(s.name, s.start_s, s.duration_s, shades[s.name]) for s in shown if s.lane == lane],
        )
        for lane, label in _LANES.items()
        if lane in timeline.lanes
    ]
    return lanes(rows, x_format=format_seconds) + legend(list(shades.items()))
