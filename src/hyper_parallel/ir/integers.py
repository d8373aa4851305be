"""Integer arithmetic of sizes and degrees."""

from __future__ import annotations

import math


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def round_up(number: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit
