"""Cost of a checkpoint every 50 steps, compared with no checkpoint and with DCP's `async_save`.

    python benchmarks/save_cost.py [--json] [--rounds 7] [--folder DIRECTORY]

Two ranks train linear layers under FSDP with AdamW on the CPU. A block is 50 steps. Every round has three blocks, in
rotating order: without a save, with a save by `Checkpointer(asynchronous=True)`, and with a save by
`torch.distributed.checkpoint.async_save`. A block ends when its save is on the disk, so its time includes writes that
training waits for, and slowdowns by concurrent writes. The cost is the median over rounds of a block's time, relative
to the block without a save. Bar: at most 2 %, and at most the cost of DCP.

Here, ranks and writers share the CPU; with an accelerator, the cost is lower.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
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

RANKS, STEPS, WIDTH, LAYERS, ROWS = 2, 50, 512, 8, 256
STATE_BYTES = 12 * (LAYERS * 4 * WIDTH**2 + LAYERS // 2 * 5 * WIDTH)  # float32, and two moments
BAR = 0.02
KINDS = ("none", "ours", "dcp")


class Run:
    """Training of a model on this rank, with two ways to save it."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Linear(WIDTH, 4 * WIDTH) if i % 2 == 0 else nn.Linear(4 * WIDTH, WIDTH) for i in range(LAYERS))
        )  # fmt: skip
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.rows = torch.randn(ROWS, WIDTH)
        self.folder, self.group = folder, dist.new_group(backend="gloo")
        self.saver = Checkpointer(folder / "ours", keep=1, asynchronous=True, fingerprint={})
        self.number = 0

    def block(self, kind: str) -> float:
        """Run 50 steps with a save of this kind after the first, and return the seconds until both are done."""
        self.number += 1
        path, pending = self.folder / f"dcp_{self.number}", None
        dist.barrier()
        begin = time.perf_counter()
        for step in range(STEPS):
            self.model(self.rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step == 0 and kind == "ours":
                self.saver.save(self.number, self.model, self.optimizer, {})
            elif step == 0 and kind == "dcp":
                state = {
                    "model": get_model_state_dict(self.model),
                    "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
                }
                pending = dcp.async_save(state, checkpoint_id=path, process_group=self.group)
        self.saver.finish()
        if pending is not None:
            pending.result()
        dist.barrier()
        seconds = time.perf_counter() - begin
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        return seconds


def on_rank(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every block by kind, after one warm-up block of each kind."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with World.join("cpu"):
        run = Run(folder)
        for number in range(rounds + 1):
            for turn in range(len(KINDS)):
                kind = KINDS[(number + turn) % len(KINDS)]
                found[kind].append(run.block(kind))
    return {kind: seconds[1:] for kind, seconds in found.items()}


def main() -> int:
    """Measure, print a table or JSON, and return 0 if the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        seconds = launch(lambda _: on_rank(Path(folder), chosen.rounds), RANKS, timeout_s=1200)[0]
    cost = {
        kind: [mine / none - 1 for mine, none in zip(seconds[kind], seconds["none"], strict=True)] for kind in KINDS[1:]
    }
    medians = {kind: statistics.median(values) for kind, values in cost.items()}
    result: dict[str, Any] = {
        **machine(),
        "ranks": RANKS,
        "steps_per_save": STEPS,
        "state_bytes": STATE_BYTES,
        "step_s": statistics.median(seconds["none"]) / STEPS,
        "cost": {kind: round(value, 4) for kind, value in medians.items()},
        "spread": {kind: [round(min(v), 4), round(max(v), 4)] for kind, v in cost.items()},
        "rounds": chosen.rounds,
        "bar": BAR,
    }
    if chosen.json:
        print(json.dumps(result, indent=1))
    else:
        for kind, value in medians.items():
            print(f"{kind:5} {value:+7.2%}  {result['spread'][kind]}")
    return int(medians["ours"] > BAR or medians["ours"] > medians["dcp"])


if __name__ == "__main__":
    sys.exit(main())
