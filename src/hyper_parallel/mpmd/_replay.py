"""Replay of a schedule without times: find an order of all actions, or the deadlock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule
from hyper_parallel.ir.schedule import PEERS, at, message

_Event: TypeAlias = Action | tuple[Action, int]
"""Completed action, without the rank except for a reduction; I also counts as B for the producers of its stage."""


def _waits_for(schedule: Schedule, rendezvous: bool) -> Callable[[Action], Iterator[_Event]]:
    """Return a function from an action to the events that must precede its end."""
    homes = schedule.homes()
    communicates = schedule.has_communication
    copies: dict[int, set[int]] = {}
    for (stage, _), rank in homes.items():
        copies.setdefault(stage, set()).add(rank)

    def result(kind: Literal["F", "B"], stage: int, other: int, i: int) -> _Event:
        if communicates and homes.get((stage, i)) != homes.get((other, i)):
            return message(stage, "RECV_F" if kind == "F" else "RECV_B", i, other)
        return Action(other, kind, i)

    def needs(action: Action) -> Iterator[_Event]:
        s, kind, i = action.stage, action.kind, action.microbatch
        if kind == "REDUCE_GRAD":
            yield from ((action, rank) for rank in sorted(copies[s]))
        if i is None:
            return
        if kind in ("F", "B", "I"):
            if kind != "F":
                yield Action(s, "F", i)
            for other in schedule.inputs(action):
                yield result("F" if kind == "F" else "B", s, other, i)
        elif kind == "W":
            yield Action(s, "I", i)
        elif kind in ("OFFLOAD", "RELOAD"):
            yield Action(s, "F" if kind == "OFFLOAD" else "OFFLOAD", i)
        else:
            if kind.startswith("SEND"):
                yield Action(s, "F" if kind == "SEND_F" else "B", i)
            if rendezvous or kind.startswith("RECV"):
                yield action.peer

    return needs


def _text(event: _Event) -> str:
    return str(event) if isinstance(event, Action) else "{} of rank {}".format(*event)


def replay(schedule: Schedule, *, rendezvous: bool = False) -> list[tuple[int, int]]:
    """Return (rank, position) of all actions in an order that satisfies every dependency.

    A receive waits for its send. In a compute-only schedule, a computation waits for the computations of the stages
    whose results it needs. OVERLAP_F_B starts when both parts can start. A gradient reduction ends when all copies of
    the stage have reached it.

    Args:
        schedule: Schedule with or without communication, complete in the sense of `verify`.
        rendezvous: A send also waits for its receive, as for large messages, instead of being buffered.

    Raises:
        ScheduleError: HP320 with the deadlocked ranks and the event each waits for.
    """
    needs = _waits_for(schedule, rendezvous)
    happened: set[_Event] = set()
    head = [0] * len(schedule.ranks)
    order: list[tuple[int, int]] = []
    missing: dict[int, _Event] = {}
    before = None
    while before != (before := (len(order), len(happened))):
        for rank, actions in enumerate(schedule.ranks):
            while head[rank] < len(actions):
                action = actions[head[rank]]
                if action.kind in PEERS:
                    # A peer waits until this action is reached: a rendezvous completes on both sides at once.
                    happened.add(action)
                elif action.kind == "REDUCE_GRAD":
                    happened.add((action, rank))
                lacks = (e for leaf in action.leaves for e in needs(leaf) if e not in happened)
                if event := next(lacks, None):
                    missing[rank] = event
                    break
                for leaf in action.leaves:
                    happened.add(leaf)
                    if leaf.kind == "I":
                        happened.add(Action(leaf.stage, "B", leaf.microbatch))
                order.append((rank, head[rank]))
                head[rank] += 1
    stuck = [rank for rank, actions in enumerate(schedule.ranks) if head[rank] < len(actions)]
    if stuck:
        lines = [
            f"rank {r}, action {head[r]}: {schedule.ranks[r][head[r]]} waits for {_text(missing[r])}"
            for r in stuck
        ]
        sends = " when sends wait for their receives" if rendezvous else ""
        raise ScheduleError(
            f"the schedule deadlocks{sends}: {lines[0]}",
            where=at(schedule, stuck[0], head[stuck[0]]),
            others=lines[1:],
        )
    return order
