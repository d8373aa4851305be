"""Blocks of attention on fused kernels that return their lse: torch's own flash attention, on CPU and CUDA.

A block fits when every query sees every key or the block lies on the diagonal, and its format is one the kernels take;
every other block is left to `_block_attention`. The backward kernel gets the output and the lse of the whole row
instead of the block's own, which makes its probabilities those of the whole softmax.

Source: Dao 2023, FlashAttention-2; Liu et al. 2023, Ring Attention, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyper_parallel.backends.torch.context._block_attention import AttentionRules, wide
from hyper_parallel.ir import Interval

_FORMATS = {
    "cuda": (torch.bfloat16, torch.float16),
    "cpu": (torch.bfloat16, torch.float16, torch.float32),
}
_LARGEST_HEAD = 256


def usable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Interval,
    keys: Interval,
    rules: AttentionRules,
    seen: bool,
) -> bool:
    """Whether the fused kernel computes this block."""
    plain = rules.window is None and rules.documents is None
    width = q.shape[3]
    return (
        q.dtype in _FORMATS.get(q.device.type, ())
        and (seen or (queries == keys and plain))
        and rules.softcap is None
        and width == v.shape[3]
        and width <= _LARGEST_HEAD
        and width % 8 == 0
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, causal: bool
) -> tuple[Tensor, Tensor]:
    """As `_block_attention.forward`."""
    ops, scale = torch.ops.aten, rules.scale
    if q.device.type == "cpu":
        k, v = _same_heads(q, k, v)
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    else:
        out, lse, *_ = ops._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    return out.to(wide(q.dtype)), lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rules: AttentionRules,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_block_attention.backward`, with the output of the whole row, [B, H, queries, Dv]."""
    ops, scale, groups = torch.ops.aten, rules.scale, k.shape[1]
    exact = wide(q.dtype)
    lse = lse.contiguous()  # kernels read it without its strides
    if q.device.type == "cpu":
        dq, dk, dv = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, *_same_heads(q, k, v), out, lse, 0.0, causal, scale=scale
        )
        if dk.shape[1] != groups:
            dk, dv = (x.unflatten(1, (groups, -1)).to(exact).sum(2) for x in (dk, dv))
    else:
        none = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
        dq, dk, dv = ops._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none,
            scale=scale,
        )  # fmt: skip
    return dq.to(exact), dk.to(exact), dv.to(exact)


def _same_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
