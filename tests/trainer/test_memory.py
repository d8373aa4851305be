import mmap

import pytest
import torch

from hyper_parallel.runtime import launch
from hyper_parallel.trainer.engine.step_gauges import MemoryGauge
from hyper_parallel.units import MiB

pytestmark = pytest.mark.dist


def _pages(num_mib):
    """Pages of their own: a tensor may lie in a hole of the inherited heap, and its pages stay with the C library."""
    pages = mmap.mmap(-1, num_mib * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(num_mib):
        pages.write(bytes(MiB))
    return pages


def test_the_peak_counts_what_was_freed_again():
    def rank_body(rank):
        gauge = MemoryGauge(torch.device("cpu"))
        with gauge.step():  # writes to the inherited pages that later steps write to
            _pages(1).close()
            gauge.peak_bytes()
        with gauge.step():
            empty = gauge.peak_bytes()
        kept = _pages(16)
        with gauge.step():
            before = gauge.peak_bytes()
            _pages(64).close()
            peak = gauge.peak_bytes()
        with gauge.step():
            return len(kept), empty, before, peak, gauge.peak_bytes()

    _, empty, before, peak, after = launch(rank_body, 1)[0]
    # Linux adds up a thread's pages in batches of 64.
    assert 15 * MiB < before - empty < 20 * MiB
    assert 63 * MiB < peak - before < 68 * MiB
    assert abs(after - before) < 4 * MiB


def test_memory_that_fits_into_holes_of_the_inherited_heap_counts():
    blocks = [bytearray(100_000) for _ in range(800)]
    pins = blocks[::2]
    del blocks  # leaves 400 holes in the heap

    def rank_body(rank):
        gauge = MemoryGauge(torch.device("cpu"))
        with gauge.step():
            kept = [torch.ones(20_000) for _ in range(200)]
            return gauge.peak_bytes(), len(kept)

    peak, _ = launch(rank_body, 1)[0]
    assert len(pins) == 400
    assert peak > 200 * 80_000 * 0.9


def test_counted_tensors_are_exact_and_the_second_step_stands_for_all_later_ones():
    gauge = MemoryGauge(torch.device("cpu"))
    state = {"weight": torch.zeros(1000)}
    gauge.state = state.values
    peaks = []
    for step in range(4):
        with gauge.step():
            first = torch.ones(500) * 2  # 2 x 2,000 bytes, one of them freed before the next
            second = first + state["weight"][:500]
            del first
            third = second.repeat(2)
            inside = gauge.peak_bytes()
            if step == 0:
                state["slot"] = torch.zeros(250)
            del second, third
        peaks.append((inside, gauge.peak_bytes()))
    # State of 4,000 bytes; then first and second or second and third: 2,000 + 4,000.
    # The slot comes at the end of the first step, and stays.
    assert peaks == [(10_000, 11_000), (11_000, 11_000), (11_000, 11_000), (11_000, 11_000)]


def test_a_counted_step_tells_its_bytes_over_time_and_what_the_peak_held():
    gauge = MemoryGauge(torch.device("cpu"))
    weight = torch.zeros(1000)
    grads: list[torch.Tensor] = []
    gauge.state = lambda: [weight]
    gauge.kinds = lambda: {"gradients": sum(g.nbytes for g in grads)}
    with gauge.step():
        grads.append(weight * 2)
        high = weight.repeat(3)
        high.add_(1)
        del high
        weight.sum()
        grads.clear()
        torch.zeros(5)
    peak = gauge.peak_bytes()
    assert peak == 4000 + 4000 + 12_000
    assert max(n for what, _, n in gauge.samples if what == "memory") == peak
    assert [n for what, _, n in gauge.samples if what == "peak gradients"] == [4000]
