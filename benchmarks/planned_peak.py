"""Planned against traced peak memory of 17 models in two or more layouts each, as bytes of tensors.

    python benchmarks/planned_peak.py                        every model, the decoder cut to `LAYERS` layers
    python benchmarks/planned_peak.py --only deepseek-v3     one of them
    python benchmarks/planned_peak.py --layers 0             the published depth; hours instead of minutes
    python benchmarks/planned_peak.py --json                 results as JSON

Each row plans an explicit layout at the published widths, and traces a step of every distinct rank, as `train --dry-run
--trace` does. Both peaks exclude device context and fragmentation. Exit status 1 when a planned peak differs from the
traced one by more than `BAR`, or is below it by more than `UNDER`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _machine import machine

BAR = 0.05
"""Largest difference of planned and traced peak, as a fraction of the traced one."""
UNDER = 0.02
"""Largest fraction by which the planned peak may be below the traced one; such runs may exceed the memory."""
LAYERS = 4
"""Default number of decoder layers; a trace takes about a tenth of the time for all layers."""
TOPOLOGY = "dgx-b200"
SEQ_LEN = 4096
FULL_SIZE = Path(__file__).with_name("full_size.json")

PLAIN = "dp_shard=16"
PIECES = "dp_shard=8 tp=2 gathered_inputs=re-gather recompute=full"
TENSOR = "dp_shard=8 tp=2"
STAGES = "pp=2 dp_shard=8 accumulation_steps=4"
MIXED = "pp=2 dp_shard=4 tp=2 accumulation_steps=4 recompute=full"
CASES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("llama-3-8b", "dense", (PLAIN, MIXED, "dp_shard=2 recompute=full")),
    ("llama-3-70b", "dense", (PIECES, STAGES)),
    ("qwen3-8b", "dense", (STAGES, "dp_shard=4 cp=2 tp=2 accumulation_steps=2")),
    ("stablelm-2-12b", "dense", (PLAIN, "dp_shard=8 cp=2 accumulation_steps=2", TENSOR, "dp_shard=4 tp=4")),
    ("command-r7b", "dense", (PLAIN, TENSOR, "dp_shard=4 recompute=full")),
    ("starcoder2-15b", "dense", (PLAIN, TENSOR)),
    ("gemma-3-27b", "dense", (PLAIN, "dp_shard=4 tp=4")),
    ("mixtral-8x7b", "experts", (f"{PLAIN} ep=8", f"{PIECES} ep=8", TENSOR, f"{PLAIN} recompute=full")),
    ("qwen3-30b-a3b", "experts", (f"{PLAIN} ep=8", f"{STAGES} ep=8", "dp_shard=4 tp=4 recompute=full")),
    ("granite-3.1-3b-a800m", "experts", (PLAIN, TENSOR)),
    ("llama-4-scout", "experts", (PLAIN, TENSOR)),
    ("qwen3-235b-a22b", "experts", (f"{PLAIN} ep=16", f"{MIXED} ep=8")),
    ("glm-4.5-air", "experts", (f"{PIECES} ep=16", f"{STAGES} ep=8")),
    ("gpt-oss-20b", "experts", (f"{PLAIN} ep=8", "dp_shard=8 tp=2 ep=8 accumulation_steps=2")),
    ("deepseek-v2-lite", "latent attention", (f"{PLAIN} ep=8", f"{STAGES} ep=8")),
    ("deepseek-v3", "latent attention", (f"{PLAIN} ep=16", "dp_shard=8 tp=2 ep=16 accumulation_steps=2")),
    ("kimi-k2", "latent attention", (f"{PLAIN} ep=16 accumulation_steps=2", f"{STAGES} ep=8")),
)  # fmt: skip
_TRAINING = ("recompute", "recompute_layers", "accumulation_steps", "microbatch")
_KIMI_K2 = {"n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
            "first_k_dense_replace": 1, "vocab_size": 163840}  # fmt: skip
"""Sizes in the published config of Kimi-K2 that differ from DeepSeek-V3."""


def read_model(name: str, layers: int) -> dict[str, Any]:
    """Return the config of a model with its decoder shortened to `layers` layers; 0: unchanged."""
    from hyper_parallel.model import preset_names, read_preset

    if name in preset_names():
        config = dict(read_preset(name))
    elif name == "kimi-k2":
        config = {**read_preset("deepseek-v3"), **_KIMI_K2}
    else:
        cases = {case["name"]: case["config"] for case in json.loads(FULL_SIZE.read_text())}
        config = dict(cases[name])
    if layers:
        config["num_hidden_layers"] = layers
        if "first_k_dense_replace" in config:  # most layers have experts, as in the whole model
            config["first_k_dense_replace"] = min(1, config["first_k_dense_replace"])
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    return config


def overrides_of(layout: str) -> list[str]:
    """Return a layout, given as text, as recipe overrides."""
    return [f"{'training' if word.partition('=')[0] in _TRAINING else 'parallel'}.{word}" for word in layout.split()]


def measure(name: str, kind: str, layout: str, layers: int) -> dict[str, Any]:
    """Plan and trace one model in one layout, and return the peaks."""
    from hyper_parallel.config import load_recipe
    from hyper_parallel.trainer import dry_run

    with tempfile.TemporaryDirectory(prefix="planned_peak_") as folder:
        model, recipe = Path(folder) / f"{name}.json", Path(folder) / "recipe.yaml"
        config = read_model(name, layers)
        model.write_text(json.dumps(config))
        recipe.write_text(
            f"model: {{path: {model}}}\ndata: {{seq_len: {SEQ_LEN}}}\nparallel: {{}}\n"
            f"topology: {TOPOLOGY}\ntraining: {{dtype: bfloat16, microbatch: 1}}\n"
        )
        result = dry_run(load_recipe(recipe, overrides_of(layout)))
    fullest = max(result.ranks, key=lambda rank: rank.peaks["hbm"].num_bytes)
    peak = fullest.peaks["hbm"]
    ratio = result.planned_bytes / peak.num_bytes
    return {
        "model": name,
        "kind": kind,
        "layout": layout,
        "overrides": overrides_of(layout),
        "config": config,
        "planned_bytes": result.planned_bytes,
        "traced_bytes": peak.num_bytes,
        "planned_to_traced": ratio,
        "rank": fullest.rank,
        "peak_in": f"{peak.segment}, {peak.during}",
        "planned": {t.name: t.bytes for t in result.plan.memory},
        "traced": peak.breakdown,
        "trace_s": result.seconds,
        "passed": -UNDER <= ratio - 1.0 <= BAR,
    }


def main() -> None:
    """Run the benchmark with the command-line options, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="name of a model; may be repeated")
    parser.add_argument("--layout", action="append", help="other layouts than those of the table")
    parser.add_argument("--layers", type=int, default=LAYERS, help="decoder layers; 0: all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = []
    for name, kind, layouts in CASES:
        for layout in args.layout or layouts:
            if args.only and name not in args.only:
                continue
            row = measure(name, kind, layout, args.layers)
            rows.append(row)
            if not args.json:
                print(
                    f"{name:17} {layout:62} {row['planned_bytes'] / 2**30:7.2f} GiB planned, "
                    f"{row['traced_bytes'] / 2**30:7.2f} traced, {row['planned_to_traced'] - 1:+6.1%} "
                    f"in {row['peak_in']}{'' if row['passed'] else '  MISSED'}",
                    flush=True,
                )
    if args.json:
        about = {"machine": machine(), "bar": BAR, "under": UNDER, "layers": args.layers}
        about |= {"topology": TOPOLOGY, "seq_len": SEQ_LEN}
        print(json.dumps({**about, "rows": rows}, indent=1))
    if not all(row["passed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
