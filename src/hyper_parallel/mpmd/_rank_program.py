"""Actions of one rank for each schedule, written as phases: a pattern of actions and its number of repetitions.

Notation of the formulas: p ranks, v stages per rank, m microbatches; tf, ti, tw seconds of forward, input gradient
and weight gradient of all stages of a rank; tb = ti + tw. The bubble is the step time without transfers minus the
work of one rank, m (tf + tb).

In a V-shaped schedule, rank r of p holds stages r and 2p - 1 - r. Rank 0 holds the first and the last stage, rank p - 1
the two in the middle. The loss is computed on the rank that reads the batch, and memory is even over the ranks.

Some schedules are generated for the minimum number of microbatches of their phases, and surplus microbatches are
removed. This is legal: dependencies connect actions of one microbatch only, so the order of the others stays valid.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from hyper_parallel.ir import Action, ActionKind


class RankProgram:
    """Builder of one rank's actions; each action takes the next microbatch of its stage.

    Attributes:
        actions: Actions added so far.
        pending_weights: W actions whose I action was added, oldest first.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self.actions: list[Action] = []
        self.pending_weights: deque[Action] = deque()
        self._stages = stages
        self._done = Counter[tuple[bool, int]]()

    def add(self, pattern: str, times: int = 1) -> None:
        """Append a pattern `times` times.

        Args:
            pattern: Words separated by blanks: `F0`, `B1`, `I0` for a forward, backward or input gradient of the
                rank's stage 0 or 1; `W` for the oldest pending weight gradient; `F0+B1` for an overlap.
            times: Repetitions; nothing is added for 0 and less.
        """
        for word in pattern.split() * times:
            parts = tuple(self._next(part) for part in word.split("+"))
            overlap = Action(-1, "OVERLAP_F_B", None, parts)
            self.actions.append(overlap if len(parts) > 1 else parts[0])

    def count(self, kind: ActionKind, stage: int) -> int:
        """Return the number of forwards, or of backwards of any kind, added for a stage."""
        return self._done[kind == "F", stage]

    def _next(self, word: str) -> Action:
        if word == "W":
            return self.pending_weights.popleft()
        kind, stage = word[0], int(word[1:])
        i = self._done[kind == "F", stage]
        self._done[kind == "F", stage] += 1
        if kind == "I":
            self.pending_weights.append(Action(self._stages[stage], "W", i))
        return Action(self._stages[stage], kind, i)  # type: ignore[arg-type]


def gpipe(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """Append all forwards, then all backwards. Bubble (p-1)(tf+tb); m microbatches in flight."""
    r.add("F0", m)
    r.add("B0", m)


def one_f_one_b(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """Append each backward as early as possible. Bubble (p-1)(tf+tb); min(m, p - rank) microbatches in flight."""
    warmup = min(m, p - 1 - rank)
    r.add("F0", warmup)
    r.add("F0 B0", m - warmup)
    r.add("B0", warmup)


def interleaved(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """Append 1F1B over v stages per rank, microbatches in rounds of m / max(1, m // p).

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
    """Append 1F1B with a split backward; rank r delays its weight gradients by r microbatches.

    Bubble (p-1)(tf+tb-2tw) when tw <= min(tf, ti); p microbatches in flight on every rank, as on rank 0 of 1F1B.
    """
    m, warmup = max(m, p), p - 1 - rank
    r.add("F0", warmup)
    r.add("F0 I0", rank)
    r.add("F0 I0 W", m - warmup - rank)
    r.add("I0 W", warmup)
    r.add("W", rank)


def zbv(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """Append ZBV: no bubble in the steady state when tf = ti = tw, with the memory of 1F1B on rank 0.

    With a time u per stage and kind, the step takes 6 m u + (p - 1) u for m >= 2p: ranks start one after the other
    and are then never idle. At most 2p stage activations per rank.

    Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 6 (ZB-V).
    """
    m = max(m, 2 * p)
    r.add("F0", 2 * (p - rank) - 1)
    r.add("F1 F0", rank)
    r.add("F1 I1 W", p - rank)
    while r.count("F", 1) < m:
        r.add("F0", min(1, m - r.count("F", 0)))
        r.add("I0 W F1 I1 W")
    # Input gradients come first, because other ranks wait for them; weight gradients fill the cooldown.
    r.add("I0 I1", rank)
    r.add("I0 W", p - rank)
    r.add("W", len(r.pending_weights))


def dualpipev(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """Append DualPipeV: forward and backward of different microbatches overlap in the steady state.

    Needs m >= 2p. With times of one stage and tf = ti, the bubble is (p-1)(tfb + tb - 3 tw), where tfb >= tb is the
    time of an overlapped forward and backward. Each rank holds at most 2p + 1 stage activations.

    Source: DeepSeek-AI 2024, DeepSeek-V3 technical report, section 3.2.1 (DualPipe), cut in half so that no rank
        holds parameters twice.
    """
    r.add("F0", 2 * (p - rank - 1))
    r.add("F0 F1", rank + 1)
    r.add("I1 W F1", p - rank - 1)
    steady = m - 2 * p + rank + 1
    if rank == p - 1:
        # On the last rank, the first backward is ready before the next forward arrives: do not overlap them.
        r.add("F0 B1 F1+B0", min(1, steady))
        steady -= 1
    r.add("F0+B1 F1+B0", steady)
    r.add("B1 F1+B0", p - rank - 1)
    # The later half of the last backwards is split; their weight gradients fill the cooldown.
    for i in range(2 * (rank + 1)):
        r.add(f"{'I' if i > rank else 'B'}{1 - i % 2}")
    r.add("W I0", p - rank - 1)
    r.add("W", len(r.pending_weights))
