"""Lowering: add sends and receives, FSDP gathers and gradient reductions to a compute-only schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule
from hyper_parallel.ir.schedule import COMPUTE, at
from hyper_parallel.mpmd._tasks import unit_starts


def lower(
    schedule: Schedule, *, unshard: bool = False, max_unsharded: int = 3, reduce_grad: bool = True
) -> Schedule:
    """Add SEND, RECV and, if wanted, UNSHARD, RESHARD and REDUCE_GRAD to a compute-only schedule.

    Actions are placed in the order of a replay with unit times. When a computation ends and another rank needs its
    result, the send is appended to one rank and the receive to the other at the same moment. A total order of all
    actions therefore exists in which each send is adjacent to its receive. This excludes deadlock even with blocking
    sends. Between two ranks, receives have the order of the sends, as NCCL requires because it has no message tags.

    Args:
        schedule: Compute-only schedule.
        unshard: Gather the parameters of a stage before use and free them when they are not among the next
            `max_unsharded` stages of the rank.
        max_unsharded: Stages whose parameters a rank holds gathered at once, prefetched ones included; 2 or more.
        reduce_grad: Reduce (and scale) the gradients of a stage after its last backward. torch's runtime needs this
            action without data parallelism too, because it divides by the number of microbatches.

    Raises:
        ScheduleError: HP320 when the schedule contains other actions, deadlocks, or `max_unsharded` is below 2.
    """
    for rank, position, leaf in schedule.leaves():
        if leaf.kind not in COMPUTE:
            raise ScheduleError(
                f"only a compute-only schedule is lowered, this one has {leaf.kind}",
                where=at(schedule, rank, position),
                hint="schedule.compute_only()",
            )
    if max_unsharded < 2:
        raise ScheduleError(
            "a rank must be able to hold two gathered stages, for a forward and a backward",
            got=f"max_unsharded={max_unsharded}",
            allowed="2 and more",
        )
    out = _with_messages(schedule)
    ranks = [_with_unshard(row, max_unsharded) if unshard else row for row in out]
    if reduce_grad:
        ranks = [_with_reduce(row, schedule.microbatches) for row in ranks]
    return Schedule(
        schedule.name, schedule.stages, schedule.microbatches, tuple(tuple(row) for row in ranks)
    )


def _with_messages(schedule: Schedule) -> list[list[Action]]:
    """Return the actions of each rank with sends and receives, in the order of a replay with unit times."""
    place = schedule.placement()
    starts = unit_starts(schedule)
    events = [
        # At equal times, ends (0) precede starts (1): a message is received before its use.
        (
            start + (0 if starting else schedule.ranks[rank][position].slots),
            starting,
            rank,
            position,
        )
        for rank, row in enumerate(starts)
        for position, start in enumerate(row)
        for starting in (0, 1)
    ]
    out: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, starting, rank, position in sorted(events):
        action = schedule.ranks[rank][position]
        if starting:
            out[rank].append(action)
            continue
        for leaf in action.leaves:
            send = leaf.send
            if send and (to := place.get(send.peer.stage, rank)) != rank:
                out[rank].append(send)
                out[to].append(send.peer)
    return out


def one_by_one(schedule: Schedule) -> Schedule:
    """Split every OVERLAP_F_B into its parts, for an executor that runs them one after the other.

    `lower` places the sends of an overlap after both parts. A serial executor would delay the result of the first part,
    and the rank that receives it, until the second part ends. Here each part is an action followed by its send.

    Args:
        schedule: Lowered schedule; returned unchanged when it contains no overlap.
    """
    if not any(action.parts for rank in schedule.ranks for action in rank):
        return schedule
    rows = tuple(
        tuple(leaf for action in rank for leaf in action.leaves)
        for rank in schedule.compute_only().ranks
    )
    return lower(Schedule(schedule.name, schedule.stages, schedule.microbatches, rows))


def _with_unshard(row: Sequence[Action], limit: int) -> list[Action]:
    """Insert UNSHARD and RESHARD so that the next `limit` distinct stages of the rank are gathered."""
    # The next distinct stages at each position, built from the end.
    ahead: list[list[int]] = []
    following: list[int] = []
    for action in reversed(row):
        stages = [leaf.stage for leaf in action.leaves if action.kind in COMPUTE]
        following = list(dict.fromkeys((*stages, *following)))
        ahead.append(following[:limit])
    gathered: list[int] = []
    out: list[Action] = []
    for action, wanted in zip(row, reversed(ahead), strict=True):
        if action.kind in COMPUTE:
            out += [Action(s, "RESHARD") for s in gathered if s not in wanted]
            out += [Action(s, "UNSHARD") for s in wanted if s not in gathered]
            gathered = wanted
        out.append(action)
    return out + [Action(s, "RESHARD") for s in gathered]


def _with_reduce(row: Sequence[Action], microbatches: int) -> list[Action]:
    """Insert REDUCE_GRAD after the last backward of each stage."""
    done = Counter[int]()
    out: list[Action] = []
    for action in row:
        out.append(action)
        for leaf in action.leaves:
            done[leaf.stage] += leaf.kind in ("B", "W")
            if leaf.kind in ("B", "W") and done[leaf.stage] == microbatches:
                out.append(Action(leaf.stage, "REDUCE_GRAD"))
    return out
