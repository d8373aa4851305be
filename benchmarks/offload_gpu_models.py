"""Memory plans of small models on an accelerator: equality with eager steps, and predicted against allocated bytes.

    python benchmarks/offload_gpu_models.py                  # on the accelerator of this machine
    python benchmarks/offload_gpu_models.py --device cpu     # test of the script, on the simulated device

Reported per model, with AdamW: the budget as a fraction of the recorded peak; the largest loss difference between three
planned steps and eager steps; the number of parameters that differ in any bit afterwards; and device bytes, predicted
and counted by the allocator. Exit status 1 when a bit differs or the bytes differ by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from _machine import device_of, machine
from _model_steps import capture_training, training_step
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.memory import PlannedDevice
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory, with_seconds

LLAMA = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {
    "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
}  # fmt: skip
GPT2 = {"n_embd": 512, "n_layer": 3, "n_head": 8, "n_positions": 512, "vocab_size": 4096}
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype, float | None, float]] = {
    "llama float32": ("llama", LLAMA, torch.float32, None, 0.7),
    "llama bfloat16, clipped": ("llama", LLAMA, torch.bfloat16, 0.5, 0.6),
    "gpt2 bfloat16, dropout": ("gpt2", GPT2, torch.bfloat16, None, 0.6),
    "gpt2 float32, dropout": ("gpt2", GPT2, torch.float32, None, 0.6),
    "qwen3_moe float32": ("qwen3_moe", LLAMA | EXPERTS, torch.float32, None, 0.6),
    "qwen3_moe bfloat16": ("qwen3_moe", LLAMA | EXPERTS, torch.bfloat16, None, 0.6),
    "gemma bfloat16": ("gemma", LLAMA | {"head_dim": 64}, torch.bfloat16, None, 0.6),
}
LINK = Channel(20e9, 1e-6)


def batch(number: int, device: torch.device) -> dict[str, Tensor]:
    """Return the tokens of a step."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 4096, (2, 256), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def case(name: str, device: torch.device) -> dict[str, Any]:
    """Run eager steps of a model, then the same steps under a plan, and return the comparison."""
    family, shapes, dtype, clip, share = CASES[name]

    def made() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shapes))
        model = model.to(dtype).train().to(device)
        torch.manual_seed(5)  # dropout draws from here on
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    plain, other = made()
    losses = [training_step(plain, other, batch(n, device), clip_norm=clip) for n in range(5)]
    model, optimizer = made()
    training_step(model, optimizer, batch(0, device), clip_norm=clip)
    captured = capture_training(model, optimizer, batch(1, device), clip_norm=clip)
    program = Roofline(4e14, 2e12).annotate(captured.program)
    memory = MemoryMachine(LINK, LINK)
    plan = plan_memory(
        with_seconds(program, captured.seconds),
        memory,
        budget_bytes=int(share * captured.eager_peak_bytes),
    )
    apart = []
    with PlannedDevice(captured, plan, memory) as planned:
        for number in (2, 3, 4):
            loss, measured = planned.step(batch(number, device))
            apart.append(abs(float(loss) - float(losses[number])))
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return {
        "budget_share": share,
        "loss_apart": max(apart),
        "parameters_unequal": sum(not torch.equal(a, b) for a, b in pairs),
        "predicted_bytes": plan.device_bytes,
        "allocator_bytes": measured.device_bytes,
        "off": measured.device_bytes / plan.device_bytes - 1,
        "copies": {kind: copied.count for kind, copied in measured.copied.items()},
    }


def main() -> int:
    """Run the models and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cuda, npu, ..., cpu")
    parser.add_argument("--json", action="store_true", help="JSON; the default as well")
    given = parser.parse_args()
    device = device_of(given.device)
    if device is None:
        print(json.dumps({"skipped": "no accelerator; --device cpu runs the script"}))
        return 0
    rows = {name: case(name, device) for name in CASES}
    print(json.dumps({"machine": machine(), "device": str(device), "models": rows}, indent=1))
    good = all(
        not row["loss_apart"] and not row["parameters_unequal"] and abs(row["off"]) <= 0.01 for row in rows.values()
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
