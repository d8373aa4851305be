"""Balancing of image and audio work over the ranks and microbatches of a training step.

All sequences are padded to the same length, so the language model does equal work on every rank. The work of the vision
or audio encoder differs between sequences. The encoder is called the tower when `parallel.submodels` sets its ranks. A
joint schedule may then order the actions of tower ranks and pipeline stages. Without `parallel.submodels`, every
data-parallel rank encodes the images and audio of its own sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hyper_parallel.backends.torch.submodels.exchange import Border
from hyper_parallel.backends.torch.submodels.parts import TowerNotTraced, divide, tower_flops
from hyper_parallel.config import Recipe
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan, Schedule, StageCost
from hyper_parallel.mpmd import schedule_tasks
from hyper_parallel.planner.submodels import joint_layout
from hyper_parallel.sim import simulate
from hyper_parallel.trainer.data import (
    Batches,
    Grid,
    JoinedSequences,
    PackedSequences,
    media_inputs,
    media_rows,
)
from hyper_parallel.trainer.engine.recipe_model import joint_schedule, submodel_layouts

logger = logging.getLogger(__name__)

Int64 = NDArray[np.int64]
_NUM_NOTED_STEPS: Final = 16
"""Number of steps over which the plan's note averages the imbalance; reading their data takes milliseconds."""

_MEASURED: Final = 6
"""Maximum number of rows whose encoder FLOPs are counted, from the fewest to the most tokens."""
_PARTS: Final = 64
"""The fitted share of item work is rounded to a multiple of 1/64, to hide rounding differences between machines."""
_MOST_SIMULATED: Final = 512
"""Maximum product of stages and microbatches for which schedules are simulated."""


def media_costs(model: nn.Module, sequences: PackedSequences | JoinedSequences) -> tuple[tuple[int, int], str | None]:
    """Return the weights of a linear estimate of encoder work: per media item and per media token.

    A media item is an image or an audio recording. Encoders with fixed windows do equal work for every item. For most
    other encoders work grows with the number of tokens. The weights are fitted to the FLOPs of the encoder's forward on
    meta tensors. If this forward needs real values, the weights are fitted to the number of elements of its padded
    inputs. If the model has several encoders, or none that can be separated, work is the number of media tokens.

    Returns:
        (weight per item, weight per token) as integers in an arbitrary unit, and a note for the plan. The note, which
        is also logged, tells why FLOPs were not counted; None if FLOPs were counted or no sequence has media.
    """
    rows = media_rows(sequences)
    if not len(rows):
        return (0, 1), None
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, _MEASURED).round().astype(int))]
    inputs = [media_inputs(sequences, row[None]) for row in rows]
    try:
        if len(divide(model).towers) > 1:
            return (0, 1), _warn_of_estimate("numbers of tokens", "the model has several encoders")
        (work,) = tower_flops(model, inputs).values()
    except UnsupportedSharding as error:
        return (0, 1), _warn_of_estimate("numbers of tokens", f"{error.what}; {error.got}")
    except TowerNotTraced as error:
        kinds = [[a for a in one.values() if a.dtype.kind == "f"] for one in inputs]
        work = [float(sum(array.size for array in arrays)) for arrays in kinds]
        cause = f"the encoder of {type(model).__name__} does not run on meta tensors ({error})"
        note = _warn_of_estimate("numbers of input elements", cause)
        return fitted_costs(sequences.media_costs(rows), work), note
    return fitted_costs(sequences.media_costs(rows), work), None


def _warn_of_estimate(basis: str, cause: str) -> str:
    note = f"data.balance: work on images and audio is estimated by {basis}, because {cause}"
    logger.warning("%s", note)
    return note


def fitted_costs(counts: Int64, work: Sequence[float]) -> tuple[int, int]:
    """Return coprime integers (a, b) such that a * items + b * tokens is about proportional to the encoder work.

    The fit is non-negative least squares over N sequences, with `counts` [N, 2] of media items and media tokens, and
    `work` [N] in any unit.
    """
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
class TowerMicrobatches:
    """Assignment of a step's microbatches to tower ranks.

    Attributes:
        owners: Function from the number of microbatches per data-parallel rank to the indices of the microbatches that
            each tower rank encodes; see `Submodels.owners`.
        schedule: Function from the same number to the joint schedule of tower and language model; None: the tower ranks
            run in synchronous rounds.
    """

    owners: Callable[[int], tuple[tuple[int, ...], ...]]
    schedule: Callable[[int], Schedule] | None = None


def cost_grid(plan: Plan, batches: Batches, tower: TowerMicrobatches | None) -> Grid:
    """Return the ranks and microbatches over which the media work of a step is balanced.

    With sub-models, `plan` is that of the language model. If `tower` is None, the encoder runs on every data-parallel
    rank.
    """
    strategy, rows = plan.strategy, plan.workload.microbatch or 1
    count = batches.sequences_per_step // (strategy.dp * rows)
    if tower is None:
        # FSDP and expert collectives synchronize the ranks in every microbatch.
        in_turns = strategy.dp_shard > 1 or strategy.ep > 1
        return Grid.of_data_ranks(strategy.dp, count, rows, in_turns)
    if tower.schedule is None:
        return Grid(tower.owners(count), rows, in_turns=True)
    # The joint schedule may assign no microbatch to tower ranks that also run pipeline stages.
    owners = tuple(filter(None, tower.owners(count)))
    seconds = _step_seconds(plan, tower.schedule(count))
    return Grid(owners, rows, in_turns=False, seconds=seconds)


def _step_seconds(plan: Plan, schedule: Schedule) -> Callable[[Int64], float] | None:
    """Return a function from the media tokens per microbatch, [dp * microbatches], to simulated seconds per step.

    Return None if the plan has no sub-models, or the joint schedule is too large to simulate.
    """
    too_large = schedule.stages * schedule.microbatches > _MOST_SIMULATED
    if plan.submodels is None or too_large:
        return None
    tower = plan.submodels.parts[1]
    shares = plan.strategy.dp
    mean_s = tower.forward_s * len(tower.ranks) / (shares * schedule.microbatches)
    trained = tower.backward_s > 0
    language = [replace(s.cost, send_backward_s=s.cost.send_backward_s * bool(k)) for k, s in enumerate(plan.stages)]

    def seconds(tokens: Int64) -> float:
        forwards = (mean_s * tokens / tokens.mean()).reshape(shares, -1).tolist()
        rows = ([StageCost(s, 0.0, 2 * s * trained) for s in share] for share in forwards)
        return max(simulate(schedule_tasks(schedule, [row, *language])).end_s for row in rows)

    return seconds


def _planned_tower(recipe: Recipe, plan: Plan) -> TowerMicrobatches | None:
    """Return the microbatches of tower ranks according to the plan; None without `parallel.submodels`."""
    if recipe.parallel.submodels is None:
        return None
    layouts, members = submodel_layouts(recipe, plan), recipe.parallel.submodels.members
    layout = joint_layout(layouts, members)
    (name,) = recipe.parallel.submodels.towers
    schedule, border = joint_schedule(plan), Border(members[name], (((0,),),) * plan.strategy.dp)
    if schedule is None or layout is None:
        return TowerMicrobatches(border.owners)
    sources = partial(layout.sources, schedule)
    own = border.owners(schedule.microbatches, lambda rank, _: sources(rank))
    return TowerMicrobatches(lambda _: own, lambda _: schedule)


def balance_note(recipe: Recipe, plan: Plan, batches: Batches) -> str:
    """Return a line for the printed plan: imbalance of media work over ranks, in data order and after balancing.

    Imbalance is the work of the slowest rank divided by the mean over ranks; 1 without media. It is averaged over the
    first `_NUM_NOTED_STEPS` steps, weighted by media tokens. If one rank computes all media, the line says so instead.
    """
    grid = cost_grid(plan, batches, _planned_tower(recipe, plan))
    count = len(grid.owners)
    if count == 1 and grid.seconds is None:
        return "data.balance: one rank computes all images and audio, so their order does not change"
    steps = [batches.balance(step, grid) for step in range(min(_NUM_NOTED_STEPS, recipe.training.steps))]
    media_tokens = [step.media_tokens for step in steps]
    before, after = 1.0, 1.0
    if any(media_tokens):
        before = np.average([step.in_order for step in steps], weights=media_tokens)
        after = np.average([step.balanced for step in steps], weights=media_tokens)
    note = (
        f"data.balance: the slowest of {count} ranks computes {after:.2f} x the mean work on images and audio, "
        f"{before:.2f} x in the order of the data (mean of {len(steps)} steps)"
    )
    saved = sum((s.predicted_in_order_s or 0.0) - (s.predicted_s or 0.0) for s in steps)
    total = sum(s.predicted_in_order_s or 0.0 for s in steps)
    return f"{note}; predicted steps are {saved / total:.1%} shorter" if total else note
