"""Sentences and numbers about a plan: why a strategy lost, what was searched, and what would change the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hyper_parallel.cost import COPIES, LOCAL_CARD, UNFITTED_HALF_WIDTH, Load, stack_card
from hyper_parallel.ir import Certificate, CostTerm, Plan, Sensitivity, Strategy
from hyper_parallel.planner.pricing import PricedStrategy
from hyper_parallel.planner.request import missing
from hyper_parallel.units import format_bytes, format_seconds

MOST_FACTOR: Final = 2.0
"""Constants are believed to be right within this factor; what only a larger error would change is not told."""

_CONSTANTS: Final = {
    "matmul": "speed of matmuls",
    "attention": "speed of attention",
    "element-wise": "memory bandwidth of element-wise kernels",
    "head and loss": "speed of head and loss",
    "recompute": "speed of what is recomputed",
    "kernel launches": "kernel launches per second",
    "tp communication": "speed of exposed tensor-parallel communication",
    "cp communication": "speed of exposed context-parallel communication",
    "ep communication": "speed of exposed expert exchanges",
    "fsdp communication": "speed of exposed FSDP communication",
    "data-parallel reduction": "speed of the exposed gradient reduction",
    "pipeline bubble": "speed of filling and draining the pipeline",
    "pipeline sends": "speed of exposed pipeline sends",
    "optimizer": "memory bandwidth of the optimizer",
}


def half_width(plan: Plan) -> float | None:
    """Half width of the 80 % interval of a plan's step time, in log ratio; None for a machine that was not measured.

    Runs of our own runtime are not among those that the cards of accelerators are fitted to, so the interval is that of
    stacks that were left out of the fit.
    """
    if any(f"device card {LOCAL_CARD}:" in term.source for term in plan.cost):
        return UNFITTED_HALF_WIDTH
    if plan.topology == "local":
        return None
    kind = "dense" if plan.model.num_active_params == plan.model.num_params else "moe"
    return stack_card("megatron").interval[f"{kind}_unknown_stack"]


def slower(
    best: Sequence[CostTerm], best_s: float, other: Sequence[CostTerm], other_s: float
) -> str:
    """Why a strategy that fits lost: how much slower for as many tokens, and the term that costs most of it."""
    share = other_s / best_s - 1.0
    how_much = f"slower by {share:.1%}" if share < 0.1 else f"slower by {share:.0%}"
    if share < 5e-4:
        return "as fast, but not simpler (smaller tp, cp, pp, ep) or smaller in memory"
    winner = {t.name: t.seconds for t in best}
    term = max(other, key=lambda t: t.seconds - winner.get(t.name, 0.0))
    against = winner.get(term.name, 0.0)
    return f"{how_much}: {term.name} {format_seconds(term.seconds)}" + (
        f" against {format_seconds(against)}" if against else ""
    )


def too_big(
    memory_bytes: int,
    least_bytes: int,
    capacity_bytes: int,
    microbatch: int,
    fitting: int | None = None,
) -> str:
    """Return why a strategy that does not fit lost.

    Args:
        memory_bytes: Its peak with nothing recomputed.
        least_bytes: The peak with everything sharded and recomputed that may be.
        capacity_bytes: Memory of a device.
        microbatch: Sequences of a microbatch.
        fitting: A smaller microbatch with which its degrees fit; None: there is none.
    """
    least = f" ({format_bytes(least_bytes)} at its leanest)" if least_bytes < memory_bytes else ""
    reason = (
        f"does not fit at microbatch {microbatch}: {format_bytes(memory_bytes)}{least} of "
        f"{format_bytes(capacity_bytes)}"
    )
    return reason if fitting is None else f"{reason}; fits at microbatch {fitting}"


def gained(barred: PricedStrategy, best: PricedStrategy, reason: str) -> str:
    """Return the note about a faster strategy that this version cannot run."""
    share = 1.0 - barred.per_token_s / best.per_token_s
    return f"a step would be {share:.1%} shorter with {barred.strategy}, which this version cannot run: {reason}"


def not_executable(strategy: Strategy) -> str | None:
    """The note of a plan that this version cannot run yet, or None."""
    found = missing(strategy)
    if not found:
        return None
    return (
        f"this version cannot run this plan yet ({', '.join(found)} not implemented): it is a prediction, and the "
        "layouts are left out"
    )


def offloaded(cost: Sequence[CostTerm], held_bytes: int) -> tuple[str, ...]:
    """Return the note about what a memory plan moves beside the bytes that a device holds; none where nothing moves."""
    term = next((t for t in cost if t.name == COPIES), None)
    if term is None:
        return ()
    away, _ = Load.of_term(term).best()
    copied, again = float(away.copied[0]), float(away.passing[0] + away.products[0])
    held, moved, redone = (format_bytes(int(b)) for b in (held_bytes, copied, again))
    return (
        f"offload: beside {held} on a device, {moved} lie in host memory at the peak and {redone} are computed again, "
        f"for {format_seconds(term.seconds)} per step; the memory plan decides before the first step whether its "
        "budget can be kept",
    )


def searched(certificate: Certificate) -> str:
    """The note that says how the search went."""
    c = certificate
    proof = "nothing better exists" if c.gap < 1e-9 else f"nothing is more than {c.gap:.2%} better"
    note = f"searched: {proof} within the cost model; {c.priced:,} strategies priced in full"
    if c.gap >= 1e-9:
        note += " (stopped before the search was complete)"
    if c.simulated:
        note += f", {c.simulated} simulated"
    if c.cut:
        note += "; cut before: " + _counted(c.cut)
    if c.ruled_out:
        note += "; not legal: " + _counted(c.ruled_out)
    return note


def _counted(reasons: Mapping[str, int]) -> str:
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} ({n:,})" for reason, n in ordered)


def sensitivity(best: PricedStrategy, others: Sequence[PricedStrategy]) -> tuple[Sensitivity, ...]:
    """For every constant the least change at which a runner-up overtakes the winner; the smallest change first.

    A term is inversely proportional to its constant. With the constant of term i times f, a step takes
    T + (1/f - 1) t_i; two strategies are level where 1/f - 1 = (T' - T) / (t_i - t_i').
    """
    changes: dict[str, Sensitivity] = {}
    terms = {t.name: t.seconds for t in best.cost}
    for other in others:
        same = best.per_token_s / other.per_token_s * other.step_s / best.step_s
        rival = {t.name: t.seconds / same for t in other.cost}
        behind = sum(rival.values()) - best.step_s
        for name, constant in _CONSTANTS.items():
            advantage = terms.get(name, 0.0) - rival.get(name, 0.0)
            if not advantage or behind < 0:
                continue
            change = 1.0 + behind / advantage
            if change <= 0:
                continue
            factor = 1.0 / change
            if not 1.0 / MOST_FACTOR <= factor <= MOST_FACTOR:
                continue
            known = changes.get(constant)
            if known is None or _size(factor) < _size(known.factor):
                changes[constant] = Sensitivity(constant, factor, other.strategy)
    return tuple(sorted(changes.values(), key=lambda s: (_size(s.factor), s.constant)))


def _size(factor: float) -> float:
    return max(factor, 1.0 / factor)
