"""Checks of preference stages: whole pairs of sequences or groups of completions on each rank, and usable rewards."""

from __future__ import annotations

import math

from hyper_parallel.config import PAIRED_STAGES, Grpo, LoadedRecipe, Recipe
from hyper_parallel.errors import Contradiction
from hyper_parallel.ir import Plan
from hyper_parallel.trainer.data import PackedData, Stream
from hyper_parallel.trainer.user_code import load_function


def check_rows(loaded: LoadedRecipe, plan: Plan) -> None:
    """Check that every data-parallel rank gets whole pairs or groups in a step, and that rewards can be imported.

    Raises:
        Contradiction: HP104 for a number of sequences, of sequences in a microbatch, or of sampling ranks that is not
            divisible as required.
        NotImportable: HP109 for a reward or environment that cannot be imported.
    """
    from hyper_parallel.trainer.stages.rewards import reward_functions

    recipe, work, dp = loaded.recipe, plan.workload, plan.strategy.dp
    rows, size, what = (work.tokens_per_step or 0) // work.seq_len, 2, "pairs"
    if recipe.stage == "grpo":
        size, what = recipe.grpo.num_generations, "groups of completions"
        _check_rollout_ranks(loaded, rows, work.microbatch or 1)
        reward_functions(recipe.grpo.reward_funcs, loaded.where("grpo.reward_funcs"))
        if recipe.grpo.environment:
            load_function(recipe.grpo.environment, loaded.where("grpo.environment"))
    if rows % (size * dp):
        raise Contradiction(
            f"the {rows // dp} sequences per step of a data-parallel rank do not form whole {what}",
            where=loaded.where("training.tokens_per_step"),
            got=f"{rows} sequences per step, {dp} data-parallel ranks, {what} of {size} sequences",
            allowed=f"a multiple of {size * dp} sequences",
            changes=_whole_step(loaded, plan, rows, size),
        )
    if recipe.stage in PAIRED_STAGES and (work.microbatch or 1) % 2:
        raise Contradiction(
            "the two sequences of a pair must be in the same microbatch",
            where=loaded.where("training.microbatch"),
            got=f"microbatch={work.microbatch}",
            allowed="an even number",
            changes=with_microbatch(loaded.recipe, 2, rows),
        )


def _whole_step(loaded: LoadedRecipe, plan: Plan, rows: int, size: int) -> dict[str, object]:
    """Return overrides with the nearest number of sequences in a step that forms whole groups of `size` on each rank.

    The number also suits the microbatch and, in GRPO, the sampling ranks.
    """
    recipe, work = loaded.recipe, plan.workload
    microbatch, changes = recipe.training.microbatch or 1, dict[str, object]()
    if recipe.stage in PAIRED_STAGES and microbatch % 2:
        microbatch = 2
        changes["training.microbatch"] = microbatch
    unit = math.lcm(size, microbatch) * plan.strategy.dp
    if recipe.stage == "grpo" and recipe.grpo.sampling_ranks:
        unit = math.lcm(unit, recipe.grpo.shares * microbatch)
    changes["training.tokens_per_step"] = max(1, round(rows / unit)) * unit * work.seq_len
    if recipe.training.accumulation_steps is not None:
        changes["training.accumulation_steps"] = "null"
    return changes


def with_microbatch(recipe: Recipe, microbatch: int, rows: int) -> dict[str, object]:
    """Return overrides that change the microbatch but not the `rows` sequences of a step."""
    changes: dict[str, object] = {"training.microbatch": microbatch}
    if recipe.training.tokens_per_step is None:
        changes["training.tokens_per_step"] = rows * recipe.data.seq_len
    if recipe.training.accumulation_steps is not None:
        changes["training.accumulation_steps"] = "null"
    return changes


def check_rewards(loaded: LoadedRecipe, packed: PackedData) -> None:
    """Check the columns that reward functions need, and the tokenizers of reward models. Streams are not checked.

    Raises:
        Contradiction: HP104 naming the parameter of a reward function that is not a data column.
        HyperParallelError: Errors of `ModelReward.check`.
    """
    from hyper_parallel.trainer.stages.model_reward import ModelReward
    from hyper_parallel.trainer.stages.rewards import check_columns, reward_functions

    where, names = loaded.where("grpo.reward_funcs"), loaded.recipe.grpo.reward_funcs
    splits = [s for s in (packed.train, packed.holdout) if s is not None and not isinstance(s, Stream)]
    for name, reward in zip(names, reward_functions(names, where), strict=True):
        if isinstance(reward, ModelReward):
            reward.check(packed.tokenizer_dir, where)
        for split in splits:
            if len(split):
                check_columns(name, reward, split.columns, where)


def _check_rollout_ranks(loaded: LoadedRecipe, rows: int, microbatch: int) -> None:
    grpo = loaded.recipe.grpo
    ranks, shares = grpo.sampling_ranks, grpo.shares
    if ranks % grpo.copy_ranks:
        raise Contradiction(
            "the sampling ranks do not form whole replicas of the model",
            where=loaded.where("grpo.rollout_ranks"),
            got=f"rollout_ranks={ranks}, rollout_tp={grpo.copy_tp}, rollout_dp_shard={grpo.rollout_dp_shard}",
            allowed=f"a multiple of {grpo.copy_ranks}",
            hint=_fitting_ranks(grpo, rows, microbatch),
        )
    if ranks and rows % shares:
        raise Contradiction(
            "the sequences of a step cannot be divided evenly among the sampling ranks",
            where=loaded.where("grpo.rollout_ranks"),
            got=f"{shares} data-parallel sampling ranks, {rows} sequences in a step",
            hint=_fitting_ranks(grpo, rows, microbatch),
        )
    if ranks and grpo.exact_logprobs and rows // shares % microbatch:
        raise Contradiction(
            "with `grpo.exact_logprobs`, the sequences of each data-parallel sampling rank must form whole "
            "microbatches of training",
            where=loaded.where("grpo.exact_logprobs"),
            got=f"{rows // shares} sequences per data-parallel sampling rank, microbatch={microbatch}",
            changes=with_microbatch(loaded.recipe, math.gcd(rows // shares, microbatch), rows),
        )


def _fitting_ranks(grpo: Grpo, rows: int, microbatch: int) -> str:
    """Return overrides with the largest supported number of sampling ranks up to the requested one, or one replica."""
    for replicas in range(max(1, grpo.sampling_ranks // grpo.copy_ranks), 0, -1):
        share, rest = divmod(rows, replicas * grpo.rollout_dp_shard)
        if not rest and not (grpo.exact_logprobs and share % microbatch):
            return f"grpo.rollout_ranks={replicas * grpo.copy_ranks}"
    return f"grpo.rollout_ranks={grpo.copy_tp} grpo.rollout_dp_shard=1 grpo.rollout_ep=1"
