"""Schedules by name: GPipe, 1F1B, interleaved 1F1B, ZB-H1; the V-shaped ones are in `_vshape`.

Notation of the formulas: p ranks, v stages per rank, m microbatches; tf, ti, tw seconds of forward, input gradient
and weight gradient of all stages of a rank; tb = ti + tw. The bubble is the step time without transfers minus the
work of one rank, m (tf + tb).

Several schedules are made for at least as many microbatches as their phases need, and the surplus is left out. That is
always legal: dependencies connect actions of one microbatch only, so removing whole microbatches keeps the rest in a
possible order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule
from hyper_parallel.mpmd._vshape import dualpipev_ranks, zbv_ranks

SCHEDULES: Final = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev")
_V_SHAPED: Final = ("zbv", "dualpipev")


def make_schedule(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """A compute-only schedule.

    Stages lie in a loop (rank r holds r, r + p, r + 2p, ...), for `zbv` and `dualpipev` in a V (r and 2p - 1 - r).

    Args:
        name: One of `SCHEDULES`.
        ranks: Pipeline ranks p.
        microbatches: Microbatches m of one step.
        stages_per_rank: Virtual stages v per rank; None: 2 for the V-shaped and interleaved schedules, else 1.

    Raises:
        ScheduleError: HP320 for an unknown name, a number of stages the schedule does not have, or microbatches it
            cannot run, with the nearest legal numbers.

    Source: gpipe: Huang et al. 2019; 1f1b and interleaved_1f1b: Narayanan et al. 2021, section 2.2; zb_h1 and zbv: Qi
        et al. 2024, "Zero Bubble Pipeline Parallelism"; dualpipev: the V form of DeepSeek-AI 2024, section 3.2.1.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"there is no schedule `{name}`", got=name, allowed=SCHEDULES)
    if ranks < 1:
        raise ScheduleError("a pipeline needs at least one rank", got=ranks, allowed="1 and more")
    if stages_per_rank is None:
        stages_per_rank = 2 if name == "interleaved_1f1b" or name in _V_SHAPED else 1
    _check_stages(name, stages_per_rank)
    if not is_legal(name, ranks, microbatches):
        near = legal_microbatches(name, ranks, microbatches)
        raise ScheduleError(
            f"schedule {name} cannot run {microbatches} microbatches on {ranks} ranks",
            got=f"microbatches={microbatches}",
            allowed=[*near, f"in general {_rule(name, ranks)}"],
            hint=f"microbatches={near[-1]}",
        )
    p, m, v = ranks, microbatches, stages_per_rank
    if name == "gpipe":
        rows = [_gpipe(r, m) for r in range(p)]
    elif name == "1f1b":
        rows = [_one_f_one_b(r, p, m) for r in range(p)]
    elif name == "interleaved_1f1b":
        rows = [_interleaved(r, p, m, v) for r in range(p)]
    elif name == "zb_h1":
        rows = [_zb_h1(r, p, max(m, p)) for r in range(p)]
    elif name == "zbv":
        rows = zbv_ranks(p, max(m, 2 * p))
    else:
        rows = dualpipev_ranks(p, m)
    kept = tuple(tuple(a for a in row if a.microbatch is None or a.microbatch < m) for row in rows)
    return Schedule(name, p * v, m, kept)


def is_legal(name: str, ranks: int, microbatches: int) -> bool:
    """Whether a schedule can run that many microbatches."""
    if microbatches < 1:
        return False
    if name == "dualpipev":
        return microbatches >= 2 * ranks
    if name == "interleaved_1f1b":
        return microbatches % max(1, microbatches // ranks) == 0
    return True


def legal_microbatches(name: str, ranks: int, near: int) -> tuple[int, ...]:
    """The nearest legal numbers of microbatches at or below and at or above `near`."""
    below = next((m for m in range(near, 0, -1) if is_legal(name, ranks, m)), None)
    above = next(m for m in range(max(1, near), near + 4 * ranks + 2) if is_legal(name, ranks, m))
    return tuple(sorted({m for m in (below, above) if m is not None}))


def _rule(name: str, ranks: int) -> str:
    if name == "dualpipev":
        return f"{2 * ranks} (two per rank) and more"
    if name == "interleaved_1f1b":
        return f"any multiple of {ranks}"
    return "1 and more"


def _check_stages(name: str, stages_per_rank: int) -> None:
    if name in _V_SHAPED:
        allowed, legal = "2", stages_per_rank == 2
    elif name == "interleaved_1f1b":
        allowed, legal = "1 and more", stages_per_rank >= 1
    else:
        allowed, legal = "1", stages_per_rank == 1
    if not legal:
        other = "interleaved_1f1b" if stages_per_rank > 1 else "1f1b"
        raise ScheduleError(
            f"schedule {name} does not have {stages_per_rank} stages per rank",
            got=f"stages_per_rank={stages_per_rank}",
            allowed=allowed,
            hint=f"schedule={other}",
        )


def _gpipe(rank: int, m: int) -> list[Action]:
    """All forwards, then all backwards. Bubble (p-1)(tf+tb); m microbatches in flight."""
    return [
        *(Action(rank, "F", i) for i in range(m)),
        *(Action(rank, "B", i) for i in range(m)),
    ]


def _one_f_one_b(rank: int, p: int, m: int) -> list[Action]:
    """Backwards as early as possible. Bubble (p-1)(tf+tb); min(m, p - rank) microbatches in flight."""
    warmup = min(m, p - 1 - rank)
    actions = [Action(rank, "F", i) for i in range(warmup)]
    for i in range(m - warmup):
        actions += [Action(rank, "F", warmup + i), Action(rank, "B", i)]
    return actions + [Action(rank, "B", i) for i in range(m - warmup, m)]


def _interleaved(rank: int, p: int, m: int, v: int) -> list[Action]:
    """1F1B over v stages per rank, microbatches in rounds of m / max(1, m // p).

    Bubble (p-1)(tf+tb)/v when p divides m; min(m v, 2 (p - rank - 1) + (v - 1) round + 1) stage inputs in flight.
    """
    size = m // max(1, m // p)

    def nth(k: int, forward: bool) -> tuple[int, int]:
        chunk = (k // size) % v
        stage = rank + p * (chunk if forward else v - 1 - chunk)
        return stage, (k // (size * v)) * size + k % size

    total = m * v
    warmup = min(total, 2 * (p - 1 - rank) + (v - 1) * size)
    actions = []
    for k in range(warmup):
        stage, i = nth(k, True)
        actions.append(Action(stage, "F", i))
    for k in range(total):
        if warmup + k < total:
            stage, i = nth(warmup + k, True)
            actions.append(Action(stage, "F", i))
        stage, i = nth(k, False)
        actions.append(Action(stage, "B", i))
    return actions


def _zb_h1(rank: int, p: int, m: int) -> list[Action]:
    """1F1B with the backward split; rank r puts its weight gradients off by r microbatches.

    Bubble (p-1)(tf+tb-2tw) when tw <= min(tf, ti); p microbatches in flight on every rank, as on rank 0
    of 1F1B. Needs m >= p.
    """
    warmup = p - 1 - rank
    actions = [Action(rank, "F", i) for i in range(warmup)]
    weights = iter(range(m))
    for i in range(m):
        if warmup + i < m:
            actions.append(Action(rank, "F", warmup + i))
        actions.append(Action(rank, "I", i))
        if i >= rank:
            actions.append(Action(rank, "W", next(weights)))
    return actions + [Action(rank, "W", i) for i in weights]


def in_flight_limit(
    name: str, ranks: int, microbatches: int, stages_per_rank: int = 1
) -> Sequence[int]:
    """Most (stage, microbatch) activations each rank holds at once, by the closed form of the schedule.

    Reached exactly, but for the V-shaped schedules with fewer than two microbatches per rank, where it is an upper
    bound.
    """
    p, m, v = ranks, microbatches, stages_per_rank
    if name == "gpipe":
        return [m] * p
    if name == "1f1b":
        return [min(m, p - r) for r in range(p)]
    if name == "interleaved_1f1b":
        size = m // max(1, m // p)
        return [min(m * v, 2 * (p - r - 1) + (v - 1) * size + 1) for r in range(p)]
    if name == "zb_h1":
        return [min(m, p)] * p
    return [min(2 * m, 2 * p + (name == "dualpipev"))] * p
