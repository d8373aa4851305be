"""Test that the best plan of `plan` can run: `train --dry-run` must accept the recipe written from it.

    python benchmarks/plan_then_train.py               30 pairs of a model and a cluster
    python benchmarks/plan_then_train.py --only b300   pairs whose name contains this text
    python benchmarks/plan_then_train.py --json        results as JSON

Each pair goes through the command line: `plan MODEL -t TOPOLOGY --devices N --launch ours > recipe.yaml`, and
`train recipe.yaml --dry-run`. A pair passes if the plan has layouts, no note states that it cannot run, and the dry run
ends with status 0. Exit status 1 when a pair fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _machine import machine

FULL_SIZE = Path(__file__).with_name("full_size.json")
CANNOT_RUN = "cannot run this plan"
_LINEAR = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "dtype": "bfloat16", "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Config with alternating linear and full attention and 512 experts; sizes of Qwen3.5-35B-A3B, not verified."""
PAIRS: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("llama-3-8b", "dgx-h100", 8, ()),
    ("llama-3-8b", "atlas-900-a2", 64, ()),
    ("llama-3-70b", "dgx-h100", 64, ()),
    ("llama-3-70b", "tpu-v5p", 128, ()),
    ("llama-3-405b", "gb200-nvl72", 576, ()),
    ("llama-3-405b", "cloudmatrix384", 384, ()),
    ("qwen3-8b", "dgx-a100", 16, ()),
    ("qwen3-8b", "dgx-b200", 24, ("--seq-len", "32768")),
    ("gpt3-175b", "dgx-a100", 256, ()),
    ("megatron-310b", "gb300-nvl72", 288, ()),
    ("mixtral-8x7b", "dgx-h100", 32, ()),
    ("mixtral-8x22b", "dgx-h200", 64, ()),
    ("qwen3-30b-a3b", "dgx-b300", 16, ()),
    ("qwen3-30b-a3b", "atlas-900-a2", 32, ()),
    ("qwen3-235b-a22b", "dgx-h100", 256, ()),
    ("qwen3-235b-a22b", "cloudmatrix384", 256, ()),
    ("gpt-oss-120b", "dgx-b200", 32, ()),
    ("gpt-oss-120b", "gb200-nvl72", 72, ()),
    ("deepseek-v3", "dgx-h800", 2048, ()),
    ("deepseek-v3", "cloudmatrix384", 384, ()),
    ("deepseek-v2-lite", "dgx-h100", 16, ()),
    ("glm-4.5-air", "atlas-950", 64, ()),
    ("gemma-3-27b", "dgx-h100", 32, ()),
    ("command-r7b", "dgx-h800", 16, ("--tokens-per-step", "1048576")),
    ("starcoder2-15b", "h100-96gb", 16, ()),
    ("qwen3-next-80b-a3b", "cloudmatrix384", 64, ()),
    ("falcon-h1-34b", "dgx-b200", 32, ()),
    ("llama-4-scout", "cloudmatrix384", 64, ()),
    ("linear-35b-a3b", "dgx-b300", 16, ()),
    ("linear-35b-a3b", "dgx-b300", 16, ("--seq-len", "4096", "--tokens-per-step", "4194304")),
)  # fmt: skip


def command(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "hyper_parallel", *map(str, words)],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip


def model_of(name: str, folder: Path) -> str:
    """Return the argument of `plan` for a model: a preset name, or the path of a config written into the folder."""
    from hyper_parallel.model import preset_names

    if name in preset_names():
        return name
    configs = {case["name"]: case["config"] for case in json.loads(FULL_SIZE.read_text())}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(configs.get(name, _LINEAR)))
    return str(path)


def check_pair(name: str, topology: str, devices: int, options: tuple[str, ...]) -> dict[str, Any]:
    """Plan one pair, dry-run the recipe of the plan, and return the results."""
    start = time.perf_counter()
    row: dict[str, Any] = {"model": name, "topology": topology, "devices": devices}
    row |= {"options": list(options), "strategy": "", "reason": "", "passed": False}
    with tempfile.TemporaryDirectory(prefix="plan_then_train_") as text:
        folder = Path(text)
        words = ["plan", model_of(name, folder), "-t", topology, "--devices", devices, *options]
        done = command(*words, "-o", "plan.json", "--launch", "ours", folder=folder)
        if not done.returncode:
            plan = json.loads((folder / "plan.json").read_text())
            row["strategy"] = {k: v for k, v in plan["strategy"].items() if v not in (1, [], None)}
            row["notes"] = [note for note in plan["notes"] if CANNOT_RUN in note]
            (folder / "recipe.yaml").write_text(done.stdout)
            done = command("train", "recipe.yaml", "--dry-run", folder=folder)
            row["passed"] = bool(plan["layouts"]) and not row["notes"] and not done.returncode
        if done.returncode:
            row["reason"] = done.stderr.strip()[-600:]
    return row | {"seconds": time.perf_counter() - start}


def main() -> None:
    """Run the benchmark with the command-line options, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="pairs whose model or topology has this in it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = []
    for pair in PAIRS:
        if args.only not in f"{pair[0]} {pair[1]}":
            continue
        row = check_pair(*pair)
        rows.append(row)
        if not args.json:
            said = "passed" if row["passed"] else f"FAILED: {row['reason'] or row.get('notes')}"
            words = " ".join(map(str, pair[:3] + tuple(row["options"])))
            print(f"{words:68} {row['seconds']:5.0f} s  {said}", flush=True)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    if not all(row["passed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
