"""Rejection of device budgets that are too small, as early as possible and on all ranks, with a sufficient budget."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hyper_parallel.backends.torch import local
from hyper_parallel.errors import BudgetImpossible
from hyper_parallel.ir import MemoryPlan, MemoryProgram
from hyper_parallel.memory import MemoryMachine
from hyper_parallel.runtime import agree_on_plan, gather_objects
from hyper_parallel.units import format_bytes


def largest_update_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return a lower bound of the working set of one optimizer operator: a parameter, its gradient and moments."""
    trained = [local(p).nbytes for p in model.parameters() if p.requires_grad]
    moments = 2 if isinstance(optimizer, torch.optim.Adam) else 0
    return max(trained, default=0) * (2 + moments)


def plan_or_refuse(
    make_plan: Callable[[int | None], MemoryPlan],
    budget_bytes: int | None,
    least_bytes: int,
    program: MemoryProgram,
    machine: MemoryMachine,
) -> MemoryPlan:
    """Plan the recorded step on all ranks; every rank must call.

    Args:
        make_plan: Returns this rank's plan for a budget.
        budget_bytes: Budget of the recipe; None: the goal is a slowdown.
        least_bytes: Known minimum of this rank for a step without a plan.
        program: Recorded step.
        machine: Machine to plan for.

    Raises:
        BudgetImpossible: HP402. If steps without a plan need more than the budget on some rank, their minimum is
            planned for, so that the budget in the hint has a plan.
    """
    least_bytes = max(gather_objects(least_bytes))
    planned_bytes = budget_bytes if budget_bytes is None else max(budget_bytes, least_bytes)
    try:
        plan = agree_on_plan(lambda: make_plan(planned_bytes), program, machine, planned_bytes)
    except BudgetImpossible as error:
        if planned_bytes == budget_bytes:
            raise
        least_bytes = error.least_bytes
    if budget_bytes is not None and planned_bytes != budget_bytes:
        raise _too_small(budget_bytes, least_bytes, "a step without a plan")
    return plan


def refuse_above(budget_bytes: int | None, peak_bytes: int, what: str) -> None:
    """Raise on all ranks if the peak of any rank exceeds its budget; every rank must call.

    Raises:
        BudgetImpossible: HP402 with the bytes of the fullest rank.
    """
    most = max(gather_objects(peak_bytes))
    if budget_bytes is not None and most > budget_bytes:
        raise _too_small(budget_bytes, most, what)


def _too_small(budget_bytes: int, least_bytes: int, what: str) -> BudgetImpossible:
    """Return the error for a device budget that is too small, with a sufficient budget."""
    error = BudgetImpossible(
        f"{what} does not fit {format_bytes(budget_bytes)}",
        where="offload.budget",
        got=f"{budget_bytes} bytes",
        allowed=f"at least {least_bytes} bytes ({format_bytes(least_bytes)})",
        hint=f"set `offload.budget={least_bytes}`",
    )
    error.least_bytes = least_bytes
    return error
