"""What `hp.offload` refuses of a step, with what to write instead, while the state is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyper_parallel as hp
from hyper_parallel.errors import CaptureUnsupported, StepChanged

pytestmark = pytest.mark.torch


@pytest.mark.filterwarnings("default")  # importing the compiler warns
@pytest.mark.parametrize("wrap", [torch.compile, lambda model: model.compile() or model])
def test_compiled_code_is_refused_before_anything_runs(wrap) -> None:
    model = wrap(nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(rows: Tensor) -> Tensor:
        loss = model(rows).mean()
        optimizer.step()
        return loss

    with pytest.raises(CaptureUnsupported, match="is compiled"):
        hp.offload(step, budget="1MiB")


def test_a_schedule_of_momentum_is_refused_with_what_to_write() -> None:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)

    def step(rows: Tensor) -> Tensor:
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with hp.offload(step, max_slowdown=0.5) as planned:
        for _ in range(2):
            planned(torch.ones(16, 32))
            rates.step()
        with pytest.raises(StepChanged, match="momentum of parameter group 0") as caught:
            planned(torch.ones(16, 32))
    assert "cycle_momentum=False" in caught.value.hint


@pytest.mark.parametrize("read", [Tensor.item, lambda loss: loss.isnan().item()])
def test_a_loss_that_python_reads_is_refused_while_the_state_is_there(read) -> None:
    """A number; not a truth value, which may be the same in every step."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(rows: Tensor) -> Any:
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return read(loss)

    with hp.offload(step, max_slowdown=0.5) as planned:
        planned(torch.ones(16, 32))
        if read is not Tensor.item:
            assert [planned(torch.ones(16, 32)) for _ in range(3)] == [False] * 3
            return
        with pytest.raises(CaptureUnsupported, match="reads a number") as caught:
            planned(torch.ones(16, 32))
    assert "loss.detach()" in caught.value.hint
    assert model.weight.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        (torch.optim.Adam, "fused=True"),
        (torch.optim.NAdam, "capturable=True"),
        (None, "outside of the step"),
    ],
)
def test_what_python_counts_is_refused_with_what_to_write(kind, hint) -> None:
    """By an optimizer, or by a scheduler inside of the step."""
    model = nn.Linear(32, 32)
    fused = {"fused": True} if kind is None else {}
    optimizer = (kind or torch.optim.AdamW)(model.parameters(), lr=1e-2, **fused)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)

    def step(rows: Tensor) -> Tensor:
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind is None:
            rates.step()
        return loss.detach()

    with hp.offload(step, max_slowdown=0.5) as planned:
        planned(torch.ones(16, 32))
        with pytest.raises(CaptureUnsupported) as caught:
            planned(torch.ones(16, 32))
    assert hint in caught.value.hint
    assert model.weight.isfinite().all()


@pytest.mark.parametrize(
    ("decide", "said"),
    [
        (lambda rows: rows[rows[:, 0] > 0], "differs from the captured step"),
        (lambda rows: rows[: int((rows[:, 0] > 0).sum())], "a value that Python read"),
        (lambda rows: rows[: sum((rows[:, 0] > 0).tolist())], "a value that Python read"),
    ],
)
def test_what_the_batch_decides_otherwise_is_refused_while_the_state_is_there(decide, said) -> None:
    """Before the first planned step has run; a batch that decides the same may follow."""

    def trained(offloaded: bool) -> tuple[nn.Module, list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step(rows: Tensor) -> Tensor:
            loss = model(decide(rows)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        def rows(seed: int, positive: int) -> Tensor:
            made = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
            made[:, 0] = torch.where(torch.arange(16) < positive, 1.0, -1.0)
            return made

        if not offloaded:
            return model, [step(rows(seed, 9)) for seed in range(4)]
        with hp.offload(step, max_slowdown=0.5) as planned:
            losses = [planned(rows(seed, 9)) for seed in range(2)]
            with pytest.raises(StepChanged, match=said):
                planned(rows(2, 8))
            return model, losses + [planned(rows(seed, 9)) for seed in (2, 3)]

    (mine, found), (model, plain) = trained(True), trained(False)
    assert found == plain
    assert torch.equal(mine.weight, model.weight)


@pytest.mark.parametrize("counted", [True, False])
def test_gradients_of_several_calls_are_refused_with_what_to_write(counted) -> None:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    calls = iter(range(9))

    def step(rows: Tensor) -> Tensor:
        loss = model(rows).square().mean()
        loss.backward()
        if counted and next(calls) % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    with hp.offload(step, max_slowdown=0.5, optimizer=optimizer) as planned:
        planned(torch.ones(16, 32))
        with pytest.raises(CaptureUnsupported) as caught:
            planned(torch.ones(16, 32))
    assert "all microbatches of an update in one step" in caught.value.hint
