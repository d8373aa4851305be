"""Ranks and microbatches over which images and audio of a step are balanced.

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

_NUM_NOTED_STEPS: Final = 16
"""Number of steps over which the note of a plan averages the imbalance; reading their costs takes milliseconds."""

Owners = tuple[tuple[int, ...], ...]


def cost_grid(
    plan: Plan, batches: Batches, owners: Callable[[int], tuple[Owners, bool]] | None
) -> Grid:
    """Return the positions of the records of a step.

    Args:
        plan: Plan of the run; with sub-models, that of the language part.
        batches: Training sequences.
        owners: With sub-models, a function of the number of microbatches per data-parallel rank. It returns
            `Grid.owners` of the tower ranks and `Grid.in_turns`. None: each data-parallel rank computes its own images
            and audio.
    """
    strategy, rows = plan.strategy, plan.workload.microbatch or 1
    count = batches.sequences_per_step // (strategy.dp * rows)
    if owners is not None:
        numbers, in_turns = owners(count)
        return Grid(numbers, rows, in_turns)
    # Collectives of sharded weights and of experts synchronize the ranks in every microbatch.
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
    steps = range(min(_NUM_NOTED_STEPS, recipe.training.steps))
    balances = [batches.balance(step, grid) for step in steps]
    before, after = mean_imbalance(balances)
    return (
        f"data.balance: the slowest of {len(grid.owners)} ranks computes {after:.2f} x the mean of images and audio, "
        f"{before:.2f} x in the order of the data (mean of {len(balances)} steps)"
    )


def mean_imbalance(steps: list[Balance]) -> tuple[float, float]:
    """Return the mean imbalance in the order of the data and balanced, weighted by the tokens of each step."""
    total = sum(step.media_tokens for step in steps)
    if not total:
        return 1.0, 1.0
    before = sum(step.in_order * step.media_tokens for step in steps) / total
    return before, sum(step.balanced * step.media_tokens for step in steps) / total
