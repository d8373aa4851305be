"""Test of the planner's optimality certificate: no random pinned subspace contains a faster strategy.

    python benchmarks/planner_pins.py            # 500 subspaces, ten per unrestricted search
    python benchmarks/planner_pins.py --json     # the same as JSON
    python benchmarks/planner_pins.py --draws 50 --seed 7

A subspace is defined by one to four random pins. Half of them combine random choices with degrees of the best strategy
or of a runner-up. If this version cannot run any strategy with these pins, the pinned and the unrestricted search both
cover all layouts. The exit status is 1 when a subspace has a faster step than the unrestricted search.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from hyper_parallel.cost import ORDERS, SCHEDULES
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Plan, Workload
from hyper_parallel.planner import plan

MODELS = (
    "llama-3-8b", "qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b", "llama-3-70b", "qwen3-235b-a22b",
    "deepseek-v3",
)  # fmt: skip
MACHINES = ("dgx-a100", "dgx-h100", "gb200-nvl72", "cloudmatrix384", "atlas-900-a2", "tpu-v5p")
DEVICES = (8, 16, 16, 24, 32, 32, 48, 64, 64, 128)
VALUES = {
    "pp": (1, 2, 4, 8, 16),
    "tp": (1, 2, 4, 8),
    "cp": (1, 2, 4),
    "ep": (1, 2, 4, 8),
    "etp": (1, 2, 4),
    "dp_shard": (1, 2, 4, 8, 16),
    "dp_replicate": (1, 2, 4),
    "microbatch": (1, 2, 3, 4, 6, 8, 16, 32),
    "virtual_stages": (1, 2, 3, 4),
    "schedule": SCHEDULES,
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "gathered_inputs": ("keep", "re-gather"),
    "attention_scatter": ("head", "token"),
    "attention_shape": ("1d", "2d", "weight"),
    "mlp_shape": ("1d", "2d", "weight"),
    "cp_kind": ("ring", "ulysses", "hybrid", "all_gather"),
    "order": tuple(">".join(order) for order in ORDERS),
}
TIE = 1e-9
"""Relative difference up to which two step times count as equal, because of rounding."""


def draw_case(draw: random.Random) -> dict[str, object]:
    """Return a random model, machine and batch."""
    devices = draw.choice(DEVICES)
    seq_len = draw.choice((2048, 4096, 8192))
    tokens = seq_len * devices * draw.choice((1, 2, 4, 6))
    return {
        "model": draw.choice(MODELS),
        "topology": draw.choice(MACHINES),
        "num_devices": devices,
        "workload": Workload(seq_len, tokens),
    }


def draw_pins(draw: random.Random, free: Plan) -> dict[str, int | str]:
    """Return the random pins of one subspace; `free` is the result of the unrestricted search."""
    pins: dict[str, int | str] = {}
    if draw.random() < 0.5:
        known = draw.choice([free.strategy, *(r.strategy for r in free.rejected)])
        names = draw.sample(["pp", "tp", "cp", "ep", "dp_shard"], 2)
        pins |= {name: getattr(known, name) for name in names}
    for name in draw.sample(sorted(VALUES), draw.choice((1, 1, 2))):
        pins[name] = draw.choice(VALUES[name])
    return pins


def compare(draws: int, each: int, seed: int) -> list[dict[str, object]]:
    """Return one row per subspace that contains a strategy, `draws` rows in total, `each` per model and machine."""
    draw = random.Random(seed)
    rows: list[dict[str, object]] = []
    while len(rows) < draws:
        case = draw_case(draw)
        try:
            free = plan(**case)  # type: ignore[arg-type]
        except HyperParallelError:
            continue
        wider: Plan | None = None
        for _ in range(each):
            pins = draw_pins(draw, free)
            try:
                part = plan(**case, pins=pins)  # type: ignore[arg-type]
            except HyperParallelError:
                continue  # nothing is legal there, or nothing fits
            whole = free
            if not only_what_runs(part):
                whole = wider = wider or plan(**case, all_layouts=True)  # type: ignore[arg-type]
            proof = whole.certificate
            assert proof is not None
            rows.append(
                {
                    **plain(case),
                    "pins": pins,
                    "free_s": whole.step_s,
                    "pinned_s": part.step_s,
                    "gap": proof.gap,
                    "better": part.step_s < whole.step_s * (1.0 - max(proof.gap, TIE)),
                    "free": str(whole.strategy),
                    "pinned": str(part.strategy),
                }
            )
    return rows[:draws]


def only_what_runs(made: Plan) -> bool:
    """Return whether the search was restricted to strategies that this version can run."""
    return any("only what this version runs" in note for note in made.notes)


def plain(case: dict[str, object]) -> dict[str, object]:
    """Return a case as JSON values."""
    workload = case["workload"]
    assert isinstance(workload, Workload)
    batch = {"seq_len": workload.seq_len, "tokens_per_step": workload.tokens_per_step}
    return {**{k: v for k, v in case.items() if k != "workload"}, **batch}


def main() -> None:
    """Print the comparison, and exit with 1 when a subspace has a faster strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--draws", type=int, default=500, help="pinned sub-spaces")
    parser.add_argument("--each", type=int, default=10, help="sub-spaces of one free search")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.process_time()
    rows = compare(args.draws, args.each, args.seed)
    better = [row for row in rows if row["better"]]
    summary = {
        "sub_spaces": len(rows),
        "better": len(better),
        "largest_gap": max(float(str(row["gap"])) for row in rows),
        "cpu_s": round(time.process_time() - started, 1),
    }
    if args.json:
        print(json.dumps({"summary": summary, "better": better}, indent=1))
    else:
        for row in better:
            print(f"better: {row}")
        print(" ".join(f"{name}={value}" for name, value in summary.items()))
    sys.exit(1 if better else 0)


if __name__ == "__main__":
    main()
