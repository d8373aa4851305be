"""Simulated effective training time: the fraction of time in which a run on 9,600 devices makes lasting progress.

    python benchmarks/effective_training_time.py [--json] [--rounds 3]

Measured on two ranks of this machine: the seconds from a killed rank to the next recorded step, the cost of a
checkpoint, and the rate of snapshots to memory, scaled by bytes per device. Taken from publications: failure rates of
devices, rendezvous time of many ranks, and storage bandwidth. Other assumptions are in the JSON. Failures are drawn
from an exponential distribution. Saves are sqrt(2 c M) apart, for c seconds per save and M mean seconds between
failures (Young 1974; Daly 2006, first order). The bar applies to the failure rate of Llama 3, with the better of
checkpoints and snapshots.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from _machine import machine
from save_cost import RANKS, STATE_BYTES, Run, on_rank

from hyper_parallel.runtime import World, launch
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer

DEVICES, HOURS, BAR = 9600, 20000, 0.97
FAILURES = {  # interruptions per device and hour, source
    "llama-3": (419 / (54 * 24 * 16384), "arXiv:2407.21783, 3.3.4: 419 unexpected in 54 days, 16,384 H100"),
    "opt-175b": (105 / (60 * 24 * 992), "arXiv:2205.01068, 2.5: 35 + 70 restarts in 2 months, 992 A100"),
    "bloom": (1.5 / (168 * 384), "arXiv:2211.05100, 3.3: 1 to 2 failures of a GPU a week, 384 A100"),
}  # fmt: skip
ASSUMED = {
    "state_bytes": 405e9 * 14,  # bfloat16 weights, float32 weights and two moments of 405e9 parameters
    "storage_bytes_s": 2e12,  # sustained, arXiv:2407.21783, 3.3.1 (Tectonic)
    "rendezvous_s": 30.0,  # more than 10,000 ranks: arXiv:2402.15627 (MegaScale), 3.5
    "step_s": 10.0,  # 6 * 405e9 * 16e6 tokens at 9,600 * 400 TFLOP/s
    "replace_host_s": 120.0,  # a spare host that is up
    "host_lost": 0.6,  # of the failures; llama-3's table 5: GPU, memory and host hardware; others lose processes only
    "hangs": 0.1,  # of the failures; the others end a process, which is noticed at once
    "timeout_s": 120.0,  # training.timeout_s, by which a hang is noticed: 12 steps (the default of 600 suits any step)
}
RECIPE = """
model: {{path: {root}/../recipes/models/quickstart.json}}
data: {{source: python-stdlib, seq_len: 128, vocab_size: 1024, max_bytes: 300000, cache_dir: {out}/cache}}
training: {{steps: 1000000, tokens_per_step: 512, max_restarts: 1, eval_tokens: 128}}
checkpoint: {{snapshot_every: 1, export: false}}
parallel: {{dp_shard: 2}}
output_dir: {out}/run
"""


def restart_s() -> float:
    """Kill a rank of a run, and return the seconds until the next step is recorded."""
    with tempfile.TemporaryDirectory() as out:
        recipe, metrics = Path(out) / "recipe.yaml", Path(out) / "run" / "metrics.jsonl"
        recipe.write_text(RECIPE.format(root=Path(__file__).resolve().parent, out=out))
        words = [sys.executable, "-m", "hyper_parallel", "train", str(recipe), "--no-calibrate"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)

        def wait(lines: int) -> None:
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < lines:
                if process.poll() is not None:
                    raise RuntimeError("the run has ended")
                time.sleep(0.02)

        try:
            wait(5)
            begin = time.monotonic()
            psutil.Process(process.pid).children()[-1].kill()
            time.sleep(0.5)  # a step that had begun may still be recorded
            wait(metrics.read_bytes().count(b"\n") + 1)
            return time.monotonic() - begin
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def snapshot_s(folder: Path) -> float:
    """Return the seconds to write the state of `save_cost.py` to memory on this rank."""
    with World.join("cpu"):
        run = Run(folder)
        run.block("none")  # the optimizer has its states afterwards
        saver = Checkpointer(folder / "snapshots", keep=1, asynchronous=False, fingerprint={})
        begin = time.monotonic()
        for step in range(3):
            saver.save(step, run.model, run.optimizer, {})
        return (time.monotonic() - begin) / 3


def simulate(rate: float, cost: dict[str, float], snapshots: bool) -> float:
    """Return the fraction of time that is progress, over simulated failures."""
    a, draw, mean_s = ASSUMED, random.Random(1), 3600 / (rate * DEVICES)
    every_s = max(math.sqrt(2 * cost["save_s"] * mean_s), a["state_bytes"] / a["storage_bytes_s"])
    steps = max(1, round(math.sqrt(2 * cost["snapshot_s"] * mean_s) / a["step_s"]))
    slower = 1 + cost["save_s"] / every_s
    slower += cost["snapshot_s"] / (steps * a["step_s"]) if snapshots else 0.0
    passed = kept = 0.0
    while passed < 3600 * HOURS:
        up_s, host = draw.expovariate(1 / mean_s), draw.random() < a["host_lost"]
        useful_s = up_s / slower
        lost_s = draw.uniform(0, every_s if host or not snapshots else steps * a["step_s"])
        away_s = cost["restart_s"] + a["rendezvous_s"] + a["state_bytes"] / a["storage_bytes_s"]
        away_s += a["replace_host_s"] * host + a["timeout_s"] * (draw.random() < a["hangs"])
        kept += max(0.0, useful_s - lost_s)
        passed += up_s + away_s
    return kept / passed


def main() -> int:
    """Print the fractions, and return 0 if the fraction for the newest published failure rate meets the bar."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="Print what was measured and assumed.")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        blocks = launch(lambda _: on_rank(Path(folder), chosen.rounds), RANKS, timeout_s=1200)[0]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        memory_s = launch(lambda _: snapshot_s(Path(folder)), RANKS, timeout_s=600)[0]
    more = [mine - none for mine, none in zip(blocks["ours"], blocks["none"], strict=True)]
    scale = (ASSUMED["state_bytes"] / DEVICES) / (STATE_BYTES / RANKS)  # of the bytes of a rank
    cost = {"restart_s": restart_s(), "snapshot_s": memory_s * scale}
    cost["save_s"] = max(statistics.median(more), 0.001) * scale
    kinds = (("checkpoints", False), ("with snapshots", True))
    shares = {
        name: {kind: round(simulate(rate, cost, on), 4) for kind, on in kinds} for name, (rate, _) in FAILURES.items()
    }
    result: dict[str, Any] = machine() | {
        "simulated": {"devices": DEVICES, "hours": HOURS, "bar": BAR},
        "effective": shares,
        "measured_here_on_two_ranks_and_scaled_by_bytes": cost,
        "assumed": ASSUMED,
        "failures_per_device_hour": {name: list(pair) for name, pair in FAILURES.items()},
    }
    print(json.dumps(result, indent=1) if chosen.json else json.dumps(shares, indent=1))
    return int(max(shares["llama-3"].values()) < BAR)


if __name__ == "__main__":
    sys.exit(main())
