"""Table of schedules by name: generator, legal stages and microbatches, activations in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Schedule
from hyper_parallel.ir.strategy import rank_stages
from hyper_parallel.mpmd import _rank_program as phases
from hyper_parallel.mpmd._rank_program import RankProgram


@dataclass(frozen=True, slots=True)
class _Form:
    """Entry of the table, for p ranks, m microbatches and v stages per rank.

    Attributes:
        write: Appends the actions of a rank, from (program, rank, p, m, v).
        in_flight: Maximum of activations in flight on a rank, from (rank, p, m, v).
        stages: Allowed numbers of stages per rank.
        legal: Whether m microbatches are allowed, from (p, m).
        rule: The allowed numbers of microbatches in words, from p.
    """

    write: Callable[[RankProgram, int, int, int, int], None]
    in_flight: Callable[[int, int, int, int], int]
    stages: range = range(1, 2)
    legal: Callable[[int, int], bool] = lambda p, m: True
    rule: Callable[[int], str] = lambda p: "1 and more"


_ANY: Final = range(1, 1 << 30)
_V: Final = range(2, 3)
_FORMS: Final = {
    "gpipe": _Form(phases.gpipe, lambda r, p, m, v: m),
    "1f1b": _Form(phases.one_f_one_b, lambda r, p, m, v: min(m, p - r)),
    "interleaved_1f1b": _Form(
        phases.interleaved,
        lambda r, p, m, v: min(m * v, 2 * (p - r - 1) + (v - 1) * (m // max(1, m // p)) + 1),
        _ANY,
        lambda p, m: m % max(1, m // p) == 0,
        lambda p: f"any multiple of {p}",
    ),
    "zb_h1": _Form(phases.zb_h1, lambda r, p, m, v: min(m, p)),
    "zbv": _Form(phases.zbv, lambda r, p, m, v: min(2 * m, 2 * p), _V),
    "dualpipev": _Form(
        phases.dualpipev,
        lambda r, p, m, v: min(2 * m, 2 * p + 1),
        _V,
        lambda p, m: m >= 2 * p,
        lambda p: f"{2 * p} (two per rank) and more",
    ),
}
SCHEDULES: Final = tuple(_FORMS)


def make_schedule(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Return a compute-only schedule.

    Rank r holds stages r, r + p, r + 2p, ...; for `zbv` and `dualpipev` it holds r and 2p - 1 - r.

    Args:
        name: One of `SCHEDULES`.
        ranks: Pipeline ranks p.
        microbatches: Microbatches m of one step.
        stages_per_rank: Virtual stages v per rank; None: 2 for the V-shaped and interleaved schedules, else 1.

    Raises:
        ScheduleError: HP320 for an unknown name, an illegal number of stages, or an illegal number of microbatches;
            the error lists the nearest legal numbers.

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
        raise ScheduleError(
            f"schedule {name} does not have {v} stages per rank",
            got=f"stages_per_rank={v}",
            allowed=f"{form.stages[0]}{'' if only else ' and more'}",
            hint=f"schedule={'interleaved_1f1b' if v > 1 else '1f1b'}",
        )
    if not is_legal(name, p, m):
        near = legal_microbatches(name, p, m)
        raise ScheduleError(
            f"schedule {name} cannot run {m} microbatches on {p} ranks",
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
    """Return the nearest legal numbers of microbatches at or below and at or above `near`."""
    below = next((m for m in range(near, 0, -1) if is_legal(name, ranks, m)), None)
    above = next(m for m in range(max(1, near), near + 4 * ranks + 2) if is_legal(name, ranks, m))
    return tuple(sorted({m for m in (below, above) if m is not None}))


def in_flight_limit(
    name: str, ranks: int, microbatches: int, stages_per_rank: int = 1
) -> Sequence[int]:
    """Return the maximum of (stage, microbatch) activations in flight on each rank, by closed form.

    Exact, except for V-shaped schedules with fewer than two microbatches per rank, where it is an upper bound.
    """
    limit = _FORMS[name].in_flight
    return [limit(rank, ranks, microbatches, stages_per_rank) for rank in range(ranks)]
