"""Time to save and load a sharded state, compared with torch.distributed.checkpoint (DCP) on the same state.

    python benchmarks/checkpoint_speed.py --json

The state is 50 million float32 parameters of linear layers with AdamW's moments (600 MB), sharded over 4 CPU ranks.
Both libraries run in turn in one process, in alternating order; the ratio of medians is ours over DCP's. Ours computes
checksums of all bytes on save and verifies them on load, unlike DCP. Files are in the page cache when they are read.
For loads, the peak of anonymous memory over all ranks (`Pss_Anon`) is measured, beyond the memory of the parameters.
The bar is 1.1 times the bytes of the state.
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
    """Return linear layers of WIDTH x 4 WIDTH sharded over all ranks, and AdamW, with state if `trained`."""
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
    """Run an action on all ranks, and return the seconds until the last rank has finished."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def anonymous_bytes() -> int:
    """Return the bytes of this process's anonymous pages; shared pages count by its share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) * 1024


def peak_of(action: Callable[[], Any]) -> int:
    """Run an action, and return the peak of anonymous memory during it, minus that before it."""
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
    """Run all repeats on this rank, and return the times."""
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
    """Return the peak bytes on this rank while a new process loads a state, beyond its parameters."""
    with World.join("cpu"):
        model, optimizer = build(trained=False)
        loader = Checkpointer(folder, keep=1, asynchronous=False, fingerprint=None)
        peak = peak_of(lambda: loader.load(model, optimizer))
        return peak + sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]


def main() -> int:
    """Measure, print a table or JSON, and return the exit status."""
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
