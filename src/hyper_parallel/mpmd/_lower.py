"""From what is computed to everything a rank does: sends and receives, FSDP gathers, gradient reduction."""

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

    The actions are laid out in the order of a replay with unit times. When a computation ends whose result another
    rank needs, the send is appended to its rank and the receive to the other at the same moment. So there is one
    order of all actions in which every pair is adjacent: no deadlock even when a send waits for its receive, and
    between two ranks messages arrive in the order in which they are sent, which NCCL needs because it has no tags.

    Args:
        schedule: Compute-only schedule.
        unshard: Gather the parameters of a stage before use and free them when they are not among the next
            `max_unsharded` stages of the rank.
        max_unsharded: Stages whose parameters a rank holds gathered at once, prefetched ones included; 2 or more.
        reduce_grad: Reduce (and scale) the gradients of a stage after its last backward. torch's runtime needs it
            also without data parallelism: this action is what divides by the number of microbatches.

    Raises:
        ScheduleError: HP320 when the schedule already has other actions, cannot run, or max_unsharded is below 2.
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
    place = schedule.placement()
    starts = unit_starts(schedule)
    events = [
        # At one time ends (0) come before starts (1): what arrives is received before it is used.
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
    ranks = [_with_unshard(row, max_unsharded) if unshard else row for row in out]
    if reduce_grad:
        ranks = [_with_reduce(row, schedule.microbatches) for row in ranks]
    return Schedule(
        schedule.name, schedule.stages, schedule.microbatches, tuple(tuple(row) for row in ranks)
    )


def one_by_one(schedule: Schedule) -> Schedule:
    """A lowered schedule for an executor that runs the parts of an OVERLAP_F_B one after the other.

    In `lower` the sends of an overlap follow all of it. Run part by part, the result of the first would then wait for
    the second, and the next rank with it; here every part is an action of its own, followed by its send.

    Args:
        schedule: Lowered schedule; the same is returned when nothing in it overlaps.
    """
    if not any(action.parts for rank in schedule.ranks for action in rank):
        return schedule
    rows = tuple(
        tuple(leaf for action in rank for leaf in action.leaves)
        for rank in schedule.compute_only().ranks
    )
    return lower(Schedule(schedule.name, schedule.stages, schedule.microbatches, rows))


def _with_unshard(row: Sequence[Action], limit: int) -> list[Action]:
    """Keep the stages gathered that the rank needs next, looking ahead over distinct stages."""
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
    """REDUCE_GRAD after the last backward of each stage."""
    done = Counter[int]()
    out: list[Action] = []
    for action in row:
        out.append(action)
        for leaf in action.leaves:
            done[leaf.stage] += leaf.kind in ("B", "W")
            if leaf.kind in ("B", "W") and done[leaf.stage] == microbatches:
                out.append(Action(leaf.stage, "REDUCE_GRAD"))
    return out
