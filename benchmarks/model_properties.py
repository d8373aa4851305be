"""Time to measure the properties of a model, for every model type that transformers can train.

The first run with a config measures the properties in a child process; later runs read them from a cache. Each type is
measured with two configs: a shrunk one, and the defaults of its class, for which a small copy must be found first.
Bars:
at most 3 s per config the first time. The second time, less than 1 % of the wall time of a one-step run, which is the
start-up time of any run. Requires an otherwise idle machine.

    python benchmarks/model_properties.py                  # all types, some minutes
    python benchmarks/model_properties.py llama qwen3_moe  # these types
    python benchmarks/model_properties.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from _machine import machine  # noqa: E402
from census_models import tiny  # noqa: E402

BARS = {"first_s": 3.0, "second_share": 0.01}


def trained_types() -> list[str]:
    """Return the model types that train in plain transformers, from docs/census.json."""
    rows = json.loads((ROOT / "docs" / "census.json").read_text())["types"]
    return [name for name, cells in rows.items() if cells.get("plain") == "ok"]


def configs(model_type: str) -> dict[str, dict[str, Any]]:
    """Return two configs of a type by name: shrunk, and with the defaults of its class."""
    return {"small": tiny(model_type), "defaults": {"model_type": model_type}}


def measure(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Measure the properties of a config's model twice, and return both times."""
    from hyper_parallel.errors import HyperParallelError
    from hyper_parallel.model import read_config
    from hyper_parallel.trainer.model_properties import properties_of

    file = folder / "config.json"
    file.write_text(json.dumps(values))
    times = []
    try:
        for _ in range(2):
            start = time.perf_counter()
            found = properties_of(read_config(str(file)))
            times.append(time.perf_counter() - start)
    except HyperParallelError as error:
        return {"refused": error.what}
    return {"first_s": times[0], "second_s": times[1], "measured_on": found.measured_on}


def run_seconds(folder: Path) -> float:
    """Return the wall time of a one-step run on a small model in a separate process."""
    (folder / "model.json").write_text(json.dumps(tiny("llama")))
    (folder / "text.txt").write_text((ROOT / "LICENSE").read_text())
    recipe = {
        "model": {"path": str(folder / "model.json")},
        "data": {"source": str(folder / "text.txt"), "seq_len": 32, "vocab_size": 300},
        "training": {"steps": 1, "dtype": "float32", "tokens_per_step": 64},
        "parallel": {"dp_shard": 1},
        "output_dir": str(folder / "run"),
    }
    (folder / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "hyper_parallel", "train", str(folder / "recipe.json")]
    start = time.perf_counter()
    subprocess.run([*command, "--no-calibrate"], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print; exit with 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        for name in arguments.types or trained_types():
            for kind, values in configs(name).items():
                rows[f"{name} ({kind})"] = row = measure(values, folder)
                if not arguments.json:
                    print(name, kind, row, flush=True)
        run_s = run_seconds(folder)
    timed = {name: row for name, row in rows.items() if "first_s" in row}
    first = {name: row["first_s"] for name, row in timed.items()}
    share = max(row["second_s"] for row in timed.values()) / run_s
    slow = {name: seconds for name, seconds in first.items() if seconds > BARS["first_s"]}
    result = {
        **machine(),
        "configs": len(timed),
        "refused": sorted(rows.keys() - timed.keys()),
        "not_measured": sorted(n for n, row in timed.items() if row["measured_on"] == "nothing"),
        "first_s": {"median": statistics.median(first.values()), "most": max(first.values())},
        "slower_than_bar": slow,
        "run_of_one_step_s": run_s,
        "second_share_of_run": share,
        "bars": BARS,
        "ok": not slow and share < BARS["second_share"],
    }
    print(json.dumps(result, indent=1))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
