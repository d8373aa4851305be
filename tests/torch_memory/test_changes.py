"""What may change between steps: it counts, or the step is refused."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks._model_steps import capture_training, training_step

from hyper_parallel.backends.torch.memory import record
from hyper_parallel.errors import StepChanged
from tests.torch_memory.models import tokens
from tests.torch_memory.steps import batch, bits, captured, opened, same, trained, trainer
from tests.torch_memory.test_parity import one_thread

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]


def _rate(model, optimizer):
    group = optimizer.param_groups[0]
    before, group["lr"] = group["lr"], 1e-3
    return lambda: group.update(lr=before)


def _decay(model, optimizer):
    group = optimizer.param_groups[0]
    before, group["weight_decay"] = group["weight_decay"], 0.0
    return lambda: group.update(weight_decay=before)


def _eval(model, optimizer):
    model.model.layers[0].eval()
    return model.train


def _hook(model, optimizer):
    return model.model.norm.register_forward_hook(lambda *_: None).remove


def _backward_hook(model, optimizer):
    return model.lm_head.weight.register_hook(lambda grad: grad * 2).remove


def _freeze(model, optimizer):
    model.lm_head.weight.requires_grad_(False)
    return lambda: model.lm_head.weight.requires_grad_(True)


def _group(model, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    return optimizer.param_groups.pop


def _gradient(model, optimizer):
    model.lm_head.weight.grad = torch.ones(model.lm_head.weight.shape)
    return optimizer.zero_grad


def _data(model, optimizer):
    weight = model.lm_head.weight
    before, weight.data = weight.data, torch.ones(weight.shape)

    def undo():
        weight.data = before

    return undo


def _replaced(model, optimizer):
    layers = model.model.layers
    before, layers[0] = layers[0], torch.nn.Identity()

    def undo():
        layers[0] = before

    return undo


CHANGES = [
    _rate, _decay, _eval, _hook, _backward_hook, _freeze, _group, _gradient, _data, _replaced,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_what_the_program_cannot_see_is_refused_until_it_is_undone(change):
    reference, _, losses = trained(3)
    model, optimizer, step = captured()
    with opened(step) as device:
        undo = change(model, optimizer)
        with pytest.raises(StepChanged, match="HP512"):
            device.step(batch(2))
        undo()
        loss, _ = device.step(batch(2))
    assert torch.equal(loss, losses[2])
    assert same(model, reference)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_the_same_is_refused_after_planned_steps(change):
    """When what was looked at in the step before is compared by identity only."""
    model, optimizer, step = captured()
    with opened(step) as device:
        for number in (2, 3):
            device.step(batch(number))
        undo = change(model, optimizer)
        with pytest.raises(StepChanged, match="HP512"):
            device.step(batch(4))
        undo()
        device.step(batch(4))


def test_a_change_far_inside_of_an_attribute_is_refused_after_planned_steps():
    model, optimizer = trainer()
    inside = model.model.layers[0].mlp
    inside.kept = {"list": [1, SimpleNamespace(numbers=np.zeros(2))]}
    training_step(model, optimizer, batch(0))
    step = capture_training(model, optimizer, batch(1))
    kept = inside.kept["list"]
    with opened(step) as device:
        for number in (2, 3):
            device.step(batch(number))
        for change, undo in (
            (lambda: kept.append(2), kept.pop),
            (lambda: vars(kept[1]).update(more=1), lambda: vars(kept[1]).pop("more")),
            (lambda: kept[1].numbers.fill(1), lambda: kept[1].numbers.fill(0)),
        ):
            change()
            with pytest.raises(StepChanged, match="HP512"):
                device.step(batch(4))
            undo()
            device.step(batch(4))


def test_the_error_says_what_has_changed_and_how_to_change_it():
    model, optimizer, step = captured()
    with opened(step) as device:
        undo = _rate(model, optimizer)
        with pytest.raises(StepChanged, match="lr of parameter group 0") as caught:
            device.step(batch(2))
        undo()
        model.model.layers[0].mlp.eval()
        with pytest.raises(StepChanged, match=r"`training` of model\.layers\.0\.mlp"):
            device.step(batch(2))
    assert "torch.tensor" in caught.value.hint


def test_the_error_names_an_attribute_that_was_added():
    model, _, step = captured()
    with opened(step) as device:
        model.model.norm.kept = 1
        with pytest.raises(StepChanged, match=r"model\.norm\.kept of the model or the optimizer was added"):
            device.step(batch(2))


def test_a_learning_rate_in_a_tensor_counts_in_every_step():
    """Set as schedulers do, once more after the last planned step."""
    rates = [torch.tensor(1e-2), torch.tensor(1e-2)]
    reference, optimizer, _ = trained(2, rates[0])
    for number in (2, 3):
        training_step(reference, optimizer, batch(number))
        rates[0].fill_(1e-2 / number)
    model, _, step = captured(rates[1])
    with opened(step) as device:
        for number in (2, 3):
            device.step(batch(number))
            rates[1].fill_(1e-2 / number)
    assert same(model, reference)
    assert rates[1] == rates[0]


def test_a_buffer_follows_unless_the_step_changes_it_too():
    read, written = torch.ones(4), torch.zeros(4)

    def run(x):
        written.add_(x)
        return x * read

    named = {"read": (read, "input"), "written": (written, "input")}
    step = record(run, {"x": torch.ones(4)}, named, name="buffers", training=False)
    with opened(step) as device:
        read.fill_(3.0)
        assert torch.equal(device.step({"x": torch.full((4,), 2.0)})[0], torch.full((4,), 6.0))
        written.fill_(7.0)
        with pytest.raises(StepChanged, match="`written`"):
            device.step({"x": torch.ones(4)})
    assert torch.equal(written, torch.full((4,), 3.0))
    assert torch.equal(read, torch.full((4,), 3.0))


def test_a_checkpoint_that_is_loaded_while_the_state_is_lent_counts():
    later, later_optimizer, _ = trained(4)
    model, optimizer, step = captured()
    with opened(step) as device:
        with device.materialize_state():
            model.load_state_dict(later.state_dict())
            for mine, other in zip(model.parameters(), later.parameters(), strict=True):
                for key, value in optimizer.state[mine].items():
                    value.copy_(later_optimizer.state[other][key])
        torch.manual_seed(0)
        device.step(batch(4))
    torch.manual_seed(0)
    training_step(later, later_optimizer, batch(4))
    assert same(model, later)


@pytest.mark.parametrize("what", ["optimizer", "assign", "data"])
def test_tensors_that_take_the_place_of_the_recorded_ones_are_refused_and_kept(what):
    later, later_optimizer, _ = trained(4)
    model, optimizer, step = captured()
    device = opened(step)

    def load():
        if what == "optimizer":
            model.load_state_dict(later.state_dict())
            optimizer.load_state_dict(copy.deepcopy(later_optimizer.state_dict()))
        elif what == "assign":
            model.load_state_dict(copy.deepcopy(later.state_dict()), assign=True)
        else:
            for mine, other in zip(model.parameters(), later.parameters(), strict=True):
                mine.data = other.detach().clone()

    with pytest.raises(StepChanged, match="HP512"), device.materialize_state():
        load()
    with pytest.raises(StepChanged):
        device.step(batch(4))
    device.close()
    assert same(model, later)
    if what == "optimizer":  # plain training goes on from there
        for pair in ((model, optimizer), (later, later_optimizer)):
            torch.manual_seed(0)
            training_step(*pair, batch(4))
        assert same(model, later)


def test_who_uses_model_or_optimizer_while_a_device_has_their_bytes_is_stopped():
    model, optimizer, step = captured()
    with opened(step) as device:
        for use in (
            lambda: model(**batch(2)),
            model.state_dict,
            lambda: model.load_state_dict({}),
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict({}),
        ):
            with pytest.raises(StepChanged, match="a memory plan manages"):
                use()
        with device.materialize_state():
            assert len(optimizer.state_dict()["state"]) == len(model.state_dict())
            training_step(model, optimizer, batch(2))
        device.step(batch(3))
        with pytest.raises(StepChanged, match="another offloaded step"):
            opened(step)
    training_step(model, optimizer, batch(4))


def test_inputs_that_share_bytes_in_the_recording_may_differ_later():
    ids, mask = tokens(1, length=8), torch.ones(1, 8).expand(2, 8)
    data = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    other = {**batch(2), "attention_mask": torch.ones(2, 8), "labels": tokens(9, length=8)}
    reference, optimizer = trainer()
    training_step(reference, optimizer, batch(0))
    training_step(reference, optimizer, data)
    expected = training_step(reference, optimizer, other)
    model, _, step = captured(data=data)
    with opened(step) as device:
        loss, _ = device.step(other)
    assert torch.equal(loss, expected)
    assert same(model, reference)


def test_inputs_of_another_name_or_type_are_refused():
    step = record(lambda x: x + 1, {"x": torch.ones(4)}, {}, name="step", training=False)
    with opened(step) as device:
        with pytest.raises(StepChanged, match="names of the inputs differ"):
            device.step({"x": torch.ones(4), "y": torch.ones(4)})
        with pytest.raises(StepChanged, match="type"):
            device.step({"x": torch.ones(4, dtype=torch.int64)})
        assert torch.equal(device.step({"x": torch.ones(4)})[0], torch.full((4,), 2.0))


def test_what_a_step_returned_outlives_the_next_and_autocast_around_it_changes_nothing():
    reference, _, losses = trained(4)
    model, _, step = captured()
    with opened(step) as device, torch.autocast("cpu", torch.bfloat16):
        found = [device.step(batch(number))[0] for number in (2, 3)]
    assert all(map(torch.equal, found, losses[2:]))
    assert same(model, reference)


def test_a_loss_that_is_nan_is_the_plain_steps_nan():
    models = [trained(2), captured()]
    for model, *_ in models:
        with torch.no_grad():
            model.lm_head.weight[0, 0] = torch.nan
    (reference, optimizer, _), (model, _, step) = models
    expected = training_step(reference, optimizer, batch(2))
    with opened(step) as device:
        loss, _ = device.step(batch(2))
    assert loss.isnan()
    assert expected.isnan()
    for a, b in zip(bits(model), bits(reference), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
