"""Planned and traced parameter counts and memory peaks of models at their published size, via the command line.

    python benchmarks/full_size.py                      every model of full_size.json, one after another
    python benchmarks/full_size.py --only glm-4.5-air   one of them
    python benchmarks/full_size.py --json               results as JSON

For each model, `plan` chooses a layout on a preset machine, `plan --launch ours` writes its recipe, and `train
--dry-run` traces a training step of every distinct rank without values or devices. The parameter counts of the planner,
of the dry run, and of a transformers model on the meta device must be equal. Peaks count bytes of tensors, without
device context and fragmentation. `source` in full_size.json states the origin of a config. Exit status 1 if a bar is
missed.
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

BAR = 0.05
"""Largest relative difference of planned and traced peak."""
CASES = Path(__file__).with_suffix(".json")
_SET_ASIDE = ("device context", "fragmentation")


def command(*words: object) -> tuple[str, float]:
    """Run the command line in a separate process, and return its standard output and seconds."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "hyper_parallel", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stderr}")
    return done.stdout, time.perf_counter() - start


def plain_parameters(config: dict[str, Any]) -> int:
    """Return the number of parameters of the transformers model of a config; shared parameters count once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    made = AutoConfig.for_model(**config)
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        return sum(p.numel() for p in auto.from_config(made).parameters())


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Return the three parameter counts and two peaks of one model."""
    from hyper_parallel.model import read_preset

    config = case["config"]
    config = read_preset(config) if isinstance(config, str) else config
    with tempfile.TemporaryDirectory() as folder:
        path, recipe = Path(folder) / f"{case['name']}.json", Path(folder) / "recipe.yaml"
        path.write_text(json.dumps(config))
        words = ["plan", path, "-t", case["topology"], "--devices", case["devices"]]
        words += ["--seq-len", case["seq_len"], "--tokens-per-step", case["tokens_per_step"]]
        words += [word for pin in case["pins"] for word in ("--pin", pin)]
        planned, plan_s = command(*words, "--json")
        recipe.write_text(command(*words, "--launch", "ours")[0])
        traced, trace_s = command("train", recipe, "--dry-run", "--trace", "--json")
    plan, dry = json.loads(planned), json.loads(traced)
    terms = {t["name"]: t["bytes"] for t in plan["memory"] if t["name"] not in _SET_ASIDE}
    fullest = max(dry["ranks"], key=lambda rank: rank["peaks"]["hbm"]["num_bytes"])
    peak = fullest["peaks"]["hbm"]
    counts = {
        "transformers": plain_parameters(config),
        "plan": plan["model"]["num_params"],
        "dry run": dry["plan"]["model"]["num_params"],
    }
    ratio = sum(terms.values()) / peak["num_bytes"]
    return {
        "name": case["name"],
        "type": config["model_type"],
        "strategy": plan["strategy"],
        "topology": f"{case['devices']} of {case['topology']}",
        "parameters": counts,
        "planned_bytes": sum(terms.values()),
        "traced_bytes": peak["num_bytes"],
        "planned_to_traced": ratio,
        "plan_s": plan_s,
        "trace_s": trace_s,
        "operators": fullest["operators"],
        "rank": fullest["rank"],
        "peak_in": f"{peak['segment']}, {peak['during']}",
        "planned": terms,
        "traced": peak["breakdown"],
        "differences": dry["differences"],
        "passed": len(set(counts.values())) == 1 and abs(ratio - 1.0) <= BAR and dry["fits"],
    }


def main() -> None:
    """Run the benchmark with the command-line options, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="name of a model; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = []
    for case in json.loads(CASES.read_text()):
        if args.only and case["name"] not in args.only:
            continue
        row = measure(case)
        rows.append(row)
        if not args.json:
            counts = " = ".join(f"{n:,}" for n in dict.fromkeys(row["parameters"].values()))
            print(
                f"{row['name']:20} {counts:16} peak {row['planned_bytes'] / 2**30:6.2f} GiB planned, "
                f"{row['traced_bytes'] / 2**30:6.2f} traced, {row['planned_to_traced'] - 1:+6.1%}; "
                f"plan {row['plan_s']:.0f} s, trace {row['trace_s']:.0f} s"
                f"{'' if row['passed'] else '  MISSED'}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"machine": machine(), "bar": BAR, "rows": rows}, indent=1))
    if not all(row["passed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
