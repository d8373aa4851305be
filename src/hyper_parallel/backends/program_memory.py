"""Memory of step programs: order, recomputation and copies to the host, and bytes per operator.

A planned program computes the same values: a recomputed operator is a second node with the same arguments, whose inputs
wait for the node before it (`AFTER`), and later nodes read its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from hyper_parallel.backends.step_program import (
    AFTER,
    TO_DEVICE,
    TO_HOST,
    Node,
    Ref,
    StepProgram,
    refs,
)
from hyper_parallel.ir import MemoryProgram, Operator, Storage, StorageKind, replay
from hyper_parallel.memory import identity_actions

Residency = Literal["keep", "recompute", "offload"]
"""Memory of the results of a node between their uses."""

_VIEWS: Final = (
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    AFTER,
)
"""Operators whose result shares the memory of the first argument."""

_INPUT_KINDS: Final[Mapping[str, StorageKind]] = {
    "param": "weight", "sum": "gradient", "grad": "gradient", "batch": "input",
}  # fmt: skip
"""First part of an input's name to its kind; other inputs are states of the optimizer."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy of a value to the host, or back to the device; later nodes read the copy on the device.

    Attributes:
        value: Number of the value in the unplanned program, not of a view.
        place: Destination.
    """

    value: int
    place: Literal["host", "device"]


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Order of the nodes of a step program, and residency of their results.

    Attributes:
        order: Indices of nodes in execution order, with copies between them. A repeated index recomputes the results
            of the node; later nodes read these.
        residency: Node index to the residency of its results; other results are kept.
    """

    order: tuple[int | Move, ...]
    residency: Mapping[int, Residency] = field(default_factory=dict)


def recompute_layers(program: StepProgram, layers: Sequence[str]) -> ExecutionPlan:
    """Return the plan that recomputes layers in backward from their inputs.

    Results of a layer that forward nodes outside of it read are kept: they are the inputs of other layers.

    Args:
        program: Program of loss and gradients.
        layers: Paths of the modules.
    """
    before: dict[int, list[int]] = {}
    residency: dict[int, Residency] = {}
    forward = [i for i, node in enumerate(program.nodes) if node.module]
    for layer in layers:
        own = [i for i in forward if f"{program.nodes[i].module}.".startswith(f"{layer}.")]
        reader, repeated = _recomputed(program, own, forward[-1])
        if repeated:
            before.setdefault(reader, []).extend(repeated)
            residency |= dict.fromkeys(repeated, "recompute")
    order: list[int | Move] = [
        n for i in range(len(program.nodes)) for n in (*before.get(i, ()), i)
    ]
    return ExecutionPlan(tuple(order), residency)


def _recomputed(program: StepProgram, own: Sequence[int], last: int) -> tuple[int, list[int]]:
    """Return the first node of backward that reads dropped results of a layer, and the nodes to repeat before it.

    Args:
        program: The program.
        own: Nodes of the layer in forward.
        last: Last node of forward.
    """
    producers = {r: i for i in own for r in program.nodes[i].results}
    inside, reads = set(own), [_reads(node) for node in program.nodes]
    read_outside = {v for i in range(last + 1) if i not in inside for v in reads[i]}
    dropped = producers.keys() - read_outside
    readers = [i for i in range(last + 1, len(reads)) if dropped & reads[i]]
    wanted = {v for i in readers for v in reads[i]} & dropped
    repeated = []
    for i in reversed(own):
        if wanted & set(program.nodes[i].results):
            repeated.append(i)
            wanted |= reads[i] & dropped
    return min(readers, default=last), repeated[::-1]


def _reads(node: Node) -> set[int]:
    return {r.index for r in refs([*node.args, *node.kwargs.values()])}


def planned(program: StepProgram, plan: ExecutionPlan) -> StepProgram:
    """Return a program with the order, the recomputation and the annotations of a plan."""
    rewriter = _Rewriter(program, plan)
    for step in plan.order:
        if isinstance(step, Move):
            rewriter.move(step)
        else:
            rewriter.run(step)
    outputs = {name: rewriter.value(number) for name, number in program.outputs.items()}
    return replace(program, nodes=tuple(rewriter.nodes), outputs=outputs)


@dataclass
class _Rewriter:
    """Rewriter of a step program, which emits the nodes in the order of a plan.

    Attributes:
        program: The program.
        plan: The plan.
        nodes: Nodes emitted so far.
    """

    program: StepProgram
    plan: ExecutionPlan
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        program = self.program
        inputs = [*(i for i, _ in program.inputs.values()), *program.constants]
        self._latest = {number: number for number in inputs}
        self._views = {n.results[0]: n for n in program.nodes if n.op in _VIEWS}
        self._viewed: dict[int, int] = {}  # view to the value from which it was computed
        self._next = 1 + max([*inputs, *(r for n in program.nodes for r in n.results)])
        self._seen: set[int] = set()
        self._barrier: int | None = None  # value for which recomputed nodes wait
        self._own: dict[int, int] = {}  # values that the running recomputation has read or computed
        self._on_host: dict[int, int] = {}  # value to its copy
        self._kinds = dict(program.inputs.values())
        self._kinds |= {
            r: kind for n in program.nodes for r, kind in zip(n.results, n.types, strict=True)
        }

    def run(self, index: int) -> None:
        """Emit a node, or the second run of a node that is recomputed."""
        node, repeated = self.program.nodes[index], index in self._seen
        if not repeated:
            self._barrier, self._own = None, {}
            residency = self.plan.residency.get(index, "keep")
            self._emit(replace(node, residency=residency), node.results)
            self._seen.add(index)
            return
        if self._barrier is None:
            self._barrier = self._last_computed()
        results = tuple(self._number() for _ in node.results)
        self._emit(node, results)
        self._own |= {r: r for r in results}

    def move(self, move: Move) -> None:
        """Emit a copy to the host, or one back to the device that waits for the node before it."""
        kind, number = self._kinds[move.value], self._number()
        if move.place == "host":
            node = Node(TO_HOST, (Ref(self._latest[move.value]),), {}, (number,), (kind,))
            self._on_host[move.value] = number
        else:
            args = Ref(self._on_host[move.value]), Ref(self._last_computed())
            node = Node(TO_DEVICE, args, {}, (number,), (kind,))
            self._latest[move.value] = number
        self.nodes.append(node)

    def _last_computed(self) -> int:
        """Return the number of the last value that a node has computed on the device."""
        return next(
            number
            for n in reversed(self.nodes)
            if n.op != TO_HOST
            for number, kind in zip(n.results, n.types, strict=True)
            if kind.dtype != "none"
        )

    def value(self, number: int) -> int:
        """Return the number of the latest computation of a value; a view of a repeated node is computed again."""
        view = self._views.get(number)
        if view is None or number not in self._latest:
            return self._latest[number]
        source = self.value(view.args[0].index)
        if self._viewed[number] != source:
            self._emit(view, (self._number(),))
        return self._latest[number]

    def _emit(self, node: Node, results: tuple[int, ...]) -> None:
        sources = {number: self._argument(number) for number in sorted(_reads(node))}
        args = tuple(_renamed(a, sources) for a in node.args)
        kwargs = {k: _renamed(a, sources) for k, a in node.kwargs.items()}
        self.nodes.append(replace(node, args=args, kwargs=kwargs, results=results))
        self._latest |= dict(zip(node.results, results, strict=True))
        if node.op in _VIEWS:
            self._viewed[node.results[0]] = self.value(node.args[0].index)

    def _argument(self, number: int) -> int:
        latest = self.value(number)
        if self._barrier is None:
            return latest
        if number not in self._kinds:  # a constant
            return latest
        if latest not in self._own:
            kind = self._kinds[number]
            waiting = self._number()
            after = Node(AFTER, (Ref(latest), Ref(self._barrier)), {}, (waiting,), (kind,))
            self.nodes.append(after)
            self._own[latest] = waiting
        return self._own[latest]

    def _number(self) -> int:
        self._next += 1
        return self._next - 1


def _renamed(argument: Any, names: Mapping[int, int]) -> Any:
    if isinstance(argument, Ref):
        return Ref(names[argument.index])
    if isinstance(argument, (list, tuple)):
        return [_renamed(part, names) for part in argument]
    return argument


def storage_values(program: StepProgram) -> list[int]:
    """Return the numbers of the values with memory of their own: inputs, constants, and results that are no views."""
    numbers = [*(number for number, _ in program.inputs.values()), *program.constants]
    return [*numbers, *(r for n in program.nodes if n.op not in _VIEWS for r in n.results)]


def memory_program(program: StepProgram) -> MemoryProgram:
    """Return the program as operators over storages; the storages are those of `storage_values`, in the same order.

    Inputs and constants are stored outside of the step, copies on the host have no bytes, and operators have no
    seconds.
    """
    storages: list[Storage] = []
    roots: dict[int, int] = {}
    outputs = set(program.outputs.values())
    for name, (number, kind) in program.inputs.items():
        group = _INPUT_KINDS.get(name.partition(".")[0], "optimizer")
        roots[number] = len(storages)
        storages.append(Storage(name, kind.num_bytes, group, at_start=True, at_end=True))
    for number, array in program.constants.items():
        roots[number] = len(storages)
        storages.append(Storage("constant", array.nbytes, "input", at_start=True, at_end=True))
    operators = []
    for node in program.nodes:
        reads = tuple(dict.fromkeys(roots[i] for i in sorted(_reads(node))))
        allocs = []
        for number, kind in zip(node.results, node.types, strict=True):
            if node.op in _VIEWS:
                roots[number] = roots[node.args[0].index]
                continue
            roots[number] = len(storages)
            allocs.append(len(storages))
            num_bytes = 0 if node.op == TO_HOST else kind.num_bytes
            storages.append(Storage(node.op, num_bytes, "activation"))
        operators.append(Operator(node.op, reads, allocs=tuple(allocs)))
    for number in outputs:
        index = roots[number]
        if not storages[index].at_start:
            storages[index] = replace(storages[index], kind="output", at_end=True)
    return MemoryProgram("step program", tuple(storages), tuple(operators), alignment_bytes=1)


def live_bytes(program: StepProgram) -> tuple[int, ...]:
    """Return, per node, the bytes of live results: from the node that computes them to the last one that reads them.

    Inputs and constants, whose bytes a plan does not change, are not counted. Views have no bytes of their own.
    """
    memory = memory_program(program)
    actions = identity_actions(memory, range(len(memory.operators)))
    profile = replay(memory, memory.on_device, actions).profile
    stored = sum(storage.num_bytes for storage in memory.storages if storage.at_start)
    return tuple(
        n - stored for n, action in zip(profile, actions, strict=True) if action.kind == "run"
    )
