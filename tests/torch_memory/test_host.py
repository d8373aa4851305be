"""Optimizer updates in host memory give the plain step's bits and take exactly the predicted bytes."""

import itertools
import time
from collections import Counter

import pytest
import torch
from benchmarks._model_steps import capture_training, training_step

from hyper_parallel.backends.torch.memory import PlannedDevice
from hyper_parallel.backends.torch.memory.streams import DeviceApi
from hyper_parallel.backends.torch.memory.tier_copies import CopyLanes
from hyper_parallel.errors import TransferFailed
from hyper_parallel.ir import Operator
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, order_peak, plan_memory
from tests.slow import slow_cells
from tests.torch_memory.models import tiny_model
from tests.torch_memory.test_parity import (
    ROOFLINE,
    assert_same_state,
    batch,
    captured_training,
    one_thread,
    plain_losses,
)

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]
LINK = Channel(1e8, 1e-6)
HOST = MemoryMachine(LINK, LINK, host=Roofline(1e12, 1e9, 1e-6))


def kinds(plan):
    return Counter(action.kind for action in plan.actions)


def planned(captured, **kw):
    program = ROOFLINE.annotate(captured.program)
    peak = order_peak(program, range(len(program.operators)))
    return plan_memory(program, HOST, budget_bytes=int(0.7 * peak), **kw)


@slow_cells("0.5")
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_bits_and_bytes_do_not_depend_on_when_updates_run(clip_norm):
    reference, reference_optimizer, losses = plain_losses("llama", clip_norm)
    model, optimizer, captured = captured_training("llama", clip_norm)
    plan = planned(captured)
    assert kinds(plan)["update"] == kinds(plan)["join"] > 20
    steps = iter(range(2, 8))
    for copies in ("at_issue", "at_wait", "threads"):
        with PlannedDevice(captured, plan, HOST, copies=copies) as device:
            for step in itertools.islice(steps, 2):
                loss, measured = device.step(batch(step), trace=True)
                assert measured.peak_bytes == plan.peak_bytes
                assert measured.device_bytes == plan.device_bytes
                assert measured.seconds == plan.seconds
                assert torch.equal(loss, losses[step])
        spans = [s for s in measured.timeline.spans if s.lane == "host"]
        assert len(spans) == kinds(plan)["update"]
    assert next(steps, None) is None
    assert_same_state(model, optimizer, reference, reference_optimizer)


def test_on_streams_updates_wait_for_the_events_of_their_gradients():
    reference, reference_optimizer, losses = plain_losses("llama")
    model, optimizer, captured = captured_training("llama")
    plan = planned(captured)
    queues = DeviceApi.of(torch.device("cpu"))
    with PlannedDevice(captured, plan, HOST, copies=queues) as device:
        for step in range(2, 8):
            loss, measured = device.step(batch(step), trace=True)
            assert measured.peak_bytes == plan.peak_bytes
            assert torch.equal(loss, losses[step])
    assert_same_state(model, optimizer, reference, reference_optimizer)
    spans = [s for s in measured.timeline.spans if s.lane == "host"]
    assert len(spans) == kinds(plan)["update"] > 0


@pytest.mark.slow
def test_a_foreach_optimizer_keeps_what_makes_something_on_the_device():
    """Momentum of SGD: lists are cut per tensor, in-place parts may run on the host."""

    def trainer():
        model = tiny_model("llama").train()
        return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)

    reference, reference_optimizer = trainer()
    losses = [training_step(reference, reference_optimizer, batch(i)) for i in range(6)]
    model, optimizer = trainer()
    for step in range(2):
        training_step(model, optimizer, batch(step))
    captured = capture_training(model, optimizer, batch(2))
    plan = planned(captured)
    for step, copies in enumerate(("at_issue", "at_wait", "threads"), 3):
        with PlannedDevice(captured, plan, HOST, copies=copies) as device:
            loss, measured = device.step(batch(step))
            assert measured.peak_bytes == plan.peak_bytes
            assert torch.equal(loss, losses[step])
    assert_same_state(model, optimizer, reference, reference_optimizer)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("when", ["at_issue", "at_wait", "threads"])
def test_a_copy_waits_for_the_last_update_of_its_storage(when, joined):
    """Two updates of storage 0 are under way, and the first one is joined before the copy or after it."""
    lanes, done = CopyLanes(when), []
    update = Operator("update", (0,), (0,))
    lanes.update(0, update, lambda: done.append("first"))
    lanes.update(1, update, lambda: (time.sleep(0.1), done.append("second")))
    if joined:
        lanes.join(0, update)
    lanes.start(0, "prefetch", lambda: done.append("copy"), 4)
    lanes.wait(0, "device")
    assert done == ["first", "second", "copy"]
    for index in range(joined, 2):
        lanes.join(index, update)
    lanes.close()


def test_an_update_that_fails_stops_the_step(monkeypatch):
    _, _, captured = captured_training("llama")
    plan = planned(captured)
    with PlannedDevice(captured, plan, HOST, copies="threads") as device:

        def broken(call, held):
            def run():
                raise OSError("no memory")

            return run

        monkeypatch.setattr(
            "hyper_parallel.backends.torch.memory.bound_actions.in_host_memory", broken
        )
        with pytest.raises(TransferFailed, match="no memory"):
            device.step(batch(2))
