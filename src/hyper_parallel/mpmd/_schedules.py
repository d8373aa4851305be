"""Table of schedules by name: actions of every rank, legal stages and microbatches, activations in flight.

The actions of a rank are written as phases: a pattern of actions and its number of repetitions. Formulas use p ranks, v
stages per rank and m microbatches. tf, ti and tw are the seconds of forward, input gradient and weight gradient of all
stages of a rank, and tb = ti + tw. The bubble is the step time without transfers minus the work m (tf + tb) of a rank.

In a V-shaped schedule, rank r of p holds stages r and 2p - 1 - r. Rank 0 holds the first and the last stage, rank p - 1
the two in the middle. The loss is computed on the rank that reads the batch, and memory is even over the ranks.

zb_h1 and zbv need a minimum number of microbatches. For fewer, they are generated with the minimum, and the surplus
microbatches are removed. Dependencies connect only actions of the same microbatch, so the remaining order is valid.
dualpipev requires at least 2p microbatches. Its overlaps shorten the work, so its docstring gives idle time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, ActionKind, Schedule
from hyper_parallel.ir.strategy import rank_stages
from hyper_parallel.units import plural


class RankProgram:
    """Builder of one rank's actions; each forward or backward runs the next microbatch of its stage.

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
        """Append the actions of a pattern, repeated `times` times.

        Args:
            pattern: Words separated by blanks. `F0`, `B1`, `I0`: forward, backward, input gradient of the rank's stage
                with this index, counted from 0. `W`: the oldest pending weight gradient. `F0+B1`: an overlap.
            times: Repetitions; 0 or less appends nothing.
        """
        for word in pattern.split() * times:
            parts = tuple(self._next(part) for part in word.split("+"))
            overlap = Action(-1, "OVERLAP_F_B", None, parts)
            self.actions.append(overlap if len(parts) > 1 else parts[0])

    def count(self, kind: ActionKind, stage: int) -> int:
        """Return the number of forwards added for a stage, or for any other kind the number of backwards (B or I)."""
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
    """Append 1F1B: min(m, p - rank - 1) warm-up forwards, pairs of a forward and a backward, remaining backwards.

    Bubble (p-1)(tf+tb); min(m, p - rank) microbatches in flight.
    """
    warmup = min(m, p - 1 - rank)
    r.add("F0", warmup)
    r.add("F0 B0", m - warmup)
    r.add("B0", warmup)


def interleaved(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """Append 1F1B over v stages per rank, with the microbatches in rounds of size `round` = m / max(1, m // p).

    Bubble (p-1)(tf+tb)/v when p divides m; min(m v, 2 (p - rank - 1) + (v - 1) round + 1) activations in flight.
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

    Bubble (p-1)(tf+tb-2tw) when tw <= min(tf, ti); min(m, p) microbatches in flight on every rank.
    """
    m, warmup = max(m, p), p - 1 - rank
    r.add("F0", warmup)
    r.add("F0 I0", rank)
    r.add("F0 I0 W", m - warmup - rank)
    r.add("I0 W", warmup)
    r.add("W", rank)


def zbv(r: RankProgram, rank: int, p: int, m: int, v: int) -> None:
    """Append ZBV, which has no bubble in the steady state when tf = ti = tw.

    If F, I and W of a stage take u seconds each, the step takes 6 m u + (p - 1) u for m >= 2p: rank r starts r u after
    rank 0, and no rank is idle between its first and last action. Each rank holds at most 2p stage activations.

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

    Needs m >= 2p. Idle time, with times of one stage instead of one rank, tf = ti, and tfb >= tb for an overlapped
    forward and backward: (p-1)(tfb + tb - 3 tw) on the last rank; no rank is idle for longer. Each rank holds at most
    2p + 1 stage activations.

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


@dataclass(frozen=True, slots=True)
class _Form:
    """Entry of the schedule table, for p ranks, m microbatches and v stages per rank.

    Attributes:
        write: Function of (program, rank, p, m, v) that appends the actions of a rank.
        in_flight: Function of (rank, p, m, v) that returns the maximum number of stage activations in flight.
        stages: Allowed numbers of stages per rank.
        legal: Function of (p, m) that returns whether m microbatches are allowed.
        rule: Function of p that describes the allowed numbers of microbatches.
    """

    write: Callable[[RankProgram, int, int, int, int], None]
    in_flight: Callable[[int, int, int, int], int]
    stages: range = range(1, 2)
    legal: Callable[[int, int], bool] = lambda p, m: True
    rule: Callable[[int], str] = lambda p: "1 and more"


_ANY: Final = range(1, 1 << 30)
_V: Final = range(2, 3)
_FORMS: Final = {
    "gpipe": _Form(gpipe, lambda r, p, m, v: m),
    "1f1b": _Form(one_f_one_b, lambda r, p, m, v: min(m, p - r)),
    "interleaved_1f1b": _Form(
        interleaved,
        lambda r, p, m, v: min(m * v, 2 * (p - r - 1) + (v - 1) * (m // max(1, m // p)) + 1),
        _ANY,
        lambda p, m: m % max(1, m // p) == 0,
        lambda p: f"any multiple of {p}",
    ),
    "zb_h1": _Form(zb_h1, lambda r, p, m, v: min(m, p)),
    "zbv": _Form(zbv, lambda r, p, m, v: min(2 * m, 2 * p), _V),
    "dualpipev": _Form(
        dualpipev,
        lambda r, p, m, v: min(2 * m, 2 * p + 1),
        _V,
        lambda p, m: m >= 2 * p,
        lambda p: f"{2 * p} (two per rank) and more",
    ),
}
SCHEDULES: Final = tuple(_FORMS)


def make_schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Return the compute-only schedule of this name.

    Rank r holds stages r, r + p, r + 2p, ...; for `zbv` and `dualpipev` it holds r and 2p - 1 - r.

    Args:
        name: One of `SCHEDULES`.
        ranks: Pipeline ranks p.
        microbatches: Microbatches m of one step.
        stages_per_rank: Virtual stages v per rank; None: 2 for the V-shaped and interleaved schedules, else 1.

    Raises:
        ScheduleError: HP320 for an unknown name, or an illegal number of ranks, stages or microbatches; the error lists
            the legal numbers.

    Source: gpipe: Huang et al. 2019; 1f1b and interleaved_1f1b: Narayanan et al. 2021, section 2.2; zb_h1 and zbv: Qi
        et al. 2024, "Zero Bubble Pipeline Parallelism"; dualpipev: the V form of DeepSeek-AI 2024, section 3.2.1.
    """
    if name not in _FORMS:
        raise ScheduleError(f"unknown schedule `{name}`", got=name, allowed=SCHEDULES)
    if ranks < 1:
        raise ScheduleError("a pipeline needs at least one rank", got=ranks, allowed="1 and more")
    form, p, m = _FORMS[name], ranks, microbatches
    v = min(2, form.stages[-1]) if stages_per_rank is None else stages_per_rank
    if v not in form.stages:
        only = len(form.stages) == 1
        other, hint = name, f"stages_per_rank={form.stages[0]}"
        if v > 1:
            other, hint = "interleaved_1f1b", 'name="interleaved_1f1b"'
        raise ScheduleError(
            f"schedule {name} does not support {plural(v, 'stage')} per rank",
            got=f"stages_per_rank={v}",
            allowed=f"{form.stages[0]}{'' if only else ' and more'}",
            hint=hint if is_legal(other, p, m) else f"{hint}, microbatches={legal_microbatches(other, p, m)[-1]}",
        )
    if not is_legal(name, p, m):
        near = legal_microbatches(name, p, m)
        raise ScheduleError(
            f"schedule {name} cannot run {m} microbatch{'' if m == 1 else 'es'} on {plural(p, 'rank')}",
            got=f"microbatches={m}",
            allowed=[*near, f"in general {microbatch_rule(name, p)}"],
            hint=f"microbatches={near[-1]}",
        )
    rows = []
    for rank in range(p):
        program = RankProgram(rank_stages(name, rank, p, v))
        form.write(program, rank, p, m, v)
        rows.append(tuple(a for a in program.actions if a.microbatch is None or a.microbatch < m))
    return Schedule(name, p * v, m, tuple(rows))


def is_legal(name: str, ranks: int, microbatches: int) -> bool:
    """Return whether a schedule supports a number of microbatches."""
    return microbatches >= 1 and _FORMS[name].legal(ranks, microbatches)


def microbatch_rule(name: str, ranks: int) -> str:
    """Return the legal numbers of microbatches in words, for error messages."""
    return _FORMS[name].rule(ranks)


def legal_microbatches(name: str, ranks: int, near: int) -> tuple[int, ...]:
    """Return the largest legal number of microbatches <= `near`, if any, and the smallest >= `near`, each once."""
    first, below = max(1, near), next((m for m in range(near, 0, -1) if is_legal(name, ranks, m)), None)
    above = next(m for m in range(first, first + 4 * ranks + 2) if is_legal(name, ranks, m))
    return tuple(sorted({m for m in (below, above) if m is not None}))


def in_flight_limit(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Sequence[int]:
    """Return the maximum number of (stage, microbatch) activations in flight on each rank, by closed form.

    Exact, except for V-shaped schedules with fewer than two microbatches per rank, where it is an upper bound.
    """
    limit = _FORMS[name].in_flight
    return [limit(rank, ranks, microbatches, stages_per_rank) for rank in range(ranks)]
