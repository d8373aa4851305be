"""Checks across sections of a recipe: values that are each allowed but cannot hold together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from hyper_parallel.config._sections import Recipe
from hyper_parallel.errors import Contradiction, DegreesMismatch, HyperParallelError


def cross_section(recipe: Recipe, where: Callable[[str], str]) -> list[HyperParallelError]:
    """Every contradiction in a recipe, in the order of its sections.

    Args:
        recipe: A recipe whose sections are each valid.
        where: Origin of a dotted key.
    """
    return [
        *_conversations(recipe, where),
        *_schedule(recipe, where),
        *_degrees(recipe, where),
        *_zero(recipe, where),
        *_recompute(recipe, where),
        *_offload(recipe, where),
        *_resume(recipe, where),
    ]


def _conversations(recipe: Recipe, where: Callable[[str], str]) -> Iterator[HyperParallelError]:
    data = recipe.data
    if recipe.stage != "sft":
        return
    if data.format not in ("auto", "alpaca", "sharegpt"):
        yield Contradiction(
            "`stage: sft` needs conversations, and the format of the data holds plain text",
            where=where("data.format"),
            got=f"stage=sft, data.format={data.format}",
            allowed="auto, alpaca, sharegpt",
            hint="set `data.format=auto`, or `stage=pt` to learn every token",
        )
    elif data.source == "python-stdlib":
        yield Contradiction(
            "`stage: sft` needs conversations, and the source text of the standard library has none",
            where=where("data.source"),
            got="stage=sft, data.source=python-stdlib",
            allowed="a file or directory of conversations",
            hint="set `data.source=conversations.jsonl`, or `stage=pt`",
        )


def _schedule(recipe: Recipe, where: Callable[[str], str]) -> Iterator[HyperParallelError]:
    training = recipe.training
    decay = training.decay_steps
    if training.warmup_steps > training.steps:
        yield Contradiction(
            "the warm-up is longer than the run, so the peak learning rate is never reached",
            where=where("training.warmup_steps"),
            got=f"warmup_steps={training.warmup_steps}, steps={training.steps}",
            allowed=f"0..{training.steps}",
            hint=f"set `training.warmup_steps={training.steps // 10}`",
        )
    elif decay is not None and training.lr_schedule != "wsd":
        yield Contradiction(
            "`training.decay_steps` belongs to the schedule wsd and would have no effect",
            where=where("training.decay_steps"),
            got=f"decay_steps={decay}, lr_schedule={training.lr_schedule}",
            hint="set `training.lr_schedule=wsd`, or `training.decay_steps=null`",
        )
    elif decay is not None and training.warmup_steps + decay > training.steps:
        longest = training.steps - training.warmup_steps
        yield Contradiction(
            "warm-up and decay together are longer than the run",
            where=where("training.decay_steps"),
            got=f"warmup_steps={training.warmup_steps}, decay_steps={decay}, steps={training.steps}",
            allowed=f"0..{longest}",
            hint=f"set `training.decay_steps={longest}`",
        )
    if training.eval_every and recipe.data.holdout == 0:
        yield Contradiction(
            "evaluation is asked for and no text is held out for it",
            where=where("training.eval_every"),
            got=f"eval_every={training.eval_every}, data.holdout=0",
            hint="set `data.holdout=0.02`, or `training.eval_every=0`",
        )


def _degrees(recipe: Recipe, where: Callable[[str], str]) -> Iterator[HyperParallelError]:
    p = recipe.parallel
    ranks = math.prod((p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp_x, p.tp_y))
    if p.auto or p.world_size is None or p.world_size == ranks:
        return
    yield DegreesMismatch(
        "the degrees do not multiply to the number of ranks that is asked for",
        where=where("parallel.world_size"),
        got=f"degrees multiply to {ranks}, world_size={p.world_size}",
        hint=f"set `parallel.world_size={ranks}`, or `parallel.auto=true` to let the planner fill the rest",
    )


def _zero(recipe: Recipe, where: Callable[[str], str]) -> Iterator[HyperParallelError]:
    p = recipe.parallel
    if p.zero is None or p.pp == 1:
        return
    yield Contradiction(
        "pipeline stages reduce gradients once per step in any case; `zero: 1` is a choice without them",
        where=where("parallel.zero"),
        got=f"zero={p.zero}, pp={p.pp}",
        hint="set `parallel.zero=null` and `parallel.reshard_after_forward=false`",
    )


def _recompute(recipe: Recipe, where: Callable[[str], str]) -> Iterator[HyperParallelError]:
    layers, kind = recipe.training.recompute_layers, recipe.training.recompute
    if layers is None:
        return
    if kind != "full":
        yield Contradiction(
            "`training.recompute_layers` says how many layers are redone, and none is",
            where=where("training.recompute_layers"),
            got=f"recompute_layers={layers}, recompute={kind}",
            hint="set `training.recompute=full`, or `training.recompute_layers=null`",
        )
    elif recipe.parallel.auto:
        yield Contradiction(
            "with `parallel: auto` the planner says how many layers are redone",
            where=where("training.recompute_layers"),
            got=f"recompute_layers={layers}, parallel=auto",
            hint="set `training.recompute_layers=null`, or the degrees",
        )


def _offload(recipe: Recipe, where: Callable[[str], str]) -> Iterator[HyperParallelError]:
    offload = recipe.offload
    given = sorted(offload.model_fields_set - {"budget", "max_slowdown"})
    if offload.budget is not None and offload.max_slowdown is not None:
        yield Contradiction(
            "offload has two goals: least time under a budget, or least memory under a slowdown",
            where=where("offload.max_slowdown"),
            got=f"budget={offload.budget}, max_slowdown={offload.max_slowdown}",
            hint="set `offload.max_slowdown=null`, or `offload.budget=null`",
        )
    if not offload.on:
        changed = [k for k in given if getattr(offload, k) != type(offload).model_fields[k].default]
        if changed:
            yield Contradiction(
                f"`offload.{changed[0]}` has no effect, because offload has no goal and is off",
                where=where(f"offload.{changed[0]}"),
                got="budget=null, max_slowdown=null",
                hint="set `offload.budget=auto`, or `offload.max_slowdown=0.02`",
            )
        return
    if offload.flash is not None and offload.flash_dir is None:
        yield Contradiction(
            "`offload.flash` limits files that no directory is given for",
            where=where("offload.flash"),
            got=f"flash={offload.flash}, flash_dir=null",
            hint="set `offload.flash_dir=/scratch`, or `offload.flash=null`",
        )
    if recipe.training.compile:
        yield Contradiction(
            "a compiled layer chooses its own order and buffers, so its memory cannot be planned",
            where=where("training.compile"),
            got="training.compile=true with offload",
            hint="set `training.compile=false`, or `offload.budget=null`",
        )


def _resume(recipe: Recipe, where: Callable[[str], str]) -> Iterator[HyperParallelError]:
    checkpoint = recipe.checkpoint
    if checkpoint.from_dir is None or checkpoint.resume != "never":
        return
    yield Contradiction(
        "`checkpoint.from_dir` names checkpoints that `checkpoint.resume: never` forbids to read",
        where=where("checkpoint.from_dir"),
        got=f"from_dir={checkpoint.from_dir}, resume=never",
        hint="set `checkpoint.resume=must`, or `checkpoint.from_dir=null`",
    )
