"""Pricing: all candidates at once, and one strategy in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._budget import away_from, copy_load
from hyper_parallel.cost._candidates import Candidates, distinct, shape_of
from hyper_parallel.cost._copies import COPIES, put_away
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._memory import memory_terms
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._phases import SpaceTerm
from hyper_parallel.cost._place import Places
from hyper_parallel.cost._step import LayerPrices, Pace, Rest
from hyper_parallel.cost._time import TimeTerm, time_terms
from hyper_parallel.ir import CostTerm, MemoryTerm, Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.topology import Supernode

Array = NDArray[np.float64]

_LAYER_COLUMNS = (
    "dp_shard", "cp", "cp_ulysses", "tp_x", "tp_y", "attention_shape", "mlp_shape", "ep", "etp", "microbatch",
    "recompute", "zero", "order", "regather", "attention_tokens", "cp_gather",
)  # fmt: skip
_FACTORISE_FROM = 512
"""Rows from which pricing distinct layers once is worth finding them."""


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


def score(
    numbers: ModelNumbers,
    machine: Machine,
    workload: Workload,
    candidates: Candidates,
    only: Literal["time", "memory"] | None = None,
) -> Scores:
    """Price candidates; nothing is checked for legality here.

    The price of a layer depends on few of the columns, so each distinct layer is priced once.

    Args:
        numbers: The model.
        machine: The machine and its cards.
        workload: Sequence length and number formats.
        candidates: Strategies; columns of one length, or an open grid.
        only: Leave the terms of the other out; its sum is then 0.
    """
    time: tuple[TimeTerm, ...] = ()
    memory: tuple[SpaceTerm, ...] = ()
    if only != "memory":
        prices = layer_prices(numbers, machine, workload, candidates)
        time = time_terms(numbers, machine, workload, candidates, prices)
    if only != "time":
        memory = memory_terms(numbers, machine, workload, candidates)
    held = sum((t.bytes for t in memory), np.zeros(1))
    if memory and (candidates.offload > 0).any():
        held = away_from(held, numbers, machine, workload, candidates)
    return Scores(time, memory, sum((t.seconds for t in time), np.zeros(1)), held)


def layer_prices(
    numbers: ModelNumbers, machine: Machine, workload: Workload, c: Candidates
) -> LayerPrices:
    """Prices of the layers of candidates, each distinct layer computed once."""
    flat = c.pp.ndim == 1 and len(c) >= _FACTORISE_FROM
    if not flat:
        return LayerPrices.of(numbers, machine, workload, c, Places.of(c))
    # With another order than the mesh's own the strides of a layer's groups also depend on the outer axes.
    moved = bool((c.order > 0).any())
    columns = (*_LAYER_COLUMNS, "pp", "dp_replicate") if moved else _LAYER_COLUMNS
    # Of a pipeline only that it is one: its sharded gradients are reduced once per step.
    first, index = distinct([getattr(c, name) for name in columns] + [np.minimum(c.pp, 2.0)])
    layers = c.take(first)
    return LayerPrices.of(numbers, machine, workload, layers, Places.of(layers)).take(index)


def step_seconds(
    numbers: ModelNumbers,
    machine: Machine,
    workload: Workload,
    c: Candidates,
    parts: Literal["all", "pace"] = "all",
) -> Array:
    """The sum of the time terms without the terms.

    Args:
        numbers: The model.
        machine: The machine and its cards.
        workload: Sequence length and number formats.
        c: Strategies; columns of one length.
        parts: `pace` leaves out what the sharing of states adds and what comes once per step.
    """
    prices = layer_prices(numbers, machine, workload, c)
    pace = Pace.of(numbers, machine, workload, c, prices)
    seconds = pace.seconds(c, prices)
    if parts == "all":
        layers = pace.stages.layers
        rest = Rest.of(numbers, machine, workload, c, Places.of(c), prices, layers)
        seconds = (seconds + rest.seconds) * (1.0 + rest.noise)
        if (c.offload > 0).any():
            load = copy_load(numbers, machine, workload, c, prices, pace, rest)
            seconds = seconds + load.best()[1]
    return np.broadcast_to(seconds, shape_of(c))


def sharing_seconds(
    numbers: ModelNumbers, machine: Machine, workload: Workload, c: Candidates
) -> tuple[Array, Array]:
    """Seconds of sharing states: their gathers and reductions; the sums of gradients that are added up in full."""
    prices = layer_prices(numbers, machine, workload, c)
    layers = Pace.of(numbers, machine, workload, c, prices).stages.layers
    rest = Rest.of(numbers, machine, workload, c, Places.of(c), prices, layers)
    return rest.fsdp + rest.tail, rest.accumulated


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
