"""Small machines and models with round numbers, so that expected values can be written down."""

from __future__ import annotations

from typing import Literal

from hyper_parallel.cost import Candidates, Machine, ModelNumbers, PricingCase, Scores, score
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import ModelSpec, spec_from_config
from hyper_parallel.topology import Device, Quantity, Supernode, Tier


def quantity(value: float) -> Quantity:
    return Quantity(value, "test", "stated")


def machine(
    *,
    memory_gib: float = 64,
    kind: Literal["cuda", "npu", "tpu", "cpu"] = "npu",
    node_bytes_s: float = 200e9,
    cluster_bytes_s: float = 25e9,
    num_devices: int = 16,
) -> Supernode:
    """Nodes of 8 on a fast full mesh, any number of nodes on a slow switch."""
    device = Device(
        "test",
        kind,
        {"bfloat16": quantity(400e12), "float32": quantity(100e12), "float64": quantity(50e12)},
        quantity(memory_gib * 2**30),
        quantity(1.6e12),
    )
    tiers = (
        Tier("node", 8, quantity(node_bytes_s), quantity(5e-6), "full_mesh"),
        Tier("cluster", 0, quantity(cluster_bytes_s), quantity(2e-5), "switch"),
    )
    return Supernode("test", "a test machine", num_devices, device, tiers)


def small_model(layers: int = 4, hidden: int = 256, heads: int = 8, kv_heads: int = 4) -> ModelSpec:
    return spec_from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": 4096,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
        name="small",
    )


def score_strategy(model: ModelSpec, supernode: Supernode, strategy: Strategy, workload: Workload) -> Scores:
    """Return the scores of one strategy, at index 0; `workload` is resolved."""
    priced = Machine.of(supernode, workload.compute_dtype)
    candidate = Candidates.of(strategy, workload)
    return score(PricingCase(ModelNumbers.of(model), priced, workload, candidate))
