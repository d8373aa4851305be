"""Offload with small budgets on two ranks: runs start quickly with bitwise equal losses, or are refused quickly.

    python benchmarks/offload_small_budgets.py [--json] [--seed 0] [--cells 12] [--only 3,5] [--cpu]

Each case is random: a model type, an axis of two ranks, layers, width, sequences per microbatch, and a budget of 35 to
70 % of the memory of the same run without offload. A case passes if the first planned step ends within 60 s of the
start of the command, with losses and gradient norms bitwise equal to the run without offload. It also passes if the run
is refused with HP402 within 20 s and the budget in the hint works. The exit status is 1 when a case fails.

`--cpu` applies the limits to CPU seconds per rank of the whole run, for machines with other load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _machine import machine

RANKS, STEPS, VOCABULARY, SEQ_LEN = 2, 2, 512, 64
START_S, REFUSAL_S, LIMIT_S = 60.0, 20.0, 900
SHARES = (0.35, 0.70)
AXES = ("tp_x", "pp", "dp_shard", "cp")
RATES = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout")
KINDS = ("qwen2", "llama", "stablelm", "gpt2", "qwen3_moe", "gemma")


@dataclass(frozen=True)
class Cell:
    """Random run.

    Attributes:
        kind: Model type.
        axis: Key of `parallel` that has two ranks.
        layers: Decoder layers.
        width: Hidden size.
        microbatch: Sequences of a microbatch.
        share: Budget as a fraction of the memory without offload.
    """

    kind: str
    axis: str
    layers: int
    width: int
    microbatch: int
    share: float


def drawn(seed: int, count: int) -> list[Cell]:
    """Return `count` random runs, with all model types and axes equally often."""
    draws = random.Random(seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    axes = [AXES[i % len(AXES)] for i in range(count)]
    draws.shuffle(kinds)
    draws.shuffle(axes)
    return [
        Cell(
            kind,
            axis,
            draws.choice((4, 6)),
            draws.choice((96, 128)),
            draws.choice((1, 2, 4)),
            round(draws.uniform(*SHARES), 3),
        )
        for kind, axis in zip(kinds, axes, strict=True)
    ]


def config(cell: Cell) -> dict[str, Any]:
    """Return the model config of a run."""
    common = {"model_type": cell.kind, "vocab_size": VOCABULARY}
    if cell.kind == "gpt2":
        dropout = dict.fromkeys(RATES, 0.0)
        sizes = {"n_embd": cell.width, "n_layer": cell.layers, "n_head": 4, "n_positions": 256}
        return {**common, "architectures": ["GPT2LMHeadModel"], **sizes, **dropout}
    names = {
        "qwen2": "Qwen2", "llama": "Llama", "stablelm": "StableLm", "qwen3_moe": "Qwen3Moe", "gemma": "Gemma",
    }  # fmt: skip
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [],
    }  # fmt: skip
    return {
        **common,
        "architectures": [f"{names[cell.kind]}ForCausalLM"],
        "hidden_size": cell.width,
        "intermediate_size": 2 * cell.width,
        "num_hidden_layers": cell.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": cell.width // 4,
        "max_position_embeddings": 256,
        **(experts if cell.kind == "qwen3_moe" else {}),
    }


def write_recipe(folder: Path, cell: Cell) -> Path:
    """Write model config, text and recipe of a run, and return the recipe's path."""
    (folder / "model.json").write_text(json.dumps(config(cell)))
    lines = (f"def f{i}(a, b):\n    return a * {i} + b - {i % 7}\n" for i in range(3000))
    (folder / "text.txt").write_text("\n".join(lines))
    recipe = {
        "model": {"path": str(folder / "model.json")},
        "data": {
            "source": str(folder / "text.txt"), "seq_len": SEQ_LEN, "vocab_size": VOCABULARY,
            "cache_dir": str(folder / "cache"),
        },
        "training": {
            "steps": STEPS, "dtype": "float32", "microbatch": cell.microbatch, "lr": 1e-3, "warmup_steps": 1,
            "tokens_per_step": 4 * cell.microbatch * SEQ_LEN, "eval_every": 0, "eval_tokens": 128, "log_every": 1,
        },
        "parallel": {cell.axis: RANKS},
        "checkpoint": {"every": 0, "export": False},
    }  # fmt: skip
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    return path


@dataclass(frozen=True)
class Run:
    """Outcome of one run of the command.

    Attributes:
        first_step_s: Seconds from the start to the first step; None without a step.
        seconds: Seconds to the end.
        cpu_s: CPU seconds of all processes, divided by the number of ranks.
        rows: Records of `metrics.jsonl`.
        output: Printed text.
    """

    first_step_s: float | None
    seconds: float
    cpu_s: float
    rows: list[dict[str, Any]]
    output: str


def train(recipe: Path, out: Path, *overrides: str) -> Run:
    """Run the command on a recipe, and return the outcome."""
    words = ["train", str(recipe), "--no-calibrate", f"output_dir={out}", *overrides]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    begin, cpu = time.monotonic(), _children_s()
    first_step_s, lines = None, []
    with subprocess.Popen(
        ["timeout", str(LIMIT_S), sys.executable, "-m", "hyper_parallel", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if first_step_s is None and line.startswith("step 1/"):
                first_step_s = time.monotonic() - begin
    path = out / "metrics.jsonl"
    rows = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    spent = (_children_s() - cpu) / RANKS
    return Run(first_step_s, time.monotonic() - begin, spent, rows, "".join(lines))


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(cell: Cell, by_cpu: bool) -> dict[str, Any]:
    """Run a case without and with offload, and return the results."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        recipe = write_recipe(folder, cell)
        plain = train(recipe, folder / "plain")
        row: dict[str, Any] = asdict(cell)
        if len(plain.rows) != STEPS:
            return row | {"outcome": "plain run fails", "why": plain.output[-400:]}
        most = max(step["memory_bytes"] for step in plain.rows)
        budget = int(cell.share * most)
        row |= {"plain_bytes": most, "budget_bytes": budget, "plain_cpu_s": round(plain.cpu_s, 1)}
        mine = train(recipe, folder / "mine", f"offload.budget={budget}")
        row |= {"seconds": round(mine.seconds, 1), "cpu_s": round(mine.cpu_s, 1)}
        if mine.first_step_s is None:
            return row | refusal(recipe, folder, mine, by_cpu)
        late = (mine.cpu_s if by_cpu else mine.first_step_s) > START_S
        equal = curve(mine) == curve(plain)
        outcome = "late" if late else "equal" if equal else "differs"
        return row | {"outcome": outcome, "first_step_s": round(mine.first_step_s, 1)}


def curve(run: Run) -> list[tuple[Any, ...]]:
    """Return the losses and gradient norms of a run, which must be bitwise equal."""
    return [(step["step"], step["loss"], step["grad_norm"]) for step in run.rows]


def refusal(recipe: Path, folder: Path, run: Run, by_cpu: bool) -> dict[str, Any]:
    """Return the verdict on a run without steps: its error code, seconds, and whether the hint's budget works."""
    hint = re.search(r"hint:.*?(offload\.budget=\d+)", run.output, re.DOTALL)
    if "error[HP402]" not in run.output or hint is None:
        return {"outcome": "fails", "why": run.output[-400:]}
    late = (run.cpu_s if by_cpu else run.seconds) > REFUSAL_S
    pasted = train(recipe, folder / "pasted", hint[1])
    outcome = "refused late" if late else "refused"
    if len(pasted.rows) != STEPS:
        outcome = "hint does not work"
    return {
        "outcome": outcome,
        "hint": hint[1],
        "why": pasted.output[-400:] if not pasted.rows else "",
    }


def main() -> int:
    """Run all cases, print a line for each, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", type=int, default=12)
    parser.add_argument("--only", default="", help="numbers of cells, such as 3,5")
    parser.add_argument("--cpu", action="store_true", help="judge processor seconds per rank")
    asked = parser.parse_args()
    only = {int(number) for number in asked.only.split(",") if number}
    rows = []
    for number, cell in enumerate(drawn(asked.seed, asked.cells)):
        if not only or number in only:
            rows.append({"cell": number, **measured(cell, asked.cpu)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    passed = sum(row["outcome"] in ("equal", "refused") for row in rows)
    if asked.json:
        print(json.dumps({**machine(), "seed": asked.seed, "cells": rows}, indent=1))
    else:
        print(f"{passed} of {len(rows)} cells pass")
    return int(passed < len(rows))


if __name__ == "__main__":
    sys.exit(main())
