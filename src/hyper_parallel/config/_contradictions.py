"""Checks across sections of a recipe: values that are each allowed but cannot hold together."""

from __future__ import annotations

import math
from collections.abc import Callable

from hyper_parallel.config._compared_contradictions import of_compared
from hyper_parallel.config._comparisons import COMPARED
from hyper_parallel.config._maxima import MOST_RANKS, MOST_SEQUENCES
from hyper_parallel.config._whole_recipe import Recipe
from hyper_parallel.config.schedules import check_schedule
from hyper_parallel.errors import Contradiction, DegreesMismatch, HyperParallelError


def cross_section(recipe: Recipe, where: Callable[[str], str]) -> list[HyperParallelError]:
    """Every contradiction in a recipe, in the order of its sections.

    Args:
        recipe: A recipe whose sections are each valid.
        where: Origin of a dotted key.
    """
    data, training, p = recipe.data, recipe.training, recipe.parallel
    offload, checkpoint = recipe.offload, recipe.checkpoint
    found: list[HyperParallelError] = []

    def clash(key: str, what: str, got: str, hint: str, allowed: str | None = None) -> None:
        error = DegreesMismatch if key == "parallel.world_size" else Contradiction
        found.append(error(what, where=where(key), got=got, allowed=allowed, hint=hint))

    if recipe.stage == "sft" and data.format in ("text", "jsonl", "parquet", "csv"):
        clash(
            "data.format",
            "`stage: sft` needs conversations, and the format of the data holds plain text",
            f"stage=sft, data.format={data.format}",
            "set `data.format=auto`, or `stage=pt` to learn every token",
            "auto, alpaca, sharegpt, prompt_completion",
        )
    elif recipe.stage == "sft" and data.source == "python-stdlib":
        clash(
            "data.source",
            "`stage: sft` needs conversations, and the source text of the standard library has none",
            "stage=sft, data.source=python-stdlib",
            "set `data.source=conversations.jsonl`, or `stage=pt`",
            "a file or directory of conversations",
        )

    if recipe.stage in COMPARED:
        of_compared(recipe, clash)
    for name in COMPARED:
        changed = sorted(getattr(recipe, name).model_dump(exclude_defaults=True))
        if changed and recipe.stage != name:
            clash(
                f"{name}.{changed[0]}",
                f"`{name}.{changed[0]}` has no effect in another stage",
                f"stage={recipe.stage}",
                f"set `stage={name}`, or leave out `{name}.{changed[0]}`",
            )

    if not data.packing and data.mask_documents is not None:
        clash(
            "data.mask_documents",
            "without packing there is one document in a sequence, and nothing to block",
            f"packing=false, mask_documents={str(data.mask_documents).lower()}",
            "set `data.mask_documents=null`, or `data.packing=true`",
        )

    if data.streaming and not isinstance(data.source, str):
        clash(
            "data.streaming",
            "a stream has one source",
            f"{len(data.source)} sources, streaming=true",
            "set `data.streaming=false`, or one `data.source`",
        )
    if data.streaming and training.epochs is not None:
        clash(
            "training.epochs",
            "how long an epoch of a stream is is not known before it is read",
            f"epochs={training.epochs:g}, data.streaming=true",
            "set `training.epochs=null` and `training.steps`, or `data.streaming=false`",
        )
    elsewhere = "data.streaming" if data.streaming else "data.validation"
    if (data.streaming or data.validation) and data.holdout:
        clash(
            "data.holdout",
            f"with `{elsewhere}` no documents are held out of the source",
            f"holdout={data.holdout:g}, {elsewhere}={str(data.validation or True).lower()}",
            "set `data.holdout=0`",
        )
    if data.validation_split is not None and data.validation is None:
        clash(
            "data.validation_split",
            "a split of what is not given",
            f"validation_split={data.validation_split}, validation=null",
            f"set `data.validation={data.source}`",
        )
    if recipe.offload.on and data.masks(recipe.stage):
        clash(
            "data.mask_documents",
            "a memory plan repeats one program, and the masks of packed documents differ from batch to batch",
            "offload with data.packing=true",
            "set `data.packing=false`, or `data.mask_documents=false` to let documents see each other",
        )

    steps, warmup, decay = training.steps, training.warmup_steps, training.decay_steps
    if training.epochs is not None:
        if "steps" in training.model_fields_set:
            clash(
                "training.epochs",
                "epochs and steps both say how long the run is",
                f"epochs={training.epochs:g}, steps={steps}",
                "set `training.epochs=null`, or leave out `training.steps`",
            )
    elif warmup > steps:
        clash(
            "training.warmup_steps",
            "the warm-up is longer than the run, so the peak learning rate is never reached",
            f"warmup_steps={warmup}, steps={steps}",
            f"set `training.warmup_steps={steps // 10}`",
            f"0..{steps}",
        )
    elif decay is not None and training.lr_schedule not in ("wsd", "warmup_stable_decay"):
        clash(
            "training.decay_steps",
            "`training.decay_steps` belongs to the schedule wsd and would have no effect",
            f"decay_steps={decay}, lr_schedule={training.lr_schedule}",
            "set `training.lr_schedule=wsd`, or `training.decay_steps=null`",
        )
    elif decay is not None and warmup + decay > steps:
        clash(
            "training.decay_steps",
            "warm-up and decay together are longer than the run",
            f"warmup_steps={warmup}, decay_steps={decay}, steps={steps}",
            f"set `training.decay_steps={steps - warmup}`",
            f"0..{steps - warmup}",
        )
    check_schedule(training, clash)
    if training.elastic and training.tokens_per_step is None:
        clash(
            "training.elastic",
            "the tokens of a step have to be known for another number of ranks, too",
            "elastic=true, tokens_per_step=null",
            f"set `training.tokens_per_step={256 * data.seq_len}`, or `training.elastic=false`",
        )
    if training.check_ranks_every and (offload.on or not training.deterministic):
        wanted = "offload.budget=null" if offload.on else "training.deterministic=true"
        clash(
            "training.check_ranks_every",
            "ranks are compared bit for bit, which needs deterministic kernels and no memory plan",
            f"deterministic={str(training.deterministic).lower()}, offload={'on' if offload.on else 'off'}",
            f"set `{wanted}`, or `training.check_ranks_every=0`",
        )
    window = training.profile
    if window is not None and window.start + window.steps - 1 > steps:
        clash(
            "training.profile",
            "the steps to profile end after the last step of the run",
            f"start={window.start}, steps={window.steps} of {steps}",
            f"set `training.profile.start={max(1, steps - window.steps + 1)}`",
        )
    if training.eval_every and not data.validation and (data.holdout == 0 or data.streaming):
        clash(
            "training.eval_every",
            "evaluation is asked for and no text is held out for it",
            f"eval_every={training.eval_every}, data.holdout={0 if not data.streaming else 'of a stream'}",
            f"set `data.{'validation=FILE' if data.streaming else 'holdout=0.02'}`, or `training.eval_every=0`",
        )

    noise = training.neftune_noise_alpha
    if noise is not None and (offload.on or recipe.stage == "grpo"):
        clash(
            "training.neftune_noise_alpha",
            "a memory plan repeats one program, and noise differs from step to step"
            if offload.on
            else "completions are sampled without noise, and weighed by their likelihood with it",
            f"neftune_noise_alpha={noise:g}, {'offload' if offload.on else 'stage=grpo'}",
            "set `training.neftune_noise_alpha=null`",
        )
    patience = training.early_stopping_patience
    if patience is not None and not training.eval_every:
        clash(
            "training.early_stopping_patience",
            "a run is ended early by evaluations, and none is asked for",
            f"early_stopping_patience={patience}, eval_every=0",
            "set `training.eval_every=100`, or `training.early_stopping_patience=null`",
        )
    if training.early_stopping_threshold and patience is None:
        clash(
            "training.early_stopping_threshold",
            "`training.early_stopping_threshold` has no effect where no run is ended early",
            f"early_stopping_threshold={training.early_stopping_threshold:g}, early_stopping_patience=null",
            "set `training.early_stopping_patience=3`, or `training.early_stopping_threshold=0`",
        )

    if checkpoint.keep_best and (
        not training.eval_every or not checkpoint.every or checkpoint.every % training.eval_every
    ):
        every = checkpoint.every or training.eval_every or 100
        clash(
            "checkpoint.keep_best",
            "the best checkpoint is found by its held-out loss, and not every step that is saved is evaluated",
            f"checkpoint.every={checkpoint.every}, training.eval_every={training.eval_every}",
            f"set `checkpoint.every={every} training.eval_every={every}`, or `checkpoint.keep_best=false`",
        )

    _of_sizes(recipe, clash)
    ranks = math.prod((p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp_x, p.tp_y))
    if not p.auto and p.world_size not in (None, ranks):
        clash(
            "parallel.world_size",
            "the degrees do not multiply to the number of ranks that is asked for",
            f"degrees multiply to {ranks}, world_size={p.world_size}",
            f"set `parallel.world_size={ranks}`, or `parallel.auto=true` to let the planner fill the rest",
        )
    if p.zero is not None and p.pp > 1:
        clash(
            "parallel.zero",
            "pipeline stages reduce gradients once per step in any case; `zero: 1` is a choice without them",
            f"zero={p.zero}, pp={p.pp}",
            "set `parallel.zero=null` and `parallel.reshard_after_forward=false`",
        )

    layers = training.recompute_layers
    if layers is not None and training.recompute != "full":
        clash(
            "training.recompute_layers",
            "`training.recompute_layers` says how many layers are redone, and none is",
            f"recompute_layers={layers}, recompute={training.recompute}",
            "set `training.recompute=full`, or `training.recompute_layers=null`",
        )
    elif layers is not None and p.auto:
        clash(
            "training.recompute_layers",
            "with `parallel: auto` the planner says how many layers are redone",
            f"recompute_layers={layers}, parallel=auto",
            "set `training.recompute_layers=null`, or the degrees",
        )

    if offload.budget is not None and offload.max_slowdown is not None:
        clash(
            "offload.max_slowdown",
            "offload has two goals: least time under a budget, or least memory under a slowdown",
            f"budget={offload.budget}, max_slowdown={offload.max_slowdown}",
            "set `offload.max_slowdown=null`, or `offload.budget=null`",
        )
    changed = sorted(offload.model_dump(exclude_defaults=True))
    if changed and not offload.on:
        clash(
            f"offload.{changed[0]}",
            f"`offload.{changed[0]}` has no effect, because offload has no goal and is off",
            "budget=null, max_slowdown=null",
            "set `offload.budget=auto`, or `offload.max_slowdown=0.02`",
        )
    if offload.on and offload.flash is not None and offload.flash_dir is None:
        clash(
            "offload.flash",
            "`offload.flash` limits files that no directory is given for",
            f"flash={offload.flash}, flash_dir=null",
            "set `offload.flash_dir=/scratch`, or `offload.flash=null`",
        )
    if offload.on and training.dtype == "float16":
        clash(
            "training.dtype",
            "the loss scale of float16 changes between steps, and a planned step runs as it was recorded",
            "training.dtype=float16 with offload",
            "set `training.dtype=bfloat16`, or `offload.budget=null`",
        )
    leaves_out = training.on_nonfinite == "skip" or training.skip_grad_norm is not None
    if offload.on and leaves_out:
        key = "on_nonfinite" if training.on_nonfinite == "skip" else "skip_grad_norm"
        clash(
            f"training.{key}",
            "a planned step may have updated parameters before it knows the norm of its gradient",
            f"{key}={getattr(training, key)} with offload",
            "set `training.on_nonfinite=stop training.skip_grad_norm=null`, or `offload.budget=null`",
        )
    if offload.on and training.compile:
        clash(
            "training.compile",
            "a compiled layer chooses its own order and buffers, so its memory cannot be planned",
            "training.compile=true with offload",
            "set `training.compile=false`, or `offload.budget=null`",
        )

    if checkpoint.from_dir is not None and checkpoint.resume == "never":
        clash(
            "checkpoint.from_dir",
            "`checkpoint.from_dir` names checkpoints that `checkpoint.resume: never` forbids to read",
            f"from_dir={checkpoint.from_dir}, resume=never",
            "set `checkpoint.resume=must`, or `checkpoint.from_dir=null`",
        )
    _of_launch(recipe, clash)
    return found


def _of_sizes(recipe: Recipe, clash: Callable[..., None]) -> None:
    """Products of counts that are each allowed: ranks, and sequences of a step."""
    training, p = recipe.training, recipe.parallel
    ranks = math.prod((p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp_x, p.tp_y))
    launched = recipe.launch.nnodes * (recipe.launch.nproc_per_node or 1)
    if max(ranks, launched) > MOST_RANKS:
        clash(
            "launch.nproc_per_node" if launched > ranks else "parallel",
            "the run has more ranks than any machine",
            f"{max(ranks, launched)} ranks",
            "parallel.dp_shard=1" if ranks > launched else "launch.nnodes=1",
            f"at most {MOST_RANKS}",
        )
    sequences = (training.microbatch or 1) * (training.accumulation_steps or 1)
    sequences *= p.dp_replicate * p.dp_shard
    key = "training.accumulation_steps"
    if training.tokens_per_step is not None:
        key, sequences = "training.tokens_per_step", training.tokens_per_step // recipe.data.seq_len
    if sequences > MOST_SEQUENCES:
        clash(
            key,
            "a step has more sequences than are kept in memory",
            f"{sequences} sequences",
            f"{key}={recipe.data.seq_len if key.endswith('step') else 1}",
            f"at most {MOST_SEQUENCES}",
        )


def _of_launch(recipe: Recipe, clash: Callable[..., None]) -> None:
    """What several machines need."""
    launch, p = recipe.launch, recipe.parallel
    if launch.nnodes > 1 and launch.launcher == "local":
        clash(
            "launch.nnodes",
            "this process starts ranks on its own machine only",
            f"nnodes={launch.nnodes}, launcher=local",
            "set `launch.launcher=torchrun`, or `launch.nnodes=1`",
            "torchrun, slurm, ray, kubernetes",
        )
    if launch.launcher == "kubernetes" and launch.image is None:
        clash(
            "launch.image",
            "pods of Kubernetes run a container image, and none is named",
            "launcher=kubernetes, image=null",
            "set `launch.image=REGISTRY/hyper-parallel:TAG`, built from the Dockerfile of this project",
        )
    if launch.nnodes > 1 and launch.launcher == "torchrun" and launch.rdzv_endpoint is None:
        clash(
            "launch.rdzv_endpoint",
            "the agents of torchrun on several machines have to know where they meet",
            f"nnodes={launch.nnodes}, rdzv_endpoint=null",
            "set `launch.rdzv_endpoint=HOST:29500`, with the first machine as HOST",
        )
    if launch.nnodes > 1 and p.auto and launch.nproc_per_node is None and p.world_size is None:
        clash(
            "launch.nproc_per_node",
            "the planner has to know how many ranks the machines hold",
            f"nnodes={launch.nnodes}, nproc_per_node=null, parallel=auto",
            "set `launch.nproc_per_node=8`",
        )
