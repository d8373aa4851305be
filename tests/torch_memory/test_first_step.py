"""Comparison of the first planned step when two eager steps differ by rounding."""

import random

import pytest
import torch

from hyper_parallel.backends.torch.memory.first_step import ULPS, StepOutcome, is_close, sample

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_units_in_the_last_place_are_rounding_and_more_is_not(dtype):
    torch.manual_seed(0)
    plain = torch.randn(100, 300).to(dtype)
    plain[0, 0] = 1.0 + plain.abs().max()
    unit = torch.finfo(dtype).eps * float(plain.abs().max())
    close, far = plain.double(), plain.double()
    close[::7] += 0.9 * ULPS * unit
    far[::7] += 1.5 * ULPS * unit
    assert is_close(sample(close), sample(plain), dtype)
    assert not is_close(sample(far), sample(plain), dtype)
    assert is_close(sample(plain), sample(plain), dtype)


def test_counters_and_missing_numbers_are_never_near():
    steps = torch.tensor(3)
    assert is_close(sample(steps), sample(steps), steps.dtype)
    assert not is_close(sample(steps + 1), sample(steps), steps.dtype)
    broken = torch.tensor([1.0, float("nan")])
    assert not is_close(sample(broken), sample(torch.ones(2)), broken.dtype)


def test_a_large_tensor_is_sampled_over_its_whole_length():
    large = torch.zeros(1_000_000)
    large[500_000:] = 1.0
    found = sample(large)
    assert 4096 <= found.numel() <= 8192
    assert found.mean() == pytest.approx(0.5, abs=1e-3)


def digest(tensor):
    return StepOutcome.of((), {"it": tensor}).digests["it"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_a_digest_is_the_sum_of_words_times_odd_numbers(dtype):
    """Whatever is added up at a time: it is more on a device than on the host, and both must give the same."""
    torch.manual_seed(0)
    largest = torch.iinfo(dtype).max
    words = torch.randint(-largest if dtype.is_signed else 0, largest, (150_001,), dtype=dtype)
    expected = sum(w * (2 * i + 1) for i, w in enumerate(words.tolist())) % 2**64
    assert digest(words) == expected


def test_a_digest_tells_one_bit_and_two_words_that_changed_places():
    torch.manual_seed(0)
    plain = torch.randn(200_000).bfloat16()
    draws = random.Random(0)
    for _ in range(20):
        at, there = draws.sample(range(200_000), 2)
        bit, swapped = plain.clone(), plain.clone()
        bit.view(torch.int16)[at] ^= 1 << draws.randrange(15)
        swapped[[at, there]] = plain[[there, at]]
        assert digest(bit) != digest(plain)
        assert (digest(swapped) == digest(plain)) == bool(plain[at] == plain[there])
    assert digest(torch.ones(0)) == digest(torch.zeros(5)) == 0
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
