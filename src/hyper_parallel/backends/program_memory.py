"""Application of memory plans to step programs, and the bytes that are live at each operator.

A planned program computes the same values as the program before planning. A recomputed operator has a second node,
whose results later nodes read. `AFTER` operators delay the inputs of the second node, so that a compiler neither merges
both nodes nor runs the second one early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from hyper_parallel.backends.step_program import AFTER, TO_DEVICE, TO_HOST, Node, Ref, StepProgram, refs
from hyper_parallel.ir import MemoryProgram, Operator, Storage, StorageKind, replay
from hyper_parallel.memory import identity_actions

Residency = Literal["keep", "recompute", "offload"]
"""Treatment of a node's results between their uses: keep in device memory, recompute, or offload to the host."""

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
"""Kind of an input by the prefix of its name, up to the first dot; all other inputs are optimizer states."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy of a value from device to host, or from host to device.

    Attributes:
        value: Number of the value in the program before planning; it must not be a view.
        place: Destination.
    """

    value: int
    place: Literal["host", "device"]


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Order of the nodes of a step program, and residency of their results.

    Attributes:
        order: Node indices and copies in execution order. An index that occurs again recomputes the node's results.
        residency: Residency of results by index of their node; results of nodes without an entry are kept.
    """

    order: tuple[int | Move, ...]
    residency: Mapping[int, Residency] = field(default_factory=dict)


def recompute_layers(program: StepProgram, layers: Sequence[str]) -> ExecutionPlan:
    """Return the plan that recomputes layers in backward from their inputs.

    Results of a layer that other layers read in forward are kept, because they are the inputs of those layers. `layers`
    are module paths, and `program` computes loss and gradients.
    """
    before: dict[int, list[int]] = {}
    residency: dict[int, Residency] = {}
    forward = [i for i, node in enumerate(program.nodes) if node.module]
    for layer in layers:
        own = [i for i in forward if f"{program.nodes[i].module}.".startswith(f"{layer}.")]
        reader, repeated = _nodes_to_recompute(program, own, forward[-1])
        if repeated:
            before.setdefault(reader, []).extend(repeated)
            residency |= dict.fromkeys(repeated, "recompute")
    order: list[int | Move] = [n for i in range(len(program.nodes)) for n in (*before.get(i, ()), i)]
    return ExecutionPlan(tuple(order), residency)


def _nodes_to_recompute(program: StepProgram, own: Sequence[int], last: int) -> tuple[int, list[int]]:
    """Return the index of the first backward node that reads dropped results, and the indices of nodes to recompute.

    If no node reads them, return `last` and []. `own` are the indices of a layer's forward nodes; `last` is the index
    of the model's last forward node.
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
    """Return the program in the order of a plan, with recomputed nodes and copies inserted and `residency` set."""
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
    program: StepProgram
    plan: ExecutionPlan
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        program = self.program
        inputs = [*(i for i, _ in program.inputs.values()), *program.constants]
        self._latest = {number: number for number in inputs}
        self._views = {n.results[0]: n for n in program.nodes if n.op in _VIEWS}
        self._viewed: dict[int, int] = {}  # source value, by view
        self._next = 1 + max([*inputs, *(r for n in program.nodes for r in n.results)])
        self._seen: set[int] = set()
        self._barrier: int | None = None  # value for which recomputed nodes wait
        # Numbers under which the current recomputation reads values that it has delayed or computed, by latest number
        self._own: dict[int, int] = {}
        self._on_host: dict[int, int] = {}  # number of the host copy, by value
        self._kinds = dict(program.inputs.values())
        self._kinds |= {r: kind for n in program.nodes for r, kind in zip(n.results, n.types, strict=True)}

    def run(self, index: int) -> None:
        """Emit the node with this index; if it has been emitted before, emit a node that recomputes its results."""
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
        """Emit a copy; a copy to the device waits for the last value computed on the device."""
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
        return next(
            number
            for n in reversed(self.nodes)
            if n.op != TO_HOST
            for number, kind in zip(n.results, n.types, strict=True)
            if kind.dtype != "none"
        )

    def value(self, number: int) -> int:
        """Return the number under which the next node must read a value, after recomputation and copies.

        A view of a recomputed or copied value is emitted again.
        """
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
    """Return the numbers of the values that own memory: inputs, constants, and results that are not views."""
    numbers = [*(number for number, _ in program.inputs.values()), *program.constants]
    return [*numbers, *(r for n in program.nodes if n.op not in _VIEWS for r in n.results)]


def memory_program(program: StepProgram) -> MemoryProgram:
    """Return the program as a `MemoryProgram`, with one storage per number in `storage_values`, in the same order.

    Inputs and constants occupy memory from the start to the end. Copies on the host count 0 bytes. Operators have
    neither FLOPs nor times.
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
    """Return the bytes of live results at each node.

    A result is live from the node that computes it to the last node that reads it, an output to the end. Inputs and
    constants are not counted, because a plan does not change their bytes. Views count 0 bytes.
    """
    memory = memory_program(program)
    actions = identity_actions(memory, range(len(memory.operators)))
    profile = replay(memory, memory.on_device, actions).profile
    stored = sum(storage.num_bytes for storage in memory.storages if storage.at_start)
    return tuple(n - stored for n, action in zip(profile, actions, strict=True) if action.kind == "run")
