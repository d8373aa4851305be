"""The communication formulas on numbers worked out by hand; the parity tests compare them with real runs."""

import pytest

from hyper_parallel.cost import step_collectives
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import load_model
from hyper_parallel.shard import family_rules, plan_layouts
from tests.cost.machines import small_model

pytestmark = pytest.mark.unit


def _by_purpose(strategy: Strategy, workload: Workload) -> dict[str, int]:
    spec = load_model("llama-3-8b")
    params = [p for b in spec.blocks for p in b.params]
    layouts = plan_layouts(
        [(p.name, p.shape, p.dims) for p in params], family_rules(spec.family), strategy,
        num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256,
    ).layouts  # fmt: skip
    found = step_collectives(spec, layouts, strategy, workload)
    return {c.purpose: c.sent_bytes for c in found}


def test_sequence_parallelism_sends_eight_units_a_layer() -> None:
    tokens, hidden, layers, tp = 8192, 4096, 32, 8
    sent = _by_purpose(Strategy(tp_x=tp), Workload(tokens, microbatch=1, accumulation_steps=1))
    unit = tokens * hidden * 2 * (tp - 1) // tp
    # Eight a layer, half of them gathers; two more each way for the embedding and the final norm.
    assert sent["sequence gather"] == (4 * layers + 2) * unit
    assert sent["sequence scatter"] == (4 * layers + 2) * unit


def test_fsdp_moves_every_parameter_three_times() -> None:
    params, root = 8_030_261_248, 2 * 128256 * 4096 + 4096
    one = Workload(8192, microbatch=1, accumulation_steps=1)
    two = Workload(8192, microbatch=1, accumulation_steps=2)
    sent = _by_purpose(Strategy(dp_shard=8), one)
    assert sent["fsdp parameters"] == (2 * (params - root) + root) * 2 * 7 // 8
    assert sent["fsdp gradients"] == params * 4 * 7 // 8
    kept = _by_purpose(Strategy(dp_shard=8, reshard_after_forward=False), two)
    assert kept["fsdp parameters"] == 2 * params * 2 * 7 // 8
    hybrid = _by_purpose(Strategy(dp_replicate=2, dp_shard=4), two)
    assert hybrid["fsdp gradients"] == 2 * params * 4 * 3 // 4
    assert hybrid["replica gradients"] == params // 4 * 4  # once a step, 2 * (2 - 1) / 2 of a shard


def test_the_ring_counts_layers_microbatches_and_recompute() -> None:
    model = small_model()
    workload = Workload(512, microbatch=2, accumulation_steps=3)

    def rounds(strategy: Strategy) -> int:
        params = [(p.name, p.shape, p.dims) for b in model.blocks for p in b.params]
        layouts = plan_layouts(
            params, family_rules(model.family), strategy,
            num_heads=8, num_kv_heads=4, head_dim=8, vocab_size=model.vocab_size,
        ).layouts  # fmt: skip
        found = step_collectives(model, layouts, strategy, workload)
        return sum(c.count for c in found if c.kind == "send_recv")

    assert rounds(Strategy(cp=4)) == model.num_layers * 3 * (3 + 2 * 3)
    assert rounds(Strategy(cp=4, recompute="full")) == model.num_layers * 3 * (2 * 3 + 2 * 3)
