"""Search for ranks and degrees of the encoders and language model of a multimodal model (`parallel.submodels: auto`).

Each candidate layout is planned, and its step time gets a lower bound. Candidates that the planner or the checks of
sub-models reject are dropped. The schedules of the remaining candidates are simulated in the order of their bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hyper_parallel.backends.torch.submodels.parts import LANGUAGE, TowerNotTraced, divide
from hyper_parallel.config import LoadedRecipe, with_submodels
from hyper_parallel.errors import DoesNotFit, HyperParallelError, UnsupportedSharding
from hyper_parallel.ir import Certificate, Plan, SubmodelsPlan
from hyper_parallel.planner.submodels import DividedStep, choose_step, layouts
from hyper_parallel.topology import topology_hint
from hyper_parallel.trainer.data import Batches
from hyper_parallel.trainer.engine.recipe_submodels import (
    check_submodels,
    divided_step,
    planning_request,
    sampled_tower_flops,
)
from hyper_parallel.units import format_bytes, format_seconds, plural

_Parts = dict[str, dict[str, Any]]
_ORIGIN = "derived: parallel.submodels=auto"


def choose_submodels(
    loaded: LoadedRecipe,
    model: nn.Module,
    ranks: int,
    plan_of: Callable[[LoadedRecipe], Plan],
    batches_of: Callable[[LoadedRecipe, Plan], Batches],
) -> tuple[LoadedRecipe, str, Certificate]:
    """Choose the layout with the shortest predicted step per token, among layouts that fit in device memory.

    All `ranks` ranks are used. The work of each encoder is estimated from the first images or audio recordings of the
    first step. For a recipe with explicit sub-models, `plan_of` returns the plan of the language model, and
    `batches_of` returns the training batches.

    Returns:
        Recipe with the chosen layout, a note for the plan, and the certificate of the search.

    Raises:
        UnsupportedSharding: HP205 for a model without an encoder, or whose encoder's time cannot be predicted.
        HyperParallelError: HP401 if no layout fits in memory; the error of the first layout, if no layout can run.
    """
    candidates, steps = list[LoadedRecipe](), list[DividedStep]()
    refusals: Counter[str] = Counter()
    first: HyperParallelError | None = None
    flops: dict[str, float] | None = None
    for parts in layouts(divide(model).kinds, ranks):
        if parts[LANGUAGE]["pp"] > 1 and parts[LANGUAGE]["tp_x"] > 1:
            refusals["pipeline stages with replicated activations have no predicted time"] += 1
            continue
        try:
            candidate = with_submodels(loaded, parts, _ORIGIN)
            plan = plan_of(candidate)
            check_submodels(candidate, plan, model)
        except HyperParallelError as error:
            first = first or error
            refusals[error.what] += 1
            continue
        if flops is None:
            try:
                flops = sampled_tower_flops(plan, model, batches_of(candidate, plan))
            except TowerNotTraced as cause:
                raise _no_time(loaded, parts, cause) from cause
        candidates.append(candidate)
        steps.append(divided_step(candidate.recipe, plan, model, flops))
    if not candidates:
        assert first is not None, "one rank has a layout"
        raise first
    capacity = planning_request(loaded.recipe, model, steps[0].plan).machine.memory_bytes
    if (best := choose_step(steps, int(capacity))) is None:
        raise _no_memory(loaded, steps, int(capacity))
    position, plan = best
    assert plan.submodels is not None
    proof = plan.submodels.certificate
    assert proof is not None
    proof = replace(proof, ruled_out={**refusals, **proof.ruled_out})
    return candidates[position], _note(plan.submodels, proof), proof


def _no_time(loaded: LoadedRecipe, parts: _Parts, cause: TowerNotTraced) -> UnsupportedSharding:
    return UnsupportedSharding(
        "the time of the encoder cannot be predicted",
        where=loaded.where("parallel.submodels"),
        got=f"an encoder that does not run on meta tensors ({cause})",
        changes={"parallel.submodels": parts},
    )


def _no_memory(loaded: LoadedRecipe, steps: Sequence[DividedStep], capacity_bytes: int) -> DoesNotFit:
    can_shrink = any((step.plan.workload.microbatch or 1) > 1 for step in steps)
    smaller = "a smaller training.microbatch, " if can_shrink else ""
    return DoesNotFit(
        "no layout of the parts of the model fits in the memory of a device",
        where=loaded.where("parallel.submodels"),
        got=f"{format_bytes(min(step.max_bytes for step in steps))} on the fullest device at best",
        allowed=f"up to {format_bytes(capacity_bytes)}",
        hint=f"{smaller}more ranks, or {topology_hint()}",
    )


def _note(plan: SubmodelsPlan, proof: Certificate) -> str:
    layout = ", ".join(
        f"{part.name} ({part.degrees}) on {plural(len(part.ranks), 'rank')} from rank {part.ranks[0]}"
        for part in plan.parts
    )
    return (
        f"sub-models: {layout} is the fastest of {proof.priced} layouts: {format_seconds(proof.value)}, "
        f"and none takes less than {format_seconds(proof.bound)} (gap {proof.gap:.1%})"
    )
