"""Plans as plain text: an explanation for people, and the difference of two plans line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hyper_parallel.serde import encode
from hyper_parallel.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from hyper_parallel.ir.plan import Plan

BAR = 24


def explain(plan: Plan) -> str:
    """Everything a plan decides and predicts, as text of at most about 120 columns."""
    constants = [f"{s.constant} x {s.factor:.3f}: {s.strategy}" for s in plan.sensitivity]
    sections = (
        _section(_title(plan), _head(plan)),
        _section("step time", _time(plan)),
        "\n".join(_section(title, lines) for title, lines in _memory(plan)),
        _section("layouts", _layouts(plan)),
        _section("collectives per rank and step", _collectives(plan)),
        _section("stages", _stages(plan)),
        _section("why not", _runners_up(plan)),
        _section("smaller in memory", _front(plan)),
        _section("what would change the choice", constants),
        _section("notes", (f"- {note}" for note in plan.notes)),
    )
    return "\n\n".join(filter(None, sections))


def _section(title: str, lines: Iterable[str]) -> str:
    """Indented lines under a title; nothing without lines."""
    text = "".join(f"\n  {line}" for line in lines)
    return title + text if text else ""


def _title(plan: Plan) -> str:
    m = plan.model
    size = f"{format_count(m.num_params)} parameters"
    if m.num_active_params != m.num_params:
        size += f", {format_count(m.num_active_params)} active"
    return f"{m.name}: {size}, on {plan.strategy.world_size} devices of {plan.topology}"


def _head(plan: Plan) -> Iterator[str]:
    w, s = plan.workload, plan.strategy
    yield f"strategy   {s}"
    yield f"mesh       {plan.mesh}"
    if w.tokens_per_step is None:
        yield f"batch      {w.seq_len} tokens per sequence, not resolved"
    else:
        yield (
            f"batch      {w.tokens_per_step:,} tokens per step = {w.accumulation_steps} microbatches x "
            f"{w.microbatch} sequences x {s.dp} data-parallel ranks x {w.seq_len} tokens"
        )
    yield f"formats    compute {w.compute_dtype}, parameters {w.param_dtype}, reductions {w.reduce_dtype}"
    tokens = w.tokens_per_step or 0
    rate = tokens / plan.step_s / s.world_size if plan.step_s else 0.0
    yield (
        f"predicted  {format_seconds(plan.step_s)} per step, {rate:,.0f} tokens/s/device, "
        f"MFU {plan.predicted_mfu:.1%}, {format_bytes(plan.memory_bytes)} of "
        f"{format_bytes(plan.memory_capacity_bytes)} per device"
    )


def _time(plan: Plan) -> Iterator[str]:
    for term in sorted(plan.cost, key=lambda t: -t.seconds):
        share = _share(term.seconds, plan.step_s)
        yield f"{format_seconds(term.seconds):>9}  {share}  {term.name}: {term.formula}"


def _memory(plan: Plan) -> Iterator[tuple[str, Iterable[str]]]:
    """Title and lines of every tier."""
    for tier in dict.fromkeys(term.tier for term in plan.memory):
        terms = sorted((t for t in plan.memory if t.tier == tier), key=lambda t: -t.bytes)
        total = sum(t.bytes for t in terms)
        capacity = plan.memory_capacity_bytes if tier == "hbm" else 0
        of = f" of {format_bytes(capacity)} ({total / capacity:.0%})" if capacity else ""
        yield (
            f"peak memory of the fullest device, {tier}: {format_bytes(total)}{of}",
            [
                f"{format_bytes(t.bytes):>10}  {_share(t.bytes, capacity or total)}  {t.name}: {t.formula}"
                for t in terms
            ],
        )


def _share(part: float, whole: float) -> str:
    """A share as a percentage and a bar."""
    share = part / whole if whole else 0.0
    bar = "#" * round(BAR * min(1.0, max(0.0, share)))
    return f"{share:6.1%}  {bar.ljust(BAR, '.')}"


def _layouts(plan: Plan) -> Iterator[str]:
    """Every layout once, with the parameters that have it."""
    groups: dict[str, list[str]] = {}
    for name, layout in plan.layouts.items():
        groups.setdefault(str(layout), []).append(name)
    for text, names in groups.items():
        yield text
        yield from (f"    {name}" for name in names)


def _collectives(plan: Plan) -> Iterator[str]:
    for c in plan.collectives:
        sent = f"{format_bytes(c.sent_bytes):>10} sent"
        yield f"{c.kind:<15} {'.'.join(c.axes):<24} {c.count:>7,} x  {sent}  {c.purpose}"


def _stages(plan: Plan) -> Iterator[str]:
    """Virtual stages, runs of equal ones in one line."""
    if len(plan.stages) < 2:
        return
    index = 0
    for (layers, cost), run in groupby(plan.stages, key=lambda s: (s.layers, s.cost)):
        first, *others = run
        last = index + len(others)
        which = f"{index} to {last}" if others else f"{index}"
        again = (others or [first])[-1].recomputed
        recomputed = f", {again} recomputed" if again else ""
        seconds = format_seconds(cost.microbatch_s)
        yield f"{which:<10} {layers} layers{recomputed}, {seconds} per microbatch"
        index = last + 1


def _runners_up(plan: Plan) -> Iterator[str]:
    width = max((len(str(r.strategy)) for r in plan.rejected), default=0)
    for r in plan.rejected:
        time = format_seconds(r.step_s) if r.step_s is not None else "-"
        memory = format_bytes(r.memory_bytes) if r.memory_bytes is not None else "-"
        yield f"{r.strategy!s:<{width}}  {time:>9}  {memory:>10}  {r.reason}"


def _front(plan: Plan) -> Iterator[str]:
    width = max((len(str(a.strategy)) for a in plan.pareto), default=0)
    for a in plan.pareto:
        price = f"{format_seconds(a.step_s):>9}  {format_bytes(a.memory_bytes):>10}"
        yield f"{a.strategy!s:<{width}}  {price}  {a.microbatch} sequences per microbatch"


def diff(a: Plan, b: Plan) -> str:
    """One line per value that differs, `path: left -> right`; values only one plan has show `-`."""
    left, right = dict(_flat(a)), dict(_flat(b))
    return "\n".join(
        f"{path}: {left.get(path, '-')} -> {right.get(path, '-')}"
        for path in dict.fromkeys((*left, *right))
        if left.get(path) != right.get(path)
    )


def _flat(plan: Plan) -> Iterator[tuple[str, str]]:
    for name in ("model", "workload", "strategy"):
        yield from _leaves(name, encode(getattr(plan, name)))
    yield "topology", plan.topology
    yield "step_s", format_seconds(plan.step_s)
    yield "mfu", f"{plan.predicted_mfu:.1%}"
    yield (
        "memory",
        f"{format_bytes(plan.memory_bytes)} of {format_bytes(plan.memory_capacity_bytes)}",
    )
    for cost in plan.cost:
        yield f"cost[{cost.name}]", format_seconds(cost.seconds)
    for term in plan.memory:
        yield f"memory[{term.tier}, {term.name}]", format_bytes(term.bytes)
    for c in plan.collectives:
        key = f"collectives[{c.kind} {'.'.join(c.axes)}, {c.purpose}]"
        yield key, f"{c.count} x, {format_bytes(c.sent_bytes)}"
    for name, layout in plan.layouts.items():
        yield f"layouts[{name}]", str(layout)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    else:
        yield path, str(value)
