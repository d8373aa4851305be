"""Checks of preference stages against the other sections of a recipe."""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.config._preference_sections import PREFERENCE_STAGES, Grpo
from hyper_parallel.config._recipe import Recipe

_Conflict = Callable[..., None]


def check_preference_stages(recipe: Recipe, conflict: _Conflict) -> None:
    """Check the requirements of preference stages on the other sections."""
    _check_sections(recipe, conflict)
    _check_roles(recipe, conflict)
    _check_rollouts(recipe, conflict)
    _check_updates(recipe, conflict)
    _check_reward_weights(recipe, conflict)


def _check_sections(recipe: Recipe, conflict: _Conflict) -> None:
    """Check data, packing, offload and the sample prompt."""
    data, stage = recipe.data, recipe.stage
    if data.source == "python-stdlib":
        conflict(
            "data.source",
            f"`stage: {stage}` needs {PREFERENCE_STAGES[stage]}, but the standard library's source text has none",
            f"stage={stage}, data.source=python-stdlib",
            "set `data.source=records.jsonl`, or `stage=pt`",
            f"a file or directory with {PREFERENCE_STAGES[stage]}",
        )
    for key, value, required, hint in (
        ("data.packing", data.packing, False, "data.packing=false"),
        ("data.streaming", data.streaming, False, "data.streaming=false"),
        ("data.max_bytes", data.max_bytes, None, "data.max_bytes=null"),
        ("offload", recipe.offload.on, False, "offload.budget=null offload.max_slowdown=null"),
    ):
        if value != required:
            is_packing = key == "data.packing"
            conflict(
                key,
                f"`stage: {stage}` has one conversation in a sequence and cannot pack several"
                if is_packing
                else f"`stage: {stage}` does not support `{key}` yet",
                f"{key}={str(value).lower()}",
                f"set `{hint}`",
            )
    for key, setting, off in (
        ("sample_prompt", recipe.sample_prompt, None),
        ("training.check_ranks_every", recipe.training.check_ranks_every, 0),
    ):
        if stage == "rm" and setting != off:
            conflict(
                key,
                "a reward model scores texts and does not predict tokens",
                f"stage=rm, {key}={setting}",
                f"set `{key}={'null' if off is None else off}`",
            )


def _check_roles(recipe: Recipe, conflict: _Conflict) -> None:
    """Check the division of ranks between training and sampling."""
    p, grpo, stage = recipe.parallel, recipe.grpo, recipe.stage
    for key in ("rollout_ranks", "rollout_tp"):
        if stage == "grpo" and getattr(grpo, key) == "auto" and not p.auto:
            conflict(
                f"grpo.{key}",
                "the planner divides ranks between training and sampling only with `parallel: auto`",
                f"{key}=auto, parallel.auto=false",
                f"set `parallel=auto`, or `grpo.{key}=1`",
            )
    if stage == "grpo" and (p.pp > 1 or p.cp > 1):
        conflict(
            "parallel",
            "`stage: grpo` samples with the training layout, which cannot use pipeline or context parallelism yet",
            f"pp={p.pp}, cp={p.cp}",
            "set `parallel.pp=1 parallel.cp=1`",
            "dp_replicate, dp_shard, tp, ep",
        )
    if grpo.max_staleness and not grpo.rollout_ranks:
        conflict(
            "grpo.max_staleness",
            "staleness needs extra sampling ranks; ranks that train and sample in turn always have the newest weights",
            f"max_staleness={grpo.max_staleness}, rollout_ranks=0",
            "set `grpo.rollout_ranks=1`, or `grpo.max_staleness=0`",
        )
    if grpo.reference_role == "sampler" and not (grpo.beta and grpo.rollout_ranks):
        conflict(
            "grpo.reference_role",
            "a reference on the sampling ranks needs a reference (`beta` > 0) and extra sampling ranks",
            f"reference_role=sampler, beta={grpo.beta:g}, rollout_ranks={grpo.rollout_ranks}",
            "set `grpo.reference_role=learner`, or `grpo.rollout_ranks=1 grpo.beta=0.04`",
        )


def _check_rollouts(recipe: Recipe, conflict: _Conflict) -> None:
    """Check partial rollouts, exact log-probabilities and environments."""
    grpo = recipe.grpo
    if grpo.partial_rollout and (not grpo.max_staleness or recipe.training.deterministic):
        conflict(
            "grpo.partial_rollout",
            "partial rollouts need staleness, and the time at which newer weights arrive is not deterministic",
            f"max_staleness={grpo.max_staleness}, deterministic={str(recipe.training.deterministic).lower()}",
            "set `grpo.max_staleness=1 training.deterministic=false`, or `grpo.partial_rollout=false`",
        )
    if grpo.partial_rollout and grpo.rollout_dp_shard > 1:
        conflict(
            "grpo.partial_rollout",
            "sampling ranks that shard parameters (FSDP) can load newer weights only between rollouts",
            f"partial_rollout=true, rollout_dp_shard={grpo.rollout_dp_shard}",
            "set `grpo.rollout_dp_shard=1 grpo.rollout_ep=1`, or `grpo.partial_rollout=false`",
        )
    for name in ("environment", "partial_rollout"):
        if grpo.exact_logprobs and (value := getattr(grpo, name)):
            conflict(
                "grpo.exact_logprobs",
                f"with `{name}` completions are not sampled in the batches that they are trained in",
                f"exact_logprobs=true, {name}={str(value).lower()}",
                "set `grpo.exact_logprobs=false`",
            )
    if "environment" in grpo.reward_funcs and not grpo.environment:
        conflict(
            "grpo.reward_funcs",
            "the reward `environment` needs an environment",
            "reward_funcs=[environment], environment=null",
            "set `grpo.environment=my_module.MyEnvironment`",
        )


def _check_updates(recipe: Recipe, conflict: _Conflict) -> None:
    """Check importance sampling, clipping and checkpoints against the optimizer steps per rollout."""
    grpo = recipe.grpo
    if grpo.min_effective_samples is not None and not grpo.max_staleness:
        conflict(
            "grpo.min_effective_samples",
            "without staleness all samples are on-policy, so this threshold has no effect",
            f"min_effective_samples={grpo.min_effective_samples:g}, max_staleness=0",
            "set `grpo.min_effective_samples=null`, or `grpo.rollout_ranks=1 grpo.max_staleness=1`",
        )
    for name in ("epsilon", "epsilon_high"):
        if getattr(grpo, name) != Grpo.model_fields[name].default and grpo.num_iterations == 1:
            conflict(
                f"grpo.{name}",
                "clipping has no effect on a single optimizer step per rollout, because all probability ratios are 1",
                f"{name}={getattr(grpo, name):g}, num_iterations=1",
                f"set `grpo.num_iterations=2`, or leave `grpo.{name}` out",
            )
    for name in ("every", "snapshot_every"):
        if (every := getattr(recipe.checkpoint, name)) and every % grpo.num_iterations:
            conflict(
                f"checkpoint.{name}",
                "a resumed run starts with a new rollout, so checkpoints must be saved between rollouts",
                f"{name}={every}, num_iterations={grpo.num_iterations}",
                f"set `checkpoint.{name}={-(-every // grpo.num_iterations) * grpo.num_iterations}`",
                "a multiple of grpo.num_iterations",
            )


def _check_reward_weights(recipe: Recipe, conflict: _Conflict) -> None:
    """Check that every reward has one weight."""
    grpo = recipe.grpo
    weights = grpo.reward_weights
    if weights is not None and len(weights) != len(grpo.reward_funcs):
        conflict(
            "grpo.reward_weights",
            "every reward needs exactly one weight",
            f"{len(weights)} weights, {len(grpo.reward_funcs)} functions",
            f"set `grpo.reward_weights={[1.0] * len(grpo.reward_funcs)}`",
        )
