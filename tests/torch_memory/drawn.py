"""Parts of drawn training programs: modules that map [B, S, D] to the same shape, and optimizers."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as f
from torch.nn.utils import parametrizations

B, S, D, V = 4, 8, 16, 24
COUNT = {"passes": 0}


class Held(nn.Module):
    """A function of a module that holds layers, buffers and plain values."""

    def __init__(self, run, **held):
        super().__init__()
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


class Residual(nn.Module):
    """Adds what its parts give."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        h = x
        for part in self.parts:
            h = part(h)
        return x + h


class Cubed(torch.autograd.Function):
    """A gradient that is written by hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


def turned(layer):
    """A layer over the sequence instead of the features."""
    return Held(lambda m, x: m.layer(x.transpose(1, 2)).transpose(1, 2), layer=layer)


def attention(m, x):
    q, k, v = m.qkv(x).view(B, S, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
    h = f.scaled_dot_product_attention(q, k, v, is_causal=m.causal, dropout_p=m.p * m.training)
    return m.out(h.transpose(1, 2).reshape(B, S, D))


def cell(m, x):
    state, outs = None, []
    for at in range(2):
        state = m.cell(x[:, at], state)
        outs.append(state[0] if isinstance(state, tuple) else state)
    return torch.cat([torch.stack(outs, 1), x[:, 2:]], 1)


def counted(m, x):
    m.passes += 1
    return x * (1 + m.passes)


def counted_aside(m, x):
    m.passes += 1
    return x * 1.5


def counted_outside(m, x):
    COUNT["passes"] += 1
    return x / COUNT["passes"]


def counted_in_a_buffer(m, x):
    m.seen += 1
    return x * m.seen.rsqrt()


def kept(m, x):
    m.last = x.detach()
    return x


def used_again(m, x):
    last, m.last = m.last, x.detach().clone()
    return x if last is None else x + last


def moving_mean(m, x):
    m.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    return x - m.mean


def replaced_mean(m, x):
    m.mean = 0.9 * m.mean + x.detach().mean((0, 1))
    return x - m.mean


def weight_in_place(m, x):
    with torch.no_grad():
        m.layer.weight.clamp_(-0.2, 0.2)
    return m.layer(x)


def halves_in_place(m, x):
    h = x.clone()
    h[:, ::2].mul_(2.0)
    h[..., 0] = 1.0
    return h


def through_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.layer(x).float()


def experts(m, x):
    flat = x.reshape(-1, D)
    best = m.router(flat).softmax(-1).max(-1)
    out = torch.zeros_like(flat)
    for i, expert in enumerate((m.first, m.second)):
        rows = (best.indices == i).nonzero().flatten()
        out = out.index_add(0, rows, expert(flat[rows]) * best.values[rows, None])
    return out.view_as(x)


def linear(**kw):
    return nn.Linear(D, D, **kw)


def simple(run, **held):
    return lambda: Held(run, **{k: v() if callable(v) else v for k, v in held.items()})


LAYERS = {
    "linear": linear,
    "wide": lambda: nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D, bias=False)),
    "conv1d": lambda: turned(nn.Conv1d(D, D, 3, padding=1)),
    "depthwise": lambda: turned(nn.Conv1d(D, D, 3, padding=2, dilation=2, groups=D)),
    "conv2d": simple(lambda m, x: m.layer(x[:, None]).mean(1), layer=lambda: nn.Conv2d(1, 3, 3, padding=1)),
    "layer norm": lambda: nn.LayerNorm(D),
    "rms norm": lambda: nn.RMSNorm(D),
    "group norm": lambda: turned(nn.GroupNorm(4, D)),
    "batch norm": lambda: turned(nn.BatchNorm1d(D)),
    "instance norm": lambda: turned(nn.InstanceNorm1d(D, affine=True, track_running_stats=True)),
    "attention": simple(attention, qkv=lambda: nn.Linear(D, 3 * D), out=linear, causal=True, p=0.0),
    "attention with dropout": simple(attention, qkv=lambda: nn.Linear(D, 3 * D), out=linear, causal=False, p=0.2),
    "multihead": simple(
        lambda m, x: m.layer(x, x, x)[0],
        layer=lambda: nn.MultiheadAttention(D, 4, 0.1, batch_first=True),
    ),
    "encoder": lambda: nn.TransformerEncoderLayer(D, 2, 2 * D, 0.1, batch_first=True),
    "gru cell": simple(cell, cell=lambda: nn.GRUCell(D, D)),
    "lstm cell": simple(cell, cell=lambda: nn.LSTMCell(D, D)),
    "lstm": simple(lambda m, x: m.layer(x)[0], layer=lambda: nn.LSTM(D, D, batch_first=True)),
    "gru": simple(
        lambda m, x: torch.cat([m.layer(x[:, :2])[0], x[:, 2:]], 1),
        layer=lambda: nn.GRU(D, D, 2, batch_first=True),
    ),
    "frozen": lambda: linear().requires_grad_(False),
    "bilinear": simple(lambda m, x: m.layer(x, x.flip(1)), layer=lambda: nn.Bilinear(D, D, D)),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "prelu": lambda: nn.PReLU(D // 2 and S),
    "autocast": simple(through_autocast, layer=linear),
    "float64": simple(lambda m, x: m.layer(x.double()).float(), layer=lambda: linear().double()),
    "bfloat16": simple(lambda m, x: m.layer(x.bfloat16()).float(), layer=lambda: linear().bfloat16()),
    "weight in place": simple(weight_in_place, layer=linear),
    "unused": simple(lambda m, x: x * 2, layer=linear),
    "scale": simple(lambda m, x: x * m.scale, scale=lambda: nn.Parameter(torch.ones(()))),
    "experts": simple(experts, router=lambda: nn.Linear(D, 2), first=linear, second=linear),
    "bag": simple(
        lambda m, x: x + m.table(x.argsort(-1)[..., :4].reshape(-1, 4)).view_as(x),
        table=lambda: nn.EmbeddingBag(D, D, mode="sum"),
    ),
}
PLAIN = {
    "dropout": lambda: nn.Dropout(0.3),
    "alpha dropout": lambda: nn.AlphaDropout(0.1),
    "relu in place": simple(lambda m, x: f.relu(x + 0.1, inplace=True)),
    "silu": nn.SiLU,
    "softmax": lambda: nn.Softmax(-1),
    "glu": simple(lambda m, x: f.glu(torch.cat([x, x.flip(-1)], -1))),
    "softplus": nn.Softplus,
    "rrelu": nn.RReLU,
    "leaky in place": simple(lambda m, x: f.leaky_relu_(x * 1.0, 0.2)),
    "halves in place": simple(halves_in_place),
    "index put": simple(lambda m, x: x.index_put((torch.tensor([0, 2]),), torch.tensor(0.5))),
    "masked fill": simple(lambda m, x: x.masked_fill(x > 1, 0.0)),
    "masked select": simple(lambda m, x: x * x[x > 0].mean()),
    "transpose": simple(
        lambda m, x: x.transpose(1, 2).contiguous().view(B, S, D).roll(1, 0).flip(2)
    ),
    "strided": simple(lambda m, x: x.as_strided((B, S, D), (S * D, D, 1)) + x.unfold(1, 1, 1)[..., 0]),
    "expand": simple(lambda m, x: x + x.mean(1, keepdim=True).expand(B, S, D)),
    "chunks": simple(lambda m, x: torch.cat(x.chunk(2, -1)[::-1], -1)),
    "einsum": simple(lambda m, x: torch.einsum("bsd,btd->bst", x, x).softmax(-1) @ x),
    "topk": simple(lambda m, x: x + x.topk(3, -1).values.sum(-1, keepdim=True)),
    "sorted": simple(lambda m, x: x.sort(-1).values),
    "cumulated": simple(lambda m, x: x.cumsum(1) / math.sqrt(S)),
    "spectrum": simple(lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 1j, n=S, dim=1)),
    "noise": simple(lambda m, x: x + 0.1 * torch.randn_like(x)),
    "permuted": simple(lambda m, x: x[torch.randperm(B)]),
    "function": simple(lambda m, x: Cubed.apply(x.tanh())),
    "hook": simple(lambda m, x: (x * 1.0, x.requires_grad and x.register_hook(lambda g: g * 0.5))[0]),
    "checkpoint": simple(
        lambda m, x: torch.utils.checkpoint.checkpoint(m.layer, x, use_reentrant=False),
        layer=lambda: nn.Sequential(linear(), nn.Tanh(), linear()),
    ),
    "turned in place": simple(lambda m, x: x @ torch.mm(x[0].mT, x[1]).t_()),
    "squeezed in place": simple(lambda m, x: x + (x * 2).unsqueeze_(1).transpose_(1, 2).squeeze_(2)),
    "no grad": simple(lambda m, x: x + x.detach().abs().max()),
    "pooled": simple(lambda m, x: x + f.max_pool1d(x, 2).repeat_interleave(2, -1)),
    "interpolated": simple(lambda m, x: f.interpolate(x, scale_factor=2.0, mode="linear")[..., ::2]),
    "padded": simple(lambda m, x: f.pad(x, (1, 0, 2, 0), value=0.5)[:, 2:, :-1]),
    "normalized": simple(lambda m, x: f.normalize(x, dim=-1)),
    "solved": simple(lambda m, x: torch.linalg.solve(x.mT @ x + torch.eye(D), x.mT).mT),
}  # fmt: skip
ODD = {
    "branch": simple(lambda m, x: x * 2 if x.detach().sum().item() > 0 else x - 1),
    "branch on a bool": simple(lambda m, x: x if bool((x > 100).any()) else x.tanh()),
    "number": simple(lambda m, x: x / (1 + abs(float(x.detach().mean())))),
    "counter": simple(counted, passes=0),
    "counter aside": simple(counted_aside, passes=0),
    "counter outside": simple(counted_outside),
    "counter in a buffer": simple(counted_in_a_buffer, seen=lambda: torch.zeros(())),
    "moving mean": simple(moving_mean, mean=lambda: torch.zeros(D)),
    "replaced mean": simple(replaced_mean, mean=lambda: torch.zeros(D)),
    "kept": simple(kept, last=None),
    "used again": simple(used_again, last=None),
    "sparse table": simple(
        lambda m, x: x + m.table(x.detach().argmax(-1)), table=lambda: nn.Embedding(D, D, sparse=True)
    ),
}  # fmt: skip
OPTIMIZERS = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam fused amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, amsgrad=True),
    "adam fused decay": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, weight_decay=0.1, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd fused nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "nadam foreach": lambda p: torch.optim.NAdam(p, lr=1e-2, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-1),
    "adamax foreach": lambda p: torch.optim.Adamax(p, lr=1e-2, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=1e-2),
}
FUSED = [name for name in OPTIMIZERS if "fused" in name or name.startswith("sgd")]
