"""Run a schedule without time: every rank in its order, waiting where it must; finds deadlocks."""

from __future__ import annotations

from typing import Final

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule
from hyper_parallel.ir.schedule import at

_EVENTS: Final = {
    "F": 0,
    "B": 1,
    "I": 2,
    "SEND_F": 3,
    "RECV_F": 4,
    "SEND_B": 5,
    "RECV_B": 6,
    "RELOAD": 7,
    "OFFLOAD": 8,
}


class _Keys:
    """Numbers for "this happened to this microbatch at this stage", and what each action waits for and announces."""

    def __init__(self, schedule: Schedule, rendezvous: bool) -> None:
        self.stages, self.microbatches = schedule.stages, schedule.microbatches
        self.place = schedule.placement()
        self.communicates = schedule.has_communication
        self.rendezvous = rendezvous
        self.size = len(_EVENTS) * self.stages * self.microbatches

    def key(self, event: str, stage: int, microbatch: int) -> int:
        return (_EVENTS[event] * self.stages + stage) * self.microbatches + microbatch

    def text(self, key: int) -> str:
        rest, microbatch = divmod(key, self.microbatches)
        event, stage = divmod(rest, self.stages)
        return f"{stage}{list(_EVENTS)[event]}{microbatch}"

    def _edge(self, received: str, computed: str, stage: int, other: int, i: int) -> int:
        if self.communicates and self.place[stage] != self.place[other]:
            return self.key(received, stage, i)
        return self.key(computed, other, i)

    def needs(self, action: Action) -> list[int]:
        """What must have happened before the action ends."""
        kind, s, i = action.kind, action.stage, action.microbatch
        if i is None:
            return []
        if kind == "F":
            return [self._edge("RECV_F", "F", s, s - 1, i)] if s else []
        if kind in ("B", "I"):
            own = [self.key("F", s, i)]
            if s < self.stages - 1:
                own.append(self._edge("RECV_B", "B", s, s + 1, i))
            return own
        if kind == "W":
            return [self.key("I", s, i)]
        if kind in ("SEND_F", "SEND_B"):
            produced = self.key("F" if kind == "SEND_F" else "B", s, i)
            peer = (
                self.key("RECV_F", s + 1, i) if kind == "SEND_F" else self.key("RECV_B", s - 1, i)
            )
            return [produced, peer] if self.rendezvous else [produced]
        if kind == "RECV_F":
            return [self.key("SEND_F", s - 1, i)]
        if kind == "RECV_B":
            return [self.key("SEND_B", s + 1, i)]
        return [self.key("F", s, i)] if kind == "OFFLOAD" else [self.key("OFFLOAD", s, i)]

    def first_missing(self, action: Action, happened: bytearray) -> int | None:
        """The first thing the action waits for, or None."""
        for leaf in action.leaves:
            for key in self.needs(leaf):
                if not happened[key]:
                    return key
        return None

    def gives(self, action: Action) -> list[int]:
        """What the action announces: a computation when it ends, a send or receive when it is reached."""
        kind, s, i = action.kind, action.stage, action.microbatch
        if i is None or kind == "W":
            return []
        if kind == "I":
            return [self.key("I", s, i), self.key("B", s, i)]
        return [self.key(kind, s, i)]


def replay(schedule: Schedule, *, rendezvous: bool = False) -> list[tuple[int, int]]:
    """Run every rank as far as it gets and return the (rank, position) of the actions in an order that works.

    A receive waits for its send. Without sends and receives in the schedule a computation waits for the neighbouring
    stage's. OVERLAP_F_B starts when both parts can.

    Args:
        schedule: Schedule with or without communication, complete as `verify` checks it before it comes here.
        rendezvous: A send also waits for its receive, as large messages do, instead of being buffered.

    Raises:
        ScheduleError: HP320 with the ranks that wait for ever and what they wait for.
    """
    keys = _Keys(schedule, rendezvous)
    happened = bytearray(keys.size)
    sleepers: dict[int, list[int]] = {}
    head = [0] * len(schedule.ranks)
    blocked: dict[int, int] = {}
    order: list[tuple[int, int]] = []
    runnable = list(range(len(schedule.ranks)))[::-1]

    def announce(action: Action) -> None:
        for key in keys.gives(action):
            happened[key] = 1
            for sleeper in sleepers.pop(key, ()):
                blocked.pop(sleeper, None)
                runnable.append(sleeper)

    while runnable:
        rank = runnable.pop()
        actions = schedule.ranks[rank]
        while head[rank] < len(actions):
            action = actions[head[rank]]
            message = action.kind.startswith(("SEND", "RECV"))
            if message:
                # Being reached is what the other side waits for: a rendezvous completes on both sides at once.
                announce(action)
            missing = keys.first_missing(action, happened)
            if missing is not None:
                sleepers.setdefault(missing, []).append(rank)
                blocked[rank] = missing
                break
            if not message:
                for leaf in action.leaves:
                    announce(leaf)
            order.append((rank, head[rank]))
            head[rank] += 1
    if blocked:
        lines = [
            f"rank {r}, action {head[r]}: {schedule.ranks[r][head[r]]} waits for {keys.text(k)}"
            for r, k in sorted(blocked.items())
        ]
        first = min(blocked)
        sends = " when sends wait for their receives" if rendezvous else ""
        raise ScheduleError(
            f"the schedule deadlocks{sends}: {lines[0]}",
            where=at(schedule, first, head[first]),
            others=lines[1:],
        )
    return order
