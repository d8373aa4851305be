"""Observers of a rank's step: a recorder of its program, a watch of its live bytes, and summaries of a recording.

The recorder sits below autograd. It records the operators of forward, backward, FSDP, clipping and the optimizer, on
plain local tensors, real or fake. Only operators that allocate or write bytes, need workspace or communicate become
part of the program. `StorageWatch` counts live and peak bytes of a running step without a program, in less time.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.backends.torch.collectives import current_purpose
from hyper_parallel.backends.torch.memory._collectives import group_axes, group_of, kind_of, sent_bytes
from hyper_parallel.backends.torch.memory._fake_values import Workspace, run_with_known_values
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory.operators import (
    COMMUNICATION,
    EMPTY,
    Entry,
    Storages,
    count_flops,
    written_leaves,
)
from hyper_parallel.backends.torch.tensor_trees import tensors_in
from hyper_parallel.ir import (
    Collective,
    Extent,
    MemoryAction,
    MemoryProgram,
    Mesh,
    Operator,
    Purpose,
    StorageKind,
    replay,
)
from hyper_parallel.units import round_up


def shared_tensors(func: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Return the operands of a collective, or the first operand of an FSDP operator; [] for other operators."""
    if func.namespace == "fsdp":
        return tensors[:1]
    return tensors if func.namespace in COMMUNICATION else []


@functools.cache
def _properties(func: Any) -> tuple[bool, bool, bool]:
    """Return whether an operator (returns a view, belongs to ATen, has resizable results).

    Results are resizable if FSDP may resize their storages later.
    """
    # An operator that returns its input may return a storage that existed before, which FSDP may have refilled.
    returns_input = any(returned.alias_info is not None for returned in func._schema.returns)
    return func.is_view, func.namespace == "aten", func is EMPTY or returns_input


class StorageWatch(OperatorMode):
    """Context that counts the live bytes of storages: of tracked tensors, results, and operands of collectives.

    Args:
        sample: Function called after every operator with (live bytes, peak bytes so far); None: no call.
    """

    def __init__(self, *, sample: Callable[[int, int], None] | None = None) -> None:
        super().__init__(self._operator)
        self._storages = Storages(alignment_bytes=1)
        self._sample = sample

    def track(self, tensor: Tensor) -> None:
        """Track a tensor's storage."""
        if self._storages.find(tensor) is None:
            self._storages.add(tensor, Entry("", 0, "activation"))

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes so far."""
        self._storages.renumber_resized(everywhere=True)
        return self._storages.peak_bytes

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_view, is_aten, resizable = _properties(func)
        if not is_view:  # a view neither reads nor allocates bytes
            self._storages.renumber_resized()
        out = func(*args, **kwargs)
        if not is_aten:
            for tensor in shared_tensors(func, tensors_in(args, kwargs)):
                self.track(tensor)
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            if self._storages.find(tensor) is None:
                self._storages.add(tensor, Entry("", 0, "activation"), watch=resizable)
        if self._sample is not None:
            self._sample(self._storages.live_bytes, self._storages.peak_bytes)
        return out


@dataclass(frozen=True)
class Recording:
    """Recorded program of a rank.

    Attributes:
        program: Operators and storages.
        actions: Runs of operators, joins of collectives and frees of storages, in recorded order.
        entries: Properties of each storage, including properties that `program` lacks.
        segments: (first action, name) of every segment of the program (forward, backward, ...).
        groups: Dict from the name of every process group to its ranks.
        num_operators: Number of operators that ran, including views.
    """

    program: MemoryProgram
    actions: tuple[MemoryAction, ...]
    entries: tuple[Entry, ...]
    segments: tuple[tuple[int, str], ...]
    groups: dict[str, tuple[int, ...]]
    num_operators: int


class Recorder(OperatorMode):
    """Context that records operators with their storages.

    Storages are recorded if they are named, allocated by an operator, or operands of a collective. `workspace` returns
    the workspace bytes of an operator call; None: workspace is not counted. See `Storages` for `alignment_bytes`.
    """

    def __init__(self, alignment_bytes: int = 1, workspace: Workspace | None = None) -> None:
        super().__init__(self._operator)
        self.storages = Storages(alignment_bytes, self._on_end)
        self._alignment, self._workspace = alignment_bytes, workspace
        self._groups: dict[str, tuple[int, ...]] = {}
        self._begin("setup")

    def _begin(self, segment: str) -> None:
        self._operators: list[Operator] = []
        self._actions: list[MemoryAction] = []
        self._segments = [(0, segment)]
        self._count = 0

    def restart(self, segment: str) -> None:
        """Restart the recording with `segment`; storages that are live now exist from the start of the recording."""
        self._record_resizes(everywhere=True)
        self.storages.restart()
        self._begin(segment)

    def enter(self, segment: str) -> None:
        """Begin the segment `segment` of the program, unless it is the current one."""
        self._record_resizes(everywhere=True)
        if segment != self._segments[-1][1]:
            self._segments.append((len(self._actions), segment))

    def name(self, tensor: Tensor, name: str, kind: StorageKind) -> None:
        """Set name and kind of a tensor's storage; an unknown storage is recorded as allocated now.

        If tensors of one kind share the storage, its name is the common part of their names.
        """
        number = self.storages.find(tensor)
        if number is None:
            number = self._add_existing(tensor, name)
        entry = self.storages.entries[number]
        if entry.kind == kind and entry.name != name:  # several tensors on one storage
            entry.name = _common(entry.name, name)
            entry.shape = (entry.num_bytes // tensor.element_size(),)
            return
        entry.name, entry.kind, entry.shape, entry.dtype = name, kind, *_format(tensor)

    def recording(self, name: str) -> Recording:
        """Return the recording so far."""
        self._record_resizes(everywhere=True)
        entries = [replace(entry) for entry in self.storages.entries]
        for number in self.storages.living:
            entries[number].at_end = True
        program = MemoryProgram(
            name, tuple(entry.storage for entry in entries), tuple(self._operators), self._alignment
        )
        return Recording(
            program, tuple(self._actions), tuple(entries), tuple(self._segments), dict(self._groups),
            self._count,
        )  # fmt: skip

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._count += 1
        self._record_resizes()
        tensors = tensors_in(args, kwargs)
        workspace_bytes = 0 if self._workspace is None else self._workspace(func, args, kwargs)
        out = run_with_known_values(func, args, kwargs, tensors)
        self._record(func, args, kwargs, tensors, out, workspace_bytes)
        return out

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], out: Any, workspace: int
    ) -> None:
        group = group_of(func, args)
        shared = shared_tensors(func, tensors)
        for tensor in shared:
            if self.storages.find(tensor) is None:
                self._add_existing(tensor, _name(func))
        for number in self._known(shared):
            self.storages.entries[number].sent = True
        reads, writes = self._known(tensors), self._known(written_leaves(func, args, kwargs))
        allocs = [
            self.storages.add(tensor, self._entry(tensor, _name(func)), watch=func is EMPTY)
            for tensor in tensors_in(out)
            if self.storages.find(tensor) is None
        ]
        if not (allocs or writes or workspace or group is not None):
            return  # the operator only creates a view or an alias
        sent = 0
        if group is not None:
            sent = sent_bytes(func, args, group)
            ranks = tuple(dist.get_process_group_ranks(group))
            self._groups.setdefault(group.group_name, ranks)
        self._run(
            Operator(
                _name(func), reads, writes, tuple(allocs),
                flops=count_flops(func, args, kwargs, out),
                access_bytes=sent,
                scratch_bytes=(workspace,) if workspace else (),
                group="" if group is None else group.group_name,
                purpose="" if group is None else current_purpose() or "",
            )
        )  # fmt: skip

    def _run(self, operator: Operator) -> None:
        self._actions.append(MemoryAction("run", len(self._operators)))
        self._operators.append(operator)
        if operator.group:  # bytes are counted as if every collective ended immediately
            self._actions.append(MemoryAction("join", len(self._operators) - 1))

    def _known(self, tensors: list[Tensor]) -> tuple[int, ...]:
        numbers = (self.storages.find(tensor) for tensor in tensors)
        return tuple(dict.fromkeys(number for number in numbers if number is not None))

    def _add_existing(self, tensor: Tensor, name: str) -> int:
        number = self.storages.add(tensor, self._entry(tensor, name))
        self._run(Operator(name, allocs=(number,)))
        return number

    @staticmethod
    def _entry(tensor: Tensor, name: str) -> Entry:
        recomputed = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        shape, dtype = _format(tensor)
        return Entry(name, 0, "activation", shape=shape, dtype=dtype, recomputed=recomputed)

    def _record_resizes(self, *, everywhere: bool = False) -> None:
        """Record storages that FSDP has resized, which it does to gathered parameters without an operator."""
        for number in self.storages.renumber_resized(everywhere=everywhere):
            self._run(Operator("resize", allocs=(number,)))

    def _on_end(self, number: int) -> None:
        self._actions.append(MemoryAction("free", number))


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").removesuffix(".default")


def _format(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _common(first: str, second: str) -> str:
    pairs = zip(first.split("."), second.split("."), strict=False)
    same = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return ".".join([*same, "*"])


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
"""Categories of live bytes, in the order of printing."""
_OF_KIND: dict[StorageKind, str] = {
    "weight": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "input": "inputs",
}


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Group of equal storages that are live at a peak: their count, and the properties of one of them.

    `name` is that of a parameter or of the operator that allocated the storage, with `*` for numbers in it.
    """

    count: int
    num_bytes: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    category: str


@dataclass(frozen=True, slots=True)
class Peak:
    """Memory peak of a step.

    Attributes:
        num_bytes: Live bytes.
        during: Name of the last storage that the operator at the peak allocates, else of this operator; `inside
            OPERATOR` if the operator has workspace.
        segment: Segment of the program with the peak.
        breakdown: Dict from category to live bytes, which add up to `num_bytes`.
        top: Largest groups of equal live tensors, at most `_LISTED`, largest total first.
    """

    num_bytes: int
    during: str
    segment: str
    breakdown: dict[str, int]
    top: tuple[LiveTensor, ...]


_LISTED = 12
"""Number of groups of equal tensors that are listed for a peak: half the lines of a terminal."""


def peak_of(recording: Recording) -> Peak:
    """Return the memory peak of a recorded program, from its replay."""
    program, actions = recording.program, recording.actions
    replayed = replay(program, program.on_device, actions)
    unit = program.alignment_bytes
    workspace = [0] * len(actions)
    for position, action in enumerate(actions):
        if action.kind == "run":
            scratch_bytes = program.operators[action.target].scratch_bytes
            workspace[position] = sum(round_up(n, unit) for n in scratch_bytes)
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
    number = bisect_right([begin for begin, _ in recording.segments], action) - 1
    return number, recording.segments[number][1]


def _category(entry: Entry, live_range: Extent, recording: Recording) -> str:
    """Return the report category of a storage: from its kind if the storage is named, else from its use."""
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
    """Return a dotted name with `*` for numbers such as the layer index, so that equal layers form one group."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def collectives_of(recording: Recording, rank: int, *meshes: Mesh) -> tuple[Collective, ...]:
    """Return the collectives of a recorded program, grouped by kind, axes and purpose, in order of first occurrence.

    Groups of one rank send nothing and are excluded. The first mesh that has a group determines its axes; a group that
    is in no mesh has the axes `("other",)`.
    """
    records = (
        (operator.name, recording.groups.get(operator.group, ()), operator.purpose, operator.access_bytes)
        for operator in recording.program.operators
    )  # fmt: skip
    return _group_collectives(records, group_axes(rank, *meshes), _fsdp_axes(meshes[0]))


def _group_collectives(
    records: Iterable[tuple[str, tuple[int, ...], str, int]],
    axes_of: dict[frozenset[int], tuple[str, ...]],
    fsdp_axes: tuple[str, ...],
) -> tuple[Collective, ...]:
    """Group `records`, (operator name, ranks, purpose, sent bytes), into collectives with their counts and sums."""
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
    """Return the purpose of an FSDP collective, inferred from kind and axes because FSDP does not state it."""
    if kind == "all_reduce":
        return Purpose.REPLICA_GRADIENTS
    if axes == fsdp_axes:
        return Purpose.FSDP_PARAMETERS if kind == "all_gather" else Purpose.FSDP_GRADIENTS
    return Purpose.EXPERT_PARAMETERS if kind == "all_gather" else Purpose.EXPERT_GRADIENTS


def _fsdp_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh, of degree above 1, over which FSDP shards parameters that are not experts."""
    return tuple(axis for axis in ("dp_shard", "cp") if axis in mesh.names and mesh.degree(axis) > 1)


class CommCounter(OperatorMode):
    """Context that counts every collective of a rank by kind and mesh axes; see `collectives_of`.

    `rank` is the rank of this process on the mesh. `extra_meshes` have the axes of groups that `mesh` lacks.
    """

    def __init__(self, mesh: Mesh, rank: int, *extra_meshes: Mesh) -> None:
        super().__init__(self._operator)
        self._axes, self._fsdp_axes = group_axes(rank, mesh, *extra_meshes), _fsdp_axes(mesh)
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
        """Collectives so far, grouped as by `collectives_of`."""
        return _group_collectives(self._records, self._axes, self._fsdp_axes)

    @property
    def sent_bytes(self) -> Counter[tuple[str, tuple[str, ...]]]:
        """Bytes that this rank sends by (kind, axes)."""
        sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for c in self.collectives:
            sent[c.kind, c.axes] += c.sent_bytes
        return sent
