"""Code that nobody here has seen: a plan follows what its steps do, or it is refused by name. Never other numbers."""

import copy
import ctypes
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks._model_steps import capture_training, training_step
from torch import nn

from hyper_parallel.backends.torch.memory import PlannedDevice, record
from hyper_parallel.backends.torch.memory.action_binder import ActionBinder, Prepared
from hyper_parallel.errors import CaptureUnsupported, StepChanged
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory

pytestmark = pytest.mark.torch

MACHINE = MemoryMachine(Channel(1e9, 1e-6), Channel(1e9, 1e-6))
COUNT = {"steps": 0}


@torch.library.custom_op("silent::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand_like(x) > 0.5)


@torch.library.custom_op("silent::scribble", mutates_args=())
def scribble(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    into.add_(1.0)
    return x + into


noise.register_autograd(lambda ctx, grad: grad.clone())
scribble.register_autograd(lambda ctx, grad: (grad.clone(), None))


class Net(nn.Module):
    """Three layers; `between` is what the cases are about."""

    def __init__(self, between=lambda net, h: h, **state):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "plain":
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.between = between

    def forward(self, x, use_cache=False):
        h = torch.tanh(self.b(self.between(self, torch.tanh(self.a(x)))))
        return SimpleNamespace(loss=self.c(h).square().mean())


class CountingAdam(torch.optim.Optimizer):
    """Its number of steps is a number of Python."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(steps=0, mean=torch.zeros_like(p))
            state["steps"] += 1
            state["mean"].lerp_(p.grad, 0.1)
            p.sub_(1e-2 * state["mean"] / (1 - 0.9 ** state["steps"]))


def by_numpy(net, h):
    out = torch.empty(h.shape)
    out.numpy()[...] = h.detach().numpy() * 2
    return h + out


def by_pointer(net, h):
    out, given = torch.empty(h.shape), h.detach()
    ctypes.memmove(out.data_ptr(), given.data_ptr(), given.nbytes)
    return h + out


def turned(net, h):
    return net.layer(h.view(2, 4, 16).transpose(1, 2)).transpose(1, 2).reshape(8, 16)


def recurrent(net, h):
    return net.layer(h.view(2, 4, 16))[0].reshape(8, 16)


def turned_in_place(net, h):
    square = torch.mm(h.detach().mT, torch.tanh(h.detach())).t_()
    return h + (h @ square).unsqueeze_(0).transpose_(0, 1).squeeze_(1)


def buffer_in_place(net, h):
    return h @ net.square.t_()


def into_a_buffer(net, h):
    ctypes.memmove(net.filled.data_ptr(), h.detach().data_ptr(), net.filled.nbytes)
    return h + net.filled


def words_that_change_places(net, h):
    words = (ctypes.c_int64 * 8).from_address(net.order.data_ptr())
    words[0], words[3] = words[3], words[0]
    return h + net.order


def counted(net, h):
    net.steps["done"] += 1
    return h * (1 + net.steps["done"])


def counted_elsewhere(net, h):
    COUNT["steps"] += 1
    return h * (1 + COUNT["steps"])


def rebound(name):
    def between(net, h):
        setattr(net, name, 0.9 * getattr(net, name) + h.detach().mean(0))
        return h + getattr(net, name)

    return between


def in_place(net, h):
    net.plain.mul_(0.9).add_(h.detach().mean(0))
    return h + net.plain


REFUSED = {  # what is between the layers, its state, the error, and words of it
    "kernel of numpy": (by_numpy, {}, CaptureUnsupported, "does not see"),
    "kernel with a pointer": (by_pointer, {}, CaptureUnsupported, "does not see"),
    "kernel into a buffer": (
        into_a_buffer, {"filled": torch.zeros(16)}, CaptureUnsupported, "`filled` is written by code",
    ),
    "kernel that moves words of a buffer": (
        words_that_change_places, {"order": torch.arange(16.0)}, CaptureUnsupported, "`order` is written by code",
    ),
    "operator that hides a write": (
        lambda net, h: scribble(h, net.n), {"n": torch.zeros(16)}, CaptureUnsupported, "silent.scribble",
    ),
    "buffer that is turned in place": (
        buffer_in_place, {"square": torch.randn(16, 16)}, CaptureUnsupported, "the strides of `square` in place",
    ),
    "branch on tolist": (
        lambda net, h: h * sum(h.detach()[0].tolist()), {}, StepChanged, "a value that Python read",
    ),
    "branch on numpy": (
        lambda net, h: h * float(np.abs(h.detach().numpy()).max()), {}, StepChanged, "a value that Python read",
    ),
    "counter": (counted, {"steps": {"done": 0}}, CaptureUnsupported, "changes `steps` of Net"),
    "counter elsewhere": (counted_elsewhere, {}, StepChanged, "computes other results than without it"),
    "buffer that is replaced": (
        rebound("mean"), {"mean": torch.zeros(16)}, CaptureUnsupported, "replaces the tensor `Net.mean`",
    ),
    "attribute that is replaced": (
        rebound("plain"), {"plain": torch.zeros(16)}, CaptureUnsupported, "replaces the tensor `Net.plain`",
    ),
    "random numbers of Python": (
        lambda net, h: h * random.random(), {}, CaptureUnsupported, "random numbers of Python",
    ),
}  # fmt: skip
FOLLOWED = {
    "batch norm": (lambda net, h: net.norm(h), {"norm": nn.BatchNorm1d(16)}),
    "batch norm in eval": (lambda net, h: net.norm(h), {"norm": nn.BatchNorm1d(16).eval()}),
    "batch norm of what is transposed": (turned, {"layer": nn.BatchNorm1d(16)}),
    "layers that keep a workspace": (recurrent, {"layer": nn.LSTM(16, 16, 2, batch_first=True)}),
    "operator with hidden dropout": (lambda net, h: noise(h), {}),
    "results turned in place": (turned_in_place, {}),
    "attribute in place": (in_place, {"plain": torch.zeros(16)}),
}


def batch(number):
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(number))}


def trainer(between, state, make=None):
    torch.manual_seed(0)
    net = Net(between, **copy.deepcopy(state))
    optimizer = (make or (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)))(net.parameters())
    training_step(net, optimizer, batch(0))
    return net, optimizer


def opened(net, optimizer, **goal):
    captured = capture_training(net, optimizer, batch(1))
    program = Roofline(1e9, 1e9, 1e-6).annotate(captured.program)
    plan = plan_memory(program, MACHINE, **(goal or {"max_slowdown": 0.5}))
    return PlannedDevice(captured, plan, MACHINE)


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_plan_cannot_follow_is_refused_before_its_first_step_counts(case):
    between, state, error, words = REFUSED[case]
    with pytest.raises(error, match=words), opened(*trainer(between, state)) as device:
        device.step(batch(2))


def test_an_optimizer_that_counts_in_python_is_refused():
    with pytest.raises(CaptureUnsupported, match="`state` of CountingAdam"):
        opened(*trainer(lambda net, h: h, {}, CountingAdam))


@pytest.mark.parametrize("case", FOLLOWED)
def test_what_a_plan_follows_is_bitwise_the_plain_run(case):
    plain, optimizer = trainer(*FOLLOWED[case])
    losses = [training_step(plain, optimizer, batch(number)) for number in (1, 2, 3)]
    planned, optimizer = trainer(*FOLLOWED[case])
    with opened(planned, optimizer) as device:
        assert [device.step(batch(number))[0] for number in (2, 3)] == losses[1:]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, planned.state_dict()[name]), name
    for key, value in vars(plain).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(planned, key))


def test_a_number_of_a_module_that_changes_between_steps_is_refused():
    net, optimizer = trainer(lambda net, h: h * net.scale, {"scale": 2.0})
    with opened(net, optimizer) as device:
        device.step(batch(2))
        net.scale = 3.0
        with pytest.raises(StepChanged, match="scale"):
            device.step(batch(3))
        net.scale = 2.0
        device.step(batch(3))


def test_what_a_device_holds_is_refused_or_read_and_never_a_crash():
    net, optimizer = trainer(lambda net, h: h, {})
    weight = net.a.weight
    kept, before = weight.detach().view(-1), weight.detach().clone()
    with opened(net, optimizer) as device:
        mean = optimizer.state[weight]["exp_avg"]
        for use in (
            weight.norm, weight.tolist, weight.data.sum, kept.sum, mean.sum, lambda: str(weight), lambda: weight + 1,
            lambda: copy.deepcopy(net), lambda: nn.functional.linear(batch(0)["x"], weight), net.state_dict,
        ):  # fmt: skip
            with pytest.raises(StepChanged, match="HP512"):
                use()
        assert weight.shape == (16, 16)
        assert sum(p.numel() for p in net.parameters()) == 561
        assert not torch.equal(device.state.on_home_tier(weight), before)
        with device.materialize_state():
            assert weight.norm() == kept.norm()
        device.step(batch(2))
    assert type(weight) is nn.Parameter
    assert weight.norm() == kept.norm()


@pytest.mark.parametrize(("operator", "differs"), [("_fused_adamw_", "a.weight"), ("tanh", "loss")])
def test_a_plan_that_computes_something_else_is_refused_by_its_first_step(operator, differs, monkeypatch):
    """An update that runs twice, a result of zeros: the step goes on, and its numbers are others."""
    made = ActionBinder._operator

    def wrong(self, index, at):
        ready = made(self, index, at)
        if self._plan.program.operators[index].name != operator:
            return ready

        def run():
            ready.run()
            for _, base in ready.results:
                base.fill_(0)
            return ready.run() if not ready.results else None

        return replace(ready, run=run)

    net, optimizer = trainer(lambda net, h: h, {})
    monkeypatch.setattr(ActionBinder, "_operator", wrong)
    with (
        pytest.raises(StepChanged, match=f"(?s)computes other results than without it.*--> {differs}"),
        opened(net, optimizer) as device,
    ):
        device.step(batch(2))


def test_steps_from_record_are_compared_too():
    seen, mean = [0.0], torch.zeros(4)

    def step(x):
        seen[0] += 1.0
        return mean.lerp_(x, 0.1) * seen[0]

    named = {"mean": (mean, "input")}
    captured = record(step, {"x": torch.ones(4)}, named, name="step", training=False)
    plan = plan_memory(Roofline(1e9, 1e9).annotate(captured.program), MACHINE, max_slowdown=1.0)
    with (
        pytest.raises(StepChanged, match="computes other results than without it"),
        PlannedDevice(captured, plan, MACHINE) as device,
    ):
        device.step({"x": torch.ones(4)})


def test_the_meter_knows_nothing_of_the_plan():
    """A leak in every step, then an operator that does not run: both are noticed."""
    kept, device = [], opened(*trainer(lambda net, h: h, {}))
    planned = device.plan.device_bytes
    assert device.step(batch(2))[1].device_bytes == planned
    actions = device.state.actions
    at = next(at for at, act in enumerate(actions) if isinstance(act.args[0], Prepared))
    run, (ready, index) = actions[at].func, actions[at].args
    leaking = replace(ready, run=lambda: (kept.append(torch.empty(1 << 20)), ready.run())[1])
    actions[at] = partial(run, leaking, index)
    for number in (1, 2):
        assert device.step(batch(3))[1].device_bytes == planned + number * (4 << 20)
    actions[at] = partial(run, replace(ready, run=lambda: None), index)
    with pytest.raises(StepChanged, match="did not run"):
        device.step(batch(4))
    device.close()
