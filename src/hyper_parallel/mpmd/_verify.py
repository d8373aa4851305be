"""Verification of a schedule before processes start: complete, ordered, matched, deadlock-free, within memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise, product
from typing import Final, NoReturn, TypeAlias

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, ActionKind, Schedule
from hyper_parallel.ir.schedule import COMPUTE, PEERS, at
from hyper_parallel.mpmd._tasks import StageCosts, cost_function, replay

_Spot: TypeAlias = tuple[int, int]
_Wrong: TypeAlias = tuple[_Spot, str]
_USES: Final[dict[str, tuple[ActionKind, ...]]] = {"RECV_F": ("F",), "RECV_B": ("B", "I")}


def verify(
    schedule: Schedule,
    *,
    max_in_flight: int | Sequence[int] | None = None,
    costs: StageCosts = (),
    max_bytes: int | Sequence[int] | None = None,
) -> None:
    """Raise an error unless a schedule can run and computes every gradient once.

    Checks:
        * each stage lies on one rank, or each microbatch of a copied stage on one of its copies;
        * all copies of a sharded stage have the same kinds of computations in the same order;
        * each (stage, microbatch) has one F, then, unless frozen, either one B or one I followed by one W;
        * sends and receives, if any, are complete and on the right ranks, after the producer and before the consumer;
        * from one rank to another, receives have the order of the sends;
        * parameters, if any are gathered, are gathered before their use and freed at the end;
        * gradients, if any are reduced, are reduced once per stage and copy, after the last backward;
        * the ranks do not deadlock, even if sends block until they are received;
        * activations in flight, and their bytes, stay within the limits.

    Args:
        schedule: Schedule with or without communication.
        max_in_flight: Limit of (stage, microbatch) activations in flight on a rank: one number, or one per rank.
        costs: Costs as for `schedule_tasks`; required with `max_bytes`, otherwise unused.
        max_bytes: Limit of `held_bytes`: one number, or one per rank.

    Raises:
        ScheduleError: HP320 for the first violation, usually with its place in the schedule.
    """
    spots = _index(schedule)
    homes = schedule.homes()
    wrong = chain(
        _wrong_computations(schedule, spots),
        _wrong_rounds(schedule, spots),
        _wrong_messages(schedule, spots, homes) if schedule.has_communication else (),
        _wrong_sharding(schedule),
    )
    for spot, what in wrong:
        _fail(schedule, spot, what)
    try:
        replay(schedule, rendezvous=schedule.has_communication)
    except ScheduleError:
        replay(schedule)  # a deadlock with buffered sends is reported as such
        raise
    if max_in_flight is not None:
        _check_live(schedule, _counted(schedule), max_in_flight, "activations at once")
    if max_bytes is not None:
        _check_live(schedule, _byte_changes(schedule, costs), max_bytes, "bytes at once")


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the maximum number of activations in flight on each rank, from F to B, or to W if the backward is split.

    The activations of a frozen stage live only during F.
    """
    return _maxima(schedule, _counted(schedule))


def held_bytes(schedule: Schedule, costs: StageCosts) -> tuple[int, ...]:
    """Return the maximum bytes of activations and gathered parameters on each rank, as the simulation counts them."""
    return _maxima(schedule, _byte_changes(schedule, costs))


_Changes: TypeAlias = Callable[[Action], tuple[int, int]]
"""Function from an action to the changes of a held quantity, (at its start, at its end)."""


def _counted(schedule: Schedule) -> _Changes:
    change = {"F": (1, 0), "B": (0, -1), "W": (0, -1)}
    return lambda a: change.get(a.kind, (0, 0)) if a.kind != "F" or schedule.is_trained(a.stage) else (1, -1)


def _byte_changes(schedule: Schedule, costs: StageCosts) -> _Changes:
    cost_of = cost_function(schedule, costs)
    return lambda a: cost_of(a)[2:]


def _maxima(schedule: Schedule, changes: _Changes) -> tuple[int, ...]:
    return tuple(max((n for n, _ in _live(row, changes)), default=0) for row in schedule.ranks)


def _live(row: Sequence[Action], changes: _Changes) -> Iterator[tuple[int, int]]:
    """Yield (quantity held during an action, index of the action) for each action of a rank."""
    live = 0
    for position, action in enumerate(row):
        for leaf in action.leaves:
            at_start, at_end = changes(leaf)
            yield live + at_start, position
            live += at_start + at_end


def _check_live(schedule: Schedule, changes: _Changes, limit: int | Sequence[int], unit: str) -> None:
    for rank, row in enumerate(schedule.ranks):
        allowed = limit if isinstance(limit, int) else limit[rank]
        for live, position in _live(row, changes):
            if live > allowed:
                what, most = f"rank {rank} holds {live} {unit}", f"at most {allowed}"
                _fail(schedule, (rank, position), what, got=live, allowed=most)


def _fail(schedule: Schedule, spot: _Spot, what: str, **facts: object) -> NoReturn:
    raise ScheduleError(what, where=at(schedule, *spot), **facts)  # type: ignore[arg-type]


def _index(schedule: Schedule) -> dict[Action, _Spot]:
    """Return a dict from action with microbatch to (rank, position); raise HP320 if one is repeated or out of range."""
    spots: dict[Action, _Spot] = {}
    for rank, position, leaf in schedule.leaves():
        spot = (rank, position)
        for kind, number, count in (
            ("stage", leaf.stage, schedule.stages),
            ("microbatch", leaf.microbatch or 0, schedule.microbatches),
        ):
            if not 0 <= number < count:
                what = f"{leaf}: {kind} out of range"
                _fail(schedule, spot, what, allowed=f"0 to {count - 1}")
        if leaf.microbatch is not None and (first := spots.setdefault(leaf, spot)) is not spot:
            what = f"{leaf} is scheduled twice, first as action {first[1]} of rank {first[0]}"
            _fail(schedule, spot, what)
    return spots


# Each function below yields violations and their positions. Only the first is reported, because later ones may follow
# from it.


def _wrong_computations(schedule: Schedule, spots: dict[Action, _Spot]) -> Iterator[_Wrong]:
    for s, i in product(range(schedule.stages), range(schedule.microbatches)):
        f, b, gi, gw = (spots.get(Action(s, kind, i)) for kind in ("F", "B", "I", "W"))
        parts = [spot for spot in (gi, gw) if spot]
        if not schedule.is_trained(s) and (b or parts):
            yield b or parts[0], f"the frozen stage {s} has a backward of microbatch {i}"
        elif not f:
            last = max(spot for a, spot in spots.items() if a.stage == s)
            yield last, f"stage {s} has no forward of microbatch {i}"
        elif b and parts:
            yield b, f"the backward of {s}F{i} is scheduled both as B and as I/W"
        elif len(parts) == 1:
            yield parts[0], f"the backward of {s}F{i} has no {s}{'W' if gi else 'I'}{i}"
        elif not b and not parts and schedule.is_trained(s):
            yield f, f"{s}F{i} has no backward"
        else:
            for earlier, later in pairwise((f, *parts, *filter(None, (b,)))):
                if later <= earlier:
                    yield (
                        later,
                        f"the backward of {s}F{i} is scheduled before an action that it depends on",
                    )


def _wrong_rounds(schedule: Schedule, spots: dict[Action, _Spot]) -> Iterator[_Wrong]:
    """Yield computations of sharded stages that differ between copies in kind or order."""
    rounds = schedule.rounds()
    sharded = schedule.graph.sharded if schedule.graph else frozenset()
    for rank, position, leaf in schedule.leaves():
        if leaf.stage not in sharded or leaf.kind not in COMPUTE:
            continue
        others = [a for a, _ in rounds.get(leaf, ()) if a.kind != leaf.kind]
        if others:
            r = spots[others[0]][0]
            yield (rank, position), f"{leaf} runs together with {others[0]} of rank {r}, which is of another kind"
        elif leaf not in rounds:
            yield (rank, position), f"a copy of stage {leaf.stage} has no computation for {leaf}"


def _wrong_messages(
    schedule: Schedule, spots: dict[Action, _Spot], homes: dict[tuple[int, int | None], int]
) -> Iterator[_Wrong]:
    """Yield sends and receives that are missing, misplaced or out of order."""
    expected: set[Action] = set()
    pairs = ((spot, send) for computed, spot in spots.items() for send in schedule.messages(computed))
    for maker, send in pairs:
        receive = send.peer
        if homes[receive.stage, send.microbatch] == maker[0]:
            continue
        expected |= {send, receive}
        sent, received = spots.get(send), spots.get(receive)
        uses = (Action(receive.stage, kind, send.microbatch) for kind in _USES[receive.kind])
        user = next(spots[use] for use in uses if use in spots)
        if sent is None:
            yield received or maker, f"{receive} has no {send}"
        elif received is None:
            yield sent, f"{send} has no {receive}"
        elif sent[0] != maker[0] or sent < maker:
            yield sent, f"{send} is not after its computation on rank {maker[0]}"
        elif received[0] != user[0] or received > user:
            yield received, f"{receive} is not before its use on rank {user[0]}"
    sends: dict[_Spot, list[Action]] = {}
    receives: dict[_Spot, list[Action]] = {}
    for rank, _, a in schedule.leaves():
        if a.kind not in PEERS:
            continue
        if a not in expected:
            yield spots[a], f"{a} has no peer stage on another rank"
        elif a.kind.startswith("SEND"):
            sends.setdefault((rank, homes[a.peer.stage, a.microbatch]), []).append(a.peer)
        else:
            receives.setdefault((homes[a.peer.stage, a.microbatch], rank), []).append(a)
    # Receives must have the order of the sends: NCCL has no tags to match messages.
    for (sender, receiver), sent_for in sends.items():
        for wanted, a in zip(sent_for, receives[sender, receiver], strict=True):
            if wanted != a:
                what = f"rank {receiver} receives {a}, but rank {sender} sends {wanted.peer} next"
                yield spots[a], what


def _wrong_sharding(schedule: Schedule) -> Iterator[_Wrong]:
    """Yield gathers, frees and gradient reductions that are missing, repeated or misplaced."""
    sharded = any(leaf.kind == "UNSHARD" for _, _, leaf in schedule.leaves())
    # Stage and rank: every copy of a stage gathers and reduces for itself.
    gathered: set[tuple[int, int]] = set()
    reduced: set[tuple[int, int]] = set()
    computed = {(a.stage, r) for r, _, a in schedule.leaves() if a.kind in COMPUTE}
    left = Counter((a.stage, r) for r, _, a in schedule.leaves() if a.kind in ("B", "W"))
    for rank, position, a in schedule.leaves():
        spot, s, copy = (rank, position), a.stage, (a.stage, rank)
        if copy not in computed:
            yield spot, f"{a} is on a rank that does not compute stage {s}"
        if a.kind == "UNSHARD":
            if copy in gathered:
                yield spot, f"stage {s} is gathered twice"
            gathered.add(copy)
        elif a.kind == "RESHARD":
            if copy not in gathered:
                yield spot, f"stage {s} is freed without being gathered"
            gathered.remove(copy)
        elif a.kind == "REDUCE_GRAD":
            if copy in reduced or left[copy]:
                yield spot, f"gradients of stage {s} are reduced twice or before the last backward"
            reduced.add(copy)
        elif a.kind in COMPUTE and sharded and copy not in gathered:
            yield spot, f"{a} computes with parameters that are not gathered"
        left[copy] -= a.kind in ("B", "W")
    for rank, position, a in schedule.leaves():
        unreduced = schedule.is_trained(a.stage) and (a.stage, rank) not in reduced
        if reduced and a.kind == "F" and unreduced:
            what = f"gradients of stage {a.stage} are never reduced, unlike those of other stages"
            yield (rank, position), what
    for s, rank in sorted(gathered):
        end = (rank, len(schedule.ranks[rank]) - 1)
        yield end, f"stage {s} holds gathered parameters at the end"
