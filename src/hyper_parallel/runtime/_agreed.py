"""Agreement between ranks with memory plans: one plan for ranks with equal programs, one error for all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from hyper_parallel.errors import BudgetImpossible, HyperParallelError, TierFull
from hyper_parallel.ir import MemoryPlan
from hyper_parallel.memory import with_capacity_hint

T = TypeVar("T")


def gather_objects(value: T) -> list[T]:
    """Gather a value from every rank, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree_on_plan(compute: Callable[[], MemoryPlan], *inputs: object) -> MemoryPlan:
    """Return this rank's plan, computed by the lowest rank with equal inputs; planning is deterministic to the byte.

    If planning fails on any rank, every rank raises the error that requires the largest budget.
    """
    digests = gather_objects(hashlib.sha256(repr(inputs).encode()).hexdigest())
    planners = [digests.index(digest) for digest in digests]
    rank = dist.get_rank() if dist.is_initialized() else 0
    plan: MemoryPlan | HyperParallelError | None = None
    if planners[rank] == rank:
        try:
            plan = compute()
        except HyperParallelError as error:
            plan = error
    errors = gather_objects(plan if isinstance(plan, HyperParallelError) else None)
    if error := merge_errors([e for e in errors if e is not None]):
        raise error
    for planner in sorted({p for r, p in enumerate(planners) if p != r}):
        plans = [plan if rank == planner else None]
        dist.broadcast_object_list(plans, src=planner)
        if planners[rank] == planner:
            plan = plans[0]
    assert isinstance(plan, MemoryPlan)
    return plan


def merge_errors(errors: list[HyperParallelError]) -> HyperParallelError | None:
    """Merge the errors of all ranks into one whose required capacities suffice for every rank; None without errors."""
    full = [error for error in errors if isinstance(error, TierFull)]
    other_errors = [error for error in errors if error not in full]
    if other_errors or not full:  # more DRAM does not help every rank
        budgets = [with_capacity_hint(e, {"device": e.enough_bytes["device"]}) for e in full]
        return max((*other_errors, *budgets), key=_device_bytes, default=None)
    shared = [t for t in full[0].enough_bytes if all(t in e.enough_bytes for e in full)]
    return with_capacity_hint(full[0], {t: max(e.enough_bytes[t] for e in full) for t in shared})


def _device_bytes(error: HyperParallelError) -> int:
    """Return the device budget that an error asks for; 0 for an error that no budget resolves."""
    if isinstance(error, TierFull):
        return error.enough_bytes["device"]
    return error.least_bytes if isinstance(error, BudgetImpossible) else 0
