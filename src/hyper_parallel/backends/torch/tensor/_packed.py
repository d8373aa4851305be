"""Tensor parallelism of packed projections.

One whose parts are cut apart needs nothing: a rank holds the rows it works on. When they are not, its rows are equal
slices and the columns of its output change hands in one all-to-all, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch.collectives import all_to_all, paired
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.ir import Part, Purpose, exchanged, exchanged_rows, gate_up_parts, qkv_parts


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


def show_local_heads(attention: nn.Module, config: Any, degree: int) -> None:
    """Let an attention module, which counts heads by attributes of its own or of its config, see those of a rank."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    own, own_kv = heads // degree, max(1, kv_heads // degree)
    if hasattr(attention, "config"):
        attention.config = LocalHeads(config, own, own_kv)
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
        if hasattr(attention, name):
            setattr(attention, name, own)
    for name in ("num_key_value_heads", "num_kv_heads"):
        if hasattr(attention, name):
            setattr(attention, name, own_kv)
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = own // own_kv
    for name in ("all_head_size", "embed_dim"):  # the width that heads are joined to
        if hasattr(attention, name):
            setattr(attention, name, getattr(attention, name) // degree)


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
        # Models take the output apart by numbers of heads, theirs or those of their config.
        show_local_heads(parent, config, state.degree)
    if hasattr(module.weight.placements[0], "split_factor"):
        return
    inner, group = module.forward, state.group

    def forward(x: Tensor) -> Tensor:
        return exchange_columns(inner(x), parts, group)

    module.forward = forward


def exchange_columns(out: Tensor, parts: tuple[Part, ...], group: dist.ProcessGroup) -> Tensor:
    """From equal slices [..., all columns / ranks] of a packed projection's columns to those each rank works on."""
    degree, rank, width = group.size(), group.rank(), out.shape[-1]
    sent = [exchanged_rows(parts, degree, rank, t) for t in range(degree)]
    taken = [exchanged_rows(parts, degree, s, rank) for s in range(degree)]
    runs = [run for t in range(degree) for run in exchanged(parts, degree, rank, t)]
    index = torch.cat([torch.arange(a, b) - rank * width for a, b in runs]).to(out.device)

    def move(rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        into = rows.new_empty(sum(taken), rows.shape[1])
        return all_to_all(into, rows, group, Purpose.PACKED_COLUMNS, taken, sent)

    def forward(x: Tensor) -> Tensor:
        columns = x.reshape(-1, width).t()
        # What comes from ranks in order is in the order of the rows, and so are the parts.
        mine = move(columns.index_select(0, index), sent, taken)
        return mine.t().reshape(*x.shape[:-1], -1).contiguous()

    def backward(grad: Tensor) -> Tensor:
        columns = grad.reshape(-1, grad.shape[-1]).t().contiguous()
        back = move(columns, taken, sent)
        # A key head that several ranks work on gets the gradients of all.
        total = grad.new_zeros(width, columns.shape[1]).index_add_(0, index, back)
        return total.t().reshape(*grad.shape[:-1], width).contiguous()

    return paired(forward, backward, out)
