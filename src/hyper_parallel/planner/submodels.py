"""Predicted time and memory of the encoders of multimodal models, and of training steps with them.

The parts of a multimodal model are the language part and the towers; a tower is an encoder of images or audio. The time
and memory of a tower are predicted like those of any other model, from its `Tower.spec`.

A lane is a group of ranks that work together: a pipeline stage of the language part, or ranks that run a tower. A joint
schedule orders the microbatches of all parts. Without one, a tower computes in rounds, in each of which every tower
rank encodes one microbatch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product
from typing import Any, Final

from hyper_parallel.errors import DoesNotFit, HyperParallelError, NoLegalStrategy
from hyper_parallel.ir import (
    RESERVED,
    Certificate,
    MemoryTerm,
    PartPlan,
    Plan,
    Schedule,
    StageCost,
    Strategy,
    SubmodelsPlan,
)
from hyper_parallel.model import Tower, language_of, tower_kinds
from hyper_parallel.mpmd import (
    JointLayout,
    TowerLanes,
    action_costs,
    inline_schedule,
    lanes_text,
    rounds_schedule,
    schedule_tasks,
    search_by_bound,
    submodel_bound_s,
    submodel_schedule,
)
from hyper_parallel.planner.pins import check_pins
from hyper_parallel.planner.plan_builder import search
from hyper_parallel.planner.pricing import price, with_stage_memory
from hyper_parallel.planner.request import LOCAL, PlanRequest
from hyper_parallel.sim import simulate
from hyper_parallel.topology import topology_hint
from hyper_parallel.units import DTYPE_BYTES, divisors, format_bytes, format_seconds

LANGUAGE: Final = "language"
MEDIA: Final = 4
"""Images or recordings per sequence that a plan without data assumes; they fill about half of 8,192 tokens."""
_COLUMNS: Final = 40
"""Characters per line of the chart of a step; with the names of the lanes, a line has at most 80 characters."""


@dataclass(frozen=True, slots=True)
class TowerPrice:
    """Predicted time and memory of a tower on one of its ranks.

    Attributes:
        cost: Cost of one microbatch. The whole backward counts in `weight_grad_s`: twice the seconds of forward, or 0
            if the tower is frozen.
        memory: Memory terms without those in `ir.RESERVED`; with the activations of one microbatch.
    """

    cost: StageCost
    memory: tuple[MemoryTerm, ...] = ()


def price_tower(
    request: PlanRequest,
    tower: Tower,
    strategy: Strategy,
    items: float,
    *,
    microbatches: int = 1,
    frozen: bool = False,
) -> TowerPrice:
    """Return the predicted time and memory of a tower on one of its ranks.

    Args:
        request: Machine and number formats.
        tower: The tower.
        strategy: Degrees dp_replicate and dp_shard of the tower's ranks.
        items: Mean number of images or recordings per microbatch of a rank.
        microbatches: Microbatches of a step; with more than one, gradients are accumulated.
        frozen: Whether the tower is frozen: no backward and no saved activations.
    """
    count = max(1, math.ceil(items))
    work = replace(
        request.workload,
        seq_len=tower.positions,
        microbatch=count,
        accumulation_steps=microbatches,
        tokens_per_step=None,
    ).resolve(strategy.dp)
    own = replace(request, model=tower.spec, num_devices=strategy.world_size, pins={}, base=Strategy())
    priced = price(own, strategy, work)
    cost = priced.stages[0].cost
    # The spec prices causal attention and no projector.
    factor = items / count * tower.forward_flops / tower.layer_flops
    forward_s = (cost.forward_s + cost.exposed_forward_s) * factor
    frozen_terms = ("parameters", "gathered parameters") if frozen else None
    extra = round(tower.extra_bytes * count * DTYPE_BYTES[work.compute_dtype] / 2)
    memory = tuple(
        replace(t, bytes=t.bytes + extra) if t.name == "activations" else t
        for t in priced.memory
        if t.name not in RESERVED and (frozen_terms is None or t.name in frozen_terms)
    )
    return TowerPrice(StageCost(forward_s, 0.0, 0.0 if frozen else 2 * forward_s), memory)


@dataclass(frozen=True)
class DividedStep:
    """Predicted training step of a multimodal model for one assignment of ranks to its parts.

    Attributes:
        plan: Plan of the language part.
        strategies: Dict from part to its strategy, the language part first.
        members: Dict from part to its ranks.
        lanes: Lanes of the schedule; all towers are on the same lanes.
        joint: Whether the step has a joint schedule; else towers compute in rounds.
        towers: Dict from tower to its predicted time and memory per microbatch of a lane.
        frozen: Whether the towers are frozen.
        language_memory: Memory terms of a rank of the language part without towers; (): not predicted.
        inline: Whether the ranks of the first pipeline stage run the towers in its forwards and backwards.
    """

    plan: Plan
    strategies: Mapping[str, Strategy]
    members: Mapping[str, tuple[int, ...]]
    lanes: TowerLanes
    joint: bool
    towers: Mapping[str, TowerPrice]
    frozen: bool = False
    language_memory: tuple[MemoryTerm, ...] = ()
    inline: bool = False

    @property
    def count(self) -> int:
        """Number of microbatches per step."""
        return self.plan.workload.accumulation_steps or 1

    @cached_property
    def costs(self) -> list[StageCost]:
        """Costs of one microbatch: towers on their busiest rank, then each pipeline rank of the language part."""
        ranks = {rank for name in self.towers for rank in self.members[name]}
        by_rank = [
            [tower.cost for name, tower in self.towers.items() if rank in self.members[name]] for rank in sorted(ranks)
        ]
        busiest = max(by_rank, key=lambda costs: sum(c.microbatch_s for c in costs))
        s, stages = self.plan.strategy, [stage.cost for stage in self.plan.stages]
        language = (_sum([stages[k] for k in s.stages_of(r)], r > 0) for r in range(s.pp))
        return [_sum(busiest, False), *language]

    @cached_property
    def _alone_s(self) -> float:
        """Seconds of all forwards and backwards of the language part alone, under 1F1B."""
        lanes = TowerLanes(self.lanes.stages, (0,))
        costs = [StageCost(0.0, 0.0, 0.0), *self.costs[1:]]
        return simulate(schedule_tasks(rounds_schedule(lanes, self.count, costs), costs)).end_s

    @cached_property
    def lower_s(self) -> float:
        """Lower bound of the seconds of all forwards and backwards, for any order of the same work on these ranks."""
        return submodel_bound_s(self.lanes, self.count, self.costs)

    @property
    def bound_s(self) -> float:
        """Lower bound of `Plan.whole_step_s`."""
        return self.plan.step_s + max(0.0, self.lower_s - self._alone_s)

    @cached_property
    def max_bytes(self) -> int:
        """Predicted peak bytes of the fullest rank; 0 if `language_memory` is empty."""
        if not self.language_memory:
            return 0
        parts = [_bytes(self.language_memory), *(_bytes(t) for t in self._tower_memory.values())]
        loads = Counter[int]()
        for num_bytes, ranks in zip(parts, self.members.values(), strict=True):
            loads.update(dict.fromkeys(ranks, num_bytes))
        reserved = _bytes([t for t in self.language_memory if t.name in RESERVED])
        loads.update(dict.fromkeys({*loads}.difference(self.members[LANGUAGE]), reserved))
        return max(loads.values())

    @cached_property
    def _tower_memory(self) -> dict[str, tuple[MemoryTerm, ...]]:
        """Dict from tower to its memory terms, with the activations of all microbatches in flight."""
        limits = self.lanes.limits() if self.joint else self.lanes.limits(int(not self.inline))
        flight = max(limits[lane] for lane in self.lanes.towers)
        # Interleaved schedules start up to p microbatches more on the first stage.
        flight += self.lanes.stages * (self.plan.strategy.virtual_stages > 1)
        flight = min(self.count, flight)
        return {
            name: tuple(replace(t, bytes=t.bytes * flight) if t.name == "activations" else t for t in tower.memory)
            for name, tower in self.towers.items()
        }

    def planned(self) -> Plan:
        """Return the plan with `Plan.submodels`: the parts, their predicted times, and the schedule of a step."""
        if self.inline:
            schedule = inline_schedule(self.lanes, self.count, frozen=self.frozen)
        else:
            make = submodel_schedule if self.joint else rounds_schedule
            schedule = make(self.lanes, self.count, self.costs, frozen=self.frozen)
        shares = self.count / len(self.lanes.towers) if self.joint else self.count
        busiest = max(self.costs[1:], key=lambda c: c.microbatch_s)
        parts = [self._part(LANGUAGE, busiest, self.count, self.language_memory)]
        for name, tower in self.towers.items():
            memory = self._tower_memory[name]
            parts.append(self._part(name, tower.cost, shares, memory))
        step = self._step(parts, schedule)
        return replace(self.plan, submodels=step)

    def _part(self, name: str, cost: StageCost, microbatches: float, memory: tuple[MemoryTerm, ...]) -> PartPlan:
        return PartPlan(
            name,
            self.members[name],
            str(self.strategies[name]),
            cost.forward_s * microbatches,
            (cost.input_grad_s + cost.weight_grad_s) * microbatches,
            memory,
        )

    def _step(self, parts: Sequence[PartPlan], schedule: Schedule) -> SubmodelsPlan:
        """Return `Plan.submodels` for a schedule: simulated seconds of the step, idle fraction and lower bound."""
        timeline = simulate(schedule_tasks(schedule, self.costs))
        step_s = timeline.end_s
        # All ranks of a lane are busy for the time of its actions.
        stage_ranks = len(parts[0].ranks) / self.lanes.stages
        dp = self.plan.strategy.dp
        towers = [(tower.cost, dp if self.joint else len(self.members[name])) for name, tower in self.towers.items()]
        busy_s = 0.0
        for _, _, action in schedule.compute_only().leaves():
            costs = [(self.costs[action.stage], stage_ranks)] if action.stage else towers
            busy_s += sum(action_costs(c)[action.kind][0] * count for c, count in costs)
        ranks = len({rank for part in parts for rank in part.ranks})
        lanes = [f"lane {lane}" for lane in range(self.lanes.count)]
        names = ("+".join(self.towers), *[LANGUAGE] * self.lanes.stages)
        return SubmodelsPlan(
            tuple(parts),
            step_s,
            1.0 - busy_s / (ranks * step_s),
            self.lower_s,
            schedule.to_csv(extended=True) if self.joint else "",
            max(0.0, step_s - self._alone_s),
            lanes=tuple(lanes_text(timeline, names, lanes, _COLUMNS)),
            inline=self.inline,
        )


def _bytes(terms: Sequence[MemoryTerm]) -> int:
    return sum(t.bytes for t in terms if t.tier == "hbm")


def _sum(costs: Sequence[StageCost], sends_back: bool) -> StageCost:
    """Return the cost of all stages of a pipeline rank; without `sends_back`, the rank sends no gradients."""
    last = costs[-1]
    names = (
        "forward_s", "input_grad_s", "weight_grad_s", "exposed_forward_s", "exposed_backward_s",
    )  # fmt: skip
    sums: dict[str, Any] = {name: sum(getattr(c, name) for c in costs) for name in names}
    return replace(last, send_backward_s=last.send_backward_s * sends_back, **sums)


def language_memory(request: PlanRequest, plan: Plan, towers: Collection[str]) -> tuple[MemoryTerm, ...]:
    """Return the memory terms of a rank of the language part, without the parameters of the given towers."""
    own = replace(request, model=language_of(request.model, towers))
    priced = price(own, plan.strategy, plan.workload)
    return with_stage_memory(own, priced).memory


def choose_step(steps: Sequence[DividedStep], capacity_bytes: int | None = None) -> tuple[int, Plan] | None:
    """Return (index, plan) of the step with the fewest seconds per token; None if no step fits in memory.

    The certificate in `Plan.submodels` has the lower bound over all steps that fit. `capacity_bytes` is the memory of a
    device; None: no limit.
    """
    limit = math.inf if capacity_bytes is None else capacity_bytes
    fitting = [k for k, step in enumerate(steps) if step.max_bytes <= limit]
    plans: dict[int, Plan] = {}

    def tokens(k: int) -> int:
        return steps[fitting[k]].plan.workload.tokens_per_step or 1

    def per_token_s(k: int, _: float | None) -> float:
        plans[k] = steps[fitting[k]].planned()
        return plans[k].whole_step_s / tokens(k)

    bounds = [steps[k].bound_s / tokens(n) for n, k in enumerate(fitting)]
    best = search_by_bound(bounds, per_token_s)
    if best is None:
        return None
    plan = plans[best.position]
    assert plan.submodels is not None
    value_s = plan.whole_step_s
    refused = len(steps) - len(fitting)
    certificate = Certificate(
        "step-time",
        value_s,
        min(value_s, min(bounds) * tokens(best.position)),
        len(fitting),
        best.priced,
        ruled_out={"memory": refused} if refused else {},
    )
    submodels = replace(plan.submodels, certificate=certificate)
    return fitting[best.position], replace(plan, submodels=submodels)


def feature_stages(language: Strategy, layers: Collection[int]) -> tuple[int, ...]:
    """Return the pipeline stages that receive features from a tower: the first stage, and the stages of `layers`.

    Args:
        language: Strategy of the language part; `stage_layers` must be set if `layers` is not empty.
        layers: Decoder layers, other than the first one, whose input includes features.
    """
    ends = [*accumulate(language.stage_layers)][:-1]
    return tuple(sorted({0} | {bisect_right(ends, layer) for layer in layers}))


def joint_layout(
    strategies: Mapping[str, Strategy],
    members: Mapping[str, Sequence[int]],
    layers: Collection[int] = (),
) -> JointLayout | None:
    """Return the lanes of a joint schedule and the tower ranks on them; None if no joint schedule is possible.

    Ranks that run only the tower are divided evenly among the data-parallel ranks of the language part. In each share,
    the rank with index k (from 0) is on lane pp + k. There is no joint schedule in any of these cases:

    * The language part has no pipeline stages, a schedule other than 1F1B, or a schedule file.
    * The model has several towers.
    * The ranks that run only the tower cannot be divided evenly among these data-parallel ranks.
    * Data-parallel ranks of the language part have the tower on different lanes.
    * The tower is sharded, and has no rank in common with the language part.

    Args:
        strategies: Dict from part to its strategy.
        members: Dict from part to its ranks.
        layers: As for `feature_stages`.
    """
    language = strategies[LANGUAGE]
    if language.pp == 1 or language.schedule != "1f1b" or language.schedule_file:
        return None
    names = [name for name in strategies if name != LANGUAGE]
    if len(names) > 1:
        return None
    places = places_of_ranks(language, members[LANGUAGE])
    ranks = members[names[0]]
    sharded = strategies[names[0]].dp_shard > 1
    alone = [rank for rank in ranks if rank not in places]
    each, rest = divmod(len(alone), language.dp)
    if rest or (sharded and len(alone) == len(ranks)):
        return None
    for n, rank in enumerate(alone):
        share, k = divmod(n, each)
        places[rank] = share, language.pp + k
    towers: list[list[tuple[int, int]]] = [[] for _ in range(language.dp)]
    for index, rank in enumerate(ranks):
        share, lane = places[rank]
        towers[share].append((lane, index))
    lanes, *others = [tuple(lane for lane, _ in sorted(share)) for share in towers]
    if any(other != lanes for other in others):
        return None
    spans = sharded and len({*lanes}) > 1
    order = tuple(tuple(index for _, index in sorted(share)) for share in towers)
    readers = feature_stages(language, layers)
    return JointLayout(TowerLanes(language.pp, lanes, spans, readers), order)


def submodel_lanes(
    strategies: Mapping[str, Strategy],
    members: Mapping[str, Sequence[int]],
    layers: Collection[int] = (),
) -> tuple[TowerLanes, bool]:
    """Return (lanes of a step, whether it has a joint schedule).

    Without a joint schedule, all ranks of the tower are on one lane: the lane of the first pipeline stage if the tower
    has ranks in common with the language part, else a separate lane. Arguments are those of `joint_layout`.
    """
    joint = joint_layout(strategies, members, layers)
    if joint is not None:
        return joint.lanes, True
    stages = strategies[LANGUAGE].pp
    towers = {rank for name in strategies if name != LANGUAGE for rank in members[name]}
    shared = not towers.isdisjoint(members[LANGUAGE])
    readers = feature_stages(strategies[LANGUAGE], layers)
    return TowerLanes(stages, (0 if shared else stages,), readers=readers), False


def places_of_ranks(language: Strategy, ranks: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return a dict from each of `ranks`, in the order of the mesh, to its (data-parallel rank, pipeline rank)."""
    mesh, places = language.mesh(), dict[int, tuple[int, int]]()
    for position, rank in enumerate(ranks):
        coordinate = mesh.coordinate(position)
        share = coordinate["dp_replicate"] * language.dp_shard + coordinate["dp_shard"]
        places[rank] = share, coordinate["pp"]
    return places


def layouts(kinds: Sequence[str], ranks: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield assignments of all ranks to the language part and its towers, as values of `parallel.submodels`.

    A single tower has ranks of its own, or shares all ranks of the language part, or those of the first or the last
    pipeline stage. On its own ranks, the tower is replicated if that permits a joint schedule: the language part has
    pipeline stages, and its data-parallel degree divides the number of tower ranks. Otherwise the tower is sharded. On
    shared ranks, the tower is tried sharded, and with pipeline stages also replicated.

    Several towers are always sharded. Each tower has ranks of its own, or all towers have the same ranks: either ranks
    without the language part, or all ranks of a language part without pipeline stages. `kinds` are names of towers.
    """
    for own in range(ranks):
        size = ranks - own
        for pp in divisors(size):
            for tp in divisors(size // pp):
                dp = size // (pp * tp)
                language = {"pp": pp, "tp_x": tp, "dp_shard": dp}
                if own:
                    joint = len(kinds) == 1 and pp > 1 and not own % dp
                    axis = "dp_replicate" if joint else "dp_shard"
                    for cuts in combinations(range(1, own), len(kinds) - 1):
                        sizes = (end - start for start, end in pairwise((0, *cuts, own)))
                        apart = {kind: {axis: n} for kind, n in zip(kinds, sizes, strict=True)}
                        yield {LANGUAGE: language, **apart}
                    if len(kinds) > 1:
                        together = {axis: own, "ranks": [*range(size, ranks)]}
                        yield {LANGUAGE: language, **dict.fromkeys(kinds, together)}
                    continue
                if len(kinds) > 1 and pp > 1:
                    continue  # several towers have no joint schedule
                stage = tp * dp  # ranks of a pipeline stage
                places = [(0, size), (0, stage), (size - stage, size)] if pp > 1 else [(0, size)]
                axes = ["dp_replicate"] * (pp > 1) + ["dp_shard"]
                for axis, (start, end) in product(axes, places):
                    count = end - start
                    if pp > 1 and axis == "dp_shard" and count == 1:
                        continue  # equals dp_replicate=1
                    shared = {axis: count, "ranks": [*range(start, end)]}
                    own_ranks = {**language, "ranks": [*range(size)]}
                    yield {LANGUAGE: own_ranks, **dict.fromkeys(kinds, shared)}


def plan_with_towers(
    request: PlanRequest, towers: Sequence[Tower], media: int, find: Callable[[PlanRequest], Plan]
) -> Plan:
    """Return the best plan of a multimodal model that leaves enough memory for the towers, with the towers added.

    The towers run on the ranks of the first pipeline stage, as in `train` without `parallel.submodels`. If the model
    has a single tower and the request no pins, other assignments of ranks are priced too. The certificate then covers
    all of them, and a note names a faster assignment.

    Args:
        request: The model with its towers, machine, workload and choices.
        towers: Towers of the model.
        media: Images or recordings per sequence, for every tower.
        find: Function that returns the best plan of a request, in which the towers take no time.

    Raises:
        DoesNotFit: HP401 if no plan leaves enough memory for the towers.
        HyperParallelError: As raised by `find`.
    """
    inline, changes = _fitting_step(request, towers, media, find)
    plan = inline.planned()
    steps = [inline, *_steps_apart(request, towers, media, plan.whole_step_s)]
    best = choose_step(steps, int(request.machine.memory_bytes))
    assert best is not None, "the inline step fits"
    position, fastest = best
    assert fastest.submodels is not None
    assert fastest.submodels.certificate is not None
    assert plan.submodels is not None
    items = ", ".join(f"{media} {tower.item}" for tower in towers)
    notes = [f"media assumed, per sequence: {items}", *changes]
    if position:
        parts = {p.name: p.degrees for p in fastest.submodels.parts}
        notes.append(
            f"a step takes {format_seconds(fastest.whole_step_s)} with `parallel.submodels`: "
            + ", ".join(f"{name} {degrees}" for name, degrees in parts.items())
        )
    proof = replace(fastest.submodels.certificate, value=plan.whole_step_s)
    submodels = replace(plan.submodels, certificate=proof)
    return replace(
        plan,
        submodels=submodels,
        memory_capacity_bytes=request.device_bytes,
        notes=(*plan.notes, *notes),
    )


def _fitting_step(
    request: PlanRequest, towers: Sequence[Tower], media: int, find: Callable[[PlanRequest], Plan]
) -> tuple[DividedStep, list[str]]:
    """Return (step of the best plan that leaves memory for the towers, notes); see `plan_with_towers`.

    The first of p pipeline stages keeps the activations of the towers for p microbatches. If the towers do not fit,
    fewer stages are tried first, then less memory for the language part.
    """
    capacity = limit = int(request.machine.memory_bytes)
    pins, notes, needed = dict(request.pins), list[str](), 0
    first_limit = 0  # bytes for the language part with which the first plan would leave enough for the towers
    while limit > 0:
        try:
            plan = find(replace(request, capacity_bytes=limit, headroom=0.0, pins=pins))
        except (DoesNotFit, NoLegalStrategy):
            if not needed:
                raise
            if pins == request.pins or limit < capacity:
                break
            # No plan has so few stages: the planner chooses their number again, with less memory.
            pins, notes, limit = dict(request.pins), [], first_limit
            continue
        step = _inline_step(request, plan, towers, media)
        if step.max_bytes <= capacity:
            return step, notes
        needed = needed or step.max_bytes
        reduced = min(limit, plan.memory_bytes) - (step.max_bytes - capacity)
        first_limit = first_limit or reduced
        fewer = [n for n in divisors(request.num_devices) if n < plan.strategy.pp]
        if fewer and "pp" not in request.pins and limit == capacity:
            pins["pp"] = fewer[-1]
            notes = [f"pp={fewer[-1]}: the fastest plan with more stages leaves too little memory for the encoders"]
        else:
            limit = reduced
    raise DoesNotFit(
        f"{request.model.name} does not fit with its encoders on {request.num_devices} devices of "
        f"{request.supernode.name}",
        got=f"{format_bytes(needed)} on the fullest device, with {media} images or recordings per sequence",
        allowed=f"up to {format_bytes(capacity)}",
        hint=_hint_of_encoders(request, towers, media, find),
    )


def _hint_of_encoders(
    request: PlanRequest, towers: Sequence[Tower], media: int, find: Callable[[PlanRequest], Plan]
) -> str | dict[str, object]:
    """Return the hint: `media` halved until a step fits, or another machine if a step with one item does not fit."""
    if media < 2:
        more = "" if request.supernode.name == LOCAL else "more devices, or "
        return f"{more}{topology_hint('--topology ')}"
    try:
        _fitting_step(request, towers, media // 2, find)
    except (DoesNotFit, NoLegalStrategy) as error:
        return error.changes or error.hint or _hint_of_encoders(request, towers, 1, find)
    return {"--media": media // 2}


def _inline_step(request: PlanRequest, plan: Plan, towers: Sequence[Tower], media: int) -> DividedStep:
    """Return the predicted step in which the first pipeline stage runs the towers; see `DividedStep.inline`."""
    s = plan.strategy
    own = Strategy(dp_replicate=s.dp_replicate, dp_shard=s.dp_shard * s.cp)
    places = places_of_ranks(s, range(s.world_size))
    first = tuple(rank for rank, (_, stage) in places.items() if stage == 0)
    return _predicted_step(request, plan, towers, own, first, media, inline=True)


def _steps_apart(request: PlanRequest, towers: Sequence[Tower], media: int, longest_s: float) -> Iterator[DividedStep]:
    """Yield predicted steps of executable results of `layouts` that may be shorter than `longest_s` seconds.

    A layout is omitted if its language part takes longer than `longest_s` at the peak FLOP/s of its devices. Nothing is
    yielded for several towers, or for a request with pins.
    """
    if len(tower_kinds(request.model)) != 1 or request.pins:
        return
    (tower,), rows = towers, (request.workload.tokens_per_step or 0) // request.workload.seq_len
    language = replace(request, model=language_of(request.model))
    tokens = request.workload.tokens_per_step or 0
    flops = 6.0 * language.model.num_matmul_params * tokens
    least = flops / (request.machine.peak_flops * longest_s)
    plans: dict[tuple[int, ...], Plan | None] = {}
    for parts in layouts([tower.name], request.num_devices):
        degrees = {k: v for k, v in parts[LANGUAGE].items() if k != "ranks"}
        if rows % degrees["dp_shard"]:
            continue
        size = math.prod(degrees.values())
        if size < least or language.refusal(Strategy(**degrees)) is not None:
            continue
        pins = {"dp_replicate": 1, "cp": 1, "ep": 1, "tp_y": 1, **degrees}
        if degrees["pp"] > 1:
            pins["schedule"] = "1f1b"
        key = tuple(degrees.values())
        if key not in plans:
            smaller = replace(language, num_devices=size, pins=check_pins(pins), executable=True)
            plans[key] = None
            with suppress(HyperParallelError):
                plans[key] = search(smaller, 0)
        if (plan := plans[key]) is not None:
            axes = {k: v for k, v in parts[tower.name].items() if k != "ranks"}
            own = Strategy(**axes)
            ranks = tuple(parts[tower.name].get("ranks") or range(size, size + own.world_size))
            step = _predicted_step(request, plan, towers, own, ranks, media)
            if step.lanes.padded(step.count) == step.count:
                yield step


def _predicted_step(
    request: PlanRequest,
    plan: Plan,
    towers: Sequence[Tower],
    tower_strategy: Strategy,
    ranks: tuple[int, ...],
    media: int,
    *,
    inline: bool = False,
) -> DividedStep:
    """Return the predicted step in which `ranks` run all towers with one strategy; `plan`: of the language part."""
    s, names = plan.strategy, [tower.name for tower in towers]
    strategies = {LANGUAGE: s, **dict.fromkeys(names, tower_strategy)}
    members = {LANGUAGE: tuple(range(s.world_size)), **dict.fromkeys(names, ranks)}
    lanes, joint = TowerLanes(s.pp, (0,)), False
    if not inline:
        lanes, joint = submodel_lanes(strategies, members)
    # Without a joint schedule, the tower ranks share the microbatches of all language ranks.
    share = 1.0 if joint or inline else s.dp / len(ranks)
    items = media * (plan.workload.microbatch or 1) * share
    count = plan.workload.accumulation_steps or 1
    prices = {t.name: price_tower(request, t, tower_strategy, items, microbatches=count) for t in towers}
    memory = language_memory(request, plan, names)
    return DividedStep(plan, strategies, members, lanes, joint, prices, language_memory=memory, inline=inline)
