"""Which constant of the cost model would have to move, and by how much, for another strategy to win."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hyper_parallel.ir import Sensitivity
from hyper_parallel.planner._context import Context
from hyper_parallel.planner._priced import Priced

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


def sensitivity(
    context: Context, best: Priced, others: Sequence[Priced]
) -> tuple[Sensitivity, ...]:
    """For every constant the least change at which a runner-up overtakes the winner; the smallest change first.

    A term is inversely proportional to its constant. With the constant of term i times f, a step takes
    T + (1/f - 1) t_i; two strategies are level where 1/f - 1 = (T' - T) / (t_i - t_i').

    Args:
        context: The workload, whose tokens make steps comparable.
        best: The winner.
        others: Runners-up.
    """
    found: dict[str, Sensitivity] = {}
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
            known = found.get(constant)
            if known is None or _size(factor) < _size(known.factor):
                found[constant] = Sensitivity(constant, factor, other.strategy)
    return tuple(sorted(found.values(), key=lambda s: (_size(s.factor), s.constant)))


def _size(factor: float) -> float:
    return max(factor, 1.0 / factor)
