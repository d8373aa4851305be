"""Memory plans of step programs, written into the programs for frameworks that execute whole programs by themselves.

For each operator result, the planner decides: keep, recompute or offload to the host. The decisions are inserted into
the program as operators. `TO_HOST` copies a value to host memory. `TO_DEVICE` copies the value back after another
value has been computed. A back end that runs on the CPU may execute both as identities; its peak is then simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal

from hyper_parallel.backends.program_memory import (
    ExecutionPlan,
    Move,
    Residency,
    memory_program,
    planned,
    storage_values,
)
from hyper_parallel.backends.step_program import COLLECTIVES, Node, StepProgram
from hyper_parallel.ir import MemoryPlan, MemoryProgram, replay
from hyper_parallel.memory import MemoryMachine, Roofline, identity_actions, plan_memory

_PRODUCTS: Final = {
    "aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1, "aten.baddbmm.default": 1,
}  # fmt: skip
"""Matrix product operators, each with the index of the left matrix among its arguments."""


@dataclass(frozen=True, slots=True)
class ValuePlan:
    """Interval of the plan in which a value of the program occupies no device memory.

    `first` and `last` are positions in the plan's order of operators; recomputed operators are not counted.

    Attributes:
        value: Number of the value in the program before planning, see `step_program`.
        op: Operator that computes the value.
        module: Path of the module that called the operator; empty outside of modules.
        residency: Whether the value is offloaded or recomputed.
        num_bytes: Bytes of the value.
        first: Position of the last operator before the value leaves the device.
        last: Position of the first operator after the copy back or the recomputation has begun.
    """

    value: int
    op: str
    module: str
    residency: Literal["offload", "recompute"]
    num_bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Predicted memory and time of a planned program, and the values that leave the device.

    Attributes:
        peak_bytes: Peak device memory of the program, inputs included.
        unplanned_bytes: The same peak without the plan.
        host_bytes: Host memory that the plan needs.
        seconds: Simulated seconds of the program on the machine passed to `plan_program`.
        unplanned_s: The same seconds without the plan.
        values: Values that leave the device.
        statement: Lines of text in which the planner explains the plan.
    """

    peak_bytes: int
    unplanned_bytes: int
    host_bytes: int
    seconds: float
    unplanned_s: float
    values: tuple[ValuePlan, ...]
    statement: tuple[str, ...]


def timed_operators(program: StepProgram) -> MemoryProgram:
    """Return the storages and operators of a program, with the inputs of a roofline model.

    These are the bytes that each operator reads and writes, and the FLOPs of matrix products. Collectives must keep
    their order and must not be recomputed.
    """
    memory, shapes = memory_program(program), program.shapes()
    operators = []
    for node, op in zip(program.nodes, memory.operators, strict=True):
        communicates = node.op.startswith(COLLECTIVES)
        access = sum(memory.sizes[s] for s in (*op.reads, *op.allocs)) if op.allocs else 0
        operators.append(
            replace(
                op,
                flops=_flops(node, shapes),
                access_bytes=access,
                repeatable=not communicates,
                ordered=communicates,
            )
        )
    return replace(memory, operators=tuple(operators))


def _flops(node: Node, shapes: Mapping[int, tuple[int, ...]]) -> float:
    if node.op not in _PRODUCTS:
        return 0.0
    inner = shapes[node.args[_PRODUCTS[node.op]].index][-1]
    return 2.0 * prod(node.types[0].shape) * inner


def peak_bytes(program: StepProgram) -> int:
    """Return the peak bytes of inputs and live results when the operators of a program run in order."""
    memory = memory_program(program)
    actions = identity_actions(memory, range(len(memory.operators)))
    return replay(memory, memory.on_device, actions).peak_bytes["device"]


def plan_program(
    program: StepProgram,
    machine: MemoryMachine,
    roofline: Roofline,
    *,
    budget_bytes: int | None = None,
    max_slowdown: float | None = None,
    recompute: bool = True,
    reorder: bool = True,
) -> tuple[StepProgram, ProgramMemory]:
    """Plan the memory of a program; return the program with recomputation and copies, and its predicted memory.

    Inputs and outputs stay on the device. Collectives keep their order. Exactly one of `budget_bytes` and
    `max_slowdown` must be given.

    Args:
        program: The program before planning.
        machine: Copy bandwidths between device and host, and the capacity of host memory.
        roofline: Compute rate and memory bandwidth, which give the seconds of operators.
        budget_bytes: Limit of device memory, inputs included; the plan minimizes time.
        max_slowdown: Allowed extra time as a fraction (0.02 is 2 %); the plan minimizes device memory.
        recompute: Whether results may be recomputed.
        reorder: Whether operators may change their order.

    Raises:
        BadValue: HP102 unless exactly one goal is set, or for a negative slowdown.
        BudgetImpossible: HP402 when no plan fits into the budget.
        TierFull: HP403 when a plan fits into the budget, but not into host memory.
    """
    memory = roofline.annotate(timed_operators(program))
    plan = plan_memory(
        memory,
        machine,
        budget_bytes=budget_bytes,
        max_slowdown=max_slowdown,
        move=("activation",),
        recompute=recompute,
        reorder=reorder,
    )
    forecast = ProgramMemory(
        peak_bytes=plan.peak_bytes["device"],
        unplanned_bytes=peak_bytes(program),
        host_bytes=plan.dram_bytes,
        seconds=plan.seconds,
        unplanned_s=memory.seconds,
        values=_values(program, plan),
        statement=plan.statement,
    )
    return planned(program, _execution_plan(program, plan)), forecast


def _values(program: StepProgram, plan: MemoryPlan) -> tuple[ValuePlan, ...]:
    """Return one entry per copy from the host and per recomputed result, in the order of the plan."""
    numbers = storage_values(program)
    producers = {r: node for node in program.nodes for r in node.results}
    left: dict[int, int] = {}  # last position on the device, by storage
    values, position = [], 0

    def add(storage: int, residency: Literal["offload", "recompute"]) -> None:
        number, size = numbers[storage], plan.program.sizes[storage]
        node, first = producers[number], left[storage]
        values.append(ValuePlan(number, node.op, node.module, residency, size, first, position))

    for action in plan.actions:
        if action.kind == "run":
            position += 1
        elif action.kind == "free" or (action.kind == "detach" and action.tier == "device"):
            left[action.target] = position - 1
        elif action.kind == "prefetch":
            add(action.target, "offload")
        elif action.kind == "recompute":
            for storage in plan.program.operators[action.target].allocs:
                add(storage, "recompute")
    return tuple(values)


def _execution_plan(program: StepProgram, plan: MemoryPlan) -> ExecutionPlan:
    numbers = storage_values(program)
    producers = {r: i for i, node in enumerate(program.nodes) for r in node.results}
    steps: list[int | Move] = []
    residency: dict[int, Residency] = {}
    for action in plan.actions:
        if action.kind in ("run", "recompute"):
            steps.append(action.target)
        if action.kind == "recompute":
            residency[action.target] = "recompute"
        if action.kind == "store":
            steps.append(Move(numbers[action.target], "host"))
            residency[producers[numbers[action.target]]] = "offload"
        if action.kind == "prefetch":
            steps.append(Move(numbers[action.target], "device"))
    return ExecutionPlan(tuple(steps), residency)
