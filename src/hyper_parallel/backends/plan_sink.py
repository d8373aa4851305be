"""Memory plans of step programs for frameworks that execute by themselves.

The planner decides per result of the program: keep, recompute or offload to the host. The decisions become operators of
the program. `TO_HOST` copies a value to host memory, and `TO_DEVICE` copies it back once another value is computed. A
framework without separate host memory executes both as identities: its peak is *simulated*, and values do not change.
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
"""Matrix product to the position of its left factor."""


@dataclass(frozen=True, slots=True)
class ValuePlan:
    """Period in which one value of a program is off the device.

    Attributes:
        value: Number of the value in the unplanned program.
        op: Operator that computes it.
        module: Path of the module that called it; empty outside of one.
        residency: `offload` or `recompute`.
        num_bytes: Bytes of the value.
        first: Position, in the plan's order of operators, of the last operator before the value leaves the device.
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
        peak_bytes: Peak of device memory in the program, with its inputs.
        unplanned_bytes: Peak without the plan.
        host_bytes: Bytes of host memory.
        seconds: Simulated seconds of the program on the assumed machine.
        unplanned_s: Seconds without the plan.
        values: Values that leave the device.
        statement: Explanation by the planner.
    """

    peak_bytes: int
    unplanned_bytes: int
    host_bytes: int
    seconds: float
    unplanned_s: float
    values: tuple[ValuePlan, ...]
    statement: tuple[str, ...]


def timed_operators(program: StepProgram) -> MemoryProgram:
    """Return the storages of a program, and its operators with FLOPs and bytes of access.

    Results can be computed again except those of collectives, which keep their order.
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
    """Return the FLOPs of a matrix product; 0 for other operators."""
    if node.op not in _PRODUCTS:
        return 0.0
    inner = shapes[node.args[_PRODUCTS[node.op]].index][-1]
    return 2.0 * prod(node.types[0].shape) * inner


def peak_bytes(program: StepProgram) -> int:
    """Return the peak device bytes of the inputs and results of a program."""
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
    """Return a program with the decisions of the memory planner as operators, and the prediction.

    Inputs and outputs stay on the device. Collectives keep their order.

    Args:
        program: The program.
        machine: Channels to the host, and its capacity.
        roofline: Rates for the seconds of operators.
        budget_bytes: Device bytes of inputs and results at the same time; this or `max_slowdown` is given.
        max_slowdown: Allowed extra time as a share, for the least device bytes.
        recompute: Whether results may be computed again.
        reorder: Whether operators may change their order.

    Raises:
        BudgetImpossible: HP402 when no plan fits.
        TierFull: HP403 when only the host is too small.
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
    """Return one entry per copy back to the device and per recomputed result, in the order of the plan."""
    numbers = storage_values(program)
    producers = {r: node for node in program.nodes for r in node.results}
    left: dict[int, int] = {}  # storage to the position after which it left the device
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
    """Return the steps of a plan: operators, repeated operators, and copies."""
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
