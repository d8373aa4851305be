"""Views of a recording: its fullest moment, and its collectives."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist

from hyper_parallel.backends.torch.collectives import current_purpose
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory._recorder import Recording
from hyper_parallel.backends.torch.memory._traffic import (
    group_axes,
    group_of,
    kind_of,
    sent_bytes,
)
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
"""What a storage can hold, in the order of printing."""
_OF_KIND: dict[StorageKind, str] = {
    "weight": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "input": "inputs",
}


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Equal storages that were live at a peak: how many, and what one of them is."""

    count: int
    num_bytes: int
    made_by: str
    shape: tuple[int, ...]
    dtype: str
    category: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment of a step.

    Attributes:
        num_bytes: Live bytes.
        during: Operator that took the last bytes.
        segment: Piece of the program.
        breakdown: Category to live bytes; they add up to `num_bytes`.
        top: Largest live tensors, equal ones together, largest in all first.
    """

    num_bytes: int
    during: str
    segment: str
    breakdown: dict[str, int]
    top: tuple[LiveTensor, ...]


def peak_of(recording: Recording, top: int = 12) -> Peak:
    """The fullest moment of a recorded program, from its replay.

    Args:
        recording: The recorded program.
        top: Largest tensors to list.
    """
    program, actions = recording.program, recording.actions
    replayed = replay(program, program.on_device, actions)
    unit = program.alignment_bytes
    workspace = [0] * len(actions)
    for at, action in enumerate(actions):
        if action.kind == "run":
            beside = program.operators[action.target].beside
            workspace[at] = sum(-(-n // unit) * unit for n in beside)
    totals = [a + b for a, b in zip(replayed.profile, workspace, strict=True)]
    most = max(totals)
    at = totals.index(most)
    operator = program.operators[actions[at].target]
    during = recording.entries[operator.allocs[-1]].name if operator.allocs else operator.name
    held: list[tuple[int, str, tuple[int, ...], str, str]] = []
    for stay in sorted(replayed.residency, key=lambda stay: stay.storage):
        size = program.sizes[stay.storage]
        if stay.start <= at < stay.stop and size:
            entry = recording.entries[stay.storage]
            category = _category(entry, stay, recording)
            held.append((size, _generic(entry.name), entry.shape, entry.dtype, category))
    if workspace[at]:
        during = f"inside {operator.name}"
        held.append((workspace[at], during, (), "", "kernel workspace"))
    breakdown: Counter[str] = Counter()
    for size, *_, category in held:
        breakdown[category] += size
    ranked = sorted(Counter(held).items(), key=lambda item: -item[0][0] * item[1])[:top]
    return Peak(
        most,
        during,
        _segment(recording, at)[1],
        {name: breakdown[name] for name in CATEGORIES if breakdown[name]},
        tuple(LiveTensor(count, *group) for group, count in ranked),
    )


def _segment(recording: Recording, action: int) -> tuple[int, str]:
    """Number and name of the piece of the program that an action is part of."""
    number = bisect_right([begin for begin, _ in recording.segments], action) - 1
    return number, recording.segments[number][1]


def _category(entry: Entry, stay: Extent, recording: Recording) -> str:
    """What a storage holds: as named, else by its life."""
    if entry.kind in _OF_KIND:
        return _OF_KIND[entry.kind]
    if entry.resized:
        return "gathered parameters"
    if entry.recomputed:
        return "recomputed activations"
    born, name = _segment(recording, stay.start)
    outlives = entry.at_end or _segment(recording, stay.stop - 1)[0] > born
    if name == "forward" and outlives:
        return "activations"
    return "communication buffers" if entry.sent else "temporaries"


def _generic(name: str) -> str:
    """A parameter's name with `*` for the layer index, so that equal ones fall together."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def collectives_of(
    recording: Recording, rank: int, *meshes: Mesh, fsdp_axes: tuple[str, ...] = ()
) -> tuple[Collective, ...]:
    """The collectives of a recorded program, equal ones together, in the order in which they first happened.

    Groups of one rank send nothing and are left out. A group that is no group of a mesh is listed with the axes
    `("other",)`, so that nothing goes uncounted.

    Args:
        recording: The recorded program.
        rank: The rank it was recorded on.
        meshes: Meshes that name the groups, the first one first.
        fsdp_axes: Axes over which FSDP cuts parameters that are no experts'.
    """
    counted = (
        (operator.name, recording.groups.get(operator.group, ()), operator.purpose, operator.access_bytes)
        for operator in recording.program.operators
    )  # fmt: skip
    return _added_up(counted, group_axes(rank, *meshes), fsdp_axes)


def _added_up(
    counted: Iterable[tuple[str, tuple[int, ...], str, int]],
    axes_of: dict[frozenset[int], tuple[str, ...]],
    fsdp_axes: tuple[str, ...] = (),
) -> tuple[Collective, ...]:
    """Collectives of (operator's name, ranks, purpose, sent bytes)."""
    calls: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    sent: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    for name, ranks, purpose, num_bytes in counted:
        kind = kind_of(name) if len(ranks) > 1 else None
        if kind is not None:
            axes = axes_of.get(frozenset(ranks), ("other",))
            key = kind, axes, purpose or _of_fsdp(kind, axes, fsdp_axes)
            calls[key] += 1
            sent[key] += num_bytes
    return tuple(Collective(*key, count, sent[key]) for key, count in calls.items())


def _of_fsdp(kind: str, axes: tuple[str, ...], fsdp_axes: tuple[str, ...]) -> Purpose:
    """What FSDP communicates for, which states no purpose: each of its kinds has one."""
    if kind == "all_reduce":
        return Purpose.REPLICA_GRADIENTS
    if axes == fsdp_axes:
        return Purpose.FSDP_PARAMETERS if kind == "all_gather" else Purpose.FSDP_GRADIENTS
    return Purpose.EXPERT_PARAMETERS if kind == "all_gather" else Purpose.EXPERT_GRADIENTS


class CommCounter:
    """Context in which every collective of a rank is counted, by kind and mesh axes; see `collectives_of`.

    Args:
        mesh: Mesh that names the groups.
        rank: Rank of this process on the mesh.
        others: Further meshes over the same ranks, for groups that the first has no name for.
    """

    def __init__(self, mesh: Mesh, rank: int, *others: Mesh) -> None:
        self._axes = group_axes(rank, mesh, *others)
        self._counted: list[tuple[str, tuple[int, ...], str, int]] = []
        self._mode = OperatorMode(self._operator)

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if (group := group_of(func, args)) is not None:
            ranks = tuple(dist.get_process_group_ranks(group))
            sent = sent_bytes(func, args, group)
            self._counted.append((func.__name__, ranks, current_purpose() or "", sent))
        return out

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What was counted so far."""
        return _added_up(self._counted, self._axes)

    @property
    def calls(self) -> Counter[tuple[str, tuple[str, ...]]]:
        """(kind, axes) to the number of calls."""
        calls: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for c in self.collectives:
            calls[c.kind, c.axes] += c.count
        return calls

    @property
    def sent_bytes(self) -> Counter[tuple[str, tuple[str, ...]]]:
        """(kind, axes) to the bytes this rank sends."""
        sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for c in self.collectives:
            sent[c.kind, c.axes] += c.sent_bytes
        return sent

    def __enter__(self) -> Self:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
