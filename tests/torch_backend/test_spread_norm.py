"""Norms on features cut over ranks equal norms on all features; tensors that backward gathers again."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch.tensor.sharded_norm import ShardedNorm
from hyper_parallel.backends.torch.tensor.state import RegatherScope
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose
from hyper_parallel.runtime import World, launch


class _Plain(nn.Module):
    """The norm as most model files write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class _Functional(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class _Summing(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.pow(2).sum(-1, keepdim=True).sqrt()


class _Opaque(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


WIDTH = 12


@pytest.mark.dist
def test_a_norm_on_slices_is_the_norm_of_the_whole() -> None:
    torch.manual_seed(0)
    norms = [_Plain(WIDTH), _Functional(WIDTH), nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)]
    for norm in norms:
        norm.double()
        with torch.no_grad():
            for param in norm.parameters():
                param.copy_(torch.randn_like(param))
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    seed = torch.randn_like(x)

    def rank(r: int) -> None:
        with World.join("cpu"):
            for norm in norms:
                whole = x.clone().requires_grad_()
                expected = norm(whole)
                (expected * seed).sum().backward()
                mine = slice(r * WIDTH // 2, (r + 1) * WIDTH // 2)
                part = copy.deepcopy(norm)
                for name, param in norm.named_parameters():
                    setattr(part, name, nn.Parameter(param.detach()[mine]))
                local = x[..., mine].clone().requires_grad_()
                with ShardedNorm(dist.group.WORLD, "norm"):
                    out = part(local)
                torch.testing.assert_close(out, expected[..., mine], rtol=1e-12, atol=1e-12)
                (out * seed[..., mine]).sum().backward()
                torch.testing.assert_close(local.grad, whole.grad[..., mine], rtol=1e-11, atol=1e-12)
                for name, param in norm.named_parameters():
                    found = getattr(part, name).grad
                    torch.testing.assert_close(found, param.grad[mine], rtol=1e-11, atol=1e-12)

    launch(rank, 2, timeout_s=180)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("norm", "purpose", "what", "hint"),
    [
        (_Summing, Purpose.NORM_STATISTICS, "sum", "parallel.mlp_shape=1d"),
        (_Opaque, Purpose.NORMS_OVER_HEADS, "a custom kernel", "parallel.tp_x=1 parallel.tp_y=1"),
    ],
)
def test_a_statistic_that_would_be_one_ranks_own_is_refused(norm: type, purpose: Purpose, what: str, hint: str) -> None:
    def rank(_: int) -> None:
        with World.join("cpu"), ShardedNorm(dist.group.WORLD, "final", purpose):
            norm(WIDTH)(torch.ones(2, WIDTH))

    with pytest.raises(UnsupportedSharding) as caught:
        launch(rank, 1, timeout_s=180)
    assert caught.value.what.startswith(f"the norm `final` computes its statistics with {what}")
    assert caught.value.hint == hint


@pytest.mark.torch
def test_a_gathered_tensor_is_made_once_for_all_its_readers() -> None:
    piece = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    made = []

    def gather(part: Tensor) -> Tensor:
        return torch.cat((part, 2 * part))

    def again() -> Tensor:
        made.append(1)
        return gather(piece.detach())

    grads = []
    for scoped in (False, True):
        for leaf in (piece, *weights):
            leaf.grad = None
        whole = gather(piece)
        scope = RegatherScope()
        if scoped:
            with scope.open(), scope.regather_in_backward(whole, again):
                out = sum(F.linear(whole, w).square().sum() for w in weights)
        else:
            out = sum(F.linear(whole, w).square().sum() for w in weights)
        del whole
        out.backward()
        grads.append([leaf.grad.clone() for leaf in (piece, *weights)])
    assert len(made) == 1
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
