"""Draw the figures of docs/explanation as SVG files in docs/images, from schedules, plans and benchmark results.

python tools/draw_figures.py                    all figures (seconds)
python tools/draw_figures.py pipeline_schedules one of them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
IMAGES: Final = ROOT / "docs" / "images"
_FORWARD, _INPUT, _WEIGHT, _BACKWARD = "#4e79a7", "#f28e2b", "#59a14f", "#e15759"
_COLOURS: Final = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f",
)  # fmt: skip
_GREY: Final = "#888888"


class Drawing:
    """SVG drawing of rectangles, lines and text."""

    def __init__(self, width: float, height: float) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'font-family="sans-serif" font-size="11">',
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        ]

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Add a filled rectangle."""
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')

    def text(self, x: float, y: float, words: str, anchor: str = "start", colour: str = "#222222") -> None:
        """Add a line of text; `anchor` is start, middle or end."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
        )

    def line(self, points: Iterable[tuple[float, float]], colour: str, dash: str = "") -> None:
        """Add a polyline."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        """Add a small circle."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')

    def svg(self) -> str:
        """Return the text of the file."""
        return "\n".join([*self.parts, "</svg>", ""])


def pipeline_schedules() -> str:
    """Return Gantt charts of three simulated schedules on 4 ranks."""
    from hyper_parallel.mpmd import StageCost, bubble_fraction, make_schedule, schedule_tasks
    from hyper_parallel.sim import simulate

    ranks, microbatches, row, slot = 4, 8, 16, 13.5
    colours = {"F": _FORWARD, "B": _BACKWARD, "I": _INPUT, "W": _WEIGHT}
    names = ("1f1b", "zb_h1", "zbv")
    drawing = Drawing(640, len(names) * (ranks * row + 34) + 34)
    y = 8.0
    for name in names:
        schedule = make_schedule(name, ranks, microbatches)
        per_rank = schedule.stages // ranks
        costs = [StageCost(1 / per_rank, 1 / per_rank, 1 / per_rank)] * schedule.stages
        timeline = simulate(schedule_tasks(schedule, costs))
        drawing.text(8, y + 10, f"{name}: bubble {100 * bubble_fraction(timeline):.1f} %")
        for span in timeline.spans:
            lane, _, kind = span.lane.partition("/")
            letter = next((c for c in span.name if c in colours), "")
            if kind == "compute" and letter:
                top = y + 16 + int(lane.split()[1]) * row
                x = 60 + slot * span.start_s
                drawing.rect(x, top, slot * span.duration_s - 0.6, row - 2, colours[letter])
        for rank in range(ranks):
            drawing.text(8, y + 27 + rank * row, f"rank {rank}")
        y += ranks * row + 34
    legend = (("F forward", _FORWARD), ("B backward", _BACKWARD), ("I input gradient", _INPUT),
              ("W weight gradient", _WEIGHT))  # fmt: skip
    for number, (words, colour) in enumerate(legend):
        drawing.rect(60 + 130 * number, y, 10, 10, colour)
        drawing.text(74 + 130 * number, y + 9, words)
    return drawing.svg()


def planner_terms() -> str:
    """Return stacked bars of the predicted terms of the best plans under some pins."""
    import hyper_parallel as hp

    workload = hp.Workload(seq_len=8192, tokens_per_step=2**21)
    pins: dict[str, dict[str, object]] = {
        "no pin": {}, "tp=8": {"tp": 8}, "pp=8": {"pp": 8}, "cp=8": {"cp": 8},
        "recompute=full": {"recompute": "full"},
    }  # fmt: skip
    groups = {
        "matmul": ("matmul",), "attention": ("attention",), "recompute": ("recompute",),
        "tp communication": ("tp communication",),
        "other communication": ("cp communication", "fsdp communication", "data-parallel reduction",
                                "pipeline sends", "gradient norm"),
        "pipeline bubble": ("pipeline bubble", "schedule"),
    }  # fmt: skip
    drawing = Drawing(720, len(pins) * 40 + 60)
    scale = 440 / 36
    for number, (label, pin) in enumerate(pins.items()):
        plan = hp.plan("llama-3-70b", topology="dgx-h100", num_devices=64, workload=workload, pins=pin)
        seconds = {term.name: term.seconds for term in plan.cost}
        y, x = 10 + 40 * number, 120.0
        drawing.text(112, y + 13, label, "end")
        named = {name for names in groups.values() for name in names}
        rest = sum(s for name, s in seconds.items() if name not in named)
        sums = [sum(seconds.get(name, 0.0) for name in names) for names in groups.values()]
        for value, colour in zip([*sums, rest], _COLOURS, strict=False):
            drawing.rect(x, y, value * scale, 18, colour)
            x += value * scale
        drawing.text(x + 6, y + 13, f"{sum(seconds.values()):.1f} s")
        drawing.text(120, y + 31, str(plan.strategy), colour=_GREY)
    for number, name in enumerate([*groups, "other compute"]):
        x, y = 120 + 150 * (number % 4), 40 * len(pins) + 18 + 18 * (number // 4)
        drawing.rect(x, y, 10, 10, _COLOURS[number])
        drawing.text(x + 14, y + 9, name)
    return drawing.svg()


def strategy_ranking() -> str:
    """Return a scatter plot of predicted against measured step times."""
    path = ROOT / "benchmarks" / "results" / "strategy_ranking_4_ranks.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    top = 1.05 * max(max(r["predicted_s"], r["measured_s"]) for r in rows)
    size, left, base = 300.0, 60.0, 315.0
    drawing = Drawing(420, 360)
    drawing.line([(left, base), (left + size, base - size)], _GREY, "4 3")
    drawing.line([(left, base - size), (left, base), (left + size, base)], "#222222")
    step = 0.2
    for tick in (step * n for n in range(int(top / step) + 1)):
        at = size * tick / top
        drawing.text(left + at, base + 15, f"{tick:.1f}", "middle")
        drawing.text(left - 6, base - at + 4, f"{tick:.1f}", "end")
    for r in rows:
        drawing.dot(left + size * r["measured_s"] / top, base - size * r["predicted_s"] / top, _COLOURS[0])
    drawing.text(left + size / 2, base + 34, "measured step, s", "middle")
    drawing.text(left + 8, base - size + 4, "predicted step, s")
    return drawing.svg()


def memory_plan() -> str:
    """Return the device bytes over one step with everything kept, and under two memory plans."""
    sys.path.append(str(ROOT / "benchmarks"))
    from _llama_8b import training

    from hyper_parallel.memory import (
        Channel,
        MemoryMachine,
        Roofline,
        plan_memory,
        predicted_timeline,
    )

    program = Roofline(450e12, 2.8e12).annotate(training(layers=8, shards=8, clip_norm=1.0))
    link = Channel(50e9, 10e-6)
    machine = MemoryMachine(store=link, prefetch=link)
    plans = {
        "everything kept": plan_memory(program, machine, budget_bytes=10**12),
        "least peak for 2 % more time": plan_memory(program, machine, max_slowdown=0.02, bandwidth_margin=0.0),
        "fastest within 12 GB": plan_memory(program, machine, budget_bytes=12 * 10**9),
    }
    end_s = max(plan.seconds for plan in plans.values())
    top = 1.05 * max(plan.peak_bytes["device"] for plan in plans.values())
    left, base, width, height = 60.0, 250.0, 560.0, 235.0
    drawing = Drawing(660, 350)
    for tick in range(0, int(top / 1e9), 5):
        y = base - height * tick * 1e9 / top
        drawing.text(left - 6, y + 4, f"{tick} GB", "end")
        drawing.line([(left, y), (left + width, y)], "#dddddd")
    for tick in range(int(end_s / 0.1) + 1):
        drawing.text(left + width * 0.1 * tick / end_s, base + 15, f"{100 * tick} ms", "middle")
    buckets = 280
    for number, (name, plan) in enumerate(plans.items()):
        most = [0.0] * (buckets + 1)
        samples = [c for c in predicted_timeline(plan, machine).counters if c.lane == "device"]
        ends = [*(c.time_s for c in samples[1:]), plan.seconds]
        for sample, end in zip(samples, ends, strict=True):
            first, last = (min(int(buckets * s / end_s), buckets) for s in (sample.time_s, end))
            for bucket in range(first, last + 1):
                most[bucket] = max(most[bucket], sample.value)
        used = min(int(buckets * plan.seconds / end_s), buckets) + 1
        points = [(left + width * n / buckets, base - height * value / top) for n, value in enumerate(most[:used])]
        colour = (_COLOURS[0], _COLOURS[2], _COLOURS[3])[number]
        drawing.line(points, colour)
        peak = plan.peak_bytes["device"] / 1e9
        drawing.rect(left, base + 28 + 18 * number, 10, 10, colour)
        drawing.text(
            left + 14,
            base + 37 + 18 * number,
            f"{name}: {peak:.1f} GB, {1e3 * plan.seconds:.0f} ms",
        )
    return drawing.svg()


FIGURES: Final[dict[str, Callable[[], str]]] = {
    function.__name__: function for function in (pipeline_schedules, planner_terms, strategy_ranking, memory_plan)
}


def main() -> None:
    """Write the figures named on the command line, or all figures."""
    for name in sys.argv[1:] or FIGURES:
        (IMAGES / f"{name}.svg").write_text(FIGURES[name](), encoding="utf-8")
        print(f"docs/images/{name}.svg")


if __name__ == "__main__":
    main()
