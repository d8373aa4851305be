"""Lowering: add sends and receives, FSDP gathers and gradient reductions to a compute-only schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule
from hyper_parallel.ir.schedule import COMPUTE, at
from hyper_parallel.mpmd._tasks import StageCosts, Transfers, action_times


def lower(
    schedule: Schedule,
    *,
    unshard: bool = False,
    max_unsharded: int = 3,
    reduce_grad: bool = True,
    costs: StageCosts | None = None,
    transfer_s: Transfers = MappingProxyType({}),
) -> Schedule:
    """Return a compute-only schedule with SEND, RECV and, optionally, UNSHARD, RESHARD and REDUCE_GRAD added.

    Actions are placed in the order of a simulation, by default with unit times. When a computation ends and another
    rank needs its result, a send and a receive are added to the two ranks at the same simulated time. Therefore the
    ranks cannot deadlock, even if sends block. Between two ranks, messages are received in the order of the sends,
    because NCCL has no message tags. The gradient reductions of all copies of a stage are added at the same time.

    Args:
        schedule: Compute-only schedule.
        unshard: Whether to add UNSHARD before a stage is used, and RESHARD once the stage is not among the next
            `max_unsharded` distinct stages of the rank.
        max_unsharded: Maximum number of stages with gathered parameters per rank, including prefetched stages; at
            least 2.
        reduce_grad: Whether to add REDUCE_GRAD after the last backward of each stage. torch's pipeline runtime needs
            this action even without data parallelism: it divides gradients by the number of microbatches.
        costs: Costs as for `schedule_tasks`; None: F, I and W take one unit of time each, B two.
        transfer_s: Seconds per edge as for `schedule_tasks`.

    Raises:
        ScheduleError: HP320 when the schedule contains actions other than computations, has a stage on two ranks or on
            none, or deadlocks; also when `max_unsharded` is below 2, or the number of costs is not that of the stages.
    """
    for rank, position, leaf in schedule.leaves():
        if leaf.kind not in COMPUTE:
            raise ScheduleError(
                f"only a compute-only schedule can be lowered, but this one contains {leaf.kind}",
                where=at(schedule, rank, position),
                hint="schedule.compute_only()",
            )
    if max_unsharded < 2:
        raise ScheduleError(
            "a rank must be able to hold two gathered stages, for a forward and a backward",
            got=f"max_unsharded={max_unsharded}",
            allowed="2 and more",
            hint="max_unsharded=2",
        )
    out = _with_messages(schedule, action_times(schedule, costs, transfer_s), reduce_grad)
    ranks = [_with_unshard(row, max_unsharded) if unshard else row for row in out]
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def _with_messages(
    schedule: Schedule, times: Sequence[Sequence[tuple[int, int]]], reduce_grad: bool
) -> list[list[Action]]:
    """Return the actions of each rank in the order of `times`, with sends, receives and optional reductions."""
    homes = schedule.homes()
    copied = schedule.graph.copied if schedule.graph else frozenset()
    unreduced = Counter(a.stage for _, _, a in schedule.leaves() if a.kind in ("B", "W"))
    out: list[list[Action]] = [[] for _ in schedule.ranks]

    def reduced(action: Action, copies: bool) -> Iterator[int]:
        for leaf in action.leaves:
            if reduce_grad and leaf.kind in ("B", "W") and (leaf.stage in copied) == copies:
                unreduced[leaf.stage] -= 1
                if not unreduced[leaf.stage]:
                    yield leaf.stage

    for _, starting, rank, position in _events(times):
        action = schedule.ranks[rank][position]
        if starting:
            out[rank].append(action)
            out[rank] += [Action(s, "REDUCE_GRAD") for s in reduced(action, copies=False)]
            continue
        for send in (send for leaf in action.leaves for send in schedule.messages(leaf)):
            to = homes.get((send.peer.stage, send.microbatch), rank)
            if to != rank:
                out[rank].append(send)
                out[to].append(send.peer)
        for s in reduced(action, copies=True):
            for copy in sorted({r for (stage, _), r in homes.items() if stage == s}):
                out[copy].append(Action(s, "REDUCE_GRAD"))
    return out


def _events(times: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, bool, int, int]]:
    """Return (time, True for a start and False for an end, rank, position) of all actions, in order of time."""
    # At equal times, ends precede starts: a message is received before its use.
    return sorted(
        (time, starting, rank, position)
        for rank, row in enumerate(times)
        for position, start_and_end in enumerate(row)
        for time, starting in zip(start_and_end, (True, False), strict=True)
    )


def one_by_one(schedule: Schedule) -> Schedule:
    """Return the schedule with every OVERLAP_F_B split into its parts, for an executor without overlap.

    `lower` places the sends of an OVERLAP_F_B after its second part, which would delay the receiver of the first
    result. Here each part is a separate action, followed by its send. UNSHARD and RESHARD are dropped. REDUCE_GRAD
    follows the last backward of each stage, even if the given schedule has no reductions.

    Args:
        schedule: Lowered schedule; returned unchanged when it contains no overlap.
    """
    if not any(action.parts for rank in schedule.ranks for action in rank):
        return schedule
    rows = tuple(tuple(leaf for action in rank for leaf in action.leaves) for rank in schedule.compute_only().ranks)
    return lower(replace(schedule, ranks=rows))


def _with_unshard(row: Sequence[Action], limit: int) -> list[Action]:
    """Return a rank's actions with UNSHARD and RESHARD, which keep its next `limit` distinct stages gathered."""
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
