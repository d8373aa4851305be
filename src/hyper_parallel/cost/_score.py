"""Pricing: all candidates at once, and one strategy in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hyper_parallel.cost._budget import away_from
from hyper_parallel.cost._candidates import Array, Candidates
from hyper_parallel.cost._copies import COPIES, put_away
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._memory import SpaceTerm, memory_terms
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._setting import Setting
from hyper_parallel.cost._time import TimeTerm, time_terms
from hyper_parallel.ir import CostTerm, MemoryTerm, Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.topology import Supernode


@dataclass(frozen=True, slots=True)
class Scores:
    """Prices of many candidates."""

    time: tuple[TimeTerm, ...]  # terms of the step time
    memory: tuple[SpaceTerm, ...]  # terms of the peak memory, offloaded or not
    step_s: Array  # sum of the time terms
    memory_bytes: Array  # their bytes on the device: their sum, less what is away

    def cost_at(self, index: int) -> tuple[CostTerm, ...]:
        """Time terms of one candidate, those that are zero left out."""
        return tuple(t.at(index) for t in self.time if t.seconds[index] > 0.0 or _moves(t, index))

    def memory_at(self, index: int) -> tuple[MemoryTerm, ...]:
        """Memory terms of one candidate, those that are zero left out."""
        held = tuple(t.at(index) for t in self.memory if t.bytes[index] > 0.0)
        return put_away(held, self.cost_at(index))


def _moves(term: TimeTerm, index: int) -> bool:
    """Whether a term is that of copies, and there are any."""
    if term.name != COPIES:
        return False
    return any(np.ravel(term.inputs[n])[index] > 0.0 for n in ("need_bytes", "end_bytes"))


def score(s: Setting, only: Literal["time", "memory"] | None = None) -> Scores:
    """Price candidates, columns of one length or an open grid; nothing is checked for legality here.

    Args:
        s: What is priced.
        only: Leave the terms of the other out; its sum is then 0.
    """
    time = time_terms(s) if only != "memory" else ()
    memory = memory_terms(s) if only != "time" else ()
    held = sum((t.bytes for t in memory), np.zeros(1))
    if memory:
        held = away_from(held, s)
    return Scores(time, memory, sum((t.seconds for t in time), np.zeros(1)), held)


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
    candidate = Candidates.of(strategy, workload)
    return score(Setting(ModelNumbers.of(model), machine, workload, candidate))
