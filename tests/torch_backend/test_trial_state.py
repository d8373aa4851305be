"""A trial of a forward pass leaves the model as it was."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from hyper_parallel.backends.torch.layer_flow import preserve_module_state

pytestmark = pytest.mark.torch


def state(model):
    return [{k: dict(v) if isinstance(v, dict) else v for k, v in vars(m).items()} for m in model.modules()]


def test_attributes_children_buffers_and_hooks_are_restored_after_an_error():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    stays = model[0].register_forward_hook(lambda *_: None)
    before, child = state(model), model[0][0]
    with suppress(ZeroDivisionError), preserve_module_state(model):
        model[0].register_forward_hook(lambda *_: None, with_kwargs=True)
        model.register_forward_pre_hook(lambda *_: None)
        model[0][0].register_forward_pre_hook(lambda *_: None, with_kwargs=True)
        model[0].set_submodule("0", nn.Identity())
        model[1].running_mean = torch.ones(2)
        model[1].momentum, model.extra = 0.5, 1
        raise ZeroDivisionError
    assert state(model) == before
    assert model[0][0] is child
    assert [*model[0]._forward_hooks] == [stays.id]
