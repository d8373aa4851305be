"""What the time terms charge for is what is sent: on links of one byte per second, seconds are bytes.

The bytes are those of `step_collectives`, which the parity and dry-run tests compare with real and traced runs.
"""

import dataclasses

import pytest

from hyper_parallel.cost import (
    Candidates,
    Machine,
    ModelNumbers,
    PricingCase,
    score,
    step_collectives,
)
from hyper_parallel.cost import device_card as shipped_device
from hyper_parallel.cost import stack_card as shipped_stack
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.shard import family_rules, plan_layouts
from hyper_parallel.topology import Supernode, Tier

from .machines import machine, quantity, small_model

pytestmark = pytest.mark.unit

TENSOR = (
    "sequence gather", "sequence scatter", "head scatter", "head gather", "width scatter", "width gather",
    "weight gather", "weight gradient scatter", "key and value gather", "key and value gradient scatter", "relayout",
)  # fmt: skip
SHARDED = ("fsdp parameters", "fsdp gradients", "replica gradients")
BLOCKS = {"attention_shape": ("1d", "2d", "weight"), "mlp_shape": ("1d", "2d", "weight")}


def wires() -> Machine:
    """Every link carries a byte per second without delay; nothing hides."""
    tier = Tier("wire", 0, quantity(1.0), quantity(0.0), "switch")
    base = machine()
    node = Supernode("test", "wires", 64, base.device, (tier,))
    card = dataclasses.replace(shipped_device("none", "npu"), link=1.0, network=1.0, exchange=1.0, message_bytes=0.0)
    stack = dataclasses.replace(shipped_stack("hyper-parallel"), overlap_tp=0.0, overlap_cp=0.0, overlap_dp=0.0)
    return Machine.of(node, "bfloat16", card=card, stack=stack)


def compare(strategy: Strategy, model=None, pp_rank: int = 0) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes by family of collectives: priced, and counted on a pipeline rank."""
    spec = model or small_model(layers=4, kv_heads=8)
    workload = Workload(512, microbatch=2, accumulation_steps=4).resolve(strategy.dp)
    scores = score(PricingCase(ModelNumbers.of(spec), wires(), workload, Candidates.of(strategy, workload)))
    priced = {t.name: float(t.seconds[0]) for t in scores.time}
    layouts = plan_layouts(
        [(p.name, p.shape, p.dims) for b in spec.blocks for p in b.params], family_rules(spec.family), strategy,
        num_heads=8, num_kv_heads=spec.num_kv_heads, head_dim=32, vocab_size=4096,
    ).layouts  # fmt: skip
    counted: dict[str, float] = {}
    for c in step_collectives(spec, layouts, strategy, workload, pp_rank=pp_rank):
        name = next((n for n, many in (("tp", TENSOR), ("dp", SHARDED)) if c.purpose in many), c.purpose)
        name = "cp" if c.purpose.startswith("attention:") else name
        counted[name] = counted.get(name, 0.0) + c.sent_bytes
    found = {
        "tp": priced["tp communication"], "cp": priced["cp communication"],
        "dp": priced["fsdp communication"] + priced["data-parallel reduction"],
    }  # fmt: skip
    return found, counted


def ends_bytes(strategy: Strategy) -> float:
    """Tensor-parallel collectives outside the layers, which the price leaves out: embedding and final norm."""
    whole = 4 * 2 * 512 // strategy.cp * 256 * 2
    return 4 * whole * (strategy.tp - 1) / strategy.tp


@pytest.mark.parametrize("regather", ["keep", "re-gather"])
@pytest.mark.parametrize(
    ("attention", "mlp", "scatter"),
    [(a, m, "head") for a in BLOCKS["attention_shape"] for m in BLOCKS["mlp_shape"]]
    + [("2d", "2d", "token"), ("2d", "1d", "token"), ("2d", "weight", "token")],
)
def test_tensor_parallel_blocks_of_every_shape(attention, mlp, scatter, regather):
    strategy = Strategy(
        tp_x=4,
        tp_y=2,
        attention_shape=attention,
        mlp_shape=mlp,
        attention_scatter=scatter,
        gathered_inputs=regather,
    )
    priced, counted = compare(strategy)
    assert priced["tp"] == pytest.approx(counted["tp"] - ends_bytes(strategy), rel=1e-9)


def test_gathering_again_costs_two_of_ten_units_in_one_dimension():
    kept, again = (compare(Strategy(tp_x=8, gathered_inputs=how))[0]["tp"] for how in ("keep", "re-gather"))
    assert again / kept == pytest.approx(10 / 8)
    for how in ("keep", "re-gather"):
        strategy = Strategy(tp_x=8, gathered_inputs=how)
        priced, counted = compare(strategy)
        assert priced["tp"] == pytest.approx(counted["tp"] - ends_bytes(strategy), rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("kind", "ulysses"), [("ring", 1), ("ulysses", 1), ("hybrid", 2), ("all_gather", 1)])
def test_context_parallelism_of_every_kind(kind, ulysses, recompute):
    strategy = Strategy(cp=4, cp_kind=kind, cp_ulysses=ulysses, recompute=recompute)
    priced, counted = compare(strategy)
    assert priced["cp"] == pytest.approx(counted["cp"], rel=1e-9)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_shard": 8}, {"dp_shard": 4, "dp_replicate": 2}, {"dp_shard": 4, "pp": 2},
        {"dp_shard": 2, "cp": 2, "pp": 2}, {"dp_shard": 2, "dp_replicate": 2, "pp": 2},
        {"dp_shard": 2, "pp": 2, "tp_x": 2},
    ],
)  # fmt: skip
def test_sharded_states_are_reduced_per_microbatch_or_once_in_a_pipeline(degrees, reshard):
    """Norms are priced as one of their vectors less or more; the first rank's final norm is not there at all."""
    strategy = Strategy(**degrees, reshard_after_forward=reshard, stage_layers=(2, 2) if degrees.get("pp") else ())
    priced, counted = compare(strategy)
    assert priced["dp"] == pytest.approx(counted["dp"], rel=2e-3)
