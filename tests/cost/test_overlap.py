"""Exposed communication of a layer: against the event-driven clock, closed forms, and published losses."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from hyper_parallel.backends.torch.in_flight import Turns
from hyper_parallel.cost import (
    Candidates,
    Machine,
    ModelNumbers,
    PricingCase,
    device_card,
    score,
    stack_card,
)
from hyper_parallel.cost.overlap import BlockSeconds, PassSeconds, layer_program, pass_span
from hyper_parallel.ir import Overlap, Strategy, Workload
from hyper_parallel.planner import plan
from tests.cost.machines import machine
from tests.planner.draws import moe_model
from tests.sim.contended_lanes import contended_end

pytestmark = pytest.mark.unit


def seconds(**given):
    names = (f.name for f in dataclasses.fields(PassSeconds))
    return PassSeconds(**{name: np.array([given.get(name, 0.0)]) for name in names})


@pytest.mark.parametrize(("layers", "halves", "chunks"), [(1, 1, 1), (2, 2, 1), (1, 1, 4), (2, 2, 2)])
@pytest.mark.parametrize("demand", [Fraction(0), Fraction(1, 4)])
def test_a_layer_takes_as_long_as_its_events(layers, halves, chunks, demand):
    program = layer_program(layers, halves, chunks)
    ns = (7_000, 11_000, 5_000, 3_000, 2_000, 4_000)
    tasks = [(lane, deps, ns[row]) for lane, deps, row in zip(program.lanes, program.deps, program.rows, strict=True)]
    end = program.contended_span([np.array([float(n)]) for n in ns], float(demand))
    assert end[0] == pytest.approx(float(contended_end(tasks, demand)))


def test_closed_forms_of_exposed_communication():
    serial = seconds(attention=4.0, mlp=6.0, experts=8.0, attention_collective=1.0, exchange=2.0)
    assert pass_span(serial, 1, 1, np.ones(1), 0.0)[0] == 18.0 + 2.0 + 4.0
    # n chunks expose the first dispatch and the last combine.
    chunked = seconds(experts=2.0, exchange=0.5)
    assert pass_span(chunked, 1, 4, np.ones(1), 0.0)[0] == 8.0 + 2 * 0.5
    # Two halves that go on through the layers hide all but what the longer lane leaves.
    half = seconds(attention=2.0, mlp=3.0, attention_collective=0.5, mlp_collective=0.5)
    assert pass_span(half, 2, 1, np.zeros(1), 0.0)[0] == 10.0
    # Halves that meet after the layer leave its first and last collective.
    assert pass_span(half, 2, 1, np.ones(1), 0.0)[0] == 11.0
    # A collective that needs all compute units hides nothing.
    assert pass_span(half, 2, 1, np.ones(1), 1.0)[0] == 10.0 + 4.0


def test_chunks_expose_the_first_gather_and_the_last_scatter():
    one, two, half = (np.array([x]) for x in (1.0, 2.0, 0.5))
    hidden = BlockSeconds(column=two, core=one, row=one, collective=half)
    # 4 x (2 + 1) + 1 seconds of computation, the first gather and the last scatter.
    assert hidden.span(4, 0.0)[0] == 13.0 + 2 * 0.5
    # Collectives that take longer than products: computation hides behind them, but for the last product of each kind.
    late = BlockSeconds(column=half, core=one, row=half, collective=two)
    assert late.span(4, 0.0)[0] == 4 * 2.0 + 0.5 + 1.0 + 0.5 + 4 * 2.0
    assert BlockSeconds(column=two, core=one, row=one, collective=half).span(1, 0.0)[0] == 5.0


def test_dispatches_of_all_chunks_go_before_the_first_combine():
    # The link is idle from the last dispatch to the end of the first chunk only: 8 x 2 seconds otherwise.
    chunked = seconds(experts=3.0, exchange=2.0)
    assert pass_span(chunked, 1, 4, np.ones(1), 0.0)[0] == 16.0


def test_halves_that_go_on_pay_for_both_ends_of_the_model_once():
    half = seconds(attention=2.0, mlp=3.0, attention_collective=0.5, mlp_collective=0.5)
    # The first gather of one half and the last scatter of the other one.
    for layers in (2, 3, 10):
        span = pass_span(half, 2, 1, np.zeros(1), 0.0, layers)[0]
        assert span == pytest.approx(10.0 + 2 * 0.5 / layers)


def test_a_scatter_hides_behind_the_column_products_of_the_other_half_alone():
    # The gather hides behind the rest of the block.
    parts = {"attention": 2.0, "attention_column": 1.0, "mlp": 2.0, "mlp_column": 1.0}
    short = seconds(**parts, attention_collective=1.0, mlp_collective=1.0)
    assert pass_span(short, 2, 1, np.zeros(1), 0.0)[0] == 4 * 3.0
    late = seconds(**parts, attention_collective=1.5, mlp_collective=1.5)
    assert pass_span(late, 2, 1, np.zeros(1), 0.0)[0] == 4 * (3.0 + 0.5)


@pytest.mark.parametrize(
    ("used", "chunks"),
    [
        ("0134678", 1),
        ("0134", 1),
        ("0125", 1),
        ("0125", 3),
        ("0234568", 2),
        ("01259a", 2),
        ("02345689a", 2),
        ("025bc", 2),
        ("0125de", 1),
        ("01259ade", 2),
        ("025bcde", 2),
    ],
)
def test_turns_of_halves_are_those_of_the_runtime(used, chunks):
    used = tuple(f"{row:x}" in used for row in range(15))
    half = layer_program(3, 1, chunks, used).rows
    turns, order = Turns(), []

    def call(index):
        before = None
        for row in half:
            # This task waits for a collective, unlike deferred weight gradients (12) and copies of rows to send (13).
            if before in (3, 4, 5, 12) and row not in (3, 4, 5, 12, 13):
                turns.suspend(index, leads_to_start=before in (3, 4) and row == 8)
            elif before in (6, 7):
                turns.offer(index)
            order.append(row)
            before = row

    turns.add([partial(call, index) for index in range(2)])
    turns.finish()
    assert tuple(order) == layer_program(3, 2, chunks, used).rows


def test_deferred_weight_gradients_hide_the_last_exchange_of_backward():
    chunked = seconds(experts=4.0, exchange=1.0)
    assert pass_span(chunked, 1, 4, np.ones(1), 0.0)[0] == 1.0 + 4 * 4.0 + 1.0
    deferred = dataclasses.replace(chunked, expert_weights=np.array([2.0]))
    assert pass_span(deferred, 1, 4, np.ones(1), 0.0)[0] == 4 * 4.0 + 1.0
    # Of a short task, only its own time is hidden.
    deferred = dataclasses.replace(chunked, expert_weights=np.array([0.5]))
    assert pass_span(deferred, 1, 4, np.ones(1), 0.0)[0] == 0.5 + 4 * 4.0 + 1.0


def test_copies_of_rows_overlap_with_exchanges_of_other_chunks():
    chunked = seconds(experts=1.0, exchange=4.0, copy=0.5)
    # The link is idle during the first copy to a buffer and the last copy from it.
    assert pass_span(chunked, 1, 2, np.ones(1), 0.0)[0] == 0.5 + 4 * 4.0 + 0.5
    # With less traffic, only the first dispatch and the last combine are exposed.
    chunked = seconds(experts=3.0, exchange=1.0, copy=0.5)
    assert pass_span(chunked, 1, 2, np.ones(1), 0.0)[0] == 0.5 + 1.0 + 2 * 3.0 + 1.0 + 0.5


def test_numbers_of_rows_wait_for_the_dispatch_of_the_other_half():
    half = seconds(attention=1.0, experts=4.0, exchange=2.0)
    # The experts start when the first chunk of the first half has arrived, after 1 + 2 seconds.
    assert pass_span(half, 2, 2, np.ones(1), 0.0)[0] == 3.0 + 4 * 4.0 + 2.0
    # Numbers of rows of the second half arrive behind both chunks of the first one.
    counted = dataclasses.replace(half, counts_rows=True)
    assert pass_span(counted, 2, 2, np.ones(1), 0.0)[0] == 5.0 + 4 * 4.0 + 2.0


def priced(stack, **overlap):
    workload = Workload(512, microbatch=4, accumulation_steps=1).resolve(2)
    strategy = Strategy(dp_shard=2, ep=2, overlap=Overlap(**overlap))
    card = dataclasses.replace(device_card("", "cpu"), collective_share=0.0)
    host = Machine.of(machine(), "float32", card=card, stack=stack)
    candidates = Candidates.of(strategy, workload)
    case = PricingCase(ModelNumbers.of(moe_model()), host, workload, candidates)
    return case, sum(t.seconds[0] for t in score(case).time)


def test_weight_gradients_of_parts_are_added():
    stack = stack_card("cpu")
    without = dataclasses.replace(stack, adds_gradients=0.0)
    assert priced(stack)[1] == priced(without)[1]
    for overlap, times, weights in (
        ({"ep_chunks": 2}, 1, ("expert",)),
        ({"ep_chunks": 4}, 3, ("expert",)),
        ({"half_batch": True}, 1, ("attention", "mlp", "expert")),
    ):
        case, added_s = priced(stack, **overlap)
        n, added_s = case.n, added_s - priced(without, **overlap)[1]
        # Two gradients in float32 are read and one is written; the rank has half of the experts.
        whole = {
            "attention": n.attention_weights,
            "mlp": n.mlp_weights,
            "expert": n.expert_weights / 2,
        }
        read = times * 3 * 4 * sum(whole[name] for name in weights)
        seconds = n.layers * read / case.machine.passing_bytes_s
        # Additions hide waits, too.
        assert 0.0 < added_s <= seconds * 1.0001
        assert added_s > 0.5 * seconds


def test_halves_meet_after_every_layer_of_fsdp_for_every_stage_of_zero():
    workload = Workload(512, microbatch=4, accumulation_steps=1).resolve(2)
    card, stack = device_card("", "cpu"), stack_card("cpu")
    case = PricingCase(
        ModelNumbers.of(moe_model()),
        Machine.of(machine(), "float32", card=card, stack=stack),
        workload,
        Candidates.of(Strategy(dp_shard=2, ep=2, overlap=Overlap(half_batch=True)), workload),
    )

    def exposed(zero):
        other = case.with_columns(zero=np.full(1, float(zero)))
        return next(t.seconds[0] for t in score(other).time if t.name == "ep communication")

    assert exposed(0) == exposed(2) > 0.0


def test_weight_gradients_hide_collectives_of_chunks():
    one, two, half, four = (np.array([x]) for x in (1.0, 2.0, 0.5, 4.0))
    late = BlockSeconds(column=half, core=one, row=half, collective=two)
    filled = dataclasses.replace(late, while_gathering=four, while_scattering=four)
    # Products of a chunk end long before the next one arrives: 8 more seconds of computation take no time.
    assert filled.span(4, 0.0)[0] == late.span(4, 0.0)[0]
    hidden = BlockSeconds(column=two, core=one, row=one, collective=half)
    # They hide the first gather and the last scatter, which nothing else does.
    filled = dataclasses.replace(hidden, while_gathering=one, while_scattering=one)
    assert filled.span(4, 0.0)[0] == 4 * (2.0 + 1.0) + 1.0 + 2 * 1.0


def ratio(model, topology, workload, strategy, overlap):
    """Step time without overlap over that with it."""
    plain = plan(model, topology, workload, strategy=strategy)
    other = plan(model, topology, workload, strategy=dataclasses.replace(strategy, overlap=overlap))
    return plain.step_s / other.step_s


def test_small_microbatches_lose_and_large_ones_win():
    tp, halves = Strategy(tp_x=8), Overlap(half_batch=True)
    assert ratio("llama-3-8b", "dgx-h100", Workload(512, microbatch=2), tp, halves) < 0.9
    assert ratio("llama-3-8b", "dgx-h100", Workload(8192, microbatch=4), tp, halves) > 1.05
    ep, chunks = Strategy(dp_shard=8, ep=8), Overlap(ep_chunks=8)
    assert ratio("mixtral-8x22b", "dgx-h100", Workload(64, microbatch=1), ep, chunks) < 1.0


def planned_halves(seq_len, **values):
    """Plans without and with half-batches."""
    workload = Workload(seq_len, microbatch=2, accumulation_steps=2)
    strategy = Strategy(tp_x=4, dp_shard=2, **values)
    halved = dataclasses.replace(strategy, overlap=Overlap(half_batch=True))
    return [plan("llama-3-8b", "dgx-h100", workload, strategy=s) for s in (strategy, halved)]


def test_halves_go_on_through_recomputed_layers_of_fsdp():
    """Selective recomputation adds no time here: it keeps the products of attention."""
    none, selective, full = (
        [p.step_s for p in planned_halves(8192, recompute=r)] for r in ("none", "selective", "full")
    )
    assert none == selective
    # The repeated forward gains too, but less than half of the other two passes: a layer that runs alone has ends.
    assert none[0] - none[1] < full[0] - full[1] < 3 / 2 * (none[0] - none[1])


def test_halves_between_two_layers_gather_a_third_one():
    layer = 218_112_000 * 2 // 4
    for values, more in (
        ({}, layer),
        ({"recompute": "selective"}, layer),
        ({"reshard_after_forward": False}, 0),
    ):
        plain, halved = (
            next(term.bytes for term in p.memory if term.name == "gathered parameters")
            for p in planned_halves(256, **values)
        )
        assert halved - plain == pytest.approx(more, rel=1e-3), values
