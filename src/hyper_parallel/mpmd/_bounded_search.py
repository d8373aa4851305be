"""Search over candidates whose values have lower bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

_Number = TypeVar("_Number", int, float)


class Best(NamedTuple, Generic[_Number]):
    """Best candidate of a search: its index, its value, and the number of candidates that were evaluated."""

    position: int
    value: _Number
    priced: int


def search_by_bound(
    bounds: Sequence[_Number], price: Callable[[int, _Number | None], _Number | None]
) -> Best[_Number] | None:
    """Return the candidate with the smallest value; None if `price` returns None for all candidates.

    Candidates are evaluated by ascending bound, until the next bound reaches the best value.

    Args:
        bounds: Lower bound of the value of each candidate.
        price: Function of (index of a candidate, best value so far). It returns the candidate's value, or None if the
            candidate cannot run or is not better.
    """
    best: Best[_Number] | None = None
    priced = 0
    for position in sorted(range(len(bounds)), key=bounds.__getitem__):
        if best is not None and bounds[position] >= best.value:
            break
        priced += 1
        value = price(position, best.value if best else None)
        if value is not None and (best is None or value < best.value):
            best = Best(position, value, priced)
    return best and best._replace(priced=priced)
