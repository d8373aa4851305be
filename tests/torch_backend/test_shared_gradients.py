"""Gradients of replicated parameters that autograd computes as one tensor, or as parts of one, over several passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

import hyper_parallel as hp
from hyper_parallel.backends.torch.tensor.gradients import to_local

pytestmark = [pytest.mark.torch, pytest.mark.dist]


def _gradients(as_dtensors: bool) -> list[Tensor]:
    """Gradients of a token in front and of two embeddings that are added, after two backward passes."""
    values = [torch.ones(3, 4), torch.ones(3, 4), torch.ones(1, 4)]
    if as_dtensors:
        mesh = init_device_mesh("cpu", (1,))
        values = [DTensor.from_local(v, mesh, [Replicate()]) for v in values]
    parameters = [nn.Parameter(v) for v in values]
    for step in range(2):
        first, second, token = (to_local(p, None) for p in parameters)
        weights = torch.arange(12.0).view(3, 4) + step
        rows = torch.cat([token, (first + second)[1:]])
        (rows * weights).sum().backward()
        (first * 2).sum().backward()
        (first + second + rows[:1]).mul(weights).sum().backward()
    return [p.grad.to_local() if as_dtensors else p.grad for p in parameters]


def _equal(rank: int) -> bool:
    with hp.World.join():
        return all(map(torch.equal, _gradients(True), _gradients(False)))


def test_no_gradient_is_added_to_another() -> None:
    assert hp.launch(_equal, 1) == [True]
