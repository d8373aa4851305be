"""`hp.offload` around a step that a user wrote: the values of plain steps, less memory, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import BadValue, BudgetImpossible, CaptureUnsupported, StepChanged
from tests.slow import slow_cells

WIDTH, ROWS = 64, 48


class Net(nn.Module):
    """Blocks with dropout and a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += rows.numel()
        for block in self.blocks:
            rows = rows + nn.functional.dropout(block(rows), 0.1, self.training)
        return rows


def make(kind=torch.optim.AdamW, **settings):
    """A model, its optimizer, and a step that returns two values from a nest of arguments."""
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(model.parameters(), lr=1e-2, **settings)

    def step(batch, *, scale):
        out = model(batch["rows"])
        loss = (out - batch["wanted"]).square().mean() * scale
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach(), "norm": norm}

    return model, optimizer, step


def batch(number: int, rows: int = ROWS):
    draws = torch.Generator().manual_seed(number)
    return {k: torch.randn(rows, WIDTH, generator=draws) for k in ("rows", "wanted")}


def run(step, sizes):
    torch.manual_seed(1)
    scale = torch.tensor(2.0)
    found = [step(batch(i, rows), scale=scale) for i, rows in enumerate(sizes)]
    return [(float(one["loss"]), float(one["norm"])) for one in found]


def same_state(model, optimizer, other, theirs) -> None:
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    mine = [t for slots in optimizer.state.values() for t in slots.values()]
    assert all(map(torch.equal, mine, [t for slots in theirs.state.values() for t in slots.values()]))


def test_steps_of_several_shapes_are_the_plain_ones_within_the_budget() -> None:
    sizes = [ROWS, ROWS, ROWS, 16, ROWS, 16, 16, ROWS]
    model, optimizer, step = make(fused=True)
    plain = run(step, sizes)
    mine, ours, own = make(fused=True)
    state_bytes = 12 * sum(p.numel() for p in mine.parameters())
    with hp.offload(own, budget=state_bytes // 2) as planned:
        found = run(planned, sizes)
        assert found == plain
        assert planned.plan.device_bytes <= state_bytes // 2
        assert planned.measured.device_bytes == planned.plan.device_bytes
    same_state(mine, ours, model, optimizer)


def test_a_scheduler_changes_the_rate_and_an_evaluation_sees_the_weights() -> None:
    def train(offloaded: bool):
        model, optimizer, step = make(torch.optim.SGD, fused=True, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        called = hp.offload(step, max_slowdown=0.5) if offloaded else step
        found = []
        for i in range(5):
            found.append(float(called(batch(i), scale=torch.tensor(1.0))["loss"]))
            schedule.step()
            if offloaded:
                with called.materialized(), torch.no_grad():
                    found.append(float(model.eval()(batch(9)["rows"]).sum()))
                    model.train()
            else:
                with torch.no_grad():
                    found.append(float(model.eval()(batch(9)["rows"]).sum()))
                    model.train()
        if offloaded:
            with pytest.raises(StepChanged):
                model(batch(0)["rows"])
            called.close()
        return found

    torch.manual_seed(1)
    plain = train(False)
    torch.manual_seed(1)
    assert train(True) == plain


@pytest.mark.slow
def test_an_optimizer_without_state_is_planned_too() -> None:
    _, _, step = make(torch.optim.SGD, fused=True)
    plain = run(step, [ROWS] * 4)
    _, _, own = make(torch.optim.SGD, fused=True)
    with hp.offload(own, max_slowdown=0.5) as planned:
        assert run(planned, [ROWS] * 4) == plain
        assert planned.measured is not None


@pytest.mark.slow
def test_gradients_may_go_at_the_beginning_of_a_step_and_not_be_added_up() -> None:
    def train(offloaded: bool, zero: bool = True):
        torch.manual_seed(0)
        model = Net()
        model.blocks[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.blocks[1:].parameters(), lr=1e-2, fused=True)

        def step(batch, *, scale):
            if zero:
                optimizer.zero_grad()
            loss = (model(batch["rows"]) - batch["wanted"]).square().mean() * scale
            loss.backward()
            optimizer.step()
            return {"loss": loss.detach(), "norm": torch.zeros(())}

        if not offloaded:
            return model, optimizer, run(step, sizes)
        with hp.offload(step, max_slowdown=0.5, model=model, optimizer=optimizer) as planned:
            return model, optimizer, run(planned, sizes)

    sizes = [ROWS, ROWS, ROWS, 16, ROWS, 16]
    model, optimizer, plain = train(False)
    mine, ours, found = train(True)
    assert found == plain
    same_state(mine, ours, model, optimizer)
    with pytest.raises(CaptureUnsupported, match="still exists after the step"):
        train(True, zero=False)


@slow_cells("Adagrad-settings0")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(torch.optim.Adagrad, {"fused": True}), (torch.optim.AdamW, {"foreach": True})],
)
def test_an_optimizer_is_followed_or_refused_by_a_code(kind, settings) -> None:
    model, optimizer, step = make(kind, **settings)
    plain = run(step, [ROWS] * 4)
    mine, ours, own = make(kind, **settings)
    with hp.offload(own, max_slowdown=0.5) as planned:
        if "foreach" in settings:  # counts in Python
            with pytest.raises(CaptureUnsupported, match="counts its steps in Python"):
                run(planned, [ROWS] * 4)
            model, optimizer, step = make(kind, **settings)  # both steps were taken
            run(step, [ROWS] * 2)
            same_state(mine, ours, model, optimizer)
            return
        assert run(planned, [ROWS] * 4) == plain
    same_state(mine, ours, model, optimizer)


def test_what_cannot_be_is_refused_with_what_to_write() -> None:
    model, optimizer, step = make(fused=True)
    with pytest.raises(CaptureUnsupported, match="neither a tensor nor a plain value"):
        hp.offload(step, budget="1MiB")(batch(0), scale=object())
    with pytest.raises(BadValue, match="exactly one of `budget` and `max_slowdown`"):
        hp.offload(step)
    for budget in ("24 gigs", 2e9):
        with pytest.raises(BadValue, match="`budget` is not a size"):
            hp.offload(step, budget=budget)
    with pytest.raises(BadValue, match="no optimizer was found") as refused:
        hp.offload(lambda rows: model(rows), budget="1MiB")
    assert "optimizer=optimizer" in str(refused.value.hint)
    planned = hp.offload(step, budget=1000)
    with pytest.raises(BudgetImpossible):
        run(planned, [ROWS] * 2)
    # The step that was recorded is a step.
    other, theirs, plain = make(fused=True)
    run(plain, [ROWS] * 2)
    same_state(model, optimizer, other, theirs)
    _, _, counted = make()  # counts its steps in Python
    with pytest.raises((CaptureUnsupported, StepChanged)):
        run(hp.offload(counted, max_slowdown=0.1), [ROWS] * 4)


@pytest.mark.slow
def test_an_optimizer_of_accelerate_is_the_one_that_it_wraps() -> None:
    Accelerator = pytest.importorskip("accelerate").Accelerator

    def train(offloaded: bool):
        model, optimizer, _ = make(fused=True)
        accelerator = Accelerator(cpu=True)
        wrapped, driver = accelerator.prepare(model, optimizer)

        def step(batch, *, scale):
            loss = (wrapped(batch["rows"]) - batch["wanted"]).square().mean() * scale
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            driver.step()
            driver.zero_grad()
            return {"loss": loss.detach(), "norm": norm}

        if not offloaded:
            return model, optimizer, run(step, [ROWS] * 5)
        with hp.offload(step, max_slowdown=0.5) as planned:
            return model, optimizer, run(planned, [ROWS] * 5)

    model, optimizer, plain = train(False)
    mine, ours, found = train(True)
    assert found == plain
    same_state(mine, ours, model, optimizer)
