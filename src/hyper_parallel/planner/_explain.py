"""Explanations of a plan: reasons for rejection, counts of the search, sensitivity, and the prediction interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hyper_parallel.cost import COPIES, LOCAL_CARD, UNFITTED_HALF_WIDTH, OffloadDemand, stack_card
from hyper_parallel.ir import Certificate, CostTerm, Plan, Sensitivity
from hyper_parallel.planner.bounds import TIE
from hyper_parallel.planner.pricing import PricedStrategy
from hyper_parallel.units import format_bytes, format_seconds

MAX_FACTOR: Final = 2.0
"""`sensitivity` reports changes of a constant by factors from 1 / `MAX_FACTOR` to `MAX_FACTOR`."""

_CONSTANTS: Final = {
    "matmul": "speed of matmuls",
    "attention": "speed of attention",
    "element-wise": "memory bandwidth of element-wise kernels",
    "head and loss": "speed of head and loss",
    "recompute": "speed of recomputation",
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
    """Return h such that 80 % of measured step times are expected between `step_s / e**h` and `step_s * e**h`.

    The result is None on the topology `local` without the cards that `hyper-parallel calibrate` measures, and
    `UNFITTED_HALF_WIDTH` with them. For other topologies, h comes from published runs of frameworks that were left out
    of the fit, and predicted with the card of another framework.
    """
    if any(f"device card {LOCAL_CARD}:" in term.source for term in plan.cost):
        return UNFITTED_HALF_WIDTH
    if plan.topology == "local":
        return None
    kind = "dense" if plan.model.num_active_params == plan.model.num_params else "moe"
    return stack_card("megatron").interval[f"{kind}_unknown_stack"]


def slower_reason(best: PricedStrategy, loser: PricedStrategy) -> str:
    """Return why a strategy that fits was rejected: its slowdown and the cost term that grew most, or a tie.

    Both times of this term are for the tokens of the loser's step.
    """
    share = loser.per_token_s / best.per_token_s - 1.0
    how_much = f"slower by {share:.1%}" if share < 0.1 else f"slower by {share:.0%}"
    if share < 5e-4:
        how_much = "slower by less than 0.1%"
    if share < TIE:
        return "equally fast: ties go to the smaller tp, then cp, pp and ep, then to less memory"
    tokens = (loser.workload.tokens_per_step or 1) / (best.workload.tokens_per_step or 1)
    winner = {t.name: t.seconds * tokens for t in best.cost}
    term = max(loser.cost, key=lambda t: t.seconds - winner.get(t.name, 0.0))
    winner_s = winner.get(term.name, 0.0)
    return f"{how_much}: {term.name} {format_seconds(term.seconds)}" + (
        f" against {format_seconds(winner_s)}" if winner_s else ""
    )


def offload_note(cost: Sequence[CostTerm], held_bytes: int) -> tuple[str, ...]:
    """Return a tuple with the note about offloaded and recomputed bytes; () if `cost` has no term of offload copies.

    `held_bytes` is the peak of device memory after offload.
    """
    term = next((t for t in cost if t.name == COPIES), None)
    if term is None:
        return ()
    offloaded, _ = OffloadDemand.of_term(term).cheapest()
    copied = float(offloaded.copied[0])
    recomputed = float(offloaded.passing[0] + offloaded.products[0])
    resident, moved, redone = (format_bytes(int(b)) for b in (held_bytes, copied, recomputed))
    return (
        f"offload: {resident} on a device, {moved} in host memory at the peak and {redone} recomputed, for "
        f"{format_seconds(term.seconds)} per step; the memory plan decides before the first step whether its budget "
        "is feasible",
    )


def search_note(certificate: Certificate) -> str:
    """Return the note about a search: optimality gap, and numbers of priced, simulated, pruned, illegal strategies."""
    c = certificate
    if c.objective == "memory":
        proof = "the peak memory exceeds the least by at most 1/1024 of the fastest strategy's"
    else:
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


def sensitivity(cheapest: PricedStrategy, runners_up: Sequence[PricedStrategy]) -> tuple[Sensitivity, ...]:
    """Return the smallest change of each hardware constant that makes a runner-up as fast as `cheapest`.

    The smallest changes come first. Constants are omitted if no factor within the limits of `MAX_FACTOR` suffices.

    A cost term is inversely proportional to its constant. If the constant is multiplied by f, a step of T seconds with
    a term of t seconds takes T + (1/f - 1) t. For equal tokens, let the runner-up's step take T' seconds and its term
    t'. Both steps take the same time if 1/f - 1 = (T' - T) / (t - t').
    """
    changes: dict[str, Sensitivity] = {}
    terms = {t.name: t.seconds for t in cheapest.cost}
    for loser in runners_up:
        # Scale the times of the runner-up to the tokens of the winner's step.
        token_ratio = cheapest.per_token_s / loser.per_token_s * loser.step_s / cheapest.step_s
        rival = {t.name: t.seconds / token_ratio for t in loser.cost}
        behind = sum(rival.values()) - cheapest.step_s
        for name, constant in _CONSTANTS.items():
            advantage = terms.get(name, 0.0) - rival.get(name, 0.0)
            if not advantage or behind < 0:
                continue
            change = 1.0 + behind / advantage
            if change <= 0:
                continue
            factor = 1.0 / change
            if not 1.0 / MAX_FACTOR <= factor <= MAX_FACTOR:
                continue
            smallest = changes.get(constant)
            if smallest is None or _size(factor) < _size(smallest.factor):
                changes[constant] = Sensitivity(constant, factor, loser.strategy)
    return tuple(sorted(changes.values(), key=lambda s: (_size(s.factor), s.constant)))


def _size(factor: float) -> float:
    return max(factor, 1.0 / factor)
