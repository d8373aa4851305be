"""Exposed communication of a layer: against the event-driven clock, closed forms, and published losses."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from hyper_parallel.cost.overlap import BlockSeconds, PassSeconds, layer_program, pass_span
from hyper_parallel.ir import Overlap, Strategy, Task, TaskGraph, Workload
from hyper_parallel.planner import plan
from hyper_parallel.sim import simulate

pytestmark = pytest.mark.unit


def seconds(**given):
    names = (f.name for f in dataclasses.fields(PassSeconds))
    return PassSeconds(**{name: np.array([given.get(name, 0.0)]) for name in names})


@pytest.mark.parametrize(
    ("layers", "halves", "chunks"), [(1, 1, 1), (2, 2, 1), (1, 1, 4), (2, 2, 2)]
)
@pytest.mark.parametrize("demand", [Fraction(0), Fraction(1, 4)])
def test_a_layer_takes_as_long_as_its_events(layers, halves, chunks, demand):
    program = layer_program(layers, halves, chunks)
    ns = (7_000, 11_000, 5_000, 3_000, 2_000, 4_000)
    shares = ((("cores", Fraction(1)),), (("cores", demand),))
    tasks = (
        Task(str(n), f"lane {lane}", ns[row], deps=deps, demands=shares[lane])
        for n, (lane, deps, row) in enumerate(
            zip(program.lanes, program.deps, program.rows, strict=True)
        )
    )
    graph = TaskGraph(tuple(tasks), capacities={"cores": Fraction(1)})
    end = program.contended_span([np.array([float(n)]) for n in ns], float(demand))
    assert simulate(graph).end_s * 1e9 == pytest.approx(end[0], abs=len(program.rows))


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
