"""A step that fails gives back what it took, and no state that it lost passes for good."""

import threading
from pathlib import Path

import pytest
import torch
from benchmarks._model_steps import training_step

from hyper_parallel.backends.torch.memory.action_binder import ActionBinder
from hyper_parallel.errors import StepChanged, TransferFailed
from tests.torch_memory.steps import batch, bits, captured, opened, same, trained
from tests.torch_memory.test_parity import one_thread

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]


def largest_file(folder):
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def test_a_file_that_was_changed_stops_the_step(tmp_path):
    _, _, step = captured()
    with opened(step, tmp_path, copies="threads") as device:
        device.step(batch(2))
        assert any("hyper-" in thread.name for thread in threading.enumerate())
        path = largest_file(tmp_path)
        data = bytearray(path.read_bytes())
        data[5] ^= 64
        path.write_bytes(data)
        with pytest.raises(TransferFailed, match="differs from the written data"):
            device.step(batch(3))
    assert not any("hyper-" in thread.name for thread in threading.enumerate())


def test_state_that_cannot_be_lent_does_not_pass_for_good(tmp_path):
    model, _, step = captured()
    device = opened(step, tmp_path)
    largest_file(tmp_path).write_bytes(b"short")
    with pytest.raises(TransferFailed, match="wrong size"), device.materialize_state():
        pass
    with pytest.raises(StepChanged):
        device.step(batch(2))
    device.close()
    assert all(p.isnan().all() for p in bits(model))


def test_two_devices_may_share_a_folder(tmp_path):
    reference, _, _ = trained(4)
    mine = [captured(), captured()]
    devices = [opened(step, tmp_path) for *_, step in mine]
    for number in (2, 3):
        for device in devices:
            torch.manual_seed(number)
            device.step(batch(number))
    for device in devices:
        device.close()
    reference, optimizer, _ = trained(2)
    for number in (2, 3):
        torch.manual_seed(number)
        training_step(reference, optimizer, batch(number))
    assert all(same(model, reference) for model, *_ in mine)
    assert not list(tmp_path.iterdir())


def test_state_that_cannot_be_moved_stays_where_it_was(tmp_path, monkeypatch):
    """A disk that fills up, when a device opens and when it takes back what it has lent."""
    model, _, step = captured()
    before = bits(model)
    with pytest.raises(TransferFailed):
        opened(step, tmp_path / "missing")
    assert all(map(torch.equal, before, bits(model)))
    device = opened(step, tmp_path)
    real = Path.open

    def full(path, *options, **named):
        if path.suffix == ".part" and len(list(tmp_path.iterdir())) > 2:
            raise OSError(28, "No space left on device")
        return real(path, *options, **named)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(TransferFailed, match="No space left"), device.materialize_state():
        pass
    with pytest.raises(StepChanged):
        device.step(batch(2))
    device.close()
    assert all(map(torch.equal, before, bits(model)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("copies", ["at_wait", "threads"])
def test_an_interrupted_step_leaves_no_state_that_passes_for_good(monkeypatch, copies):
    model, optimizer, step = captured()
    device = opened(step, copies=copies)
    bind, count = ActionBinder.bind, iter(range(1000))

    def interrupted(self, position):
        def act():
            if next(count) == 40:
                raise KeyboardInterrupt
            real()

        real = bind(self, position)
        return act

    monkeypatch.setattr(ActionBinder, "bind", interrupted)
    with device.materialize_state():  # its actions are bound anew
        pass
    with pytest.raises(KeyboardInterrupt):
        device.step(batch(2))
    monkeypatch.undo()
    with pytest.raises(StepChanged):
        device.step(batch(2))
    with pytest.raises(StepChanged), device.materialize_state():
        pass
    device.close()
    device.close()
    assert all(p.isnan().all() for p in bits(model))
    assert all(value.isnan().all() for value in optimizer.state[model.lm_head.weight].values())
