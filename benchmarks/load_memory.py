"""Peak host memory while four ranks load a Hugging Face directory; the bar is 1.1 times the parameters' bytes.

    python benchmarks/load_memory.py --json

A Llama of 166 MB, saved by transformers, is loaded on 4 CPU ranks under two layouts. Anonymous memory (`Pss_Anon` of
/proc/PID/smaps_rollup) is sampled every few milliseconds, minus its value just before loading, and the peaks of all
ranks are added. The parameters' bytes count once over all ranks for `dp_shard`, and on each rank for `dp_replicate`.
Mapped pages of the files are not counted. The exit status is 1 above the bar.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch import load_pretrained, read_model
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner import plan
from hyper_parallel.runtime import World, launch, parallelize

BAR = 1.1
RANKS = 4
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LAYOUTS = {"dp_shard": Strategy(dp_shard=RANKS), "dp_replicate": Strategy(dp_replicate=RANKS)}


def save(folder: str) -> None:
    """Save a model with random weights, by transformers."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained(folder)


def anonymous_bytes() -> int:
    """Return the bytes of this process's anonymous pages; shared pages count by its share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) * 1024


def loaded(strategy: Strategy, directory: Path) -> tuple[int, int]:
    """Load the model on this rank; return the peak of anonymous memory minus its start, and the parameters' bytes."""
    with World.join("cpu") as world:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
        work = Workload(seq_len=64, microbatch=1, accumulation_steps=1, compute_dtype="float32")
        chosen = plan(read_model(model, "llama"), "local", work, strategy=strategy)
        model = parallelize(model, chosen, world)
        dist.barrier()
        before, peak, done = anonymous_bytes(), 0, threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.is_set():
                peak = max(peak, anonymous_bytes())
                time.sleep(0.003)

        sampler = threading.Thread(target=sample)
        sampler.start()
        load_pretrained(model, directory, device="cpu")
        peak = max(peak, anonymous_bytes())
        done.set()
        sampler.join()
        dist.barrier()
        local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        return peak - before, sum(p.numel() * p.element_size() for p in local)


def main() -> int:
    """Measure both layouts, and return exit status 1 if one exceeds the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        launch(lambda _: save(folder), 1)  # in another process: ranks must not find freed memory
        file_bytes = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        for name, strategy in LAYOUTS.items():
            ranks = launch(lambda _, s=strategy: loaded(s, Path(folder)), RANKS)
            peak, kept = (sum(column) for column in zip(*ranks, strict=True))
            rows[name] = {"peak_bytes": peak, "kept_bytes": kept, "ratio": round(peak / kept, 3)}
    result = {"file_bytes": file_bytes, "bar": BAR, "layouts": rows}
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        for name, values in rows.items():
            print(f"{name:13} {values['ratio']:.3f} of what it keeps (bar {BAR})")
    return int(any(values["ratio"] > BAR for values in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
