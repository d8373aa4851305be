"""Predicted device bytes of planned steps, against the allocations that torch's profiler records while they run.

    python benchmarks/offload_meter.py --json
    python benchmarks/offload_meter.py --families llama gpt2 --steps train

The measured value is independent of plans: the peak over the CPU allocator's events during one step, including
workspace of kernels, plus the arena, which is allocated before. For every family, a training step (AdamW, 2 sequences)
and the prefill and decode steps of generation run under a budget below the eager peak. The prediction includes the
measured workspace of kernels (`with_kernel_bytes`); `storages_bytes` excludes it. The exit status is 1 when a
prediction is more than 1 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _kernel_workspace import with_kernel_bytes
from _machine import machine
from _model_steps import capture_training, training_step
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.decode_slots import SlotSteps
from hyper_parallel.backends.torch.memory import Captured, PlannedDevice
from hyper_parallel.backends.torch.memory.generation import MemoryLimits, PlannedSlots
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory

BAR = 0.01
HIDDEN, LAYERS, TOKENS, VOCAB = 256, 4, 256, 4096
LIKE_LLAMA: dict[str, Any] = {
    **{"hidden_size": HIDDEN, "intermediate_size": 704, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCAB},
    **{"max_position_embeddings": 2 * TOKENS, "pad_token_id": 0, "bos_token_id": 1},
    "eos_token_id": 2,
}
HEADS = {"head_dim": 32}
WINDOW = {**HEADS, "sliding_window": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LIKE_LLAMA,
    "qwen3": {**LIKE_LLAMA, **HEADS},
    "qwen3_moe": {
        **{**LIKE_LLAMA, **HEADS, "num_experts": 8, "num_experts_per_tok": 2},
        "moe_intermediate_size": 192,
    },
    "mixtral": {**LIKE_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {**LIKE_LLAMA, **HEADS},
    "gemma3_text": {
        **{**LIKE_LLAMA, **WINDOW},
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    },
    "mistral": {**LIKE_LLAMA, **WINDOW},
    "gpt_oss": {
        **{**LIKE_LLAMA, **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "phi3": LIKE_LLAMA,
    "gpt2": {
        **{"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 8, "n_positions": 2 * TOKENS},
        **{"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2},
        "loss_type": "ForCausalLM",
    },
}
LINK = Channel(5e9, 1e-6)
MACHINE = MemoryMachine(LINK, LINK)
ROOFLINE = Roofline(3e10, 1e10, 1e-6)


def given(run: Callable[[], Any]) -> int:
    """Run a function, and return the peak of bytes allocated during it and not yet freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    live = most = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def made(family: str, dtype: torch.dtype) -> Any:
    """Return a model with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


class Metered(PlannedSlots):
    """Planned generation with measured kernel workspace; `unmetered` are the staging bytes without it, per step."""

    def _capture(self) -> list[Captured]:
        recorded = super()._capture()
        self.unmetered = [captured.program.staging_bytes for captured in recorded]
        return [with_kernel_bytes(captured) for captured in recorded]


def cell(device: PlannedDevice, arena_bytes: int, unmetered: int, step: Callable[[], Any]) -> dict[str, Any]:
    """Run a step twice, and return predicted and measured bytes of the second run."""
    step()
    staged = device.plan.program.staging_bytes
    beside = given(step)
    predicted, measured = arena_bytes + staged, arena_bytes + beside
    return {
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "arena_bytes": arena_bytes,
        "predicted_beside_bytes": staged,
        "measured_beside_bytes": beside,
        "storages_bytes": arena_bytes + unmetered,
        "storages_apart": measured / (arena_bytes + unmetered) - 1,
        "apart": measured / predicted - 1,
    }


def train(family: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the results of a training step under a budget of 80 % of its eager peak."""
    model = made(family, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=draws)
    batch = {"input_ids": ids, "labels": ids.clone()}
    training_step(model, optimizer, batch)
    captured = capture_training(model, optimizer, batch)
    unmetered = captured.program.staging_bytes
    captured = with_kernel_bytes(captured)
    plan = plan_memory(
        ROOFLINE.annotate(captured.program),
        MACHINE,
        budget_bytes=int(0.8 * captured.eager_peak_bytes),
    )
    with PlannedDevice(captured, plan, MACHINE, copies="at_issue") as device:
        return cell(device, plan.arena_bytes, unmetered, lambda: device.step(batch))


def generate(family: str, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Return the results of prefill and decode under a budget of 80 % of the weights."""
    model = made(family, dtype).eval()
    budget = int(0.8 * sum(p.nbytes for p in model.parameters()))
    limits = MemoryLimits(budget, MACHINE, ROOFLINE)
    fixed = SlotSteps(1, TOKENS, TOKENS + 16)
    planned = Metered(model, fixed, limits)
    found = {}
    try:
        planned.begin()
        ids = [*range(3, 3 + TOKENS)]
        inputs = fixed.inputs(model, [0], [ids], [0], prompt=True)
        for name, unmetered in zip(("prefill", "decode"), planned.unmetered, strict=True):
            device = planned._planned_device
            assert device is not None
            arena = device.state.arena_bytes
            found[name] = cell(device, arena, unmetered, lambda at=inputs: planned.run(at))
            if name == "prefill":
                planned.enter_decode()
                inputs = fixed.inputs(model, [0], [[7]], [TOKENS], prompt=False)
    finally:
        planned.close()
    return found


def main() -> int:
    """Measure every case, print the results, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--steps", nargs="+", default=["train", "generate"])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cells: dict[str, dict[str, Any]] = {}
    for family in asked.families:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{family} {str(dtype).removeprefix('torch.')}"
            if "train" in asked.steps:
                cells[f"{name} train"] = train(family, dtype)
            if "generate" in asked.steps:
                cells |= {f"{name} {k}": v for k, v in generate(family, dtype).items()}
            for key, row in cells.items() if not asked.json else ():
                if key.startswith(name):
                    print(
                        f"{key}: predicted {row['predicted_bytes']}, measured {row['measured_bytes']} "
                        f"({row['apart']:+.2%}; without kernels {row['storages_apart']:+.2%})",
                        flush=True,
                    )
    worst = max(cells, key=lambda key: abs(cells[key]["apart"]))
    apart = abs(cells[worst]["apart"])
    missed = sorted(key for key, row in cells.items() if abs(row["apart"]) > BAR)
    if asked.json:
        sizes = {"hidden": HIDDEN, "layers": LAYERS, "tokens": TOKENS, "vocabulary": VOCAB}
        summary = {"cells": len(cells), "missed": missed, "worst": worst, "worst_apart": apart}
        print(
            json.dumps(
                {"machine": machine(), "sizes": sizes, "bar": BAR, **summary, "steps": cells},
                indent=1,
            )
        )
    else:
        print(f"{len(cells)} cells, worst {worst}: {apart:.2%}; over {BAR:.0%}: {missed}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
