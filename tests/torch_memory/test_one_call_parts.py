"""`hp.offload` around steps of several models and optimizers, of none, with any loss; what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hyper_parallel as hp
from hyper_parallel.errors import BudgetImpossible, StepChanged

pytestmark = pytest.mark.torch

Made = tuple[Callable[..., Tensor], list[Any]]
"""A step of one input of 16 rows and 32 columns, and the modules, optimizers and tensors that it changes."""


def adversaries() -> Made:
    made, judge = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    first, second = (torch.optim.Adam(m.parameters(), lr=1e-2, fused=True) for m in (made, judge))

    def step(rows: Tensor) -> Tensor:
        fake = made(rows)
        loss = functional.softplus(judge(fake.detach()) - judge(rows)).mean()
        loss.backward()
        second.step()
        second.zero_grad()
        functional.softplus(-judge(fake)).mean().backward()
        first.step()
        for optimizer in (first, second):
            optimizer.zero_grad()
        return loss.detach()

    return step, [made, judge, first, second]


class Loop:
    """Training loop as in frameworks: models in a dict, optimizers in a list, the loss a module."""

    def __init__(self) -> None:
        self.models = {"in": nn.Linear(32, 64), "out": nn.Linear(64, 32)}
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in self.models.values()]
        self.criterion = nn.MSELoss()

    def step(self, rows: Tensor) -> Tensor:
        loss = self.criterion(self.models["out"](self.models["in"](rows).relu()), rows)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


def loop() -> Made:
    made = Loop()
    return made.step, [*made.models.values(), *made.optimizers]


def teacher_that_follows() -> Made:
    """An average of the weights, which no optimizer trains; the forward pass is in a function beside the step."""
    student = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, fused=True)

    def distance(rows: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(rows)
        return 1 - functional.cosine_similarity(student(rows), wanted).mean()

    def step(rows: Tensor) -> Tensor:
        loss = distance(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for theirs, ours in zip(teacher.parameters(), student.parameters(), strict=True):
                theirs.lerp_(ours, 0.1)
        return loss.detach()

    return step, [student, teacher, optimizer]


def in_a_namespace() -> Made:
    parts = SimpleNamespace(model=nn.Linear(32, 32))
    parts.optimizer = torch.optim.AdamW(parts.model.parameters(), lr=1e-2, fused=True)

    def step(rows: Tensor) -> Tensor:
        loss = parts.model(rows).square().mean()
        loss.backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        return loss.detach()

    return step, [parts.model, parts.optimizer]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> Tensor:
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def by_name(rows: Tensor, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    return trained(model, optimizer, rows)


def given_by_partial() -> Made:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return partial(by_name, model=model, optimizer=optimizer), [model, optimizer]


class Called:
    """A step that is an object."""

    def __init__(self) -> None:
        self.model = nn.Linear(32, 32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def __call__(self, rows: Tensor) -> Tensor:
        return trained(self.model, self.optimizer, rows)


def called() -> Made:
    made = Called()
    return made, [made.model, made.optimizer]


def tensors_alone() -> Made:
    weight = torch.randn(32, 64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True)

    def step(rows: Tensor) -> Tensor:
        loss = (rows @ weight).tanh().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, [weight, optimizer]


def bytes_of(parts: list[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, nn.Module):
            found += [*part.parameters(), *part.buffers()]
        else:
            found += [v for slots in part.state.values() for v in slots.values()]
    return [tensor.detach().clone() for tensor in found]


def run(make: Callable[[], Made], budget: int | None) -> tuple[list[float], list[Tensor], int]:
    """Losses, the state at the end, and the device bytes of a planned step."""
    torch.manual_seed(0)
    step, parts = make()
    taken = step if budget is None else hp.offload(step, budget=budget)
    draws = torch.Generator().manual_seed(1)
    losses = [float(taken(torch.randn(16, 32, generator=draws))) for _ in range(5)]
    if budget is None:
        return losses, bytes_of(parts), 0
    most = taken.measured.device_bytes
    taken.close()
    return losses, bytes_of(parts), most


@pytest.mark.parametrize(
    "make",
    [
        adversaries,
        loop,
        teacher_that_follows,
        in_a_namespace,
        given_by_partial,
        called,
        tensors_alone,
    ],
)
def test_whatever_a_step_works_on_is_found_and_keeps_its_bits(make) -> None:
    losses, state, _ = run(make, None)
    found, mine, whole = run(make, 1 << 30)
    assert found == losses
    assert all(map(torch.equal, mine, state))
    with pytest.raises(BudgetImpossible) as refused:
        run(make, 1000)
    found, mine, most = run(make, least := refused.value.least_bytes)
    assert found == losses
    assert all(map(torch.equal, mine, state))
    assert most <= least < whole


def test_all_of_them_are_empty_between_steps() -> None:
    step, (made, judge, _, second) = adversaries()
    with hp.offload(step, max_slowdown=1.0) as planned:
        for _ in range(3):
            planned(torch.ones(16, 32))
        for use in (lambda: judge(torch.ones(1, 32)), made.state_dict, second.state_dict):
            with pytest.raises(StepChanged, match="a memory plan manages"):
                use()
        with planned.materialized():
            assert made(torch.ones(1, 32)).isfinite().all()
    second.param_groups[0]["eps"] = 1.0
    with pytest.raises(StepChanged, match="eps of parameter group 0"):
        planned(torch.ones(16, 32))


LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_whose_kernel_makes_more_than_it_gives(name, reduction, capfd) -> None:
    """At an address of the size of the sum, some fail, some say that they resize it in every step."""

    def make() -> Made:
        model = nn.Linear(32, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step(rows: Tensor) -> Tensor:
            loss = getattr(functional, name)(model(rows).sigmoid(), rows[:, :8].sigmoid(), reduction=reduction).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, [model, optimizer]

    losses, state, _ = run(make, None)
    found, mine, _ = run(make, 1 << 30)
    assert found == losses
    assert all(map(torch.equal, mine, state))
    assert "resized" not in capfd.readouterr().err
