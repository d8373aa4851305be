"""Seconds of the exact search for several numbers of devices, with the optimality certificate.

    python benchmarks/planner_speed.py            # a table
    python benchmarks/planner_speed.py --json     # the same as JSON

Every search runs in this process, so imports are excluded. Reported are CPU and wall time of the fastest of `--repeat`
runs.
"""

from __future__ import annotations

import argparse
import json
import time

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.planner import plan

CASES = (
    ("llama-3-8b", "dgx-h100", 384), ("llama-3-70b", "dgx-h100", 384), ("llama-3-70b", "dgx-h100", 1024),
    ("llama-3-405b", "cloudmatrix384", 384), ("llama-3-405b", "cloudmatrix384", 2048),
    ("llama-3-405b", "cloudmatrix384", 8192), ("llama-3-405b", "cloudmatrix384", 16384),
    ("llama-3-405b", "cloudmatrix384", 65536), ("mixtral-8x22b", "cloudmatrix384", 2048),
    ("deepseek-v3", "cloudmatrix384", 384), ("deepseek-v3", "cloudmatrix384", 2048),
    ("deepseek-v3", "cloudmatrix384", 8192), ("deepseek-v3", "cloudmatrix384", 65536),
    ("deepseek-v3", "dgx-h100", 2048),
)  # fmt: skip


def measure(model: str, topology: str, devices: int, repeat: int) -> dict[str, object]:
    """Return the times and the result of one search."""
    best: dict[str, object] = {}
    for _ in range(repeat):
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            made = plan(model, topology, num_devices=devices)
        except HyperParallelError as error:
            return {"model": model, "topology": topology, "devices": devices, "error": error.code}
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        proof = made.certificate
        assert proof is not None
        row: dict[str, object] = {
            "model": model,
            "topology": topology,
            "devices": devices,
            "cpu_s": round(cpu, 3),
            "wall_s": round(wall, 3),
            "priced": proof.priced,
            "cut": sum(proof.cut.values()),
            "simulated": proof.simulated,
            "gap": proof.gap,
            "step_s": made.step_s,
            "mfu": made.predicted_mfu,
            "strategy": str(made.strategy),
        }
        if not best or cpu < best["cpu_s"]:  # type: ignore[operator]
            best = row
    return best


def main() -> None:
    """Run all searches, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose model or devices contain this")
    args = parser.parse_args()
    cases = [c for c in CASES if args.only in f"{c[0]} {c[2]}"]
    rows = [measure(*case, args.repeat) for case in cases]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        if "error" in row:
            print(f"{row['model']:<16}{row['devices']:>7}  {row['error']}")
            continue
        print(
            f"{row['model']:<16}{row['devices']:>7}  {row['cpu_s']:>7.3f} s cpu  {row['wall_s']:>7.3f} s wall  "
            f"{row['priced']:>7} priced  {row['cut']:>8} cut  gap {row['gap']:.2%}  {row['strategy']}"
        )


if __name__ == "__main__":
    main()
