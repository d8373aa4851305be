"""Micro-benchmarks run on one process and on ranks, and give a usable card."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.backends.torch import measure_rates
from hyper_parallel.calibration import fit_device, mean_rates
from hyper_parallel.runtime import World, launch
from hyper_parallel.topology import load_topology

pytestmark = pytest.mark.dist


def test_two_ranks_measure_themselves():
    def on_rank(rank):
        with World.join("cpu") as world:
            return measure_rates(world.device, ("float32",), window_s=0.002)

    rates = mean_rates(launch(on_rank, 2, timeout_s=180))
    assert len(rates.rings) == 3
    card = fit_device(rates, load_topology("local-cpu"), "measured")
    for value in (card.matmul["float32"], card.attention["float32"], card.elementwise, card.stream):
        assert 1e-3 < value < 100
    assert card.link > 0
    assert card.latency > 0


def test_one_process_has_no_rings():
    assert measure_rates(torch.device("cpu"), (), window_s=0.001).rings == ()
