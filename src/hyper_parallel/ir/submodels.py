"""SubmodelsPlan: ranks, times and joint schedule of the parts of a multimodal model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Part of a model on ranks of its own.

    Attributes:
        name: `language`, `vision` or `audio`.
        ranks: Ranks of the part.
        degrees: Its strategy as text.
        forward_s: Seconds of all forwards of a step on one of its ranks, the busiest stage of a pipeline.
        backward_s: Seconds of all backwards, likewise; 0 for a frozen part.
    """

    name: str
    ranks: tuple[int, ...]
    degrees: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class SubmodelsPlan:
    """Parts of a model, and their predicted step: forwards and backwards, without reductions and optimizer.

    Attributes:
        parts: The language part first.
        step_s: Simulated seconds of a step.
        bubble: Fraction of the ranks' time without computation.
        lower_s: Seconds that no order of the same work on these ranks undercuts: all work of the busiest rank if the
            tower's microbatches may lie on any of its ranks, or the longest microbatch from end to end.
        schedule: Joint schedule in the extended CSV form; empty: the tower computes in rounds.
    """

    parts: tuple[PartPlan, ...]
    step_s: float
    bubble: float
    lower_s: float
    schedule: str = ""
