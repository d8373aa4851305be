"""Reinforcement learning on two processes: both train and sample in turn, or one samples, in step or ahead.

    python benchmarks/rollout_modes.py --json                    120 steps of each, twice, in turn
    python benchmarks/rollout_modes.py --steps 800 --rounds 1    to the end of the recipe

Each is `hyper-parallel train recipes/grpo_arithmetic.yaml` in a process of its own; seconds are those of
metrics.jsonl, of the median step after the first ten. A step of the second way gives the seconds of its parts: waiting
for completions, and the rest. With these alone the task graph of the third is simulated, and compared with it. What the
planner predicted of each before it ran is shown too.

Bars: sampling ahead is at least 1.15 times as fast as in step, and the simulated ratio is within 10 % of the measured
one. Ranks that train and sample in turn share both evenly, so on two processes they may be the fastest: it is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from _machine import machine
from _trained import train

from hyper_parallel.ir import Task, TaskGraph, simulate

RECIPE = Path(__file__).parent.parent / "recipes/grpo_arithmetic.yaml"
WARM = 10
FASTER, WITHIN = 1.15, 0.10
ONE = ["parallel.dp_replicate=1", "grpo.rollout_ranks=1"]
MODES = {
    "colocated": ["parallel.dp_replicate=2"],
    "in_step": [*ONE, "grpo.max_staleness=0"],
    "ahead": [*ONE, "grpo.max_staleness=1"],
}


def run(mode: str, steps: int, place: Path) -> list[dict[str, object]]:
    """Rows of metrics.jsonl of one run."""
    # Without the pass of the reference, which one role alone makes.
    common = ["checkpoint.resume=never", "grpo.beta=0", "checkpoint.export=false"]
    return train(RECIPE, place / mode, [*MODES[mode], f"training.steps={steps}", *common])


def simulated(rows: list[dict[str, object]], staleness: int) -> float:
    """Seconds of a step when sampling runs ahead by so many steps, from the parts of steps that do not overlap."""
    tasks: list[Task] = []
    learned: list[int] = []
    for number, row in enumerate(rows):
        wait = row["rollout"]["wait_s"]
        before = (learned[number - 1 - staleness],) if number > staleness else ()
        tasks.append(Task(f"sample {number}", "sampler", round(wait * 1e9), deps=before))
        rest = round((row["step_s"] - wait) * 1e9)
        tasks.append(Task(f"learn {number}", "learner", rest, deps=(len(tasks) - 1,)))
        learned.append(len(tasks) - 1)
    ends = [s.start_s + s.duration_s for s in simulate(TaskGraph(tuple(tasks))).spans]
    return max(ends) / len(rows)


def main() -> None:
    """Run, print, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    found: dict[str, list[dict[str, object]]] = {mode: [] for mode in MODES}
    ends: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        for _ in range(given.rounds):
            for mode in MODES:
                rows = run(mode, given.steps, Path(place))
                ends[mode] = statistics.mean(row["rollout"]["reward"] for row in rows[-20:])
                found[mode] += rows[WARM:]
    step_s = {
        mode: statistics.median(row["step_s"] for row in rows) for mode, rows in found.items()
    }
    apart = found["in_step"]
    wait = statistics.median(row["rollout"]["wait_s"] for row in apart)
    ratio = step_s["in_step"] / step_s["ahead"]
    in_step = statistics.mean(row["step_s"] for row in apart)
    expected = in_step / simulated(apart, 1)
    result = {
        "machine": machine(),
        "steps": given.steps,
        "rounds": given.rounds,
        "step_s": step_s,
        "predicted_step_s": {mode: rows[0]["pred_step_s"] for mode, rows in found.items()},
        "reward_of_last_20_steps": ends,
        "sampling_s": wait,
        "busy": {mode: step_s["in_step"] / 2 / step_s[mode] for mode in ("in_step", "ahead")},
        "largest_age": max(row["rollout"]["age"] for row in found["ahead"]),
        "ahead_to_in_step": ratio,
        "simulated_ratio": expected,
        "colocated_to_ahead": step_s["colocated"] / step_s["ahead"],
    }
    result["passed"] = ratio >= FASTER and abs(expected / ratio - 1) <= WITHIN
    print(json.dumps(result, indent=1 if given.json else None))
    sys.exit(not result["passed"])


if __name__ == "__main__":
    main()
