"""Checks and predicted step times of sub-models (`parallel.submodels`), before ranks start.

The sub-models of a multimodal model are its language model and its towers: vision and audio encoders, on separate or
shared ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from torch import nn

from hyper_parallel.backends.torch.model_layouts import read_model
from hyper_parallel.backends.torch.submodels.parts import TowerNotTraced, divide, tower_flops
from hyper_parallel.config import LoadedRecipe, Recipe
from hyper_parallel.errors import BatchMismatch
from hyper_parallel.ir import Plan, StageCost
from hyper_parallel.model import read_config, towers_of
from hyper_parallel.planner.request import PlanRequest, resolve
from hyper_parallel.planner.submodels import (
    DividedStep,
    TowerPrice,
    language_memory,
    price_tower,
    submodel_lanes,
)
from hyper_parallel.runtime import submodel_strategies
from hyper_parallel.trainer.data import Batches
from hyper_parallel.trainer.engine.optimizer import check_optimizer
from hyper_parallel.trainer.engine.recipe_model import submodel_layouts

_SAMPLED: Final = 16
"""Number of microbatches of the first step whose media are counted. The number is small, because the arrays of these
media are computed before the run."""


def check_submodels(loaded: LoadedRecipe, plan: Plan, model: nn.Module) -> None:
    """Check that the model has the recipe's sub-models, and that their layouts are supported.

    Raises:
        BadValue, DegreesMismatch: HP102 or HP301 for invalid values of `parallel.submodels`.
        UnsupportedSharding: HP205 for a model that cannot be divided into sub-models, or an unsupported layout.
        BatchMismatch: HP308 when the number of microbatches is not a multiple of the number that a sharded encoder
            processes per round.
        HyperParallelError: Errors of `check_optimizer` for the layout of a sub-model.
    """
    layouts = submodel_layouts(loaded.recipe, plan)
    assert loaded.recipe.parallel.submodels is not None
    members = loaded.recipe.parallel.submodels.members
    size = len({rank for ranks in members.values() for rank in ranks})
    submodel_strategies(model, layouts, size, members)
    lanes, joint = submodel_lanes(layouts, members)
    count = plan.workload.accumulation_steps or 1
    if joint and lanes.padded(count) != count:
        training, work = loaded.recipe.training, plan.workload
        changes = {"training.accumulation_steps": lanes.padded(count)}
        if training.tokens_per_step is not None:
            sequences = lanes.padded(count) * (work.microbatch or 1) * plan.strategy.dp
            changes["training.tokens_per_step"] = sequences * work.seq_len
        raise BatchMismatch(
            f"accumulation_steps must be a multiple of {lanes.width}, the microbatches per round of a sharded encoder",
            where=loaded.where("training.accumulation_steps"),
            got=f"{count} microbatches",
            allowed=f"a multiple of {lanes.width}",
            changes=changes,
        )
    for strategy in layouts.values():
        check_optimizer(loaded.recipe, replace(plan, strategy=strategy), loaded.where, model)


def divided_step(recipe: Recipe, plan: Plan, model: nn.Module, sequence_flops: Mapping[str, float]) -> DividedStep:
    """Predict seconds and memory of a step, for the towers and for the language model, whose plan is `plan`.

    If the config lacks the sizes of a tower, the tower is assumed to reach the FLOP/s of the language model. The memory
    of this tower and of the language model is then not predicted. `sequence_flops` is the result of
    `sampled_tower_flops`.
    """
    assert recipe.parallel.submodels is not None
    strategies, members = submodel_layouts(recipe, plan), recipe.parallel.submodels.members
    division = divide(model)
    lanes, joint = submodel_lanes(strategies, members, division.layers_with_features)
    request = planning_request(recipe, model, plan)
    towers = {t.name: t for t in towers_of(request.model, read_config(recipe.model.path).values)}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    count = plan.workload.accumulation_steps or 1
    prices, frozen = dict[str, TowerPrice](), True
    parts = {part.kind: part for part in division.towers}
    for name in recipe.parallel.submodels.towers:
        is_frozen = trained.isdisjoint(parts[name].parameters)
        frozen = frozen and is_frozen
        # Without a joint schedule, the tower ranks share the microbatches of all language ranks.
        share = 1.0 if joint else plan.strategy.dp / len(members[name])
        flops = sequence_flops[name] * (plan.workload.microbatch or 1) * share
        if name not in towers:
            prices[name] = _at_language_rate(plan, flops, is_frozen)
            continue
        items = flops / towers[name].forward_flops
        options: dict[str, Any] = {"microbatches": count, "frozen": is_frozen}
        prices[name] = price_tower(request, towers[name], strategies[name], items, **options)
    known = towers.keys() >= prices.keys()
    memory = language_memory(request, plan, [*prices]) if known else ()
    return DividedStep(plan, strategies, members, lanes, joint, prices, frozen, memory)


def _at_language_rate(plan: Plan, flops: float, frozen: bool) -> TowerPrice:
    """Return the predicted seconds of `flops` forward FLOPs of a tower, at the FLOP/s of the planned language model."""
    forward_s = sum(stage.cost.forward_s for stage in plan.stages)
    sequences_flops = plan.model.flops_per_token / 3 * plan.workload.seq_len
    sequences_flops *= plan.workload.microbatch or 1
    tower_s = flops * forward_s * plan.strategy.tp / sequences_flops
    return TowerPrice(StageCost(tower_s, 0.0, 0.0 if frozen else 2 * tower_s))


def planning_request(recipe: Recipe, model: nn.Module, plan: Plan) -> PlanRequest:
    """Return the planner request for the language model; its machine model also predicts the times of encoders."""
    spec = read_model(model, recipe.model.path)
    ranks = plan.strategy.world_size
    request = resolve(spec, recipe.topology, plan.workload, ranks)
    return request.sharing_cores_with(ranks + recipe.parallel.tower_ranks)


def plan_submodels(recipe: Recipe, plan: Plan, model: nn.Module, batches: Batches) -> Plan:
    """Return the plan with the sub-models, their predicted times, and the schedule of a step.

    If an encoder does not run on meta tensors, only a note that names the cause is added.
    """
    try:
        flops = sampled_tower_flops(plan, model, batches)
    except TowerNotTraced as cause:
        note = f"sub-models: the encoder does not run on meta tensors ({cause}), so its times are not predicted"
        return replace(plan, notes=(*plan.notes, note))
    step = divided_step(recipe, plan, model, flops)
    plan = step.planned()
    if step.language_memory:
        return plan
    notes = (
        f"{name}: its config states no number of heads or size of patches, so its time is priced at the rate of "
        "the language part, and its memory is not predicted"
        for name, tower in step.towers.items()
        if not tower.memory
    )
    return replace(plan, notes=(*plan.notes, *notes))


def sampled_tower_flops(plan: Plan, model: nn.Module, batches: Batches) -> dict[str, float]:
    """Return the mean FLOPs of each tower's forward per sequence, by name, over some microbatches of the first step.

    Raises:
        TowerNotTraced: An encoder does not run on meta tensors; see `tower_flops`.
    """
    work, strategy = plan.workload, plan.strategy
    rows, count = work.microbatch or 1, work.accumulation_steps or 1
    shares = min(strategy.dp, -(-_SAMPLED // count))
    sampled = islice(
        (b for s in range(shares) for b in batches.microbatches(0, s, strategy.dp, rows, count)),
        _SAMPLED,
    )
    counts = tower_flops(model, [{"input_ids": b.input_ids, **b.media} for b in sampled])
    return {kind: sum(flops) / (len(flops) * rows) for kind, flops in counts.items()}
