"""Mesh axes that shard each weight under one- or two-dimensional tensor parallelism.

A block is an attention or an MLP. `attention_shape` and `mlp_shape` select how a block uses the P = tp_x * tp_y ranks;
with tp_y = 1 the shape is 1d:

    shape    colwise [out, in]       rowwise [out, in]       activations between blocks
    1d       [out:tp_x.tp_y, in]     [out, in:tp_x.tp_y]     [T/P, D]
    2d       [out:tp_x, in:tp_y]     [out:tp_y, in:tp_x]     [T/tp_x, D/tp_y]
    weight   [out:tp_x.tp_y, in]     [out:tp_y, in:tp_x]     [T/P, D], weights gathered over y

T tokens, D hidden size, `:` precedes the axes that shard a dim. The residual stream is [T/tp_x, D/tp_y] under the
conditions of `shards_hidden_over_y`, else [T/P, D]. In the first case its norms are sharded over tp_y.

Sources: Xu et al. 2021 (GSPMD), section 3.2; Pope et al. 2022, sections 3.2.2 and 3.2.3 (2-D weight-stationary and
weight-gathered layouts).
"""

from __future__ import annotations

from hyper_parallel.ir import BlockShape, Purpose, Strategy
from hyper_parallel.shard._fit import Param
from hyper_parallel.shard._rules import COLUMN_STYLES
from hyper_parallel.shard._table import block_program

X, Y = "tp_x", "tp_y"
_REGION_STYLES = (*COLUMN_STYLES, "rowwise")

Axes = tuple[tuple[str, ...], ...]
"""Mesh axes that shard each dim of a parameter; () for a dim that is not sharded."""


def block_shape(param: Param, strategy: Strategy) -> BlockShape:
    """Return the shape (1d, 2d or weight) of the block to which a projection belongs."""
    if strategy.tp_y == 1:
        return "1d"
    return strategy.attention_shape if param.in_attention else strategy.mlp_shape


def shards_queries_by_token(strategy: Strategy) -> bool:
    """Return whether attention shards queries by token over y, and gathers keys and values over y."""
    return Purpose.KEY_VALUE_GATHER in block_program(strategy, 1, False)


def shards_hidden_over_y(params: list[Param], strategy: Strategy) -> bool:
    """Return whether the hidden dim of the residual stream is sharded over y.

    This requires a norm of the residual stream, and 2d blocks that contain all matrices except embedding and head.
    """
    if strategy.tp_y == 1 or {strategy.attention_shape, strategy.mlp_shape} != {"2d"}:
        return False
    ends = ("vocab", "head")
    layers = [p for p in params if len(p.shape) > 1 and ".layers." in f".{p.name}"]
    rest = [p for p in params if len(p.shape) > 1 and p.style not in ends and p not in layers]
    norms = any(_on_stream(p) for p in params)
    return norms and bool(layers) and not rest and all(p.style in _REGION_STYLES for p in layers)


def _on_stream(param: Param) -> bool:
    """Return whether the parameter is a vector outside attention and MLP, such as a norm of the residual stream."""
    inside = ("attn", "attention", "mlp")
    parent = param.parent.rpartition(".")[2]
    return len(param.shape) == 1 and not any(word in parent for word in inside)


def tensor_axes(param: Param, strategy: Strategy, hidden_cut: bool) -> Axes:
    """Return the tensor-parallel axes that shard each dim of a parameter with its final style."""
    whole: Axes = ((),) * len(param.shape)
    both = (X, Y) if strategy.tp_y > 1 else (X,)
    if param.style in ("vocab", "head", "norm_heads"):
        return (both, *whole[1:])
    if param.style not in _REGION_STYLES:
        cut = hidden_cut and param.style in (None, "replicate") and _on_stream(param)
        return ((Y,),) if cut else whole
    shape = block_shape(param, strategy)
    if len(param.shape) == 1:
        if param.style == "rowwise":
            return ((Y,),) if shape == "2d" else whole
        if param.style == "kv_replicate":
            return whole
        # A vector of the attention module itself, such as its sinks, is sharded like the heads.
        own = param.owner == param.name and not shards_queries_by_token(strategy)
        return (both,) if shape == "1d" or own else ((X,),)
    if param.style == "rowwise":
        return ((), both) if shape == "1d" else ((Y,), (X,))
    columns = (Y,) if shape == "2d" else ()
    if param.style == "kv_replicate":
        return ((Y,) if shape == "weight" else (), columns)
    return ((X,) if shape == "2d" else both, columns)
