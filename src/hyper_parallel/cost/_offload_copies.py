"""Extra seconds of a step if offload and recomputation keep the step within device memory.

Bytes that exceed the memory are offloaded to host memory while idle, or dropped and recomputed. Copies overlap
computation, with one copy engine (lane) per direction; only copies that take longer than the computation add time. Per
microbatch:

    activations, gradients   evicted in forward, before the peak; prefetched in backward
    parameters               resident in host memory; prefetched for forward, dropped, prefetched for backward; evicted
                             once per step, after the update
    optimizer states         prefetched during the last backward, evicted after the update
    recomputed               results of element-wise kernels and of matmuls, at the seconds of their forward

A global-norm clip needs every gradient, so no state is updated or evicted before the last backward ends. If several
microbatches are in flight, except under GPipe, copies of each direction overlap forward and backward. The offloaded and
recomputed fractions are chosen for the least extra time. The formulas ignore latency, the order of copies within a pass
and address fragmentation, and assume that parts of a storage can be offloaded.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from hyper_parallel.cost.candidates import Array
from hyper_parallel.ir import CostTerm, MemoryTerm

COPIES: Final = "offload copies"
"""Name of the cost term of offload copies and recomputation."""
FORMULA: Final = (
    "m (max(0, out / B - forward) + max(0, in / B - backward - recomputed) + recomputed) + max(0, updated / B - "
    "update): bytes evicted, prefetched and written back during the work of m microbatches on a link of B, and "
    "recomputation"
)
SOURCE: Final = "topology; copies that overlap the work, docs/explanation/planner.md"
TERM_OF_KIND: Final = {
    "optimizer": "optimizer states",
    "parameters": "parameters",
    "gradients": "gradients",
    "activations": "activations",
}
"""Memory term that contains each kind of offloaded bytes."""

HIDDEN_FIRST, STATES_FIRST, ACTIVATIONS_FIRST = range(3)
"""Orders in which bytes are chosen: those with fully overlapped copies, optimizer states, or activations first.

Copies of optimizer states are exposed in the last microbatch only.
"""

PERSISTENT_TERMS: Final = ("device context",)
"""Memory terms without bytes to offload."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Bytes that offload and recomputation remove from the device at the peak, by kind."""

    optimizer: Array  # optimizer states in host memory
    parameters: Array  # parameters in host memory
    gradients: Array  # gradients in host memory
    activations: Array  # activations in host memory
    passing: Array  # results of element-wise kernels, recomputed
    products: Array  # results of matmuls, recomputed

    @property
    def copied(self) -> Array:
        """Bytes copied to host memory."""
        return self.optimizer + self.parameters + self.gradients + self.activations


@dataclass(frozen=True, slots=True)
class OffloadDemand:
    """Inputs of the cost of offload: bytes beyond device memory, offloadable bytes, and work that overlaps copies."""

    need_bytes: Array  # bytes beyond device memory at the peak, `staged_bytes` included
    end_bytes: Array  # bytes beyond device memory in phases without activations, `staged_bytes` included
    staged_bytes: Array  # staging buffers without a planned address
    host_bytes: Array  # host memory per device
    optimizer_bytes: Array  # offloadable optimizer states
    parameters_bytes: Array  # offloadable parameters
    gradients_bytes: Array  # offloadable gradients
    activations_bytes: Array  # offloadable activations, of all microbatches in flight
    passing_bytes: Array  # recomputable activations written by element-wise kernels
    products_bytes: Array  # recomputable activations written by matmuls
    passing_s: Array  # seconds to recompute `passing_bytes`, per microbatch
    products_s: Array  # seconds to recompute `products_bytes`, per microbatch
    forward_s: Array  # seconds of work that overlaps eviction, per microbatch
    backward_s: Array  # seconds of work that overlaps prefetch, per microbatch
    update_s: Array  # seconds of work that overlaps the eviction of updated states
    microbatches: Array  # microbatches of a step
    in_flight: Array  # microbatches with activations at the peak
    # 1 if evictions overlap forward only, and prefetches backward only; 0 if copies of each direction overlap both
    alternating: Array
    link_bytes_s: Array  # bytes/s to host memory, per direction

    @classmethod
    def of_term(cls, term: CostTerm) -> OffloadDemand:
        """Return the demand in the inputs of a cost term, as written by `inputs`."""
        return cls(**{f.name: np.full(1, term.inputs[f.name]) for f in fields(cls)})

    def interpolate(self, target: OffloadDemand, share: float) -> OffloadDemand:
        """Return the demand if the fraction `share` of the layers is as in `target`, and the rest as in this demand."""
        values = {f.name: (1.0 - share) * getattr(self, f.name) + share * getattr(target, f.name) for f in fields(self)}
        return OffloadDemand(**values)

    def inputs(self) -> dict[str, Array | float]:
        """Return a dict of all fields, as the inputs of a cost term."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def missing_bytes(self) -> Array:
        """Bytes beyond device memory that remain after all offload and recomputation; at most 0 if the step fits."""
        states = self.optimizer_bytes + self.parameters_bytes + self.gradients_bytes
        recomputed = np.minimum(self.passing_bytes + self.products_bytes, self.activations_bytes)
        limit = np.minimum(states + self.activations_bytes, self.host_bytes + recomputed)
        least = np.minimum(states, self.host_bytes)
        return np.maximum(self.need_bytes - limit, self.end_bytes - least)

    def cheapest(self) -> tuple[Offloaded, Array]:
        """Return (bytes to offload and recompute, added seconds per step) for the option that adds the least time."""
        options = self._options()
        seconds = self.seconds(options)
        cheapest_option = np.expand_dims(np.argmin(seconds, axis=0), 0)

        def at_cheapest(values: Array) -> Array:
            values = np.broadcast_to(values, seconds.shape)
            selected: Array = np.take_along_axis(values, cheapest_option, axis=0)[0]
            return selected

        chosen = {f.name: at_cheapest(getattr(options, f.name)) for f in fields(Offloaded)}
        return Offloaded(**chosen), at_cheapest(seconds)

    def _options(self) -> Offloaded:
        """Return options along a new first dim; the best of them is optimal or close to it.

        For a given amount of recomputation the cheapest copies are known: first fully overlapped copies, then copies
        exposed in the last update only, then copies exposed in every microbatch. The cost is convex and piecewise
        linear in the recomputed bytes, so only corners are evaluated.
        """
        link, micro = self.link_bytes_s, self.in_flight
        alternates = self.alternating > 0
        first, passing, products = self._corners()
        forward_s = self._lanes_s(passing, products)[0]
        fill = _GreedyOffload(self, passing, products, forward_s)
        allocated = fill.bytes

        def allocate_kinds(remaining: Array, *kinds: str) -> None:
            """Offload `remaining` bytes of the given kinds, those with the least exposed copies first."""

            def allocate(name: str, limit: Array | None = None) -> None:
                if name in kinds:
                    fill.allocate(name, remaining, limit)

            hidden_first, unlimited = first == HIDDEN_FIRST, first == ACTIVATIONS_FIRST
            limit = np.where(unlimited, np.inf, hidden_first * micro * fill.forward_room())
            allocate("activations", limit)
            allocate("gradients", np.where(unlimited, np.inf, hidden_first * fill.forward_room()))
            allocate("optimizer", np.where(first == STATES_FIRST, np.inf, fill.update_room()))
            allocate("activations", micro * fill.forward_room())
            allocate("gradients", fill.forward_room())
            allocate("parameters", np.minimum(fill.stream_room(), fill.update_room()))
            allocate("optimizer")
            allocate("parameters", fill.stream_room())
            # Exposed evictions overlap with exposed prefetches of parameters.
            waiting = allocated["parameters"] - link * forward_s
            allocate("activations", np.where(alternates, micro * waiting, 0.0))
            allocate("parameters", np.where(alternates, remaining / 2.0, 0.0))
            for name in ("activations", "gradients", "parameters"):
                allocate(name)

        zero = np.zeros(passing.shape)
        if (self.end_bytes > 0.0).any():
            allocate_kinds(np.maximum(self.end_bytes, zero), "optimizer", "parameters", "gradients")
        allocate_kinds(np.maximum(self.need_bytes - fill.total(), zero), *TERM_OF_KIND)
        return Offloaded(**allocated)

    def _corners(self) -> tuple[Array, Array, Array]:
        """Return (order of copies, recomputed bytes of element-wise kernels, of matmuls); options along a first dim.

        The options are corners of the piecewise linear cost. At a corner, copies of one direction take exactly as long
        as the work that overlaps them, or all bytes of a kind are offloaded. Some corners are omitted.
        """
        need, end, link = self.need_bytes, np.maximum(self.end_bytes, 0.0), self.link_bytes_s
        limit = np.minimum(self.passing_bytes + self.products_bytes, self.activations_bytes)
        passing = np.minimum(self.passing_bytes, limit)
        passing_s_per_byte = self.passing_s / np.maximum(self.passing_bytes, 1.0)
        products_s_per_byte = self.products_s / np.maximum(self.products_bytes, 1.0)
        # Bytes, over all microbatches in flight, prefetched per second of backward.
        rate = self.in_flight * link

        def recompute_to_return(states: Array, overlapped: Array) -> Array:
            """Return the recomputed bytes at which the prefetch of all bytes except states takes as long as backward.

            `overlapped` are bytes of states that are prefetched during the same backward.
            """
            over = need - states - self.in_flight * (link * self.backward_s - overlapped)
            some = over / (1.0 + rate * passing_s_per_byte)
            more = (over - passing * (1.0 + rate * passing_s_per_byte)) / (1.0 + rate * products_s_per_byte)
            return np.where(some <= passing, some, passing + more)

        zero, optimizer = 0.0 * need, self.optimizer_bytes
        leaving, update_room = rate * self.forward_s, link * self.update_s
        states = optimizer + np.minimum(self.parameters_bytes, link * self.forward_s)
        corner_sets = {
            HIDDEN_FIRST: (
                zero, passing, need - end, recompute_to_return(end, end),
                recompute_to_return(np.maximum(end, np.minimum(optimizer, update_room)), zero),
                need - leaving - np.minimum(np.maximum(end, update_room), states),
                need - leaving - np.maximum(end, optimizer), need - leaving - np.maximum(end, states),
            ),
            STATES_FIRST: (passing, need - end, recompute_to_return(optimizer, zero)),
            ACTIVATIONS_FIRST: (passing, need - end),
        }  # fmt: skip
        first = np.repeat(list(corner_sets), [len(corners) for corners in corner_sets.values()])
        recomputed = np.stack(np.broadcast_arrays(*itertools.chain.from_iterable(corner_sets.values())))
        # Bytes that exceed host memory must be recomputed.
        recomputed = np.maximum(np.minimum(np.maximum(recomputed, need - self.host_bytes), limit), 0.0)
        return (
            first.reshape(-1, *(1,) * (recomputed.ndim - 1)), np.minimum(recomputed, passing),
            np.maximum(recomputed - passing, 0.0),
        )  # fmt: skip

    def _lanes_s(self, passing: Array, products: Array) -> tuple[Array, Array, Array]:
        """Return seconds per microbatch: work that hides evictions, work that hides prefetches, and recomputation.

        Recomputation is part of backward, which hides prefetches and, unless `alternating` is set, evictions.
        """
        recomputed = passing / np.maximum(self.passing_bytes, 1.0) * self.passing_s
        recomputed = recomputed + products / np.maximum(self.products_bytes, 1.0) * self.products_s
        backward_s = self.backward_s + recomputed
        return np.where(self.alternating > 0, self.forward_s, backward_s), backward_s, recomputed

    def seconds(self, a: Offloaded) -> Array:
        """Return seconds per step of recomputation and of exposed copies."""
        link, m = self.link_bytes_s, self.microbatches
        host_terms = a.activations / self.in_flight + a.gradients
        alternates = self.alternating > 0
        forward_s, backward_s, recomputed = self._lanes_s(a.passing, a.products)
        going = np.maximum(host_terms, np.where(alternates, a.parameters, 0.0)) / link
        coming = (host_terms + np.where(alternates, 1.0, 2.0) * a.parameters) / link
        forward = np.maximum(going - forward_s, 0.0)
        microbatch = np.maximum(coming - backward_s, 0.0)
        last = np.maximum(coming + a.optimizer / link - backward_s, 0.0)
        update_room = np.maximum((a.optimizer + a.parameters) / link - self.update_s, 0.0)
        lanes = np.where(
            alternates,
            m * forward + (m - 1.0) * microbatch + last,
            (m - 1.0) * np.maximum(forward, microbatch) + np.maximum(forward, last),
        )
        return lanes + m * recomputed + update_room


class _GreedyOffload:
    """Greedy choice of the bytes to offload, for given recomputed bytes.

    Attributes:
        bytes: Dict from field of `Offloaded` to the bytes chosen so far.
        available: Dict from field to the bytes that may still be offloaded.
        host_room: Bytes of host memory that are still free.
    """

    def __init__(self, load: OffloadDemand, passing: Array, products: Array, forward_s: Array) -> None:
        self._load = load
        # Bytes that can be evicted during the forward of a microbatch, and during the update.
        self._forward_bytes = load.link_bytes_s * forward_s
        self._update_bytes = load.link_bytes_s * load.update_s
        shape = passing.shape
        copied = {name: getattr(load, name + "_bytes") for name in TERM_OF_KIND}
        self.bytes = {name: np.zeros(shape) for name in TERM_OF_KIND}
        self.bytes |= {"passing": passing, "products": products}
        self.available = {name: np.broadcast_to(size, shape).copy() for name, size in copied.items()}
        self.available["activations"] -= passing
        self.available["activations"] -= products
        self.host_room = np.broadcast_to(load.host_bytes, shape).copy()

    def total(self) -> Array:
        return np.asarray(sum(self.bytes.values()))

    def forward_room(self) -> Array:
        """Return the additional bytes per microbatch that could be evicted without exposing copies in forward."""
        activations = self.bytes["activations"] / self._load.in_flight
        return np.maximum(self._forward_bytes - activations - self.bytes["gradients"], 0.0)

    def update_room(self) -> Array:
        """Return the additional bytes that could be evicted without exposing copies in the update; may be negative."""
        room: Array = self._update_bytes - self.bytes["optimizer"] - self.bytes["parameters"]
        return room

    def stream_room(self) -> Array:
        """Return the additional bytes of parameters that could be prefetched without exposing copies in forward."""
        return np.where(
            self._load.alternating > 0,
            self._forward_bytes - self.bytes["parameters"],
            self.forward_room() / 2.0,
        )

    def allocate(self, name: str, wanted: Array, limit: Array | None = None) -> None:
        """Offload up to `wanted` bytes of kind `name`, at most `limit`, and subtract them from `wanted` in place."""
        size = np.minimum(wanted, self.available[name])
        np.minimum(size, self.host_room, out=size)
        if limit is not None:
            np.minimum(size, limit, out=size)
        np.maximum(size, 0.0, out=size)
        for remaining in (wanted, self.available[name], self.host_room):
            remaining -= size
        self.bytes[name] += size


def interpolate_copies(plain: CostTerm, target: CostTerm, share: float) -> CostTerm | None:
    """Return the term of offload copies if a fraction `share` of the layers is as in `target`, the rest as in `plain`.

    None if nothing must be offloaded.
    """
    load = OffloadDemand.of_term(plain).interpolate(OffloadDemand.of_term(target), share)
    if load.need_bytes[0] <= 0.0 and load.end_bytes[0] <= 0.0:
        return None
    inputs = {name: float(np.ravel(value)[0]) for name, value in load.inputs().items()}
    return replace(plain, seconds=float(load.cheapest()[1][0]), inputs=inputs)


def move_to_host(memory: tuple[MemoryTerm, ...], cost: tuple[CostTerm, ...]) -> tuple[MemoryTerm, ...]:
    """Return the memory terms with offloaded bytes in host memory, without recomputed bytes, and with staging buffers.

    Args:
        memory: Memory terms of a step without offload.
        cost: Cost terms of the step; without a term named `COPIES` nothing is offloaded.
    """
    term = next((t for t in cost if t.name == COPIES), None)
    if term is None:
        return memory
    offloaded, _ = OffloadDemand.of_term(term).cheapest()
    total = {TERM_OF_KIND[name]: float(getattr(offloaded, name)[0]) for name in TERM_OF_KIND}
    host_terms = tuple(
        MemoryTerm(name, "dram", math.ceil(size), "offloaded at the peak: bytes beyond the device's budget")
        for name, size in total.items()
        if size >= 1.0
    )
    staged = float(OffloadDemand.of_term(term).staged_bytes[0])
    if staged >= 1.0:
        formula = "staging outside the arena, before a copy into it: the largest result without a planned address"
        host_terms = (MemoryTerm("staged results", "hbm", math.floor(staged), formula), *host_terms)
    # Subtract from activations first, then from other transient terms.
    total["activations"] += float(offloaded.passing[0] + offloaded.products[0])
    passing = total.pop("activations")
    terms = []
    for memory_term in sorted(memory, key=lambda t: t.name != "activations"):
        if memory_term.name in total:
            size = total[memory_term.name]
        elif memory_term.name in PERSISTENT_TERMS:
            size = 0.0
        else:
            size = min(passing, float(memory_term.bytes))
            passing -= size
        terms.append(replace(memory_term, bytes=max(0, memory_term.bytes - math.ceil(size))))
    order = [t.name for t in memory]
    terms.sort(key=lambda t: order.index(t.name))
    return (*(t for t in terms if t.bytes), *host_terms)
