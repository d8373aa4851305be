"""Reward of a reinforcement-learning task at `max_staleness` 0 to 4, over several seeds.

    python benchmarks/staleness_rewards.py --json                 5 seeds, about 40 minutes on 2 cores
    python benchmarks/staleness_rewards.py --seeds 1 --steps 50   a short run

Each run is `hyper-parallel train` with one training rank and one rank that samples ahead. A tiny model with random
weights learns to name the next digit from rewards alone. The reward of a run is the mean over completions sampled for
its last steps.

Bars for every staleness bound: the mean reward over seeds exceeds 0.9, and is below that of bound 0 by at most two
standard errors of the difference or 0.02, whichever is larger. No completion is older than the bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

from _machine import machine
from _trained import train

MODEL = Path(__file__).parent.parent / "recipes/models/tiny.json"
BOUNDS = (0, 1, 2, 3, 4)
LAST = 20  # steps whose rewards are averaged
LEARNED, NEAR, ERRORS = 0.9, 0.02, 2.0


def write_recipe(place: Path, steps: int) -> Path:
    """Write the recipe and its prompts, and return the recipe's path."""
    records = [{"prompt": f"{a}+1=", "completion": str((a + 1) % 10)} for a in range(10)]
    (place / "sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    recipe = {
        "model": {"path": str(MODEL)}, "stage": "grpo",
        "data": {"source": str(place / "sums.jsonl"), "seq_len": 40, "packing": False, "holdout": 0.0},
        "grpo": {
            "num_generations": 16, "max_completion_length": 1, "reward_funcs": ["exact_match"], "beta": 0.04,
            "rollout_ranks": 1,
        },
        "training": {
            "steps": steps, "dtype": "float32", "tokens_per_step": 256 * 40, "microbatch": 256, "lr": 1e-3,
            "warmup_steps": 10, "weight_decay": 0.0, "log_every": steps,
        },
        "parallel": {"dp_replicate": 1}, "checkpoint": {"export": False, "resume": "never"},
    }  # fmt: skip
    (place / "recipe.yaml").write_text(json.dumps(recipe))
    return place / "recipe.yaml"


def run(recipe: Path, bound: int, seed: int) -> dict[str, float]:
    """Run the recipe with a staleness bound and a seed, and return reward and age of the completions."""
    out = recipe.parent / f"bound{bound}_seed{seed}"
    rows = train(recipe, out, [f"grpo.max_staleness={bound}", f"training.seed={seed}"])
    rewards = [row["rollout"]["reward"] for row in rows]
    ages = [row["rollout"]["age"] for row in rows]
    return {
        "reward": statistics.mean(rewards[-LAST:]),
        "age": statistics.mean(ages),
        "oldest": max(ages),
        "step_s": statistics.median(row["step_s"] for row in rows[10:]),
    }


def main() -> None:
    """Run the benchmark, and print its results and whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {bound: [] for bound in BOUNDS}
    with tempfile.TemporaryDirectory() as place:
        recipe = write_recipe(Path(place), given.steps)
        for seed, bound in itertools.product(range(given.seeds), BOUNDS):
            found[bound].append(run(recipe, bound, seed))
            print(f"seed {seed}, bound {bound}: {found[bound][-1]}", file=sys.stderr, flush=True)
    rewards = {bound: [r["reward"] for r in runs] for bound, runs in found.items()}
    table, passed = {}, True
    for bound, runs in found.items():
        behind = statistics.mean(rewards[0]) - statistics.mean(rewards[bound])
        spread = [statistics.variance(rewards[b]) if given.seeds > 1 else 0.0 for b in (0, bound)]
        allowed = max(NEAR, ERRORS * math.sqrt(sum(spread) / given.seeds))
        row = {
            "reward": statistics.mean(rewards[bound]),
            "rewards": rewards[bound],
            "behind_bound_0": behind,
            "allowed": allowed,
            "age": statistics.mean(r["age"] for r in runs),
            "oldest": max(r["oldest"] for r in runs),
            "step_s": statistics.mean(r["step_s"] for r in runs),
        }
        table[bound] = row
        passed &= row["reward"] > LEARNED and behind <= allowed and row["oldest"] <= bound
    result = {
        "machine": machine(),
        "steps": given.steps,
        "seeds": given.seeds,
        "bounds": table,
        "passed": passed,
    }
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        for bound, row in table.items():
            print(f"bound {bound}: reward {row['reward']:.3f}, age {row['age']:.2f}, step {row['step_s']:.3f} s")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
