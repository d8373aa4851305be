"""Device budgets that are too small: found as early as possible, refused on all ranks with one that suffices."""

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
    """Return a lower bound of what one optimizer operator works on: a parameter, its gradient and moments."""
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
        make_plan: Makes this rank's plan for a budget.
        budget_bytes: The recipe's budget; None: the goal is another one.
        least_bytes: What this rank is known to need at once while a step runs without a plan.
        program: The recorded step.
        machine: What it is planned for.

    Raises:
        BudgetImpossible: HP402. When the steps before the plan have shown that the budget of a rank does not suffice,
            their least bytes are planned for, so that the budget in the hint has a plan.
    """
    least_bytes = max(gather_objects(least_bytes))
    tried = budget_bytes if budget_bytes is None else max(budget_bytes, least_bytes)
    try:
        plan = agree_on_plan(lambda: make_plan(tried), program, machine, tried)
    except BudgetImpossible as error:
        if tried == budget_bytes:
            raise
        least_bytes = error.least_bytes
    if budget_bytes is not None and tried != budget_bytes:
        raise _too_small(budget_bytes, least_bytes, "a step without a plan")
    return plan


def refuse_above(budget_bytes: int | None, peak_bytes: int, what: str) -> None:
    """Refuse on all ranks what takes more of the device of one than its budget; every rank must call.

    Raises:
        BudgetImpossible: HP402 with the bytes of the fullest rank.
    """
    most = max(gather_objects(peak_bytes))
    if budget_bytes is not None and most > budget_bytes:
        raise _too_small(budget_bytes, most, what)


def _too_small(budget_bytes: int, least_bytes: int, what: str) -> BudgetImpossible:
    """Return the error of a device budget that is too small, with one that is not."""
    error = BudgetImpossible(
        f"{what} does not fit {format_bytes(budget_bytes)}",
        where="offload.budget",
        got=f"{budget_bytes} bytes",
        allowed=f"at least {least_bytes} bytes ({format_bytes(least_bytes)})",
        hint=f"set `offload.budget={least_bytes}`",
    )
    error.least_bytes = least_bytes
    return error
