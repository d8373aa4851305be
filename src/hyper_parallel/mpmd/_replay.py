"""Replay of a schedule without times: find an order of all actions, or the deadlock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule
from hyper_parallel.ir.schedule import PEERS, at

_Event: TypeAlias = tuple[int, str, int | None]
"""Stage, kind and microbatch of a completed action; I also counts as B for the previous stage."""


def _event(action: Action) -> _Event:
    return action.stage, action.kind, action.microbatch


def _waits_for(schedule: Schedule, rendezvous: bool) -> Callable[[Action], Iterator[_Event]]:
    """Return a function from an action to the events that must precede its end."""
    place = schedule.placement()
    communicates = schedule.has_communication
    last = schedule.stages - 1

    def result(kind: str, stage: int, other: int, i: int) -> _Event:
        if communicates and place[stage] != place[other]:
            return stage, f"RECV_{kind}", i
        return other, kind, i

    def needs(action: Action) -> Iterator[_Event]:
        s, kind, i = action.stage, action.kind, action.microbatch
        if i is None:
            return
        if kind == "F":
            if s:
                yield result("F", s, s - 1, i)
        elif kind in ("B", "I"):
            yield s, "F", i
            if s < last:
                yield result("B", s, s + 1, i)
        elif kind == "W":
            yield s, "I", i
        elif kind in ("OFFLOAD", "RELOAD"):
            yield s, "F" if kind == "OFFLOAD" else "OFFLOAD", i
        else:
            if kind.startswith("SEND"):
                yield s, kind[-1], i
            if rendezvous or kind.startswith("RECV"):
                step, peer = PEERS[kind]
                yield s + step, peer, i

    return needs


def replay(schedule: Schedule, *, rendezvous: bool = False) -> list[tuple[int, int]]:
    """Return (rank, position) of all actions in an order that satisfies every dependency.

    A receive waits for its send. In a compute-only schedule, a computation waits for the computation of the
    neighbouring stage. OVERLAP_F_B starts when both parts can start.

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
                    happened.add(_event(action))
                lacks = (e for leaf in action.leaves for e in needs(leaf) if e not in happened)
                if event := next(lacks, None):
                    missing[rank] = event
                    break
                for leaf in action.leaves:
                    happened.add(_event(leaf))
                    if leaf.kind == "I":
                        happened.add((leaf.stage, "B", leaf.microbatch))
                order.append((rank, head[rank]))
                head[rank] += 1
    stuck = [rank for rank, actions in enumerate(schedule.ranks) if head[rank] < len(actions)]
    if stuck:
        lines = [
            "rank {}, action {}: {} waits for {}{}{}".format(
                r, head[r], schedule.ranks[r][head[r]], *missing[r]
            )
            for r in stuck
        ]
        sends = " when sends wait for their receives" if rendezvous else ""
        raise ScheduleError(
            f"the schedule deadlocks{sends}: {lines[0]}",
            where=at(schedule, stuck[0], head[stuck[0]]),
            others=lines[1:],
        )
    return order
