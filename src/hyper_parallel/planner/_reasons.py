"""Sentences: why a strategy lost, what was ruled out, and the notes of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.ir import CostTerm, Strategy
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
    axes = [a for a in ("pp", "cp", "tp_y", "ep") if strategy.degrees()[a] > 1]
    if not axes:
        return None
    return (
        f"this version cannot run this plan yet ({', '.join(axes)} not implemented): it is a prediction, and the "
        "layouts are left out"
    )


def searched(total: int, fitting: int, ruled_out: dict[str, int]) -> str:
    """The note that says how wide the search was."""
    note = f"searched {total:,} candidates, {total - fitting:,} do not fit"
    if ruled_out:
        reasons = sorted(ruled_out.items(), key=lambda item: -item[1])
        note += "; ruled out before: " + ", ".join(f"{reason} ({n:,})" for reason, n in reasons)
    return note
