"""Parity check: compare the training steps of a recipe's layout with those on a single rank.

Both runs train the same small model in float64, as local CPU processes.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from hyper_parallel.backends.torch import handle, local
from hyper_parallel.backends.torch.weights.initialization import canonical_name
from hyper_parallel.config import (
    PAIRED_STAGES,
    PREFERENCE_STAGES,
    Grpo,
    LoadedRecipe,
    Offload,
    Parallel,
    Recipe,
)
from hyper_parallel.errors import Contradiction, HyperParallelError
from hyper_parallel.ir import Strategy
from hyper_parallel.model import read_config
from hyper_parallel.planner import plan_recipe
from hyper_parallel.runtime import World, launch, scratch_folder
from hyper_parallel.topology import rank_threads
from hyper_parallel.trainer.data import has_tokenizer
from hyper_parallel.trainer.engine.recipe_model import read_recipe_spec, read_spec, refuse_submodels
from hyper_parallel.trainer.engine.torch_engine import TorchEngine
from hyper_parallel.trainer.hub_models import with_hub_models
from hyper_parallel.trainer.job import Job, prepare_job, under_torchrun
from hyper_parallel.trainer.loop import Display, LrSchedule
from hyper_parallel.trainer.small_configs import SIZES, shrink_config

LIMIT: Final = 1e-10
"""Maximum relative difference that counts as rounding in float64."""

_FLOOR: Final = 1e-6
"""Minimum denominator of a gradient norm's relative difference, as a share of the total gradient norm."""
_MAX_RANKS: Final = 8  # three axes of degree 2: covers every pair of axes and fits a laptop
_AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y")
_DROPPABLE_AXES: Final = ("dp_replicate", "dp_shard", "tp_y", "cp")
"""Axes that get degree 1, in this order, until at most `_MAX_RANKS` ranks remain."""
_MAX_FULL_WIDTH_PARAMETERS: Final = 50_000_000
"""Maximum parameters of a model reduced in depth only. Such a model replaces a narrow model that does not train."""
_TEXT_SEQ_LEN, _RECORD_SEQ_LEN = 64, 512
"""Maximum sequence lengths for plain text (stage pt), and for conversations and pairs."""
_MICROBATCHES: Final = 4  # sufficient for two virtual stages on each of two ranks

Steps = list[dict[str, float]]
"""Metrics by name for each step: loss, gradient norm, and the gradient norm of every parameter."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Metric of a step in the single-rank run and in the run of the tested layout.

    Attributes:
        name: `loss`, `grad_norm`, or a parameter name for the norm of the parameter's gradient.
        step: Step, from 1.
        one_rank: Value of the single-rank run; NaN if this run lacks the metric.
        layout: Value of the layout's run; NaN if this run lacks the metric.
        relative: |one_rank - layout| / |one_rank|. The divisor of a gradient norm is at least `_FLOOR` times the total
            gradient norm of the single-rank run.
    """

    name: str
    step: int
    one_rank: float
    layout: float
    relative: float


@dataclass(frozen=True, slots=True)
class Parity:
    """Comparison of a run on a single rank with the same run on a layout.

    Attributes:
        model: Description of the trained model.
        strategy: Tested layout.
        notes: Sentences about changes of the recipe's layout and model for the test.
        differences: All metrics of all steps, including equal metrics. Each step has the loss, the gradient norm, and
            then the parameters in the model's order.
    """

    model: str
    strategy: Strategy
    notes: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """First parameter gradient that differs by more than `LIMIT`, else the first such loss or gradient norm.

        None if no metric differs by more than `LIMIT`.
        """
        wrong = [d for d in self.differences if not d.relative <= LIMIT]
        parameters = [d for d in wrong if d.name not in ("loss", "grad_norm")]
        return next(iter(parameters or wrong), None)

    def worst(self, count: int) -> list[Difference]:
        """Return the `count` metrics that differ most, each with its worst step; NaN counts as the worst."""
        worst: dict[str, Difference] = {}
        for d in sorted(self.differences, key=lambda d: -d.relative if d.relative >= 0 else -math.inf):
            worst.setdefault(d.name, d)
        return list(worst.values())[:count]


def parity(loaded: LoadedRecipe, steps: int = 3) -> Parity:
    """Train a small copy of a recipe's model on a single rank and on the recipe's layout, and compare all metrics.

    The two runs have the same seed and data, and use float64 without dropout or clipping. Ranks are local processes
    with gloo. Degrees above 2 become 2 (hybrid cp: at most 4), and axes are dropped until at most 8 ranks remain.
    `steps` is the number of optimizer steps of each run. Stage grpo is replaced by sft on the answers in the data.

    Raises:
        Contradiction: HP104 in a process of torchrun, or for a recipe with `parallel.submodels`.
        HyperParallelError: Errors of preparing or training the runs.
    """
    if under_torchrun():
        raise Contradiction(
            "`parity` launches local ranks itself, so it cannot run under torchrun",
            where="environment of this process",
            hint="start the command without torchrun",
        )
    refuse_submodels(loaded, "parity compares layouts of a whole model")
    loaded = with_hub_models(loaded)
    layout, notes = _layout(loaded)
    with scratch_folder(in_memory=False) as scratch:
        for narrow in (True, False):
            try:
                recipe = _small_recipe(loaded.recipe, scratch, steps, layout.dp, narrow=narrow)
                jobs = [_job(loaded, recipe, p) for p in (Parallel(), _parallel(recipe, layout))]
                expected, order = _run(jobs[0])
                break
            except HyperParallelError as error:
                if not narrow or _size(loaded) > _MAX_FULL_WIDTH_PARAMETERS:
                    raise
                notes = (
                    *notes,
                    f"reduced in depth only, because the narrow model does not train: {error.what}",
                )
        actual, _ = _run(jobs[1])
        spec, size = jobs[0].plan.model, jobs[0].recipe.training.tokens_per_step
        model = (
            f"{spec.family} of {loaded.recipe.model.path} shrunk, {spec.num_params:,} "
            f"parameters, {steps} steps of {size} tokens"
        )
    return Parity(model, layout, notes, tuple(_differences(expected, actual, order)))


def _layout(loaded: LoadedRecipe) -> tuple[Strategy, tuple[str, ...]]:
    """Return the layout reduced to at most `_MAX_RANKS` ranks, and notes about changed degrees and schedules."""
    recipe = loaded.recipe
    strategy = plan_recipe(recipe, None, loaded.where, read_recipe_spec(loaded)).strategy
    hybrid = strategy.cp_kind == "hybrid" and strategy.cp > 2
    degrees = {a: min(getattr(strategy, a), 4 if hybrid and a == "cp" else 2) for a in _AXES}
    notes = [f"{a}={getattr(strategy, a)} is {d} here" for a, d in degrees.items() if d != getattr(strategy, a)]
    for axis in _DROPPABLE_AXES:
        if math.prod(degrees.values()) > _MAX_RANKS and degrees[axis] > 1:
            degrees[axis] = 1
            notes.append(f"{axis} is dropped: more than {_MAX_RANKS} ranks")
    available = math.prod(degrees[a] for a in ("dp_shard", "cp", "tp_x", "tp_y"))
    changes: dict[str, Any] = {
        "ep": min(strategy.ep, 2, available),
        "cp_ulysses": min(2 if hybrid else strategy.cp_ulysses, degrees["cp"]),
        "virtual_stages": min(strategy.virtual_stages, 2),
        "stage_layers": (),
        "schedule_file": "",
    }
    if changes["ep"] != strategy.ep:
        notes.append(f"ep={strategy.ep} is {changes['ep']} here")
    if strategy.schedule_file:
        notes.append(f"the schedule is {strategy.schedule}, not that of {strategy.schedule_file}")
    if strategy.recompute_layers is not None:
        changes["recompute_layers"] = 1
    values = {f.name: getattr(strategy, f.name) for f in fields(Strategy)}
    return Strategy(**{**values, **degrees, **changes}), tuple(notes)


def _parallel(recipe: Recipe, layout: Strategy) -> Parallel:
    shared = {f.name for f in fields(Strategy)} & set(Parallel.model_fields) - {"rules"}
    values = {name: getattr(layout, name) for name in shared}
    return recipe.parallel.model_copy(update={**values, "auto": False, "world_size": None})


def _small_recipe(recipe: Recipe, scratch: Path, steps: int, dp: int, *, narrow: bool) -> Recipe:
    """Return the recipe with a small random model in float64, short sequences, and no checkpoints or offload."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = read_config(recipe.model.path)
    values = dict(file.values)
    if values.get("model_type") in CONFIG_MAPPING:  # add the defaults of transformers
        values = {**values, **AutoConfig.for_model(**values).to_dict()}
    directory = file.directory
    tokenizer = recipe.data.tokenizer
    if tokenizer is None and directory is not None and has_tokenizer(directory):
        tokenizer = str(directory)
    model = scratch / "model"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    for code in directory.glob("*.py") if directory is not None else ():
        shutil.copy(code, model)
    small = shrink_config(values, narrow=narrow, keep_vocabulary=tokenizer is not None)
    (model / "config.json").write_text(json.dumps(small), encoding="utf-8")
    microbatch = 2 if recipe.stage in PAIRED_STAGES else 1  # the two answers of a pair
    longest = _TEXT_SEQ_LEN if recipe.stage == "pt" else _RECORD_SEQ_LEN
    seq_len = min(recipe.data.seq_len, longest)
    # A CPU may not support other implementations than the default and `eager`.
    attention = "eager" if recipe.model.attn_implementation == "eager" else None
    update: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "init": "random", "attn_implementation": attention},
        "data": {
            "tokenizer": tokenizer, "seq_len": seq_len, "vocab_size": SIZES["vocab_size"], "holdout": 0.0,
            "validation": None, "validation_split": None,
            "max_bytes": None if recipe.stage in PREFERENCE_STAGES else min(recipe.data.max_bytes or 1 << 20, 1 << 20),
        },
        "training": {
            "steps": steps, "epochs": None, "dtype": "float64", "microbatch": microbatch, "accumulation_steps": None,
            "tokens_per_step": dp * _MICROBATCHES * microbatch * seq_len, "lr_schedule": "constant", "warmup_steps": 0,
            # The first update by a gradient g is lr g / (|g| + eps): a small eps multiplies the rounding of a small g.
            "decay_steps": None, "eps": max(recipe.training.eps, 1e-6), "max_grad_norm": None,
            "on_nonfinite": "stop", "skip_grad_norm": None, "compile": False, "eval_every": 0, "callbacks": (),
            "profile": None,
            "recompute_layers": None if recipe.training.recompute_layers is None else 1,
        },
        # With a capacity, dropped tokens would depend on the number of tokens per rank.
        "moe": {"capacity_factor": None},
        "checkpoint": {"every": 0, "every_minutes": 0.0, "keep_best": False, "resume": "never", "from_dir": None,
                       "export": False},
    }  # fmt: skip
    sections: dict[str, Any] = {k: getattr(recipe, k).model_copy(update=v) for k, v in update.items()}
    # GRPO: train on the answers of the data instead of rollouts.
    if recipe.stage == "grpo":
        sections |= {"stage": "sft", "grpo": Grpo()}
    plain = {"offload": Offload(), "output_dir": str(scratch / "run"), "topology": "local-cpu"}
    return recipe.model_copy(update={**sections, **plain, "sample_prompt": None, "sample_answers": 0})


def _size(loaded: LoadedRecipe) -> int:
    """Return the approximate number of parameters of the recipe's model when reduced in depth only."""
    model = loaded.recipe.model
    spec = read_spec(model.path, trusted=model.trust_remote_code)
    return int(spec.num_params * min(1.0, SIZES["num_hidden_layers"] / spec.num_layers))


def _job(loaded: LoadedRecipe, recipe: Recipe, parallel: Parallel) -> Job:
    own = recipe.model_copy(update={"parallel": parallel})
    return prepare_job(replace(loaded, recipe=own), progress=False)


def _run(job: Job) -> tuple[Steps, list[str]]:
    """Train on local ranks; return the metrics of each step, and the metric names in the order of the first step."""
    ranks = job.plan.strategy.world_size
    results = launch(lambda _: _rank(job), ranks, threads=rank_threads(ranks))
    steps: Steps = []
    for step in range(job.recipe.training.steps):
        squares: dict[str, float] = {}
        for rank in results:
            for name, value in rank[step][1].items():
                squares[name] = squares.get(name, 0.0) + value
        steps.append({**results[0][step][0], **{n: math.sqrt(v) for n, v in squares.items()}})
    return steps, list(steps[0])


def _rank(job: Job) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return, per step, loss and gradient norm, and this rank's share of squared gradient norms by parameter."""
    training, steps = job.recipe.training, []
    squares: dict[str, float] = {}
    with World.join("cpu") as world, TorchEngine(job, world, Display(0, False)) as engine:
        model: nn.Module = engine._model
        engine._optimizer.register_step_pre_hook(lambda *_: squares.update(_squares(model)))
        batches, schedule = job.train_batches(), LrSchedule(training)
        engine.begin(0, batches)
        for step in range(1, training.steps + 1):
            result = engine.step(step, batches, schedule.lr(step))
            steps.append(({"loss": result.loss, "grad_norm": result.grad_norm}, dict(squares)))
            squares.clear()
    return steps


def _squares(model: nn.Module) -> dict[str, float]:
    copies = handle(model).copies
    return {
        canonical_name(name): float(local(p.grad).double().square().sum()) / copies(name)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def _differences(expected: Steps, actual: Steps, order: list[str]) -> Iterator[Difference]:
    for step, (expected_step, actual_step) in enumerate(zip(expected, actual, strict=True), start=1):
        for name in [*order, *(n for n in actual_step if n not in order)]:
            a, b = expected_step.get(name, math.nan), actual_step.get(name, math.nan)
            least = 1e-300 if name == "loss" else _FLOOR * expected_step["grad_norm"]
            yield Difference(name, step, a, b, abs(a - b) / max(abs(a), least))
