"""Reinforcement learning on two processes in three modes: colocated, separate in step, separate ahead.

    python benchmarks/rollout_modes.py --json                              120 steps per mode, twice, in turn
    python benchmarks/rollout_modes.py --until-learned --rounds 5 --json   reward over time, 40 minutes

Colocated ranks both train and sample, in turn. In the separate modes, one rank trains and the other samples, with the
newest weights (in step) or ahead of training. Each mode is a run of `hyper-parallel train` on
recipes/grpo_arithmetic.yaml. A separate sampling rank also runs the
forward of the reference model (`grpo.reference_role=sampler`). Times are the median step in metrics.jsonl after the
first ten steps. The parts of a step in mode "in step" (waiting for completions, and the rest) are the only input of a
simulation of sampling ahead, which is compared with the measurement. The planner's predictions are printed as well.

Bars: sampling ahead is at least 1.15 times as fast as in step, in seconds per step, and in total seconds over seeds
until the mean reward of 20 steps exceeds 0.9, if all runs reach it. The simulated ratio is within 10 % of the measured
one. The colocated mode, which divides both kinds of work evenly, is reported without a bar.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from _machine import machine
from _trained import Rows, train

from hyper_parallel.ir import role_tasks
from hyper_parallel.sim import steady_step_s

RECIPE = Path(__file__).parent.parent / "recipes/grpo_arithmetic.yaml"
WARM = 10
FASTER, WITHIN = 1.15, 0.10
GOAL, MEAN_OF = 0.9, 20  # reward, over so many steps
ONE = ["parallel.dp_replicate=1", "grpo.rollout_ranks=1", "grpo.reference_role=sampler"]
MODES = {
    "colocated": ["parallel.dp_replicate=2"],
    "in_step": [*ONE, "grpo.max_staleness=0"],
    "ahead": [*ONE, "grpo.max_staleness=1"],
}


def run(mode: str, steps: int, place: Path, seed: int, until_learned: bool) -> Rows:
    """Run one mode, and return the records of metrics.jsonl."""
    words = ["checkpoint.resume=never", "checkpoint.export=false"]
    words += [*MODES[mode], f"training.steps={steps}", f"training.seed={seed}"]
    enough = (lambda rows: seconds_to_goal(rows) is not None) if until_learned else None
    return train(RECIPE, place / f"{mode}{seed}", words, enough)


def seconds_to_goal(rows: Rows) -> float | None:
    """Return the seconds of all steps until the mean reward exceeds the goal; None if it never does."""
    rewards = [row["rollout"]["reward"] for row in rows]
    for end in range(MEAN_OF, len(rows) + 1):
        if statistics.mean(rewards[end - MEAN_OF : end]) > GOAL:
            return sum(row["step_s"] for row in rows[:end])
    return None


def main() -> None:
    """Run the benchmark, and print its results and whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--until-learned", action="store_true", help="800 steps at most")
    given = parser.parse_args()
    steps = given.steps or (800 if given.until_learned else 120)
    found: dict[str, Rows] = {mode: [] for mode in MODES}
    ends: dict[str, float] = {}
    goals: dict[str, list[float | None]] = {}
    taken: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as place:
        for seed in range(given.rounds):
            for mode in MODES:
                rows = run(mode, steps, Path(place), seed, given.until_learned)
                ends[mode] = statistics.mean(row["rollout"]["reward"] for row in rows[-MEAN_OF:])
                goals.setdefault(mode, []).append(seconds_to_goal(rows))
                taken.setdefault(mode, []).append(len(rows))
                print(f"seed {seed}, {mode}: {len(rows)} steps", file=sys.stderr, flush=True)
                found[mode] += rows[WARM:]
    step_s = {mode: statistics.median(row["step_s"] for row in rows) for mode, rows in found.items()}
    apart = found["in_step"]
    wait = statistics.median(row["rollout"]["wait_s"] for row in apart)
    ratio = step_s["in_step"] / step_s["ahead"]
    ahead_s = steady_step_s(role_tasks(wait, step_s["in_step"] - wait, 1, 20), 1)
    expected = step_s["in_step"] / ahead_s
    to_goal = None
    if all(None not in seconds for seconds in goals.values()):
        to_goal = sum(goals["in_step"]) / sum(goals["ahead"])
    result = {
        "machine": machine(),
        "steps": taken,
        "rounds": given.rounds,
        "step_s": step_s,
        "predicted_step_s": {mode: rows[0]["pred_step_s"] for mode, rows in found.items()},
        "reward_of_last_20_steps": ends,
        "seconds_to_reward": {"reward": GOAL, **goals},
        "in_step_to_ahead_in_seconds_to_reward": to_goal,
        "sampling_s": wait,
        "busy": {mode: step_s["in_step"] / 2 / step_s[mode] for mode in ("in_step", "ahead")},
        "largest_age": max(row["rollout"]["age"] for row in found["ahead"]),
        "ahead_to_in_step": ratio,
        "simulated_ratio": expected,
        "colocated_to_ahead": step_s["colocated"] / step_s["ahead"],
    }
    behind = None in goals["ahead"] and None not in goals["in_step"]  # it got there in step alone
    enough = ratio >= FASTER and not behind and (to_goal is None or to_goal >= FASTER)
    result["passed"] = enough and abs(expected / ratio - 1) <= WITHIN
    print(json.dumps(result, indent=1 if given.json else None))
    sys.exit(not result["passed"])


if __name__ == "__main__":
    main()
