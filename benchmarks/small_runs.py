"""Short training runs of a small model on this machine, one for each strategy: predicted and measured time.

Used by `simulator_accuracy.py` and `strategy_ranking.py`. Every run is `hyper-parallel train` with gloo ranks, so the
trainer, the data and the runtime are the real ones; the first steps are left out.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.config import Recipe
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Plan
from hyper_parallel.planner import plan_recipe, simulate_plan

MODEL = Path(__file__).parent.parent / "recipes/models/quickstart.json"
WARM_UP = 3


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        plan: The plan it ran.
        step_s: Median seconds per step.
        simulated_s: End of the simulated step.
    """

    plan: Plan
    step_s: float
    simulated_s: float


def recipe(
    parallel: dict[str, object], training: dict[str, object], steps: int
) -> dict[str, object]:
    """The recipe of one run."""
    return {
        "model": {"path": str(MODEL)},
        "data": {"source": "python-stdlib", "seq_len": 256, "vocab_size": 1024},
        "training": {"steps": steps, "dtype": "float32", "tokens_per_step": 4096, **training},
        "parallel": parallel,
        "checkpoint": {"export": False},
    }


def run(values: dict[str, object], folder: Path) -> Measured:
    """Train a recipe in a folder of its own and read what it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "recipe.yaml"
    # JSON is YAML.
    file.write_text(json.dumps({**values, "output_dir": str(folder / "run")}), encoding="utf-8")
    command = [sys.executable, "-m", "hyper_parallel", "--quiet", "train", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{values['parallel']}: {done.stderr[-2000:]}")
    lines = (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [float(json.loads(line)["step_s"]) for line in lines][WARM_UP:]
    made = Plan.load(folder / "run/plan.json")
    return Measured(made, statistics.median(seconds), simulate_plan(made).end_s)


def legal(ranks: int, number: int, steps: int, seed: int = 0) -> list[dict[str, object]]:
    """Recipes of random legal strategies on a number of ranks, all with the same tokens per step.

    Args:
        ranks: Ranks; the degrees multiply to it.
        number: How many.
        steps: Steps of each run.
        seed: Of the random choice.
    """
    degrees = [d for d in range(1, ranks + 1) if ranks % d == 0]
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x")
    meshes = [m for m in itertools.product(degrees, repeat=len(axes)) if _product(m) == ranks]
    choices = list(itertools.product(meshes, ("none", "full"), (True, False), (1, 2, 4)))
    random.Random(seed).shuffle(choices)
    found: list[dict[str, object]] = []
    seen = set()
    for mesh, recompute, reshard, micro in choices:
        named: dict[str, object] = dict(zip(axes, mesh, strict=True))
        if mesh[2] * mesh[3] == 1 and not reshard:
            continue
        values = recipe(
            {**named, "reshard_after_forward": reshard},
            {"recompute": recompute, "microbatch": micro},
            steps,
        )
        try:
            plan_recipe(Recipe.model_validate(values))
        except HyperParallelError:
            continue
        key = (mesh, recompute, reshard, micro)
        if key not in seen:
            seen.add(key)
            found.append(values)
        if len(found) == number:
            break
    return found


def _product(numbers: tuple[int, ...]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation, ties with their mean rank."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]

    return statistics.correlation(ranks(a), ranks(b))
