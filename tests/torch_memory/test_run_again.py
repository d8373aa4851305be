"""What may run twice: attention without dropout does, a result of what has changed meanwhile does not."""

import pytest
import torch

from hyper_parallel.backends.torch.memory import PlannedDevice, record
from hyper_parallel.backends.torch.memory.operators import draws
from hyper_parallel.memory import plan_memory
from tests.torch_memory.test_parity import (
    MACHINE,
    ROOFLINE,
    assert_same_state,
    batch,
    captured_training,
    plain_losses,
)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Changing(torch.nn.Module):
    """Cheap results that backward needs; some are of what changes afterwards."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(64))
        self.register_buffer("seen", torch.ones(64))

    def forward(self, x):
        scale = self.seen * 3.0
        with torch.no_grad():
            self.seen += x
        wide = (x + 1.0).neg()
        early = wide * 2.0
        wide.mul_(0.5)
        return ((self.weight * scale).cos() * early * wide).sum()


def test_a_result_of_what_changes_afterwards_is_kept():
    model, twin = Changing(), Changing()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, model=model, optimizer=optimizer):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    state = {"weight": (model.weight, "weight"), "seen": (model.seen, "input")}
    inputs = [torch.rand(64) for _ in range(4)]
    captured = record(step, {"x": inputs[0]}, state, name="changing", training=True)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses = [step(x, twin, other) for x in inputs]
    program = ROOFLINE.annotate(captured.program)
    plan = plan_memory(program, MACHINE, max_slowdown=1.0, move=())
    assert plan.replayed.recompute_seconds > 0
    with PlannedDevice(captured, plan, MACHINE) as device:
        for x, loss in zip(inputs[1:], losses[1:], strict=True):
            assert torch.equal(device.step({"x": x})[0], loss)
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.seen, twin.seen)


def test_attention_without_dropout_is_an_ordinary_operator():
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.zeros(1)
    assert not draws(attention, (q, q, q), {})
    assert not draws(attention, (q, q, q, 0.0, True), {})
    assert draws(attention, (q, q, q, 0.1), {})
    assert draws(attention, (q, q, q), {"dropout_p": 0.1})
    assert draws(torch.ops.aten.native_dropout.default, (q, 0.1, True), {})
    assert not draws(torch.ops.aten.add.Tensor, (q, q), {})
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    assert draws(backward, (q,) * 8, {"dropout_p": 0.1}, "backward")  # given its forward's seed


def test_a_recomputed_attention_has_the_bits_of_the_first():
    reference, reference_optimizer, losses = plain_losses("llama", steps=20)
    model, optimizer, captured = captured_training("llama")
    program = ROOFLINE.annotate(captured.program)
    plan = plan_memory(program, MACHINE, max_slowdown=0.1, move=())
    again = [program.operators[a.target].name for a in plan.actions if a.kind == "recompute"]
    assert any("attention" in name for name in again)
    with PlannedDevice(captured, plan, MACHINE) as device:
        for step in range(2, 20):
            loss, measured = device.step(batch(step))
            assert measured.peak_bytes == plan.peak_bytes
            assert torch.equal(loss, losses[step])
    assert_same_state(model, optimizer, reference, reference_optimizer)
