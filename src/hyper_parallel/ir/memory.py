"""Memory as a program: operators over storages, residency actions between them, and the plan they form.

The unit is the storage (one allocation), not the tensor: a view is an address inside a storage, so it owns no bytes,
pins nothing and needs no rule of its own. A `MemoryProgram` is what a model does in one step; a `MemoryPlan` is the
same work in a chosen order with residency actions in between. Every number of a plan (peak per tier, residency,
validity) comes from `replay`, which walks the actions one by one; nothing is declared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

MemoryTier = Literal["device", "dram", "flash"]
StorageKind = Literal[
    "weight", "expert", "gradient", "optimizer", "activation", "kv", "input", "output", "scratch"
]
Phase = Literal["forward", "backward", "optimizer", "inference"]
MemoryActionKind = Literal[
    "run",
    "recompute",
    "prefetch",
    "store",
    "copy_in",
    "copy_out",
    "wait",
    "detach",
    "free",
    "join",
    "update",
]

MEMORY_TIERS: tuple[MemoryTier, ...] = get_args(MemoryTier)
GRADIENT_PIECES = 16
"""Parts of its columns in which the gradient of an embedding is made beside the arena, one after the other."""
COPIES: dict[str, tuple[MemoryTier, MemoryTier]] = {
    "prefetch": ("dram", "device"),
    "store": ("device", "dram"),
    "copy_in": ("flash", "dram"),
    "copy_out": ("dram", "flash"),
}
"""Source and destination tier of each copying action."""
OF_OPERATORS: tuple[MemoryActionKind, ...] = ("run", "recompute", "update", "join")
"""Actions whose target is an operator; that of all others is a storage."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation.

    Attributes:
        name: Parameter name, state name, or the operator that makes it.
        num_bytes: Requested bytes, before the allocator rounds.
        kind: What it holds; decides nothing by itself, but reports and filters use it.
        at_start: Exists before the first operator of the step.
        at_end: Must exist after the last operator: its owner reads it later.
    """

    name: str
    num_bytes: int
    kind: StorageKind
    at_start: bool = False
    at_end: bool = False

    @property
    def persistent(self) -> bool:
        """Lives across steps, so it has a home tier between them."""
        return self.at_start and self.at_end


@dataclass(frozen=True, slots=True)
class Operator:
    """One indivisible piece of device work.

    Attributes:
        name: Operator name, for people.
        reads: Storages whose content it uses.
        writes: Storages whose content it changes in place (listed in `reads` too when the old content matters).
        allocs: Storages that come to life here; their content is written here.
        seconds: Time on the compute lane.
        flops: Floating-point operations.
        access_bytes: Bytes it moves between the device's memory and its arithmetic units.
        phase: Part of the step it belongs to.
        repeatable: Running it again on the same inputs gives the same bits and has no other effect.
        ordered: Draws random numbers or checks a captured branch: ordered operators keep their mutual order.
        beside: Requested bytes of each allocation that is beside the arena at the same time, because results cannot be
            written at given addresses: they are made there, copied, and dropped. On an accelerator also what a kernel
            takes for itself.
        group: Process group it communicates with; empty: it works alone. With a group it is only begun by `run`, goes
            on beside the compute lane, and is done after its `join`.
        comm_s: Time on the communication lane.
        purpose: What it communicates for, a `Purpose`; empty: FSDP's, or it works alone.
        message: It goes to or comes from single ranks, which may not be there yet: it is joined where its operands are
            needed and nowhere before. Without a group: the end of such messages.
    """

    name: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    allocs: tuple[int, ...] = ()
    seconds: float = 0.0
    flops: float = 0.0
    access_bytes: int = 0
    phase: Phase = "forward"
    repeatable: bool = False
    ordered: bool = False
    beside: tuple[int, ...] = ()
    group: str = ""
    comm_s: float = 0.0
    message: bool = False
    purpose: str = ""

    @property
    def touched(self) -> tuple[int, ...]:
        """Storages that must be on the device while it runs, each once."""
        return tuple(dict.fromkeys((*self.reads, *self.writes, *self.allocs)))


@dataclass(frozen=True)
class MemoryProgram:
    """What one step does, in program order.

    Attributes:
        name: For people: `llama train`.
        storages: All storages; everything refers to them by index.
        operators: All operators in the order the model issued them.
        alignment_bytes: Every allocation is rounded up to a multiple of this; 512 is what CUDA's allocator does, 1
            counts requested bytes.
        address_bytes: Addresses in the arena are multiples of this.
    """

    name: str
    storages: tuple[Storage, ...]
    operators: tuple[Operator, ...]
    alignment_bytes: int = 512
    address_bytes: int = 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rounded bytes of every storage."""
        return tuple(_round_up(s.num_bytes, self.alignment_bytes) for s in self.storages)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Bytes of every storage in the arena: `sizes`, rounded up to whole addresses."""
        return tuple(_round_up(size, self.address_bytes) for size in self.sizes)

    @cached_property
    def staging_bytes(self) -> int:
        """Most bytes that one operator makes beside the arena, on the way to it."""
        beside = (
            sum(_round_up(n, self.alignment_bytes) for n in op.beside) for op in self.operators
        )
        return max(beside, default=0)

    @cached_property
    def touched(self) -> tuple[tuple[int, ...], ...]:
        """`Operator.touched` of every operator."""
        return tuple(op.touched for op in self.operators)

    @cached_property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        """What of `touched` every operator finds when it begins: all but its results."""
        pairs = zip(self.operators, self.touched, strict=True)
        return tuple(tuple(s for s in touched if s not in op.allocs) for op, touched in pairs)

    @property
    def on_device(self) -> tuple[MemoryTier, ...]:
        """Homes that leave every storage on the device."""
        device: MemoryTier = "device"
        return (device,) * len(self.storages)

    @property
    def seconds(self) -> float:
        """Compute seconds of the step without any stall: no wait for copies or for other ranks."""
        return sum(op.seconds for op in self.operators)

    @property
    def communicates(self) -> bool:
        """Whether other ranks take part in some operator."""
        return any(op.group for op in self.operators)

    @property
    def comm_seconds(self) -> float:
        """Seconds of the step on the communication lane."""
        return sum(op.comm_s for op in self.operators)


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True, slots=True)
class MemoryAction:
    """One step of an emitted program.

    Attributes:
        kind: `run` or `recompute` an operator; `update`: begin an operator in host memory, on what is in DRAM; `join`:
            stop until an operator that goes on beside the compute lane is done; start a copy (`prefetch` DRAM to
            device, `store` device to DRAM, `copy_in` flash to DRAM, `copy_out` DRAM to flash); `wait` until the newest
            copy of a storage into `tier` is done; `detach` the storage's bytes in `tier` without a copy; `free` the
            storage in every tier.
        target: Operator index for `OF_OPERATORS`, else storage index.
        tier: For wait: the copy's destination. For detach: the tier that is left.
    """

    kind: MemoryActionKind
    target: int
    tier: MemoryTier = "device"


@dataclass(frozen=True, slots=True)
class Extent:
    """One stay of a storage on the device, with its address.

    Attributes:
        storage: Storage index.
        start: First action (inclusive) during which the bytes are taken.
        stop: First action after which they are free again (exclusive).
        offset_bytes: Address inside the arena; -1 before addresses are assigned.
    """

    storage: int
    start: int
    stop: int
    offset_bytes: int = -1


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided for one idle gap of one storage, and why."""

    storage: int
    what: Literal["offload", "recompute", "stream", "update"]
    first: int
    last: int
    tier: MemoryTier
    reason: str
