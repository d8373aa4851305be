"""Recomputed layers with matrix products on the host: gradients of plain recomputation, each product computed once."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.backends.torch.forward_variants import recompute
from hyper_parallel.backends.torch.host_saved_activations import save_activations_on_host
from hyper_parallel.backends.torch.pass_context import RunningPass

pytestmark = pytest.mark.unit

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func in PRODUCTS
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """Attention and an MLP that changes what its product gave in place, with dropout before and after."""

    def __init__(self, attention_dropout):
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 32), nn.Linear(32, 16)
        self.attention_dropout = attention_dropout

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout)
        x = x + F.dropout(a.transpose(1, 2).reshape(2, 5, 16), 0.3)
        return x + F.dropout(self.down(self.up(x).mul_(0.5).relu_()), 0.3)


def gradients(kind, attention_dropout=0.0, inputs=True):
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer(attention_dropout) for _ in range(3)))
    if kind != "plain":
        for layer in layers:
            recompute(layer, None, False, RunningPass())
    if kind == "swap":
        save_activations_on_host(list(layers), inputs)
    x = torch.randn(2, 5, 16, requires_grad=True)
    with Count() as count:
        layers(x).square().sum().backward()
    return [x.grad, *(p.grad for p in layers.parameters())], count.products


@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
@pytest.mark.parametrize("inputs", [True, False])
def test_gradients_are_bitwise_those_without_and_no_product_runs_twice(attention_dropout, inputs):
    wanted, plain = gradients("plain", attention_dropout)
    again, twice = gradients("recompute", attention_dropout)
    found, once = gradients("swap", attention_dropout, inputs)
    for a, b, c in zip(wanted, again, found, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert once == plain < twice


def test_what_waits_is_a_copy_of_its_own(monkeypatch):
    """Products and inputs are released on the device as soon as the layer is done with them."""
    import hyper_parallel.backends.torch.host_saved_activations as swap

    copied = []
    real = swap._to_host
    monkeypatch.setattr(swap, "_to_host", lambda t: copied.append((t, real(t))) or copied[-1][1])
    gradients("swap")
    assert {tuple(t.shape) for t, _ in copied} >= {(10, 48), (10, 32), (10, 16), (2, 5, 16)}
    assert all(t.untyped_storage().data_ptr() != c.tensor.untyped_storage().data_ptr() for t, c in copied)


def test_evaluation_keeps_nothing():
    layer = Layer(0.0)
    recompute(layer, None, False, RunningPass())
    save_activations_on_host([layer])
    with torch.no_grad():
        found = layer.eval()(torch.ones(2, 5, 16))
    assert not found.requires_grad
