"""The roles of `stage: grpo`: seconds of a step that samples and learns, and how devices are split among both.

A step samples completions (the cost of generation, `cost.generation_passes`) and learns from them (the cost of
training, and a forward for every pass beside it). With both a task graph of some steps, a lane per role, is simulated;
its steady seconds per step are what a split is chosen by. The space is small, and all of it is priced: every number of
ranks that only sample, every degree in which they share a copy, and of the ranks that learn every layout that the
search of their number keeps, one for each of their degrees. Imported by what plans `stage: grpo` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from hyper_parallel.config import Recipe
from hyper_parallel.errors import DoesNotFit, HyperParallelError, UnsupportedSharding, overrides
from hyper_parallel.ir import Plan
from hyper_parallel.planner._role_prices import Learner, Roles, Split, rows_of
from hyper_parallel.planner.plan_builder import require, search, to_plan
from hyper_parallel.planner.pricing import PricedStrategy
from hyper_parallel.planner.refinement import Outcome, find
from hyper_parallel.planner.refusals import check_legal
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.planner.strategy_space import divisors
from hyper_parallel.units import format_bytes, format_seconds


def with_roles(
    recipe: Recipe, request: PlanRequest, plan: Plan, where: Callable[[str], str]
) -> Plan:
    """The plan of given degrees, and the roles that the recipe names.

    Args:
        recipe: A recipe of `stage: grpo`.
        request: What the plan was made of.
        plan: The plan of the ranks that learn.
        where: Tells where the value of a key was set.

    Raises:
        DoesNotFit: HP401 when a rank that only samples has too little memory.
        NotDivisible: HP203, UnsupportedSharding: HP205 for a layout that a copy which only samples cannot have.
    """
    ranks, tp = recipe.grpo.sampling_ranks, recipe.grpo.copy_tp
    roles = Roles(recipe, request, plan.strategy.world_size + ranks)
    if ranks:
        _check_copy(roles, tp, where)
    learner = Learner(plan.strategy, plan.workload, plan.step_s, plan.stages, plan.memory)
    found = roles.split(ranks, tp, learner)
    if isinstance(found, str):
        return replace(plan, notes=(*plan.notes, f"the step is that of learning alone: {found}"))
    if ranks and not found.fits(roles.capacity_bytes):
        raise _too_big(roles, found, learner, where)
    notes = [*plan.notes, *roles.notes(found)]
    if not found.fits(roles.capacity_bytes):
        held, capacity = format_bytes(found.held_bytes), format_bytes(int(roles.capacity_bytes))
        notes.append(f"{held} while ranks sample exceed the device's {capacity}")
    return replace(plan, roles=roles.plan_of(found, [found]), notes=tuple(notes))


def split_devices(recipe: Recipe, request: PlanRequest, where: Callable[[str], str]) -> Plan:
    """The plan of the split with the least seconds per step, and of the best layout for it.

    Args:
        recipe: A recipe of `stage: grpo` with `parallel: auto`.
        request: With `rollout_ranks: auto` its devices are those of both roles, else those that learn.
        where: Tells where the value of a key was set.

    Raises:
        NoLegalStrategy: HP302. DoesNotFit: HP401 for either role.
        UnsupportedSharding: HP205 for a split of a model whose sampling is not priced.
    """
    roles = Roles(recipe, request, request.num_devices + recipe.grpo.sampling_ranks)
    if recipe.grpo.sampling_ranks and recipe.grpo.rollout_tp != "auto":
        _check_copy(roles, recipe.grpo.copy_tp, where)
    splits = [*roles.splits()]
    found: list[tuple[Split, Outcome, PricedStrategy]] = []
    large: list[tuple[Split, PricedStrategy]] = []
    refused = "no split is legal"

    def take(ranks: int, tp: int, outcome: Outcome) -> None:
        nonlocal refused
        # Ranks that only sample do not depend on the layout of the others, of which the first learns fastest.
        for priced in outcome.ranked[:1] if ranks else outcome.ranked:
            split = roles.split(ranks, tp, Learner.of(priced))
            if isinstance(split, str):
                refused = split
            elif split.fits(roles.capacity_bytes):
                found.append((split, outcome, priced))
            else:
                large.append((split, priced))

    for ranks, tp in splits:
        for outcome in roles.learners(roles.devices - ranks):
            take(ranks, tp, outcome)
    if (0, 1) in splits:
        # In the layout that learns fastest sampling may be slow.
        for outcome in roles.colocated(
            lambda: min((s.step_s / s.tokens for s, *_ in found), default=math.inf)
        ):
            take(0, 1, outcome)
    most = roles.devices - splits[0][0] if splits else roles.devices
    if not found:
        if large:
            split, priced = min(large, key=lambda f: f[0].held_bytes)
            raise _too_big(roles, split, Learner.of(priced), where)
        require(roles.on(most), find(roles.on(most)))
        if len(splits) != 1:
            raise UnsupportedSharding(
                f"the devices cannot be split among the roles: {refused}",
                where=where("grpo.rollout_ranks"),
                got="rollout_ranks=auto",
                hint="grpo.rollout_ranks=0 grpo.rollout_tp=1",
            )
        plan = search(roles.on(most))
        return replace(plan, notes=(*plan.notes, f"the step is that of learning alone: {refused}"))
    best, outcome, priced = min(found, key=lambda f: f[0].rank)
    slower = [p for p in outcome.ranked if p.per_token_s >= priced.per_token_s and p is not priced]
    request = outcome.search.space.request
    plan = to_plan(request, replace(outcome, ranked=(priced, *slower)), "step-time")
    notes = [*roles.notes(best)]
    first = min(
        (o.ranked[0] for o in roles.learners(request.num_devices)), key=lambda p: p.per_token_s
    )
    if first.per_token_s < priced.per_token_s:
        notes.append(
            f"{first.strategy} with {first.workload.microbatch} sequences at a time learns faster, in "
            f"{format_seconds(first.step_s)}, but the step is not shorter"
        )
    if len(splits) > 1:
        fit = len({(s.ranks, s.tp) for s, *_ in found})
        notes.append(
            f"{roles.devices} devices for both roles: of {len(splits)} ways to split them {fit} are legal and fit, and "
            "were priced"
        )
    return replace(
        plan,
        roles=roles.plan_of(best, [split for split, *_ in found]),
        notes=(*plan.notes, *notes),
    )


def _check_copy(roles: Roles, tp: int, where: Callable[[str], str]) -> None:
    """Refuse a layout that a copy which only samples cannot have."""
    copy, numbers = roles.copy(tp), roles.request.numbers
    try:
        check_legal(numbers, roles.request.workload.resolve(1), copy)
        roles.request.shard(copy)
    except HyperParallelError as error:
        keys = {"tp": "rollout_tp", "tp_x": "rollout_tp", "ep": "rollout_ep"}
        changes = {key.removeprefix("parallel."): value for key, value in error.changes.items()}
        error.where = where("grpo.rollout_ep" if "ep" in changes else "grpo.rollout_tp")
        error.changes = {
            f"grpo.{keys[key]}": value for key, value in changes.items() if key in keys
        }
        error.hint = overrides(error.changes) or "grpo.rollout_tp=1 grpo.rollout_ep=1"
        raise


def _too_big(
    roles: Roles, split: Split, learner: Learner, where: Callable[[str], str]
) -> DoesNotFit:
    """The error of ranks that have too little memory to sample, with a change that does."""
    held, capacity = split.held_bytes, roles.capacity_bytes
    hint = "a smaller model, or a machine with more memory"
    work, rows = learner.workload, rows_of(learner.workload) or 1
    if split.ranks:
        for tp in range(split.tp + 1, split.ranks + 1):
            other = roles.split(split.ranks, tp, learner)
            if not isinstance(other, str) and other.fits(capacity):
                hint = f"grpo.rollout_tp={tp}"
                break
    if hint.startswith("a "):
        for batch in reversed([b for b in divisors(rows) if b < (work.microbatch or 1)]):
            fewer = replace(learner, workload=replace(work, microbatch=batch))
            other = roles.split(split.ranks, split.tp, fewer)
            if not isinstance(other, str) and other.fits(capacity):
                hint = f"training.microbatch={batch}"
                break
    s = split.sampling
    return DoesNotFit(
        f"{roles.request.model.name} does not fit on a rank that "
        + ("only samples" if split.ranks else "trains and samples"),
        where=where("grpo.rollout_ranks"),
        got=f"{format_bytes(held)}: {format_bytes(held - s.beside_bytes)} of weights"
        + ("" if split.ranks else " and optimizer states")
        + f", {format_bytes(s.beside_bytes)} of cache and a pass",
        allowed=f"up to {format_bytes(int(capacity))}",
        hint=hint,
    )
