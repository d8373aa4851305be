"""Seconds of sharing states over data-parallel ranks, as arrays over candidates: FSDP, ZeRO, replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Candidates
from hyper_parallel.cost._machine import Machine, Ring
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._place import Places
from hyper_parallel.ir import Purpose, Workload
from hyper_parallel.shard import Boundary, sharing_boundaries
from hyper_parallel.units import DTYPE_BYTES

Array = NDArray[np.float64]

PARAMETERS = (Purpose.FSDP_PARAMETERS, Purpose.EXPERT_PARAMETERS)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Sharing of states over data-parallel ranks."""

    n: ModelNumbers
    machine: Machine
    workload: Workload
    c: Candidates
    places: Places
    _rings: dict[str, Ring] = field(default_factory=dict)

    def layers(self, layers: Array | float) -> Iterator[Boundary]:
        """Collectives of some mean layers on a tensor- and expert-parallel rank: dense part, experts."""
        n, c = self.n, self.c
        dense = layers * ((n.attention_weights + n.mlp_weights) / c.tp + n.vector_weights)
        yield from self._boundaries(dense, c.zero > 2)
        if n.experts:
            experts = layers * n.expert_weights / (c.ep * c.etp)
            yield from self._boundaries(experts, c.zero > 2, experts=True)

    def outside(self, elements: Array | float) -> Iterator[Boundary]:
        """Collectives of embedding and head, which are never freed early; elements before the cut by P."""
        yield from self._boundaries(elements / self.c.tp, np.zeros(1, dtype=np.bool_))

    def _boundaries(
        self, elements: Array, freed: NDArray[np.bool_], experts: bool = False
    ) -> Iterator[Boundary]:
        c = self.c
        ranks = c.dp_shard * c.cp
        if experts:
            ranks = ranks * c.tp / (c.ep * c.etp)
        axes = ("edp",) if experts else ("dp_shard", "cp")
        once = (c.pp > 1) | (c.zero < 2)
        return sharing_boundaries(
            elements, axes, ranks, c.dp_replicate, c.zero, once, freed, experts=experts
        )

    def seconds(self, b: Boundary) -> Array:
        """Seconds of one call."""
        width = self.machine.width
        if b.format == "reduce":
            width = float(DTYPE_BYTES[self.workload.reduce_dtype])
        if b.axes[0] not in self._rings:
            places = self.places
            group = {"edp": places.edp, "dp_replicate": (places.dp_replicate,)}.get(
                b.axes[0], (places.dp_shard, places.cp)
            )
            self._rings[b.axes[0]] = self.machine.ring(*group)
        seconds = self._rings[b.axes[0]].seconds(b.elements * width)
        return 2.0 * seconds if b.kind == "all_reduce" else seconds


@dataclass(frozen=True, slots=True)
class Tail:
    """Data-parallel traffic once per step, in seconds."""

    scatter: Array  # reduction of gradients that the last microbatch's backward may hide
    gather: Array  # gather of updated parameters
    # gather of a pipeline's layers that are not freed after forward, which the first forward may hide
    first: Array
    # what nothing hides: reduction of a pipeline's sharded gradients, and its embedding or head
    late: Array


def step_tail(
    n: ModelNumbers,
    machine: Machine,
    workload: Workload,
    c: Candidates,
    places: Places,
    layers: Array,
    outside: Array,
) -> Tail:
    """Data-parallel traffic once per step: gradient reduction, and the gather of parameters.

    Args:
        n: The model.
        machine: The machine.
        workload: Number formats.
        c: Candidates.
        places: Where the axes lie.
        layers: Layers of the fullest stage.
        outside: Elements of embedding and head on that stage, before the cut by P.
    """
    sharing = Sharing(n, machine, workload, c, places)
    reduced = replicas = np.zeros(1)
    gathers = []
    for rows in (sharing.layers(layers), sharing.outside(outside)):
        gathered = np.zeros(1)
        for b in rows:
            if not np.any(b.once):
                continue
            seconds = b.once * sharing.seconds(b)
            if b.purpose in PARAMETERS:
                gathered = gathered + seconds
            elif b.purpose == Purpose.REPLICA_GRADIENTS:
                replicas = replicas + seconds
            else:
                reduced = reduced + seconds
        gathers.append(gathered)
    low = c.zero < 2  # else of a pipeline, and 0 without
    return Tail(
        scatter=np.where(low, reduced, 0.0) + replicas,
        gather=np.where(low, gathers[0] + gathers[1], 0.0),
        first=np.where(low, 0.0, gathers[0]),
        late=np.where(low, 0.0, reduced + gathers[1]),
    )


def tensor_hops(machine: Machine, c: Candidates, places: Places, layers: Array) -> Array:
    """Seconds that ZeRO 1 spends in ring steps of tensors that are reduced and gathered one by one.

    A ring over g ranks takes g - 1 steps of the outermost tier's latency however small its tensor is; shards of one
    tensor over hundreds of ranks are small.
    """
    steps = (c.dp_shard * c.cp - 1.0) * machine.tiers[-1].latency_s.value
    many = layers * machine.stack.tail_tensors * steps
    return np.where((c.zero == 1) & (c.dp_shard * c.cp > 1), many, 0.0)
