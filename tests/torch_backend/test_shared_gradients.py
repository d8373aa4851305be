"""Gradients of replicated parameters that autograd computes as one tensor, or as parts of one, over several passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel as hp
from hyper_parallel.backends.torch.tensor.gradients import to_local

pytestmark = [pytest.mark.torch, pytest.mark.dist]


def _gradients(as_dtensors: bool) -> list[Tensor]:
    """Gradients of two embeddings that are added, of a token in front and of two views that are added, in two steps."""
    values = [
        torch.ones(3, 4),
        torch.ones(3, 4),
        torch.ones(1, 4),
        torch.ones(2, 6),
        torch.ones(12),
    ]
    if as_dtensors:
        mesh = init_device_mesh("cpu", (1,))
        values = [DTensor.from_local(v, mesh, [Replicate()]) for v in values]
    parameters = [nn.Parameter(v) for v in values]
    for step in range(2):
        # Autograd takes over gradients of plain parameters even if they share storage; negation gives each its own.
        first, second, token, wide, flat = (to_local(p, None) if as_dtensors else p.neg().neg() for p in parameters)
        weights = torch.arange(12.0).view(3, 4) + step
        rows = torch.cat([token, (first + second)[1:]])
        (rows * weights).sum().backward()
        (first * 2).sum().backward()
        ((wide.view(3, 4) + flat.view(3, 4)) * weights).sum().backward()
        (first + second + rows[:1]).mul(weights).sum().backward()
    return [p.grad.to_local() if as_dtensors else p.grad for p in parameters]


def _equal(rank: int) -> bool:
    with hp.World.join():
        return all(map(torch.equal, _gradients(True), _gradients(False)))


def test_no_gradient_is_added_to_another() -> None:
    assert hp.launch(_equal, 1) == [True]


def _copies(rank: int) -> int:
    """Copies in backward through the weights of two linear layers."""
    with hp.World.join():
        mesh = init_device_mesh("cpu", (1,))
        weights = [nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()])) for _ in range(2)]
        x = torch.ones(3, 4)
        for weight in weights:
            x = nn.functional.linear(x, to_local(weight, None))
        with CopyCounter() as counter:
            x.sum().backward()
        assert all(w.grad is not None for w in weights)
        return counter.copies


class CopyCounter(TorchDispatchMode):
    """Counter of `clone` operators."""

    copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.copies += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_a_gradient_of_its_own_is_not_copied() -> None:
    assert hp.launch(_copies, 1) == [0]
