"""Search of the ranks and degrees of the parts of a multimodal model, for `parallel.submodels: auto`.

Every layout of `layouts` is planned and its step is scheduled; the shortest predicted step per token wins. A layout
that cannot run is left out. Most are refused by the planner or by the checks of sub-models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hyper_parallel.backends.torch.submodels.parts import LANGUAGE, divide
from hyper_parallel.config import LoadedRecipe, Recipe, with_submodels
from hyper_parallel.errors import HyperParallelError, UnsupportedSharding
from hyper_parallel.ir import Plan
from hyper_parallel.trainer.data import Batches
from hyper_parallel.trainer.engine.recipe_submodels import (
    check_submodels,
    plan_submodels,
    sampled_tower_flops,
)

_Parts = dict[str, dict[str, Any]]
_ORIGIN = "derived: parallel.submodels=auto"


def choose_submodels(
    loaded: LoadedRecipe,
    model: nn.Module,
    ranks: int,
    plan_of: Callable[[LoadedRecipe], Plan],
    batches_of: Callable[[LoadedRecipe, Plan], Batches],
) -> tuple[LoadedRecipe, str]:
    """Return the recipe with the layout of the shortest predicted step per token, and a note about the choice.

    The work of the tower is that of the images or recordings at the start of the first step. Its memory is not
    predicted.

    Args:
        loaded: Recipe with `parallel.submodels: auto`.
        model: The model on the meta device, not changed.
        ranks: Ranks to use, all of them.
        plan_of: Returns the plan of the language part of a recipe with a layout.
        batches_of: Returns the training batches of such a recipe and its plan.

    Raises:
        UnsupportedSharding: HP205 for a model without a tower, or whose tower has no predicted time.
        HyperParallelError: The refusal of the first layout, if none can run.
    """
    options: list[tuple[float, LoadedRecipe]] = []
    first: HyperParallelError | None = None
    flops: float | None = None
    for parts in layouts(divide(model).kind, ranks):
        try:
            candidate = with_submodels(loaded, parts, _ORIGIN)
            plan = plan_of(candidate)
            check_submodels(candidate, plan, model)
        except HyperParallelError as error:
            first = first or error
            continue
        if flops is None:
            flops = sampled_tower_flops(plan, model, batches_of(candidate, plan))
            if flops is None:
                raise _no_time(loaded, parts)
        plan = plan_submodels(candidate.recipe, plan, model, flops)
        options.append((plan.whole_step_s / (plan.workload.tokens_per_step or 1), candidate))
    if not options:
        assert first is not None, "one rank has a layout"
        raise first
    options.sort(key=lambda one: one[0])
    return options[0][1], _note(options)


def layouts(kind: str, ranks: int) -> Iterator[_Parts]:
    """Yield layouts of the language part and a tower that use all ranks.

    The tower has ranks of its own, or shares those of the language part: all of them, or those of the first or the last
    pipeline stage. It is sharded with `dp_shard`, or replicated if the language part has pipeline stages and no data
    parallelism: one schedule then orders the microbatches of all ranks. With pipeline stages and data parallelism,
    ranks are never shared (HP104).

    Args:
        kind: Name of the tower: `vision` or `audio`.
        ranks: Number of ranks.
    """
    for own in range(ranks):
        size = ranks - own
        for pp in _divisors(size):
            for tp in _divisors(size // pp):
                dp = size // (pp * tp)
                joint = pp > 1 and dp == 1
                language = {"pp": pp, "tp_x": tp, "dp_shard": dp}
                if own:
                    axis = "dp_replicate" if joint else "dp_shard"
                    yield {LANGUAGE: language, kind: {axis: own}}
                elif joint or pp == 1:
                    stages = [size, tp, tp] if joint else [size]  # ranks of the tower
                    for position, count in enumerate(stages):
                        start = size - tp if position == 2 else 0
                        axis = "dp_replicate" if joint else "dp_shard"
                        shared = {axis: count, "ranks": [*range(start, start + count)]}
                        yield {LANGUAGE: {**language, "ranks": [*range(size)]}, kind: shared}


def _no_time(loaded: LoadedRecipe, parts: _Parts) -> UnsupportedSharding:
    """Return the error for a tower without a predicted time, with a layout to paste."""
    hint = json.dumps(parts).replace('"', "")
    return UnsupportedSharding(
        "the time of the encoder cannot be predicted",
        where=loaded.where("parallel.submodels"),
        got="an encoder that does not run on meta tensors",
        hint=f"'parallel.submodels={hint}'",
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _note(options: list[tuple[float, LoadedRecipe]]) -> str:
    """Return the result of the search: number of layouts, the chosen one and the next."""
    words = [f"sub-models: {_text(options[0][1].recipe)} is the fastest of {len(options)} layouts"]
    if len(options) > 1:
        later = f"{options[1][0] / options[0][0] - 1:.1%}"
        words.append(f"{_text(options[1][1].recipe)} takes {later} longer")
    return "; ".join(words)


def _text(recipe: Recipe) -> str:
    """Return the layout of a recipe: `language pp=2 on ranks 0-1, vision dp_replicate=1 on rank 2`."""
    assert recipe.parallel.submodels is not None
    parts = {LANGUAGE: recipe.parallel.submodels.language, **recipe.parallel.submodels.towers}
    texts = []
    for name, ranks in recipe.parallel.submodels.members.items():
        degrees = parts[name].model_dump(exclude={"ranks"})
        axes = "".join(f" {axis}={degree}" for axis, degree in degrees.items() if degree > 1)
        where = f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        texts.append(f"{name}{axes} on {where}")
    return ", ".join(texts)
