"""What a search leaves in its Plan: the proof, the front of time and memory, and what would change the choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyper_parallel.ir.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Certificate:
    """Why no better strategy exists within the cost model.

    Attributes:
        objective: What was minimised: `step-time`, `memory`, ...
        value: Value of the chosen strategy: seconds per step, bytes.
        bound: Lower bound on every strategy of the space.
        priced: Complete strategies that were priced.
        simulated: Strategies whose schedule was simulated.
        cut: Partial strategies that were cut, by reason; each stands for all its completions.
        ruled_out: Combinations that are not legal, by reason.
    """

    objective: str
    value: float
    bound: float
    priced: int
    simulated: int = 0
    cut: dict[str, int] = field(default_factory=dict)
    ruled_out: dict[str, int] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """How much better a strategy could at most be, as a share; 0 when the search was complete."""
        return max(0.0, 1.0 - self.bound / self.value) if self.value else 0.0


@dataclass(frozen=True, slots=True)
class Alternative:
    """A strategy on the front of time and memory: nothing is both faster and smaller.

    Attributes:
        strategy: Degrees and choices.
        microbatch: Sequences per microbatch.
        step_s: Predicted seconds per step.
        memory_bytes: Predicted peak.
    """

    strategy: Strategy
    microbatch: int
    step_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A constant that would change the choice.

    Attributes:
        constant: Which one, in words.
        factor: By how much it would have to be multiplied.
        strategy: What would win then.
    """

    constant: str
    factor: float
    strategy: Strategy
