"""Graph-kernel fusion of the MindSpore back end, on and off: fused kernels, losses, and time of elementwise work.

Part `llama` trains a tiny Llama of 4 layers with and without `training.compile: graph-kernel`, and compares the losses
of all steps. Part `block` times forward and backward of an elementwise block on large tensors: SwiGLU with residual,
then RMSNorm. Both forms run in one process in the order ABBA, so that other load affects both. Exits with status 1 if a
bar is missed. Needs the environment of `make setup-mindspore`.

    build/mindspore/bin/python benchmarks/fusion.py --json > benchmarks/results/fusion_cpu.json
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
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from _machine import machine
from torch import Tensor

from hyper_parallel.backends.program_runner import join_ranks
from hyper_parallel.backends.step_program import StepProgram
from hyper_parallel.backends.torch.program_capture import capture_update

MIN_KERNELS: Final = 10
MAX_LOSS_DIFFERENCE: Final = 1e-5
MIN_SPEEDUP: Final = 1.5

MODEL: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 384, "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
RECIPE: Final = {
    "model": {"path": "model.json"},
    "data": {"source": "python-stdlib", "seq_len": 64, "vocab_size": 384, "max_bytes": 200000},
    "training": {"steps": 5, "dtype": "float32", "tokens_per_step": 256, "lr": 1e-3, "eval_tokens": 64},
    "parallel": {"dp_replicate": 1},
    "checkpoint": {"export": False},
    "backend": "mindspore",
}  # fmt: skip


def llama() -> dict[str, Any]:
    """Return the losses of a tiny Llama with and without fusion, and its fused kernels."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "model.json").write_text(json.dumps(MODEL), encoding="utf-8")
        (folder / "recipe.json").write_text(json.dumps(RECIPE), encoding="utf-8")
        losses = {form: _losses(folder, form) for form in ("false", "graph-kernel")}
        run = json.loads((folder / "graph-kernel" / "run.json").read_text(encoding="utf-8"))
    pairs = zip(losses["false"], losses["graph-kernel"], strict=True)
    return {
        "losses": losses,
        "largest_relative_difference": max(abs(a - b) / abs(a) for a, b in pairs),
        "kernels": [kernel["operators"] for kernel in run["fused_kernels"]],
    }


def _losses(folder: Path, form: str) -> list[float]:
    """Train with a value of `training.compile`, and return the loss of every step."""
    words = f"training.compile={form}", f"output_dir={form}"
    command = [sys.executable, "-m", "hyper_parallel", "train", "recipe.json", *words]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
    lines = (folder / form / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _block(x: Tensor, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """Return RMSNorm(x + SwiGLU(gate, up)); shapes are [tokens, features], and [features] for `weight`."""
    hidden = x + F.silu(gate) * up
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * weight


def _step(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run the block forward and backward, and return its output and the gradients of its inputs."""
    *inputs, cotangent = values.values()
    inputs = [value.detach().requires_grad_() for value in inputs]
    output = _block(*inputs)
    gradients = torch.autograd.grad(output, inputs, cotangent)
    return {"output": output.detach(), **dict(zip(values, gradients, strict=False))}


def block(tokens: int, features: int, rounds: int) -> dict[str, Any]:
    """Return times of the block with and without fusion, and the largest difference of its results.

    Args:
        tokens: Rows of the tensors.
        features: Columns of the tensors.
        rounds: Number of rounds in the order ABBA.
    """
    random = np.random.default_rng(0)
    shapes = dict.fromkeys(("x", "gate", "up"), (tokens, features)) | {"weight": (features,)}
    shapes["cotangent"] = (tokens, features)
    arrays = {n: random.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}
    program = capture_update(_step, {n: torch.from_numpy(a) for n, a in arrays.items()})
    with tempfile.TemporaryDirectory() as place:
        calls, results, runners = {}, {}, {}
        for fuse in (True, False):
            runner = runners[fuse] = join_ranks("mindspore", 0, 1, str, {}, fuse=fuse)
            calls[fuse] = _timed(runner, program, Path(place) / f"fuse_{fuse}.py", arrays)
            results[fuse] = calls[fuse]()[1]
        times: dict[bool, list[float]] = {True: [], False: []}
        ratios = []
        for _ in range(rounds):
            order = [(fuse, calls[fuse]()[0]) for fuse in (True, False, False, True)]
            for fuse, seconds in order:
                times[fuse].append(seconds)
            sums = {f: sum(s for fuse, s in order if fuse == f) for f in times}
            ratios.append(sums[False] / sums[True])
        kernels = runners[True].facts()["fused_kernels"]
    errors = {
        name: float(np.abs(value - results[True][name]).max() / np.abs(value).max())
        for name, value in results[False].items()
    }
    return {
        "tokens": tokens,
        "features": features,
        "operators": len(program.nodes),
        "kernels": [kernel["operators"] for kernel in kernels],
        "seconds_fused": statistics.median(times[True]),
        "seconds_plain": statistics.median(times[False]),
        "speedup": statistics.median(ratios),
        "speedup_quartiles": statistics.quantiles(ratios, n=4),
        "largest_relative_difference": errors,
    }


def _timed(
    runner: Any, program: StepProgram, source: Path, arrays: Mapping[str, np.ndarray[Any, Any]]
) -> Callable[[], tuple[float, dict[str, np.ndarray[Any, Any]]]]:
    """Return a function that runs a program, and returns its seconds and results."""
    step = runner.compile(program, source)
    values = {name: runner.value(array) for name, array in arrays.items()}

    def call() -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
        start = time.perf_counter()
        results = step(values)
        runner.array(results["weight"])  # waits for the end
        seconds = time.perf_counter() - start
        return seconds, {name: runner.array(value) for name, value in results.items()}

    return call


def main() -> int:
    """Measure, print JSON, and return exit status 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="the only form of the output")
    parser.add_argument("--part", choices=("llama", "block"), action="append")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if find_spec("mindspore") is None:
        sys.exit("MindSpore is not installed\nhint: make setup-mindspore")
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the compiler of MindSpore prints on standard output
    parts = options.part or ["llama", "block"]
    report: dict[str, Any] = {"machine": {**machine(), "mindspore": version("mindspore")}}
    missed = []
    if "llama" in parts:
        result = report["llama"] = llama()
        if len(result["kernels"]) < MIN_KERNELS:
            missed.append(f"fewer than {MIN_KERNELS} fused kernels")
        if not result["largest_relative_difference"] <= MAX_LOSS_DIFFERENCE:
            missed.append(f"losses differ by more than {MAX_LOSS_DIFFERENCE}")
    if "block" in parts:
        result = report["block"] = block(options.tokens, options.features, options.rounds)
        if not result["speedup"] >= MIN_SPEEDUP:
            missed.append(f"less than {MIN_SPEEDUP} times as fast")
    report["missed"] = missed
    print(json.dumps(report, indent=1), file=output, flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
