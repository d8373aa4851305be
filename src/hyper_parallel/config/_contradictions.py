"""Contradictions: recipe values that are each allowed, but not together.

Rows of the tables are `Rule`s. Functions for `Rule.when` return None if the recipe satisfies the rule, else values of
the placeholders in the rule's texts, such as the overrides that a hint suggests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from hyper_parallel.config._derived import with_values
from hyper_parallel.config._preference_rules import GRPO_RULES, PREFERENCE_RULES
from hyper_parallel.config._preference_sections import PREFERENCE_STAGES
from hyper_parallel.config._recipe import Recipe
from hyper_parallel.config._rules import Rule, Rules, broken_rules, offload_off
from hyper_parallel.config._schedule_rules import SCHEDULE_RULES
from hyper_parallel.config._submodel_rules import SUBMODEL_RULES
from hyper_parallel.config._values import MOST_RANKS, MOST_SEQUENCES
from hyper_parallel.errors import HyperParallelError


def check_recipe(recipe: Recipe, where: Callable[[str], str]) -> list[HyperParallelError]:
    """Return the errors of the rules that a recipe breaks, in order; `where` returns the origin of a dotted key."""
    rules = (
        *_STAGE_RULES,
        *(PREFERENCE_RULES if recipe.stage in PREFERENCE_STAGES else ()),
        *(GRPO_RULES if recipe.stage == "grpo" else ()),
        *_DATA_RULES,
        *_TRAINING_RULES,
        *(SUBMODEL_RULES if recipe.parallel.submodels is not None else ()),
        *_MEMORY_AND_LAUNCH_RULES,
    )
    return [*broken_rules(rules, recipe, where)]


def _or_pt(recipe: Recipe) -> dict[str, str]:
    """Return the end `or_pt` of the hint, which suggests `stage=pt` if possible, and the override `source` for sft."""
    needs_sft = recipe.parallel.submodels is not None or recipe.data.balance == "cost"
    source = " data.source=FILE" if recipe.data.source == "python-stdlib" else ""
    return {"or_pt": "" if needs_sft else ", or `stage=pt` to learn every token", "source": source}


_STAGE_RULES: Final[Rules] = (
    (
        Rule("data.format",
             lambda r: r.stage == "sft" and r.data.format in ("text", "jsonl", "parquet", "csv") and _or_pt(r),
             "`stage: sft` needs conversations, but the data format contains plain text",
             "stage=sft, data.format={data.format}",
             "set `data.format=auto{source}`{or_pt}",
             "auto, alpaca, sharegpt, prompt_completion"),
        Rule("data.source", lambda r: r.stage == "sft" and r.data.source == "python-stdlib" and _or_pt(r),
             "`stage: sft` needs conversations, but the standard library's source text has none",
             "stage=sft, data.source=python-stdlib",
             "set `data.source=FILE`{or_pt}",
             "a file or directory of conversations"),
    ),
)  # fmt: skip


def _repeated_names(recipe: Recipe) -> list[dict[str, str]]:
    repeated = []
    for key in ("columns", "roles"):
        entries = getattr(recipe.data, key)
        names = [*entries.values()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            same = [entry for entry, name in entries.items() if name == twice]
            shown = ", ".join(f"{entry}={twice}" for entry in same)
            repeated.append({"key": key, "shown": shown, "last": same[-1]})
    return repeated


def _replaced_holdout(recipe: Recipe) -> dict[str, str] | None:
    data = recipe.data
    if not data.holdout or not (data.streaming or data.validation):
        return None
    if data.streaming:
        return {"name": "data.streaming", "value": "true"}
    return {"name": "data.validation", "value": str(data.validation)}


def _masks_without_packing(recipe: Recipe) -> dict[str, str] | None:
    data = recipe.data
    if data.packing or data.mask_documents is None:
        return None
    excluded = recipe.stage in PREFERENCE_STAGES or (recipe.offload.on and data.mask_documents)
    return {"or_packing": "" if excluded else ", or `data.packing=true`"}


def _masks_in_plan(recipe: Recipe) -> dict[str, str] | None:
    if not recipe.offload.on or not recipe.data.masks(recipe.stage):
        return None
    default = " data.mask_documents=null" if recipe.data.mask_documents is not None else ""
    return {"unpacked": f"data.packing=false{default}"}


def _split_without_data(recipe: Recipe) -> dict[str, str] | None:
    data = recipe.data
    if data.validation_split is None or data.validation is not None:
        return None
    is_set = "holdout" in data.model_fields_set and data.holdout
    return {"holdout": " data.holdout=0" if is_set else ""}


_DATA_RULES: Final[Rules] = (
    Rule("{name}.{setting}",
         lambda r: [{"name": name, "setting": setting} for name in PREFERENCE_STAGES if name != r.stage
                    for setting in sorted(getattr(r, name).model_dump(exclude_defaults=True))[:1]],
         "`{name}.{setting}` applies to `stage: {name}` only",
         "stage={stage}", "set `stage={name}`, or leave out `{name}.{setting}`"),
    Rule("data.{key}", _repeated_names,
         "two entries of `data.{key}` map to the same name in the data",
         "{shown}", "set `data.{key}.{last}=NAME`"),
    Rule("data.mask_documents", _masks_without_packing,
         "document masks need packing, because without packing a sequence contains one document",
         "packing=false, mask_documents={data.mask_documents}",
         "set `data.mask_documents=null`{or_packing}"),
    Rule("data.streaming",
         lambda r: r.data.streaming and not isinstance(r.data.source, str) and {"count": len(r.data.source)},
         "streaming supports one source only",
         "{count} sources, streaming=true", "set `data.streaming=false`, or one `data.source`"),
    Rule("data.balance", lambda r: r.data.balance == "cost" and r.data.streaming,
         "`data.balance: cost` needs the costs of records in advance, which a stream does not have",
         "balance=cost, streaming=true", "set `data.balance=auto`", "auto, none"),
    Rule("data.balance", lambda r: r.data.balance == "cost" and not r.data.streaming and r.stage != "sft",
         "only conversations of `stage: sft` have images and audio to balance",
         "balance=cost, stage={stage}", "set `data.balance=auto`", "auto, none"),
    Rule("training.epochs", lambda r: r.data.streaming and r.training.epochs is not None,
         "the length of an epoch of streamed data is not known in advance",
         "epochs={training.epochs:g}, data.streaming=true",
         "set `training.epochs=null` and the length of the run in `training.steps`, or set `data.streaming=false`"),
    Rule("data.holdout", _replaced_holdout,
         "with `{name}` no documents of the source are held out",
         "holdout={data.holdout:g}, {name}={value}", "set `data.holdout=0`"),
    Rule("data.validation_split", _split_without_data,
         "`data.validation_split` names a split, but no validation dataset is given",
         "validation_split={data.validation_split}, validation=null",
         "set `data.validation=FILE{holdout}`, or `data.validation_split=null`"),
    Rule("data.mask_documents", _masks_in_plan,
         "a memory plan replays one recorded step, but masks of packed documents differ between batches",
         "offload with data.packing=true",
         "set `{unpacked}`, or `data.mask_documents=false` to let documents attend to each other"),
)  # fmt: skip


def _plan(recipe: Recipe) -> dict[str, str] | None:
    return {"off": offload_off(recipe)} if recipe.offload.on else None


def _idle_offload(recipe: Recipe) -> dict[str, str] | None:
    """Return the placeholder values for settings of `offload` without a goal.

    `on`, the goals to suggest, is empty if offload would break a rule.
    """
    changed = [*recipe.offload.model_dump(exclude_defaults=True)]
    if recipe.offload.on or not changed:
        return None
    enabled = with_values(recipe, "offload", {"budget": "auto"})
    goal = "" if check_recipe(enabled, str) else "`offload.budget=auto`, or `offload.max_slowdown=0.02`, or "
    return {"name": changed[0], "off": offload_off(recipe), "on": goal}


def _incomparable_ranks(recipe: Recipe) -> dict[str, str] | None:
    training, is_planned = recipe.training, recipe.offload.on
    if not training.check_ranks_every or (training.deterministic and not is_planned):
        return None
    changes = [offload_off(recipe)] if is_planned else []
    changes += [] if training.deterministic else ["training.deterministic=true"]
    is_excluded = recipe.stage == "grpo" and recipe.grpo.partial_rollout and not training.deterministic
    change = "" if is_excluded else f"`{' '.join(changes)}`, or "
    return {"offload": "on" if is_planned else "off", "change": change}


def _late_profile(recipe: Recipe) -> dict[str, str] | None:
    training, profile = recipe.training, recipe.training.profile
    is_late = profile is not None and profile.start + profile.steps - 1 > training.steps
    if profile is None or not is_late or training.epochs is not None:
        return None
    if profile.steps > training.steps:
        return {"change": f"training.profile.start=1 training.profile.steps={training.steps}"}
    return {"change": f"training.profile.start={training.steps - profile.steps + 1}"}


def _halves_batches(recipe: Recipe) -> bool:
    return "half-batch" in (recipe.overlap.tp, recipe.overlap.ep)


def _held_out(recipe: Recipe) -> str:
    """Return the override, after a space, that provides held-out data; empty if there is some."""
    data = recipe.data
    if data.validation or (data.holdout and not data.streaming):
        return ""
    return " data.validation=FILE" if data.streaming else " data.holdout=0.02"


def _interval(recipe: Recipe) -> int:
    """Return the interval of checkpoints or evaluations that is set, or 100, rounded up to whole GRPO rollouts."""
    interval = recipe.checkpoint.every or recipe.training.eval_every or 100
    return interval + -interval % (recipe.grpo.num_iterations if recipe.stage == "grpo" else 1)


def _misses_evaluations(recipe: Recipe) -> dict[str, object] | None:
    every, eval_every = recipe.checkpoint.every, recipe.training.eval_every
    if not recipe.checkpoint.keep_best or (eval_every and every and every % eval_every == 0):
        return None
    common = _interval(recipe)
    return {"change": f"checkpoint.every={common} training.eval_every={common}{_held_out(recipe)}"}


def _evaluations(recipe: Recipe) -> str:
    """Return the overrides that enable evaluations, with `keep_best` at every checkpoint; "" if enabled."""
    if recipe.training.eval_every:
        return ""
    interval = _interval(recipe)
    checkpoints = f" checkpoint.every={interval}" if recipe.checkpoint.keep_best else ""
    return f"training.eval_every={interval}{checkpoints}{_held_out(recipe)}"


def _no_held_out_data(recipe: Recipe) -> dict[str, object] | None:
    data, training = recipe.data, recipe.training
    if not training.eval_every or not (change := _held_out(recipe).strip()):
        return None
    off = ["training.eval_every=0"]
    off += ["checkpoint.keep_best=false"] if recipe.checkpoint.keep_best else []
    off += ["training.early_stopping_patience=null"] if training.early_stopping_patience is not None else []
    off += ["training.early_stopping_threshold=0"] if training.early_stopping_threshold else []
    return {
        "holdout": "0, data.streaming=true" if data.streaming else 0,
        "change": change,
        "off": " ".join(off),
    }


def _stops_without_patience(recipe: Recipe) -> dict[str, str] | None:
    training = recipe.training
    if not training.early_stopping_threshold or training.early_stopping_patience is not None:
        return None
    return {"change": f"training.early_stopping_patience=3 {_evaluations(recipe)}".strip()}


def _elastic_batch(recipe: Recipe) -> dict[str, str] | None:
    training, parallel = recipe.training, recipe.parallel
    if not training.elastic or training.tokens_per_step is not None:
        return None
    unit = (training.microbatch or training.accumulation_steps or 1) * parallel.dp_replicate * parallel.dp_shard
    tokens = (256 + -256 % unit) * recipe.data.seq_len
    is_fixed = None not in (training.microbatch, training.accumulation_steps)
    derived = " training.accumulation_steps=null" if is_fixed else ""
    return {"change": f"training.tokens_per_step={tokens}{derived}"}


def _unused_decay(recipe: Recipe) -> dict[str, str] | None:
    t = recipe.training
    if t.epochs is not None or t.decay_steps is None or t.lr_schedule in ("wsd", "warmup_stable_decay"):
        return None
    arguments = "".join(f" training.lr_schedule_args.{name}=null" for name in t.lr_schedule_args)
    is_long = t.warmup_steps + t.decay_steps > t.steps
    return {"wsd": "" if is_long else f"`training.lr_schedule=wsd{arguments}`, or "}


_MESH_AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y")


def _ranks(recipe: Recipe) -> int:
    return math.prod(getattr(recipe.parallel, name) for name in _MESH_AXES)


def _too_many_ranks(recipe: Recipe) -> dict[str, object] | None:
    """Return the placeholder values for a run above `MOST_RANKS`; the change sets the largest degrees to 1."""
    ranks = _ranks(recipe)
    launched = recipe.launch.nnodes * (recipe.launch.nproc_per_node or 1)
    if max(ranks, launched) <= MOST_RANKS:
        return None
    if launched > ranks:
        return {"most": launched, "key": "launch.nnodes", "change": "launch.nnodes=1"}
    degrees = {name: getattr(recipe.parallel, name) for name in _MESH_AXES}
    changes, rest = list[str](), ranks
    for name in sorted(degrees, key=degrees.__getitem__, reverse=True):
        if rest > MOST_RANKS:
            rest //= degrees[name]
            changes.append(f"parallel.{name}=1")
    if recipe.parallel.world_size is not None:
        changes.append("parallel.world_size=null")
    return {"most": ranks, "key": "parallel", "change": " ".join(changes)}


def _too_many_sequences(recipe: Recipe) -> dict[str, object] | None:
    training, dp = recipe.training, recipe.parallel.dp_replicate * recipe.parallel.dp_shard
    batch = {"microbatch": training.microbatch or 1, "accumulation_steps": training.accumulation_steps or 1}
    sequences = dp * math.prod(batch.values())
    key = f"training.{max(batch, key=batch.__getitem__)}"
    change = " ".join(f"training.{name}=1" for name, number in batch.items() if number > 1)
    if training.tokens_per_step is not None:
        key = "training.tokens_per_step"
        tokens = MOST_SEQUENCES // sequences * sequences * recipe.data.seq_len
        change = f"{key}={tokens}" if tokens else f"{key}=null {change}"
        sequences = training.tokens_per_step // recipe.data.seq_len
    return {"key": key, "count": sequences, "change": change} if sequences > MOST_SEQUENCES else None


def _other_world_size(recipe: Recipe) -> dict[str, object] | None:
    parallel, ranks = recipe.parallel, _ranks(recipe)
    if parallel.is_planned or parallel.world_size in (None, ranks):
        return None
    can_plan = parallel.submodels is None and recipe.overlap.tp != "symmetric"
    can_plan &= recipe.training.recompute_layers is None and parallel.world_size % ranks == 0
    auto = ", or `parallel.auto=true` to let the planner choose the other degrees" if can_plan else ""
    return {"ranks": ranks, "auto": auto}


def _unused_recompute_layers(recipe: Recipe) -> dict[str, str] | None:
    training = recipe.training
    if training.recompute_layers is None or training.recompute == "full":
        return None
    return {"full": "" if recipe.parallel.auto else "`training.recompute=full`, or "}


_TRAINING_RULES: Final[Rules] = (
    Rule("training.compile",
         lambda r: r.training.compile not in (False, form := True if r.backend == "torch" else "graph-kernel")
         and {"form": form},
         "the back end {backend} does not support this value of `training.compile`",
         "training.compile={training.compile}, backend={backend}",
         "set `training.compile={form}`, or `training.compile=false`", "false, {form}"),
    Rule("training.compile",
         lambda r: r.training.compile and (_halves_batches(r) or r.overlap.tp in ("chunks", "symmetric")),
         "this overlap suspends a layer while collectives run, which a compiled layer does not allow",
         "training.compile=true, overlap.tp={overlap.tp}, overlap.ep={overlap.ep}",
         "set `training.compile=false`, or `overlap=none`"),
    (
        Rule("overlap.tp",
             lambda r: r.overlap.tp == "symmetric" and r.lora is not None
             and {"or_full": "" if r.parallel.auto else ", or `lora=null`"},
             "operators over symmetric memory multiply by base weights only and cannot apply adapters",
             "overlap.tp=symmetric, with the section lora",
             "set `overlap.tp=chunks`{or_full}"),
        Rule("overlap.tp", lambda r: r.overlap.tp == "symmetric" and r.parallel.auto,
             "the planner cannot choose degrees for `overlap.tp: symmetric`, whose time it cannot predict",
             "overlap.tp=symmetric, parallel=auto",
             "set `overlap.tp=chunks`, or the degrees of `parallel`"),
    ),
    (
        Rule("overlap.ep", lambda r: r.overlap.ep == "chunks" and r.moe.capacity_factor is not None,
             "an expert capacity counts all tokens together, so tokens cannot be exchanged in chunks",
             "overlap.ep=chunks, moe.capacity_factor={moe.capacity_factor:g}",
             "set `overlap.ep=none`, or `moe.capacity_factor=null`"),
        Rule("overlap", lambda r: _halves_batches(r) and r.moe.capacity_factor is not None,
             "an expert capacity counts all tokens together, but a half-batch has only half of them",
             "overlap=half-batch, moe.capacity_factor={moe.capacity_factor:g}",
             "set `overlap=none`, or `moe.capacity_factor=null`"),
    ),
    (
        Rule("training.epochs", lambda r: r.training.epochs is not None and "steps" in r.training.model_fields_set,
             "epochs and steps both set the length of the run",
             "epochs={training.epochs:g}, steps={training.steps}",
             "set `training.epochs=null`, or leave out `training.steps`"),
        Rule("training.warmup_steps",
             lambda r: r.training.epochs is None and r.training.warmup_steps > r.training.steps
             and {"fewer": min(r.training.steps // 10, max(0, r.training.steps - (r.training.decay_steps or 0)))},
             "the warm-up is longer than the run, so the peak learning rate is never reached",
             "warmup_steps={training.warmup_steps}, steps={training.steps}",
             "set `training.warmup_steps={fewer}`", "0..{training.steps}"),
        Rule("training.decay_steps", _unused_decay,
             "`training.decay_steps` applies to the schedules wsd and warmup_stable_decay only",
             "decay_steps={training.decay_steps}, lr_schedule={training.lr_schedule}",
             "set {wsd}`training.decay_steps=null`"),
        Rule("training.decay_steps",
             lambda r: r.training.epochs is None and r.training.decay_steps is not None
             and r.training.warmup_steps + r.training.decay_steps > r.training.steps
             and {"rest": r.training.steps - r.training.warmup_steps},
             "warm-up and decay together are longer than the run",
             "warmup_steps={training.warmup_steps}, decay_steps={training.decay_steps}, steps={training.steps}",
             "set `training.decay_steps={rest}`", "0..{rest}"),
    ),
    *SCHEDULE_RULES,
    Rule("training.elastic", _elastic_batch,
         "an elastic run needs a fixed number of tokens per step for any number of ranks",
         "elastic=true, tokens_per_step=null",
         "set `{change}`, or `training.elastic=false`"),
    Rule("training.check_ranks_every", _incomparable_ranks,
         "bitwise comparison of ranks needs deterministic kernels and does not work with a memory plan",
         "deterministic={training.deterministic}, offload={offload}",
         "set {change}`training.check_ranks_every=0`"),
    Rule("training.profile", _late_profile,
         "the steps to profile end after the last step of the run",
         "start={training.profile.start}, steps={training.profile.steps} of {training.steps}",
         "set `{change}`"),
    Rule("training.eval_every", _no_held_out_data,
         "evaluation needs held-out data, but none is held out",
         "eval_every={training.eval_every}, data.holdout={holdout}",
         "set `{change}`, or `{off}`"),
    (
        Rule("training.neftune_noise_alpha", lambda r: r.training.neftune_noise_alpha is not None and r.offload.on,
             "a memory plan replays one recorded step, but noise differs between steps",
             "neftune_noise_alpha={training.neftune_noise_alpha:g}, offload",
             "set `training.neftune_noise_alpha=null`"),
        Rule("training.neftune_noise_alpha",
             lambda r: r.training.neftune_noise_alpha is not None and r.stage == "grpo",
             "completions are sampled without noise, so noise in training would change their log-probabilities",
             "neftune_noise_alpha={training.neftune_noise_alpha:g}, stage=grpo",
             "set `training.neftune_noise_alpha=null`"),
    ),
    Rule("training.early_stopping_patience",
         lambda r: r.training.early_stopping_patience is not None and not r.training.eval_every
         and {"change": _evaluations(r),
              "off": " training.early_stopping_threshold=0" if r.training.early_stopping_threshold else ""},
         "early stopping needs evaluations, but `training.eval_every` is 0",
         "early_stopping_patience={training.early_stopping_patience}, eval_every=0",
         "set `{change}`, or `training.early_stopping_patience=null{off}`"),
    Rule("training.early_stopping_threshold", _stops_without_patience,
         "`training.early_stopping_threshold` has no effect without early stopping",
         "early_stopping_threshold={training.early_stopping_threshold:g}, early_stopping_patience=null",
         "set `{change}`, or `training.early_stopping_threshold=0`"),
    Rule("checkpoint.keep_best", _misses_evaluations,
         "the best checkpoint is chosen by its held-out loss, but not every saved step is evaluated",
         "checkpoint.every={checkpoint.every}, training.eval_every={training.eval_every}",
         "set `{change}`, or `checkpoint.keep_best=false`"),
    Rule("{key}", _too_many_ranks,
         "the run has too many ranks", "{most} ranks", "set `{change}`", f"at most {MOST_RANKS}"),
    Rule("{key}", _too_many_sequences,
         "a step has too many sequences", "{count} sequences", "set `{change}`", f"at most {MOST_SEQUENCES}"),
    Rule("parallel.world_size", _other_world_size,
         "the degrees do not multiply to the requested number of ranks",
         "degrees multiply to {ranks}, world_size={parallel.world_size}",
         "set `parallel.world_size={ranks}`{auto}"),
    Rule("parallel.zero", lambda r: r.parallel.zero is not None and r.parallel.pp > 1,
         "`zero: 1` applies only without pipeline stages, which reduce gradients once per step in any case",
         "zero={parallel.zero}, pp={parallel.pp}",
         "set `parallel.zero=null parallel.reshard_after_forward=false`"),
)  # fmt: skip


_MEMORY_AND_LAUNCH_RULES: Final[Rules] = (
    (
        Rule("training.recompute_layers", _unused_recompute_layers,
             "`training.recompute_layers` has no effect, because no layer is recomputed",
             "recompute_layers={training.recompute_layers}, recompute={training.recompute}",
             "set {full}`training.recompute_layers=null`"),
        Rule("training.recompute_layers", lambda r: r.training.recompute_layers is not None and r.parallel.auto,
             "with `parallel: auto` the planner chooses the number of recomputed layers",
             "recompute_layers={training.recompute_layers}, parallel=auto",
             "set `training.recompute_layers=null`, or the degrees of `parallel`"),
    ),
    Rule("offload.max_slowdown", lambda r: r.offload.budget is not None and r.offload.max_slowdown is not None,
         "offload accepts one goal: least time within a budget, or least memory within a slowdown",
         "budget={offload.budget}, max_slowdown={offload.max_slowdown}",
         "set `offload.max_slowdown=null`, or `offload.budget=null`"),
    Rule("offload.{name}", _idle_offload,
         "`offload.{name}` has no effect, because offload has no goal and is off",
         "budget=null, max_slowdown=null", "set {on}`{off}`"),
    Rule("offload.flash", lambda r: r.offload.on and r.offload.flash is not None and r.offload.flash_dir is None,
         "`offload.flash` limits files, but no directory for them is given",
         "flash={offload.flash}, flash_dir=null", "set `offload.flash_dir=DIRECTORY`, or `offload.flash=null`"),
    Rule("training.dtype", lambda r: r.training.dtype == "float16" and _plan(r),
         "the loss scale of float16 changes between steps, but a planned step runs as recorded",
         "training.dtype=float16 with offload", "set `training.dtype=bfloat16`, or `{off}`"),
    (
        Rule("training.on_nonfinite", lambda r: r.training.on_nonfinite == "skip" and _plan(r),
             "a planned step may update parameters before the gradient norm is known, so it cannot be skipped",
             "on_nonfinite=skip with offload",
             "set `training.on_nonfinite=stop training.skip_grad_norm=null`, or `{off}`"),
        Rule("training.skip_grad_norm", lambda r: r.training.skip_grad_norm is not None and _plan(r),
             "a planned step may update parameters before the gradient norm is known, so it cannot be skipped",
             "skip_grad_norm={training.skip_grad_norm} with offload",
             "set `training.skip_grad_norm=null`, or `{off}`"),
    ),
    Rule("training.compile", lambda r: r.training.compile and _plan(r),
         "a compiled layer chooses its own operator order and buffers, so its memory cannot be planned",
         "training.compile=true with offload", "set `training.compile=false`, or `{off}`"),
    Rule("checkpoint.from_dir", lambda r: r.checkpoint.from_dir is not None and r.checkpoint.resume == "never",
         "`checkpoint.from_dir` has no effect, because `checkpoint.resume: never` reads no checkpoints",
         "from_dir={checkpoint.from_dir}, resume=never",
         "set `checkpoint.resume=must`, or `checkpoint.from_dir=null`"),
    Rule("launch.nnodes",
         lambda r: r.launch.nnodes > 1 and r.launch.launcher == "local"
         and {"endpoint": "" if r.launch.rdzv_endpoint else " launch.rdzv_endpoint=HOST:29500"},
         "the local launcher starts ranks only on this machine",
         "nnodes={launch.nnodes}, launcher=local",
         "set `launch.launcher=torchrun{endpoint}`, or `launch.nnodes=1`", "torchrun, slurm, ray, kubernetes"),
    Rule("launch.image", lambda r: r.launch.launcher == "kubernetes" and r.launch.image is None,
         "Kubernetes pods need a container image, but none is named",
         "launcher=kubernetes, image=null",
         "set `launch.image=REGISTRY/hyper-parallel:TAG`, built from the Dockerfile of this project"),
    Rule("launch.rdzv_endpoint",
         lambda r: r.launch.nnodes > 1 and r.launch.launcher == "torchrun" and r.launch.rdzv_endpoint is None,
         "torchrun on several machines needs a rendezvous endpoint",
         "nnodes={launch.nnodes}, rdzv_endpoint=null",
         "set `launch.rdzv_endpoint=HOST:29500`, with the first machine as HOST"),
    Rule("launch.nproc_per_node",
         lambda r: r.launch.nnodes > 1 and r.launch.nproc_per_node is None
         and r.parallel.is_planned and r.parallel.world_size is None,
         "the planner needs the number of ranks per machine",
         "nnodes={launch.nnodes}, nproc_per_node=null, parallel=auto", "set `launch.nproc_per_node=8`"),
)  # fmt: skip
