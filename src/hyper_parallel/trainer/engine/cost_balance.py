"""Ranks and microbatches over which images and audio of a step are balanced.

All records have the same number of tokens, padding included, so the language model costs the same on every rank. The
encoder's cost differs: it computes on every data-parallel rank, or on the ranks of `parallel.submodels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hyper_parallel.backends.torch.submodels.exchange import Border
from hyper_parallel.backends.torch.submodels.parts import TowerNotTraced, tower_flops
from hyper_parallel.config import Recipe
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan, Schedule, StageCost
from hyper_parallel.mpmd import schedule_tasks
from hyper_parallel.planner.submodels import submodel_lanes
from hyper_parallel.sim import simulate
from hyper_parallel.trainer.data import (
    Balance,
    Batches,
    Grid,
    JoinedSequences,
    PackedSequences,
    media_inputs,
    media_rows,
)
from hyper_parallel.trainer.engine.recipe_model import joint_schedule, submodel_layouts

Int64 = NDArray[np.int64]
_NUM_NOTED_STEPS: Final = 16
"""Number of steps over which the note of a plan averages the imbalance; reading their costs takes milliseconds."""

_MEASURED: Final = 6
"""Rows of which the encoder's operations are counted, from the fewest to the most tokens: seconds for a large one."""
_PARTS: Final = 64
"""Steps of a share, coarse enough that no rounding of a machine changes it."""
_MOST_SIMULATED: Final = 512
"""Most microbatches of a step, over all stages, whose order is chosen by simulation: a tenth of a second."""


def media_costs(model: nn.Module, sequences: PackedSequences | JoinedSequences) -> tuple[int, int]:
    """Return the cost of an image or recording, and of each of its tokens, as integers in one unit.

    Encoders of fixed windows compute as much for a short recording as for a long one, and most others as much for each
    token. The costs are fitted to the operations of the encoder's forward on meta tensors. If these depend on values,
    the costs are fitted to the elements of its inputs, which are padded to windows or tiles.

    Args:
        model: Model of the recipe on the meta device; not changed.
        sequences: Training sequences with media.

    Returns:
        Costs; (0, 1) for a model without an encoder of its own, or with several.
    """
    rows = media_rows(sequences)
    if not len(rows):
        return 0, 1
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, _MEASURED).round().astype(int))]
    inputs = [media_inputs(sequences, row[None]) for row in rows]
    try:
        work = tower_flops(model, inputs)
    except UnsupportedSharding:
        return 0, 1
    except TowerNotTraced:
        kinds = [[a for a in one.values() if a.dtype.kind == "f"] for one in inputs]
        work = [float(sum(array.size for array in arrays)) for arrays in kinds]
    return fitted_costs(sequences.media_costs(rows), work)


def fitted_costs(counts: Int64, work: Sequence[float]) -> tuple[int, int]:
    """Return the costs that explain the work on rows best, given items and tokens of each, [N, 2]."""
    from scipy.optimize import nnls

    items, tokens = counts.sum(0).tolist()
    fit = nnls(counts.astype(float), np.asarray(work))[0] * (items, tokens)
    if not fit.any():
        return 0, 1
    share = round(_PARTS * float(fit[0] / fit.sum()))
    costs = share * tokens, (_PARTS - share) * items
    unit = gcd(*costs)
    return costs[0] // unit, costs[1] // unit


@dataclass(frozen=True, slots=True)
class TowerPlaces:
    """Microbatches of the ranks of a tower, for a number of microbatches of each data-parallel rank.

    Attributes:
        owners: Returns the numbers of the microbatches of each tower rank, see `Submodels.owners`.
        schedule: Returns the joint schedule of tower and language part; None: the tower computes in rounds.
    """

    owners: Callable[[int], tuple[tuple[int, ...], ...]]
    schedule: Callable[[int], Schedule] | None = None


def cost_grid(plan: Plan, batches: Batches, tower: TowerPlaces | None) -> Grid:
    """Return the places of the records of a step.

    Args:
        plan: Plan of the run; with sub-models, that of the language part.
        batches: Training sequences.
        tower: Places of a tower on ranks of its own; None: every data-parallel rank computes its own images and audio.
    """
    strategy, rows = plan.strategy, plan.workload.microbatch or 1
    count = batches.sequences_per_step // (strategy.dp * rows)
    if tower is None:
        # Collectives of sharded weights, and of experts, let every microbatch wait for the largest one.
        in_turns = strategy.dp_shard > 1 or strategy.ep > 1
        return Grid.of_data_ranks(strategy.dp, count, rows, in_turns)
    if tower.schedule is None:
        return Grid(tower.owners(count), rows, in_turns=True)
    # The schedule may leave the tower to some of its ranks, when the others have more work of the language part.
    owners = tuple(filter(None, tower.owners(count)))
    seconds = _step_seconds(plan, tower.schedule(count))
    return Grid(owners, rows, in_turns=False, seconds=seconds)


def _step_seconds(plan: Plan, schedule: Schedule) -> Callable[[Int64], float] | None:
    """Return the simulated seconds of a joint schedule as a function of the tower's tokens of each microbatch."""
    too_large = schedule.stages * schedule.microbatches > _MOST_SIMULATED
    if plan.submodels is None or too_large:
        return None
    tower = plan.submodels.parts[1]
    mean_s = tower.forward_s * len(tower.ranks) / schedule.microbatches
    trained = tower.backward_s > 0
    language = [
        replace(s.cost, send_backward_s=s.cost.send_backward_s * bool(k))
        for k, s in enumerate(plan.stages)
    ]

    def seconds(tokens: Int64) -> float:
        forwards = (mean_s * tokens / tokens.mean()).tolist()
        row = [StageCost(s, 0.0, 2 * s * trained) for s in forwards]
        return simulate(schedule_tasks(schedule, [row, *language])).end_s

    return seconds


def _planned_places(recipe: Recipe, plan: Plan) -> TowerPlaces | None:
    """Return the places of the tower of a recipe before ranks start; None without a tower of its own."""
    if recipe.parallel.submodels is None:
        return None
    layouts, members = submodel_layouts(recipe, plan), recipe.parallel.submodels.members
    lanes, _ = submodel_lanes(layouts, members)
    (name,) = recipe.parallel.submodels.towers
    schedule = joint_schedule(plan)
    if schedule is None:
        return TowerPlaces(Border(members[name], ((0,),) * plan.strategy.dp).owners)
    owners = lanes.owners(schedule)
    numbers = (tuple(i for i, k in enumerate(owners) if k == t) for t in range(len(members[name])))
    own = tuple(numbers)
    return TowerPlaces(lambda _: own, lambda _: schedule)


def balance_note(recipe: Recipe, plan: Plan, batches: Batches) -> str:
    """Return the imbalance of the first steps before and after they are balanced, for the notes of a plan."""
    grid = cost_grid(plan, batches, _planned_places(recipe, plan))
    count = len(grid.owners)
    if count == 1 and grid.seconds is None:
        return (
            "data.balance: one rank computes all images and audio, so their order does not change"
        )
    steps = [
        batches.balance(step, grid) for step in range(min(_NUM_NOTED_STEPS, recipe.training.steps))
    ]
    before, after = mean_imbalance(steps)
    note = (
        f"data.balance: the slowest of {count} ranks computes {after:.2f} x the mean work on images and audio, "
        f"{before:.2f} x in the order of the data (mean of {len(steps)} steps)"
    )
    saved = sum((s.predicted_in_order_s or 0.0) - (s.predicted_s or 0.0) for s in steps)
    total = sum(s.predicted_in_order_s or 0.0 for s in steps)
    return f"{note}; predicted steps are {saved / total:.1%} shorter" if total else note


def mean_imbalance(steps: list[Balance]) -> tuple[float, float]:
    """Return the mean imbalance in the order of the data and balanced, weighted by the tokens of each step."""
    total = sum(step.media_tokens for step in steps)
    if not total:
        return 1.0, 1.0
    before = sum(step.in_order * step.media_tokens for step in steps) / total
    return before, sum(step.balanced * step.media_tokens for step in steps) / total
