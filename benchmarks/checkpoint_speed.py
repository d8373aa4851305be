"""Seconds of saving and loading a sharded state, beside plain torch.distributed.checkpoint with the same state.

    python benchmarks/checkpoint_speed.py --json

Linear layers of 50 million float32 parameters with AdamW's moments (600 MB in all) on 4 CPU ranks, each with a quarter.
Both are called in turn in one run, first one and then the other first; the ratio is ours over theirs, of the medians.
Ours computes checksums of every byte when it saves and compares all of them when it loads, which the other does not.
A load also has its peak of anonymous memory over all ranks (`Pss_Anon`), above the state that is loaded into, where the
optimizer has none yet; the bar is 1.1 times the bytes of the state. Files are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _machine import machine
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyper_parallel.runtime import World, launch
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer

RANKS = 4
BAR = 1.1
WIDTH, LAYERS = 1024, 12


def build(trained: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Linear layers of WIDTH x 4 WIDTH over all ranks, and AdamW with or without state."""
    model = nn.Sequential(*(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if trained:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def timed(action: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def anonymous_bytes() -> int:
    """This process's share of its anonymous pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) * 1024


def peak_of(action: Callable[[], Any]) -> int:
    """Peak of anonymous memory above the start."""
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.005)

    sampler = threading.Thread(target=sample)
    sampler.start()
    action()
    done.set()
    sampler.join()
    return max(peak, anonymous_bytes()) - before


def on_rank(folder: Path, repeats: int) -> dict[str, Any]:
    """Times of this rank."""
    times: dict[str, list[float]] = {name: [] for name in ("save", "load", "dcp_save", "dcp_load")}
    with World.join("cpu"):
        model, optimizer = build(trained=True)
        saver = Checkpointer(folder, keep=1, asynchronous=False, fingerprint={})

        def state() -> dict[str, Any]:
            return {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer),
            }

        def ours(step: int) -> None:
            times["save"].append(timed(lambda: saver.save(step, model, optimizer, {})))
            times["load"].append(timed(lambda: saver.load(model, optimizer)))

        def theirs(step: int) -> None:
            path = folder / f"dcp_{step}"
            times["dcp_save"].append(timed(lambda: dcp.save(state(), checkpoint_id=path)))
            times["dcp_load"].append(timed(lambda: dcp.load(state(), checkpoint_id=path)))
            if dist.get_rank() == 0:
                shutil.rmtree(path)

        for step in range(1, repeats + 1):
            for call in (ours, theirs) if step % 2 else (theirs, ours):
                call(step)
        held = sum(p.stat().st_size for p in saver.directory.glob("step_*/*.safetensors"))
    return {"times": times, "state_bytes": held}


def loaded(folder: Path) -> int:
    """Bytes of this rank's parameters and the peak above them, while a fresh process loads a state."""
    with World.join("cpu"):
        model, optimizer = build(trained=False)
        loader = Checkpointer(folder, keep=1, asynchronous=False, fingerprint=None)
        peak = peak_of(lambda: loader.load(model, optimizer))
        return peak + sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]


def main() -> int:
    """Print the table or the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        found = launch(lambda _: on_rank(Path(folder), chosen.repeats), RANKS, timeout_s=600)
        peak = sum(launch(lambda _: loaded(Path(folder)), RANKS, timeout_s=600))
    median = {key: statistics.median(values) for key, values in found[0]["times"].items()}
    state = found[0]["state_bytes"]
    result = {
        **machine(),
        "ranks": RANKS,
        "state_bytes": state,
        "seconds": {key: round(value, 3) for key, value in median.items()},
        "save_ratio": round(median["save"] / median["dcp_save"], 3),
        "load_ratio": round(median["load"] / median["dcp_load"], 3),
        "load_memory_ratio": round(peak / state, 3),
    }
    if chosen.json:
        print(json.dumps(result, indent=1))
    else:
        for name in ("save_ratio", "load_ratio", "load_memory_ratio"):
            print(f"{name:20} {result[name]:6.3f}")
    return int(result["load_memory_ratio"] > BAR)


if __name__ == "__main__":
    sys.exit(main())
