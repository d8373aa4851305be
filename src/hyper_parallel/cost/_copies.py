"""Seconds that a step takes longer when a memory plan keeps it within the device's memory.

What exceeds the memory lies in host memory while nothing needs it, or is dropped and computed again. Copies run beside
the work, one lane in each direction, and cost what does not fit under the work. Of one microbatch:

    activations, gradients   out in forward, before the peak; in again in backward
    parameters               at home in host memory: in for forward, dropped, in again for backward; once out, updated
    optimizer states         in during the last backward, out once updated
    computed again           element-wise results, and matmul results, at the seconds of their forward

A global-norm clip needs every gradient, so nothing can be updated, and leave, before the last backward ends. With
several microbatches in flight forward and backward alternate, and a lane has the seconds of both. First goes what costs
nothing (states as far as the device must do without them at the end, activations as far as forward hides them,
optimizer states as far as backward does), then the rest in the order that is cheapest, of a few. Only lanes are
counted: no latency, and no copy that comes early or late.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.ir import CostTerm, MemoryTerm

Array = NDArray[np.float64]

COPIES: Final = "offload copies"
"""Name of the term."""
FORMULA: Final = (
    "m (max(0, out / B - forward) + max(0, in / B - backward - again) + again) + max(0, updated / B - update): bytes "
    "that leave, return and are written back beside the work of m microbatches on a link of B, and what is computed "
    "again"
)
SOURCE: Final = "topology; bytes that a lane carries beside the work, docs/planner.md"
HELD: Final = {
    "optimizer": "optimizer states",
    "parameters": "parameters",
    "gradients": "gradients",
    "activations": "activations",
}
"""What leaves, and the memory terms that it is part of."""

STAYING: Final = ("device context",)
"""Memory terms that no plan moves."""

_ORDERS: Final = tuple(
    order.split()
    for order in (
        "passing optimizer products parameters gradients activations",
        "passing products optimizer parameters gradients activations",
        "passing optimizer parameters products gradients activations",
        "passing optimizer parameters gradients activations products",
        "optimizer passing products parameters gradients activations",
        "optimizer parameters passing products gradients activations",
        "optimizer parameters gradients activations passing products",
        "activations optimizer passing products parameters gradients",
        "passing activations optimizer products parameters gradients",
    )
)
"""Orders in which what costs time is tried."""


_SHARED: Final = ("activations", "passing", "products")
"""Kinds that are all activations."""


@dataclass(frozen=True, slots=True)
class Away:
    """Bytes that a device does without at its peak, by what they are; `passing` and `products` are computed again."""

    optimizer: Array
    parameters: Array
    gradients: Array
    activations: Array
    passing: Array
    products: Array

    @property
    def copied(self) -> Array:
        """Bytes in host memory."""
        return self.optimizer + self.parameters + self.gradients + self.activations


@dataclass(frozen=True, slots=True)
class Load:
    """What decides the copies of a step.

    Attributes:
        need_bytes: Bytes over the budget at the peak, `staged_bytes` included.
        end_bytes: The same when no activations are left.
        staged_bytes: What a memory plan makes beside its buffer before it is copied there.
        host_bytes: Host memory.
        optimizer_bytes: Optimizer states that may be away.
        parameters_bytes: Parameters that may be away.
        gradients_bytes: Gradients that may be away.
        activations_bytes: Activations that may be away, of all microbatches in flight.
        passing_bytes: Those of them that element-wise kernels made.
        products_bytes: Those of them that matmuls made.
        passing_s: Seconds to make the former again, of one microbatch.
        products_s: The same for the latter.
        forward_s: Seconds beside which a microbatch's bytes may leave.
        backward_s: Seconds beside which they may return.
        update_s: Seconds beside which updated states may leave.
        microbatches: Microbatches of a step.
        in_flight: Microbatches whose activations are held at the peak.
        alternating: 1 where forward and backward of a microbatch follow each other, 0 where both lanes work all the
            time.
        link_bytes_s: Bytes/s to host memory, per direction.
    """

    need_bytes: Array
    end_bytes: Array
    staged_bytes: Array
    host_bytes: Array
    optimizer_bytes: Array
    parameters_bytes: Array
    gradients_bytes: Array
    activations_bytes: Array
    passing_bytes: Array
    products_bytes: Array
    passing_s: Array
    products_s: Array
    forward_s: Array
    backward_s: Array
    update_s: Array
    microbatches: Array
    in_flight: Array
    alternating: Array
    link_bytes_s: Array

    @classmethod
    def of_term(cls, term: CostTerm) -> Load:
        """The load that a term was made of: its inputs are all of it."""
        return cls(**{f.name: np.full(1, term.inputs[f.name]) for f in fields(cls)})

    def mixed(self, other: Load, share: float) -> Load:
        """The load when a share of the layers is as in the other one; everything is linear in them."""
        values = {
            f.name: (1.0 - share) * getattr(self, f.name) + share * getattr(other, f.name)
            for f in fields(self)
        }
        return Load(**values)

    def inputs(self) -> dict[str, Array | float]:
        """All of it, as the inputs of a term."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def missing_bytes(self) -> Array:
        """Bytes over the budget that may neither be away nor be dropped; at most 0 where a plan is possible."""
        states = self.optimizer_bytes + self.parameters_bytes + self.gradients_bytes
        again = np.minimum(self.passing_bytes + self.products_bytes, self.activations_bytes)
        most = np.minimum(states + self.activations_bytes, self.host_bytes + again)
        least = np.minimum(states, self.host_bytes)
        return np.maximum(self.need_bytes - most, self.end_bytes - least)

    def best(self) -> tuple[Away, Array]:
        """What leaves or is computed again in the cheapest of the orders, and the seconds that it costs."""
        found: tuple[Away, Array] | None = None
        for away in self._ways():
            seconds = self.seconds(away)
            if found is None:
                found = away, seconds
                continue
            better = seconds < found[1]
            chosen = {
                f.name: np.where(better, getattr(away, f.name), getattr(found[0], f.name))
                for f in fields(Away)
            }
            found = Away(**chosen), np.where(better, seconds, found[1])
        assert found is not None
        return found

    def _ways(self) -> Iterator[Away]:
        states, link = ("optimizer", "parameters", "gradients"), self.link_bytes_s
        for order in _ORDERS:
            fill = _Fill(self)
            left = np.maximum(self.end_bytes, 0.0)
            for name in states:
                left = fill.take(name, left)
            # What host memory cannot hold has to be computed again.
            short = np.maximum(self.need_bytes - self.host_bytes, 0.0)
            for name in ("passing", "products"):
                short = fill.take(name, short)
            left = np.maximum(self.need_bytes - fill.gone(*fill.bytes), 0.0)
            hidden = self.in_flight * link * np.minimum(self.forward_s, self.backward_s)
            left = fill.take("activations", left, hidden)
            returning = link * self.backward_s - fill.bytes["activations"] / self.in_flight
            left = fill.take("optimizer", left, np.minimum(returning, link * self.update_s))
            for name in order:
                left = fill.take(name, left)
            yield Away(**fill.bytes)

    def seconds(self, a: Away) -> Array:
        """Seconds of what is computed again, and of copies that nothing hides."""
        link, m = self.link_bytes_s, self.microbatches
        moved = a.activations / self.in_flight + a.gradients
        in_turn = self.alternating > 0
        again = a.passing / np.maximum(self.passing_bytes, 1.0) * self.passing_s
        again = again + a.products / np.maximum(self.products_bytes, 1.0) * self.products_s
        # What is computed again is work of backward, beside which copies go on.
        backward_s = self.backward_s + again
        forward_s = np.where(in_turn, self.forward_s, backward_s)
        going = np.maximum(moved, np.where(in_turn, a.parameters, 0.0)) / link
        coming = (moved + np.where(in_turn, 1.0, 2.0) * a.parameters) / link
        forward = np.maximum(going - forward_s, 0.0)
        each = np.maximum(coming - backward_s, 0.0)
        last = np.maximum(coming + a.optimizer / link - backward_s, 0.0)
        written = np.maximum((a.optimizer + a.parameters) / link - self.update_s, 0.0)
        lanes = np.where(
            in_turn,
            m * forward + (m - 1.0) * each + last,
            (m - 1.0) * np.maximum(forward, each) + np.maximum(forward, last),
        )
        return lanes + m * again + written


class _Fill:
    """What leaves, taken bit by bit.

    Attributes:
        bytes: What was taken, by field of `Away`.
        room: Host memory that is left.
    """

    def __init__(self, load: Load) -> None:
        zero: Array = np.zeros(np.shape(load.need_bytes))
        self.bytes = {f.name: zero for f in fields(Away)}
        self.room, self._load = load.host_bytes, load

    def gone(self, *names: str) -> Array:
        """Bytes taken of some kinds."""
        found: Array = np.sum([self.bytes[name] for name in names], axis=0)
        return found

    def take(self, name: str, wanted: Array, most: Array | float = np.inf) -> Array:
        """Take up to `wanted` of a kind, and at most `most`; returns what is still wanted."""
        size = getattr(self._load, name + "_bytes") - self.bytes[name]
        if name in _SHARED:
            size = np.minimum(size, self._load.activations_bytes - self.gone(*_SHARED))
        if name in HELD:
            size = np.minimum(size, self.room)
        size = np.maximum(np.minimum(np.minimum(wanted, size), most), 0.0)
        if name in HELD:
            self.room = self.room - size
        self.bytes[name] = self.bytes[name] + size
        left: Array = wanted - size
        return left


def mixed_term(plain: CostTerm, other: CostTerm, share: float) -> CostTerm | None:
    """The term when a share of the layers is as in the other one; None where nothing moves."""
    load = Load.of_term(plain).mixed(Load.of_term(other), share)
    if load.need_bytes[0] <= 0.0 and load.end_bytes[0] <= 0.0:
        return None
    inputs = {name: float(np.ravel(value)[0]) for name, value in load.inputs().items()}
    return replace(plain, seconds=float(load.best()[1][0]), inputs=inputs)


def put_away(memory: tuple[MemoryTerm, ...], cost: tuple[CostTerm, ...]) -> tuple[MemoryTerm, ...]:
    """Memory terms with what is away moved to host memory, and what is computed again left out.

    Args:
        memory: Terms of everything that the step holds.
        cost: Terms of its time; without one named `COPIES` nothing moves.
    """
    term = next((t for t in cost if t.name == COPIES), None)
    if term is None:
        return memory
    away, _ = Load.of_term(term).best()
    gone = {HELD[name]: float(getattr(away, name)[0]) for name in HELD}
    moved = tuple(
        MemoryTerm(
            name,
            "dram",
            math.ceil(size),
            "away at the peak: what the device's budget does not hold",
        )
        for name, size in gone.items()
        if size >= 1.0
    )
    staged = float(Load.of_term(term).staged_bytes[0])
    if staged >= 1.0:
        told = "made beside the one buffer before it is copied there: the largest result without an address of its own"
        moved = (MemoryTerm("staged results", "hbm", math.floor(staged), told), *moved)
    # Activations first, then what else comes and goes: they are the fullest there.
    gone["activations"] += float(away.passing[0] + away.products[0])
    passing = gone.pop("activations")
    kept = []
    for held in sorted(memory, key=lambda t: t.name != "activations"):
        if held.name in gone:
            size = gone[held.name]
        elif held.name in STAYING:
            size = 0.0
        else:
            size = min(passing, float(held.bytes))
            passing -= size
        kept.append(replace(held, bytes=max(0, held.bytes - math.ceil(size))))
    order = [t.name for t in memory]
    kept.sort(key=lambda t: order.index(t.name))
    return (*(t for t in kept if t.bytes), *moved)
