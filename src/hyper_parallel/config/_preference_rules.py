"""Contradictions of preference stages (dpo, orpo, kto, rm and grpo) with other values of a recipe."""

from __future__ import annotations

from typing import Final

from hyper_parallel.config._preference_sections import PREFERENCE_STAGES, Grpo
from hyper_parallel.config._recipe import Recipe
from hyper_parallel.config._rules import Rule, Rules


def _ahead(recipe: Recipe) -> dict[str, str]:
    """Return, as `ahead`, the overrides that let sampling run ahead of training."""
    ranks = "" if recipe.grpo.rollout_ranks else "grpo.rollout_ranks=1 "
    return {"ahead": f"{ranks}grpo.max_staleness={recipe.grpo.max_staleness or 1}"}


def _lacking_reference(recipe: Recipe) -> dict[str, str] | None:
    """Return, as `needed`, the overrides missing for `reference_role: sampler`; None for `learner` or if none is."""
    grpo = recipe.grpo
    values = {"grpo.rollout_ranks=1": not grpo.rollout_ranks, "grpo.beta=0.04": not grpo.beta}
    needed = " ".join(text for text, is_missing in values.items() if is_missing)
    return {"needed": needed} if grpo.reference_role == "sampler" and needed else None


PREFERENCE_RULES: Final[Rules] = (
    Rule("data.source",
         lambda r: r.data.source == "python-stdlib" and {"records": PREFERENCE_STAGES[r.stage]},
         "`stage: {stage}` needs {records}, but the standard library's source text has none",
         "stage={stage}, data.source=python-stdlib",
         "set `data.source=records.jsonl`, or `stage=pt`", "a file or directory with {records}"),
    Rule("data.packing", lambda r: r.data.packing,
         "`stage: {stage}` has one conversation in a sequence and cannot pack several",
         "data.packing=true", "set `data.packing=false`"),
    Rule("data.streaming", lambda r: r.data.streaming,
         "`stage: {stage}` does not support `data.streaming` yet",
         "data.streaming=true", "set `data.streaming=false`"),
    Rule("data.max_bytes", lambda r: r.data.max_bytes is not None,
         "`stage: {stage}` does not support `data.max_bytes` yet",
         "data.max_bytes={data.max_bytes}", "set `data.max_bytes=null`"),
    Rule("offload", lambda r: r.offload.on,
         "`stage: {stage}` does not support `offload` yet",
         "offload.budget={offload.budget}, offload.max_slowdown={offload.max_slowdown}",
         "set `offload.budget=null offload.max_slowdown=null`"),
    Rule("sample_prompt", lambda r: r.stage == "rm" and r.sample_prompt is not None,
         "`sample_prompt` needs a model that predicts tokens, but a reward model only scores texts",
         "stage=rm, sample_prompt={sample_prompt}", "set `sample_prompt=null`"),
    Rule("training.check_ranks_every", lambda r: r.stage == "rm" and r.training.check_ranks_every,
         "`training.check_ranks_every` needs a model that predicts tokens, but a reward model only scores texts",
         "stage=rm, training.check_ranks_every={training.check_ranks_every}",
         "set `training.check_ranks_every=0`"),
    Rule("grpo.{name}",
         lambda r: [{"name": name} for name in ("rollout_ranks", "rollout_tp")
                    if r.stage == "grpo" and not r.parallel.auto and getattr(r.grpo, name) == "auto"],
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
    Rule("grpo.reference_role", _lacking_reference,
         "a reference on the sampling ranks needs a reference (`beta` > 0) and extra sampling ranks",
         "reference_role=sampler, beta={grpo.beta:g}, rollout_ranks={grpo.rollout_ranks}",
         "set `grpo.reference_role=learner`, or `{needed}`"),
    Rule("grpo.partial_rollout",
         lambda r: r.grpo.partial_rollout and (not r.grpo.max_staleness or r.training.deterministic) and _ahead(r),
         "partial rollouts need staleness, and the time at which newer weights arrive is not deterministic",
         "max_staleness={grpo.max_staleness}, deterministic={training.deterministic}",
         "set `{ahead} training.deterministic=false`, or `grpo.partial_rollout=false`"),
    Rule("grpo.partial_rollout", lambda r: r.grpo.partial_rollout and r.grpo.rollout_dp_shard > 1,
         "sampling ranks that shard parameters (FSDP) can load newer weights only between rollouts",
         "partial_rollout=true, rollout_dp_shard={grpo.rollout_dp_shard}",
         "set `grpo.rollout_dp_shard=1 grpo.rollout_ep=1`, or `grpo.partial_rollout=false`"),
    Rule("grpo.exact_logprobs",
         lambda r: [{"name": name, "value": "true" if value is True else value}
                    for name in ("environment", "partial_rollout")
                    if r.grpo.exact_logprobs and (value := getattr(r.grpo, name))],
         "bitwise equal log-probabilities need the same batches in sampling and training, which `{name}` prevents",
         "exact_logprobs=true, {name}={value}", "set `grpo.exact_logprobs=false`"),
    Rule("grpo.reward_funcs", lambda r: "environment" in r.grpo.reward_funcs and not r.grpo.environment,
         "the reward `environment` needs an environment",
         "reward_funcs=[environment], environment=null", "set `grpo.environment=my_module.MyEnvironment`"),
    Rule("grpo.min_effective_samples",
         lambda r: r.grpo.min_effective_samples is not None and not r.grpo.max_staleness and _ahead(r),
         "without staleness all samples are on-policy, so this threshold has no effect",
         "min_effective_samples={grpo.min_effective_samples:g}, max_staleness=0",
         "set `grpo.min_effective_samples=null`, or `{ahead}`"),
    Rule("grpo.{name}",
         lambda r: [{"name": name, "value": value} for name in ("epsilon", "epsilon_high")
                    if r.grpo.num_iterations == 1
                    and (value := getattr(r.grpo, name)) != Grpo.model_fields[name].default],
         "clipping has no effect on a single optimizer step per rollout, because all probability ratios are 1",
         "{name}={value:g}, num_iterations=1", "set `grpo.num_iterations=2`, or leave `grpo.{name}` out"),
    Rule("checkpoint.{name}",
         lambda r: [{"name": name, "every": every, "next": every + -every % r.grpo.num_iterations}
                    for name in ("every", "snapshot_every")
                    if (every := getattr(r.checkpoint, name)) % r.grpo.num_iterations],
         "a resumed run starts with a new rollout, so checkpoints must be saved between rollouts",
         "{name}={every}, num_iterations={grpo.num_iterations}",
         "set `checkpoint.{name}={next}`", "a multiple of grpo.num_iterations"),
    Rule("grpo.reward_weights",
         lambda r: r.grpo.reward_weights is not None and len(r.grpo.reward_weights) != len(r.grpo.reward_funcs)
         and {"weights": len(r.grpo.reward_weights), "count": len(r.grpo.reward_funcs),
              "equal": [1.0] * len(r.grpo.reward_funcs)},
         "every reward needs exactly one weight",
         "{weights} weights, {count} functions", "set `grpo.reward_weights={equal}`"),
)  # fmt: skip
