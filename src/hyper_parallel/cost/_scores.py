"""Scores of candidates: the terms of their step time and of their peak memory, and the price of one strategy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyper_parallel.cost._candidates import Array, Candidates
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._memory import SpaceTerm, memory_terms
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._offload_copies import COPIES, move_to_host
from hyper_parallel.cost._offload_demand import resident_bytes
from hyper_parallel.cost._pricing_case import PricingCase
from hyper_parallel.cost._time import TimeTerm, time_terms
from hyper_parallel.ir import CostTerm, MemoryTerm, Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.topology import Supernode


@dataclass(frozen=True, slots=True)
class Scores:
    """Prices of many candidates."""

    time: tuple[TimeTerm, ...]  # terms of the step time
    memory: tuple[SpaceTerm, ...]  # terms of the peak memory, offloaded bytes included
    step_s: Array  # sum of the time terms
    memory_bytes: Array  # sum of the memory terms without offloaded bytes

    def cost_at(self, index: int) -> tuple[CostTerm, ...]:
        """Return the nonzero time terms of one candidate."""
        return tuple(
            t.term_of(index) for t in self.time if t.seconds[index] > 0.0 or _is_copies(t, index)
        )

    def memory_at(self, index: int) -> tuple[MemoryTerm, ...]:
        """Return the nonzero memory terms of one candidate."""
        terms_held = tuple(t.term_of(index) for t in self.memory if t.bytes[index] > 0.0)
        return move_to_host(terms_held, self.cost_at(index))


def _is_copies(term: TimeTerm, index: int) -> bool:
    """Return whether a term is that of copies, and there are any."""
    if term.name != COPIES:
        return False
    return any(np.ravel(term.inputs[n])[index] > 0.0 for n in ("need_bytes", "end_bytes"))


def score(s: PricingCase) -> Scores:
    """Price candidates, columns of one length or an open grid; legality is not checked."""
    time, memory = time_terms(s), memory_terms(s)
    terms_held = resident_bytes(sum((t.bytes for t in memory), np.zeros(1)), s)
    return Scores(time, memory, sum((t.seconds for t in time), np.zeros(1)), terms_held)


def step_cost(
    model: ModelSpec, supernode: Supernode, strategy: Strategy, workload: Workload
) -> tuple[CostTerm, ...]:
    """Return the terms of the step time of one strategy; their sum is the prediction.

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
    """Return the terms of the peak memory of the fullest device; arguments as for `step_cost`."""
    return _single(model, supernode, strategy, workload).memory_at(0)


def _single(
    model: ModelSpec, supernode: Supernode, strategy: Strategy, workload: Workload
) -> Scores:
    """Return the prices of one strategy."""
    machine = Machine.of(supernode, workload.compute_dtype)
    candidate = Candidates.of(strategy, workload)
    return score(PricingCase(ModelNumbers.of(model), machine, workload, candidate))
