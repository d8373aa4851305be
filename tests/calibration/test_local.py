"""The card of a machine: known constants are found again from the seconds they make."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hyper_parallel.calibration import (
    LocalRates,
    MeasuredStep,
    fit_device,
    fit_probes,
    fit_stack,
    mean_rates,
    write_local_cards,
)
from hyper_parallel.cost import (
    Candidates,
    Machine,
    ModelNumbers,
    PricingCase,
    card_names,
    device_card,
    own_cards_by_ranks,
    own_path,
    score,
    stack_card,
)
from hyper_parallel.errors import CardUnreadable
from hyper_parallel.ir import Strategy, Workload
from tests.cost.machines import machine, small_model

pytestmark = pytest.mark.unit

TRUE = {"saturation": 2.0, "elementwise": 0.4, "stream": 0.7, "link": 0.6, "latency": 3.0}


def supernode(kind="cpu"):
    return machine(kind=kind, num_devices=4)


def true_card(kind="cpu"):
    card = device_card("none", kind)
    return dataclasses.replace(
        card, matmul={"float32": 0.5, "bfloat16": 0.3}, attention={"float32": 0.2, "bfloat16": 0.1},
        attention_head=24.0, attention_len=1e-9, kernel_s=2e-5, **TRUE,
    )  # fmt: skip


def made_rates(kind="cpu"):
    """What a machine with the true card measures, by the formulas the card feeds."""
    node = supernode(kind)

    def on(dtype):
        return Machine.of(
            node,
            dtype,
            card=true_card(kind),
            stack=stack_card(kind if kind == "cpu" else "hyper-parallel"),
        )

    shapes = [(256, 160, 480), (256, 512, 512), (512, 1024, 256), (64, 512, 512), (512, 2048, 512)]
    base = "float32" if kind == "cpu" else "bfloat16"
    matmul, attention = {}, {}
    for dtype in ("float32", "bfloat16"):
        # The saturation is that of the format the machine computes in.
        s, rate = on(base).saturation, on(dtype).matmul_flops
        matmul[dtype] = tuple(
            (m, n, k, 6.0 * m * n * k * (1 + s / m) * (1 + s / n) * (1 + s / k) / rate) for m, n, k in shapes
        )
        attention[dtype] = tuple(
            (
                1,
                t,
                4,
                w,
                3.5 * 2 * t * t / 2 * 4 * 2 * w * (1 + 24.0 / w) / on(dtype).attention_flops,
            )
            for t, w in ((256, 32), (256, 64), (512, 128))
        )
    here = on(base)
    axis = (np.asarray([4.0]), np.ones(1))
    rings = tuple((b, float(here.ring(axis).seconds(np.asarray([b]))[0])) for b in (16.0, 1e6, 8e6))
    return LocalRates(
        matmul, attention, ((1e6, 5e6 / here.passing_bytes_s), (4e6, 20e6 / here.passing_bytes_s)),
        (28e6, 28e6 / here.stream_bytes_s), rings,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["cpu", "npu"])
def test_device_card_is_found_again(kind):
    card = fit_device(made_rates(kind), supernode(kind), "test")
    for name, value in TRUE.items():
        assert getattr(card, name) == pytest.approx(value, rel=0.03), name
    assert card.matmul["float32"] == pytest.approx(0.5, rel=0.02)
    assert card.matmul["bfloat16"] == pytest.approx(0.3, rel=0.02)
    assert card.attention["float32"] == pytest.approx(0.2, rel=0.02)
    assert card.attention_head == pytest.approx(24.0, rel=0.06)
    assert card.sources["matmul.float32"] == "test"


def test_launch_floor_and_rest_of_a_step_are_found_again():
    node, card = supernode(), true_card()
    stack = dataclasses.replace(stack_card("cpu"), step_s=0.004)
    workload = Workload(256, microbatch=1, accumulation_steps=1, compute_dtype="float32").resolve(4)
    strategy = Strategy(dp_replicate=4)
    steps = []
    for layers in (2, 6):
        model = small_model(layers=layers, hidden=128)
        on = Machine.of(node, "float32", card=card, stack=stack)
        seconds = score(PricingCase(ModelNumbers.of(model), on, workload, Candidates.of(strategy, workload))).step_s[0]
        steps.append(MeasuredStep(model, strategy, workload, float(seconds)))
    fitted, own = fit_stack(steps, card, node, "test")
    assert fitted.kernel_s == pytest.approx(2e-5, rel=0.02)
    assert own.step_s == pytest.approx(0.004, rel=0.05)


def test_mean_over_ranks():
    one = made_rates()
    slow = dataclasses.replace(one, stream=(one.stream[0], 3 * one.stream[1]))
    assert mean_rates([one, slow]).stream == pytest.approx((one.stream[0], 2 * one.stream[1]))
    assert mean_rates([one, slow]).matmul["float32"][0][:3] == one.matmul["float32"][0][:3]


def test_own_cards_are_used_on_the_local_machine_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    node = dataclasses.replace(supernode(), name="local")
    assert own_cards_by_ranks(node.device.name) == {}
    before = Machine.of(node, "float32")
    card = fit_device(made_rates(), node, "measured here")
    write_local_cards(tmp_path / "hyper-parallel" / "card.yaml", {4: (card, stack_card("cpu"))})
    assert Machine.of(node, "float32").card.matmul["float32"] == pytest.approx(0.5, rel=0.02)
    assert Machine.of(supernode(), "float32").card == before.card
    assert own_cards_by_ranks("another device") == {}
    (tmp_path / "hyper-parallel" / "card.yaml").write_text("name: local\n")
    with pytest.raises(CardUnreadable, match="HP313"):
        Machine.of(node, "float32")


def test_every_accelerator_preset_finds_a_card():
    names = {device_card(name, "cuda").name for name in ("NVIDIA H200", "NVIDIA GB300", "NVIDIA A100")}
    assert names <= set(card_names())
    assert device_card("Unheard of", "cuda").name == "accelerator"


def probes(node, true):
    """Steps of several layouts as a machine with the true constants would measure them."""
    steps = []
    for hidden, layers, micro, degrees in (
        (64, 2, 1, {"dp_replicate": 4}), (64, 6, 1, {"dp_replicate": 4}), (64, 4, 3, {"dp_replicate": 4}),
        (256, 2, 1, {"dp_replicate": 4}), (64, 4, 2, {"dp_shard": 4}), (64, 4, 2, {"dp_replicate": 2, "tp_x": 2}),
        (64, 4, 2, {"dp_replicate": 2, "cp": 2}), (64, 4, 2, {"dp_replicate": 2, "pp": 2}),
        (256, 4, 4, {"dp_replicate": 2, "pp": 2}), (64, 4, 2, {"tp_x": 2, "tp_y": 2}),
    ):  # fmt: skip
        model = small_model(layers=layers, hidden=hidden, heads=4, kv_heads=4)
        strategy = Strategy(**degrees)
        workload = Workload(256, microbatch=1, accumulation_steps=micro, compute_dtype="float32")
        resolved = workload.resolve(strategy.dp)
        steps.append(MeasuredStep(model, strategy, resolved, 0.0))
    return [dataclasses.replace(s, seconds=seconds_of(s, node, *true)) for s in steps]


def seconds_of(step, node, card, stack):
    on = Machine.of(node, "float32", card=card, stack=stack)
    c = Candidates.of(step.strategy, step.workload)
    return float(score(PricingCase(ModelNumbers.of(step.model), on, step.workload, c)).step_s[0])


def test_probes_find_what_axes_cost_where_ranks_share_cores():
    node = supernode()
    crowded = dataclasses.replace(node.device, ranks_per_core=2.0)
    node = dataclasses.replace(node, device=crowded)
    host = {"dp_shard": 2e-3, "cp": 3e-3, "tp_x": 1e-3, "tp_y": 4e-3, "pp": 2e-3}
    card = dataclasses.replace(true_card(), latency=20.0)
    stack = dataclasses.replace(stack_card("cpu"), compute=1.4, step_s=0.005, host_s=host)
    steps = probes(node, (card, stack))
    # What the micro-benchmarks say is off by a factor, as on a machine that did something else meanwhile.
    believed = dataclasses.replace(card, latency=30.0, kernel_s=1e-3)
    found = fit_probes(steps, believed, node, "test")
    for step in steps:
        assert seconds_of(step, node, *found) == pytest.approx(step.seconds, rel=0.03)
    assert found[0].kernel_s == pytest.approx(2e-5, rel=0.1)
    assert found[1].host_s["tp_y"] == pytest.approx(4e-3, rel=0.2)
    assert found[1].sources["host_s.cp"] == "test"


def test_ranks_that_share_cores_fill_each_others_bubbles():
    model, strategy = small_model(layers=4), Strategy(pp=2, dp_replicate=2)
    workload = Workload(256, microbatch=1, accumulation_steps=2, compute_dtype="float32").resolve(2)
    step = MeasuredStep(model, strategy, workload, 0.0)
    node = supernode()

    def bubble(ranks_per_core):
        device = dataclasses.replace(node.device, ranks_per_core=ranks_per_core)
        on = Machine.of(dataclasses.replace(node, device=device), "float32")
        terms = score(PricingCase(ModelNumbers.of(model), on, step.workload, Candidates.of(strategy, workload))).time
        return next(float(t.seconds[0]) for t in terms if t.name == "pipeline bubble")

    # Two of four ranks work while the pipeline fills: with two cores nobody waits for a core that is free.
    assert bubble(1.0) > 0.0
    assert bubble(2.0) == 0.0


def local(ranks):
    node = machine(kind="cpu", num_devices=ranks)
    return dataclasses.replace(node, name="local")


def test_a_card_knows_what_depends_on_the_ranks_at_work(tmp_path, monkeypatch):
    """One and four ranks were measured; two lie halfway in the logarithm, eight and more are as four."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fast = dataclasses.replace(
        true_card(), devices=("test*",), pace={}, sources={"kernel_s": "x", "matmul.float32": "x"}
    )
    slow = dataclasses.replace(
        fast, kernel_s=8e-5, matmul={**fast.matmul, "float32": 0.125}, pace={"0.5": 1.5, "0.25": 2.0},
        sources={**fast.sources, "pace.0.5": "x", "pace.0.25": "x"},
    )  # fmt: skip
    fast, slow = (
        dataclasses.replace(c, sources={**device_card("none", "cpu").sources, **c.sources}) for c in (fast, slow)
    )
    told = {"host_s.tp_x": "x"}
    quick, late = (dataclasses.replace(stack_card("cpu"), host_s={"tp_x": s}, sources=told) for s in (0.0, 4e-3))
    write_local_cards(own_path(), {1: (fast, quick), 4: (slow, late)})
    seen = {ranks: Machine.of(local(ranks), "float32") for ranks in (1, 2, 4, 16)}
    assert {r: on.card.kernel_s for r, on in seen.items()} == pytest.approx({1: 2e-5, 2: 4e-5, 4: 8e-5, 16: 8e-5})
    assert seen[2].card.matmul["float32"] == pytest.approx(0.25)
    assert [on.stack.host_s["tp_x"] for on in seen.values()] == pytest.approx([0, 2e-3, 4e-3, 4e-3])
    assert seen[4].paces(4) == pytest.approx((2.0, 1.5, 1.5 ** (np.log(4 / 3) / np.log(2)), 1.0))
    assert Machine.of(local(2), "float32", card=fast).paces(2) == ()


def test_pipelines_fill_and_drain_at_the_pace_of_the_few_at_work():
    """Two equal stages, one twice as fast while the other waits: filling and draining take half."""
    model, strategy = small_model(layers=4), Strategy(pp=2)
    workload = Workload(256, microbatch=1, accumulation_steps=4, compute_dtype="float32").resolve(1)
    c = Candidates.of(strategy, workload)

    def terms(pace):
        card = dataclasses.replace(true_card(), pace=pace)
        on = Machine.of(local(2), "float32", card=card, stack=stack_card("cpu"))
        found = score(PricingCase(ModelNumbers.of(model), on, workload, c)).time
        return {t.name: float(t.seconds[0]) for t in found}

    own, shared, none = terms({}), terms({"0.5": 1.25}), terms({"0.5": 4.0})
    # Filling and draining is 2 s of the sum for one stage's 1 s: 1 s more than the round that is counted anyway.
    work = {n: s for n, s in own.items() if n in ("matmul", "attention", "head and loss")}
    assert own["pipeline bubble"] > 0.0
    assert shared["pipeline bubble"] == pytest.approx(
        (2 / 1.25 - 1) * (own["pipeline bubble"] + lost(own, shared) / 4), rel=1e-9
    )
    assert none["pipeline bubble"] == 0.0
    assert all(shared[n] <= s for n, s in work.items())


def lost(own, shared):
    """Seconds that the slowest stage loses to the others where what a light stage leaves is used."""
    layers = ("matmul", "attention", "element-wise", "head and loss", "kernel launches")
    return sum(own[n] - shared[n] for n in layers)


def test_pace_is_never_below_one_and_falls_with_the_ranks_at_work():
    rates = dataclasses.replace(made_rates(), layers=((4, 2.0), (2, 1.6), (1, 1.7)))
    assert fit_device(rates, supernode(), "test").pace == pytest.approx({"0.5": 1.25, "0.25": 1.25})
    waits = dataclasses.replace(rates, layers=((4, 4.0), (2, float("nan")), (1, float("nan"))))
    assert mean_rates([rates, waits]).layers == ((4, 3.0), (2, 1.6), (1, 1.7))
