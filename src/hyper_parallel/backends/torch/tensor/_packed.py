"""Tensor parallelism of what is no plain projection: packed ones, and norms over all heads together.

A packed projection whose parts are cut apart needs nothing: a rank holds the rows it works on. When they are not, its
rows are equal slices and the columns of its output change hands in one all-to-all, forward and backward.

A norm over all heads needs the sum of squares of all of them: one number per token is added over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from hyper_parallel.backends.torch._collectives import all_to_all, paired, sum_both
from hyper_parallel.backends.torch.tensor._gradients import to_local
from hyper_parallel.backends.torch.tensor._state import TpState
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Part, Purpose, exchanged, gate_up_parts, qkv_parts


class LocalHeads:
    """A model's config as one rank's attention sees it: the heads of the rank, everything else unchanged."""

    def __init__(self, config: Any, num_heads: int, num_kv_heads: int) -> None:
        self.__dict__.update(
            _config=config, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_config"], name)


def exchange_packed(
    module: nn.Module, parent: nn.Module, style: str, config: Any, state: TpState
) -> None:
    """Let a packed projection, whose forward already uses local parameters, return what this rank works on.

    `parent` takes its output apart; `style` is qkv or gate_up.
    """
    if style == "gate_up":
        parts = gate_up_parts(module.out_features)
    else:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        parts = qkv_parts(heads, kv_heads, module.out_features // (heads + 2 * kv_heads))
        own = heads // state.degree
        own_kv = max(1, kv_heads // state.degree)
        # Models take the output apart by numbers of heads, theirs or those of their config.
        parent.config = LocalHeads(config, own, own_kv)
        for name, value in (
            ("num_heads", own),
            ("num_attention_heads", own),
            ("num_key_value_heads", own_kv),
            ("num_key_value_groups", own // own_kv),
        ):
            if hasattr(parent, name):
                setattr(parent, name, value)
    if hasattr(module.weight.placements[0], "split_factor"):
        return
    inner, group = module.forward, state.group

    def forward(x: Tensor) -> Tensor:
        return exchange_columns(inner(x), parts, group)

    module.forward = forward


def norm_heads(module: nn.Module, name: str, rows: slice | None, state: TpState) -> None:
    """Let an RMSNorm over all heads work on this rank's heads.

    `rows` of its scale are those of this rank's heads; None: the scale is split. Another kind of norm is refused.
    """
    eps = _rms_norm_eps(module, name)
    group, degree = state.group, state.degree

    def forward(x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        # Ranks that work on one key head each count it: every head is counted equally often.
        total = sum_both(wide.pow(2).sum(-1, keepdim=True), group, Purpose.NORMS_OVER_HEADS)
        out = wide * torch.rsqrt(total / (x.shape[-1] * degree) + eps)
        weight = to_local(module.weight, state.gradients)
        weight = weight if rows is None else weight[rows]
        return (weight * out).to(x.dtype)

    module.forward = forward


def _rms_norm_eps(module: nn.Module, name: str) -> float:
    """The epsilon of a module that is seen to compute an RMSNorm with a scale."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    size = module.weight.shape[0]
    x = torch.linspace(-1.0, 2.0, size, dtype=torch.float32).unsqueeze(0)
    scale = torch.linspace(0.5, 1.5, size, dtype=torch.float32)
    only_weight = [n for n, _ in module.named_parameters()] == ["weight"]
    if isinstance(eps, float) and only_weight:
        got = functional_call(module, {"weight": scale}, (x,))
        wanted = scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        if got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-4, atol=1e-5):
            return eps
    raise UnsupportedSharding(
        "a norm over all heads is split over ranks only when it is an RMSNorm with a scale",
        where=name,
        got=type(module).__name__,
    )


def exchange_columns(out: Tensor, parts: tuple[Part, ...], group: dist.ProcessGroup) -> Tensor:
    """From equal slices [..., all columns / ranks] of a packed projection's columns to those each rank works on."""
    degree, rank, width = group.size(), group.rank(), out.shape[-1]
    sent = [exchanged(parts, degree, rank, t) for t in range(degree)]
    taken = [exchanged(parts, degree, s, rank) for s in range(degree)]
    sent_sizes = [sum(b - a for a, b in runs) for runs in sent]
    taken_sizes = [sum(b - a for a, b in runs) for runs in taken]
    rows = [torch.arange(a, b) - rank * width for runs in sent for a, b in runs]
    index = torch.cat(rows).to(out.device)

    def move(rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        into = rows.new_empty(sum(taken), rows.shape[1])
        return all_to_all(into, rows, group, Purpose.PACKED_COLUMNS, taken, sent)

    def forward(x: Tensor) -> Tensor:
        columns = x.reshape(-1, width).t()
        # What comes from ranks in order is in the order of the rows, and so are the parts.
        mine = move(columns.index_select(0, index), sent_sizes, taken_sizes)
        return mine.t().reshape(*x.shape[:-1], -1).contiguous()

    def backward(grad: Tensor) -> Tensor:
        columns = grad.reshape(-1, grad.shape[-1]).t().contiguous()
        back = move(columns, taken_sizes, sent_sizes)
        # A key head that several ranks work on gets the gradients of all.
        total = grad.new_zeros(width, columns.shape[1]).index_add_(0, index, back)
        return total.t().reshape(*grad.shape[:-1], width).contiguous()

    return paired(forward, backward, out)
