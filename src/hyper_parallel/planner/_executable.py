"""What a plan may hold that this version cannot run: one list, for the space of a search and the notes of a plan."""

from __future__ import annotations

from hyper_parallel.ir import AXES, Strategy


def missing(strategy: Strategy) -> list[str]:
    """Choices of a strategy that this version can price and cannot run; what layouts refuse is not among them."""
    s = strategy
    found = []
    if s.order != AXES:
        found.append("order of the axes")
    if s.dp_shard * s.cp > 1 and (s.zero == 0 or (s.zero == 1 and s.pp > 1)):
        found.append(f"zero={s.zero}" + (" with pipeline stages" if s.zero else ""))
    if s.etp is not None:
        found.append(f"etp={s.etp}")
    if s.recompute == "selective":
        found.append("selective recomputation")
    return found
