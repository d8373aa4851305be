"""Checks across sections of a recipe: values that are each allowed but contradict each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from hyper_parallel.config._preference_checks import check_preference_stages
from hyper_parallel.config._preference_sections import PREFERENCE_STAGES
from hyper_parallel.config._recipe import Recipe
from hyper_parallel.config._sections import Submodels
from hyper_parallel.config._values import MOST_RANKS, MOST_SEQUENCES
from hyper_parallel.config.schedules import check_schedule
from hyper_parallel.errors import Contradiction, DegreesMismatch, HyperParallelError

_Conflict = Callable[..., None]
"""Recorder of a contradiction: key, problem, values, hint and, optionally, allowed values."""


def check_recipe(recipe: Recipe, where: Callable[[str], str]) -> list[HyperParallelError]:
    """Return every contradiction in a recipe, in the order of its sections.

    Args:
        recipe: Recipe with valid sections.
        where: Returns the origin of a dotted key.
    """
    errors: list[HyperParallelError] = []

    def conflict(key: str, problem: str, got: str, hint: str, allowed: str | None = None) -> None:
        error = DegreesMismatch if key == "parallel.world_size" else Contradiction
        errors.append(error(problem, where=where(key), got=got, allowed=allowed, hint=hint))

    for check in _CHECKS:
        check(recipe, conflict)
    return errors


def _check_stage(recipe: Recipe, conflict: _Conflict) -> None:
    """Check the stage against the data, and settings of other stages."""
    data = recipe.data
    if recipe.stage == "sft" and data.format in ("text", "jsonl", "parquet", "csv"):
        conflict(
            "data.format",
            "`stage: sft` needs conversations, but the data format contains plain text",
            f"stage=sft, data.format={data.format}",
            "set `data.format=auto`, or `stage=pt` to learn every token",
            "auto, alpaca, sharegpt, prompt_completion",
        )
    elif recipe.stage == "sft" and data.source == "python-stdlib":
        conflict(
            "data.source",
            "`stage: sft` needs conversations, but the standard library's source text has none",
            "stage=sft, data.source=python-stdlib",
            "set `data.source=conversations.jsonl`, or `stage=pt`",
            "a file or directory of conversations",
        )

    if recipe.stage in PREFERENCE_STAGES:
        check_preference_stages(recipe, conflict)
    for name in PREFERENCE_STAGES:
        changed = sorted(getattr(recipe, name).model_dump(exclude_defaults=True))
        if changed and recipe.stage != name:
            conflict(
                f"{name}.{changed[0]}",
                f"`{name}.{changed[0]}` has no effect in another stage",
                f"stage={recipe.stage}",
                f"set `stage={name}`, or leave out `{name}.{changed[0]}`",
            )


def _check_data(recipe: Recipe, conflict: _Conflict) -> None:
    """Check packing, streaming, held-out data and masks."""
    data, training = recipe.data, recipe.training
    for key, entries in (("columns", data.columns), ("roles", data.roles)):
        names = [*entries.values()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            given = [entry for entry, name in entries.items() if name == twice]
            conflict(
                f"data.{key}",
                f"two entries of `data.{key}` have one name, and a name in the data has one meaning",
                ", ".join(f"{entry}={twice}" for entry in given),
                f"set `data.{key}.{given[-1]}=NAME`",
            )
    if not data.packing and data.mask_documents is not None:
        conflict(
            "data.mask_documents",
            "document masks need packing: without it, a sequence contains one document",
            f"packing=false, mask_documents={str(data.mask_documents).lower()}",
            "set `data.mask_documents=null`, or `data.packing=true`",
        )

    if data.streaming and not isinstance(data.source, str):
        conflict(
            "data.streaming",
            "streaming supports one source only",
            f"{len(data.source)} sources, streaming=true",
            "set `data.streaming=false`, or one `data.source`",
        )
    if data.streaming and training.epochs is not None:
        conflict(
            "training.epochs",
            "the length of an epoch of streamed data is not known in advance",
            f"epochs={training.epochs:g}, data.streaming=true",
            "set `training.epochs=null` and `training.steps`, or `data.streaming=false`",
        )
    replacement = "data.streaming" if data.streaming else "data.validation"
    if (data.streaming or data.validation) and data.holdout:
        conflict(
            "data.holdout",
            f"with `{replacement}` no documents of the source are held out",
            f"holdout={data.holdout:g}, {replacement}={str(data.validation or True).lower()}",
            "set `data.holdout=0`",
        )
    if data.validation_split is not None and data.validation is None:
        conflict(
            "data.validation_split",
            "`data.validation_split` names a split, but no validation dataset is given",
            f"validation_split={data.validation_split}, validation=null",
            f"set `data.validation={data.source}`",
        )
    if recipe.offload.on and data.masks(recipe.stage):
        conflict(
            "data.mask_documents",
            "a memory plan replays one recorded step, but masks of packed documents differ between batches",
            "offload with data.packing=true",
            "set `data.packing=false`, or `data.mask_documents=false` to let documents see each other",
        )


def _check_balance(recipe: Recipe, conflict: _Conflict) -> None:
    """Check that records with costs are balanced."""
    data = recipe.data
    if data.balance == "cost" and (data.streaming or recipe.stage != "sft"):
        conflict(
            "data.balance",
            "a stream is read before the costs of its records are known"
            if data.streaming
            else "only conversations of `stage: sft` have images and audio to balance",
            f"balance=cost, {'streaming=true' if data.streaming else f'stage={recipe.stage}'}",
            "set `data.balance=auto`",
            "auto, none",
        )


def _check_compile(recipe: Recipe, conflict: _Conflict) -> None:
    """Check that the back end compiles in the requested form."""
    form = True if recipe.backend == "torch" else "graph-kernel"
    if recipe.training.compile not in (False, form):
        text = f"{form}".lower()
        conflict(
            "training.compile",
            f"the back end {recipe.backend} does not compile in this form",
            f"training.compile={recipe.training.compile}, backend={recipe.backend}".lower(),
            f"set `training.compile={text}`, or `training.compile=false`",
            f"false, {text}",
        )


def _check_overlap(recipe: Recipe, conflict: _Conflict) -> None:
    """Check overlap against the routing of experts and compiled layers."""
    overlap, capacity = recipe.overlap, recipe.moe.capacity_factor
    half_batches = "half-batch" in (overlap.tp, overlap.ep)
    if (half_batches or overlap.tp == "chunks") and recipe.training.compile:
        conflict(
            "training.compile",
            "a compiled layer cannot wait in its middle for collectives in flight",
            f"training.compile=true, overlap.tp={overlap.tp}, overlap.ep={overlap.ep}",
            "set `training.compile=false`, or `overlap=none`",
        )
    if overlap.ep == "chunks" and capacity is not None:
        conflict(
            "overlap.ep",
            "a capacity counts the rows of all tokens, so tokens cannot be exchanged in chunks",
            f"overlap.ep=chunks, moe.capacity_factor={capacity:g}",
            "set `overlap.ep=none`, or `moe.capacity_factor=null`",
        )
    elif half_batches and capacity is not None:
        conflict(
            "overlap",
            "a capacity counts the rows of all tokens, which half-batches do not see",
            f"overlap=half-batch, moe.capacity_factor={capacity:g}",
            "set `overlap=none`, or `moe.capacity_factor=null`",
        )


def _check_run_length(recipe: Recipe, conflict: _Conflict) -> None:
    """Check steps, epochs, warm-up and decay."""
    training = recipe.training
    steps, warmup, decay = training.steps, training.warmup_steps, training.decay_steps
    if training.epochs is not None:
        if "steps" in training.model_fields_set:
            conflict(
                "training.epochs",
                "epochs and steps both set the length of the run",
                f"epochs={training.epochs:g}, steps={steps}",
                "set `training.epochs=null`, or leave out `training.steps`",
            )
    elif warmup > steps:
        conflict(
            "training.warmup_steps",
            "the warm-up is longer than the run, so the peak learning rate is never reached",
            f"warmup_steps={warmup}, steps={steps}",
            f"set `training.warmup_steps={steps // 10}`",
            f"0..{steps}",
        )
    elif decay is not None and training.lr_schedule not in ("wsd", "warmup_stable_decay"):
        conflict(
            "training.decay_steps",
            "`training.decay_steps` applies to the schedule wsd and has no effect on others",
            f"decay_steps={decay}, lr_schedule={training.lr_schedule}",
            "set `training.lr_schedule=wsd`, or `training.decay_steps=null`",
        )
    elif decay is not None and warmup + decay > steps:
        conflict(
            "training.decay_steps",
            "warm-up and decay together are longer than the run",
            f"warmup_steps={warmup}, decay_steps={decay}, steps={steps}",
            f"set `training.decay_steps={steps - warmup}`",
            f"0..{steps - warmup}",
        )


def _check_schedule(recipe: Recipe, conflict: _Conflict) -> None:
    """Check the arguments of the learning-rate schedule."""
    check_schedule(recipe.training, conflict)


def _check_run_control(recipe: Recipe, conflict: _Conflict) -> None:
    """Check elastic restarts, comparisons of ranks and the profile."""
    training, offload = recipe.training, recipe.offload
    if training.elastic and training.tokens_per_step is None:
        conflict(
            "training.elastic",
            "an elastic run needs a fixed number of tokens per step for any number of ranks",
            "elastic=true, tokens_per_step=null",
            f"set `training.tokens_per_step={256 * recipe.data.seq_len}`, or `training.elastic=false`",
        )
    if training.check_ranks_every and (offload.on or not training.deterministic):
        change = "offload.budget=null" if offload.on else "training.deterministic=true"
        conflict(
            "training.check_ranks_every",
            "bitwise comparison of ranks needs deterministic kernels and does not work with a memory plan",
            f"deterministic={str(training.deterministic).lower()}, offload={'on' if offload.on else 'off'}",
            f"set `{change}`, or `training.check_ranks_every=0`",
        )
    window, steps = training.profile, training.steps
    if window is not None and window.start + window.steps - 1 > steps:
        conflict(
            "training.profile",
            "the steps to profile end after the last step of the run",
            f"start={window.start}, steps={window.steps} of {steps}",
            f"set `training.profile.start={max(1, steps - window.steps + 1)}`",
        )


def _check_evaluation(recipe: Recipe, conflict: _Conflict) -> None:
    """Check that evaluation has held-out data."""
    data, training = recipe.data, recipe.training
    if training.eval_every and not data.validation and (data.holdout == 0 or data.streaming):
        conflict(
            "training.eval_every",
            "evaluation needs held-out data, but none is held out",
            f"eval_every={training.eval_every}, data.holdout={0 if not data.streaming else 'of a stream'}",
            f"set `data.{'validation=FILE' if data.streaming else 'holdout=0.02'}`, or `training.eval_every=0`",
        )


def _check_embedding_noise(recipe: Recipe, conflict: _Conflict) -> None:
    """Check embedding noise against memory plans and rollouts."""
    training, offload = recipe.training, recipe.offload
    noise = training.neftune_noise_alpha
    if noise is not None and (offload.on or recipe.stage == "grpo"):
        conflict(
            "training.neftune_noise_alpha",
            "a memory plan replays one recorded step, but noise differs between steps"
            if offload.on
            else "completions are sampled without noise, so noise in training would change their log-probabilities",
            f"neftune_noise_alpha={noise:g}, {'offload' if offload.on else 'stage=grpo'}",
            "set `training.neftune_noise_alpha=null`",
        )


def _check_early_stopping(recipe: Recipe, conflict: _Conflict) -> None:
    """Check early stopping and the best checkpoint against evaluations."""
    training, checkpoint = recipe.training, recipe.checkpoint
    patience = training.early_stopping_patience
    if patience is not None and not training.eval_every:
        conflict(
            "training.early_stopping_patience",
            "early stopping needs evaluations, but `training.eval_every` is 0",
            f"early_stopping_patience={patience}, eval_every=0",
            "set `training.eval_every=100`, or `training.early_stopping_patience=null`",
        )
    if training.early_stopping_threshold and patience is None:
        conflict(
            "training.early_stopping_threshold",
            "`training.early_stopping_threshold` has no effect without early stopping",
            f"early_stopping_threshold={training.early_stopping_threshold:g}, early_stopping_patience=null",
            "set `training.early_stopping_patience=3`, or `training.early_stopping_threshold=0`",
        )

    if checkpoint.keep_best and (
        not training.eval_every or not checkpoint.every or checkpoint.every % training.eval_every
    ):
        every = checkpoint.every or training.eval_every or 100
        conflict(
            "checkpoint.keep_best",
            "the best checkpoint is chosen by its held-out loss, but not every saved step is evaluated",
            f"checkpoint.every={checkpoint.every}, training.eval_every={training.eval_every}",
            f"set `checkpoint.every={every} training.eval_every={every}`, or `checkpoint.keep_best=false`",
        )


def _check_sizes(recipe: Recipe, conflict: _Conflict) -> None:
    """Check products of counts that are each allowed: ranks, and sequences of a step."""
    training, p = recipe.training, recipe.parallel
    ranks = math.prod((p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp_x, p.tp_y))
    launched = recipe.launch.nnodes * (recipe.launch.nproc_per_node or 1)
    if max(ranks, launched) > MOST_RANKS:
        conflict(
            "launch.nproc_per_node" if launched > ranks else "parallel",
            "the run has too many ranks",
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
        conflict(
            key,
            "a step has too many sequences",
            f"{sequences} sequences",
            f"{key}={recipe.data.seq_len if key.endswith('step') else 1}",
            f"at most {MOST_SEQUENCES}",
        )


def _check_layout(recipe: Recipe, conflict: _Conflict) -> None:
    """Check the number of ranks and ZeRO-1."""
    p = recipe.parallel
    ranks = math.prod((p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp_x, p.tp_y))
    if not p.is_planned and p.world_size not in (None, ranks):
        conflict(
            "parallel.world_size",
            "the degrees do not multiply to the requested number of ranks",
            f"degrees multiply to {ranks}, world_size={p.world_size}",
            f"set `parallel.world_size={ranks}`, or `parallel.auto=true` to let the planner fill the rest",
        )
    if p.zero is not None and p.pp > 1:
        conflict(
            "parallel.zero",
            "`zero: 1` applies only without pipeline stages, which reduce gradients once per step in any case",
            f"zero={p.zero}, pp={p.pp}",
            "set `parallel.zero=null` and `parallel.reshard_after_forward=false`",
        )


def _check_recompute(recipe: Recipe, conflict: _Conflict) -> None:
    """Check the number of recomputed layers."""
    training, p = recipe.training, recipe.parallel
    layers = training.recompute_layers
    if layers is not None and training.recompute != "full":
        conflict(
            "training.recompute_layers",
            "`training.recompute_layers` has no effect, because no layer is recomputed",
            f"recompute_layers={layers}, recompute={training.recompute}",
            "set `training.recompute=full`, or `training.recompute_layers=null`",
        )
    elif layers is not None and p.auto:
        conflict(
            "training.recompute_layers",
            "with `parallel: auto` the planner chooses the number of recomputed layers",
            f"recompute_layers={layers}, parallel=auto",
            "set `training.recompute_layers=null`, or the degrees",
        )


def _check_offload(recipe: Recipe, conflict: _Conflict) -> None:
    """Check the goal of offload and features that a memory plan excludes."""
    offload, training = recipe.offload, recipe.training
    if offload.budget is not None and offload.max_slowdown is not None:
        conflict(
            "offload.max_slowdown",
            "offload accepts one goal: least time within a budget, or least memory within a slowdown",
            f"budget={offload.budget}, max_slowdown={offload.max_slowdown}",
            "set `offload.max_slowdown=null`, or `offload.budget=null`",
        )
    changed = sorted(offload.model_dump(exclude_defaults=True))
    if changed and not offload.on:
        conflict(
            f"offload.{changed[0]}",
            f"`offload.{changed[0]}` has no effect, because offload has no goal and is off",
            "budget=null, max_slowdown=null",
            "set `offload.budget=auto`, or `offload.max_slowdown=0.02`",
        )
    if offload.on and offload.flash is not None and offload.flash_dir is None:
        conflict(
            "offload.flash",
            "`offload.flash` limits files, but no directory for them is given",
            f"flash={offload.flash}, flash_dir=null",
            "set `offload.flash_dir=/scratch`, or `offload.flash=null`",
        )
    if offload.on and training.dtype == "float16":
        conflict(
            "training.dtype",
            "the loss scale of float16 changes between steps, but a planned step runs as recorded",
            "training.dtype=float16 with offload",
            "set `training.dtype=bfloat16`, or `offload.budget=null`",
        )
    skips_steps = training.on_nonfinite == "skip" or training.skip_grad_norm is not None
    if offload.on and skips_steps:
        key = "on_nonfinite" if training.on_nonfinite == "skip" else "skip_grad_norm"
        conflict(
            f"training.{key}",
            "a planned step may update parameters before the gradient norm is known, so it cannot be skipped",
            f"{key}={getattr(training, key)} with offload",
            "set `training.on_nonfinite=stop training.skip_grad_norm=null`, or `offload.budget=null`",
        )
    if offload.on and training.compile:
        conflict(
            "training.compile",
            "a compiled layer chooses its own operator order and buffers, so its memory cannot be planned",
            "training.compile=true with offload",
            "set `training.compile=false`, or `offload.budget=null`",
        )


def _check_from_dir(recipe: Recipe, conflict: _Conflict) -> None:
    """Check that the checkpoints to start from may be read."""
    checkpoint = recipe.checkpoint
    if checkpoint.from_dir is not None and checkpoint.resume == "never":
        conflict(
            "checkpoint.from_dir",
            "`checkpoint.from_dir` has no effect, because `checkpoint.resume: never` reads no checkpoints",
            f"from_dir={checkpoint.from_dir}, resume=never",
            "set `checkpoint.resume=must`, or `checkpoint.from_dir=null`",
        )


def _check_launch(recipe: Recipe, conflict: _Conflict) -> None:
    """Check the settings of launchers and of several machines."""
    launch, p = recipe.launch, recipe.parallel
    if launch.nnodes > 1 and launch.launcher == "local":
        conflict(
            "launch.nnodes",
            "the local launcher starts ranks only on this machine",
            f"nnodes={launch.nnodes}, launcher=local",
            "set `launch.launcher=torchrun`, or `launch.nnodes=1`",
            "torchrun, slurm, ray, kubernetes",
        )
    if launch.launcher == "kubernetes" and launch.image is None:
        conflict(
            "launch.image",
            "Kubernetes pods need a container image, but none is named",
            "launcher=kubernetes, image=null",
            "set `launch.image=REGISTRY/hyper-parallel:TAG`, built from the Dockerfile of this project",
        )
    if launch.nnodes > 1 and launch.launcher == "torchrun" and launch.rdzv_endpoint is None:
        conflict(
            "launch.rdzv_endpoint",
            "torchrun on several machines needs a rendezvous endpoint",
            f"nnodes={launch.nnodes}, rdzv_endpoint=null",
            "set `launch.rdzv_endpoint=HOST:29500`, with the first machine as HOST",
        )
    if (
        launch.nnodes > 1
        and p.is_planned
        and launch.nproc_per_node is None
        and p.world_size is None
    ):
        conflict(
            "launch.nproc_per_node",
            "the planner needs the number of ranks per machine",
            f"nnodes={launch.nnodes}, nproc_per_node=null, parallel=auto",
            "set `launch.nproc_per_node=8`",
        )


def _check_submodels(recipe: Recipe, conflict: _Conflict) -> None:
    """Check the parts of a multimodal model, and settings that need one layout for the whole model."""
    p, training, key = recipe.parallel, recipe.training, "parallel.submodels"
    if p.submodels is None:
        return
    is_auto = p.submodels.auto
    if not is_auto and len(p.submodels.towers) != 1:
        conflict(
            key,
            "a model is divided into its language part and one encoder",
            f"language{''.join(f', {name}' for name in p.submodels.towers)}",
            "set `parallel.submodels.vision.dp_shard=1`, or `parallel.submodels=null`",
            "language and vision, or language and audio",
        )
    _check_members(p.submodels, conflict)
    language = p.submodels.language
    for axis in ("dp_replicate", "dp_shard", "tp_x", "tp_y", "pp", "cp", "ep"):
        degree = getattr(language, axis, 1)
        if getattr(p, axis) != degree:
            conflict(
                f"parallel.{axis}",
                "with sub-models, `parallel.submodels.language` gives the degrees",
                f"parallel.{axis}={getattr(p, axis)}, parallel.submodels.language: {axis}={degree}",
                f"set `parallel.{axis}={degree}`",
            )
    excluded = {
        "parallel.auto=false": p.auto,
        "parallel.world_size=null": not is_auto and p.world_size is not None,
        "stage=sft": recipe.stage != "sft",
        "backend=torch": recipe.backend != "torch",
        "lora=null": recipe.lora is not None,
        "overlap=none": recipe.overlap.tp != "none" or recipe.overlap.ep != "none",
        "offload.budget=null offload.max_slowdown=null": recipe.offload.on,
        "training.compile=false": training.compile,
        "training.elastic=false": training.elastic,
        "training.check_ranks_every=0": training.check_ranks_every > 0,
        "training.neftune_noise_alpha=null": training.neftune_noise_alpha is not None,
        "checkpoint.snapshot_every=0": recipe.checkpoint.snapshot_every > 0,
    }
    for hint, given in excluded.items():
        if given:
            name = hint.partition("=")[0]
            conflict(
                name,
                f"`{name}` needs one layout for the whole model",
                "parallel.submodels",
                f"set `{hint}`, or `parallel.submodels=null`",
            )


def _check_members(submodels: Submodels, conflict: _Conflict) -> None:
    """Check that every part has as many ranks as its degrees multiply to, and that the parts use all ranks."""
    for name, part in {"language": submodels.language, **submodels.towers}.items():
        if part.ranks is not None and len({*part.ranks}) != part.num_ranks:
            conflict(
                f"parallel.submodels.{name}.ranks",
                f"the degrees of `{name}` do not multiply to its number of ranks",
                f"{part.num_ranks} ranks, {name}.ranks={[*part.ranks]}",
                f"set `parallel.submodels.{name}.ranks=null`",
                f"{part.num_ranks} different ranks",
            )
            return
    used = {rank for ranks in submodels.members.values() for rank in ranks}
    language = submodels.language
    alone = [language.dp_replicate, *(p.dp_shard for p in (language, *submodels.towers.values()))]
    shared = len(used) < sum(map(len, submodels.members.values()))
    if language.pp > 1 and shared and max(alone) > 1:
        conflict(
            "parallel.submodels.language.pp",
            "with shared ranks, pipeline stages need an encoder that is not sharded, and no data parallelism",
            f"pp={language.pp}, {submodels.members}",
            "set `parallel.submodels.language.pp=1`",
            "dp_shard=1 of the encoder, dp_replicate=1 and dp_shard=1 of `language`",
        )
    if missing := sorted({*range(max(used) + 1)} - used):
        conflict(
            "parallel.submodels",
            "a rank has no part of the model",
            f"rank {missing[0]} of {max(used) + 1}",
            " ".join(f"set `parallel.submodels.{name}.ranks=null`" for name in submodels.members),
            "ranks from 0, each with at least one part",
        )


_CHECKS: Final = (
    _check_stage,
    _check_data,
    _check_balance,
    _check_compile,
    _check_overlap,
    _check_run_length,
    _check_schedule,
    _check_run_control,
    _check_evaluation,
    _check_embedding_noise,
    _check_early_stopping,
    _check_sizes,
    _check_layout,
    _check_submodels,
    _check_recompute,
    _check_offload,
    _check_from_dir,
    _check_launch,
)
"""Checks in the order of the reported contradictions."""
