"""The order of the calls of a loop in which one role makes what another learns from, some steps ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal


def ahead(steps: int, max_staleness: int) -> Iterator[tuple[Literal["sample", "learn"], int]]:
    """Yield ("sample", s) and ("learn", s) for the steps 1 to `steps`, in the order in which a loop makes the calls.

    Version v is the weights after v learned steps. A loop that asks for the next one only when ("learn", s) is answered
    makes the call for sample s when version s - 1 - `max_staleness` is there (0 in the first steps), and no earlier: so
    nothing is sampled by older weights, and nothing has to be thrown away. With 0 the roles take turns; with 1 or more
    step s + 1 is sampled while step s is learned.

    Args:
        steps: Number of steps.
        max_staleness: Learned steps that the weights may be behind by which a step is sampled, at least 0.
    """
    for step in range(1, steps + max_staleness + 2):
        if (learned := step - 1 - max_staleness) >= 1:
            yield "learn", learned
        if step <= steps:
            yield "sample", step
