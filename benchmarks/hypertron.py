"""Predicted gain of the full strategy space over the 5-D space of Megatron-LM and DeepSpeed on supernodes.

Dense 310B and Mixtral-8x22B on 2,048 dies of CloudMatrix384-class supernodes. All results are predictions of the cost
model, also for strategies that this version cannot run. None was measured. Hypertron (SC'25)
published 56.7 % MFU on 2,048 NPUs and 1.33x over the best configuration of existing frameworks, without its tables;
the two numbers are printed for orientation only.

    python benchmarks/hypertron.py            # a table
    python benchmarks/hypertron.py --json     # the same as JSON
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Plan, Workload
from hyper_parallel.planner import plan

PUBLISHED = {"mfu": 0.567, "speed_up": 1.33}
MODELS = ("megatron-310b", "mixtral-8x22b")
WORKLOAD = Workload(8192, tokens_per_step=8192 * 2048)

_AXES_ORDER = "pp>dp_replicate>dp_shard>cp>tp_x>tp_y"
_MEGATRON = {"tp_y": 1, "order": _AXES_ORDER}
_TWO = {"attention_shape": "2d", "mlp_shape": "2d"}
_WEIGHT = {"attention_shape": "weight", "mlp_shape": "weight"}
SPACES: dict[str, tuple[Mapping[str, int | str], ...]] = {
    "5-D of Megatron-LM and DeepSpeed": (
        {**_MEGATRON, "schedule": "1f1b"},
        {**_MEGATRON, "schedule": "interleaved"},
    ),
    "1-D tensor parallelism, all else free": ({"tp_y": 1},),
    "+ 2-D": ({"tp_y": 1}, _TWO),
    "+ weight axis": ({"tp_y": 1}, _TWO, _WEIGHT),
    "+ folding (a shape for each block)": ({},),
}
"""Each space is the union of searches with pins. The first has pipelines by 1F1B and interleaved 1F1B, ZeRO 1 to 3,
sequence, context (ring, Ulysses, both) and expert parallelism with its own tensor degree, recomputation of a part of
the layers, in Megatron's order of the axes. 2-D attention scatters heads wherever they
divide, because on tokens it sends at least as much."""


def best(model: str, pins: tuple[Mapping[str, int | str], ...], topology: str, devices: int) -> Plan | None:
    """Return the fastest plan in a union of strategy spaces, each given by pins; None if there is none."""
    plans = []
    for some in pins:
        try:
            made = plan(model, topology, WORKLOAD, num_devices=devices, pins=some, top=1, all_layouts=True)
            plans.append(made)
        except HyperParallelError:
            continue
    return min(plans, key=lambda p: p.step_s, default=None)


def study(topology: str, devices: int) -> list[dict[str, object]]:
    """Return the results for all models and strategy spaces."""
    rows: list[dict[str, object]] = []
    for model in MODELS:
        base = None
        for space, pins in SPACES.items():
            made = best(model, pins, topology, devices)
            if made is None:
                rows.append({"model": model, "space": space, "fits": False})
                continue
            base = base or made.step_s
            proof = made.certificate
            assert proof is not None
            tp_s = sum(t.seconds for t in made.cost if t.name == "tp communication")
            rows.append(
                {
                    "model": model,
                    "space": space,
                    "fits": True,
                    "predicted_step_s": made.step_s,
                    "predicted_mfu": made.predicted_mfu,
                    "predicted_speed_up": base / made.step_s,
                    "tp_communication_s": tp_s,
                    "memory_gib": made.memory_bytes / 2**30,
                    "gap": proof.gap,
                    "strategy": str(made.strategy),
                    "microbatch": made.workload.microbatch,
                }
            )
    return rows


def main() -> None:
    """Print the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--topology", default="cloudmatrix384")
    parser.add_argument("--devices", type=int, default=2048)
    args = parser.parse_args()
    rows = study(args.topology, args.devices)
    if args.json:
        print(json.dumps({"published": PUBLISHED, "rows": rows}, indent=1))
        return
    print(f"predictions for {args.devices} devices of {args.topology}; no such machine was used")
    for row in rows:
        if not row["fits"]:
            print(f"{row['model']:<15} {row['space']:<40} does not fit")
            continue
        print(
            f"{row['model']:<15} {row['space']:<40} {row['predicted_step_s']:8.2f} s  MFU {row['predicted_mfu']:6.1%}  "
            f"{row['predicted_speed_up']:5.3f}x  {row['strategy']}"
        )
    print(
        f"published for Hypertron: MFU up to {PUBLISHED['mfu']:.1%}, {PUBLISHED['speed_up']}x over the best of "
        "existing frameworks"
    )


if __name__ == "__main__":
    main()
