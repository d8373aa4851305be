"""Summaries of a recording: its memory peak, and its collectives."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hyper_parallel.backends.torch.collectives import current_purpose
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory._recorder import Recording
from hyper_parallel.backends.torch.memory._traffic import group_axes, group_of, kind_of, sent_bytes
from hyper_parallel.backends.torch.memory.storages import Entry
from hyper_parallel.ir import Collective, Extent, Mesh, Purpose, StorageKind, replay

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "recomputed activations",
    "gathered parameters",
    "communication buffers",
    "temporaries",
    "kernel workspace",
    "inputs",
)
"""Categories of a storage's content, in the order of printing."""
_OF_KIND: dict[StorageKind, str] = {
    "weight": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "input": "inputs",
}


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Equal storages that are live at a peak: their count, and the properties of one of them."""

    count: int
    num_bytes: int
    made_by: str
    shape: tuple[int, ...]
    dtype: str
    category: str


@dataclass(frozen=True, slots=True)
class Peak:
    """Memory peak of a step.

    Attributes:
        num_bytes: Live bytes.
        during: Operator that allocated the last bytes.
        segment: Segment of the program.
        breakdown: Category to live bytes; they add up to `num_bytes`.
        top: Largest live tensors, grouped by equal properties, largest total first.
    """

    num_bytes: int
    during: str
    segment: str
    breakdown: dict[str, int]
    top: tuple[LiveTensor, ...]


_LISTED = 12
"""Largest tensors of a peak that are listed: as many lines as half a terminal holds."""


def peak_of(recording: Recording) -> Peak:
    """Return the memory peak of a recorded program, from its replay."""
    program, actions = recording.program, recording.actions
    replayed = replay(program, program.on_device, actions)
    unit = program.alignment_bytes
    workspace = [0] * len(actions)
    for position, action in enumerate(actions):
        if action.kind == "run":
            scratch_bytes = program.operators[action.target].scratch_bytes
            workspace[position] = sum(-(-n // unit) * unit for n in scratch_bytes)
    totals = [a + b for a, b in zip(replayed.profile, workspace, strict=True)]
    most = max(totals)
    position = totals.index(most)
    operator = program.operators[actions[position].target]
    during = recording.entries[operator.allocs[-1]].name if operator.allocs else operator.name
    live: list[tuple[int, str, tuple[int, ...], str, str]] = []
    for live_range in sorted(replayed.residency, key=lambda live_range: live_range.storage):
        size = program.sizes[live_range.storage]
        if live_range.start <= position < live_range.stop and size:
            entry = recording.entries[live_range.storage]
            category = _category(entry, live_range, recording)
            live.append((size, _generic(entry.name), entry.shape, entry.dtype, category))
    if workspace[position]:
        during = f"inside {operator.name}"
        live.append((workspace[position], during, (), "", "kernel workspace"))
    breakdown: Counter[str] = Counter()
    for size, *_, category in live:
        breakdown[category] += size
    ranked = sorted(Counter(live).items(), key=lambda item: -item[0][0] * item[1])[:_LISTED]
    return Peak(
        most,
        during,
        _segment(recording, position)[1],
        {name: breakdown[name] for name in CATEGORIES if breakdown[name]},
        tuple(LiveTensor(count, *group) for group, count in ranked),
    )


def _segment(recording: Recording, action: int) -> tuple[int, str]:
    """Return number and name of the segment that contains an action."""
    number = bisect_right([begin for begin, _ in recording.segments], action) - 1
    return number, recording.segments[number][1]


def _category(entry: Entry, live_range: Extent, recording: Recording) -> str:
    """Return the category of a storage: by its kind if it is named, else by its live range."""
    if entry.kind in _OF_KIND:
        return _OF_KIND[entry.kind]
    if entry.resized:
        return "gathered parameters"
    if entry.recomputed:
        return "recomputed activations"
    first_segment, name = _segment(recording, live_range.start)
    outlives = entry.at_end or _segment(recording, live_range.stop - 1)[0] > first_segment
    if name == "forward" and outlives:
        return "activations"
    return "communication buffers" if entry.sent else "temporaries"


def _generic(name: str) -> str:
    """Return a parameter's name with `*` for the layer index, so that equal layers form one group."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def collectives_of(
    recording: Recording, rank: int, *meshes: Mesh, fsdp_axes: tuple[str, ...] = ()
) -> tuple[Collective, ...]:
    """Return the collectives of a recorded program, grouped by kind, axes and purpose, in order of first occurrence.

    Groups of one rank send nothing and are excluded. A group outside of the meshes is listed with the axes
    `("other",)`, so that its traffic is counted.

    Args:
        recording: The recorded program.
        rank: Rank of the recording.
        meshes: Meshes that name the groups, in order of priority.
        fsdp_axes: Axes over which FSDP shards the non-expert parameters.
    """
    records = (
        (operator.name, recording.groups.get(operator.group, ()), operator.purpose, operator.access_bytes)
        for operator in recording.program.operators
    )  # fmt: skip
    return _group_collectives(records, group_axes(rank, *meshes), fsdp_axes)


def _group_collectives(
    records: Iterable[tuple[str, tuple[int, ...], str, int]],
    axes_of: dict[frozenset[int], tuple[str, ...]],
    fsdp_axes: tuple[str, ...] = (),
) -> tuple[Collective, ...]:
    """Group (operator's name, ranks, purpose, sent bytes) into collectives with their counts and sums."""
    calls: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    sent: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    for name, ranks, purpose, num_bytes in records:
        kind = kind_of(name) if len(ranks) > 1 else None
        if kind is not None:
            axes = axes_of.get(frozenset(ranks), ("other",))
            key = kind, axes, purpose or _fsdp_purpose(kind, axes, fsdp_axes)
            calls[key] += 1
            sent[key] += num_bytes
    return tuple(Collective(*key, count, sent[key]) for key, count in calls.items())


def _fsdp_purpose(kind: str, axes: tuple[str, ...], fsdp_axes: tuple[str, ...]) -> Purpose:
    """Return the purpose of a collective of FSDP, which states none: kind and axes determine it."""
    if kind == "all_reduce":
        return Purpose.REPLICA_GRADIENTS
    if axes == fsdp_axes:
        return Purpose.FSDP_PARAMETERS if kind == "all_gather" else Purpose.FSDP_GRADIENTS
    return Purpose.EXPERT_PARAMETERS if kind == "all_gather" else Purpose.EXPERT_GRADIENTS


class CommCounter(OperatorMode):
    """Context that counts every collective of a rank by kind and mesh axes; see `collectives_of`.

    Args:
        mesh: Mesh that names the groups.
        rank: Rank of this process on the mesh.
        extra_meshes: Further meshes over the same ranks, for groups that are not groups of `mesh`.
    """

    def __init__(self, mesh: Mesh, rank: int, *extra_meshes: Mesh) -> None:
        super().__init__(self._operator)
        self._axes = group_axes(rank, mesh, *extra_meshes)
        self._records: list[tuple[str, tuple[int, ...], str, int]] = []

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if (group := group_of(func, args)) is not None:
            ranks = tuple(dist.get_process_group_ranks(group))
            sent = sent_bytes(func, args, group)
            self._records.append((func.__name__, ranks, current_purpose() or "", sent))
        return out

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives so far."""
        return _group_collectives(self._records, self._axes)

    @property
    def calls(self) -> Counter[tuple[str, tuple[str, ...]]]:
        """Number of calls by (kind, axes)."""
        calls: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for c in self.collectives:
            calls[c.kind, c.axes] += c.count
        return calls

    @property
    def sent_bytes(self) -> Counter[tuple[str, tuple[str, ...]]]:
        """Bytes that this rank sends by (kind, axes)."""
        sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for c in self.collectives:
            sent[c.kind, c.axes] += c.sent_bytes
        return sent
