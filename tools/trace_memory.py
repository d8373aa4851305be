"""Traced memory peaks of many strategies, with which tests compare the memory terms of the cost model.

    python tools/trace_memory.py                write tests/cost/traced_memory.json
    python tools/trace_memory.py --table        print traced and predicted values, from the file

Models have the widths of published models and four layers. Every case is traced as by `train --dry-run --trace`, on a
topology with accelerators. For pipelines, the stage with the highest peak counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from hyper_parallel.config import load_recipe  # noqa: E402
from hyper_parallel.model import read_preset  # noqa: E402
from hyper_parallel.units import GiB  # noqa: E402

TARGET = ROOT / "tests" / "cost" / "traced_memory.json"
TOPOLOGY = "cloudmatrix384"
LAYERS = 4
DENSE, EXPERTS, SINKS = "llama-3-8b", "qwen3-30b-a3b", "gpt-oss-120b"
CASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (DENSE, ("parallel.dp_shard=8",)),
    (DENSE, ("parallel.dp_shard=8", "training.recompute=full")),
    (DENSE, ("parallel.dp_shard=8", "parallel.reshard_after_forward=false")),
    (DENSE, ("parallel.dp_shard=8", "training.accumulation_steps=4")),
    (DENSE, ("parallel.dp_replicate=2", "parallel.dp_shard=4")),
    (DENSE, ("parallel.tp=8",)),
    (DENSE, ("parallel.dp_shard=4", "parallel.tp=2", "training.accumulation_steps=4")),
    (DENSE, ("parallel.dp_shard=4", "parallel.tp=2", "training.recompute=full")),
    (DENSE, ("parallel.dp_shard=2", "parallel.cp=4")),
    (DENSE, ("parallel.dp_shard=2", "parallel.cp=4", "parallel.cp_kind=ulysses")),
    (DENSE, ("parallel.tp_x=4", "parallel.tp_y=2")),
    (DENSE, ("parallel.pp=4", "parallel.dp_shard=2", "training.accumulation_steps=8")),
    (DENSE, ("parallel.dp_shard=8", "training.microbatch=2")),
    (DENSE, ("parallel.dp_shard=2", "parallel.cp=2", "parallel.tp=2", "training.recompute=full")),
    (DENSE, ("parallel.pp=2", "parallel.dp_shard=4", "training.accumulation_steps=4")),
    (DENSE, ("parallel.pp=2", "parallel.dp_shard=4", "training.accumulation_steps=4", "training.recompute=full")),
    (DENSE, ("parallel.pp=2", "parallel.dp_shard=4", "training.accumulation_steps=4", "parallel.schedule=gpipe")),
    (DENSE, ("parallel.pp=2", "parallel.tp=4", "training.accumulation_steps=4", "training.recompute=full")),
    (DENSE, ("parallel.pp=2", "parallel.dp_shard=2", "parallel.tp=2", "training.accumulation_steps=4")),
    (DENSE, ("parallel.dp_shard=4", "parallel.tp=2", "parallel.reshard_after_forward=false")),
    (EXPERTS, ("parallel.dp_shard=8",)),
    (EXPERTS, ("parallel.dp_shard=8", "parallel.ep=8")),
    (EXPERTS, ("parallel.dp_shard=8", "parallel.ep=4", "training.accumulation_steps=2")),
    (EXPERTS, ("parallel.dp_shard=4", "parallel.tp=2", "parallel.ep=8", "training.recompute=full")),
    (DENSE, ("parallel.dp_shard=8", "training.recompute=full", "training.recompute_layers=2")),
    (DENSE, ("parallel.pp=2", "parallel.dp_shard=4", "training.accumulation_steps=4", "training.recompute=full",
             "training.recompute_layers=1")),
    (DENSE, ("parallel.dp_shard=8", "training.recompute=full", "training.recompute_layers=3")),
    (DENSE, ("parallel.dp_shard=4", "parallel.tp=2", "training.accumulation_steps=4", "training.recompute=full",
             "training.recompute_layers=3")),
    (EXPERTS, ("parallel.dp_shard=8", "parallel.ep=8", "training.recompute=full", "training.recompute_layers=2")),
    (SINKS, ("parallel.dp_shard=8",)),
    (DENSE, ("topology=dgx-h100", "training.dtype=float32", "parallel.dp_replicate=8")),
    (DENSE, ("topology=dgx-h100", "training.dtype=float32", "parallel.dp_replicate=8",
             "parallel.reshard_after_forward=false")),
    (DENSE, ("parallel.dp_replicate=8", "training.accumulation_steps=2")),
)  # fmt: skip


def trace(model: str, overrides: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Return the planned and traced memory of one case."""
    from hyper_parallel.trainer import differences, dry_run

    config = {**read_preset(model), "num_hidden_layers": LAYERS}
    (folder / "model.json").write_text(json.dumps(config))
    (folder / "recipe.yaml").write_text(
        f"model: {{path: {folder}/model.json}}\ndata: {{seq_len: 4096}}\nparallel: {{}}\ntopology: {TOPOLOGY}\n"
        "training: {dtype: bfloat16, microbatch: 1}\n"
    )
    result = dry_run(load_recipe(folder / "recipe.yaml", overrides))
    fullest = max(result.ranks, key=lambda rank: rank.peaks["hbm"].num_bytes)
    peak = fullest.peaks["hbm"]
    return {
        "model": model,
        "layers": LAYERS,
        "overrides": list(overrides),
        "rank": fullest.rank,
        "peak_bytes": peak.num_bytes,
        "segment": peak.segment,
        "breakdown": peak.breakdown,
        "predicted_bytes": result.plan.memory_bytes - result.reserved_bytes,
        "differences": list(differences(result.ranks[0], result.plan)),
    }


def table(cases: list[dict[str, Any]]) -> None:
    """Print traced and predicted bytes, both without device context and fragmentation."""
    print("| model | case | traced | predicted | predicted / traced | peak in |\n|---|---|---|---|---|---|")
    for c in cases:
        words = " ".join(o.split(".", 1)[-1] for o in c["overrides"])
        print(
            f"| {c['model']} | {words} | {c['peak_bytes'] / GiB:.2f} GiB | {c['predicted_bytes'] / GiB:.2f} GiB | "
            f"{c['predicted_bytes'] / c['peak_bytes']:.2f} | {c['segment']} |"
        )


def main() -> None:
    """Trace every case and write the file, or print the file."""
    if "--table" not in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            cases = [trace(model, overrides, Path(folder)) for model, overrides in CASES]
        TARGET.write_text(json.dumps({"topology": TOPOLOGY, "cases": cases}, indent=1) + "\n")
    table(json.loads(TARGET.read_text())["cases"])


if __name__ == "__main__":
    main()
