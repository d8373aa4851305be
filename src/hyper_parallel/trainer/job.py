"""A run before any rank: everything that can be refused is refused here, in one process."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hyper_parallel.config import (
    PAIRED_STAGES,
    PREFERENCE_STAGES,
    LoadedRecipe,
    Recipe,
    recipe_to_yaml,
    with_absolute_paths,
    with_steps,
)
from hyper_parallel.errors import CheckpointCorrupt, Contradiction, TokenizerMissing
from hyper_parallel.ir import Plan
from hyper_parallel.owned_folder import Replacement
from hyper_parallel.topology import is_this_machine
from hyper_parallel.trainer._compared_rows import check_rewards, check_rows
from hyper_parallel.trainer._elastic import on_started, with_roles
from hyper_parallel.trainer._resumed_checkpoint import check_newest
from hyper_parallel.trainer.checkpoints.manifest import steps
from hyper_parallel.trainer.data import (
    Batches,
    PackedData,
    Stream,
    StreamBatches,
    copy_tokenizer,
    has_tokenizer,
)
from hyper_parallel.trainer.data_record import write_data_record
from hyper_parallel.trainer.files import (
    check_writable,
    write_text,
    write_timeline,
)
from hyper_parallel.trainer.hub_models import with_hub_models
from hyper_parallel.trainer.loop.callback import Callback
from hyper_parallel.trainer.loop.trackers import check_trackers
from hyper_parallel.trainer.run_directory import (
    check_run_directory,
    keeps_model,
    mark_run_directory,
    write_kept,
)
from hyper_parallel.trainer.user_code import load_class

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
        weights: Directory of the pretrained weights; None: the model starts from random ones.
        model_files: Name to text of the model's config files, as the run and its exports keep them.
        on_topology: Whether this machine is the plan's topology; else their times are not compared.
        trained: Adapters and trained parameters in words; empty when all parameters are trained.
        restarted: Whether its ranks were lost and are started again: they go on from its own checkpoints.
        router_loss: The loss that is added for the routers of experts, in words; None: there is none.
    """

    recipe: Recipe
    plan: Plan
    packed: PackedData
    output_dir: Path
    weights: Path | None
    model_files: Mapping[str, str]
    on_topology: bool
    trained: str = ""
    restarted: bool = False
    router_loss: str | None = None

    @property
    def worlds(self) -> tuple[int, ...]:
        """Ranks of the world that trains, and of each copy that only samples."""
        grpo = self.recipe.grpo
        return (self.plan.strategy.world_size, *[grpo.copy_ranks] * grpo.copies)

    @property
    def ranks(self) -> int:
        """Ranks of all worlds."""
        return sum(self.worlds)

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints are written."""
        return self.output_dir / "checkpoints"

    @property
    def export_dir(self) -> Path:
        """Where the Hugging Face directory is written."""
        return self.output_dir / "export"

    @property
    def model_dir(self) -> Path:
        """Where the model's config and tokenizer are kept: what an export needs beside a checkpoint."""
        return self.output_dir / "model"

    @property
    def resume_dir(self) -> Path:
        """Where checkpoints are looked for."""
        if self.restarted and steps(self.checkpoint_dir):
            return self.checkpoint_dir
        return _resume_dir(self.recipe)

    @property
    def starts_over(self) -> bool:
        """Whether an earlier run in the output directory is removed, not continued."""
        return self.recipe.checkpoint.resume == "never" and not self.restarted

    def begun_since(self, time_s: float) -> bool:
        """Whether its ranks have begun to train since a time: then they have written what the run says of itself."""
        written = self.output_dir / "config.yaml"
        return written.exists() and written.stat().st_mtime >= time_s

    def train_batches(self) -> Batches | StreamBatches:
        """The order of the training sequences."""
        work, train, grpo = self.plan.workload, self.packed.train, self.recipe.grpo
        sequences_per_step = (work.tokens_per_step or 0) // work.seq_len
        if isinstance(train, Stream):
            return StreamBatches(train, sequences_per_step, self.packed.fingerprint)
        return Batches(
            train,
            sequences_per_step=sequences_per_step,
            seed=self.recipe.training.seed,
            shuffle=self.recipe.data.shuffle,
            fingerprint=self.packed.fingerprint,
            weights=self.packed.weights,
            repeats=grpo.num_generations if self.recipe.stage == "grpo" else 1,
            iterations=grpo.num_iterations,
            together=2 if self.recipe.stage in PAIRED_STAGES else 1,
        )

    def epochs_at(self, step: int, batches: Batches | StreamBatches) -> float | None:
        """Return how often the data has been read after a step; None for a stream."""
        if isinstance(batches, StreamBatches):
            return None
        return batches.sequences_seen(step) / batches.unit / batches.num_sequences

    def holdout_batches(self) -> Batches | None:
        """At most `eval_tokens` held-out tokens as one step; None when nothing is held out."""
        held_out = self.packed.holdout
        tokens = self.recipe.training.eval_tokens
        if held_out is None:
            return None
        rows = 2 if self.recipe.stage in PAIRED_STAGES else 1
        count = min(len(held_out), max(rows, tokens // self.recipe.data.seq_len)) // rows
        if count == 0:
            return None
        unit = self.plan.strategy.dp * (self.plan.workload.microbatch or 1)
        size = math.ceil(count * rows / unit) * unit
        return Batches(
            held_out,
            sequences_per_step=size,
            shuffle=False,
            tail="pad",
            limit=count,
            together=rows,
        )

    def write(self, plan: Plan) -> None:
        """Write what the run says of itself: recipe, plan, simulated step, the model's config and tokenizer.

        Args:
            plan: The plan as the ranks carry it out.
        """
        out = self.output_dir
        mark_run_directory(out)
        write_kept(out / "config.yaml", recipe_to_yaml(with_absolute_paths(self.recipe)))
        write_text(out / "plan.json", plan.to_json() + "\n")
        write_data_record(self)
        _write_prediction(self.plan, out / "predicted_timeline.json")
        if keeps_model(self.recipe):
            return
        folder = Replacement(self.model_dir, "model", "the model directory of the run")
        written = folder.open()
        with folder.discarded_on_error():
            for name, text in self.model_files.items():
                write_text(written / name, text)
            copy_tokenizer(self.packed.tokenizer_dir, written)
            folder.publish()


def under_torchrun() -> bool:
    """Whether another launcher has started this process as one of several ranks."""
    return "RANK" in os.environ


def _training_ranks(recipe: Recipe) -> int | None:
    """Ranks that another launcher has started and that do not only sample; None when this process starts them."""
    if "RANK" not in os.environ:
        return None
    from hyper_parallel.runtime import launched_rank

    ranks, sampling = launched_rank()[1], recipe.grpo.sampling_ranks
    if ranks <= sampling:
        raise Contradiction(
            "no rank is left to train",
            where="grpo.rollout_ranks",
            got=f"{ranks} ranks, of which {sampling} only sample",
            hint=f"grpo.rollout_ranks={ranks - 1}",
        )
    return ranks - sampling


def prepare_job(
    loaded: LoadedRecipe,
    *,
    progress: bool = True,
    check_ranks: Callable[[Recipe, int], None] = lambda *_: None,
    check_plan: Callable[[Plan], None] = lambda _: None,
) -> Job:
    """Check the recipe, prepare its data and plan it; writes nothing but the data's cache.

    Args:
        loaded: The recipe with the origins of its values.
        progress: Show progress bars of the data preparation on standard error.
        check_ranks: Called with the recipe and the number of ranks of all its worlds as soon as the plan has set it.

        check_plan: Called with the plan before data is prepared.

    Raises:
        HyperParallelError: Anything a user can have got wrong; see docs/train.md.
    """
    from hyper_parallel.backends.torch import check_flow, check_pretrained, check_routing
    from hyper_parallel.backends.torch.dropout import original_config
    from hyper_parallel.planner import plan_recipe
    from hyper_parallel.trainer.data import prepare
    from hyper_parallel.trainer.engine.offload_machine import check_offload
    from hyper_parallel.trainer.engine.optimizer import check_optimizer
    from hyper_parallel.trainer.engine.recipe_model import (
        build_model,
        check_parameters,
        check_positions,
        model_files,
        read_spec,
        routing_of,
        weights_directory,
    )
    from hyper_parallel.trainer.engine.trained_parameters import trained_of
    from hyper_parallel.trainer.model_properties import check_properties

    training_ranks = _training_ranks(loaded.recipe)
    recipe = (loaded := on_started(loaded, training_ranks)).recipe
    output_dir = Path(recipe.output_dir)
    check_writable(output_dir, "output_dir")
    recipe = (loaded := with_hub_models(loaded)).recipe
    check_run_directory(loaded)
    if recipe.offload.flash_dir is not None:
        check_writable(Path(recipe.offload.flash_dir), "offload.flash_dir")
    if recipe.sample_prompt is not None and not recipe.checkpoint.export:
        raise Contradiction(
            "the sample is written by the exported model, and the recipe exports none",
            where=loaded.where("sample_prompt"),
            got=f"sample_prompt={recipe.sample_prompt!r}, checkpoint.export=false",
            hint="checkpoint.export=true",
        )
    _check_checkpoint(loaded)
    trusted = recipe.model.trust_remote_code
    where, searched = loaded.where("model.path"), recipe.parallel.auto
    scores = recipe.stage == "rm"
    spec = read_spec(recipe.model.path, where, trusted=trusted, tried=searched, scores=scores)
    weights = weights_directory(recipe, where)
    if weights is not None and not (recipe.data.tokenizer or has_tokenizer(weights)):
        raise TokenizerMissing(
            "the pretrained weights come without their tokenizer",
            where=loaded.where("model.path"),
            got=str(weights),
            hint="data.tokenizer=<the directory of the model's tokenizer>",
        )
    if weights is None and recipe.lora is not None and recipe.checkpoint.export:
        raise Contradiction(
            "an adapter is read beside the weights it was trained on, and the model starts from random ones",
            where=loaded.where("model.path"),
            got=f"lora, model.init={recipe.model.init}, checkpoint.export=true",
            allowed="a directory with config.json, weights and tokenizer, such as RUN_DIR/export",
            hint="set `lora=null` or `checkpoint.export=false`, or `model.path=RUN_DIR/export`",
        )
    share, trained = trained_of(model := build_model(recipe))
    if weights is not None:
        check_pretrained(model, weights)
    plan = plan_recipe(recipe, training_ranks, loaded.where, spec, share)
    check_plan(plan)
    recipe = (loaded := with_roles(loaded, plan)).recipe
    check_ranks(recipe, plan.strategy.world_size + recipe.grpo.sampling_ranks)
    check_offload(recipe, plan, model, loaded.where)
    check_optimizer(recipe, plan, loaded.where, model)
    check_trackers(recipe.training.report_to, loaded.where("training.report_to"))
    for path in recipe.training.callbacks:
        load_class(path, Callback, loaded.where("training.callbacks"))
    check_parameters(model, plan, loaded.where("model.path"))
    routed = check_routing(model, routing_of(recipe), loaded.where("moe"))
    check_positions(model, recipe.data.seq_len, loaded.where("data.seq_len"))
    plan = replace(plan, properties=check_properties(loaded, plan))
    check_flow(model, plan)
    if recipe.stage in PREFERENCE_STAGES:
        check_rows(loaded, plan)
    packed = prepare(
        recipe.data,
        stage=recipe.stage,
        model_path=recipe.model.path,
        seed=recipe.training.seed,
        progress=progress,
        vocab_limit=len(model.get_input_embeddings().weight),
        model_config=original_config(model).to_dict(),
    )
    if recipe.stage == "grpo":
        check_rewards(loaded, packed)
    kept = model_files(model, packed.tokenizer_dir, weights)
    here = is_this_machine(recipe.topology)
    job = Job(recipe, plan, packed, output_dir, weights, kept, here, trained, router_loss=routed)
    batches, _ = job.train_batches(), job.holdout_batches()
    if (epochs := recipe.training.epochs) is not None and isinstance(batches, Batches):
        rows = epochs * batches.num_sequences * batches.unit
        steps = math.ceil(rows / batches.sequences_per_step) * recipe.grpo.num_iterations
        loaded = with_steps(loaded, steps)
        job = replace(job, recipe=loaded.recipe)
    check_newest(job, loaded)
    return job


def _write_prediction(plan: Plan, path: Path) -> None:
    """The simulated step of the plan, which a report shows beside the measured one; not of very long steps."""
    from hyper_parallel.planner import simulate_plan

    path.unlink(missing_ok=True)
    if len(plan.stages) * (plan.workload.accumulation_steps or 1) <= MOST_SIMULATED:
        write_timeline(simulate_plan(plan), path)


def _resume_dir(recipe: Recipe) -> Path:
    """The checkpoints of `checkpoint.from_dir`, or the run's own where these are newer: it has begun, and goes on."""
    own = Path(recipe.output_dir) / "checkpoints"
    if recipe.checkpoint.from_dir is None:
        return own
    source = Path(recipe.checkpoint.from_dir) / "checkpoints"
    return own if max(steps(own), default=-1) > max(steps(source), default=-1) else source


def _check_checkpoint(loaded: LoadedRecipe) -> None:
    """Raise when the recipe insists on a checkpoint and none was ever published."""
    choice, directory = loaded.recipe.checkpoint, _resume_dir(loaded.recipe)
    if not steps(directory) and (choice.resume == "must" or choice.from_dir):
        key, value = ("from_dir", "null") if choice.from_dir else ("resume", "auto")
        raise CheckpointCorrupt(
            "there is no checkpoint to continue from",
            where=f"{loaded.where(f'checkpoint.{key}')}; looked in {directory}",
            hint=f"checkpoint.{key}={value}",
        )
