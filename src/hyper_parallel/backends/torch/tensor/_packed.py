"""Tensor parallelism of packed projections.

If every part is sharded separately, each rank holds exactly the rows it uses and no communication is needed. Otherwise
the weight is sharded into equal slices of all rows. One all-to-all then exchanges the output columns, in forward and
backward.
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
    """Proxy of a model config with the head counts of one rank; all other attributes are unchanged."""

    def __init__(self, config: Any, num_heads: int, num_kv_heads: int) -> None:
        self.__dict__.update(
            _config=config, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_config"], name)


def set_local_head_counts(attention: nn.Module, config: Any, degree: int) -> None:
    """Replace the head counts in an attention module's attributes and config by the counts of one rank."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    local_heads, local_kv_heads = heads // degree, max(1, kv_heads // degree)
    if hasattr(attention, "config"):
        attention.config = LocalHeads(config, local_heads, local_kv_heads)
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
        if hasattr(attention, name):
            setattr(attention, name, local_heads)
    for name in ("num_key_value_heads", "num_kv_heads"):
        if hasattr(attention, name):
            setattr(attention, name, local_kv_heads)
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = local_heads // local_kv_heads
    for name in ("all_head_size", "embed_dim"):  # width of the concatenated heads
        if hasattr(attention, name):
            setattr(attention, name, getattr(attention, name) // degree)


def exchange_packed(
    module: nn.Module, parent: nn.Module, style: str, config: Any, state: TpState
) -> None:
    """Wrap a packed projection so that it returns the output columns this rank uses.

    The projection's forward already uses local parameters.

    Args:
        module: The packed projection.
        parent: Module that splits the projection's output.
        style: qkv or gate_up.
        config: Text config of the model.
        state: State of tensor parallelism.
    """
    if style == "gate_up":
        parts = gate_up_parts(module.out_features)
    else:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        parts = qkv_parts(heads, kv_heads, module.out_features // (heads + 2 * kv_heads))
        # Models split the output by head counts, from module attributes or from the config.
        set_local_head_counts(parent, config, state.degree)
    if hasattr(module.weight.placements[0], "split_factor"):
        return
    inner, group = module.forward, state.group

    def forward(x: Tensor) -> Tensor:
        return exchange_columns(inner(x), parts, group)

    module.forward = forward


def exchange_columns(out: Tensor, parts: tuple[Part, ...], group: dist.ProcessGroup) -> Tensor:
    """Return the columns this rank uses, given equal slices [..., columns / ranks] of a packed projection's output."""
    degree, rank, width = group.size(), group.rank(), out.shape[-1]
    send_sizes = [exchanged_rows(parts, degree, rank, t) for t in range(degree)]
    receive_sizes = [exchanged_rows(parts, degree, s, rank) for s in range(degree)]
    runs = [run for t in range(degree) for run in exchanged(parts, degree, rank, t)]
    index = torch.cat([torch.arange(a, b) - rank * width for a, b in runs]).to(out.device)

    def exchange(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = rows.new_empty(sum(receive), rows.shape[1])
        return all_to_all(out, rows, group, Purpose.PACKED_COLUMNS, receive, send)

    def forward(x: Tensor) -> Tensor:
        columns = x.reshape(-1, width).t()
        # Columns received in rank order are in the order of the weight's rows, hence in the order of the parts.
        received = exchange(columns.index_select(0, index), send_sizes, receive_sizes)
        return received.t().reshape(*x.shape[:-1], -1).contiguous()

    def backward(grad: Tensor) -> Tensor:
        columns = grad.reshape(-1, grad.shape[-1]).t().contiguous()
        received = exchange(columns, receive_sizes, send_sizes)
        # The gradient of a key head shared by several ranks is the sum of their gradients.
        total = grad.new_zeros(width, columns.shape[1]).index_add_(0, index, received)
        return total.t().reshape(*grad.shape[:-1], width).contiguous()

    return paired(forward, backward, out)
