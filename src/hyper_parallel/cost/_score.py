"""Pricing: all candidates at once, and one strategy in full."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Candidates
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._memory import SpaceTerm, memory_terms
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._time import TimeTerm, time_terms
from hyper_parallel.ir import CostTerm, MemoryTerm, Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.topology import Supernode

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scores:
    """Prices of many candidates.

    Attributes:
        time: Terms of the step time.
        memory: Terms of the peak memory.
        step_s: Sum of the time terms.
        memory_bytes: Sum of the memory terms.
    """

    time: tuple[TimeTerm, ...]
    memory: tuple[SpaceTerm, ...]
    step_s: Array
    memory_bytes: Array

    def cost_at(self, index: int) -> tuple[CostTerm, ...]:
        """Time terms of one candidate, those that are zero left out."""
        return tuple(t.at(index) for t in self.time if t.seconds[index] > 0.0)

    def memory_at(self, index: int) -> tuple[MemoryTerm, ...]:
        """Memory terms of one candidate, those that are zero left out."""
        return tuple(t.at(index) for t in self.memory if t.bytes[index] > 0.0)


def score(
    numbers: ModelNumbers, machine: Machine, workload: Workload, candidates: Candidates
) -> Scores:
    """Price candidates; nothing is checked for legality here."""
    time = time_terms(numbers, machine, workload, candidates)
    memory = memory_terms(numbers, machine, workload, candidates)
    zero = np.zeros(len(candidates))
    return Scores(
        time,
        memory,
        sum((t.seconds for t in time), zero),
        sum((t.bytes for t in memory), zero),
    )


def step_cost(
    model: ModelSpec, supernode: Supernode, strategy: Strategy, workload: Workload
) -> tuple[CostTerm, ...]:
    """Terms of the step time of one strategy; their sum is the prediction.

    Args:
        model: The model.
        supernode: The machine.
        strategy: Degrees and choices, legal for the model.
        workload: Resolved batch numbers (`Workload.resolve`).
    """
    return _single(model, supernode, strategy, workload).cost_at(0)


def peak_memory(
    model: ModelSpec, supernode: Supernode, strategy: Strategy, workload: Workload
) -> tuple[MemoryTerm, ...]:
    """Terms of the peak memory of the fullest device; arguments as for `step_cost`."""
    return _single(model, supernode, strategy, workload).memory_at(0)


def _single(
    model: ModelSpec, supernode: Supernode, strategy: Strategy, workload: Workload
) -> Scores:
    machine = Machine.of(supernode, workload.compute_dtype)
    return score(ModelNumbers.of(model), machine, workload, Candidates.of(strategy, workload))
