"""What one rank does in each schedule, written as phases: a pattern of actions and how often it comes.

Notation of the formulas: p ranks, v stages per rank, m microbatches; tf, ti, tw seconds of forward, input gradient
and weight gradient of all stages of a rank; tb = ti + tw. The bubble is the step time without transfers minus the
work of one rank, m (tf + tb).

On a V, rank r of p holds stage r on the way down and stage 2p - 1 - r on the way back. The last rank holds the turn and
rank 0 both ends, so the loss of a microbatch comes back to where it started and memory is even over the ranks.

Several schedules are made for at least as many microbatches as their phases need, and the surplus is left out. That is
always legal: dependencies connect actions of one microbatch only, so removing whole microbatches keeps the rest in a
possible order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from hyper_parallel.ir import Action, ActionKind


class RankProgram:
    """The actions of one rank; every action takes the next microbatch of its stage.

    Attributes:
        actions: What was added.
        put_off: Weight gradients whose input gradient was added, oldest first.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self.actions: list[Action] = []
        self.put_off: deque[Action] = deque()
        self._stages = stages
        self._done = Counter[tuple[bool, int]]()

    def add(self, pattern: str, times: int = 1) -> None:
        """Add a pattern some times.

        Args:
            pattern: Words: `F0`, `B1`, `I0` for a forward, backward, input gradient of the rank's stage 0 or 1; `W` for
                the oldest weight gradient that was put off; `F0+B1` for an overlap.
            times: How often; nothing is added for 0 and less.
        """
        for word in pattern.split() * times:
            parts = tuple(self._next(part) for part in word.split("+"))
            overlap = Action(-1, "OVERLAP_F_B", None, parts)
            self.actions.append(overlap if len(parts) > 1 else parts[0])

    def added(self, kind: ActionKind, stage: int) -> int:
        """Forwards, or backwards of any kind, that a stage has had."""
        return self._done[kind == "F", stage]

    def _next(self, word: str) -> Action:
        if word == "W":
            return self.put_off.popleft()
        kind, stage = word[0], int(word[1:])
        i = self._done[kind == "F", stage]
        self._done[kind == "F", stage] += 1
        if kind == "I":
            self.put_off.append(Action(self._stages[stage], "W", i))
        return Action(self._stages[stage], kind, i)  # type: ignore[arg-type]


def gpipe(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """All forwards, then all backwards. Bubble (p-1)(tf+tb); m microbatches in flight."""
    r.add("F0", m)
    r.add("B0", m)


def one_f_one_b(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """Backwards as early as possible. Bubble (p-1)(tf+tb); min(m, p - rank) microbatches in flight."""
    warmup = min(m, p - 1 - rank)
    r.add("F0", warmup)
    r.add("F0 B0", m - warmup)
    r.add("B0", warmup)


def interleaved(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """1F1B over v stages per rank, microbatches in rounds of m / max(1, m // p).

    Bubble (p-1)(tf+tb)/v when p divides m; min(m v, 2 (p - rank - 1) + (v - 1) round + 1) stage inputs in flight.
    """
    size = m // max(1, m // p)
    stages = [k // size % v for k in range(m * v)]
    warmup = min(m * v, 2 * (p - 1 - rank) + (v - 1) * size)
    for k in range(warmup + m * v):
        if k < m * v:
            r.add(f"F{stages[k]}")
        if k >= warmup:
            r.add(f"B{v - 1 - stages[k - warmup]}")


def zb_h1(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """1F1B with the backward split; rank r puts its weight gradients off by r microbatches.

    Bubble (p-1)(tf+tb-2tw) when tw <= min(tf, ti); p microbatches in flight on every rank, as on rank 0 of 1F1B.
    """
    m, warmup = max(m, p), p - 1 - rank
    r.add("F0", warmup)
    r.add("F0 I0", rank)
    r.add("F0 I0 W", m - warmup - rank)
    r.add("I0 W", warmup)
    r.add("W", rank)


def zbv(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """ZBV: no bubble in the steady state when tf = ti = tw, with the memory of 1F1B on rank 0.

    With unit times u per stage and kind the step takes 6 m u + (p - 1) u for m >= 2p: the ranks start one after
    another and then work without a pause. At most 2p stage activations on a rank.

    Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 6 (ZB-V).
    """
    m = max(m, 2 * p)
    r.add("F0", 2 * (p - rank) - 1)
    r.add("F1 F0", rank)
    r.add("F1 I1 W", p - rank)
    while r.added("F", 1) < m:
        r.add("F0", min(1, m - r.added("F", 0)))
        r.add("I0 W F1 I1 W")
    # Input gradients first for the ranks that wait for them; weight gradients fill the end.
    r.add("I0 I1", rank)
    r.add("I0 W", p - rank)
    r.add("W", len(r.put_off))


def dualpipev(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """DualPipeV: forwards and backwards of different microbatches overlap in the steady state.

    Needs m >= 2p. With the times of one stage and tf = ti, the step takes (p-1)(tfb + tb - 3 tw) longer than the rank
    with the least work, where tfb >= tb is the time of an overlapped forward and backward. Every rank holds at most
    2p + 1 stage activations.

    Source: DeepSeek-AI 2024, DeepSeek-V3 technical report, section 3.2.1 (DualPipe), halved at the middle so that no
        parameters are held twice.
    """
    r.add("F0", 2 * (p - rank - 1))
    r.add("F0 F1", rank + 1)
    r.add("I1 W F1", p - rank - 1)
    steady = m - 2 * p + rank + 1
    if rank == p - 1:
        # The first backward is ready on the last rank before the next forward arrives: do not couple them.
        r.add("F0 B1 F1+B0", min(1, steady))
        steady -= 1
    r.add("F0+B1 F1+B0", steady)
    r.add("B1 F1+B0", p - rank - 1)
    # The second half of the last full backwards is split; its weight gradients fill the way out.
    for i in range(2 * (rank + 1)):
        r.add(f"{'I' if i > rank else 'B'}{1 - i % 2}")
    r.add("W I0", p - rank - 1)
    r.add("W", len(r.put_off))
