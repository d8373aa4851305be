"""The cut between forward and backward: what backward needs is kept, or made again from what is kept.

Autograd keeps what the formulas of its gradients name. Much of that is a few cheap operators away from something half
as large, or from something that is kept anyway. Which storages to keep so that fewest bytes live from forward to
backward is a minimum cut of the graph of storages. An operator that runs again costs a share of the bytes it moves.

Sources: Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, for making results again;
the cut is what PyTorch's `min_cut_rematerialization_partition` finds for traced tensors. Picard, "Maximal Closure of a
Graph", 1976, for costs on both sides of a cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hyper_parallel.ir import MemoryProgram, Operator, Storage
from hyper_parallel.memory._linear import LinearProgram

KEPT_PER_MOVED = 1 / 4
"""Least bytes that are no longer kept for every byte that operators which run again move.

Where memory moves 4 TB/s, a gigabyte less then costs a millisecond; to copy it takes twenty at 50 GB/s.
"""


@dataclass(frozen=True)
class Cut:
    """A step whose backward part makes cheap results of its forward part again.

    Attributes:
        program: The step. Results that are made again are further storages, after those of the program it comes from.
        origins: By operator, the operator of that program which it is or repeats.
        renamed: By operator, the storages it uses in place of some of that operator's.
    """

    program: MemoryProgram
    origins: tuple[int, ...]
    renamed: tuple[Mapping[int, int], ...]


def cut_program(program: MemoryProgram) -> Cut:
    """The training step that keeps fewest bytes from forward to backward.

    Matrix products, attention and what has effects run once. What runs again does so directly before its first use in
    the backward part, from the contents of the first time: the bits are the same.

    Args:
        program: A recorded step, in program order. Without a backward part it stays as it is.
    """
    rewritten = _Rewritten(program, _rerun_operators(program))
    for index, op in enumerate(program.operators):
        rewritten.follow(index, op)
    return Cut(
        replace(
            program,
            storages=tuple(rewritten.storages),
            operators=tuple(rewritten.operators),
        ),
        tuple(rewritten.origins),
        tuple(rewritten.renamed),
    )


@dataclass
class _Rewritten:
    """The new program as it grows."""

    program: MemoryProgram
    rerun: set[int]
    operators: list[Operator] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    renamed: list[Mapping[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storages: list[Storage] = list(self.program.storages)
        self._maker = {s: i for i in self.rerun for s in self.program.operators[i].allocs}
        self._second: dict[int, int] = {}  # what stands for a storage in the backward part

    def follow(self, index: int, op: Operator) -> None:
        if op.phase == "forward":
            self._append(index, op, {})
            return
        self._rerun(op.reads)
        self._append(index, op, self._second)

    def _rerun(self, wanted: Sequence[int]) -> None:
        """Run what gives these storages again, unless that has been done."""
        todo, operators = list(wanted), set[int]()
        while todo:
            storage = todo.pop()
            index = self._maker.get(storage)
            if index is not None and storage not in self._second and index not in operators:
                operators.add(index)
                todo += self.program.operators[index].reads
        for index in sorted(operators):
            op = self.program.operators[index]
            for s in op.allocs:
                self._second[s] = len(self.storages)
                self.storages.append(self.storages[s])
            self._append(index, replace(op, phase="backward"), self._second)

    def _append(self, index: int, op: Operator, names: Mapping[int, int]) -> None:
        names = {s: names[s] for s in op.touched if s in names}
        if names:
            op = replace(
                op,
                reads=tuple(names.get(s, s) for s in op.reads),
                allocs=tuple(names.get(s, s) for s in op.allocs),
            )
        self.operators.append(op)
        self.origins.append(index)
        self.renamed.append(names)


def _rerun_operators(program: MemoryProgram) -> set[int]:
    """Forward operators that run again in the backward part of the least cut.

    A linear program whose vertices are whole: every storage that backward reads is kept, or made by an operator that
    runs again, and so is everything that such an operator reads. What exists from the start or at the end is there.
    """
    operators = program.operators
    cheap = _cheap(program)
    maker = {
        s: index
        for index, op in enumerate(operators)
        for s in op.allocs
        if op.phase == "forward" and not program.storages[s].at_end
    }
    read = {s for op in operators if op.phase == "backward" for s in op.reads if s in maker}
    concerned = set(read)
    for index in sorted(cheap, reverse=True):
        if not concerned.isdisjoint(operators[index].allocs):
            concerned.update(s for s in operators[index].reads if s in maker)

    lp = LinearProgram()
    unit = max((program.sizes[s] for s in concerned), default=1) or 1  # numbers near 1
    kept: dict[int, int] = {}
    runs: dict[int, int] = {}

    def ways(s: int) -> dict[int, float]:
        """Variables whose sum is at least 1 when backward has the storage."""
        rerun = runs.get(maker[s])
        return {kept[s]: 1.0} if rerun is None else {kept[s]: 1.0, rerun: 1.0}

    for index, op in enumerate(operators):
        mine = [s for s in op.allocs if s in concerned]
        kept.update({s: lp.variable(1.0, program.sizes[s] / unit) for s in mine})
        if mine and index in cheap:
            runs[index] = lp.variable(1.0, KEPT_PER_MOVED * op.access_bytes / unit)
            for s in op.reads:
                if s in maker:
                    lp.at_least({**ways(s), runs[index]: -1.0}, 0.0)
    for s in sorted(read):
        lp.at_least(ways(s), 1.0)
    if not runs:
        return set()
    values = lp.solve()
    if values is None:  # to keep everything is always possible
        raise RuntimeError(f"HiGHS found no least cut of {program.name}")
    return {index for index, v in runs.items() if values[v] > 0.5}


def _cheap(program: MemoryProgram) -> set[int]:
    """Forward operators without products whose second run, up to the last backward operator, would give the same."""
    backward = [index for index, op in enumerate(program.operators) if op.phase == "backward"]
    end = backward[-1] if backward else -1
    written: dict[int, int] = {}  # last change in place
    fixed: set[int] = set()  # storages that others have seen
    for index, op in enumerate(program.operators[: end + 1]):
        written.update(dict.fromkeys(op.writes, index))
    for op in program.operators:
        if op.phase == "optimizer":
            fixed.update(op.touched)
    for s, storage in enumerate(program.storages):
        if storage.at_end or storage.kind == "output":
            fixed.add(s)
    return {
        index
        for index, op in enumerate(program.operators)
        if op.phase == "forward"
        and op.repeatable
        and not (op.flops or op.writes)
        and fixed.isdisjoint(op.allocs)
        and all(written.get(s, -1) < index for s in op.touched)
    }
