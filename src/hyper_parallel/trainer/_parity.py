"""A recipe's layout against one rank: the same steps of a small copy of its model, on local processes of this CPU."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
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
from hyper_parallel.trainer._shrink import SIZES, shrunk
from hyper_parallel.trainer.data import has_tokenizer
from hyper_parallel.trainer.engine.recipe_model import read_spec
from hyper_parallel.trainer.engine.torch_engine import TorchEngine
from hyper_parallel.trainer.hub_models import with_hub_models
from hyper_parallel.trainer.job import Job, prepare_job, under_torchrun
from hyper_parallel.trainer.loop import Display, LrSchedule

LIMIT: Final = 1e-10
"""Relative difference up to which two numbers of a run in float64 are the same."""

_FLOOR: Final = 1e-6
"""Share of the whole gradient below which the gradient of one parameter is compared with this share instead."""
_MOST_RANKS: Final = 8  # three axes of two: every pair of axes meets, and a laptop bears it
_AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y")
_LEFT_OUT: Final = ("dp_replicate", "dp_shard", "tp_y", "cp")
"""Axes that are left out where there are too many, the ones that most layouts have in common first."""
_MOST_WHOLE: Final = 50_000_000
"""Parameters of a model that is made shorter only, where the narrow one does not work."""
_SEQ_LEN: Final = {
    "pt": 64,
    "sft": 512,
    "dpo": 512,
    "orpo": 512,
    "kto": 512,
    "rm": 512,
    "grpo": 512,
}
_MICROBATCHES: Final = 4  # as many as stages of two virtual ones on two ranks need

Steps = list[dict[str, float]]
"""Loss, gradient norm, and the norm of every parameter's gradient, of each step."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One number of a step, by both runs.

    Attributes:
        name: `loss`, `grad_norm`, or the parameter whose gradient has this norm.
        step: From 1.
        one_rank: The number of one rank.
        layout: That of the layout; NaN where it has none.
        relative: Their difference over the number, and for a very small gradient over its share of the whole one.
    """

    name: str
    step: int
    one_rank: float
    layout: float
    relative: float


@dataclass(frozen=True, slots=True)
class Parity:
    """What the two runs did.

    Attributes:
        model: What was trained, in words.
        strategy: The layout that was tried.
        notes: How it differs from the recipe's.
        differences: Every number of every step; by step, loss and norm first, then parameters in the model's order.
    """

    model: str
    strategy: Strategy
    notes: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """The first parameter, in the model's order, whose gradient differs in the first step in which one does.

        Where only loss or norm differ, this one.
        """
        wrong = [d for d in self.differences if not d.relative <= LIMIT]
        of_parameters = [d for d in wrong if d.name not in ("loss", "grad_norm")]
        return next(iter(of_parameters or wrong), None)

    def worst(self, count: int) -> list[Difference]:
        """The largest differences of all, each number once."""
        found: dict[str, Difference] = {}
        for d in sorted(
            self.differences, key=lambda d: -d.relative if d.relative >= 0 else -math.inf
        ):
            found.setdefault(d.name, d)
        return list(found.values())[:count]


def parity(loaded: LoadedRecipe, steps: int = 3) -> Parity:
    """Train a small copy of a recipe's model on one rank and on the recipe's layout, and compare.

    Both runs have the same seed and data, float64, no dropout and no clipping; ranks are local processes that meet by
    gloo. Degrees above 2 are 2, and axes are left out until 8 ranks are enough.

    Args:
        loaded: The recipe.
        steps: Optimizer steps.

    Raises:
        Contradiction: HP104 in a process of torchrun.
        HyperParallelError: What preparing or running either run raises.
    """
    if under_torchrun():
        raise Contradiction(
            "parity starts its own ranks, and this process is one of torchrun's",
            where="environment of this process",
            hint=f"hyper-parallel parity {loaded.path}",
        )
    loaded = with_hub_models(loaded)
    layout, notes = _layout(loaded)
    with scratch_folder(in_memory=False) as scratch:
        for narrow in (True, False):
            try:
                recipe = _small(loaded.recipe, scratch, steps, layout.dp, narrow=narrow)
                jobs = [_job(loaded, recipe, p) for p in (Parallel(), _parallel(recipe, layout))]
                expected, order = _run(jobs[0])
                break
            except HyperParallelError as error:
                if not narrow or _size(loaded) > _MOST_WHOLE:
                    raise
                notes = (
                    *notes,
                    f"only made shorter, because narrow it does not train: {error.what}",
                )
        found, _ = _run(jobs[1])
        spec, size = jobs[0].plan.model, jobs[0].recipe.training.tokens_per_step
        model = (
            f"{spec.family} of {loaded.recipe.model.path} made small, {spec.num_params:,} "
            f"parameters, {steps} steps of {size} tokens"
        )
    return Parity(model, layout, notes, tuple(_differences(expected, found, order)))


def _layout(loaded: LoadedRecipe) -> tuple[Strategy, tuple[str, ...]]:
    """The recipe's layout on at most `_MOST_RANKS` ranks, and how it was changed."""
    recipe = loaded.recipe
    spec = read_spec(
        recipe.model.path,
        loaded.where("model.path"),
        trusted=recipe.model.trust_remote_code,
        tried=recipe.parallel.auto,
        scores=recipe.stage == "rm",
    )
    whole = plan_recipe(recipe, None, loaded.where, spec).strategy
    hybrid = whole.cp_kind == "hybrid" and whole.cp > 2
    degrees = {a: min(getattr(whole, a), 4 if hybrid and a == "cp" else 2) for a in _AXES}
    notes = [
        f"{a}={getattr(whole, a)} is {d} here" for a, d in degrees.items() if d != getattr(whole, a)
    ]
    for axis in _LEFT_OUT:
        if math.prod(degrees.values()) > _MOST_RANKS and degrees[axis] > 1:
            degrees[axis] = 1
            notes.append(f"{axis} is left out: more than {_MOST_RANKS} ranks")
    room = math.prod(degrees[a] for a in ("dp_shard", "cp", "tp_x", "tp_y"))
    more: dict[str, Any] = {
        "ep": min(whole.ep, 2, room),
        "cp_ulysses": 2 if hybrid else min(whole.cp_ulysses, degrees["cp"]),
        "virtual_stages": min(whole.virtual_stages, 2),
        "stage_layers": (),
        "schedule_file": "",
    }
    if more["ep"] != whole.ep:
        notes.append(f"ep={whole.ep} is {more['ep']} here")
    if whole.schedule_file:
        notes.append(f"the schedule is {whole.schedule}, not that of {whole.schedule_file}")
    if whole.recompute_layers is not None:
        more["recompute_layers"] = 1
    kept = {f.name: getattr(whole, f.name) for f in fields(Strategy)}
    return Strategy(**{**kept, **degrees, **more}), tuple(notes)


def _parallel(recipe: Recipe, layout: Strategy) -> Parallel:
    shared = {f.name for f in fields(Strategy)} & set(Parallel.model_fields) - {"rules"}
    given = {name: getattr(layout, name) for name in shared}
    return recipe.parallel.model_copy(update={**given, "auto": False, "world_size": None})


def _small(recipe: Recipe, scratch: Path, steps: int, dp: int, *, narrow: bool) -> Recipe:
    """The recipe with a small model from scratch, in float64, a few short steps, and no file of its own."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = read_config(recipe.model.path)
    values = dict(file.values)
    if values.get("model_type") in CONFIG_MAPPING:  # with the values that it leaves to transformers
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
    small = shrunk(values, narrow=narrow, keep_vocabulary=tokenizer is not None)
    (model / "config.json").write_text(json.dumps(small), encoding="utf-8")
    microbatch = 2 if recipe.stage in PAIRED_STAGES else 1  # a pair of answers
    seq_len = min(recipe.data.seq_len, _SEQ_LEN[recipe.stage])
    update: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "init": "random", "attn_implementation": _attention(recipe)},
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
        # What an expert may take depends on the tokens of a rank.
        "moe": {"capacity_factor": None},
        "checkpoint": {"every": 0, "every_minutes": 0.0, "keep_best": False, "resume": "never", "from_dir": None,
                       "export": False},
    }  # fmt: skip
    sections: dict[str, Any] = {
        k: getattr(recipe, k).model_copy(update=v) for k, v in update.items()
    }
    if (
        recipe.stage == "grpo"
    ):  # the answers of its data are learned from, as any layout would those of a rollout
        sections |= {"stage": "sft", "grpo": Grpo()}
    plain = {"offload": Offload(), "output_dir": str(scratch / "run"), "topology": "local-cpu"}
    return recipe.model_copy(update={**sections, **plain, "sample_prompt": None})


def _attention(recipe: Recipe) -> str | None:
    """The recipe's attention where a CPU has it."""
    return recipe.model.attn_implementation if recipe.model.attn_implementation == "eager" else None


def _size(loaded: LoadedRecipe) -> int:
    """Parameters of the recipe's model with few layers of their full width."""
    model = loaded.recipe.model
    spec = read_spec(model.path, trusted=model.trust_remote_code)
    return int(spec.num_params * min(1.0, SIZES["num_hidden_layers"] / spec.num_layers))


def _job(loaded: LoadedRecipe, recipe: Recipe, parallel: Parallel) -> Job:
    own = recipe.model_copy(update={"parallel": parallel})
    return prepare_job(LoadedRecipe(own, loaded.origins, loaded.path), progress=False)


def _run(job: Job) -> tuple[Steps, list[str]]:
    """Every number of every step of a run, and the names of parameters in the order of the model."""
    ranks = job.plan.strategy.world_size
    found = launch(lambda _: _rank(job), ranks, threads=rank_threads(ranks))
    steps: Steps = []
    for step in range(job.recipe.training.steps):
        squares: dict[str, float] = {}
        for rank in found:
            for name, value in rank[step][1].items():
                squares[name] = squares.get(name, 0.0) + value
        steps.append({**found[0][step][0], **{n: math.sqrt(v) for n, v in squares.items()}})
    return steps, list(steps[0])


def _rank(job: Job) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Loss and norm of every step, and this rank's part of each gradient's square."""
    training, found = job.recipe.training, []
    squares: dict[str, float] = {}
    with World.join("cpu") as world, TorchEngine(job, world, Display(0, False)) as engine:
        model: nn.Module = engine._model
        engine._optimizer.register_step_pre_hook(lambda *_: squares.update(_squares(model)))
        batches, schedule = job.train_batches(), LrSchedule.of(training)
        engine.begin(0, batches)
        for step in range(1, training.steps + 1):
            result = engine.step(step, batches, schedule.lr(step))
            found.append(({"loss": result.loss, "grad_norm": result.grad_norm}, dict(squares)))
            squares.clear()
    return found


def _squares(model: nn.Module) -> dict[str, float]:
    copies = handle(model).copies
    return {
        canonical_name(name): float(local(p.grad).double().square().sum()) / copies(name)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def _differences(expected: Steps, found: Steps, order: list[str]) -> Iterator[Difference]:
    for step, (mine, theirs) in enumerate(zip(expected, found, strict=True), start=1):
        for name in [*order, *(n for n in theirs if n not in order)]:
            a, b = mine.get(name, math.nan), theirs.get(name, math.nan)
            least = 1e-300 if name == "loss" else _FLOOR * mine["grad_norm"]
            yield Difference(name, step, a, b, abs(a - b) / max(abs(a), least))
