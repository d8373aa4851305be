import pytest
import torch
from torch import nn

from hyper_parallel.config import Training
from hyper_parallel.trainer import build_optimizer, parameter_groups
from hyper_parallel.trainer.engine._optimizer import step_unless

pytestmark = pytest.mark.torch


def _model():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 8))
    model[3].weight = model[0].weight  # tied
    return model


def test_vectors_are_not_decayed_and_tied_weights_count_once():
    model = _model()
    matrices, vectors = parameter_groups(model, 0.1)
    assert matrices["weight_decay"] == 0.1
    assert vectors["weight_decay"] == 0.0
    assert [tuple(p.shape) for p in matrices["params"]] == [(8, 4), (4, 4)]
    assert {p.ndim for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out():
    model = _model()
    model[1].requires_grad_(False)
    names = [p for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert all(p.requires_grad for p in names)
    assert len(names) == 4


def test_one_step_is_adamw_by_hand():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    module = nn.Module()
    module.weight = weight
    start = weight.detach().clone()
    training = Training(lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), eps=1e-8)
    optimizer = build_optimizer(module, training)
    gradient = torch.randn_like(weight)
    weight.grad = gradient.clone()
    optimizer.step()
    # First step: the bias-corrected moments are the gradient and its square.
    expected = start * (1 - 0.1 * 0.5) - 0.1 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_is_skipped_where_the_flag_says_so_and_bitwise_the_plain_one_elsewhere(dtype):
    def run(*flags):
        torch.manual_seed(0)
        model = _model().to(dtype)
        optimizer = build_optimizer(model, Training(lr=0.1))
        for step, flag in enumerate(flags):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            step_unless(optimizer, flag)
        slots = [v for p in model.parameters() for v in optimizer.state[p].values()]
        return [*model.parameters(), *slots]

    no, yes = torch.tensor(False), torch.tensor(True)
    plain = run(None, None)
    for other in (run(no, no), run(no, no, yes)):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
