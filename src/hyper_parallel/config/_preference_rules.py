"""Contradictions of preference stages (dpo, orpo, kto, rm and grpo) with other values of a recipe.

Values of the section `grpo` are checked with `stage: grpo` only, because other stages refuse them altogether.
"""

from __future__ import annotations

import math
from typing import Final

from hyper_parallel.config._preference_sections import PREFERENCE_STAGES, Grpo
from hyper_parallel.config._recipe import Recipe
from hyper_parallel.config._rules import Rule, Rules, offload_off


def _packed(recipe: Recipe) -> dict[str, str] | None:
    data = recipe.data
    return {"masks": "" if data.mask_documents is None else " data.mask_documents=null"} if data.packing else None


def _without_axes(recipe: Recipe) -> dict[str, str] | None:
    parallel = recipe.parallel
    if parallel.pp == 1 and parallel.cp == 1:
        return None
    values = {
        "auto=true": parallel.auto,  # otherwise the given degrees would turn it off
        "world_size=null": not parallel.auto and parallel.world_size is not None,
        "schedule=1f1b virtual_stages=1": parallel.virtual_stages > 1,
        "schedule_file=": parallel.schedule_file != "",
        "stage_layers=[]": bool(parallel.stage_layers),
        "cp_kind=ring cp_ulysses=1": (parallel.cp_kind, parallel.cp_ulysses) != ("ring", 1),
    }
    words = ["pp=1", "cp=1", *(w for text, is_set in values.items() if is_set for w in text.split())]
    return {"change": " ".join(f"parallel.{word}" for word in words)}


def _ahead(recipe: Recipe) -> dict[str, str]:
    grpo = recipe.grpo
    ranks = "" if grpo.rollout_ranks else f"grpo.rollout_ranks={grpo.copy_ranks} "
    return {"ahead": f"{ranks}grpo.max_staleness={grpo.max_staleness or 1}"}


def _partial(recipe: Recipe) -> dict[str, str] | None:
    grpo, training = recipe.grpo, recipe.training
    if not grpo.partial_rollout or (grpo.max_staleness and not training.deterministic):
        return None
    words = [_ahead(recipe)["ahead"]]
    words += ["training.deterministic=false"] if training.deterministic else []
    words += ["training.check_ranks_every=0"] if training.check_ranks_every else []
    return {"ahead": " ".join(words)}


def _stale_without_ranks(recipe: Recipe) -> dict[str, str] | None:
    grpo = recipe.grpo
    if not grpo.max_staleness or grpo.rollout_ranks:
        return None
    fresh = "grpo.max_staleness=0"
    fresh += " grpo.partial_rollout=false" if grpo.partial_rollout else ""
    fresh += " grpo.min_effective_samples=null" if grpo.min_effective_samples is not None else ""
    return {"ranks": f"grpo.rollout_ranks={grpo.copy_ranks}", "fresh": fresh}


def _next_multiple(recipe: Recipe, every: int, iterations: int) -> int:
    """Return `every`, rounded up to a multiple of `iterations` and, with `keep_best`, of the evaluation interval."""
    evaluations = recipe.training.eval_every if recipe.checkpoint.keep_best else 0
    unit = math.lcm(iterations, evaluations or 1)
    return every + -every % unit


def _unused_clipping(recipe: Recipe) -> list[dict[str, object]]:
    grpo, checkpoint = recipe.grpo, recipe.checkpoint
    if grpo.num_iterations > 1:
        return []
    rounded = {name: _next_multiple(recipe, getattr(checkpoint, name), 2) for name in ("every", "snapshot_every")}
    words = [f"checkpoint.{name}={every}" for name, every in rounded.items() if every != getattr(checkpoint, name)]
    return [
        {"name": name, "value": value, "change": " ".join(["grpo.num_iterations=2", *words])}
        for name in ("epsilon", "epsilon_high")
        if (value := getattr(grpo, name)) != Grpo.model_fields[name].default
    ]


def _rewards_of_one_name(recipe: Recipe) -> dict[str, str] | None:
    grpo = recipe.grpo
    names = grpo.reward_names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is None:
        return None
    same = [path for path, name in zip(grpo.reward_funcs, names, strict=True) if name == twice]
    return {"name": twice, "same": ", ".join(same)}


def _lacking_reference(recipe: Recipe) -> dict[str, str] | None:
    grpo = recipe.grpo
    values = {f"grpo.rollout_ranks={grpo.copy_ranks}": not grpo.rollout_ranks, "grpo.beta=0.04": not grpo.beta}
    needed = " ".join(text for text, is_missing in values.items() if is_missing)
    return {"needed": needed} if grpo.reference_role == "sampler" and needed else None


PREFERENCE_RULES: Final[Rules] = (
    Rule("data.source",
         lambda r: r.data.source == "python-stdlib" and {"records": PREFERENCE_STAGES[r.stage]},
         "`stage: {stage}` needs {records}, but the standard library's source text has none",
         "stage={stage}, data.source=python-stdlib",
         "set `data.source=FILE`", "a file or directory with {records}"),
    Rule("data.packing", _packed,
         "`stage: {stage}` has one conversation in a sequence and cannot pack several",
         "data.packing=true", "set `data.packing=false{masks}`"),
    Rule("data.streaming", lambda r: r.data.streaming,
         "`stage: {stage}` does not support `data.streaming` yet",
         "data.streaming=true", "set `data.streaming=false`"),
    Rule("data.max_bytes", lambda r: r.data.max_bytes is not None,
         "`stage: {stage}` does not support `data.max_bytes` yet",
         "data.max_bytes={data.max_bytes}", "set `data.max_bytes=null`"),
    Rule("offload", lambda r: r.offload.on and {"off": offload_off(r)},
         "`stage: {stage}` does not support `offload` yet",
         "offload.budget={offload.budget}, offload.max_slowdown={offload.max_slowdown}",
         "set `{off}`"),
    Rule("sample_prompt", lambda r: r.stage == "rm" and r.sample_prompt is not None,
         "`sample_prompt` needs a model that predicts tokens, but a reward model only scores texts",
         "stage=rm, sample_prompt={sample_prompt}", "set `sample_prompt=null`"),
    Rule("training.check_ranks_every", lambda r: r.stage == "rm" and r.training.check_ranks_every,
         "`training.check_ranks_every` needs a model that predicts tokens, but a reward model only scores texts",
         "stage=rm, training.check_ranks_every={training.check_ranks_every}",
         "set `training.check_ranks_every=0`"),
)  # fmt: skip

GRPO_RULES: Final[Rules] = (
    Rule("grpo.{name}",
         lambda r: [{"name": name, "number": number}
                    for name, number in (("rollout_ranks", r.grpo.copy_ranks), ("rollout_tp", 1))
                    if not r.parallel.auto and getattr(r.grpo, name) == "auto"],
         "the planner divides ranks between training and sampling only with `parallel: auto`",
         "{name}=auto, parallel.auto=false", "set `parallel=auto`, or `grpo.{name}={number}`"),
    Rule("parallel", _without_axes,
         "`stage: grpo` samples with the training layout, and sampling does not support pp or cp above 1 yet",
         "pp={parallel.pp}, cp={parallel.cp}",
         "set `{change}`", "dp_replicate, dp_shard, tp, ep"),
    Rule("grpo.max_staleness", _stale_without_ranks,
         "staleness needs extra sampling ranks; ranks that train and sample in turn always have the newest weights",
         "max_staleness={grpo.max_staleness}, rollout_ranks=0",
         "set `{ranks}`, or `{fresh}`"),
    Rule("grpo.reference_role", _lacking_reference,
         "`reference_role: sampler` needs a reference model (`beta` > 0) and extra sampling ranks",
         "reference_role=sampler, beta={grpo.beta:g}, rollout_ranks={grpo.rollout_ranks}",
         "set `grpo.reference_role=learner`, or `{needed}`"),
    Rule("grpo.partial_rollout", _partial,
         "partial rollouts need `grpo.max_staleness` above 0, and exclude `training.deterministic`",
         "max_staleness={grpo.max_staleness}, deterministic={training.deterministic}",
         "set `{ahead}`, or `grpo.partial_rollout=false`"),
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
         "reward_funcs=[environment], environment=null", "set `grpo.environment=MODULE.CLASS`"),
    Rule("grpo.reward_funcs", _rewards_of_one_name,
         "two rewards have the same name `{name}` in the metrics", "{same}",
         "rename one of the functions or directories, or leave it out of `grpo.reward_funcs`"),
    Rule("grpo.min_effective_samples",
         lambda r: r.grpo.min_effective_samples is not None and not r.grpo.max_staleness and _ahead(r),
         "without staleness all samples are on-policy, so this threshold has no effect",
         "min_effective_samples={grpo.min_effective_samples:g}, max_staleness=0",
         "set `grpo.min_effective_samples=null`, or `{ahead}`"),
    Rule("grpo.{name}",
         _unused_clipping,
         "clipping has no effect on a single optimizer step per rollout, because all probability ratios are 1",
         "{name}={value:g}, num_iterations=1", "set `{change}`, or leave `grpo.{name}` out"),
    Rule("checkpoint.{name}",
         lambda r: [{"name": name, "every": every, "next": _next_multiple(r, every, r.grpo.num_iterations)}
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
