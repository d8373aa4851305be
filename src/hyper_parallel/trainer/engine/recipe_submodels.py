"""Checks and predicted times of the sub-models of a recipe before ranks start."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Final

from torch import nn

from hyper_parallel.backends.torch.submodels.parts import divide, tower_flops
from hyper_parallel.config import LoadedRecipe, Recipe
from hyper_parallel.ir import PartPlan, Plan, Schedule, StageCost, SubmodelsPlan
from hyper_parallel.mpmd import (
    TowerLanes,
    rounds_schedule,
    schedule_tasks,
    submodel_bound_s,
    submodel_schedule,
)
from hyper_parallel.runtime import submodel_lanes, submodel_strategies
from hyper_parallel.sim import simulate
from hyper_parallel.trainer.data import Batches
from hyper_parallel.trainer.engine.optimizer import check_optimizer
from hyper_parallel.trainer.engine.recipe_model import submodel_layouts

_SAMPLED: Final = 16
"""Microbatches of the first step whose media are counted; few, as their arrays are made before the run starts."""


def check_submodels(loaded: LoadedRecipe, plan: Plan, model: nn.Module) -> None:
    """Raise for a model that has no such sub-models, and for an optimizer that does not support their layouts.

    Raises:
        BadValue: HP102, UnsupportedSharding: HP205, Contradiction: HP104.
    """
    layouts = submodel_layouts(loaded.recipe, plan)
    assert loaded.recipe.parallel.submodels is not None
    members = loaded.recipe.parallel.submodels.members
    size = len({rank for ranks in members.values() for rank in ranks})
    submodel_strategies(model, layouts, size, members)
    for strategy in layouts.values():
        check_optimizer(loaded.recipe, replace(plan, strategy=strategy), loaded.where, model)


def plan_submodels(
    recipe: Recipe, plan: Plan, model: nn.Module, sequence_flops: float | None
) -> Plan:
    """Return the plan with the parts of the model, their predicted times and the schedule of a step.

    The tower computes at the rate that the plan predicts for the language part. Features are sent in no time.

    Args:
        recipe: Recipe with `parallel.submodels`.
        plan: Plan of the language part.
        model: The model on the meta device, not changed.
        sequence_flops: FLOPs of the tower's forward per sequence, of `sampled_tower_flops`.
    """
    assert recipe.parallel.submodels is not None
    layouts, members = submodel_layouts(recipe, plan), recipe.parallel.submodels.members
    lanes, joint = submodel_lanes(layouts, members)
    count, shares = plan.workload.accumulation_steps or 1, plan.strategy.dp
    if sequence_flops is None:
        note = (
            "sub-models: the encoder does not run on meta tensors, so its times are not predicted"
        )
        return replace(plan, notes=(*plan.notes, note))
    forward_s = sum(stage.cost.forward_s for stage in plan.stages)
    forward_flops = plan.model.flops_per_token / 3 * plan.workload.seq_len
    tower_s = sequence_flops * forward_s * plan.strategy.tp / forward_flops
    (name,) = recipe.parallel.submodels.towers
    ranks, tower = len(members[name]), divide(model).tower
    frozen = not any(p.requires_grad for n, p in model.named_parameters() if n in tower)
    if not joint:  # its ranks work together on the microbatches of all language ranks
        tower_s *= shares / ranks
    costs = [StageCost(tower_s, 0.0, 0.0 if frozen else 2 * tower_s)]
    costs += [
        replace(stage.cost, send_backward_s=stage.cost.send_backward_s * bool(k))
        for k, stage in enumerate(plan.stages)
    ]
    make = submodel_schedule if joint else rounds_schedule
    schedule = make(lanes, count, costs, frozen=frozen)
    busy = [_busy(costs[0], count / len(lanes.towers) if joint else count)]
    busy += [_busy(max(costs[1:], key=lambda c: c.microbatch_s), count)]
    parts = [
        PartPlan(part, members[part], str(layouts[part]), *seconds)
        for part, seconds in (("language", busy[1]), (name, busy[0]))
    ]
    step = _step(parts, lanes, schedule, costs, joint)
    return replace(plan, submodels=replace(step, wait_s=_wait_s(plan, step.step_s)))


def _busy(cost: StageCost, microbatches: float) -> tuple[float, float]:
    return cost.forward_s * microbatches, (cost.input_grad_s + cost.weight_grad_s) * microbatches


def _wait_s(plan: Plan, step_s: float) -> float:
    """Return the seconds of a step beyond those of the language part alone, under 1F1B."""
    lanes = TowerLanes(plan.strategy.pp, (0,))
    costs = [StageCost(0.0, 0.0, 0.0), *(stage.cost for stage in plan.stages)]
    count = plan.workload.accumulation_steps or 1
    alone_s = simulate(schedule_tasks(rounds_schedule(lanes, count, costs), costs)).end_s
    return max(0.0, step_s - alone_s)


def sampled_tower_flops(plan: Plan, model: nn.Module, batches: Batches) -> float | None:
    """Return the mean FLOPs of the tower's forward per sequence, over at most `_SAMPLED` microbatches of step 0.

    The result is None for an encoder that does not run on meta tensors.
    """
    work, strategy = plan.workload, plan.strategy
    rows, count = work.microbatch or 1, work.accumulation_steps or 1
    shares = min(strategy.dp, -(-_SAMPLED // count))
    sampled = islice(
        (b for s in range(shares) for b in batches.microbatches(0, s, strategy.dp, rows, count)),
        _SAMPLED,
    )
    counts = tower_flops(model, [{"input_ids": b.input_ids, **b.media} for b in sampled])
    return None if counts is None else sum(counts) / (len(counts) * rows)


def _step(
    parts: list[PartPlan],
    lanes: TowerLanes,
    schedule: Schedule,
    costs: list[StageCost],
    joint: bool,
) -> SubmodelsPlan:
    """Return the parts with the simulated step of a schedule: its seconds, idle fraction, bound and actions."""
    step_s = simulate(schedule_tasks(schedule, costs)).end_s
    # Seconds of ranks: all ranks of a lane work together.
    language, tower = parts
    stage_ranks = len(language.ranks) / lanes.stages
    tower_ranks = 1 if joint else len(tower.ranks)
    busy_s = 0.0
    for _, _, action in schedule.compute_only().leaves():
        c = costs[action.stage]
        seconds = {"F": c.forward_s, "I": c.input_grad_s, "W": c.weight_grad_s}
        seconds["B"] = c.input_grad_s + c.weight_grad_s
        busy_s += seconds[action.kind] * (stage_ranks if action.stage else tower_ranks)
    ranks = len({*language.ranks, *tower.ranks})
    return SubmodelsPlan(
        tuple(parts),
        step_s,
        1.0 - busy_s / (ranks * step_s),
        submodel_bound_s(lanes, schedule.microbatches, costs),
        schedule.to_csv(extended=True) if joint else "",
    )
