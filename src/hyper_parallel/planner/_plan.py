"""plan(): the best strategy of the whole space, with the proof, and why the others lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import Candidates, step_collectives
from hyper_parallel.errors import BadValue, HyperParallelError, UnsupportedSharding, overrides
from hyper_parallel.ir import (
    Alternative,
    Certificate,
    Layout,
    Plan,
    Rejected,
    Strategy,
    Workload,
)
from hyper_parallel.model import ModelSpec
from hyper_parallel.mpmd import step_schedule
from hyper_parallel.planner._check import check_degrees, check_legal
from hyper_parallel.planner._context import LOCAL, Context, HostMemory, resolve
from hyper_parallel.planner._leaves import TIE, Found, Goal, Leaves
from hyper_parallel.planner._legal import space_of
from hyper_parallel.planner._limits import CHOICES, DEGREES, EXCLUDABLE, Limits, check_pins
from hyper_parallel.planner._nearest import nothing_fits, nothing_legal
from hyper_parallel.planner._priced import Priced, price
from hyper_parallel.planner._reasons import not_executable, offloaded, searched, slower, too_big
from hyper_parallel.planner._repair import follow_changes
from hyper_parallel.planner._sensitivity import sensitivity
from hyper_parallel.planner._solve import solve
from hyper_parallel.planner._space import Space
from hyper_parallel.topology import Supernode
from hyper_parallel.units import format_bytes

SIMULATED: Final = 4
"""Degrees that are kept at least, runners-up included."""
MOST_SIMULATED: Final = 4000
"""Simulations after which the search stops; the certificate then tells the gap."""
EVERY: Final = 1 << 30
"""More strategies than any space has."""
TOO_BIG_SHOWN: Final = 2


def plan(
    model: str | Path | ModelSpec,
    topology: str | Supernode = LOCAL,
    workload: Workload | None = None,
    *,
    num_devices: int | None = None,
    strategy: Strategy | None = None,
    pins: Mapping[str, int | str] | None = None,
    exclude: Sequence[str] = (),
    objective: str = "step-time",
    deadline_s: float | None = None,
    top: int = 5,
    offload: bool = False,
) -> Plan:
    """The best strategy of a model on a machine that fits in memory, as a Plan.

    Args:
        model: Preset name, Hugging Face directory, config.json, or a ModelSpec.
        topology: Preset name, YAML file, `local` for this machine, or a Supernode. On `local` only what this version
            can run is chosen; elsewhere the notes say when a plan cannot be run yet.
        workload: What a step is; None, or no batch number in it: assumed, and said in the notes.
        num_devices: Devices to use; None: the product of the degrees of `strategy`, else all of the topology.
        strategy: Price exactly this one instead of searching.
        pins: What is fixed, such as `{"tp": 8}` (tp is tp_x * tp_y) or `{"schedule": "zbv"}`.
        exclude: Axes that stay 1, and choices of `EXCLUDABLE` that stay as they usually are.
        objective: One of `OBJECTIVES`: the fastest step; the most tokens per second and device, on all of the devices
            or fewer; the least memory; the fewest devices that meet `deadline_s`.
        deadline_s: Longest step for `fewest-devices`, or for the least memory.
        top: Runners-up to keep.
        offload: What exceeds a device's memory may lie in host memory, or be computed again, by a memory plan; where
            a strategy is given, its own `offload` says so.

    Raises:
        DegreesMismatch: HP301 when the strategy does not multiply to `num_devices`.
        NotDivisible, UnsupportedSharding, BatchMismatch: When the strategy is not legal.
        NoLegalStrategy: HP302 when no combination of degrees is legal.
        DoesNotFit: HP401 when none fits; the hint is the nearest change that does.
        DeadlineMissed: HP322 when no number of devices meets the deadline.
    """
    if strategy is not None:
        context = resolve(model, topology, workload, strategy.world_size)
        return evaluate(context, strategy, num_devices=num_devices)
    from hyper_parallel.planner._objective import search_for

    context = resolve(model, topology, workload, num_devices)
    if offload:
        context = replace(context, offload=HostMemory())
    fixed = {**check_pins(pins), **_excluded(exclude, pins or {})}
    limits = Limits(context.num_devices, fixed, (), executable=context.supernode.name == LOCAL)
    return search_for(context, limits, objective, deadline_s, top)


def _excluded(axes: Sequence[str], pins: Mapping[str, int | str]) -> dict[str, int]:
    found = {}
    for axis in axes:
        if axis in EXCLUDABLE:
            plain = CHOICES[axis]
            assert plain is not None, "a choice that can be excluded has a plain value"
            if str(pins.get(axis, plain[0])) != str(plain[0]):
                raise BadValue("a choice is pinned and excluded", got=f"{axis}={pins[axis]}")
            found[axis] = 0
            continue
        if axis not in (*DEGREES, "tp", "dp"):
            allowed = (*DEGREES, "tp", *EXCLUDABLE)
            raise BadValue("there is no such axis to exclude", got=axis, allowed=allowed)
        for name in ("dp_replicate", "dp_shard") if axis == "dp" else (axis,):
            if pins.get(name, 1) != 1:
                raise BadValue("an axis is pinned and excluded", got=f"{name}={pins[name]}")
            found[name] = 1
    return found


def evaluate(
    context: Context,
    strategy: Strategy,
    where: str | None = None,
    num_devices: int | None = None,
) -> Plan:
    """The Plan of exactly one strategy.

    Args:
        context: Model, machine and workload.
        strategy: Degrees and choices.
        where: Where the degrees were set, for errors.
        num_devices: What the degrees must multiply to; None: anything.
    """

    def check(strategy: Strategy, workload: Workload) -> None:
        check_degrees(strategy, num_devices, where)
        check_legal(context.numbers, workload.resolve(strategy.dp), strategy, where)
        _layouts(context, strategy, where)

    try:
        check(strategy, context.workload)
    except HyperParallelError as error:
        if changes := follow_changes(error, strategy, context.workload, check):
            error.changes, error.hint = changes, overrides(changes)
        raise
    workload = context.workload.resolve(strategy.dp)
    priced = price(context, strategy, workload)
    notes = []
    if priced.memory_bytes > context.machine.memory_bytes:
        notes.append(
            f"the predicted peak of {format_bytes(priced.memory_bytes)} exceeds the device's "
            f"{format_bytes(context.machine.memory_bytes)}"
        )
    return _make(context, priced, notes=tuple(notes), where=where)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished search.

    Attributes:
        found: What branch and bound found.
        ranked: Strategies in full, best first.
        bound: Seconds per token that every other strategy exceeds.
        simulated: Strategies whose schedule was simulated.
        space: What was legal.
        fixed: The limits that were searched.
    """

    found: Found
    ranked: tuple[Priced, ...]
    bound: float
    simulated: int
    space: Space
    fixed: Limits

    @property
    def fits(self) -> bool:
        """Whether any strategy fits."""
        return bool(self.ranked)


def find(
    context: Context,
    limits: Limits,
    keep: int = 1,
    capacity_bytes: float | None = None,
    at_most_s_per_token: float | None = None,
) -> Outcome:
    """The best strategies within limits: real layers on stages, simulated schedules.

    Args:
        context: Model, machine and workload.
        limits: What may be chosen; its `tp` and `ep` are filled in here.
        keep: Strategies of distinct degrees to find.
        capacity_bytes: Memory of a device; None: all of it.
        at_most_s_per_token: Slower strategies are of no interest.
    """
    if capacity_bytes is not None:
        context = replace(context, capacity_bytes=capacity_bytes)
    space = space_of(context, limits)
    goal = Goal(context.machine.memory_bytes, at_most_s_per_token, max(keep, SIMULATED))
    found = solve(context.numbers, context.machine, context.workload, space, goal)
    simulated = _Simulated(context, space)
    best = simulated.best(found.leaves)
    if len(found.leaves) and best > found.bound * (1 + TIE):
        # All degrees were kept up to a closed form that the best simulation exceeds: now up to that.
        space.ruled_out.clear()
        most = min(best, at_most_s_per_token or math.inf)
        goal = replace(goal, at_most_s_per_token=most, keep=EVERY)
        found = solve(context.numbers, context.machine, context.workload, space, goal)
        best = simulated.best(found.leaves)
    ranked = tuple(
        p
        for p in simulated.ranked(found.leaves, max(keep, SIMULATED))
        if p.per_token_s <= (at_most_s_per_token or math.inf) * (1 + TIE)
    )
    bound = min(found.bound, simulated.open_s)
    return Outcome(found, ranked, bound, len(simulated.known), space, space.limits)


class _Simulated:
    """Complete strategies in full, simulated as far as a choice between them asks for.

    The full price of a strategy never is less than its closed form, which the search knows of all of them. So the best
    is found when every strategy whose closed form is below the best full price has its own full price.

    Attributes:
        known: Full prices by strategy and microbatch.
        values: Seconds per token of the strategies that `best` saw: full where one was simulated.
        open_s: Closed form, per token, of the best strategy that is left without a simulation.
    """

    def __init__(self, context: Context, space: Space) -> None:
        self.context, self.space = context, space
        self.known: dict[tuple[Strategy, int], Priced] = {}
        self.values: NDArray[np.float64] = np.empty(0)
        self.open_s = math.inf

    def full(self, leaves: Leaves, position: int) -> Priced:
        """The full price of one strategy."""
        base = self.space.limits.base
        strategy, workload = at(leaves, position, base, self.context.workload)
        key = (strategy, workload.microbatch or 1)
        if key not in self.known:
            self.known[key] = price(self.context, strategy, workload)
        return self.known[key]

    def best(self, leaves: Leaves) -> float:
        """Least seconds per token of all; infinite when there are none."""
        least, self.open_s = math.inf, math.inf
        alone = leaves.columns["pp"] == 1
        if alone.any():
            least = float(
                leaves.per_token_s[alone].min()
            )  # without a pipeline nothing is left to simulate
        self.values = leaves.per_token_s.copy()
        piped = np.flatnonzero(~alone)
        for position in piped[np.argsort(leaves.per_token_s[piped], kind="stable")].tolist():
            closed = float(leaves.per_token_s[position])
            if closed >= least * (1 - TIE):
                break
            if len(self.known) >= MOST_SIMULATED:
                self.open_s = closed
                break
            self.values[position] = self.full(leaves, position).per_token_s
            least = min(least, float(self.values[position]))
        return least

    def ranked(self, leaves: Leaves, keep: int) -> tuple[Priced, ...]:
        """The best strategies of distinct degrees, best first; `best` comes before."""
        if not len(leaves):
            return ()
        order, meshes = leaves.ranked(), leaves.meshes()
        chosen: dict[tuple[int, ...], Priced] = {}
        for position in order[np.argsort(np.round(self.values[order], 18), kind="stable")].tolist():
            if meshes[position] not in chosen:
                chosen[meshes[position]] = self.full(leaves, position)
            if len(chosen) == keep:
                break
        # Python's sort keeps the order of the search where prices are equal.
        return tuple(sorted(chosen.values(), key=lambda p: round(p.per_token_s, 18)))


def at(
    leaves: Leaves, position: int, base: Strategy, workload: Workload
) -> tuple[Strategy, Workload]:
    """One found strategy with its resolved workload."""
    row = leaves.take(np.array([position]))
    columns = {n: c for n, c in row.columns.items() if n != "dp"}
    strategy, resolved = Candidates.of_columns(**columns).at(0, base, workload)
    layers = int(row.layers[0])
    if strategy.pp == 1:
        strategy = replace(strategy, schedule="1f1b", schedule_file="", stage_layers=())
    return replace(strategy, recompute_layers=layers if layers >= 0 else None), resolved


def search(context: Context, limits: Limits, top: int = 5) -> Plan:
    """The fastest Plan within limits; arguments as for `find`.

    Args:
        context: Model, machine and workload.
        limits: What may be chosen.
        top: Runners-up to keep.
    """
    outcome = find(context, limits, top + 1)
    require(context, limits, outcome)
    return to_plan(context, outcome, "step-time", top)


def require(context: Context, limits: Limits, outcome: Outcome) -> None:
    """Raise when nothing was found.

    Raises:
        NoLegalStrategy: HP302. DoesNotFit: HP401.
    """
    if outcome.fits:
        return
    if not outcome.found.meshes or not len(outcome.found.too_big):
        raise nothing_legal(context, limits, outcome.space.ruled_out)
    raise nothing_fits(context, limits, int(outcome.found.too_big.memory_bytes.min()))


def to_plan(context: Context, outcome: Outcome, objective: str, top: int = 5) -> Plan:
    """The Plan of the best strategy of a search."""
    best, *others = outcome.ranked
    rejected = [_lost(best, other) for other in others[:top]]
    faster = _too_big(context, outcome, best.per_token_s)
    tokens = best.workload.tokens_per_step or 1
    found = outcome.found
    certificate = Certificate(
        objective,
        best.step_s,
        min(best.step_s, outcome.bound * tokens),
        found.priced,
        outcome.simulated,
        dict(found.cut),
        dict(outcome.space.ruled_out),
    )
    notes: tuple[str, ...] = (searched(certificate),)
    if best.strategy.recompute != "none" and "recompute" not in outcome.fixed.pins:
        notes += ("activations are recomputed because it is the fastest choice that fits",)
    if best.strategy.gathered_inputs == "re-gather" and "gathered_inputs" not in outcome.fixed.pins:
        notes += ("inputs are gathered again because it is the fastest choice that fits",)
    made = _make(context, best, (*faster, *rejected), notes)
    return replace(
        made,
        certificate=certificate,
        pareto=_pareto(context, outcome, best),
        sensitivity=sensitivity(context, best, others),
    )


def _lost(best: Priced, other: Priced) -> Rejected:
    share = other.per_token_s / best.per_token_s
    reason = slower(best.cost, best.step_s, other.cost, best.step_s * share)
    return Rejected(other.strategy, reason, other.step_s, other.memory_bytes)


def _too_big(context: Context, outcome: Outcome, per_token_s: float) -> tuple[Rejected, ...]:
    """The fastest strategies that would win if they fitted, one per mesh."""
    found, space = outcome.found, outcome.space
    lost = found.too_big
    kept: dict[tuple[int, ...], Rejected] = {}
    fitting = set(found.leaves.meshes()) if len(found.leaves) else set()
    if not len(lost):
        return ()
    meshes = lost.meshes()
    for position in np.argsort(lost.least_s, kind="stable").tolist():
        if lost.least_s[position] >= per_token_s or len(kept) == TOO_BIG_SHOWN:
            break
        if meshes[position] in kept or meshes[position] in fitting:
            continue
        strategy, workload = at(lost, position, space.limits.base, context.workload)
        if space.refusal is not None and space.refusal(strategy) is not None:
            continue
        memory = int(lost.memory_bytes[position])
        tokens = workload.tokens_per_step or 1
        reason = too_big(memory, context.machine.memory_bytes)
        step_s = float(lost.least_s[position]) * tokens
        kept[meshes[position]] = Rejected(strategy, reason, step_s, memory)
    return tuple(kept.values())


def _pareto(context: Context, outcome: Outcome, best: Priced) -> tuple[Alternative, ...]:
    """The front of time and memory among the strategies that were completed, fastest first, the chosen one left out."""
    leaves, front, least = outcome.found.leaves, [], float(best.memory_bytes)
    for position in leaves.ranked().tolist() if len(leaves) else ():
        if leaves.memory_bytes[position] < least * (1 - 1e-3):
            least = float(leaves.memory_bytes[position])
            base = outcome.space.limits.base
            strategy, workload = at(leaves, position, base, context.workload)
            seconds = float(leaves.per_token_s[position]) * (workload.tokens_per_step or 1)
            front.append(Alternative(strategy, workload.microbatch or 1, seconds, int(least)))
    return tuple(front)


def _layouts(
    context: Context, strategy: Strategy, where: str | None
) -> tuple[dict[str, Layout], tuple[str, ...]]:
    """Layouts and their notes; none, with a note, for what this version only predicts.

    What is meant to run now (`where` is given, or the machine is this one) is refused instead.
    """
    must_run = where is not None or context.supernode.name == LOCAL
    later = not_executable(strategy)
    if later is not None and not must_run:
        return {}, (later,)
    try:
        sharded = context.shard(strategy, where)
    except UnsupportedSharding as error:
        if must_run:
            raise
        return {}, (
            f"this version cannot run this plan yet ({error.what}): the layouts are left out",
        )
    return sharded.layouts, sharded.notes


def _make(
    context: Context,
    priced: Priced,
    rejected: tuple[Rejected, ...] = (),
    notes: tuple[str, ...] = (),
    where: str | None = None,
) -> Plan:
    strategy, workload = priced.strategy, priced.workload
    if strategy.pp > 1:
        strategy = replace(strategy, stage_layers=tuple(stage.layers for stage in priced.stages))
    layouts, told = _layouts(context, strategy, where)
    told += offloaded(priced.cost, context.machine.memory_bytes)
    if strategy.pp > 1 and layouts:
        # Verified before any process starts.
        step_schedule(strategy, workload.accumulation_steps or 1)
    collectives = step_collectives(context.model, layouts, strategy, workload) if layouts else ()
    return Plan(
        model=context.model_ref(),
        topology=context.supernode.name,
        peak_flops=context.machine.peak_flops,
        workload=workload,
        strategy=strategy,
        layouts=layouts,
        step_s=priced.step_s,
        cost=priced.cost,
        memory=priced.memory,
        memory_capacity_bytes=context.machine.memory_bytes,
        collectives=collectives,
        rejected=rejected,
        stages=priced.stages,
        pace=context.machine.paces(strategy.pp),
        notes=(*context.notes, *told, *notes),
    )
