"""Memory program: the operators of one step and the storages they use, as input of memory planning.

A storage is one allocation. Tensors are not modelled: a view is an address inside a storage and owns no bytes. A
`MemoryPlan` is a memory program in a chosen order, with residency actions (copies, releases, recomputation) between the
operators. `replay` computes the peak per tier from the actions.

Pinning host memory is slow, so a step allocates none: for every size, the maximum number of buffers in use is allocated
before the step. Pinned allocators round requests up to a power of two, so buffers are parts of slabs of these sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from hyper_parallel.units import round_up

MemoryTier = Literal["device", "dram", "flash"]
StorageKind = Literal["weight", "expert", "gradient", "optimizer", "activation", "kv", "input", "output", "scratch"]
Phase = Literal["forward", "backward", "optimizer", "inference"]
MemoryActionKind = Literal[
    "run", "recompute", "prefetch", "store", "copy_in", "copy_out", "wait", "detach", "free", "join",
]  # fmt: skip

MEMORY_TIERS: tuple[MemoryTier, ...] = get_args(MemoryTier)
GRADIENT_PIECES = 16
"""Maximum number of column blocks of an embedding's gradient; they are computed one at a time, outside the arena."""
COPIES: dict[str, tuple[MemoryTier, MemoryTier]] = {
    "prefetch": ("dram", "device"),
    "store": ("device", "dram"),
    "copy_in": ("flash", "dram"),
    "copy_out": ("dram", "flash"),
}
"""Source and destination tier of each copying action."""
OF_OPERATORS: tuple[MemoryActionKind, ...] = ("run", "recompute", "join")
"""Actions whose target is an operator; all other actions have a storage as target."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Device allocation of a step, which a plan may move between memory tiers.

    Attributes:
        name: Parameter name, state name, or name of the operator that allocates it.
        num_bytes: Requested bytes, before rounding by the allocator.
        kind: Category of the content.
        at_start: Whether the storage exists before the first operator of the step.
        at_end: Whether the storage must exist after the last operator, for use after the step.
    """

    name: str
    num_bytes: int
    kind: StorageKind
    at_start: bool = False
    at_end: bool = False

    @property
    def persistent(self) -> bool:
        """True if the storage exists between steps, and therefore has a home tier."""
        return self.at_start and self.at_end


@dataclass(frozen=True, slots=True)
class Operator:
    """Kernel call or collective of a step, which reads, changes or allocates storages.

    Attributes:
        name: Displayed name of the operator.
        reads: Indices of the storages that the operator reads.
        writes: Storages that the operator changes in place (also listed in `reads` if the old content matters).
        allocs: Storages that the operator allocates and writes: its results.
        seconds: Seconds on the compute lane.
        flops: Floating-point operations.
        access_bytes: Bytes moved between device memory and arithmetic units; for a collective, bytes sent.
        phase: Phase of the step.
        repeatable: Whether a second run on equal inputs gives bitwise equal results without side effects.
        ordered: Whether the operator must keep its order relative to other ordered operators: it draws random numbers,
            communicates, or checks that the step still takes the recorded branch.
        scratch_bytes: Requested bytes of each concurrent staging allocation outside the arena: results that cannot be
            written to a planned address, and workspace of the kernel.
        group: Process group of the collective; empty: no communication. A collective is started by `run`, proceeds in
            parallel to the compute lane, and ends at its `join`.
        comm_s: Seconds on the communication lane.
        message: Whether the operator is a point-to-point message. Its `join` is as late as its operands permit, because
            the peer may be late. A message without a group is the wait for earlier messages.
        purpose: `Purpose` of the communication; empty: FSDP, or no communication.
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
    scratch_bytes: tuple[int, ...] = ()
    group: str = ""
    comm_s: float = 0.0
    message: bool = False
    purpose: str = ""

    @property
    def touched(self) -> tuple[int, ...]:
        """Storages that must be on the device while the operator runs, without duplicates."""
        return tuple(dict.fromkeys((*self.reads, *self.writes, *self.allocs)))


@dataclass(frozen=True)
class MemoryProgram:
    """Operators of one step, in program order.

    Attributes:
        name: Displayed name: `llama train`.
        storages: All storages; operators and actions refer to them by index.
        operators: All operators, in the order in which the model runs them.
        alignment_bytes: Unit to which allocations are rounded up: 512 as in PyTorch's CUDA allocator, 1: no rounding.
        address_bytes: Alignment of addresses in the arena.
    """

    name: str
    storages: tuple[Storage, ...]
    operators: tuple[Operator, ...]
    alignment_bytes: int = 512
    address_bytes: int = 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every storage, rounded up to `alignment_bytes`."""
        return tuple(round_up(s.num_bytes, self.alignment_bytes) for s in self.storages)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Bytes of every storage in the arena: `sizes`, rounded up to `address_bytes`."""
        return tuple(round_up(size, self.address_bytes) for size in self.sizes)

    @cached_property
    def staging_bytes(self) -> int:
        """Bytes of staging allocations outside the arena: the largest sum of one operator's rounded `scratch_bytes`."""
        sizes = (sum(round_up(n, self.alignment_bytes) for n in op.scratch_bytes) for op in self.operators)
        return max(sizes, default=0)

    @cached_property
    def touched(self) -> tuple[tuple[int, ...], ...]:
        """`Operator.touched` of every operator."""
        return tuple(op.touched for op in self.operators)

    @cached_property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        """Per operator, the storages in `touched` that exist before it runs: all except its results."""
        pairs = zip(self.operators, self.touched, strict=True)
        return tuple(tuple(s for s in touched if s not in op.allocs) for op, touched in pairs)

    @property
    def on_device(self) -> tuple[MemoryTier, ...]:
        """Tier `device` for every storage: home tiers of a plan without offload between steps."""
        device: MemoryTier = "device"
        return (device,) * len(self.storages)

    @property
    def seconds(self) -> float:
        """Sum of the operators' seconds; waits for copies and other ranks are not included."""
        return sum(op.seconds for op in self.operators)

    @property
    def communicates(self) -> bool:
        """True if an operator communicates with other ranks."""
        return any(op.group for op in self.operators)

    @property
    def comm_seconds(self) -> float:
        """Seconds of the step on the communication lane."""
        return sum(op.comm_s for op in self.operators)


@dataclass(frozen=True, slots=True)
class MemoryAction:
    """Action of a memory plan: an operator, a copy, a wait or a release.

    Attributes:
        kind: `run` and `recompute` run an operator, `join` waits for the collective that an operator started. Four
            kinds start a copy: `prefetch` (host to device), `store` (device to host), `copy_in` (file to host) and
            `copy_out` (host to file). `wait` waits for the latest copy of a storage into `tier`. `detach` releases the
            bytes of a storage in `tier`, `free` its bytes in every tier.
        target: Operator index for `OF_OPERATORS`, else storage index.
        tier: For `wait`: destination of the copy. For `detach`: the tier whose bytes are released. Unused otherwise.
    """

    kind: MemoryActionKind
    target: int
    tier: MemoryTier = "device"


@dataclass(frozen=True, slots=True)
class Extent:
    """Live range of a storage on the device, with its address.

    Attributes:
        storage: Storage index.
        start: First action during which the bytes are allocated (inclusive).
        stop: First action at which they are free (exclusive).
        offset_bytes: Address inside the arena; -1 before addresses are assigned.
    """

    storage: int
    start: int
    stop: int
    offset_bytes: int = -1


@dataclass(frozen=True, slots=True)
class Choice:
    """Decision to offload, recompute or stream a storage between two uses, or before the first or after the last use.

    Attributes:
        storage: Index of the storage.
        what: The decision. `stream`: the storage starts the step off the device.
        first: Position of the first of the two uses in the order of operators; -1 for `stream`.
        last: Position of the second use; the number of operators: the end of the step.
        tier: Memory that holds the storage in the gap. With `recompute` none does, and the value is `device`.
        reason: Phrase for the report of the plan.
    """

    storage: int
    what: Literal["offload", "recompute", "stream"]
    first: int
    last: int
    tier: MemoryTier
    reason: str


class HostBuffers:
    """Number of pinned host buffers of every size: in use now, and the maximum so far.

    Args:
        reserved: Dict from size in bytes to the number of buffers for which `fits` keeps room.

    Attributes:
        most: Dict from size in bytes to the maximum number of buffers in use so far.
    """

    def __init__(self, reserved: Mapping[int, int] | None = None) -> None:
        self._now: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self._reserved = Counter(reserved or {})
        self._fitting: dict[tuple[int, int], bool] = {}  # cleared when `most` grows

    def allocate(self, size: int) -> None:
        """Count one more buffer of `size` bytes as in use."""
        self._now[size] += 1
        if self._now[size] > self.most[size]:
            self.most[size] += 1
            self._fitting.clear()

    def release(self, size: int) -> None:
        """Count one buffer of `size` bytes as free again."""
        self._now[size] -= 1

    def fits(self, size: int, capacity_bytes: int) -> bool:
        """Return whether a buffer of `size` bytes is free or reserved, or slabs with one more fit `capacity_bytes`."""
        if self._now[size] < max(self.most[size], self._reserved[size]):
            return True
        asked = size, capacity_bytes
        if asked not in self._fitting:
            more = (self.most | self._reserved) + Counter({size: 1})
            self._fitting[asked] = slab_bytes(more) <= capacity_bytes
        return self._fitting[asked]


class Residency:
    """Record of the memory tiers that hold each storage, updated by the actions of a plan.

    A copy allocates its destination when it is issued, the results of an operator are allocated before it runs, and
    `detach` and `free` release bytes. Actions are not checked; see `memory_plan.replay`.

    Args:
        program: Program with storages and operators.
        reserved: See `HostBuffers`.

    Attributes:
        valid: Per storage, a dict from each tier that has its bytes to whether the content there is the newest.
        live: Dict from tier to its current bytes.
        peaks: Dict from tier to its peak bytes.
        buffers: Counts of DRAM buffers.
    """

    def __init__(self, program: MemoryProgram, reserved: Mapping[int, int] | None = None) -> None:
        self._operators, self._sizes = program.operators, program.sizes
        self.valid: list[dict[MemoryTier, bool]] = [{} for _ in program.storages]
        self.live: dict[MemoryTier, int] = dict.fromkeys(MEMORY_TIERS, 0)
        self.peaks: dict[MemoryTier, int] = dict.fromkeys(MEMORY_TIERS, 0)
        self.buffers = HostBuffers(reserved)

    def allocate(self, s: int, tier: MemoryTier) -> None:
        """Allocate a storage in a tier if it is absent there, and mark the content in this tier as the newest."""
        tiers = self.valid[s]
        if tier not in tiers:
            size = self._sizes[s]
            live = self.live[tier] = self.live[tier] + size
            if live > self.peaks[tier]:
                self.peaks[tier] = live
            if tier == "dram":
                self.buffers.allocate(size)
        tiers[tier] = True

    def drop(self, s: int, tier: MemoryTier) -> None:
        """Release the bytes of a storage in a tier."""
        del self.valid[s][tier]
        self.live[tier] -= self._sizes[s]
        if tier == "dram":
            self.buffers.release(self._sizes[s])

    def apply(self, action: MemoryAction) -> None:
        """Update the residency by one action."""
        kind, target = action.kind, action.target
        if kind in ("run", "recompute"):
            for s in self._operators[target].allocs:
                self.allocate(s, "device")
            for s in self._operators[target].writes:
                tiers = self.valid[s]
                for tier in tiers:
                    tiers[tier] = tier == "device"
        elif kind in COPIES:
            self.allocate(target, COPIES[kind][1])
        elif kind == "detach":
            self.drop(target, action.tier)
        elif kind == "free":
            for tier in list(self.valid[target]):
                self.drop(target, tier)


def slabs(buffers: Mapping[int, int]) -> list[tuple[int, dict[int, int]]]:
    """Return the slabs of pinned host memory for `buffers`, a dict from size to number of buffers.

    Returns:
        Per slab, its bytes (a power of two) and a dict from size to the number of buffers cut from it, in order.
    """
    left = {size: buffers[size] for size in sorted(buffers, reverse=True) if size}
    result = []
    while any(left.values()):
        largest = next(size for size, count in left.items() if count)
        total = sum(size * count for size, count in left.items())
        # The largest power of two that the remaining buffers fill, but at least the largest buffer.
        slab = max(1 << (total.bit_length() - 1), 1 << (largest - 1).bit_length())
        parts, free = dict[int, int](), slab
        for size in left:
            if count := min(left[size], free // size):
                parts[size] = count
                left[size] -= count
                free -= size * count
        result.append((slab, parts))
    return result


def slab_bytes(buffers: Mapping[int, int]) -> int:
    """Return the total bytes of the slabs for `buffers`, a dict from size to number of buffers."""
    return sum(slab for slab, _ in slabs(buffers))
