"""Forward passes that keep float64."""

from __future__ import annotations

import torch

from hyper_parallel.backends.torch.forward_variants import KeepFloat64


def test_integers_and_new_zeros_do_not_bring_float32_into_a_float64_forward() -> None:
    with KeepFloat64():
        assert torch.arange(3).to(torch.float32).dtype == torch.float64
        assert torch.arange(3).to(dtype=torch.float32).dtype == torch.float64
        rows = torch.zeros(size=(2, 3), dtype=torch.float32)
        rows[0] = torch.ones(3, dtype=torch.float64).to(torch.float32)
        assert rows.dtype == torch.float64
        assert torch.arange(3).to(torch.int32).dtype == torch.int32
    assert torch.arange(3).to(torch.float32).dtype == torch.float32
