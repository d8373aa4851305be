"""Schedules on a V: rank r of p holds stage r on the way down and stage 2p - 1 - r on the way back.

The last rank holds the turn and rank 0 both ends, so the loss of a microbatch comes back to where it started and
memory is even over the ranks. Both schedules are written as phases per rank; `down` and `up` are the two stages.
"""

from __future__ import annotations

from typing import Literal

from hyper_parallel.ir import Action, ActionKind


class _Rank:
    """Writes the actions of one rank, counting microbatches per stage and kind."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self.stage = {"down": rank, "up": 2 * ranks - 1 - rank}
        self.microbatches = microbatches
        self.actions: list[Action] = []
        self.count = {(way, kind): 0 for way in self.stage for kind in "FB"}
        self.pending: list[Action] = []

    def take(self, way: Literal["down", "up"], kind: Literal["F", "B", "I"]) -> Action:
        """The next microbatch of a stage; an input gradient leaves its weight gradient pending."""
        counter = (way, "F" if kind == "F" else "B")
        action = Action(self.stage[way], kind, self.count[counter])
        self.count[counter] += 1
        if kind == "I":
            self.pending.append(Action(action.stage, "W", action.microbatch))
        return action

    def add(self, way: Literal["down", "up"], kind: Literal["F", "B", "I"]) -> None:
        self.actions.append(self.take(way, kind))

    def weight(self) -> None:
        """The oldest pending weight gradient."""
        self.actions.append(self.pending.pop(0))

    def overlap(self, forward: Literal["down", "up"], backward: Literal["down", "up"]) -> None:
        kind: ActionKind = "OVERLAP_F_B"
        parts = (self.take(forward, "F"), self.take(backward, "B"))
        self.actions.append(Action(-1, kind, None, parts))

    def left(self, way: Literal["down", "up"], kind: Literal["F", "B"]) -> int:
        return self.microbatches - self.count[way, kind]


def zbv_ranks(p: int, m: int) -> list[list[Action]]:
    """ZBV: no bubble in the steady state when tf = ti = tw, with the memory of 1F1B on rank 0.

    Needs m >= 2p. With unit times u per stage and kind the step takes 6 m u + (p - 1) u: the ranks start one after
    another and then work without a pause. At most 2p stage activations on a rank.

    Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 6 (ZB-V).
    """
    rows = []
    for rank in range(p):
        r = _Rank(rank, p, m)
        for _ in range(2 * (p - rank) - 1):
            r.add("down", "F")
        for _ in range(rank):
            r.add("up", "F")
            r.add("down", "F")
        for _ in range(p - rank):
            r.add("up", "F")
            r.add("up", "I")
            r.weight()
        while r.left("up", "F"):
            if r.left("down", "F"):
                r.add("down", "F")
            r.add("down", "I")
            r.weight()
            r.add("up", "F")
            r.add("up", "I")
            r.weight()
        # Input gradients first for the ranks that wait for them; weight gradients fill the end.
        for _ in range(rank):
            r.add("down", "I")
            r.add("up", "I")
        for _ in range(p - rank):
            r.add("down", "I")
            r.weight()
        while r.pending:
            r.weight()
        rows.append(r.actions)
    return rows


def dualpipev_ranks(p: int, m: int) -> list[list[Action]]:
    """DualPipeV: forwards and backwards of different microbatches overlap in the steady state.

    Needs m >= 2p. With the times of one stage and tf = ti, the step takes (p-1)(tfb + tb - 3 tw) longer than the rank
    with the least work, where tfb >= tb is the time of an overlapped forward and backward. Every rank holds at most
    2p + 1 stage activations.

    Source: DeepSeek-AI 2024, DeepSeek-V3 technical report, section 3.2.1 (DualPipe), halved at the middle so that no
        parameters are held twice.
    """
    rows = []
    for rank in range(p):
        r = _Rank(rank, p, m)
        for _ in range(2 * (p - rank - 1)):
            r.add("down", "F")
        for _ in range(rank + 1):
            r.add("down", "F")
            r.add("up", "F")
        for _ in range(p - rank - 1):
            r.add("up", "I")
            r.weight()
            r.add("up", "F")
        for i in range(m - 2 * p + rank + 1):
            if i == 0 and rank == p - 1:
                # The first backward is ready on the last rank before the next forward arrives: do not couple them.
                r.add("down", "F")
                r.add("up", "B")
            else:
                r.overlap("down", "up")
            r.overlap("up", "down")
        for _ in range(p - rank - 1):
            r.add("up", "B")
            r.overlap("up", "down")
        # The second half of the last full backwards is split; its weight gradients fill the way out.
        for i in range(2 * (rank + 1)):
            r.add("down" if i % 2 else "up", "I" if i > rank else "B")
        for _ in range(p - rank - 1):
            r.weight()
            r.add("down", "I")
        while r.pending:
            r.weight()
        rows.append(r.actions)
    return rows
