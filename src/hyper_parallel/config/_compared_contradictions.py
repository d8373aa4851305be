"""Checks of stages that compare answers, across the sections of a recipe."""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.config._comparisons import COMPARED, Grpo
from hyper_parallel.config._whole_recipe import Recipe


def of_compared(recipe: Recipe, clash: Callable[..., None]) -> None:
    """What stages that compare answers need of the other sections."""
    data, p, grpo, stage = recipe.data, recipe.parallel, recipe.grpo, recipe.stage
    if data.source == "python-stdlib":
        clash(
            "data.source",
            f"`stage: {stage}` needs {COMPARED[stage]}, and the source text of the standard library has none",
            f"stage={stage}, data.source=python-stdlib",
            "set `data.source=records.jsonl`, or `stage=pt`",
            f"a file or directory with {COMPARED[stage]}",
        )
    for key, value, wanted, hint in (
        ("data.packing", data.packing, False, "data.packing=false"),
        ("data.streaming", data.streaming, False, "data.streaming=false"),
        ("data.max_bytes", data.max_bytes, None, "data.max_bytes=null"),
        ("offload", recipe.offload.on, False, "offload.budget=null offload.max_slowdown=null"),
    ):
        if value != wanted:
            packed = key == "data.packing"
            clash(
                key,
                f"`stage: {stage}` has one conversation in a sequence"
                if packed
                else f"`stage: {stage}` does not work with `{key}` yet",
                f"{key}={str(value).lower()}",
                f"set `{hint}`",
            )
    for key, given, off in (
        ("sample_prompt", recipe.sample_prompt, None),
        ("training.check_ranks_every", recipe.training.check_ranks_every, 0),
    ):
        if stage == "rm" and given != off:
            clash(
                key,
                "a reward model scores texts and predicts no next token",
                f"stage=rm, {key}={given}",
                f"set `{key}={'null' if off is None else off}`",
            )
    for key in ("rollout_ranks", "rollout_tp"):
        if stage == "grpo" and getattr(grpo, key) == "auto" and not p.auto:
            clash(
                f"grpo.{key}",
                "where degrees are given, nothing is left to split among the roles",
                f"{key}=auto, parallel.auto=false",
                f"set `parallel=auto`, or `grpo.{key}=1`",
            )
    if stage == "grpo" and (p.pp > 1 or p.cp > 1):
        clash(
            "parallel",
            "`stage: grpo` samples with the layout that it trains with: neither pipeline stages nor cut sequences yet",
            f"pp={p.pp}, cp={p.cp}",
            "set `parallel.pp=1 parallel.cp=1`",
            "dp_replicate, dp_shard, tp, ep",
        )
    if grpo.max_staleness and not grpo.rollout_ranks:
        clash(
            "grpo.max_staleness",
            "ranks that train and sample in turn have the newest weights",
            f"max_staleness={grpo.max_staleness}, rollout_ranks=0",
            "set `grpo.rollout_ranks=1`, or `grpo.max_staleness=0`",
        )
    if grpo.reference_role == "sampler" and not (grpo.beta and grpo.rollout_ranks):
        clash(
            "grpo.reference_role",
            "ranks that only sample make the pass of the reference where there are such ranks, and a reference",
            f"reference_role=sampler, beta={grpo.beta:g}, rollout_ranks={grpo.rollout_ranks}",
            "set `grpo.reference_role=learner`, or `grpo.rollout_ranks=1 grpo.beta=0.04`",
        )
    if grpo.partial_rollout and (not grpo.max_staleness or recipe.training.deterministic):
        clash(
            "grpo.partial_rollout",
            "completions go on under newer weights where rollouts run ahead, and when these come is decided by time",
            f"max_staleness={grpo.max_staleness}, deterministic={str(recipe.training.deterministic).lower()}",
            "set `grpo.max_staleness=1 training.deterministic=false`, or `grpo.partial_rollout=false`",
        )
    if grpo.partial_rollout and grpo.rollout_dp_shard > 1:
        clash(
            "grpo.partial_rollout",
            "ranks that gather parameters together take newer weights between rollouts only",
            f"partial_rollout=true, rollout_dp_shard={grpo.rollout_dp_shard}",
            "set `grpo.rollout_dp_shard=1 grpo.rollout_ep=1`, or `grpo.partial_rollout=false`",
        )
    for name in ("environment", "partial_rollout"):
        if grpo.exact_logprobs and (value := getattr(grpo, name)):
            clash(
                "grpo.exact_logprobs",
                "completions that go on in between are not sampled in the order in which they are learned from",
                f"exact_logprobs=true, {name}={str(value).lower()}",
                "set `grpo.exact_logprobs=false`",
            )
    if "environment" in grpo.reward_funcs and not grpo.environment:
        clash(
            "grpo.reward_funcs",
            "the reward `environment` is what an environment gives",
            "reward_funcs=[environment], environment=null",
            "set `grpo.environment=my_module.MyEnvironment`",
        )
    if grpo.min_effective_samples is not None and not grpo.max_staleness:
        clash(
            "grpo.min_effective_samples",
            "completions that the newest weights sample are all effective",
            f"min_effective_samples={grpo.min_effective_samples:g}, max_staleness=0",
            "set `grpo.min_effective_samples=null`, or `grpo.rollout_ranks=1 grpo.max_staleness=1`",
        )
    for name in ("epsilon", "epsilon_high"):
        if getattr(grpo, name) != Grpo.model_fields[name].default and grpo.num_iterations == 1:
            clash(
                f"grpo.{name}",
                "what is learned from once has the probability that it had",
                f"{name}={getattr(grpo, name):g}, num_iterations=1",
                f"set `grpo.num_iterations=2`, or leave `grpo.{name}` out",
            )
    for name in ("every", "snapshot_every"):
        if (every := getattr(recipe.checkpoint, name)) and every % grpo.num_iterations:
            clash(
                f"checkpoint.{name}",
                "a run goes on from a checkpoint with new completions",
                f"{name}={every}, num_iterations={grpo.num_iterations}",
                f"set `checkpoint.{name}={-(-every // grpo.num_iterations) * grpo.num_iterations}`",
                "a multiple of grpo.num_iterations",
            )
    weights = grpo.reward_weights
    if weights is not None and len(weights) != len(grpo.reward_funcs):
        clash(
            "grpo.reward_weights",
            "there is one weight for every reward",
            f"{len(weights)} weights, {len(grpo.reward_funcs)} functions",
            f"set `grpo.reward_weights={[1.0] * len(grpo.reward_funcs)}`",
        )
