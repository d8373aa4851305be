"""Measured step times of a small model on this machine under several strategies, with the plans that predict them.

Used by `simulator_accuracy.py` and `strategy_ranking.py`. Forked ranks hold the models of a few strategies, which run
some steps in turn, round after round, so that other load affects all of them alike. More models per launch would slow
ranks down: with 20 models and their process groups, up to three times. A step is the trainer's `short_step`.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hyper_parallel.backends.torch import materialize
from hyper_parallel.config import Recipe
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Plan
from hyper_parallel.planner import plan_recipe
from hyper_parallel.runtime import World, launch, parallelize
from hyper_parallel.topology import rank_threads
from hyper_parallel.trainer import build_optimizer, short_step

AT_ONCE = 4
MODEL = Path(__file__).parent.parent / "recipes/models/quickstart.json"


@dataclass(frozen=True)
class Measured:
    """Measured step time of one strategy.

    Attributes:
        plan: Plan of the strategy.
        step_s: Seconds per step in the fastest round, which other load disturbed least.
        spread: Slowest round divided by the fastest.
    """

    plan: Plan
    step_s: float
    spread: float


def recipe(parallel: dict[str, object], training: dict[str, object], model: Path = MODEL) -> Recipe:
    """Return the recipe of one strategy, given values of the sections `parallel` and `training`."""
    return Recipe.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"source": "python-stdlib", "seq_len": 256, "vocab_size": 1024},
            "training": {"dtype": "float32", "tokens_per_step": 2048, **training},
            "parallel": parallel,
        }
    )


def with_experts(folder: Path) -> Path:
    """Write the config of the same model with 8 experts, 2 per token, into a folder, and return its path."""
    config = json.loads(MODEL.read_text(encoding="utf-8"))
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 224, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    file = folder / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


def measure(recipes: list[Recipe], ranks: int, rounds: int = 4, steps: int = 2) -> list[Measured]:
    """Train every recipe on forked ranks, in turn, and return the measured step times.

    Args:
        recipes: Recipes whose degrees multiply to the ranks.
        ranks: Number of ranks.
        rounds: Number of turns of every strategy, after one turn that does not count.
        steps: Steps per turn.
    """
    # Imported once, before the ranks are forked.
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    plans = [plan_recipe(one) for one in recipes]
    jobs = list(zip(recipes, plans, strict=True))
    seconds: list[list[float]] = []
    for first in range(0, len(jobs), AT_ONCE):
        some = jobs[first : first + AT_ONCE]
        seconds += launch(
            lambda rank, some=some: _on_rank(some, rounds, steps),
            ranks,
            threads=rank_threads(ranks),
        )[0]
    return [Measured(plan, min(turns), max(turns) / min(turns)) for plan, turns in zip(plans, seconds, strict=True)]


def _on_rank(jobs: list[tuple[Recipe, Plan]], rounds: int, steps: int) -> list[list[float]]:
    with World.join() as world:
        runs = [_Run(one, plan, world) for one, plan in jobs]
        seconds = [[run.turn(steps) for run in runs] for _ in range(rounds + 1)]
        return [list(turns) for turns in zip(*seconds[1:], strict=True)]


class _Run:
    """Model and optimizer of one strategy on this rank."""

    def __init__(self, one: Recipe, plan: Plan, world: World) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        path = Path(one.model.path)
        path = path / "config.json" if path.is_dir() else path
        config = AutoConfig.for_model(**json.loads(path.read_text(encoding="utf-8")))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        self._model = parallelize(model, plan, world)
        materialize(self._model, seed=0, device=world.device)
        self._optimizer = build_optimizer(self._model, one.training)
        w = plan.workload
        shape = (w.microbatch or 1, w.seq_len)
        tokens = torch.randint(1024, shape, generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": tokens, "shift_labels": tokens}
        self._batches = [batch] * (w.accumulation_steps or 1)
        self._tokens = w.tokens_per_step or 1
        self._world = world

    def turn(self, steps: int) -> float:
        """Run some steps after a barrier, and return their mean seconds."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            short_step(self._model, self._optimizer, self._batches, self._tokens, self._world)
        return (time.perf_counter() - start) / steps


def legal(ranks: int, number: int, seed: int = 0) -> list[Recipe]:
    """Return recipes of random legal strategies, all with the same tokens per step.

    Drawn are the degrees of all axes of a dense model, the kind of context parallelism, recomputation, resharding and
    the
    microbatch. A mesh is repeated only after all meshes were drawn.

    Args:
        ranks: Number of ranks, the product of the degrees.
        number: Number of recipes.
        seed: Seed of the random choice.
    """
    degrees = [d for d in range(1, ranks + 1) if ranks % d == 0]
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y")
    meshes = [m for m in itertools.product(degrees, repeat=len(axes)) if _product(m) == ranks]
    rng = random.Random(seed)
    found: list[Recipe] = []
    seen = set()
    tries = 0
    while len(found) < number and tries < 200:
        tries += 1
        rng.shuffle(meshes)
        for mesh in meshes:
            named: dict[str, object] = dict(zip(axes, mesh, strict=True))
            named["reshard_after_forward"] = mesh[2] * mesh[3] == 1 or rng.random() < 0.5
            if mesh[3] > 1:
                named["cp_kind"] = rng.choice(("ring", "ulysses", "all_gather"))
            training = {
                "recompute": rng.choice(("none", "full")),
                "microbatch": rng.choice((1, 2, 4)),
            }
            key = json.dumps([named, training])
            if key in seen:
                continue
            one = recipe(named, training)
            try:
                plan_recipe(one)
            except HyperParallelError:
                continue
            seen.add(key)
            found.append(one)
            if len(found) == number:
                break
    return found


def _product(numbers: tuple[int, ...]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Return Spearman's rank correlation; ties have their mean rank."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]

    return statistics.correlation(ranks(a), ranks(b))
