"""Order of calls of a producer-consumer loop in which sampling runs a bounded number of steps ahead of learning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal


def ahead(steps: int, max_staleness: int) -> Iterator[tuple[Literal["sample", "learn"], int]]:
    """Yield ("sample", s) and ("learn", s) for the steps 1 to `steps`, in the order in which a loop makes the calls.

    Version v denotes the weights after v learned steps. A loop advances the iterator once ("learn", s) is answered. The
    call for sample s is then made as soon as version s - 1 - `max_staleness` exists (0 in the first steps), and no
    earlier. No sample uses older weights, so none is discarded. With 0 the roles alternate; with 1 or more, step s + 1
    is sampled while step s is learned.
    step s + 1 is sampled while step s is learned.

    Args:
        steps: Number of steps.
        max_staleness: Maximum age, in learned steps, of the weights by which a step is sampled; at least 0.
    """
    for step in range(1, steps + max_staleness + 2):
        if (learned := step - 1 - max_staleness) >= 1:
            yield "learn", learned
        if step <= steps:
            yield "sample", step
