"""Everything that must hold before a process starts: complete, ordered, matched, free of deadlock, within memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule
from hyper_parallel.ir.schedule import at
from hyper_parallel.mpmd._replay import replay

_Spot = tuple[int, int]


def verify(
    schedule: Schedule,
    *,
    max_in_flight: int | Sequence[int] | None = None,
    rendezvous: bool = True,
) -> None:
    """Prove that a schedule can run and computes every gradient once.

    Checked: stages lie on one rank each; every (stage, microbatch) has one F and either one B or one I and one W, in
    this order; sends and receives, if any are written out, are complete, on the right ranks, after what makes and
    before what uses the message, and in one order per pair of ranks and direction; gathered parameters and offloaded
    activations are there when used; the ranks do not deadlock with blocking receives; activations in flight.

    Args:
        schedule: Schedule with or without communication.
        max_in_flight: Most (stage, microbatch) activations on a rank at once: one number, or one per rank.
        rendezvous: Also prove it for sends that wait for their receives.

    Raises:
        ScheduleError: HP320 for the first thing that is wrong, marked in the grid.
    """
    spots = _index(schedule)
    _check_compute(schedule, spots)
    if schedule.has_communication:
        _check_messages(schedule, spots)
    _check_sharding(schedule)
    _check_offload(schedule, spots)
    try:
        replay(schedule, rendezvous=rendezvous and schedule.has_communication)
    except ScheduleError:
        replay(schedule)  # what deadlocks with buffered sends as well is reported as that
        raise
    if max_in_flight is not None:
        _check_in_flight(schedule, max_in_flight)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Most (stage, microbatch) activations each rank holds at once: from F to B or W, without offloaded ones."""
    return tuple(max((n for n, _ in _live(row)), default=0) for row in schedule.ranks)


def _live(row: Sequence[Action]) -> list[tuple[int, int]]:
    change = {"F": 1, "B": -1, "W": -1, "OFFLOAD": -1, "RELOAD": 1}
    live, out = 0, []
    for position, action in enumerate(row):
        for leaf in action.leaves:
            live += change.get(leaf.kind, 0)
            out.append((live, position))
    return out


def _check_in_flight(schedule: Schedule, limit: int | Sequence[int]) -> None:
    for rank, row in enumerate(schedule.ranks):
        allowed = limit if isinstance(limit, int) else limit[rank]
        for live, position in _live(row):
            if live > allowed:
                _fail(
                    schedule,
                    (rank, position),
                    f"rank {rank} holds {live} activations at once",
                    got=live,
                    allowed=f"at most {allowed}",
                )


def _fail(schedule: Schedule, spot: _Spot, what: str, **facts: object) -> NoReturn:
    raise ScheduleError(what, where=at(schedule, *spot), **facts)  # type: ignore[arg-type]


def _index(schedule: Schedule) -> dict[Action, _Spot]:
    """Where every action with a microbatch stands; refuses numbers out of range and repetitions."""
    spots: dict[Action, _Spot] = {}
    for rank, position, leaf in schedule.leaves():
        spot = (rank, position)
        if not 0 <= leaf.stage < schedule.stages:
            _fail(
                schedule,
                spot,
                f"{leaf} is of a stage that does not exist",
                allowed=f"0 to {schedule.stages - 1}",
            )
        if leaf.microbatch is None:
            continue
        if not 0 <= leaf.microbatch < schedule.microbatches:
            _fail(
                schedule,
                spot,
                f"{leaf} is of a microbatch that does not exist",
                allowed=f"0 to {schedule.microbatches - 1}",
            )
        if leaf in spots:
            _fail(
                schedule,
                spot,
                f"{leaf} happens twice, first as action {spots[leaf][1]} of rank {spots[leaf][0]}",
            )
        spots[leaf] = spot
    return spots


def _check_compute(schedule: Schedule, spots: dict[Action, _Spot]) -> None:
    schedule.placement()
    for s in range(schedule.stages):
        for i in range(schedule.microbatches):
            f, b, gi, gw = (spots.get(Action(s, kind, i)) for kind in ("F", "B", "I", "W"))
            if f is None:
                last = max(spot for a, spot in spots.items() if a.stage == s)
                _fail(schedule, last, f"stage {s} has no forward of microbatch {i}")
            if b and (gi or gw):
                _fail(schedule, b, f"the backward of {s}F{i} happens as a whole and in parts")
            if bool(gi) != bool(gw):
                lost, there = ("W", gi) if gi else ("I", gw)
                assert there is not None
                _fail(schedule, there, f"the backward of {s}F{i} has no {s}{lost}{i}")
            if not b and not gi:
                _fail(schedule, f, f"{s}F{i} has no backward")
            chain = [spot for spot in (f, gi, gw, b) if spot]
            for earlier, later in pairwise(chain):
                if later <= earlier:
                    _fail(schedule, later, f"a backward of {s}F{i} stands before what it needs")


def _check_messages(schedule: Schedule, spots: dict[Action, _Spot]) -> None:
    """Every edge between ranks has its pair, and a pair of ranks agrees on the order of its messages."""
    place = schedule.placement()
    expected = set()
    for s in range(schedule.stages - 1):
        if place[s] == place[s + 1]:
            continue
        for i in range(schedule.microbatches):
            for send, recv, makes, uses in (
                (
                    Action(s, "SEND_F", i),
                    Action(s + 1, "RECV_F", i),
                    (Action(s, "F", i),),
                    (Action(s + 1, "F", i),),
                ),
                (
                    Action(s + 1, "SEND_B", i),
                    Action(s, "RECV_B", i),
                    (Action(s + 1, "B", i), Action(s + 1, "I", i)),
                    (Action(s, "B", i), Action(s, "I", i)),
                ),
            ):
                maker = next(spots[a] for a in makes if a in spots)
                user = next(spots[a] for a in uses if a in spots)
                sent, received = spots.get(send), spots.get(recv)
                if sent is None:
                    _fail(schedule, received or maker, f"{recv} has no {send}")
                if received is None:
                    _fail(schedule, sent, f"{send} has no {recv}")
                if sent[0] != maker[0] or sent < maker:
                    _fail(schedule, sent, f"{send} is not after its computation on rank {maker[0]}")
                if received[0] != user[0] or received > user:
                    _fail(schedule, received, f"{recv} is not before its use on rank {user[0]}")
                expected |= {send, recv}
    for action, spot in spots.items():
        if action.kind.startswith(("SEND", "RECV")) and action not in expected:
            _fail(schedule, spot, f"{action} has no stage on another rank as its peer")
    _check_message_order(schedule, place)


def _check_message_order(schedule: Schedule, place: dict[int, int]) -> None:
    """What one rank sends another arrives in the order in which it is received: NCCL has no tags to sort it."""
    sends: dict[_Spot, list[Action]] = {}
    receives: dict[_Spot, list[tuple[Action, _Spot]]] = {}
    for rank, position, a in schedule.leaves():
        if a.kind == "SEND_F":
            to = Action(a.stage + 1, "RECV_F", a.microbatch)
            sends.setdefault((rank, place[to.stage]), []).append(to)
        elif a.kind == "SEND_B":
            to = Action(a.stage - 1, "RECV_B", a.microbatch)
            sends.setdefault((rank, place[to.stage]), []).append(to)
        elif a.kind in ("RECV_F", "RECV_B"):
            peer = place[a.stage - 1 if a.kind == "RECV_F" else a.stage + 1]
            receives.setdefault((peer, rank), []).append((a, (rank, position)))
    for (sender, receiver), sent in sends.items():
        for next_sent, (action, spot) in zip(sent, receives[sender, receiver], strict=True):
            if next_sent != action:
                what = (
                    f"rank {receiver} receives {action} where rank {sender} sends for {next_sent}"
                )
                _fail(schedule, spot, what)


def _check_sharding(schedule: Schedule) -> None:
    """With any UNSHARD in the schedule, stages compute gathered; gradients are reduced after the last backward."""
    sharded = any(leaf.kind == "UNSHARD" for _, _, leaf in schedule.leaves())
    gathered: set[int] = set()
    backwards: dict[int, int] = {}
    reduced: set[int] = set()
    for rank, position, a in schedule.leaves():
        spot = (rank, position)
        if a.kind == "UNSHARD":
            if a.stage in gathered:
                _fail(schedule, spot, f"stage {a.stage} is gathered twice")
            gathered.add(a.stage)
        elif a.kind == "RESHARD":
            if a.stage not in gathered:
                _fail(schedule, spot, f"stage {a.stage} is freed without being gathered")
            gathered.remove(a.stage)
        elif a.kind == "REDUCE_GRAD":
            if a.stage in reduced or backwards.get(a.stage, 0) != schedule.microbatches:
                _fail(
                    schedule,
                    spot,
                    f"gradients of stage {a.stage} are reduced twice or before the last backward",
                )
            reduced.add(a.stage)
        elif a.kind in ("F", "B", "I", "W"):
            if sharded and a.stage not in gathered:
                _fail(schedule, spot, f"{a} computes with parameters that are not gathered")
            if a.kind in ("B", "W"):
                backwards[a.stage] = backwards.get(a.stage, 0) + 1
    for rank, position, a in schedule.leaves():
        if reduced and a.kind == "F" and a.stage not in reduced:
            _fail(
                schedule,
                (rank, position),
                f"gradients of stage {a.stage} are never reduced, others are",
            )
    if gathered:
        rank = schedule.placement()[min(gathered)]
        last = len(schedule.ranks[rank]) - 1
        _fail(schedule, (rank, last), f"stage {min(gathered)} holds gathered parameters at the end")


def _check_offload(schedule: Schedule, spots: dict[Action, _Spot]) -> None:
    """An offloaded activation leaves after its forward and is back before its backward, on its own rank."""
    for action, spot in spots.items():
        if action.kind not in ("OFFLOAD", "RELOAD"):
            continue
        s, i = action.stage, action.microbatch
        partner = spots.get(Action(s, "RELOAD" if action.kind == "OFFLOAD" else "OFFLOAD", i))
        if partner is None:
            _fail(schedule, spot, f"{action} has no partner")
        if action.kind == "OFFLOAD":
            forward = spots[Action(s, "F", i)]
            backward = spots.get(Action(s, "B", i)) or spots[Action(s, "I", i)]
            same = forward[0] == spot[0] == partner[0]
            if not (same and forward < spot < partner < backward):
                _fail(
                    schedule,
                    spot,
                    f"{action} and its reload do not lie between forward and backward",
                )
