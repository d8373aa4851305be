"""Losses, gradient norms and gradients of steps, and their comparison with those of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

Result = tuple[float, float, Mapping[str, Tensor | None]]
"""Loss, gradient norm, and gradient of each parameter of one step."""


def assert_equal_results(found: Sequence[Result], expected: Sequence[Result]) -> None:
    """Assert that steps equal those of one rank to 1e-10; `expected` may have more parameters."""
    for (loss, norm, grads), (right_loss, right_norm, right) in zip(found, expected, strict=True):
        assert loss == pytest.approx(right_loss, rel=1e-10)
        assert norm == pytest.approx(right_norm, rel=1e-10)
        for name, gradient in grads.items():
            assert (gradient is None) == (right[name] is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, right[name], rtol=1e-10, atol=1e-12)
