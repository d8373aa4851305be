"""Pipeline of a strategy: legality checks in terms of recipe keys, and schedules of training and evaluation steps."""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import Final

from hyper_parallel.errors import BatchMismatch, NotDivisible, ScheduleError, UnsupportedSharding
from hyper_parallel.ir import Action, Schedule, Strategy
from hyper_parallel.ir.strategy import V_SHAPED
from hyper_parallel.mpmd._lower import lower
from hyper_parallel.mpmd._schedules import in_flight_limit, is_legal, legal_microbatches, make_schedule, microbatch_rule
from hyper_parallel.mpmd._tasks import replay
from hyper_parallel.mpmd._verify import verify
from hyper_parallel.received import Limits, read_text
from hyper_parallel.units import plural

_MOST_PASSES: Final = 2**18
"""Limit on (stage, microbatch) pairs per step: each becomes actions that are listed, checked and simulated."""
_LIMITS: Final = Limits(num_bytes=64 * 1024**2)
_IDLE: Final[dict[str, object]] = {"virtual_stages": 1, "stage_layers": (), "schedule_file": ""}
"""Fields of a strategy that need a pipeline, with their values when pp is 1."""
_NAMES: Final = {"interleaved": "interleaved_1f1b", "zb-h1": "zb_h1"}


def check_pipeline(strategy: Strategy, layers: int, microbatches: int, where: str | None = None) -> None:
    """Raise an error if the pipeline of a strategy cannot run.

    Args:
        strategy: Degrees, schedule and virtual stages.
        layers: Decoder layers of the model.
        microbatches: Microbatches of one step on one data-parallel rank.
        where: Key or file that sets the pipeline, for error messages.

    Raises:
        UnsupportedSharding: HP205 for a number of virtual stages that the schedule does not support, or for pipeline
            settings without a pipeline.
        NotDivisible: HP203 for more stages than layers.
        BatchMismatch: HP308 for fewer microbatches than pipeline ranks, for more than a step may have, or for a number
            that the schedule does not support.
    """
    s = strategy
    if s.pp == 1:
        _check_no_pipeline(s, where)
        return
    check_virtual(s, where)
    if s.stages > layers:
        most = max(1, layers // s.virtual_stages)
        raise NotDivisible(
            "a pipeline has more stages than the model has layers",
            where=where,
            got=f"pp={s.pp}, virtual_stages={s.virtual_stages}, layers={layers}",
            allowed=f"pp up to {most}",
            changes={"parallel.pp": most} | _unset(s, *_IDLE if most == 1 else ("stage_layers", "schedule_file")),
        )
    _check_microbatches(s, microbatches, where)


def _unset(s: Strategy, *names: str) -> dict[str, object]:
    return {f"parallel.{name}": _IDLE[name] for name in names if getattr(s, name) != _IDLE[name]}


def _check_no_pipeline(s: Strategy, where: str | None) -> None:
    for name, idle in _IDLE.items():
        if (value := getattr(s, name)) != idle:
            raise UnsupportedSharding(
                f"`{name}` requires a pipeline, and pp is 1",
                where=where,
                got=f"pp=1, {name}={value}",
                allowed=f"no {name}, or pp of 2 and more",
                changes={f"parallel.{name}": idle},
            )


def _check_microbatches(s: Strategy, microbatches: int, where: str | None) -> None:
    name = schedule_name(s)
    fewest = legal_microbatches(name, s.pp, s.pp)[-1]
    if s.stages * fewest > _MOST_PASSES:
        most = isqrt(_MOST_PASSES * s.pp // (s.virtual_stages * fewest))
        steps = legal_microbatches(name, most, most)[-1]
        raise BatchMismatch(
            "a step with one microbatch per pipeline rank has more computations than a pipeline schedule supports",
            where=where,
            got=f"pp={s.pp}, virtual_stages={s.virtual_stages}",
            allowed=f"pp up to {most}",
            changes={"parallel.pp": most, "training.accumulation_steps": steps}
            | _unset(s, "stage_layers", "schedule_file"),
        )
    if s.stages * microbatches > _MOST_PASSES:
        most = _MOST_PASSES // s.stages
        raise BatchMismatch(
            "a step has more microbatches than the pipeline schedule supports",
            where=where,
            got=f"pp={s.pp}, microbatches per step={microbatches}",
            allowed=f"microbatches per step up to {most}",
            changes={"training.accumulation_steps": legal_microbatches(name, s.pp, most)[0]},
        )
    if not is_legal(name, s.pp, microbatches):
        near = legal_microbatches(name, s.pp, microbatches)
        raise BatchMismatch(
            f"schedule {s.schedule} does not support this number of microbatches on {s.pp} pipeline ranks",
            where=where,
            got=f"microbatches per step={microbatches}",
            allowed=[*near, microbatch_rule(name, s.pp)],
            changes={"training.accumulation_steps": near[-1]},
        )
    if microbatches < s.pp:
        raise BatchMismatch(
            "a pipeline needs at least one microbatch per pipeline rank",
            where=where,
            got=f"pp={s.pp}, microbatches per step={microbatches}",
            allowed=f"pp up to {microbatches}, or {s.pp} microbatches and more",
            changes={"training.accumulation_steps": s.pp},
        )


def check_virtual(s: Strategy, where: str | None = None) -> None:
    """Raise an error if the schedule of a strategy does not support its number of virtual stages.

    Raises:
        UnsupportedSharding: HP205, with a supported number of virtual stages, or a schedule for the given number.
    """
    change: tuple[str, object]
    if s.schedule in V_SHAPED and s.virtual_stages != 2:
        allowed, change = "virtual_stages=2", ("virtual_stages", 2)
    elif s.schedule == "interleaved" and s.virtual_stages < 2:
        allowed, change = "virtual_stages of 2 and more", ("virtual_stages", 2)
    elif s.schedule in ("gpipe", "1f1b", "zb-h1") and s.virtual_stages != 1:
        allowed = f"virtual_stages=1, or schedule interleaved{', zbv, dualpipev' if s.virtual_stages == 2 else ''}"
        change = ("schedule", "interleaved")
    else:
        return
    raise UnsupportedSharding(
        f"schedule {s.schedule} does not support {plural(s.virtual_stages, 'stage')} per rank",
        where=where,
        got=f"schedule={s.schedule}, virtual_stages={s.virtual_stages}",
        allowed=allowed,
        changes={f"parallel.{change[0]}": change[1]}
        | (_unset(s, "stage_layers", "schedule_file") if change[0] == "virtual_stages" else {}),
    )


def schedule_name(strategy: Strategy) -> str:
    """Return the name in `SCHEDULES` of a strategy's schedule."""
    return _NAMES.get(strategy.schedule, strategy.schedule)


def step_schedule(strategy: Strategy, microbatches: int) -> Schedule:
    """Return the verified schedule of one training step, with sends and receives, for a strategy with pp > 1.

    Raises:
        ScheduleError: HP320 for an illegal number of microbatches or virtual stages, or for a schedule file that cannot
            be read, cannot run or does not fit the strategy.
    """
    if strategy.schedule_file:
        return _read(strategy, microbatches)
    name, p, v = schedule_name(strategy), strategy.pp, strategy.virtual_stages
    schedule = lower(make_schedule(name, p, microbatches, v))
    verify(schedule, max_in_flight=in_flight_limit(name, p, microbatches, v))
    return schedule


def _read(strategy: Strategy, microbatches: int) -> Schedule:
    path = strategy.schedule_file
    try:
        text = read_text(Path(path), _LIMITS)
    except (OSError, ValueError) as error:
        problem = str(error.strerror or error) if isinstance(error, OSError) else str(error)
        raise ScheduleError(
            "the schedule file cannot be read",
            where=path,
            got=problem,
            hint="write one with `hyper-parallel plan --recipe RECIPE.yaml --schedule-csv schedule.csv`"
            " before `parallel.schedule_file` is set",
        ) from error
    schedule = Schedule.from_csv(text, name=path)
    if schedule.graph is not None:
        raise ScheduleError(
            "a graph of stages can be simulated, but the pipeline executes only a chain",
            where=path,
            got=str(schedule.graph),
            hint="remove the row `graph,...` of the file, and the stages outside the chain",
        )
    got = (len(schedule.ranks), schedule.stages, schedule.microbatches)
    wanted = (strategy.pp, strategy.stages, microbatches)
    if got != wanted:
        shown = "{} pipeline ranks, {} stages, {} microbatches"
        raise ScheduleError(
            "the schedule file does not match the pipeline",
            where=path,
            got=shown.format(*got),
            allowed=shown.format(*wanted),
            hint="write the file again for this pipeline, or set `parallel.schedule_file=`",
        )
    place = schedule.placement()
    for rank in range(strategy.pp):
        if any(place[stage] != rank for stage in strategy.stages_of(rank)):
            raise ScheduleError(
                f"the schedule file assigns stages to other ranks than `schedule: {strategy.schedule}`",
                where=path,
                got=f"rank {rank}: stages {sorted(s for s, r in place.items() if r == rank)}",
                allowed=f"rank {rank}: stages {list(strategy.stages_of(rank))}",
                hint="set `parallel.schedule` to the schedule from which the file was made",
            )
    if not (schedule.has_communication and any(leaf.kind == "REDUCE_GRAD" for _, _, leaf in schedule.leaves())):
        schedule = lower(schedule.compute_only())
    verify(schedule)
    return schedule


def forward_schedule(strategy: Strategy, microbatches: int) -> Schedule:
    """Return the schedule of an evaluation step, with sends and receives, for any number of microbatches.

    Each rank runs its forwards by ascending sum of stage index and microbatch index. The input of a forward comes from
    a forward with a smaller sum, so the ranks cannot deadlock.
    """
    rows = []
    for rank in range(strategy.pp):
        work = [(s + i, s, i) for s in strategy.stages_of(rank) for i in range(microbatches)]
        rows.append(tuple(Action(s, "F", i) for _, s, i in sorted(work)))
    schedule = Schedule("forward", strategy.stages, microbatches, tuple(rows))
    lowered = lower(schedule, reduce_grad=False)
    replay(lowered, rendezvous=True)
    return lowered
