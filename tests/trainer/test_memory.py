import pytest
import torch

from hyper_parallel.runtime import launch
from hyper_parallel.trainer._memory import MemoryGauge
from hyper_parallel.units import MiB

pytestmark = pytest.mark.dist


def test_the_peak_counts_what_was_freed_again():
    def rank_body(rank):
        gauge = MemoryGauge(torch.device("cpu"))
        kept = torch.ones(16 * MiB // 4)
        gauge.start()
        before = gauge.peak_bytes()
        torch.ones(64 * MiB // 4)  # freed at once
        peak = gauge.peak_bytes()
        gauge.start()
        return kept.numel(), before, peak, gauge.peak_bytes()

    _, before, peak, after = launch(rank_body, 1)[0]
    assert 16 * MiB <= before < 24 * MiB
    assert 64 * MiB <= peak - before < 68 * MiB
    assert after < 24 * MiB
