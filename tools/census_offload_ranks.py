"""Compare `hp.offload` with eager steps on two ranks, for every type that `census_offload.py` finds equal on one.

    python tools/census_offload_ranks.py --shard 0/3 --how fully_shard      every third type, as JSON lines
    python tools/census_offload_ranks.py starcoder2 mamba

The model is sharded by torch's `fully_shard` or replicated by `DistributedDataParallel`, with different tokens per
rank, gradients clipped by torch, and AdamW in float32. The budget is `SHARE` of a rank's parameters, buffers and
optimizer state, or the smallest budget that a refusal states. Losses and state must be bitwise equal to eager steps. A
type that torch itself cannot train in this way is `plain fails`. Other types are `equal`, `refused` with a code,
`wrong` or `uncoded`; the exit status is 1 for the last two.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from census import one_line
from census_models import SEQ_LEN, tiny
from census_offload import ROWS, bits, differing, made

STEPS, SHARE, SECONDS = 5, 1.2, 300
EQUAL = Path(__file__).parents[1] / "benchmarks" / "results" / "offload_census_cpu.json"


def wrapped(model: Any, how: str) -> Any:
    """Return the model parallelized by torch: by DDP if `how` is `replicas`, else by `fully_shard`."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if how == "replicas":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (2,))
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    for layer in lists[0] if lists else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(name: str, how: str, budget: int | None) -> tuple[dict[str, Any], int]:
    """Train on this rank, and return losses and state by name, and the bytes of the state."""
    import torch
    import torch.distributed as dist

    import hyper_parallel as hp
    from hyper_parallel.backends.torch import local

    model, _ = made(tiny(name))
    model = wrapped(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(ids: Any) -> Any:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    draws = torch.Generator().manual_seed(7 + dist.get_rank())
    given = [torch.randint(3, 250, (ROWS, SEQ_LEN), generator=draws) for _ in range(STEPS)]
    torch.manual_seed(11)
    if budget is None:
        losses = [step(ids) for ids in given]
    else:
        with hp.offload(step, budget=budget, model=model, optimizer=optimizer) as run:
            losses = [run(ids) for ids in given]
    state = {k: local(v).detach().clone() for k, v in bits(model, optimizer).items()}
    return {**{f"loss {i}": x for i, x in enumerate(losses)}, **state}, sum(v.nbytes for v in state.values())


def on_a_rank(name: str, how: str) -> dict[str, Any]:
    """Return the outcome of a type on this rank."""
    from hyper_parallel.errors import BudgetImpossible, HyperParallelError
    from hyper_parallel.runtime import World

    with World.join("cpu"):
        try:
            plain, num_bytes = trained(name, how, None)
        except Exception as error:
            return {"outcome": "plain fails", "why": one_line(error)}
        budget = int(SHARE * num_bytes)
        for _ in range(2):
            try:
                planned, _ = trained(name, how, budget)
            except BudgetImpossible as error:
                budget = error.least_bytes
                continue
            except HyperParallelError as error:
                return {"outcome": "refused", "why": f"{error.code}: {one_line(error)}"}
            except Exception as error:
                return {"outcome": "uncoded", "why": one_line(error)}
            odd = differing(plain, planned)
            found = {"outcome": "equal"} if odd is None else {"outcome": "wrong", "why": odd}
            return {**found, "state_bytes": num_bytes, "budget_bytes": budget}
    return {"outcome": "wrong", "why": f"the budget {budget} is not enough after all"}


def main() -> int:
    """Compare all types, print the outcomes, and return the exit status."""
    from hyper_parallel.errors import HyperParallelError
    from hyper_parallel.runtime import launch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th type, from the i-th on")
    parser.add_argument("--how", default="fully_shard", choices=("fully_shard", "replicas"))
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    part, parts = map(int, asked.shard.split("/"))
    known = json.loads(EQUAL.read_text())["types"]
    equal = sorted(row["type"] for row in known if row["outcome"] == "equal")
    counts: Counter[str] = Counter()
    for name in asked.types or equal[part::parts]:
        try:
            ranks = launch(lambda _, name=name: on_a_rank(name, asked.how), 2, timeout_s=SECONDS)
        except HyperParallelError as error:
            ranks = [{"outcome": "uncoded", "why": one_line(error)}]
        row = next((r for r in ranks if r["outcome"] != "equal"), ranks[0])
        counts[row["outcome"]] += 1
        print(json.dumps({"type": name, "how": asked.how, **row}), flush=True)
    print(json.dumps({"types": counts.total(), **counts}))
    return int(bool(counts["wrong"] or counts["uncoded"]))


if __name__ == "__main__":
    sys.exit(main())
