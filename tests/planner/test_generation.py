"""Plans of generation: closed forms on a machine with round numbers, exact search, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cost import Machine
from hyper_parallel.ir import GenerateWorkload
from hyper_parallel.planner._generation import plan_generation
from tests.cost.machines import machine, small_model

LONG = GenerateWorkload(prompts=8, prompt_len=1024, new_tokens=64, dtype="bfloat16")


def test_decode_of_one_device_reads_weights_and_cache_once():
    """Few sequences on a slow memory: bytes over the memory rate, to the last digit."""
    model = replace(small_model(heads=8, kv_heads=8))
    made = plan_generation(model, machine(num_devices=1), LONG).best
    rate = Machine.of(machine(num_devices=1), "bfloat16").stream_bytes_s
    layers = [p for b in model.decoder_blocks for p in b.params]
    weights = 2 * sum(p.num_elements for p in layers) * model.num_layers
    cache = (
        2 * 4 * 8 * (1024 + 32) * 2 * 8 * 32
    )  # layers, sequences, mean length, keys and values of 8 heads of 32
    assert made.decode["weights and products"] == pytest.approx(weights / rate)
    assert made.decode["cache and attention"] == pytest.approx(cache / rate)
