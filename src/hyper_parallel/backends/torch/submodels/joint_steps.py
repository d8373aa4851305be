"""Steps of a tower and a pipeline of the language part under one schedule: each rank runs its own list of actions.

Stage 0 of the schedule is the tower, whose copies on several ranks are free of collectives during the step and sum
their gradients at its end. Messages between tower and language part have the key (edge, microbatch). A rank sends each
result when it is computed, and waits for a message only when an action needs it; `verify` proves that no rank waits in
a circle.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.backends.torch.collectives import all_reduce
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.ir import Action, Purpose, Schedule
from hyper_parallel.mpmd import (
    TowerLanes,
    check_submodel_schedule,
    forward_part,
    submodel_schedule,
)

Source = tuple[int, int] | None
"""Data-parallel rank of the language part and index of its microbatch; None: no microbatch."""


@dataclass(frozen=True, slots=True)
class JointSteps:
    """Schedules of the steps of one rank.

    Attributes:
        lanes: Lanes of both parts.
        tower: Ranks of the tower in the world.
        copies: Group of these ranks; None for one rank.
        reduce_dtype: Dtype in which the gradients of copies are summed.
        lane: Lane of this rank.
        tower_rank: Index of this rank among those of the tower; None without a tower.
        frozen: Whether the tower is frozen.
        planned: Schedule of steps with as many microbatches; None, and for other numbers: from equal costs.
    """

    lanes: TowerLanes
    tower: tuple[int, ...]
    copies: dist.ProcessGroup | None
    reduce_dtype: torch.dtype
    lane: int
    tower_rank: int | None
    frozen: bool
    planned: Schedule | None = None
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    _actions: dict[tuple[int, bool], tuple[Action, ...]] = field(default_factory=dict)

    def schedule(self, count: int) -> Schedule:
        """Return the verified schedule of a training step.

        Raises:
            ScheduleError: HP320 when the planned schedule does not fit.
        """
        if count not in self._schedules:
            if self.planned is not None and self.planned.microbatches == count:
                schedule = check_submodel_schedule(self.planned, self.lanes, self.frozen)
            else:
                schedule = submodel_schedule(self.lanes, count, frozen=self.frozen)
            self._schedules[count] = schedule
        return self._schedules[count]

    def owners(self, count: int) -> list[int]:
        """Return the tower rank that computes the features of each microbatch."""
        return self.lanes.owners(self.schedule(count))

    def sources(self, tower_rank: int, count: int) -> list[Source]:
        """Return the microbatches of a tower rank, one entry per microbatch of the step; None: on another rank."""
        owners = self.owners(count)
        return [(0, i) if owner == tower_rank else None for i, owner in enumerate(owners)]

    def actions(self, count: int, train: bool) -> tuple[Action, ...]:
        """Return the actions of this rank: those of the tower at stage -1, language stages from 0."""
        if (count, train) not in self._actions:
            schedule = self.schedule(count)
            owners = self.owners(count)
            if not train:
                schedule = forward_part(schedule, self.lanes)
            self._actions[count, train] = tuple(
                replace(a, stage=a.stage - 1)
                for a in schedule.ranks[self.lane]
                if not _crosses(a) and (a.stage or owners[a.microbatch or 0] == self.tower_rank)
            )
        return self._actions[count, train]


def _crosses(action: Action) -> bool:
    """Return whether an action is a message between tower and language part, which the parts send by themselves."""
    if not action.stage:
        return action.kind.startswith(("SEND", "RECV"))
    return action.stage == 1 and action.kind in ("RECV_F", "SEND_B")


def share_gradients(model: nn.Module, copies: int) -> None:
    """Give each copy an equal share of gradients that an earlier step has summed."""
    for p in model.parameters():
        if p.grad is not None:
            local(p.grad).div_(copies)


def sum_gradients(model: nn.Module, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Sum the gradients of copies of a model; those of parameters that no copy used stay None."""
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        return
    uses = torch.tensor([p.grad is not None for p in params], dtype=dtype, device=params[0].device)
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    grads = [local(p.grad) for p in params if p.grad is not None]
    flat = torch.cat([*(grad.reshape(-1).to(dtype) for grad in grads), uses])
    all_reduce(flat, group, Purpose.REPLICA_GRADIENTS)
    *sums, counts = flat.split([*(grad.numel() for grad in grads), len(params)])
    for p, grad, total, count in zip(params, grads, sums, counts.tolist(), strict=True):
        if count:
            grad.copy_(total.view_as(grad))
        else:
            p.grad = None
