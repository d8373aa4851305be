"""Roles of `stage: grpo`: predicted time of a step that samples and learns, and the split of devices between roles.

A rank samples completions, learns from them, or does both (colocated). A split is a number of ranks that only sample
and the tensor-parallel degree of a sampler replica (ranks with a full model). Sampling is priced as generation.
Learning is priced as training plus the forward passes for the reference model and for importance sampling. Ranks that
only sample can run the reference model instead. With separate ranks, several steps of both roles are simulated to find
the steady-state seconds per step. The search covers all splits, with learner layouts that `find_best` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hyper_parallel.config import Recipe
from hyper_parallel.errors import DoesNotFit, HyperParallelError, UnsupportedSharding
from hyper_parallel.ir import Plan
from hyper_parallel.mpmd import search_by_bound
from hyper_parallel.planner._role_prices import Roles, Split, roles_plan
from hyper_parallel.planner.plan_builder import require_fit, search, to_plan
from hyper_parallel.planner.refinement import Outcome, find_best
from hyper_parallel.planner.refusals import check_legal
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.topology import topology_hint
from hyper_parallel.units import divisors, format_bytes, format_seconds

MAX_LAYOUTS: Final = 1024
"""Maximum number of learner layouts per search if all ranks both sample and learn."""


def with_roles(recipe: Recipe, request: PlanRequest, plan: Plan, where: Callable[[str], str]) -> Plan:
    """Return a plan for explicit degrees with `Plan.roles` added, or a note if sampling cannot be predicted.

    Args:
        recipe: A recipe of `stage: grpo`.
        request: Inputs of the planner for the plan.
        plan: Plan of the ranks that learn.
        where: Function from a recipe key to the origin of its value, for errors.

    Raises:
        DoesNotFit: HP401 when a rank that only samples has too little memory. For other ranks, a note says so.
        NotDivisible, UnsupportedSharding: HP203, HP205 for an illegal layout of a sampler replica.
    """
    ranks, tp = recipe.grpo.sampling_ranks, recipe.grpo.copy_tp
    roles = Roles(recipe, request, plan.strategy.world_size + ranks)
    if ranks:
        _check_copy(roles, tp, where)
    split = roles.split(ranks, tp, plan)
    if isinstance(split, str):
        note = f"the predicted step covers learning only: {split}"
        return replace(plan, notes=(*plan.notes, note))
    memory, capacity = split.memory_bytes, roles.capacity_bytes
    if ranks and memory > capacity:
        raise _memory_error(roles, split, where)
    notes = [*plan.notes, *roles.notes(split)]
    if memory > capacity:
        used, usable = format_bytes(memory), format_bytes(capacity)
        notes.append(f"{used} while ranks sample exceed the device's {usable}")
    return replace(plan, roles=roles_plan(split, [split]), notes=tuple(notes))


def split_devices(recipe: Recipe, request: PlanRequest, where: Callable[[str], str]) -> Plan:
    """Return the plan for the split of devices and the learner layout with the fewest seconds per token.

    If there is only one split and its sampling cannot be predicted, the plan covers learning only, with a note.

    Args:
        recipe: A recipe of `stage: grpo` with `parallel: auto`.
        request: Inputs of the planner. With `rollout_ranks: auto`, `num_devices` counts the devices of both roles, else
            only those that learn.
        where: Function from a recipe key to the origin of its value, for errors.

    Raises:
        NoLegalStrategy: HP302 if no layout is legal.
        DoesNotFit: HP401 if a rank of either role has too little memory.
        NotDivisible, UnsupportedSharding: HP203, HP205 for an illegal sampler replica. HP205 also if there is no split,
            or if there are several and none can be predicted.
    """
    roles = Roles(recipe, request, request.num_devices + recipe.grpo.sampling_ranks)
    if recipe.grpo.sampling_ranks and recipe.grpo.rollout_tp != "auto":
        _check_copy(roles, recipe.grpo.copy_tp, where)
    splits = [*roles.splits()]
    prices = _price_splits(roles, splits)
    if not prices.fitting:
        return _plan_without_split(roles, splits, prices, where)
    best, outcome = min(prices.fitting, key=lambda f: f[0].sort_key)
    priced = next(p for p in outcome.ranked if p is best.learner)
    slower = [p for p in outcome.ranked if p.per_token_s >= priced.per_token_s and p is not priced]
    request = outcome.search.space.request
    plan = to_plan(request, replace(outcome, ranked=(priced, *slower)), "step-time")
    notes = [*roles.notes(best)]
    learners = (o.ranked[0] for o in prices.learners[request.num_devices])
    fastest = min(learners, key=lambda p: p.per_token_s)
    if fastest.per_token_s < priced.per_token_s:
        notes.append(
            f"{fastest.strategy} with {fastest.workload.microbatch} sequences at a time learns faster, in "
            f"{format_seconds(fastest.step_s)}, but the step is not shorter"
        )
    if len(splits) > 1:
        fit = len({(s.ranks, s.tp) for s, _ in prices.fitting})
        notes.append(
            f"{roles.devices} devices for both roles: of {len(splits)} ways to split them {fit} are legal and fit, and "
            "were priced"
        )
    fitting = [split for split, _ in prices.fitting]
    return replace(plan, roles=roles_plan(best, fitting), notes=(*plan.notes, *notes))


@dataclass(slots=True)
class _SplitPrices:
    # dict from number of devices that learn to search results, one per microbatch size that fits
    learners: dict[int, list[Outcome]]
    fitting: list[tuple[Split, Outcome]] = field(default_factory=list)
    oversized: list[Split] = field(default_factory=list)  # exceed memory
    # why the last split without a prediction has none
    reason: str = "no split has whole sampler replicas that share the completions evenly"

    def add(self, roles: Roles, ranks: int, tp: int, outcome: Outcome) -> float | None:
        """Predict a split with the learner layouts of a search result, and record the predictions.

        Returns:
            The least seconds per token; None if no layout can be predicted and fits.
        """
        values = []
        # The time of ranks that only sample does not depend on the learner's degrees: the fastest learner suffices.
        for learner in outcome.ranked[:1] if ranks else outcome.ranked:
            split = roles.split(ranks, tp, learner)
            if isinstance(split, str):
                self.reason = split
            elif split.memory_bytes <= roles.capacity_bytes:
                self.fitting.append((split, outcome))
                values.append(split.per_token_s)
            else:
                self.oversized.append(split)
        return min(values, default=None)


def _price_splits(roles: Roles, splits: Sequence[tuple[int, int]]) -> _SplitPrices:
    """Return the predictions for all splits, each with the fastest learner layout of every microbatch size.

    If all ranks may both sample and learn, slower learner layouts are included too, because they may sample faster. A
    layout is omitted if its learning time and the least sampling time of any layout exceed the best step so far.
    """
    prices = _SplitPrices({})
    for devices in dict.fromkeys(roles.devices - ranks for ranks, _ in splits):
        outcomes = map(find_best, roles.requests(devices))
        prices.learners[devices] = [o for o in outcomes if o.fits]
    learned = [(*s, outcome) for s in splits for outcome in prices.learners[roles.devices - s[0]]]
    shared = roles.colocated() if (0, 1) in splits else []

    def price(k: int, least_s: float | None) -> float | None:
        if k < len(learned):
            return prices.add(roles, *learned[k])
        bound_s, request = shared[k - len(learned)]
        remaining_s = math.inf if least_s is None else least_s - bound_s
        return prices.add(roles, 0, 1, find_best(request, MAX_LAYOUTS, remaining_s))

    search_by_bound([*(-math.inf for _ in learned), *(bound_s for bound_s, _ in shared)], price)
    return prices


def _plan_without_split(
    roles: Roles,
    splits: Sequence[tuple[int, int]],
    prices: _SplitPrices,
    where: Callable[[str], str],
) -> Plan:
    """Return a plan whose predictions cover learning only, because sampling in the only split cannot be predicted.

    Raises:
        DoesNotFit: HP401 if the splits exceed memory, or no learner layout fits.
        NoLegalStrategy: HP302 if no learner layout is legal.
        UnsupportedSharding: HP205 if there is no split, or if none of several splits can be predicted.
    """
    if prices.oversized:
        raise _memory_error(roles, min(prices.oversized, key=lambda s: s.memory_bytes), where)
    grpo = roles.grpo
    devices = roles.devices - (splits[0][0] if splits else grpo.sampling_ranks)
    request = replace(roles.request, num_devices=devices)
    if len(splits) != 1:
        require_fit(request, find_best(request))
        raise UnsupportedSharding(
            f"the devices cannot be divided between sampling and learning: {prices.reason}",
            where=where("grpo.rollout_ranks"),
            got=f"rollout_ranks={grpo.rollout_ranks}, rollout_tp={grpo.rollout_tp}",
            changes={
                "grpo.rollout_ranks": 0,
                "grpo.rollout_tp": 1,
                **({"grpo.max_staleness": 0} if grpo.max_staleness else {}),
                **({"grpo.partial_rollout": "false"} if grpo.partial_rollout else {}),
                **({"grpo.min_effective_samples": "null"} if grpo.min_effective_samples is not None else {}),
                **({"grpo.reference_role": "learner"} if grpo.reference_role == "sampler" else {}),
            },
        )
    plan = search(request)
    note = f"the predicted step covers learning only: {prices.reason}"
    return replace(plan, notes=(*plan.notes, note))


def _check_copy(roles: Roles, tp: int, where: Callable[[str], str]) -> None:
    """Raise an error if a sampler replica of `tp` tensor-parallel ranks is illegal; the hint names keys of `grpo`."""
    copy, numbers = roles.sampler_strategy(tp), roles.request.numbers
    try:
        check_legal(numbers, roles.request.workload, copy)  # no pipeline: the batch has no effect
        roles.request.shard(copy)
    except HyperParallelError as error:
        keys = {"tp": "rollout_tp", "tp_x": "rollout_tp", "ep": "rollout_ep"}
        changes = {key.removeprefix("parallel."): value for key, value in error.changes.items()}
        error.where = where("grpo.rollout_ep" if "ep" in changes else "grpo.rollout_tp")
        error.changes = {f"grpo.{keys[k]}": v for k, v in changes.items() if k in keys}
        error.hint = None if error.changes else "grpo.rollout_tp=1 grpo.rollout_ep=1"
        raise


def _memory_error(roles: Roles, split: Split, where: Callable[[str], str]) -> DoesNotFit:
    """Return the error for ranks with too little memory to sample; its hint is a change with which they fit, if any."""
    memory, capacity, learner = split.memory_bytes, roles.capacity_bytes, split.learner
    work = learner.workload
    rows = (work.tokens_per_step or 0) // work.seq_len // learner.strategy.dp or 1  # of a data-parallel rank
    batches = [b for b in divisors(rows) if b < (work.microbatch or 1)]
    changes = [(f"grpo.rollout_tp={tp}", tp, learner) for tp in range(split.tp + 1, split.ranks + 1)]
    for b in reversed(batches):
        smaller = replace(learner, workload=replace(work, microbatch=b))
        change = f"training.microbatch={b}"
        if roles.request.workload.accumulation_steps is not None:  # set by the recipe
            change += f" training.accumulation_steps={rows // b}"
        changes.append((change, split.tp, smaller))
    hint = f"a smaller model, or {topology_hint()}"
    for change, tp, changed in changes:
        alternative = roles.split(split.ranks, tp, changed)
        if not isinstance(alternative, str) and alternative.memory_bytes <= capacity:
            hint = change
            break
    return DoesNotFit(
        f"{roles.request.model.name} does not fit on a rank that "
        + ("only samples" if split.ranks else "trains and samples"),
        where=where("grpo.rollout_ranks"),
        got=f"{format_bytes(memory)}: {format_bytes(memory - split.working_bytes)} of weights"
        + ("" if split.ranks else " and optimizer states")
        + f", {format_bytes(split.working_bytes)} of cache and a pass",
        allowed=f"up to {format_bytes(capacity)}",
        hint=hint,
    )
