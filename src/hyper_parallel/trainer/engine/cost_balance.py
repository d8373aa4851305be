"""Places over which the records of a step are balanced by cost: the ranks that compute images and audio.

All records have the same number of tokens, padding included, so the language model costs the same on every rank. The
encoder's cost differs: it computes on every data-parallel rank, or on the ranks of `parallel.submodels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hyper_parallel.backends.torch.submodels.exchange import Border
from hyper_parallel.config import Recipe
from hyper_parallel.ir import Plan
from hyper_parallel.runtime import submodel_lanes
from hyper_parallel.trainer.data import Balance, Batches, Grid
from hyper_parallel.trainer.engine.recipe_model import joint_schedule, submodel_layouts

_NOTED: Final = 16
"""Steps of which a plan tells the imbalance; their costs are read in milliseconds."""

Owners = tuple[tuple[int, ...], ...]


def cost_grid(
    plan: Plan, batches: Batches, owners: Callable[[int], tuple[Owners, bool]] | None
) -> Grid:
    """Return the places of the records of a step.

    Args:
        plan: Plan of the run; with sub-models, that of the language part.
        batches: Training sequences.
        owners: With sub-models, function from the microbatches of a data-parallel rank to those of each tower rank, and
            whether the tower computes in rounds; None: every data-parallel rank computes its own images and audio.
    """
    strategy, rows = plan.strategy, plan.workload.microbatch or 1
    count = batches.sequences_per_step // (strategy.dp * rows)
    if owners is not None:
        numbers, in_turns = owners(count)
        return Grid(numbers, rows, in_turns)
    # Collectives of sharded weights, and of experts, let every microbatch wait for the largest one.
    in_turns = strategy.dp_shard > 1 or strategy.ep > 1
    return Grid.of_data_ranks(strategy.dp, count, rows, in_turns)


def _planned_owners(recipe: Recipe, plan: Plan) -> Callable[[int], tuple[Owners, bool]] | None:
    """Return `owners` of `cost_grid` before ranks start."""
    if recipe.parallel.submodels is None:
        return None
    layouts, members = submodel_layouts(recipe, plan), recipe.parallel.submodels.members
    lanes, joint = submodel_lanes(layouts, members)
    (name,) = recipe.parallel.submodels.towers
    tower, readers = members[name], ((0,),) * plan.strategy.dp

    def owners(count: int) -> tuple[Owners, bool]:
        if joint and (schedule := joint_schedule(plan)) is not None:
            own = lanes.owners(schedule)
            numbers = (tuple(i for i, k in enumerate(own) if k == t) for t in range(len(tower)))
            return tuple(numbers), False
        border = Border(tower, readers)
        return border.owners(count), not joint

    return owners


def balance_note(recipe: Recipe, plan: Plan, batches: Batches) -> str:
    """Return the imbalance of the first steps before and after they are balanced, for the notes of a plan."""
    grid = cost_grid(plan, batches, _planned_owners(recipe, plan))
    if len(grid.owners) == 1:
        return (
            "data.balance: one rank computes all images and audio, so their order does not change"
        )
    steps = range(min(_NOTED, recipe.training.steps))
    found = [batches.balance(step, grid) for step in steps]
    before, after = mean_imbalance(found)
    return (
        f"data.balance: the slowest of {len(grid.owners)} ranks computes {after:.2f} x the mean of images and audio, "
        f"{before:.2f} x in the order of the data (mean of {len(found)} steps)"
    )


def mean_imbalance(steps: list[Balance]) -> tuple[float, float]:
    """Return the mean imbalance in the order of the data and balanced, weighted by the tokens of each step."""
    total = sum(step.media_tokens for step in steps)
    if not total:
        return 1.0, 1.0
    before = sum(step.in_order * step.media_tokens for step in steps) / total
    return before, sum(step.balanced * step.media_tokens for step in steps) / total
