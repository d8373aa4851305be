"""Sentences: why a strategy lost, what was ruled out, and the notes of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hyper_parallel.cost import COPIES, Load
from hyper_parallel.ir import AXES, Certificate, CostTerm, Strategy
from hyper_parallel.units import format_bytes, format_seconds


def slower(
    best: Sequence[CostTerm], best_s: float, other: Sequence[CostTerm], other_s: float
) -> str:
    """Why a strategy that fits lost: how much slower, and the term that costs most of it.

    Args:
        best: Cost terms of the winner.
        best_s: Its step time, scaled to the same number of tokens.
        other: Cost terms of the loser.
        other_s: Its step time.
    """
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


def too_big(memory_bytes: int, capacity_bytes: int) -> str:
    """Why a strategy that does not fit lost."""
    return f"does not fit: {format_bytes(memory_bytes)} of {format_bytes(capacity_bytes)}"


def not_executable(strategy: Strategy) -> str | None:
    """The note of a plan that this version cannot run yet, or None."""
    s = strategy
    missing = []
    if s.order != AXES:
        missing.append("order of the axes")
    if s.dp_shard * s.cp > 1 and (s.zero == 0 or (s.zero == 1 and s.pp > 1)):
        missing.append(f"zero={s.zero}" + (" with pipeline stages" if s.zero else ""))
    if s.etp is not None:
        missing.append(f"etp={s.etp}")
    if s.recompute == "selective":
        missing.append("selective recomputation")
    if not missing:
        return None
    return (
        f"this version cannot run this plan yet ({', '.join(missing)} not implemented): it is a prediction, and the "
        "layouts are left out"
    )


def offloaded(cost: Sequence[CostTerm], capacity_bytes: int) -> tuple[str, ...]:
    """The note that says what a memory plan has to move; nothing where it moves nothing."""
    term = next((t for t in cost if t.name == COPIES), None)
    if term is None:
        return ()
    away, _ = Load.of_term(term).best()
    copied, again = float(away.copied[0]), float(away.passing[0] + away.products[0])
    held, moved, redone = (format_bytes(int(b)) for b in (capacity_bytes, copied, again))
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
