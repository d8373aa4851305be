import json
import math
from pathlib import Path

import pytest

from hyper_parallel.ir import (
    Collective,
    CostTerm,
    Counter,
    Layout,
    MemoryTerm,
    ModelRef,
    Plan,
    Rejected,
    Span,
    Strategy,
    Timeline,
    Workload,
)
from hyper_parallel.serde import encode


def make_plan() -> Plan:
    strategy = Strategy(dp_shard=2, tp_x=2)
    return Plan(
        model=ModelRef("tiny <llama>", "llama", 4_200_000, 4_200_000, 2.6e7, "abc"),
        topology="local-cpu",
        peak_flops=2.5e10,
        workload=Workload(256, tokens_per_step=4096).resolve(2),
        strategy=strategy,
        layouts={
            "model.embed_tokens.weight": Layout((("tp_x", "dp_shard"), ()), dims=("vocab", "embed")),
            "model.layers.*.self_attn.q_proj.weight": Layout((("tp_x", "dp_shard"), ()), dims=("heads", "embed")),
            "model.layers.*.mlp.down_proj.weight": Layout((("dp_shard",), ("tp_x",)), dims=("embed", "mlp")),
            "model.norm.weight": Layout((("dp_shard",),), dims=("embed",)),
        },
        step_s=1.0,
        cost=(
            CostTerm("compute", 0.7, "flops / (peak * efficiency)", {"flops": 1.0}, "measured card"),
            CostTerm("tp communication", 0.2, "bytes / bandwidth", {}, "measured card"),
            CostTerm("optimizer", 0.1, "20 B / parameter / memory bandwidth", {}, "measured card"),
        ),
        memory=(
            MemoryTerm("parameters", "hbm", 40 << 20, "4 B"),
            MemoryTerm("optimizer", "hbm", 80 << 20, "8 B"),
            MemoryTerm("activations", "hbm", 200 << 20, "..."),
        ),
        memory_capacity_bytes=1 << 30,
        collectives=(Collective("all_gather", ("dp_shard",), "fsdp parameters", 10, 1 << 20),),
        rejected=(Rejected(Strategy(dp_shard=4), "slower by 9 %: fsdp communication", 1.09, 300 << 20),),
        notes=("vocabulary 1001 is not divisible by tp 2: embedding and head are replicated",),
    )


def make_timeline() -> Timeline:
    spans = []
    for step in (3, 4, 5):
        for rank in range(4):
            lane, start = f"rank {rank}/compute", 10.0 + step * 1.05
            for name, category, offset, length in (
                ("data", "data", 0.0, 0.02),
                ("forward", "compute", 0.02, 0.33),
                ("backward", "compute", 0.35, 0.6),
                ("optimizer", "optimizer", 0.95, 0.08),
            ):
                spans.append(Span(lane, name, start + offset, length, category, step))
    return Timeline("measured", tuple(spans), (Counter("memory", 13.0, 3e8),))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    plan = make_plan()
    plan.save(tmp_path / "plan.json")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 61):
            row = {
                "step": step,
                "loss": 8.3 * math.exp(-step / 40) + 1.5,
                "grad_norm": 1.0 + 0.3 * math.sin(step),
                "lr": 1e-3 / step,
                "tokens": 4096,
                "step_s": 1.1 if step > 2 else 3.0,
                "tps": 930.0,
                "mfu": 0.21,
                "memory_bytes": 300 << 20,
            }
            file.write(json.dumps(row) + "\n")
    evals = [{"step": 0, "loss": 9.7}, {"step": 60, "loss": 3.4}]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evals))
    (tmp_path / "timeline.json").write_text(json.dumps(encode(make_timeline())))
    (tmp_path / "config.yaml").write_text("model:\n  path: tiny\n")
    (tmp_path / "sample.txt").write_text("def f(x):\n    return x < 1\n")
    return tmp_path
