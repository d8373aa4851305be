"""Drawn planning problems: small models and machines, and pins that leave a part of their space."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from hyper_parallel.cost import ORDERS, SCHEDULES
from hyper_parallel.ir import Plan, Workload
from hyper_parallel.model import ModelSpec, spec_from_config
from hyper_parallel.topology import MemoryPool, Supernode
from tests.cost.machines import machine, quantity, small_model

VALUES = {
    "pp": (1, 2, 4),
    "tp": (1, 2, 4),
    "cp": (1, 2),
    "ep": (1, 2, 4),
    "dp_shard": (1, 2, 4),
    "dp_replicate": (1, 2),
    "microbatch": (1, 2, 4, 8),
    "virtual_stages": (1, 2),
    "schedule": SCHEDULES,
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "gathered_inputs": ("keep", "re-gather"),
    "attention_shape": ("1d", "2d", "weight"),
    "mlp_shape": ("1d", "2d", "weight"),
    "cp_kind": ("ring", "ulysses", "all_gather"),
    "order": tuple(">".join(order) for order in ORDERS),
}


def moe_model(layers: int = 4, experts: int = 4) -> ModelSpec:
    """A model whose first layer is dense."""
    return spec_from_config(
        {
            "model_type": "qwen3_moe",
            "hidden_size": 256,
            "intermediate_size": 768,
            "moe_intermediate_size": 128,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": 4096,
            "max_position_embeddings": 4096,
            "mlp_only_layers": [0],
            "tie_word_embeddings": False,
        },
        name="small-moe",
    )


def draw_case(seed: int) -> tuple[ModelSpec, Supernode, Workload, int]:
    """A small model, machine, workload and number of devices."""
    draw = random.Random(seed)
    layers = draw.choice([2, 3, 5])
    model = (
        moe_model(layers, draw.choice([4, 6])) if seed % 3 == 0 else small_model(layers, 256, draw.choice([4, 8]), 4)
    )
    supernode = machine(
        memory_gib=draw.choice([1.2, 1.35, 1.6, 64]),
        node_bytes_s=draw.choice([20e9, 200e9]),
        cluster_bytes_s=draw.choice([2e9, 25e9, 300e9]),
    )
    if draw.random() < 0.5:
        size = draw.choice([2, 4])
        inner = dataclasses.replace(supernode.tiers[0], size=size)
        supernode = dataclasses.replace(supernode, tiers=(inner, supernode.tiers[1]))
    if draw.random() < 0.3:
        pool = MemoryPool("dram", quantity(1e12), quantity(50e9), 8)
        supernode = dataclasses.replace(supernode, pools=(pool,))
    devices = draw.choice([2, 3, 4, 6, 8])
    workload = Workload(512, 512 * devices * draw.choice([2, 4]))
    return model, supernode, workload, devices


def draw_pins(seed: int, whole: Plan, count: int) -> Iterator[dict[str, int | str]]:
    """Pins of one to three keys; half of them beside degrees that a good plan has."""
    draw = random.Random(seed)
    good = [whole.strategy, *(r.strategy for r in whole.rejected)]
    for _ in range(count):
        pins: dict[str, int | str] = {}
        if draw.random() < 0.5:
            strategy = draw.choice(good)
            pins |= {n: getattr(strategy, n) for n in draw.sample(["pp", "tp", "cp", "ep"], 2)}
        for name in draw.sample(sorted(VALUES), draw.choice([1, 1, 2])):
            pins[name] = draw.choice(VALUES[name])
        yield pins
