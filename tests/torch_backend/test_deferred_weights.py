"""Weight gradients of experts that are deferred: bitwise those of autograd, for every product that experts use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch.experts.deferred_weights import DeferredWeights

EXPERTS, WIDTH, HIDDEN = 3, 16, 32
SIZES = [5, 0, 6]
OFFS = torch.tensor(SIZES, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def by_expert(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the rows of each expert that has rows."""
    parts = zip(x.split(SIZES), weight, strict=True)
    return torch.cat([product(part, w) for part, w in parts if len(part)])


def loop(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return by_expert(F.linear, F.silu(by_expert(F.linear, x, up)), down.transpose(1, 2))


def matmul(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = by_expert(torch.matmul, x, up.transpose(1, 2))
    return by_expert(lambda part, weight: part @ weight, F.silu(hidden), down)


def grouped(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = F.grouped_mm(x, up.transpose(-2, -1), offs=OFFS)
    return F.grouped_mm(F.silu(hidden), down, offs=OFFS)


def partly_known(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Use a weight in one product that is deferred and in two that are not, one of them with a bias."""
    known = F.linear(x, up[1])
    unknown = torch.einsum("nc,fc->nf", x, up[1]) + F.linear(x, up[0], down[0].sum(1))
    return torch.matmul(F.silu(known + unknown), down[2])


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [
        (loop, torch.float64),
        (matmul, torch.float64),
        (partly_known, torch.float64),
        (grouped, torch.float32),
        (grouped, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("trained", ["both", "down"])
def test_deferred_gradients_equal_those_of_autograd(
    experts: Callable[..., Tensor], dtype: torch.dtype, trained: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (sum(SIZES), WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, HIDDEN, WIDTH)
    values = [torch.randn(size, generator=generator).to(dtype) for size in sizes]

    def gradients(defer: bool) -> list[Tensor | None]:
        x, up, down = (nn.Parameter(v.clone()) for v in values)
        up.requires_grad_(trained == "both")
        rows = x * 1.0
        if defer:
            with DeferredWeights([up, down]):
                out = experts(rows, up, down)
        else:
            out = experts(rows, up, down)
        out.square().sum().backward()
        return [p.grad for p in (x, up, down)]

    for deferred, expected in zip(gradients(True), gradients(False), strict=True):
        assert (deferred is None) == (expected is None)
        assert deferred is None or torch.equal(deferred, expected)


def test_a_deferred_gradient_is_computed_after_the_gradients_of_rows() -> None:
    """Backward reaches it at the place of the mode: behind the code after it, and ahead of the code before it."""
    order: list[str] = []
    x, weight = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(1, 8, 8))
    before = x * 1.0
    before.register_hook(lambda _: order.append("before"))
    deferred = DeferredWeights([weight])
    rows = before * 1.0
    rows.register_hook(lambda _: order.append("rows"))
    weight.register_hook(lambda _: order.append("weight"))
    with deferred:
        out = F.linear(F.linear(rows, weight[0]), weight[0])
    out.sum().backward()
    assert order == ["rows", "weight", "before"]
