"""Methods of `Plan` that return text, such as a summary panel, a full explanation and the differences of two plans."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Final

from hyper_parallel.serde import encode, flatten
from hyper_parallel.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from hyper_parallel.ir.plan import Plan, Rejected, RejectedRoles, RolesPlan, SubmodelsPlan

BAR: Final = 24
TERMS_SHOWN: Final = 3
LOSERS_SHOWN: Final = 2
NOTES_SHOWN: Final = 4
_DETAILS: Final = ("searched:", "the space that was searched:")
"""Beginnings of notes about the search. `explain` shows these notes, `summary` omits them."""
_BRIEF_WIDTH: Final = 80
"""Characters per line of `brief`: the default width of a terminal."""


def panel(plan: Plan, half_width: float | None = None, width: int = 80) -> str:
    """Return a plan as a panel of text: strategy, time, memory, largest terms, rejected strategies, notes.

    Args:
        plan: The plan.
        half_width: h of the 80 % prediction interval, see `planner.half_width`; None: no interval.
        width: Maximum characters of a line; the title and longer words are not wrapped.
    """
    lines = [_title(plan)]
    for label, items in summary(plan, half_width).items():
        for index, item in enumerate(items):
            head = f"  {label if not index else '':<11}"
            lines += _wrap(item, width, head, len(head))
    return "\n".join(lines)


def brief(plan: Plan) -> str:
    """Return a plan in at most ten lines of 80 characters; `panel` and `explain` are longer."""
    rows = summary(plan)
    labels = ("strategy", "batch", "step time", "throughput", "memory", "mostly", "why not", "notes")
    shown = [f"  {label:<11}{rows[label][0]}" for label in labels if label in rows]
    lines = [
        line if len(line) <= _BRIEF_WIDTH else f"{line[: _BRIEF_WIDTH - 3].rstrip()}..."
        for line in (_title(plan), *shown)
    ]
    return "\n".join([*lines, "  more       plan.summary(), plan.explain()"])


def summary(plan: Plan, half_width: float | None = None) -> dict[str, list[str]]:
    """Return the summary panel of a plan, as a dict from row label to lines of text; empty rows are omitted.

    Args:
        plan: The plan.
        half_width: h of the 80 % prediction interval from `step_s / e**h` to `step_s * e**h`; None: no interval. It is
            not shown for plans with `roles`.
    """
    w, s = plan.workload, plan.strategy
    terms = sorted(plan.cost, key=lambda t: -t.seconds)[:TERMS_SHOWN]
    notes = [note for note in plan.notes if not note.startswith(_DETAILS)]
    if len(notes) > NOTES_SHOWN:
        notes[NOTES_SHOWN - 1 :] = [f"{len(notes) - NOTES_SHOWN + 1} more with --explain"]
    rows = {
        "strategy": [str(s)],
        "batch": [
            f"{w.tokens_per_step or 0:,} tokens per step, sequences of {w.seq_len:,}, {w.microbatch} at a time, "
            f"{w.accumulation_steps} times, {w.compute_dtype}"
        ],
        "step time": [f"{format_seconds(plan.whole_step_s)} predicted" + _interval(plan, half_width)],
        "roles": [_roles_line(plan.roles)] if plan.roles else [],
        "sub-models": [*_submodel_lines(plan.submodels)] if plan.submodels else [],
        "throughput": [f"{_tokens_per_second(plan):,.0f} tokens/s/device, MFU {plan.predicted_mfu:.1%}"],
        "memory": [_tier(plan, tier) for tier in dict.fromkeys(t.tier for t in plan.memory)],
        "mostly": [", ".join(f"{t.name} {format_seconds(t.seconds)} ({t.seconds / plan.step_s:.0%})" for t in terms)],
        "why not": [
            *(f"{_split(r)}: {r.reason}" for r in (plan.roles.rejected if plan.roles else ())[:2]),
            *(f"{r.strategy}: {r.reason}" for r in _losers(plan)),
        ],
        "proof": [_proof(plan)],
        "notes": notes,
    }
    return {label: items for label, items in rows.items() if any(items)}


def one_line(plan: Plan) -> str:
    """Return model, machine, strategy, step time, MFU and memory of a plan in one line."""
    return (
        f"{plan.model.name} on {plan.num_ranks} devices of {plan.topology}: {plan.degrees}, "
        f"{format_seconds(plan.whole_step_s)} per step, MFU {plan.predicted_mfu:.1%}, {_tier(plan, 'hbm')}"
    )


def html(plan: Plan) -> str:
    """Return the summary panel of a plan as an HTML table, for notebooks."""
    rows = "".join(
        f"<tr><th>{escape(label)}</th><td>{'<br>'.join(map(escape, items))}</td></tr>"
        for label, items in summary(plan).items()
    )
    return f"<table><caption>{escape(_title(plan))}</caption>{rows}</table>"


def _interval(plan: Plan, half_width: float | None) -> str:
    if half_width is None or plan.roles:  # the interval was measured for steps without sampling
        return ""
    low, high = (format_seconds(plan.step_s * math.exp(d)) for d in (-half_width, half_width))
    return f", {low} to {high} in 80 % of cases"


def _tokens_per_second(plan: Plan) -> float:
    per_step = (plan.workload.tokens_per_step or 0) / plan.num_ranks
    return per_step / plan.whole_step_s if plan.whole_step_s else 0.0


def _tier(plan: Plan, tier: str) -> str:
    total = sum(t.bytes for t in plan.memory if t.tier == tier)
    if tier != "hbm" or not plan.memory_capacity_bytes:
        return f"{format_bytes(total)} per device in {tier}"
    share = total / plan.memory_capacity_bytes
    return f"{format_bytes(total)} of {format_bytes(plan.memory_capacity_bytes)} per device ({share:.0%})"


def _losers(plan: Plan) -> list[Rejected]:
    """Return at most `LOSERS_SHOWN` rejected strategies; only one may be faster or unpriced if a slower one exists."""
    big = [r for r in plan.rejected if (r.step_s or 0.0) < plan.step_s]
    fit = [r for r in plan.rejected if r not in big]
    return [*big[: 1 if fit else LOSERS_SHOWN], *fit][:LOSERS_SHOWN]


def _proof(plan: Plan) -> str:
    c = plan.certificate
    if c is None:
        return ""
    proof = "nothing better exists" if c.gap < 1e-9 else f"nothing is more than {c.gap:.2%} better"
    return f"{proof} within the cost model ({c.priced:,} strategies priced)"


_SYMBOLS: Final = (
    "T tokens of a microbatch per tensor-parallel group, P tensor-parallel ranks, d data-parallel ranks sharing states",
    "m microbatches, l layers of a stage, p stages, v virtual stages",
    "W matrix elements of a layer, h hidden width, q and k query and key width, f MLP width, V vocabulary",
    "b bytes of the compute format, peak and share of the FLOP/s of a device, s fitted dim that halves a matmul's rate",
)
"""Meaning of the letters that several formulas of cost terms share."""


def explain(plan: Plan, width: int | None = None) -> str:
    """Return decisions and predictions of a plan as text, wrapped at `width` characters; None: not wrapped."""
    constants = [f"{s.constant} x {s.factor:.3f}: {s.strategy}" for s in plan.sensitivity]
    sections = (
        _section(_title(plan), _head(plan)),
        _section("roles", _roles(plan)),
        _section("sub-models", _submodel_lines(plan.submodels) if plan.submodels else ()),
        _section("step time" if plan.roles is None else "step of learning", _time(plan)),
        "\n".join(_section(title, lines) for title, lines in _memory(plan)),
        _section("symbols of the formulas", _SYMBOLS if plan.cost else ()),
        _section("layouts", _layouts(plan)),
        _section("collectives per rank and step", _collectives(plan)),
        _section("stages", _stages(plan)),
        _section("why not", _runners_up(plan)),
        _section("smaller in memory", _front(plan)),
        _section("what would change the choice", constants),
        _section("notes", (f"- {note}" for note in plan.notes)),
    )
    text = "\n\n".join(filter(None, sections))
    return text if width is None else "\n".join(_wrapped(text, width))


def _wrapped(text: str, width: int) -> Iterator[str]:
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        yield from _wrap(line.strip(), width, indent, 8) or [""]


def _wrap(text: str, width: int, head: str, indent: int) -> list[str]:
    """Return a text wrapped at `width` characters; the first line begins with `head`, others with `indent` blanks."""
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _section(title: str, lines: Iterable[str]) -> str:
    text = "".join(f"\n  {line}" for line in lines)
    return title + text if text else ""


def _title(plan: Plan) -> str:
    m = plan.model
    size = f"{format_count(m.num_params)} parameters"
    if m.num_active_params != m.num_params:
        size += f", {format_count(m.num_active_params)} active"
    return f"{m.name}: {size}, on {plan.num_ranks} devices of {plan.topology}"


def _head(plan: Plan) -> Iterator[str]:
    w, s = plan.workload, plan.strategy
    yield f"strategy   {s}"
    if w.tokens_per_step is None:
        yield f"batch      {w.seq_len} tokens per sequence, not resolved"
    else:
        yield (
            f"batch      {w.tokens_per_step:,} tokens per step = {w.accumulation_steps} microbatches x "
            f"{w.microbatch} sequences x {s.dp} data-parallel ranks x {w.seq_len} tokens"
        )
    yield f"formats    compute {w.compute_dtype}, parameters {w.param_dtype}, reductions {w.reduce_dtype}"
    yield (
        f"predicted  {format_seconds(plan.whole_step_s)} per step, {_tokens_per_second(plan):,.0f} tokens/s/device, "
        f"MFU {plan.predicted_mfu:.1%}, {_tier(plan, 'hbm')}"
    )


def _split(r: RolesPlan | RejectedRoles) -> str:
    """Return the placement of the rollouts as text: `staleness 2, 4 sampler ranks, tp=2`."""
    if not r.rollout_ranks:
        return "colocated"
    degree = f", tp={r.rollout_tp}" if r.rollout_tp > 1 else ""
    staleness = f"staleness {r.max_staleness}" if r.max_staleness else "synchronous"
    ranks = f"{r.rollout_ranks} sampler rank{'s' if r.rollout_ranks > 1 else ''}"
    return f"{staleness}, {ranks}{degree}"


def _roles_line(r: RolesPlan) -> str:
    both = f"sampling {format_seconds(r.sample_s)}, learning {format_seconds(r.learn_s)}"
    return f"{_split(r)}: {both}, {format_bytes(r.sampler_bytes)} on a rank that samples"


def _roles(plan: Plan) -> Iterator[str]:
    if plan.roles is None:
        return
    yield _roles_line(plan.roles)
    width = max((len(_split(r)) for r in plan.roles.rejected), default=0)
    for r in plan.roles.rejected:
        yield f"{_split(r):<{width}}  {format_seconds(r.step_s):>9}  {r.reason}"


def _submodel_lines(s: SubmodelsPlan, *, lanes: bool = True) -> Iterator[str]:
    """Yield lines about parts, simulated step and search over assignments; with `lanes`, also a chart of the step."""
    for part in s.parts:
        first, *others = part.ranks
        adjacent = len(others) > 2 and part.ranks == (*range(first, first + len(part.ranks)),)
        numbers = f"{first}-{others[-1]}" if adjacent else ", ".join(map(str, part.ranks))
        ranks = f"rank{'s' if others else ''} {numbers}"
        times = f"forward {format_seconds(part.forward_s)}, backward {format_seconds(part.backward_s)}"
        memory = sum(t.bytes for t in part.memory)
        per_rank = f"; {format_bytes(memory)} per rank" if memory else ""
        yield f"{part.name}: {part.degrees} on {ranks}; {times} per step{per_rank}"
    yield (
        f"together {format_seconds(s.step_s)}, bubble {s.bubble:.1%}, at least {format_seconds(s.lower_s)}, "
        f"{'joint schedule' if s.schedule else 'inside of the first stage' if s.inline else 'in rounds'}"
    )
    if (proof := s.certificate) is not None:
        yield (
            f"step {format_seconds(proof.value)}; no layout of {proof.priced} takes less than "
            f"{format_seconds(proof.bound)} (gap {proof.gap:.1%})"
        )
    if lanes:
        yield from s.lanes


def _time(plan: Plan) -> Iterator[str]:
    for term in sorted(plan.cost, key=lambda t: -t.seconds):
        share = _share(term.seconds, plan.step_s)
        yield f"{format_seconds(term.seconds):>9}  {share}  {term.name}: {term.formula}"


def _memory(plan: Plan) -> Iterator[tuple[str, Iterable[str]]]:
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
    share = part / whole if whole else 0.0
    bar = "#" * round(BAR * min(1.0, max(0.0, share)))
    return f"{share:6.1%}  {bar.ljust(BAR, '.')}"


def _layouts(plan: Plan) -> Iterator[str]:
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
    """Yield a line per pipeline stage, if there are several. Consecutive stages of equal size and cost share a line."""
    if len(plan.stages) < 2:
        return
    index = 0
    for (layers, cost), run in groupby(plan.stages, key=lambda s: (s.layers, s.cost)):
        first, *rest = run
        last = index + len(rest)
        which = f"{index} to {last}" if rest else f"{index}"
        num_recomputed = (rest or [first])[-1].recomputed
        recomputed = f", {num_recomputed} recomputed" if num_recomputed else ""
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
    shown = {r.strategy for r in plan.rejected}
    alternatives = [a for a in plan.pareto if a.strategy not in shown]
    width = max((len(str(a.strategy)) for a in alternatives), default=0)
    for a in alternatives:
        price = f"{format_seconds(a.step_s):>9}  {format_bytes(a.memory_bytes):>10}"
        yield f"{a.strategy!s:<{width}}  {price}  {a.microbatch} sequences per microbatch"


def diff(a: Plan, b: Plan) -> str:
    """Return a line `path: left -> right` per value whose printed text differs (`-`: absent); "" without differences.

    Compared are model, topology, workload, strategy, predicted times and bytes, collectives and layouts.
    """
    left, right = dict(_flat(a)), dict(_flat(b))
    return "\n".join(
        f"{path}: {left.get(path, '-')} -> {right.get(path, '-')}"
        for path in dict.fromkeys((*left, *right))
        if left.get(path) != right.get(path)
    )


def _flat(plan: Plan) -> Iterator[tuple[str, str]]:
    parts = {name: encode(getattr(plan, name)) for name in ("model", "workload", "strategy")}
    yield from ((path, str(value)) for path, value in flatten(parts))
    yield "topology", plan.topology
    yield "step_s", format_seconds(plan.step_s)
    if plan.roles is not None:
        yield "roles", f"{format_seconds(plan.whole_step_s)}, {_roles_line(plan.roles)}"
    if plan.submodels is not None:
        for number, line in enumerate(_submodel_lines(plan.submodels, lanes=False)):
            yield f"submodels[{number}]", line
    yield "mfu", f"{plan.predicted_mfu:.1%}"
    yield "memory", _tier(plan, "hbm")
    for cost in plan.cost:
        yield f"cost[{cost.name}]", format_seconds(cost.seconds)
    for term in plan.memory:
        yield f"memory[{term.tier}, {term.name}]", format_bytes(term.bytes)
    for c in plan.collectives:
        key = f"collectives[{c.kind} {'.'.join(c.axes)}, {c.purpose}]"
        yield key, f"{c.count} x, {format_bytes(c.sent_bytes)}"
    for name, layout in plan.layouts.items():
        yield f"layouts[{name}]", str(layout)
