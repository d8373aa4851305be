"""Plans as plain text: an explanation for people, and the difference of two plans line by line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hyper_parallel.serde import encode
from hyper_parallel.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from hyper_parallel.ir.plan import Plan

BAR = 24


def explain(plan: Plan) -> str:
    """Everything a plan decides and predicts, as text of at most about 120 columns."""
    sections = (
        _head(plan),
        _time(plan),
        _memory(plan),
        _layouts(plan),
        _collectives(plan),
        _stages(plan),
        _runners_up(plan),
        _front(plan),
        _sensitivity(plan),
        _notes(plan),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _head(plan: Plan) -> Iterator[str]:
    m, w, s = plan.model, plan.workload, plan.strategy
    active = (
        f", {format_count(m.num_active_params)} active"
        if m.num_active_params != m.num_params
        else ""
    )
    yield f"{m.name}: {format_count(m.num_params)} parameters{active}, on {s.world_size} devices of {plan.topology}"
    yield f"  strategy   {s}"
    yield f"  mesh       {plan.mesh}"
    yield (
        f"  batch      {w.tokens_per_step:,} tokens per step = {w.accumulation_steps} microbatches x {w.microbatch} "
        f"sequences x {s.dp} data-parallel ranks x {w.seq_len} tokens"
        if w.tokens_per_step is not None
        else f"  batch      {w.seq_len} tokens per sequence, not resolved"
    )
    yield f"  formats    compute {w.compute_dtype}, parameters {w.param_dtype}, reductions {w.reduce_dtype}"
    tokens = w.tokens_per_step or 0
    rate = tokens / plan.step_s / s.world_size if plan.step_s else 0.0
    yield (
        f"  predicted  {format_seconds(plan.step_s)} per step, {rate:,.0f} tokens/s/device, "
        f"MFU {plan.predicted_mfu:.1%}, {format_bytes(plan.memory_bytes)} of "
        f"{format_bytes(plan.memory_capacity_bytes)} per device"
    )


def _time(plan: Plan) -> Iterator[str]:
    yield "step time"
    for term in sorted(plan.cost, key=lambda t: -t.seconds):
        share = term.seconds / plan.step_s if plan.step_s else 0.0
        yield f"  {format_seconds(term.seconds):>9}  {share:6.1%}  {_bar(share)}  {term.name}: {term.formula}"


def _memory(plan: Plan) -> Iterator[str]:
    for tier in dict.fromkeys(term.tier for term in plan.memory):
        terms = [t for t in plan.memory if t.tier == tier]
        total = sum(t.bytes for t in terms)
        capacity = plan.memory_capacity_bytes if tier == "hbm" else 0
        of = f" of {format_bytes(capacity)} ({total / capacity:.0%})" if capacity else ""
        yield f"peak memory of the fullest device, {tier}: {format_bytes(total)}{of}"
        for term in sorted(terms, key=lambda t: -t.bytes):
            share = term.bytes / (capacity or total or 1)
            yield f"  {format_bytes(term.bytes):>10}  {share:6.1%}  {_bar(share)}  {term.name}: {term.formula}"


def _layouts(plan: Plan) -> Iterator[str]:
    if not plan.layouts:
        return
    yield "layouts"
    groups: dict[str, list[str]] = {}
    for name, layout in plan.layouts.items():
        groups.setdefault(str(layout), []).append(name)
    for text, names in groups.items():
        yield f"  {text}"
        for name in names:
            yield f"      {name}"


def _collectives(plan: Plan) -> Iterator[str]:
    if not plan.collectives:
        return
    yield "collectives per rank and step"
    for c in plan.collectives:
        yield (
            f"  {c.kind:<15} {'.'.join(c.axes):<24} {c.count:>7,} x  {format_bytes(c.sent_bytes):>10} sent  {c.purpose}"
        )


def _runners_up(plan: Plan) -> Iterator[str]:
    if not plan.rejected:
        return
    yield "why not"
    width = max(len(str(r.strategy)) for r in plan.rejected)
    for r in plan.rejected:
        time = format_seconds(r.step_s) if r.step_s is not None else "-"
        memory = format_bytes(r.memory_bytes) if r.memory_bytes is not None else "-"
        yield f"  {r.strategy!s:<{width}}  {time:>9}  {memory:>10}  {r.reason}"


def _stages(plan: Plan) -> Iterator[str]:
    """Virtual stages, runs of equal ones in one line."""
    if len(plan.stages) < 2:
        return
    yield "stages"
    first = 0
    for index, stage in enumerate(plan.stages):
        following = plan.stages[index + 1] if index + 1 < len(plan.stages) else None
        if following is not None and (following.layers, following.cost) == (
            stage.layers,
            stage.cost,
        ):
            continue
        recomputed = f", {stage.recomputed} recomputed" if stage.recomputed else ""
        which = f"{first}" if first == index else f"{first} to {index}"
        yield (
            f"  {which:<10} {stage.layers} layers{recomputed}, {format_seconds(stage.cost.microbatch_s)} per microbatch"
        )
        first = index + 1


def _front(plan: Plan) -> Iterator[str]:
    if not plan.pareto:
        return
    yield "smaller in memory"
    width = max(len(str(a.strategy)) for a in plan.pareto)
    for a in plan.pareto:
        yield (
            f"  {a.strategy!s:<{width}}  {format_seconds(a.step_s):>9}  {format_bytes(a.memory_bytes):>10}  "
            f"{a.microbatch} sequences per microbatch"
        )


def _sensitivity(plan: Plan) -> Iterator[str]:
    if not plan.sensitivity:
        return
    yield "what would change the choice"
    for s in plan.sensitivity:
        yield f"  {s.constant} x {s.factor:.3f}: {s.strategy}"


def _notes(plan: Plan) -> Iterator[str]:
    if plan.notes:
        yield "notes"
    for note in plan.notes:
        yield f"  - {note}"


def _bar(share: float) -> str:
    return ("#" * round(BAR * min(1.0, max(0.0, share)))).ljust(BAR, ".")


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
