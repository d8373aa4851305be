"""A run before any rank: everything that can be refused is refused here, in one process."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hyper_parallel.config import LoadedRecipe, Recipe, recipe_to_yaml
from hyper_parallel.errors import CheckpointCorrupt, Contradiction
from hyper_parallel.ir import Plan
from hyper_parallel.trainer._files import check_writable, write_text, write_timeline
from hyper_parallel.trainer.checkpoints._manifest import steps
from hyper_parallel.trainer.data import Batches, PackedData

MOST_SIMULATED: Final = 4096
"""Microbatches of a step, over all stages, whose simulated timeline is still written."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run, ready to start; every rank gets the same one.

    Attributes:
        recipe: The resolved recipe.
        plan: The plan, for exactly `plan.strategy.world_size` ranks.
        packed: The prepared data.
        output_dir: Where everything is written.
    """

    recipe: Recipe
    plan: Plan
    packed: PackedData
    output_dir: Path

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints are written."""
        return self.output_dir / "checkpoints"

    @property
    def export_dir(self) -> Path:
        """Where the Hugging Face directory is written."""
        return self.output_dir / "export"

    @property
    def resume_dir(self) -> Path:
        """Where checkpoints are looked for."""
        source = self.recipe.checkpoint.from_dir
        return Path(source) / "checkpoints" if source else self.checkpoint_dir

    def train_batches(self) -> Batches:
        """The order of the training sequences."""
        work = self.plan.workload
        return Batches(
            self.packed.train,
            sequences_per_step=(work.tokens_per_step or 0) // work.seq_len,
            seed=self.recipe.training.seed,
            shuffle=self.recipe.data.shuffle,
            fingerprint=self.packed.fingerprint,
        )

    def holdout_batches(self) -> Batches | None:
        """At most `eval_tokens` held-out tokens as one step; None when nothing is held out."""
        held_out = self.packed.holdout
        tokens = self.recipe.training.eval_tokens
        count = min(len(held_out), max(1, tokens // self.recipe.data.seq_len))
        if count == 0:
            return None
        unit = self.plan.strategy.dp * (self.plan.workload.microbatch or 1)
        size = math.ceil(count / unit) * unit
        return Batches(held_out, sequences_per_step=size, shuffle=False, tail="pad", limit=count)


def under_torchrun() -> bool:
    """Whether another launcher has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_ranks() -> int | None:
    """Ranks that another launcher has started; None when this process starts them."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def prepare_job(loaded: LoadedRecipe, *, progress: bool = True, write: bool = True) -> Job:
    """Check the recipe, prepare its data and plan it.

    Args:
        loaded: The recipe with the origins of its values.
        progress: Show progress bars of the data preparation on standard error.
        write: Create the output directory and write `config.yaml` and `plan.json` there.

    Raises:
        HyperParallelError: Anything a user can have got wrong; see docs/train.md.
    """
    from hyper_parallel.backends.torch import check_routing
    from hyper_parallel.planner import plan_recipe
    from hyper_parallel.trainer.data import prepare
    from hyper_parallel.trainer.engine._model import (
        build_model,
        check_parameters,
        read_spec,
        routing_of,
        weights_directory,
    )
    from hyper_parallel.trainer.engine._offload_machine import check_offload

    recipe = loaded.recipe
    output_dir = Path(recipe.output_dir)
    check_writable(output_dir, "output_dir")
    if recipe.offload.flash_dir is not None:
        check_writable(Path(recipe.offload.flash_dir), "offload.flash_dir")
    if recipe.sample_prompt is not None and not recipe.checkpoint.export:
        raise Contradiction(
            "the sample is written by the exported model, and the recipe exports none",
            where=loaded.where("sample_prompt"),
            got=f"sample_prompt={recipe.sample_prompt!r}, checkpoint.export=false",
            hint="checkpoint.export=true",
        )
    _check_resume(loaded)
    spec = read_spec(recipe.model.path, loaded.where("model.path"))
    plan = plan_recipe(recipe, started_ranks(), loaded.where, spec)
    weights_directory(recipe)
    model = build_model(recipe)
    check_offload(recipe, plan, model, loaded.where)
    check_parameters(model, plan, loaded.where("model.path"))
    check_routing(model, routing_of(recipe), loaded.where("moe"))
    packed = prepare(
        recipe.data,
        stage=recipe.stage,
        model_path=recipe.model.path,
        seed=recipe.training.seed,
        progress=progress,
        vocab_limit=len(model.get_input_embeddings().weight),
    )
    job = Job(recipe, plan, packed, output_dir)
    job.train_batches(), job.holdout_batches()
    if write:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_text(output_dir / "config.yaml", recipe_to_yaml(recipe))
        write_text(output_dir / "plan.json", plan.to_json() + "\n")
        _write_prediction(plan, output_dir / "predicted_timeline.json")
    return job


def _write_prediction(plan: Plan, path: Path) -> None:
    """The simulated step of the plan, which a report shows beside the measured one; not of very long steps."""
    from hyper_parallel.planner import simulate_plan

    path.unlink(missing_ok=True)
    if len(plan.stages) * (plan.workload.accumulation_steps or 1) <= MOST_SIMULATED:
        write_timeline(simulate_plan(plan), path)


def _check_resume(loaded: LoadedRecipe) -> None:
    """Raise when the recipe insists on a checkpoint and none was ever published."""
    choice = loaded.recipe.checkpoint
    directory = Path(choice.from_dir or loaded.recipe.output_dir) / "checkpoints"
    if choice.resume == "must" and not steps(directory):
        raise CheckpointCorrupt(
            "there is no checkpoint to continue from",
            where=f"{loaded.where('checkpoint.resume')}; looked in {directory}",
            hint="checkpoint.resume=auto",
        )


def clear_run(job: Job) -> list[str]:
    """Remove what an earlier run left in the output directory and the new run would mix with.

    Returns:
        Names of the removed files and directories.
    """
    names = ("checkpoints", "export", "tensorboard", "metrics.jsonl", "eval.jsonl", "timeline.json",
             "offload_predicted.json", "offload_measured.json", "sample.txt", "run.json", "report.html",
             "trace.json")  # fmt: skip
    removed = []
    for name in names:
        path = job.output_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        else:
            continue
        removed.append(name)
    return removed


def rank_command(job: Job, words: list[str]) -> str:
    """The command that starts the same ranks by hand.

    Args:
        job: The run.
        words: Recipe and overrides, quoted for a shell.
    """
    ranks = job.plan.strategy.world_size
    prefix = f"torchrun --standalone --nproc-per-node={ranks} -m hyper_parallel train"
    return " ".join([prefix, *words])
