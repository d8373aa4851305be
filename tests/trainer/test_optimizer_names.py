"""Optimizers by the names that people use."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from hyper_parallel.config import Training
from hyper_parallel.errors import BadValue, MissingDependency
from hyper_parallel.trainer import build_optimizer
from hyper_parallel.trainer.engine.optimizer import NAMED_OPTIMIZERS, optimizer_class

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "AdamW", "adamw_hf"])
def test_every_name_of_adamw_is_the_same_update(name):
    training = Training(optimizer=name)
    assert training.optimizer == "adamw"
    assert type(build_optimizer(nn.Linear(2, 2), training)) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adagrad", torch.optim.Adagrad), ("rmsprop", torch.optim.RMSprop), ("nadam", torch.optim.NAdam),
        ("radam", torch.optim.RAdam), ("adamax", torch.optim.Adamax), ("adadelta", torch.optim.Adadelta),
        ("sgd", torch.optim.SGD),
    ],
)  # fmt: skip
def test_optimizers_of_torch_step_with_the_recipes_numbers(name, kind):
    layer = nn.Linear(2, 2)
    training = Training(optimizer=name, lr=0.25, betas=(0.7, 0.8), eps=1e-4, weight_decay=0.0)
    optimizer = build_optimizer(layer, training)
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.25
    if name in ("nadam", "radam", "adamax"):
        assert (group["betas"], group["eps"]) == ((0.7, 0.8), 1e-4)
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, layer.weight)


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "lion", "adamw_torch_8bit"])
def test_an_absent_package_is_named_with_the_command_that_installs_it(name):
    package = NAMED_OPTIMIZERS[name].partition(".")[0]
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingDependency) as caught:
        optimizer_class(name)
    assert caught.value.hint == f"pip install {package}"


def test_an_unknown_name_leads_to_the_nearest():
    with pytest.raises(BadValue) as caught:
        optimizer_class("adagard")
    assert caught.value.hint == "set `training.optimizer=adagrad`"
