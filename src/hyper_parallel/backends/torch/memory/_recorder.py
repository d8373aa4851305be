"""Recorder of a rank's program: every operator of a step at storage level, as a `MemoryProgram`.

The recorder sits below autograd. It records the operators of forward, backward, FSDP, clipping and the optimizer, on
plain local tensors, real or fake. A view is an address. Only operators that allocate or write bytes, or communicate,
become part of the program. A `Kernels` function runs the operators: directly, or with known values of fake tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.backends.torch.collectives import current_purpose
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory._storage_watch import shared_tensors
from hyper_parallel.backends.torch.memory._traffic import group_of, sent_bytes
from hyper_parallel.backends.torch.memory.operators import (
    EMPTY,
    count_flops,
    tensors_in,
    written_leaves,
)
from hyper_parallel.backends.torch.memory.storages import Entry, Storages
from hyper_parallel.ir import MemoryAction, MemoryProgram, Operator, StorageKind

Kernels = Callable[[Any, tuple[Any, ...], dict[str, Any], list[Tensor]], tuple[Any, int]]
"""Function that runs an operator (overload, arguments, keyword arguments, the tensors among them) and returns its
outputs and the workspace bytes of its kernel."""


def run_directly(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> tuple[Any, int]:
    """Run an operator directly, as `Kernels` without workspace."""
    return func(*args, **kwargs), 0


@dataclass(frozen=True)
class Recording:
    """Recorded program of a rank.

    Attributes:
        program: Storages and operators.
        actions: Operators, and the ends of storages, in the order in which they happened.
        entries: Properties of each storage beyond the program.
        segments: (first action, name) of every segment of the program (forward, backward, ...).
        groups: Name of every process group to its ranks.
        num_operators: Operators that ran, views included.
    """

    program: MemoryProgram
    actions: tuple[MemoryAction, ...]
    entries: tuple[Entry, ...]
    segments: tuple[tuple[int, str], ...]
    groups: dict[str, tuple[int, ...]]
    num_operators: int


class Recorder(OperatorMode):
    """Context that records operators over the storages that they allocate or send, and over named storages.

    Args:
        alignment_bytes: See `Storages`.
        kernels: Runs the operators.
    """

    def __init__(self, alignment_bytes: int = 1, kernels: Kernels = run_directly) -> None:
        super().__init__(self._operator)
        self.storages = Storages(alignment_bytes, self._on_end)
        self._alignment, self._kernels = alignment_bytes, kernels
        self._groups: dict[str, tuple[int, ...]] = {}
        self._begin("setup")

    def _begin(self, segment: str) -> None:
        self._operators: list[Operator] = []
        self._actions: list[MemoryAction] = []
        self._segments = [(0, segment)]
        self._count = 0

    def restart(self, segment: str) -> None:
        """Restart the recording: storages that are live now exist from its start."""
        self._record_resizes(everywhere=True)
        self.storages.restart()
        self._begin(segment)

    def enter(self, segment: str) -> None:
        """Begin another segment of the program."""
        self._record_resizes(everywhere=True)
        if segment != self._segments[-1][1]:
            self._segments.append((len(self._actions), segment))

    def name(self, tensor: Tensor, name: str, kind: StorageKind) -> None:
        """Set name and kind of a tensor's storage; an unknown storage exists from the start."""
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
        out, workspace = self._kernels(func, args, kwargs, tensors)
        self._record(func, args, kwargs, tensors, out, workspace)
        return out

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        out: Any,
        workspace: int,
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
            self._add(tensor, func)
            for tensor in tensors_in(out)
            if self.storages.find(tensor) is None
        ]
        if not (allocs or writes or workspace or group is not None):
            return  # a view, or an alias: an address, not work
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
        if operator.group:  # the counts are those of a rank whose collectives end at once
            self._actions.append(MemoryAction("join", len(self._operators) - 1))

    def _known(self, tensors: list[Tensor]) -> tuple[int, ...]:
        numbers = (self.storages.find(tensor) for tensor in tensors)
        return tuple(dict.fromkeys(number for number in numbers if number is not None))

    def _add(self, tensor: Tensor, func: Any) -> int:
        return self.storages.add(tensor, self._entry(tensor, _name(func)), watch=func is EMPTY)

    def _add_existing(self, tensor: Tensor, name: str) -> int:
        """Record a storage that no operator has allocated."""
        number = self.storages.add(tensor, self._entry(tensor, name))
        self._run(Operator(name, allocs=(number,)))
        return number

    @staticmethod
    def _entry(tensor: Tensor, name: str) -> Entry:
        recomputed = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        shape, dtype = _format(tensor)
        return Entry(name, 0, "activation", shape=shape, dtype=dtype, recomputed=recomputed)

    def _record_resizes(self, *, everywhere: bool = False) -> None:
        """Record storages that their owner has resized: FSDP frees and refills gathered parameters without operator."""
        for key, entry, _ in self.storages.end_resized(everywhere=everywhere):
            number = self.storages.begin(key, replace(entry, at_start=False))
            self._run(Operator("resize", allocs=(number,)))

    def _on_end(self, number: int) -> None:
        self._actions.append(MemoryAction("free", number))


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").removesuffix(".default")


def _format(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _common(first: str, second: str) -> str:
    """Return the common leading parts of two dotted names, and a star."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    same = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return ".".join([*same, "*"])
