"""Seconds that a step takes longer when a memory plan keeps it within the device's memory.

What exceeds the memory lies in host memory while nothing needs it, or is dropped and computed again. Copies run beside
the work, one lane in each direction, and cost what does not fit under the work. Of one microbatch:

    activations, gradients   out in forward, before the peak; in again in backward
    parameters               at home in host memory: in for forward, dropped, in again for backward; once out, updated
    optimizer states         in during the last backward, out once updated
    computed again           element-wise results, and matmul results, at the seconds of their forward

A global-norm clip needs every gradient, so nothing can be updated, and leave, before the last backward ends. With
several microbatches in flight forward and backward alternate, and a lane has the seconds of both. What leaves, and what
is computed again, is the cheapest choice of all, in fractions. Only lanes are counted: no latency, no copy that comes
early or late, no room that is lost between addresses, and no storage that moves as a whole.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from hyper_parallel.cost._candidates import Array
from hyper_parallel.ir import CostTerm, MemoryTerm

COPIES: Final = "offload copies"
"""Name of the term."""
FORMULA: Final = (
    "m (max(0, out / B - forward) + max(0, in / B - backward - again) + again) + max(0, updated / B - update): bytes "
    "that leave, return and are written back beside the work of m microbatches on a link of B, and what is computed "
    "again"
)
SOURCE: Final = "topology; bytes that a lane carries beside the work, docs/explanation/planner.md"
HELD: Final = {
    "optimizer": "optimizer states",
    "parameters": "parameters",
    "gradients": "gradients",
    "activations": "activations",
}
"""What leaves, and the memory terms that it is part of."""

FREE, STATES, WAITING = range(3)
"""What is copied first: what waits for nothing; states, which only the last microbatch waits for; all but these."""

STAYING: Final = ("device context",)
"""Memory terms that no plan moves."""


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
    """What decides the copies of a step."""

    need_bytes: Array  # bytes over the budget at the peak, `staged_bytes` included
    end_bytes: Array  # the same when no activations are left
    staged_bytes: Array  # what a memory plan makes beside its buffer before it is copied there
    host_bytes: Array
    optimizer_bytes: Array  # optimizer states that may be away
    parameters_bytes: Array  # parameters that may be away
    gradients_bytes: Array  # gradients that may be away
    activations_bytes: Array  # activations that may be away, of all microbatches in flight
    passing_bytes: Array  # those of them that element-wise kernels made
    products_bytes: Array  # those of them that matmuls made
    passing_s: Array  # seconds to make the former again, of one microbatch
    products_s: Array  # the same for the latter
    forward_s: Array  # seconds beside which a microbatch's bytes may leave
    backward_s: Array  # seconds beside which they may return
    update_s: Array  # seconds beside which updated states may leave
    microbatches: Array  # microbatches of a step
    in_flight: Array  # microbatches whose activations are held at the peak
    # 1 where forward and backward of a microbatch follow each other, 0 where both lanes work all the time
    alternating: Array
    link_bytes_s: Array  # bytes/s to host memory, per direction

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
        """What leaves or is computed again at the least cost, and the seconds that it costs."""
        ways = self._ways()
        seconds = self.seconds(ways)
        chosen = np.expand_dims(np.argmin(seconds, axis=0), 0)

        def of(values: Array) -> Array:
            spread = np.broadcast_to(values, seconds.shape)
            found: Array = np.take_along_axis(spread, chosen, axis=0)[0]
            return found

        return Away(**{f.name: of(getattr(ways, f.name)) for f in fields(Away)}), of(seconds)

    def _ways(self) -> Away:
        """Ways to keep the budget, along a first axis; the cheapest is among them, or close to one.

        Lanes work beside each other, and each costs what it carries beyond its seconds. So once it is decided how much
        is computed again, it is known what is cheapest to copy: first what waits for nothing, then what waits for the
        last update only, then what waits in every microbatch. The cost is convex and piecewise linear in what is
        computed again, so only the corners are tried.
        """
        link, micro = self.link_bytes_s, self.in_flight
        in_turn = self.alternating > 0
        first, passing, products = self._corners()
        fill = _Fill(self, passing, products)
        forward_s = self._lanes_s(passing, products)[0]
        taken = fill.bytes

        def out() -> Array:
            """Bytes of a microbatch that may still leave beside forward."""
            room = link * forward_s - taken["activations"] / micro - taken["gradients"]
            return np.maximum(room, 0.0)

        def written() -> Array:
            """Updated bytes that may still leave beside the update."""
            room: Array = link * self.update_s - taken["optimizer"] - taken["parameters"]
            return room

        def streamed() -> Array:
            """Parameters that may still come in beside forward."""
            return np.where(in_turn, link * forward_s - taken["parameters"], out() / 2.0)

        def spread(left: Array, *kinds: str) -> None:
            """Take what is wanted of some kinds, those that wait less first."""

            def take(name: str, most: Array | None = None) -> None:
                if name in kinds:
                    fill.take(name, left, most)

            take("activations", np.where(first == WAITING, np.inf, (first == FREE) * micro * out()))
            take("gradients", np.where(first == WAITING, np.inf, (first == FREE) * out()))
            take("optimizer", np.where(first == STATES, np.inf, written()))
            take("activations", micro * out())
            take("gradients", out())
            take("parameters", np.minimum(streamed(), written()))
            take("optimizer")
            take("parameters", streamed())
            # What waits to leave, beside parameters that wait to come in.
            waiting = taken["parameters"] - link * forward_s
            take("activations", np.where(in_turn, micro * waiting, 0.0))
            take("parameters", np.where(in_turn, left / 2.0, 0.0))
            for name in ("activations", "gradients", "parameters"):
                take(name)

        zero = np.zeros(passing.shape)
        if (self.end_bytes > 0.0).any():
            spread(np.maximum(self.end_bytes, zero), "optimizer", "parameters", "gradients")
        spread(np.maximum(self.need_bytes - fill.gone(), zero), *HELD)
        return Away(**taken)

    def _corners(self) -> tuple[Array, Array, Array]:
        """What goes first, and bytes that element-wise kernels and matmuls make again, along a first axis.

        The corners of the cost are where a lane just has no copies to wait for, or all of a kind is away. Of all pairs
        of these and of what goes first, those left out are never the cheapest by more than a hundredth of the step.
        """
        need, end, link = self.need_bytes, np.maximum(self.end_bytes, 0.0), self.link_bytes_s
        most = np.minimum(self.passing_bytes + self.products_bytes, self.activations_bytes)
        passing = np.minimum(self.passing_bytes, most)
        cheap = self.passing_s / np.maximum(self.passing_bytes, 1.0)
        dear = self.products_s / np.maximum(self.products_bytes, 1.0)
        # Bytes of all microbatches in flight that a second of backward brings back.
        rate = self.in_flight * link

        def returning(states: Array, beside: Array) -> Array:
            """Bytes that are made again where all but states return beside backward, with some of these beside it."""
            over = need - states - self.in_flight * (link * self.backward_s - beside)
            some = over / (1.0 + rate * cheap)
            more = (over - passing * (1.0 + rate * cheap)) / (1.0 + rate * dear)
            return np.where(some <= passing, some, passing + more)

        none, optimizer = 0.0 * need, self.optimizer_bytes
        leaving, written = rate * self.forward_s, link * self.update_s
        states = optimizer + np.minimum(self.parameters_bytes, link * self.forward_s)
        tried = {
            FREE: (
                none, passing, need - end, returning(end, end),
                returning(np.maximum(end, np.minimum(optimizer, written)), none),
                need - leaving - np.minimum(np.maximum(end, written), states),
                need - leaving - np.maximum(end, optimizer), need - leaving - np.maximum(end, states),
            ),
            STATES: (passing, need - end, returning(optimizer, none)),
            WAITING: (passing, need - end),
        }  # fmt: skip
        first = np.repeat(list(tried), [len(corners) for corners in tried.values()])
        again = np.stack(np.broadcast_arrays(*itertools.chain.from_iterable(tried.values())))
        # What host memory cannot hold has to be made again.
        again = np.maximum(np.minimum(np.maximum(again, need - self.host_bytes), most), 0.0)
        return (
            first.reshape(-1, *(1,) * (again.ndim - 1)), np.minimum(again, passing),
            np.maximum(again - passing, 0.0),
        )  # fmt: skip

    def _lanes_s(self, passing: Array, products: Array) -> tuple[Array, Array, Array]:
        """Seconds of both lanes in forward and backward, and those of what is computed again.

        That is work of backward, beside which copies go on.
        """
        again = passing / np.maximum(self.passing_bytes, 1.0) * self.passing_s
        again = again + products / np.maximum(self.products_bytes, 1.0) * self.products_s
        backward_s = self.backward_s + again
        return np.where(self.alternating > 0, self.forward_s, backward_s), backward_s, again

    def seconds(self, a: Away) -> Array:
        """Seconds of what is computed again, and of copies that nothing hides."""
        link, m = self.link_bytes_s, self.microbatches
        moved = a.activations / self.in_flight + a.gradients
        in_turn = self.alternating > 0
        forward_s, backward_s, again = self._lanes_s(a.passing, a.products)
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
    """What leaves, taken bit by bit, beside what is computed again.

    Attributes:
        bytes: What was taken, by field of `Away`.
        rest: What may still be taken, by field.
        room: Host memory that is left.
    """

    def __init__(self, load: Load, passing: Array, products: Array) -> None:
        shape = passing.shape
        copied = {name: getattr(load, name + "_bytes") for name in HELD}
        self.bytes = {name: np.zeros(shape) for name in HELD}
        self.bytes |= {"passing": passing, "products": products}
        self.rest = {name: np.broadcast_to(size, shape).copy() for name, size in copied.items()}
        self.rest["activations"] -= passing
        self.rest["activations"] -= products
        self.room = np.broadcast_to(load.host_bytes, shape).copy()

    def gone(self) -> Array:
        """Bytes of all kinds."""
        return np.asarray(sum(self.bytes.values()))

    def take(self, name: str, wanted: Array, most: Array | None = None) -> None:
        """Take up to `wanted` of a kind, which becomes less by that, and at most `most`."""
        size = np.minimum(wanted, self.rest[name])
        np.minimum(size, self.room, out=size)
        if most is not None:
            np.minimum(size, most, out=size)
        np.maximum(size, 0.0, out=size)
        for left in (wanted, self.rest[name], self.room):
            left -= size
        self.bytes[name] += size


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
