"""Compare offloaded steps with eager steps for every model type of `tools/census.py`.

    python tools/census_offload.py                  all types that train on one rank, as JSON lines
    python tools/census_offload.py --shard 0/3      every third type
    python tools/census_offload.py starcoder2 mamba

Each type is trained in float32 with AdamW on one CPU rank: `STEPS` eager steps, and as many steps through `hp.offload`.
The budget is `SHARE` of the eager peak, or the smallest budget that a refusal states if it is below the peak. Losses,
parameters, buffers and optimizer state must be bitwise equal. A type is `equal`, `refused` with a code, `wrong`, or
`uncoded` (an error without a code); the last line counts them. The exit status is 1 if a type is wrong or uncoded, or
more than a tenth are refused.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from census import PAGE, auto_class, one_line
from census_models import SEQ_LEN, tiny

STEPS, SHARE, SECONDS, REFUSED = 4, 0.8, 150, 0.1
ROWS = 2


def made(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model with random weights, and its optimizer."""
    import torch
    from transformers import AutoConfig

    torch.manual_seed(3)
    model = auto_class(config["model_type"]).from_config(AutoConfig.for_model(**config)).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step_of(model: Any, optimizer: Any) -> Any:
    """Return a function that runs a training step."""

    def step(ids: Any) -> Any:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batches() -> list[Any]:
    """Return the batches of all steps."""
    import torch

    draws = torch.Generator().manual_seed(7)
    return [torch.randint(3, 250, (ROWS, SEQ_LEN), generator=draws) for _ in range(STEPS)]


def bits(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return copies of parameters, buffers and optimizer state by name."""
    import torch

    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, p in model.named_parameters():
        slots = optimizer.state.get(p, {})
        found |= {f"{name} {k}": v for k, v in slots.items() if isinstance(v, torch.Tensor)}
    return found


def differing(plain: dict[str, Any], planned: dict[str, Any]) -> str | None:
    """Return the name of a tensor that differs in any bit; None if all are equal."""
    import torch

    if plain.keys() != planned.keys():
        return f"others: {sorted(plain.keys() ^ planned.keys())[:3]}"
    for name, value in plain.items():
        a, b = (t.detach().contiguous().flatten().view(torch.uint8) for t in (value, planned[name]))
        if not torch.equal(a, b):
            return name
    return None


def cell(name: str) -> dict[str, Any]:
    """Return the outcome of a type, with peak and budget in bytes."""
    import torch

    import hyper_parallel as hp
    from hyper_parallel.backends.torch.memory import StorageWatch
    from hyper_parallel.errors import BudgetImpossible, HyperParallelError

    config, given = tiny(name), batches()
    model, optimizer = made(config)
    step = step_of(model, optimizer)
    torch.manual_seed(11)
    losses = [step(given[0])]
    with StorageWatch() as watch:
        for tensor in bits(model, optimizer).values():
            watch.track(tensor)
        losses.append(step(given[1]))
    losses += [step(ids) for ids in given[2:]]
    row: dict[str, Any] = {"plain_bytes": watch.peak_bytes}
    budget = int(SHARE * watch.peak_bytes)
    while True:
        mine, ours = made(config)
        torch.manual_seed(11)
        try:
            with hp.offload(step_of(mine, ours), budget=budget, model=mine, optimizer=ours) as run:
                found = [run(ids) for ids in given]
            break
        except BudgetImpossible as error:
            least = error.least_bytes
            if not budget < least < watch.peak_bytes:
                return row | {"outcome": "refused", "why": f"{error.code}: {one_line(error)}"}
            budget = least
        except HyperParallelError as error:
            return row | {"outcome": "refused", "why": f"{error.code}: {error}"[:600]}
    row |= {"budget_bytes": budget, "device_bytes": run.measured.device_bytes}
    if odd := differing(dict(enumerate(losses)), dict(enumerate(found))):
        return row | {"outcome": "wrong", "why": f"loss of step {odd}"}
    if odd := differing(bits(model, optimizer), bits(mine, ours)):
        return row | {"outcome": "wrong", "why": odd}
    if run.measured.device_bytes > budget:
        return row | {"outcome": "wrong", "why": "more bytes than the budget"}
    return row | {"outcome": "equal"}


def in_process(name: str) -> dict[str, Any]:
    """Return the outcome of a type, computed in a separate process with a time limit."""
    with tempfile.NamedTemporaryFile() as file:
        result = Path(file.name)
        result.write_text(json.dumps({"outcome": "uncoded", "why": f"crash, or over {SECONDS} s"}))
        begin, pid = time.monotonic(), os.fork()
        if pid == 0:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor, which may be shared
            signal.alarm(10 * SECONDS)
            warnings.simplefilter("ignore")
            try:
                row = cell(name)
            except BaseException as error:
                traceback.print_exc()
                row = {"outcome": "uncoded", "why": one_line(error)}
            result.write_text(json.dumps(row))
            os._exit(0)
        os.waitpid(pid, 0)
        row = json.loads(result.read_text())
    return {"type": name, **row, "seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    """Print a line per type and the counts, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th type, from the i-th on")
    given = parser.parse_args()
    import transformers

    import hyper_parallel as hp
    from hyper_parallel.runtime import offloaded_step  # noqa: F401

    assert hp.offload is not None  # imported once, before the processes are forked
    transformers.logging.set_verbosity_error()
    rows = json.loads(PAGE.read_text())["types"]
    part, parts = map(int, given.shard.split("/"))
    trained = [name for name, cells in rows.items() if cells.get("one rank") == "ok"]
    table = []
    for name in (given.types or trained)[part::parts]:
        table.append(in_process(name))
        print(json.dumps(table[-1]), flush=True)
    counts = Counter(row["outcome"] for row in table)
    print(json.dumps({"types": len(table), **counts}))
    bad = counts["wrong"] or counts["uncoded"] or counts["refused"] > REFUSED * len(table)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
