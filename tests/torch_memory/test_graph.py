"""The graph front end: steps after the least cut have the bits of eager ones, and fewer saved bytes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hyper_parallel.backends.torch.memory import (
    PlannedDevice,
    as_graph,
    capture_training,
    record,
    training_step,
)
from hyper_parallel.backends.torch.memory._operators import draws
from hyper_parallel.errors import StepChanged
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, order_peak, plan_memory
from tests.torch_memory.models import tiny_model
from tests.torch_memory.test_parity import assert_same_state, batch, trainer

pytestmark = pytest.mark.torch

ROOFLINE = Roofline(1e9, 1e9, 1e-6)
MACHINE = MemoryMachine(Channel(1e9, 1e-6), Channel(1e9, 1e-6))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(captured):
    return order_peak(captured.program, range(len(captured.program.operators)))


def run_by_plan(captured, plan, machine, steps, losses):
    with PlannedDevice(captured, plan, machine) as device:
        for step in steps:
            loss, measured = device.step(batch(step))
            assert measured.peak_bytes == plan.peak_bytes
            assert torch.equal(loss, losses[step])


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_a_planned_graph_has_the_bits_of_eager_training(family):
    steps = 20 if family == "llama" else 4
    reference, reference_optimizer = trainer(family)
    losses = [training_step(reference, reference_optimizer, batch(i)) for i in range(steps)]
    eager = capture_training(*trainer_after_a_step(family), batch(1))
    model, optimizer = trainer_after_a_step(family)
    captured = capture_training(model, optimizer, batch(1), front_end="graph")
    assert start(captured) < start(eager)
    plan = plan_memory(ROOFLINE.annotate(captured.program), MACHINE, max_slowdown=0.05)
    assert plan.peak_bytes["device"] <= start(captured) // 2
    run_by_plan(captured, plan, MACHINE, range(2, steps), losses)
    assert_same_state(model, optimizer, reference, reference_optimizer)


def trainer_after_a_step(family):
    model, optimizer = trainer(family)
    training_step(model, optimizer, batch(0))
    return model, optimizer


@pytest.mark.parametrize(
    ("family", "options"), [("qwen3", {"loss_chunks": 3, "clip_norm": 0.5}), ("mixtral", {})]
)
def test_clipping_a_chunked_loss_and_experts_are_part_of_the_graph(family, options):
    reference, reference_optimizer = trainer(family)
    losses = [training_step(reference, reference_optimizer, batch(i), **options) for i in range(4)]
    model, optimizer = trainer(family)
    training_step(model, optimizer, batch(0), **options)
    captured = capture_training(model, optimizer, batch(1), front_end="graph", **options)
    plan = plan_memory(ROOFLINE.annotate(captured.program), MACHINE, max_slowdown=0.05)
    run_by_plan(captured, plan, MACHINE, range(2, 4), losses)
    assert_same_state(model, optimizer, reference, reference_optimizer)


def test_fake_tensors_give_a_graph_too():
    with FakeTensorMode():
        model = tiny_model("llama").train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.zeros(2, 16, dtype=torch.int64)
        inputs = {"input_ids": ids, "labels": ids}
        training_step(model, optimizer, inputs)
        graph = capture_training(model, optimizer, inputs, front_end="graph")
        eager = capture_training(model, optimizer, inputs)
    assert {op.phase for op in graph.program.operators} == {"forward", "backward", "optimizer"}
    assert start(graph) < start(eager)
    again = [op.name for op in graph.program.operators if op.phase == "backward"]
    assert "silu" in again  # a cheap result is made again; products and attentions are not
    products = [
        sum(op.flops > 0 for op in c.program.operators if op.phase == "backward")
        for c in (graph, eager)
    ]
    assert products[0] == products[1]


class Reading(torch.nn.Module):
    """Its code reads a value of its input."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        return (x.mean() * self.weight).exp().sum()


def test_a_value_that_code_reads_is_compared_in_every_run():
    model = Reading()

    def step(x):
        loss = model(x)
        loss.backward()
        model.weight.grad = None
        return loss.detach()

    state = {"weight": (model.weight, "weight")}
    x = torch.ones(4)
    captured = as_graph(record(step, {"x": x}, state, name="reading", training=True))
    plan = plan_memory(ROOFLINE.annotate(captured.program), MACHINE, max_slowdown=1.0)
    loss = model(3 * x).detach()
    with PlannedDevice(captured, plan, MACHINE) as device:
        assert torch.equal(device.step({"x": 3 * x})[0], loss)
        with pytest.raises(StepChanged, match="took a branch"):
            device.step({"x": -x})


class Changing(torch.nn.Module):
    """A cheap result, which backward needs, of something that changes afterwards."""

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
    recorded = record(step, {"x": inputs[0]}, state, name="changing", training=True)
    captured = as_graph(recorded)
    assert len(captured.program.operators) > len(recorded.program.operators)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses = [step(x, twin, other) for x in inputs]
    plan = plan_memory(ROOFLINE.annotate(captured.program), MACHINE, max_slowdown=1.0)
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
    reference, reference_optimizer = trainer("llama")
    losses = [training_step(reference, reference_optimizer, batch(i)) for i in range(20)]
    model, optimizer = trainer_after_a_step("llama")
    captured = capture_training(model, optimizer, batch(1))
    program = ROOFLINE.annotate(captured.program)
    plan = plan_memory(program, MACHINE, max_slowdown=0.1, move=())
    again = [program.operators[a.target].name for a in plan.actions if a.kind == "recompute"]
    assert any("attention" in name for name in again)
    run_by_plan(captured, plan, MACHINE, range(2, 20), losses)
    assert_same_state(model, optimizer, reference, reference_optimizer)
