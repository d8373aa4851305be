"""Preparation of a run in one process before any rank starts: all checks, data and the plan."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hyper_parallel.config import (
    PAIRED_STAGES,
    PREFERENCE_STAGES,
    LoadedRecipe,
    Recipe,
    recipe_to_yaml,
    with_absolute_paths,
    with_steps,
)
from hyper_parallel.errors import (
    BatchMismatch,
    CheckpointCorrupt,
    Contradiction,
    HyperParallelError,
    NotDivisible,
    UnsupportedSharding,
)
from hyper_parallel.ir import Certificate, Overlap, Plan, Strategy
from hyper_parallel.model import GENERATION, is_read, load_model, read_config
from hyper_parallel.owned_folder import Replacement
from hyper_parallel.topology import is_this_machine
from hyper_parallel.trainer._elastic import num_ranks, replan_for_launched, with_planned_roles
from hyper_parallel.trainer.checkpoints.extra_state import check_trainer_extra, read_extra
from hyper_parallel.trainer.checkpoints.manifest import step_name, steps
from hyper_parallel.trainer.data import (
    Batches,
    Order,
    PackedData,
    StepRows,
    Stream,
    StreamBatches,
    copy_tokenizer,
    load_tokenizer,
    require_tokenizer,
    stop_ids,
)
from hyper_parallel.trainer.data_record import write_data_record
from hyper_parallel.trainer.files import Damaged, check_writable, write_text, write_timeline
from hyper_parallel.trainer.hub_models import with_hub_models
from hyper_parallel.trainer.loop.callback import Callback
from hyper_parallel.trainer.loop.preference_rows import check_rewards, check_rows
from hyper_parallel.trainer.loop.run_facts import check_resume, run_facts
from hyper_parallel.trainer.loop.trackers import check_trackers
from hyper_parallel.trainer.run_directory import (
    check_run_directory,
    keeps_model,
    mark_run_directory,
    write_editable,
)
from hyper_parallel.trainer.user_code import load_class

if TYPE_CHECKING:
    from hyper_parallel.trainer.engine.step_programs import StepPrograms

MAX_SIMULATED: Final = 4096
"""Maximum product of pipeline stages and microbatches for which a step is simulated."""

_OPTIMIZER_ARGS: Final = "training.optimizer_args"


@dataclass(frozen=True, slots=True)
class Job:
    """Prepared run; every rank has an equal copy.

    A world is a set of ranks with a common process group: the training ranks, or a sampling replica of GRPO.

    Attributes:
        recipe: Resolved recipe.
        plan: Plan of the training ranks; with `parallel.submodels`, of the ranks of the language model.
        packed: Tokenized and packed data.
        output_dir: Directory of all outputs.
        weights: Directory of the pretrained weights; None: random weights.
        model_files: Texts of the model's config files by file name, for the run and its exports.
        on_topology: Whether the plan's topology describes this machine. Otherwise predicted and measured times are not
            compared.
        trained: Description of adapters and trained parameters; empty when all parameters are trained.
        restarted: Whether this is a restart after a failure of ranks, which resumes from the checkpoints of the run.
        router_loss: Description of the auxiliary loss of expert routers; None: no auxiliary loss.
        programs: Captured step programs for a back end other than torch, one per rank of a pipeline or of a tensor- or
            expert-parallel group (see `step_programs`); None: torch.
        media_costs: (work per image or audio recording, work per media token) of encoders, estimated for balancing;
            see `cost_balance.media_costs`.
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
    programs: tuple[StepPrograms, ...] | None = None
    media_costs: tuple[int, int] = (0, 1)

    @property
    def worlds(self) -> tuple[int, ...]:
        """World sizes: number of training ranks, including ranks of encoders, then of ranks per sampling replica."""
        return _worlds(self.recipe, self.plan)

    @property
    def ranks(self) -> int:
        """Number of ranks in all worlds."""
        return sum(self.worlds)

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of the checkpoints."""
        return self.output_dir / "checkpoints"

    @property
    def export_dir(self) -> Path:
        """Directory of the Hugging Face export."""
        return self.output_dir / "export"

    @property
    def model_dir(self) -> Path:
        """Directory with config and tokenizer of the model, which exports of checkpoints copy."""
        return self.output_dir / "model"

    @property
    def resume_dir(self) -> Path:
        """Directory of the checkpoints from which the run resumes."""
        if self.restarted and steps(self.checkpoint_dir):
            return self.checkpoint_dir
        return _resume_dir(self.recipe)

    @property
    def ignore_checkpoints(self) -> bool:
        """True if the run starts over and removes the checkpoints of an earlier run in the output directory."""
        return self.recipe.checkpoint.resume == "never" and not self.restarted

    def has_started_since(self, time_s: float) -> bool:
        """Return whether ranks have started training since `time_s`: whether config.yaml was modified since then."""
        written = self.output_dir / "config.yaml"
        return written.exists() and written.stat().st_mtime >= time_s

    def train_batches(self) -> Batches | StreamBatches:
        """Return the training batches, which define the sequences of every step."""
        work, train, grpo = self.plan.workload, self.packed.train, self.recipe.grpo
        sequences_per_step = (work.tokens_per_step or 0) // work.seq_len
        if isinstance(train, Stream):
            return StreamBatches(train, sequences_per_step, self.packed.fingerprint)
        # Balancing is not supported with several encoders on separate ranks.
        balances = self.recipe.data.balance != "none" and len(self.recipe.parallel.towers) < 2
        return Batches(
            train,
            sequences_per_step=sequences_per_step,
            order=Order(
                self.recipe.training.seed,
                self.recipe.data.shuffle,
                self.packed.weights,
                costs=self.media_costs if balances and train.has_media else None,
            ),
            rows=StepRows(
                repeats=grpo.num_generations if self.recipe.stage == "grpo" else 1,
                iterations=grpo.num_iterations,
                group_size=self._group_size,
            ),
            fingerprint=self.packed.fingerprint,
        )

    @property
    def _group_size(self) -> int:
        """Number of consecutive sequences that the loss compares: 2 for pairs of answers, else 1."""
        return 2 if self.recipe.stage in PAIRED_STAGES else 1

    def epochs_at(self, step: int, batches: Batches | StreamBatches) -> float | None:
        """Return the number of epochs read in the first `step` steps, as a float; None for a stream."""
        if isinstance(batches, StreamBatches):
            return None
        return batches.sequences_seen(step) / batches.rows.unit / batches.num_sequences

    def holdout_batches(self) -> Batches | None:
        """Return evaluation batches of about `training.eval_tokens` tokens; None if no sequence or pair is held out."""
        held_out = self.packed.holdout
        tokens = self.recipe.training.eval_tokens
        if held_out is None:
            return None
        rows = self._group_size
        count = min(len(held_out), max(rows, tokens // self.recipe.data.seq_len)) // rows
        if count == 0:
            return None
        unit = self.plan.strategy.dp * (self.plan.workload.microbatch or 1)
        size = math.ceil(count * rows / unit) * unit
        return Batches(
            held_out,
            sequences_per_step=size,
            order=Order(shuffle=False),
            rows=StepRows(group_size=rows),
            tail="pad",
            limit=count,
        )

    def write(self, plan: Plan) -> None:
        """Write the recipe, `plan`, simulated step, data.json, step programs, model config and tokenizer of the run.

        `plan` is the plan that the ranks execute; the simulated step belongs to the prepared plan, `self.plan`. The
        model directory is not rewritten if `model.path` is inside of it.
        """
        out = self.output_dir
        mark_run_directory(out)
        write_editable(out / "config.yaml", recipe_to_yaml(with_absolute_paths(self.recipe)))
        write_text(out / "plan.json", plan.to_json() + "\n")
        write_data_record(self)
        _write_prediction(self.plan, out / "predicted_timeline.json")
        strategy = self.plan.strategy
        axis = "pp" if strategy.pp > 1 else "ep" if strategy.ep > strategy.tp else "tp"
        for position, programs in enumerate(self.programs or ()):
            programs.save(out / "programs" / (f"{axis}_rank{position}" if position else ""))
        if keeps_model(self.recipe):
            return
        folder = Replacement(self.model_dir, "model", "the model directory of the run")
        written = folder.open()
        with folder.discarded_on_error():
            for name, text in self.model_files.items():
                write_text(written / name, self._with_stops(text) if name == GENERATION else text)
            copy_tokenizer(self.packed.tokenizer_dir, written)
            folder.publish()

    def _with_stops(self, generation: str) -> str:
        """Return a generation config (JSON text) with the end-of-turn tokens of the chat template in `eos_token_id`.

        Training on conversations teaches the model these tokens. Inference engines read stop tokens from the exported
        generation config. For stage pt the text is returned unchanged.
        """
        if self.recipe.stage == "pt":
            return generation
        values = json.loads(generation)
        eos = values.get("eos_token_id")
        published = [] if eos is None else eos if isinstance(eos, list) else [eos]
        stops = stop_ids(load_tokenizer(self.packed.tokenizer_dir), eos)
        if stops <= {*published}:
            return generation
        values["eos_token_id"] = [*published, *sorted(stops.difference(published))]
        return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _worlds(recipe: Recipe, plan: Plan) -> tuple[int, ...]:
    trained = plan.strategy.world_size + recipe.parallel.tower_ranks
    return (trained, *[recipe.grpo.copy_ranks] * recipe.grpo.copies)


def under_torchrun() -> bool:
    """Return whether torchrun, or another launcher that sets RANK, has started this process."""
    return "RANK" in os.environ


def _training_ranks(recipe: Recipe) -> int | None:
    """Return how many torchrun ranks train the language model, None without torchrun; raise HP104 if none is left."""
    if not under_torchrun():
        return None
    from hyper_parallel.runtime import launched_rank

    ranks, sampling = launched_rank()[1], recipe.grpo.sampling_ranks
    if (towers := recipe.parallel.tower_ranks) and ranks > towers:
        return ranks - towers
    if ranks <= sampling:
        replica = recipe.grpo.copy_ranks
        fewer = (ranks - 1) // replica * replica
        needed = sampling + (1 if recipe.parallel.auto else num_ranks(recipe.parallel))
        raise Contradiction(
            "torchrun has started too few ranks, so no rank is left to train",
            where="grpo.rollout_ranks",
            got=f"{ranks} ranks, of which {sampling} only sample",
            hint=f"start at least {needed} ranks, or grpo.rollout_ranks={fewer}"
            + ("" if fewer else _only_learners(recipe)),
        )
    return ranks - sampling


def _only_learners(recipe: Recipe) -> str:
    """Return overrides, each after a space, that reset the options of `grpo` that need sampling ranks."""
    unset = {
        "max_staleness": 0,
        "partial_rollout": "false",
        "reference_role": "learner",
        "min_effective_samples": "null",
    }
    needs = {name: getattr(recipe.grpo, name) for name in unset}
    return "".join(f" grpo.{k}={v}" for k, v in unset.items() if needs[k] not in (0, False, "learner", None))


def prepare_job(
    loaded: LoadedRecipe,
    *,
    progress: bool = True,
    check_ranks: Callable[[Recipe, int], None] = lambda *_: None,
    check_plan: Callable[[Plan], None] = lambda _: None,
) -> Job:
    """Check a recipe, plan it and prepare its data; write only caches, which include downloads.

    With `progress`, the data preparation shows progress bars on standard error. Before the data preparation,
    `check_plan` is called with the plan, and `check_ranks` with the planned recipe and its total number of ranks.

    Raises:
        HyperParallelError: Any invalid input; see docs/reference/errors.md.
    """
    training_ranks = _training_ranks(loaded.recipe)
    loaded = _check_paths(replan_for_launched(loaded, training_ranks))
    loaded, notes, proof = resolve_submodels(loaded, training_ranks)
    recipe, training_ranks = loaded.recipe, _training_ranks(loaded.recipe)
    _check_degrees(loaded, training_ranks)
    # Imported here, because importing torch takes seconds.
    from hyper_parallel.backends.torch import check_pretrained
    from hyper_parallel.planner import plan_recipe
    from hyper_parallel.trainer.engine.recipe_model import (
        build_model,
        model_files,
        read_recipe_spec,
        trained_of,
    )

    spec, weights = read_recipe_spec(loaded), _check_weights(loaded)
    share, trained = trained_of(model := build_model(recipe))
    if weights is not None:
        check_pretrained(model, weights)
    half_batches = not recipe.overlap.auto or _runs_half_batches(loaded, model)
    plan = plan_recipe(recipe, training_ranks, loaded.where, spec, share, half_batches)
    check_plan(plan := replace(plan, notes=(*plan.notes, *notes)))
    recipe = (loaded := with_planned_roles(loaded, plan)).recipe
    check_ranks(recipe, sum(_worlds(recipe, plan)))
    plan, router_loss = _check_model(loaded, plan, model)
    packed = _prepare_data(loaded, plan, model, progress=progress)
    job = Job(
        recipe,
        plan,
        packed,
        Path(recipe.output_dir),
        weights,
        model_files(model, packed.tokenizer_dir, weights),
        is_this_machine(recipe.topology),
        trained,
        router_loss=router_loss,
        programs=_capture(loaded, plan, router_loss),
    )
    job = _with_media_costs(job, model)
    resolved = _resolve_epochs(loaded, job)
    job = _with_notes(replace(job, recipe=resolved.recipe), model, proof)
    _check_newest(job, resolved)
    return job


def plan_with_submodels(loaded: LoadedRecipe, plan: Plan, proof: Certificate | None = None) -> Plan:
    """Return the plan with the layouts of `parallel.submodels`, and with times predicted for the run's data.

    The sub-models are the encoders and the language model of a multimodal model. Without `parallel.submodels` the plan
    is returned unchanged. `proof` is the certificate of the search for the layouts, if there was a search.

    Raises:
        HyperParallelError: Errors of invalid data or sub-models.
    """
    if loaded.recipe.parallel.submodels is None:
        return plan
    from hyper_parallel.trainer.engine.recipe_model import build_model
    from hyper_parallel.trainer.engine.recipe_submodels import check_submodels

    recipe, model = loaded.recipe, build_model(loaded.recipe)
    check_submodels(loaded, plan, model)
    packed = _prepare_data(loaded, plan, model, progress=False)
    job = _with_media_costs(_bare_job(recipe, plan, packed), model)
    return _with_notes(job, model, proof).plan


def resolve_submodels(
    loaded: LoadedRecipe, ranks: int | None
) -> tuple[LoadedRecipe, tuple[str, ...], Certificate | None]:
    """Search layouts for `parallel.submodels: auto`; return any other recipe unchanged.

    If section `training` sets no batch size, `tokens_per_step` becomes one sequence per rank. `ranks` is the number of
    ranks started by torchrun; None: `parallel.world_size`, or all devices of the topology.

    Returns:
        Recipe with the chosen layouts, notes for the plan, and the certificate of the search (None without a search).

    Raises:
        HyperParallelError: Errors of invalid data, or of a search without a valid layout.
    """
    submodels = loaded.recipe.parallel.submodels
    if submodels is None or not submodels.auto:
        return loaded, (), None
    from hyper_parallel.planner import plan_recipe
    from hyper_parallel.planner.request import resolve
    from hyper_parallel.trainer.engine.recipe_model import build_model, read_recipe_spec, trained_of
    from hyper_parallel.trainer.engine.submodel_search import choose_submodels

    recipe, spec = loaded.recipe, read_recipe_spec(loaded)
    share, _ = trained_of(model := build_model(recipe))
    count = ranks or recipe.parallel.world_size
    count = count or resolve(spec, recipe.topology, None, None).num_devices
    batch = recipe.training
    if not any((batch.tokens_per_step, batch.microbatch, batch.accumulation_steps)):
        tokens = {"tokens_per_step": recipe.data.seq_len * count}
        origins = loaded.origins | {"training.tokens_per_step": "derived: one sequence per rank"}
        recipe = recipe.model_copy(update={"training": batch.model_copy(update=tokens)})
        loaded = replace(loaded, recipe=recipe, origins=origins)

    def batches_of(candidate: LoadedRecipe, plan: Plan) -> Batches:
        packed = _prepare_data(candidate, plan, model, progress=False)
        batches = _bare_job(candidate.recipe, plan, packed).train_batches()
        assert isinstance(batches, Batches), "records with images and recordings are not streamed"
        return batches

    def plan_of(candidate: LoadedRecipe) -> Plan:
        return plan_recipe(candidate.recipe, None, candidate.where, spec, share)

    chosen, note, proof = choose_submodels(loaded, model, count, plan_of, batches_of)
    return chosen, (note,), proof


def _bare_job(recipe: Recipe, plan: Plan, packed: PackedData) -> Job:
    return Job(recipe, plan, packed, Path(recipe.output_dir), None, {}, False)


def _with_media_costs(job: Job, model: Any) -> Job:
    """Return the job with `media_costs` of its data, and with a note in the plan if they are not based on FLOPs."""
    train = job.packed.train
    balanced = job.recipe.data.balance != "none"
    if isinstance(train, Stream) or not train.has_media or not balanced:
        return job
    from hyper_parallel.trainer.engine.cost_balance import media_costs

    costs, note = media_costs(model, train)
    notes = job.plan.notes if note is None else (*job.plan.notes, note)
    return replace(job, plan=replace(job.plan, notes=notes), media_costs=costs)


def _with_notes(job: Job, model: Any, proof: Certificate | None = None) -> Job:
    """Return the job with sub-models, their certificate `proof`, and a note on the balancing of media in its plan."""
    plan, recipe, batches = job.plan, job.recipe, job.train_batches()
    if not isinstance(batches, Batches):
        return job
    if recipe.parallel.submodels is not None:
        from hyper_parallel.trainer.engine.recipe_submodels import plan_submodels

        plan = plan_submodels(recipe, plan, model, batches)
    if proof is not None and plan.submodels is not None:
        plan = replace(plan, submodels=replace(plan.submodels, certificate=proof))
    note = None
    if len(recipe.parallel.towers) > 1 and recipe.data.balance != "none":
        note = "data.balance: not supported with several encoders on separate ranks, so records keep the data order"
    elif batches.order.costs is not None:
        from hyper_parallel.trainer.engine.cost_balance import balance_note

        note = balance_note(recipe, plan, batches)
    notes = plan.notes if note is None else (*plan.notes, note)
    return replace(job, plan=replace(plan, notes=notes))


def _resolve_epochs(loaded: LoadedRecipe, job: Job) -> LoadedRecipe:
    recipe, batches = job.recipe, job.train_batches()
    job.holdout_batches()  # raises the errors of held-out data before any rank starts
    if (epochs := recipe.training.epochs) is None or not isinstance(batches, Batches):
        return loaded
    rows = epochs * batches.num_sequences * batches.rows.unit
    steps = math.ceil(rows / batches.sequences_per_step) * recipe.grpo.num_iterations
    return with_steps(loaded, steps)


def _check_paths(loaded: LoadedRecipe) -> LoadedRecipe:
    """Check paths, checkpoint and sample options of a recipe; return it with local folders of its hub models."""
    check_writable(Path(loaded.recipe.output_dir), "output_dir")
    recipe = (loaded := with_hub_models(loaded)).recipe
    read_config(recipe.model.path, where=loaded.where("model.path"))
    check_run_directory(loaded)
    if recipe.offload.flash_dir is not None:
        check_writable(Path(recipe.offload.flash_dir), "offload.flash_dir")
    for key, unset in (("sample_prompt", None), ("sample_answers", 0)):
        if (value := getattr(recipe, key)) != unset and not recipe.checkpoint.export:
            raise Contradiction(
                "the sample is generated from the exported model, but this recipe exports none",
                where=loaded.where(key),
                got=f"{key}={value!r}, checkpoint.export=false",
                hint=f"checkpoint.export=true, or {key}={'null' if unset is None else unset}",
            )
    if recipe.sample_answers and recipe.stage != "sft":
        raise Contradiction(
            "`sample_answers` needs conversations, which only `stage: sft` has",
            where=loaded.where("sample_answers"),
            got=f"sample_answers={recipe.sample_answers}, stage={recipe.stage}",
            hint="sample_answers=0",
        )
    if recipe.sample_answers and not (recipe.data.validation or recipe.data.holdout):
        raise Contradiction(
            "`sample_answers` needs held-out conversations, but none are held out",
            where=loaded.where("sample_answers"),
            got=f"sample_answers={recipe.sample_answers}, data.holdout=0",
            hint="data.validation=FILE" if recipe.data.streaming else "data.holdout=0.05",
        )
    _check_checkpoint(loaded)
    return loaded


def _check_degrees(loaded: LoadedRecipe, training_ranks: int | None) -> None:
    """Raise HP203 or HP308 if the degrees do not divide the sizes in the model config, or the batch.

    This early check needs only the config. Checks that need the model, and all other errors, come later.
    """
    from hyper_parallel.planner import plan_recipe

    recipe = loaded.recipe
    values = read_config(recipe.model.path).values
    is_known = is_read(values) and "text_config" not in values
    if recipe.parallel.auto or recipe.stage == "rm" or not is_known:
        return
    try:
        plan_recipe(recipe, training_ranks, loaded.where, load_model(recipe.model.path))
    except (NotDivisible, BatchMismatch):
        raise
    except HyperParallelError:
        return


def _check_weights(loaded: LoadedRecipe) -> Path | None:
    """Return the directory of the pretrained weights, None for random weights; check tokenizer and adapters."""
    from hyper_parallel.trainer.engine.recipe_model import weights_directory

    recipe, where = loaded.recipe, loaded.where("model.path")
    weights = weights_directory(recipe, where)
    if weights is not None:
        require_tokenizer(weights, recipe.data.tokenizer, where)
    if weights is None and recipe.lora is not None and recipe.checkpoint.export:
        raise Contradiction(
            "LoRA adapters need saved base weights, but the model starts from random weights",
            where=where,
            got=f"lora, model.init={recipe.model.init}, checkpoint.export=true",
            allowed="a `model.path` with config.json, weights and tokenizer, such as the export of a run",
            hint=f"set `{' '.join(_without_export(recipe))}`, or `lora=null`",
        )
    return weights


def _without_export(recipe: Recipe) -> list[str]:
    samples = {"sample_prompt=null": recipe.sample_prompt is not None, "sample_answers=0": recipe.sample_answers > 0}
    return ["checkpoint.export=false", *(text for text, is_set in samples.items() if is_set)]


def _runs_half_batches(loaded: LoadedRecipe, model: Any) -> bool:
    """Return whether layers compute equal results on half-batches; False with `training.compile` or a router loss."""
    from hyper_parallel.backends.torch import check_half_batches, check_routing
    from hyper_parallel.trainer.engine.recipe_model import routing_of
    from hyper_parallel.trainer.model_properties import recipe_properties

    if loaded.recipe.training.compile:
        return False
    router_loss = check_routing(model, routing_of(loaded.recipe), loaded.where("moe"))
    halved = Strategy(tp_x=2, overlap=Overlap(half_batch=True))
    try:
        check_half_batches(model, halved, router_loss is not None)
    except UnsupportedSharding:
        return False
    return bool(recipe_properties(loaded.recipe).half_batches.holds)


def _check_model(loaded: LoadedRecipe, plan: Plan, model: Any) -> tuple[Plan, str | None]:
    """Check model, trackers and callbacks against recipe and plan; return the plan with measured model properties.

    The second result describes the auxiliary loss of expert routers; None: no auxiliary loss.
    """
    from hyper_parallel.backends.torch import (
        check_flow,
        check_half_batches,
        check_routing,
        check_token_overlap,
    )
    from hyper_parallel.trainer.engine.offload_machine import check_offload
    from hyper_parallel.trainer.engine.optimizer import check_optimizer
    from hyper_parallel.trainer.engine.recipe_model import (
        check_parameters,
        check_positions,
        routing_of,
    )
    from hyper_parallel.trainer.model_properties import check_properties

    recipe = loaded.recipe
    check_offload(recipe, plan, model, loaded.where)
    check_optimizer(recipe, plan, loaded.where, model)
    if recipe.parallel.submodels is not None:
        from hyper_parallel.trainer.engine.recipe_submodels import check_submodels

        check_submodels(loaded, plan, model)
    check_trackers(recipe.training.report_to, loaded.where("training.report_to"))
    for path in recipe.training.callbacks:
        load_class(path, Callback, loaded.where("training.callbacks"))
    remedy = "offload.budget=auto" if isinstance(recipe.offload.budget, int) else None
    check_parameters(model, plan, loaded.where("offload.budget" if remedy else "model.path"), remedy)
    router_loss = check_routing(model, routing_of(recipe), loaded.where("moe"))
    check_positions(model, recipe, plan, loaded.where("data.seq_len"))
    plan = replace(plan, properties=check_properties(loaded, plan))
    check_half_batches(model, plan.strategy, router_loss is not None)
    check_token_overlap(model, plan.strategy)
    check_flow(model, plan)
    if recipe.stage in PREFERENCE_STAGES:
        check_rows(loaded, plan)
    return plan, router_loss


def _capture(loaded: LoadedRecipe, plan: Plan, router_loss: str | None) -> tuple[StepPrograms, ...] | None:
    if loaded.recipe.backend == "torch":
        return None
    from hyper_parallel.trainer.engine.step_programs import capture_programs

    return capture_programs(loaded.recipe, plan, router_loss, loaded.where)


def _prepare_data(loaded: LoadedRecipe, plan: Plan, model: Any, *, progress: bool) -> PackedData:
    """Prepare and return the data of a recipe, after checking it against rewards, model and plan."""
    from hyper_parallel.backends.torch.dropout import original_config
    from hyper_parallel.trainer.data import prepare
    from hyper_parallel.trainer.engine.recipe_model import check_media_inputs

    recipe = loaded.recipe
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
    if not isinstance(packed.train, Stream) and packed.train.has_media:
        check_media_inputs(model, plan, packed.train, recipe)
    elif recipe.data.balance == "cost":
        raise Contradiction(
            "`data.balance: cost` balances images and audio, but the records have none",
            where=loaded.where("data.balance"),
            got="data.balance=cost",
            allowed="records with images or audio; all other sequences have equal work",
            changes={"data.balance": "auto"},
        )
    return packed


def _write_prediction(plan: Plan, path: Path) -> None:
    """Write the simulated timeline of a step, or remove an earlier one if the step exceeds `MAX_SIMULATED`."""
    from hyper_parallel.planner import simulate_plan

    path.unlink(missing_ok=True)
    if len(plan.stages) * (plan.workload.accumulation_steps or 1) <= MAX_SIMULATED:
        write_timeline(simulate_plan(plan), path)


def _resume_dir(recipe: Recipe) -> Path:
    """Return the folder of checkpoints to resume from: that of `checkpoint.from_dir`, or the run's own.

    The run's own folder is returned if `from_dir` is null or the run's own last step is later.
    """
    own = Path(recipe.output_dir) / "checkpoints"
    if recipe.checkpoint.from_dir is None:
        return own
    source = Path(recipe.checkpoint.from_dir) / "checkpoints"
    return own if max(steps(own), default=-1) > max(steps(source), default=-1) else source


def _check_checkpoint(loaded: LoadedRecipe) -> None:
    choice, directory = loaded.recipe.checkpoint, _resume_dir(loaded.recipe)
    if not steps(directory) and (choice.resume == "must" or choice.from_dir):
        key = "from_dir" if choice.from_dir else "resume"
        changes = ["checkpoint.from_dir=null"] if choice.from_dir else []
        changes += ["checkpoint.resume=auto"] if choice.resume == "must" else []
        raise CheckpointCorrupt(
            "there is no checkpoint to continue from",
            where=f"{loaded.where(f'checkpoint.{key}')}; looked in {directory}",
            hint=" ".join(changes),
        )


def _check_newest(job: Job, loaded: LoadedRecipe) -> None:
    """Check that the run can resume from its newest checkpoint.

    Raise HP104 for a checkpoint after the last step, and HP702 if `run_facts` or the optimizer do not match it.
    """
    directory, last_step = job.resume_dir, job.recipe.training.steps
    saved_steps = [] if job.recipe.checkpoint.resume == "never" else steps(directory)
    if not saved_steps:
        return
    if saved_steps[-1] > last_step:
        by_epochs = job.recipe.training.epochs is not None
        raise Contradiction(
            f"the newest checkpoint is of step {saved_steps[-1]}, after the last step of the run",
            where=loaded.where("training.epochs" if by_epochs else "training.steps"),
            got=f"steps={last_step}, newest checkpoint in {directory}: step {saved_steps[-1]}",
            hint=("training.epochs=null " if by_epochs else "") + f"training.steps={2 * saved_steps[-1]}",
        )
    # Ranks check the checkpoint that they load, possibly an older one. This check runs before ranks start.
    saved = None
    with suppress(Damaged):
        extra = read_extra(directory / step_name(saved_steps[-1]))
        if not check_trainer_extra(saved_steps[-1], extra):
            saved = extra.get("run")
    changed = check_resume(saved, run_facts(job), directory.parent)
    if _OPTIMIZER_ARGS in changed:
        from hyper_parallel.trainer.engine.optimizer import check_resumed_state

        saved_args = changed[_OPTIMIZER_ARGS][0]
        saved_args = saved_args if isinstance(saved_args, dict) else {}
        check_resumed_state(job.recipe.training, saved_args, directory)
