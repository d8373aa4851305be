"""Contradictions of preference stages with the other sections of a recipe."""

from __future__ import annotations

from typing import Any, Final

from hyper_parallel.config._preference_sections import PREFERENCE_STAGES, Grpo
from hyper_parallel.config._recipe import Recipe
from hyper_parallel.config._rules import Rule, Rules


def _unsupported_settings(recipe: Recipe) -> list[dict[str, Any]]:
    data = recipe.data
    rows = (
        ("data.streaming", data.streaming, False, "data.streaming=false"),
        ("data.max_bytes", data.max_bytes, None, "data.max_bytes=null"),
        ("offload", recipe.offload.on, False, "offload.budget=null offload.max_slowdown=null"),
    )
    return [
        {"key": key, "value": value, "hint": hint}
        for key, value, required, hint in rows
        if value != required
    ]


def _settings_of_tokens(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the settings that a reward model does not have, as it predicts no tokens."""
    rows = (
        ("sample_prompt", recipe.sample_prompt, None),
        ("training.check_ranks_every", recipe.training.check_ranks_every, 0),
    )
    return [
        {"key": key, "value": value, "off": off}
        for key, value, off in rows
        if recipe.stage == "rm" and value != off
    ]


def _planned_roles(recipe: Recipe) -> list[dict[str, str]]:
    if recipe.stage != "grpo" or recipe.parallel.auto:
        return []
    names = ("rollout_ranks", "rollout_tp")
    return [{"name": name} for name in names if getattr(recipe.grpo, name) == "auto"]


def _inexact_rollouts(recipe: Recipe) -> list[dict[str, str]]:
    grpo = recipe.grpo
    return [
        {"name": name, "value": str(value).lower()}
        for name in ("environment", "partial_rollout")
        if grpo.exact_logprobs and (value := getattr(grpo, name))
    ]


def _unused_clipping(recipe: Recipe) -> list[dict[str, Any]]:
    grpo = recipe.grpo
    return [
        {"name": name, "value": getattr(grpo, name)}
        for name in ("epsilon", "epsilon_high")
        if grpo.num_iterations == 1 and getattr(grpo, name) != Grpo.model_fields[name].default
    ]


def _saves_within_rollouts(recipe: Recipe) -> list[dict[str, Any]]:
    size = recipe.grpo.num_iterations
    return [
        {"name": name, "every": every, "next": -(-every // size) * size}
        for name in ("every", "snapshot_every")
        if (every := getattr(recipe.checkpoint, name)) and every % size
    ]


def _missing_weights(recipe: Recipe) -> dict[str, Any] | None:
    weights, count = recipe.grpo.reward_weights, len(recipe.grpo.reward_funcs)
    if weights is None or len(weights) == count:
        return None
    return {"weights": len(weights), "count": count, "equal": [1.0] * count}


PREFERENCE_RULES: Final[Rules] = (
    Rule("data.source",
         lambda r: r.data.source == "python-stdlib" and {"records": PREFERENCE_STAGES[r.stage]},
         "`stage: {stage}` needs {records}, but the standard library's source text has none",
         "stage={stage}, data.source=python-stdlib",
         "set `data.source=records.jsonl`, or `stage=pt`", "a file or directory with {records}"),
    Rule("data.packing", lambda r: r.data.packing,
         "`stage: {stage}` has one conversation in a sequence and cannot pack several",
         "data.packing=true", "set `data.packing=false`"),
    Rule("{key}", _unsupported_settings,
         "`stage: {stage}` does not support `{key}` yet", "{key}={value}", "set `{hint}`"),
    Rule("{key}", _settings_of_tokens,
         "a reward model scores texts and does not predict tokens",
         "stage=rm, {key}={value}", "set `{key}={off}`"),
    Rule("grpo.{name}", _planned_roles,
         "the planner divides ranks between training and sampling only with `parallel: auto`",
         "{name}=auto, parallel.auto=false", "set `parallel=auto`, or `grpo.{name}=1`"),
    Rule("parallel", lambda r: r.stage == "grpo" and (r.parallel.pp > 1 or r.parallel.cp > 1),
         "`stage: grpo` samples with the training layout, which cannot use pipeline or context parallelism yet",
         "pp={parallel.pp}, cp={parallel.cp}",
         "set `parallel.pp=1 parallel.cp=1`", "dp_replicate, dp_shard, tp, ep"),
    Rule("grpo.max_staleness", lambda r: r.grpo.max_staleness and not r.grpo.rollout_ranks,
         "staleness needs extra sampling ranks; ranks that train and sample in turn always have the newest weights",
         "max_staleness={grpo.max_staleness}, rollout_ranks=0",
         "set `grpo.rollout_ranks=1`, or `grpo.max_staleness=0`"),
    Rule("grpo.reference_role",
         lambda r: r.grpo.reference_role == "sampler" and not (r.grpo.beta and r.grpo.rollout_ranks),
         "a reference on the sampling ranks needs a reference (`beta` > 0) and extra sampling ranks",
         "reference_role=sampler, beta={grpo.beta:g}, rollout_ranks={grpo.rollout_ranks}",
         "set `grpo.reference_role=learner`, or `grpo.rollout_ranks=1 grpo.beta=0.04`"),
    Rule("grpo.partial_rollout",
         lambda r: r.grpo.partial_rollout and (not r.grpo.max_staleness or r.training.deterministic),
         "partial rollouts need staleness, and the time at which newer weights arrive is not deterministic",
         "max_staleness={grpo.max_staleness}, deterministic={training.deterministic}",
         "set `grpo.max_staleness=1 training.deterministic=false`, or `grpo.partial_rollout=false`"),
    Rule("grpo.partial_rollout", lambda r: r.grpo.partial_rollout and r.grpo.rollout_dp_shard > 1,
         "sampling ranks that shard parameters (FSDP) can load newer weights only between rollouts",
         "partial_rollout=true, rollout_dp_shard={grpo.rollout_dp_shard}",
         "set `grpo.rollout_dp_shard=1 grpo.rollout_ep=1`, or `grpo.partial_rollout=false`"),
    Rule("grpo.exact_logprobs", _inexact_rollouts,
         "with `{name}` completions are not sampled in the batches that they are trained in",
         "exact_logprobs=true, {name}={value}", "set `grpo.exact_logprobs=false`"),
    Rule("grpo.reward_funcs", lambda r: "environment" in r.grpo.reward_funcs and not r.grpo.environment,
         "the reward `environment` needs an environment",
         "reward_funcs=[environment], environment=null", "set `grpo.environment=my_module.MyEnvironment`"),
    Rule("grpo.min_effective_samples",
         lambda r: r.grpo.min_effective_samples is not None and not r.grpo.max_staleness,
         "without staleness all samples are on-policy, so this threshold has no effect",
         "min_effective_samples={grpo.min_effective_samples:g}, max_staleness=0",
         "set `grpo.min_effective_samples=null`, or `grpo.rollout_ranks=1 grpo.max_staleness=1`"),
    Rule("grpo.{name}", _unused_clipping,
         "clipping has no effect on a single optimizer step per rollout, because all probability ratios are 1",
         "{name}={value:g}, num_iterations=1", "set `grpo.num_iterations=2`, or leave `grpo.{name}` out"),
    Rule("checkpoint.{name}", _saves_within_rollouts,
         "a resumed run starts with a new rollout, so checkpoints must be saved between rollouts",
         "{name}={every}, num_iterations={grpo.num_iterations}",
         "set `checkpoint.{name}={next}`", "a multiple of grpo.num_iterations"),
    Rule("grpo.reward_weights", _missing_weights,
         "every reward needs exactly one weight",
         "{weights} weights, {count} functions", "set `grpo.reward_weights={equal}`"),
)  # fmt: skip
