"""Simulated seconds per step of asynchronous reinforcement learning by staleness, with published shapes.

    python benchmarks/staleness_simulated.py --json      five minutes on one core

Shapes and measurements: the page of verl's fully asynchronous recipe (github.com/volcengine/verl,
docs/advance/fully_async.md, updated 10/18/2025): Qwen2.5-Math-7B, DAPO, NVIDIA H20, 512 prompts a step, 16 responses
each of at most 28K tokens. 64 devices sample as 16 servers of tensor parallelism 4, each with 16 prompts at once
(fully_async_rollouter.py and its scripts). 64 devices train on four batches of 128 prompts, and then send new weights.
At most (1 + staleness) x 512 prompts are waiting, unfinished or started between two sends. A send interrupts unfinished
prompts, which continue after a prefill of their prefix with the new weights.

A step, from one send to the next, is one task graph. Every slot of a response is a lane, and all lanes share `Cores`,
because a server decodes more slowly with more sequences. Interrupted responses are split between the graphs of two
steps.

Only rows of synchronous colocated runs are fitted: mean length and the constant part of a decode step to the run on 128
devices, update time to the runs on 128 and 64. Assumed are lognormal lengths (sigma 1) and 40 % of the device's peak;
`other_assumptions` shows steps under other assumptions. All other results are predictions. `with_tokens_of_each_run`
uses `update_actor` of each row for the learner and scales lengths accordingly, because the page explains its times by
response lengths, which differ between runs.

Bars: on 64:64 devices, each predicted step is within 30 % of the published one, and no larger staleness is slower by
more than 1 %. With the tokens of each run, the fastest staleness is the published one. On two processes, with the times
measured by rollout_modes.py, sampling ahead is predicted to be slower than the colocated mode.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heapreplace
from itertools import pairwise
from pathlib import Path

import numpy as np

from hyper_parallel.ir import Cores, Task, TaskGraph, role_tasks
from hyper_parallel.sim import simulate, steady_step_s

PROMPTS, RESPONSES, BATCHES, LONGEST = 512, 16, 4, 28 * 1024
TP, PROMPTS_PER_SERVER = 4, 16  # gen_tp, and `max_concurrent_samples` of the recipe
PARAMS, KV_BYTES = (
    7.6e9,
    28 * 2 * 4 * 128 * 2,
)  # config.json: layers, K and V, heads, head size, bfloat16
FLOPS, BYTES_S = 148e12, 4.0e12  # H20, dense bfloat16 and HBM3
SEND_S = 0.3  # "most of the time under 300 ms": docs/advance/one_step_off.md of the same project
# Devices: seconds of step, gen, old_log_prob, update_actor.
COLOCATED = {
    128: (356.30, 177.85, 53.92, 113.81),
    64: (365.28, 150.72, 70.26, 133.41),
    32: (790.10, 357.41, 107.71, 313.81),
}
# (devices of each role, staleness): seconds of step, gen (waiting for responses), update_actor.
ASYNCHRONOUS = {
    (64, 0.0): (231.34, 128.47, 98.77),
    (64, 0.1): (171.30, 58.17, 109.12),
    (64, 0.3): (146.11, 38.88, 103.22),
    (64, 0.5): (150.63, 33.14, 113.16),
    (32, 0.5): (189.26, 28.46, 156.98),
    (16, 0.5): (294.77, 21.26, 269.80),
}
CURVE = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0)
REST_S = COLOCATED[128][0] - sum(COLOCATED[128][1:])  # rewards, advantages: the same in every row
OTHER = (("sigma", 0.8), ("sigma", 1.2), ("share", 0.3), ("share", 0.5), ("alike", 0.5))
WARM, STEPS, SEEDS = 4, 8, 4
WITHIN, FLAT = 0.30, 0.01
TWO_PROCESSES = Path(__file__).parent / "results/rollout_modes_cpu.json"


@dataclass(frozen=True)
class Shape:
    """Model of response lengths and of device times."""

    sigma: float = 1.0
    share: float = 0.4
    fixed_s: float = 0.0
    longer: float = 1.0
    alike: float = 0.0  # fraction of length variance between prompts

    @property
    def mean(self) -> float:
        """Mean tokens of a response, derived from the measured time of an update at 8 x parameters FLOPs per token."""
        busy_s = sum(COLOCATED[128][2:])
        tokens = busy_s * 128 * FLOPS * self.share / (10 * PARAMS)
        return self.longer * tokens / (PROMPTS * RESPONSES)

    def lengths(self, prompts: int, draw: np.random.Generator) -> np.ndarray:
        """Return random response lengths in tokens, [prompts, RESPONSES]."""
        center = math.log(self.mean) - self.sigma**2 / 2
        each = draw.lognormal(center, self.sigma * math.sqrt(1 - self.alike), (prompts, RESPONSES))
        all_alike = draw.lognormal(0, self.sigma * math.sqrt(self.alike), (prompts, 1))
        return np.minimum(np.ceil(each * all_alike), LONGEST)

    def token_s(self, sequences: float) -> float:
        """Return the seconds of a server's decode step: weights or FLOPs, keys and values, and a constant part."""
        dense = max(2 * PARAMS / BYTES_S, sequences * 2 * PARAMS / (FLOPS * self.share))
        # Expected position in a randomly sampled sequence: E[n^2] / 2 E[n]
        context = self.mean * math.exp(self.sigma**2) / 2
        return self.fixed_s + (dense + sequences * context * KV_BYTES / BYTES_S) / TP

    def read_s(self, tokens: float, devices: int) -> float:
        """Return the seconds of the prefill of `tokens` prefix tokens."""
        return tokens * 2 * PARAMS / (devices * FLOPS * self.share)

    def cores(self, lanes: list[str], devices: int) -> Cores:
        """Return the contention model by which a sequence decodes more slowly, the more sequences a server decodes."""
        loads = [max(1.0, busy * TP / devices) for busy in range(1, len(lanes) + 1)]
        alone = self.token_s(1)
        rates = (Fraction(alone / self.token_s(load)).limit_denominator(10**6) for load in loads)
        return Cores(tuple(rates), frozenset(lanes))


def update_s(devices: int) -> float:
    """Return the seconds of update_actor: a constant part, and a part inversely proportional to the devices."""
    divided = (COLOCATED[64][3] - COLOCATED[128][3]) / (1 / 64 - 1 / 128)
    return COLOCATED[128][3] + divided * (1 / devices - 1 / 128)


def generation_s(shape: Shape, devices: int) -> float:
    """Return the seconds in which all devices sample all responses of a step, as in a synchronous run."""
    found = []
    for seed in range(SEEDS):
        tokens = shape.lengths(PROMPTS, np.random.default_rng(seed)).ravel()
        ns = (round(n * shape.token_s(1) * 1e9) for n in tokens)
        tasks = tuple(Task("response", f"slot {i}", n) for i, n in enumerate(ns))
        cores = shape.cores([task.executor for task in tasks], devices)
        found.append(simulate(TaskGraph(tasks, cores=cores)).end_s)
    return statistics.mean(found)


def fitted(shape: Shape) -> Shape:
    """Return the shape with the constant part of a decode step fitted to `gen` of the colocated run on 128 devices."""
    low, high = 0.0, 0.02
    while high - low > 1e-5:
        middle = (low + high) / 2
        short = generation_s(replace(shape, fixed_s=middle), 128) < COLOCATED[128][1]
        low, high = (middle, high) if short else (low, middle)
    return replace(shape, fixed_s=middle)


@dataclass
class Prompt:
    """Prompt with the remaining and the generated tokens of each response."""

    left: np.ndarray
    there: np.ndarray


def one_step(
    shape: Shape, devices: int, prompts: list[Prompt], ready: int, learn_s: float
) -> tuple[dict[str, float], list[Prompt], int]:
    """Simulate one step; return its results, the interrupted prompts, and the number of prompts ready for the learner.

    All sequences decode at the same rate at any time, so the order of their ends, and the slots of the next prompts,
    follow
    from token counts. The simulator determines the seconds.
    """
    reread = sum(float(p.there[p.left > 0].sum()) for p in prompts)
    reading = shape.read_s(reread, devices)
    tasks = [Task("read prefixes", "servers", round(reading * 1e9))]
    slots = [(0.0, slot, 0) for slot in range(devices // TP * PROMPTS_PER_SERVER)]
    begins, ends, over, tokens_at = [], [], [], [0.0]
    for prompt in prompts:
        begin, slot, before = slots[0]
        first = len(tasks)
        for i, tokens in enumerate(prompt.left):
            ns = round(float(tokens) * shape.token_s(1) * 1e9)
            tasks.append(Task("response", f"slot {slot}.{i}", ns, deps=(before,)))
        tokens_at.extend(begin + prompt.left)
        tasks.append(Task("all over", f"slot {slot}", 0, deps=tuple(range(first, len(tasks)))))
        begins.append(begin)
        ends.append(begin + float(prompt.left.max()))
        over.append(len(tasks) - 1)
        heapreplace(slots, (ends[-1], slot, over[-1]))
    lanes = [f"slot {slot}.{i}" for slot in range(len(slots)) for i in range(RESPONSES)]
    first_over = [over[i] for i in sorted(range(len(prompts)), key=ends.__getitem__)]
    needed = [max(0, PROMPTS * n // BATCHES - ready) for n in range(BATCHES + 1)]
    for a, b in pairwise(needed):
        deps = tuple(first_over[a:b])
        tasks.append(Task("learn", "learner", round(learn_s / BATCHES * 1e9), deps=deps))
    spans = simulate(TaskGraph(tuple(tasks), cores=shape.cores(lanes, devices))).spans
    end = max(s.end_s for s in spans if s.lane == "learner")
    seconds = [reading, *sorted(s.end_s for s in spans if s.name == "response")]
    reached = float(np.interp(end, seconds, sorted(tokens_at)))
    interrupted = []
    for prompt, begin, last in zip(prompts, begins, ends, strict=True):
        if begin < reached < last:
            got = np.clip(reached - begin, 0, prompt.left)
            interrupted.append(Prompt(prompt.left - got, prompt.there + got))
    numbers = {
        "step_s": end + SEND_S,
        "wait_s": end - learn_s,
        "reread_tokens": reread,
        "reread_s": reading,
        "interrupted": len(interrupted),
    }
    return numbers, interrupted, ready + sum(last <= reached for last in ends) - PROMPTS


def asynchronous(shape: Shape, devices: int, staleness: float, learn_s: float, seeds: int = SEEDS) -> dict[str, float]:
    """Return means over steps and seeds, and the standard error of the step time; `devices` is per role."""
    found: list[dict[str, float]] = []
    for seed in range(seeds):
        draw = np.random.default_rng(seed)
        rows, unfinished, ready = [], [], 0
        for _ in range(WARM + STEPS):
            fresh = int((1 + staleness) * PROMPTS) - len(unfinished) - ready
            drawn = (Prompt(n, np.zeros(RESPONSES)) for n in shape.lengths(fresh, draw))
            older = (len(unfinished) + ready) / PROMPTS
            row, unfinished, ready = one_step(shape, devices, [*unfinished, *drawn], ready, learn_s)
            rows.append(row | {"older": older})
        found.append({k: statistics.mean(row[k] for row in rows[WARM:]) for k in rows[0]})
    result = {k: statistics.mean(row[k] for row in found) for k in found[0]}
    spread = statistics.stdev(row["step_s"] for row in found) if seeds > 1 else 0.0
    return result | {"step_standard_error_s": spread / math.sqrt(seeds)}


def two_processes() -> dict[str, object]:
    """Return simulated and measured step times of two processes in three modes, from the parts of the in-step mode."""
    measured = json.loads(TWO_PROCESSES.read_text())
    sample_s = measured["sampling_s"]
    learn_s = measured["step_s"]["in_step"] - sample_s
    found = {}
    for mode, ahead, ranks in (("colocated", None, 2), ("in_step", 0, 1), ("ahead", 1, 1)):
        graph = role_tasks(sample_s / ranks, learn_s / ranks, ahead, STEPS * 10)
        found[mode] = steady_step_s(graph, ahead)
    slower = found["ahead"] > found["colocated"]
    return {"simulated_s": found, "measured_s": measured["step_s"], "ahead_is_slower": slower}


def beside(found: dict[str, float], published: tuple[float, ...]) -> dict[str, float]:
    """Return simulated values, published values, and the relative error of the step time."""
    names = ("published_step_s", "published_wait_s")
    error = found["step_s"] / published[0] - 1
    return found | dict(zip(names, published, strict=False)) | {"error": error}


def main() -> None:
    """Simulate, print, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    shape = fitted(Shape())
    learn_s = update_s(64) + REST_S
    curve = {s: asynchronous(shape, 64, s, learn_s) for s in CURVE}
    blind = {
        f"{n}:{n}, {s}": beside(curve[s] if n == 64 else asynchronous(shape, n, s, update_s(n) + REST_S), row)
        for (n, s), row in ASYNCHRONOUS.items()
    }
    rows = {s: row for (n, s), row in ASYNCHRONOUS.items() if n == 64}
    usual = statistics.mean(row[2] for row in rows.values())
    tokens = {
        s: beside(asynchronous(replace(shape, longer=r[2] / usual), 64, s, r[2] + REST_S), r) for s, r in rows.items()
    }
    other = {}
    for name, value in OTHER:
        again = fitted(Shape(**{name: value}))
        other[f"{name} {value}"] = {
            f"{n}:{n}, {s}": asynchronous(again, n, s, update_s(n) + REST_S, 1)["step_s"]
            for n, s in [*ASYNCHRONOUS, (64, CURVE[-1])]
        }
    least = min(row["step_s"] for row in curve.values())
    result = {
        "kind": "simulated",
        "mean_tokens": shape.mean,
        "fixed_part_of_a_decode_step_s": shape.fixed_s,
        "curve": curve,
        "flat_from": next(s for s, row in curve.items() if row["step_s"] <= least * (1 + FLAT)),
        "blind": blind,
        "with_tokens_of_each_run": tokens,
        "colocated": {
            n: {"gen_s": (g := generation_s(shape, n)), "published_gen_s": row[1], "error": g / row[1] - 1}
            for n, row in COLOCATED.items()
        },
        "other_assumptions": other,
        "two_processes": two_processes(),
    }  # fmt: skip
    fastest = min(tokens, key=lambda s: tokens[s]["step_s"])
    result["bars"] = {
        "blind_within": all(abs(blind[f"64:64, {s}"]["error"]) <= WITHIN for s in rows),
        "never_slower": all(b["step_s"] <= a["step_s"] * (1 + FLAT) for a, b in pairwise(curve.values())),
        "fastest_with_tokens_of_each_run": fastest == min(rows, key=lambda s: rows[s][0]),
        "small_cluster": result["two_processes"]["ahead_is_slower"],
    }  # fmt: skip
    result["passed"] = all(result["bars"].values())
    print(json.dumps(result, indent=1 if given.json else None))
    sys.exit(not result["passed"])


if __name__ == "__main__":
    main()
