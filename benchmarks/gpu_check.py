"""Run each feature once on the accelerator of this machine, through the command line.

    python benchmarks/gpu_check.py                     # every check; a few minutes on one device
    python benchmarks/gpu_check.py --only sft,offload  # these only
    python benchmarks/gpu_check.py --smoke             # the same checks on the CPU, with few timed steps
    python benchmarks/gpu_check.py --json              # results as JSON

Each check is a row of `CHECKS`. Losses on the device are compared with those on the CPU in float32; runs that should be
identical are compared bitwise. For step times, two variants take turns in one process. The exit status is 1 when a
check fails or misses its bar.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _machine import device_of, machine

LOSS_BAR = 1e-4
"""Relative difference of float32 losses between the device and the CPU, whose kernels sum in another order."""
STEP_BAR = 1.03
"""Largest step time relative to a plain PyTorch loop."""
PAIRS = 30
SMOKE_PAIRS = 3
BUDGET_SHARE = 0.7
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 128,
    "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
LARGE = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
"""Sizes of the timed model on an accelerator; on a CPU those of `MODEL` are timed."""

Facts = dict[str, Any]


class Place:
    """Folder with model, data and recipes, in which the command runs on the device and on the CPU.

    Args:
        root: Empty folder.
        device: Device to check.
        pairs: Number of timed steps of each variant.
    """

    def __init__(self, root: Path, device: torch.device, pairs: int = PAIRS) -> None:
        self.root, self.device, self.pairs = root, device, pairs
        (root / "model.json").write_text(json.dumps(MODEL))
        chats = [
            {"messages": [{"role": "user", "content": f"{a} + {b}"}, {"role": "assistant", "content": str(a + b)}]}
            for a in range(20)
            for b in range(20)
        ]  # fmt: skip
        (root / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))

    def train(self, name: str, *overrides: str, on_cpu: bool = False) -> list[Facts]:
        """Train in a separate process, and return the rows of its metrics.jsonl."""
        recipe = {
            "model": {"path": str(self.root / "model.json")},
            "data": {"source": "python-stdlib", "seq_len": 128, "vocab_size": 1024},
            "training": {
                "steps": 6, "dtype": "float32", "tokens_per_step": 1024, "lr": 1e-3, "deterministic": True,
            },
            "parallel": {"dp_shard": 1},
            "output_dir": str(self.root / name),
        }  # fmt: skip
        path = self.root / f"{name}.json"
        path.write_text(json.dumps(recipe))
        self.command("train", str(path), "--no-calibrate", *overrides, on_cpu=on_cpu)
        lines = (self.root / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def command(self, *words: str, on_cpu: bool = False) -> str:
        """Run the command, and return its standard output.

        Raises:
            RuntimeError: The command fails; contains the end of its standard error.
        """
        hidden = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(hidden if on_cpu else {})}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "hyper_parallel", *words],
            env=environment, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{words[0]} ended with {done.returncode}: {done.stderr[-1500:]}")
        return done.stdout


def pretraining(place: Place) -> Facts:
    """Compare the losses of the device with those of the CPU."""
    return _compare_with_cpu(place, "plain")


def sft(place: Place) -> Facts:
    """Compare losses on packed conversations, whose model check runs before ranks start, with the CPU."""
    words = ("stage=sft", f"data.source={place.root / 'chats.jsonl'}", "data.packing=true")
    return _compare_with_cpu(place, "sft", *words)


def resume(place: Place) -> Facts:
    """Compare an interrupted and resumed run with an uninterrupted one, bitwise."""
    whole = _losses(place.train("whole"))
    place.train("parts", "training.steps=3", "training.lr_schedule=constant")
    resumed = _losses(place.train("parts", "training.lr_schedule=constant"))
    straight = _losses(place.train("straight", "training.lr_schedule=constant"))
    return {"ok": resumed == straight and len(whole) == len(straight), "losses": resumed}


def offload(place: Place) -> Facts:
    """Compare a run under a device budget with the same run without one, bitwise."""
    plain = place.train("off", "training.dtype=bfloat16")
    peak = max(row["memory_bytes"] for row in plain)
    budget = int(peak * BUDGET_SHARE)
    rows = place.train("on", "training.dtype=bfloat16", f"offload.budget={budget}")
    measured = rows[-1]["memory_bytes"]
    same = _losses(plain) == _losses(rows)
    return {
        **{"ok": same and measured <= budget, "bitwise": same, "plain_bytes": peak},
        **{"budget_bytes": budget, "measured_bytes": measured},
    }


def generation(place: Place) -> Facts:
    """Compare greedy text of an export with that of plain transformers on the same device."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place.train("generated")
    prompt, export = "def main", place.root / "generated" / "export"
    words = ("--prompt", prompt, "--temperature", "0", "--max-new-tokens", "16")
    text = place.command("generate", str(place.root / "generated"), *words)
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).to(place.device)
    ids = tokenizer(prompt, return_tensors="pt").to(place.device)
    out = model.generate(**ids, max_new_tokens=16, do_sample=False)[0]
    expected = tokenizer.decode(out, skip_special_tokens=True)
    return {"ok": text.strip() == expected.strip(), "text": text, "expected": expected}


def step_time(place: Place) -> Facts:
    """Compare the step time of a parallelized model with a plain PyTorch loop; both take turns in one process."""
    return _time_steps(place, compiled=False)


def compiled_step_time(place: Place) -> Facts:
    """Compare the step time of a parallelized model with a plain PyTorch loop, both with compiled layers."""
    return _time_steps(place, compiled=True)


def overlap(place: Place) -> Facts:
    """Compare steps with overlap and serial steps on two ranks that share the device and communicate through gloo."""
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--device", place.device.type, "--rank", str(rank), str(place.root / "store")],
            env={**os.environ, "LOCAL_RANK": "0"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    done = [rank.communicate(timeout=300) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(errors[-1500:] for _, errors in done))
    found: dict[str, Facts] = json.loads(done[0][0].splitlines()[-1])
    serial = found["serial"]
    worst = max(abs(f[key] / serial[key] - 1) for f in found.values() for key in ("loss", "norm"))
    overlapped = found["half-batch"]["halved_layers"] and found["chunks"]["chunked_blocks"]
    ok = worst <= LOSS_BAR and bool(overlapped)
    return {"ok": ok, "worst_relative": worst, "bar": LOSS_BAR, "strategies": found}


def overlap_rank(device: str, rank: int, store: str) -> None:
    """Run a step under each strategy on one of two ranks, and print its loss and gradient norm."""
    import torch.distributed as dist
    from overlap import Case, make_plan
    from transformers import AutoModelForCausalLM, Qwen3Config

    from hyper_parallel.backends.torch import overlap_counts
    from hyper_parallel.ir import Overlap, Strategy
    from hyper_parallel.runtime import World, clip_grad_norm_, forward_backward, parallelize

    kinds = "cpu:gloo" if device == "cpu" else f"cpu:gloo,{device}:gloo"
    dist.init_process_group(kinds, init_method=f"file://{store}", rank=rank, world_size=2)
    overlaps = {
        "serial": Overlap(),
        "half-batch": Overlap(half_batch=True),
        "chunks": Overlap(tp_chunks=4),
    }
    case = Case(
        Qwen3Config(**MODEL), 4, 128,
        {name: Strategy(tp_x=2, overlap=o) for name, o in overlaps.items()}, (0, 0), 0.0,
    )  # fmt: skip
    found = {}
    with World.join(device) as world:
        for name, strategy in case.strategies.items():
            torch.manual_seed(0)
            plan = make_plan(case, strategy)
            model = parallelize(AutoModelForCausalLM.from_config(case.config), plan, world)
            ids = torch.randint(MODEL["vocab_size"], (4, 128)).to(world.device)
            loss = forward_backward(model, [{"input_ids": ids, "labels": ids}], ids.numel())
            norm = clip_grad_norm_(model, 1e9)
            found[name] = {"loss": float(loss), "norm": float(norm), **overlap_counts(model)}
    print(json.dumps(found))
    dist.destroy_process_group()


def _time_steps(place: Place, *, compiled: bool) -> Facts:
    from transformers import AutoModelForCausalLM, Qwen3Config

    import hyper_parallel as hp
    from hyper_parallel.runtime import World, clip_grad_norm_

    accelerated = place.device.type != "cpu"
    sizes = MODEL | (LARGE if accelerated else {})
    dtype = torch.bfloat16 if accelerated else torch.float32
    ids = torch.randint(sizes["vocab_size"], (2, 512), device=place.device)
    synchronize = torch.accelerator.synchronize if accelerated else lambda: None

    def side(world: World | None) -> Callable[[], None]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes), dtype=dtype).train()
        if world is None:
            model.to(place.device)
            clip: Callable[..., Any] = torch.nn.utils.clip_grad_norm_
        else:
            name = str(dtype).removeprefix("torch.")
            work = hp.Workload(512, microbatch=2, compute_dtype=name, param_dtype=name)
            model = hp.parallelize(model, hp.plan_of(model, "dp_shard=1", work), world)
            clip = clip_grad_norm_
        if compiled:
            for layer in model.model.layers:
                layer.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            clip(model.parameters() if world is None else model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            synchronize()

        return step

    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    with World.join(place.device.type) as world:
        sides = {"ours": side(world), "plain": side(None)}
        for number in range(place.pairs + 3):
            for name in list(sides) if number % 2 else list(sides)[::-1]:
                start = time.perf_counter()
                sides[name]()
                if number >= 3:  # the first steps warm up
                    seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True))
    return {"ok": ratio <= STEP_BAR, "ratio": ratio, "median_s": medians, "bar": STEP_BAR}


CHECKS: Mapping[str, Callable[[Place], Facts]] = {
    "pretraining": pretraining,
    "sft": sft,
    "resume": resume,
    "offload": offload,
    "generation": generation,
    "overlap": overlap,
    "step_time": step_time,
    "compiled_step_time": compiled_step_time,
}


def _losses(rows: list[Facts]) -> list[float]:
    return [row["loss"] for row in rows]


def _compare_with_cpu(place: Place, name: str, *words: str) -> Facts:
    device = _losses(place.train(f"{name}_device", *words))
    cpu = _losses(place.train(f"{name}_cpu", *words, on_cpu=True))
    worst = max(abs(a - b) / abs(b) for a, b in zip(device, cpu, strict=True))
    return {"ok": worst <= LOSS_BAR, "worst_relative": worst, "bar": LOSS_BAR, "losses": device}


def main() -> None:
    """Run the checks, print their results, and exit with status 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CHECKS), help="names, separated by commas")
    parser.add_argument("--device", default="auto", help="auto, cuda, npu or cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="on the CPU, times are not judged")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        overlap_rank(given.device, int(given.rank[0]), given.rank[1])
        return
    device = torch.device("cpu") if given.smoke else device_of(given.device)
    if device is None:
        sys.exit("no accelerator on this machine; --smoke runs the checks on the CPU")
    names = given.only.split(",")
    if unknown := set(names) - CHECKS.keys():
        sys.exit(f"no such check: {sorted(unknown)}; there are {', '.join(CHECKS)}")
    found: dict[str, Facts] = {}
    for name in names:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            try:
                found[name] = CHECKS[name](Place(Path(scratch), device, SMOKE_PAIRS if given.smoke else PAIRS))
            except Exception as error:  # the other checks are run too
                found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        found[name]["seconds"] = time.perf_counter() - start
        if not given.json:
            print(name, json.dumps(found[name]), flush=True)
    judged = [facts for facts in found.values() if not (given.smoke and "ratio" in facts)]
    ok = all(facts["ok"] for facts in judged)
    if given.json:
        print(json.dumps({**machine(), "checked": str(device), "ok": ok, "checks": found}, indent=1))
    sys.exit(not ok)


if __name__ == "__main__":
    main()
