"""Attention in which each tp_y rank has the queries of one span: an interval of positions of every sequence.

The attention module runs unmodified on [B, span, ...], with the positions and mask rows of its span. The attention
interface of transformers calls `_attend`, which gathers keys and values over tp_y and calls the attention
implementation of the model.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.tensor.collectives import gather
from hyper_parallel.backends.torch.tensor.state import TpState, Y
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose

_INTERFACE = "hyper_parallel_spans"
_ATTRIBUTE = "_hyper_parallel_spans"


@dataclass(slots=True)
class SpanAttention:
    """Attention of one module with the queries of this rank's span, an interval of positions of every sequence.

    Attributes:
        state: State of tensor parallelism.
        inner: Name of the model's attention implementation in transformers.
    """

    state: TpState
    inner: str

    @classmethod
    def attach(cls, attention: nn.Module, state: TpState, name: str) -> SpanAttention:
        """Make an attention module use span attention; `name` is its path, for errors.

        Raises:
            UnsupportedSharding: HP205 for an attention implementation other than sdpa and eager.
        """
        from transformers import AttentionInterface

        config = attention.config
        inner = config._attn_implementation
        if inner not in ("sdpa", "eager"):
            raise UnsupportedSharding(
                "attention with tokens sharded over tp_y needs an implementation that accepts a query-by-key mask",
                where="parallel.attention_shape",
                got=f"{name}: {inner}",
                allowed="sdpa, eager",
                changes={"parallel.attention_shape": "2d", "parallel.attention_scatter": "head"},
            )
        AttentionInterface.register(_INTERFACE, _attend)
        # The config is copied, because other modules and the mask builder keep the model's implementation.
        module_config = copy.copy(config)
        module_config._attn_implementation_internal = _INTERFACE
        attention.config = module_config
        spans = cls(state, inner)
        object.__setattr__(attention, _ATTRIBUTE, spans)
        return spans

    def cut(self, kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Return an attention module's keyword arguments with the positions and mask rows of this span.

        Without a mask, a causal one is added. A cache of keys and values is refused with HP205.
        """
        caches = [n for n in ("past_key_values", "cache") if kwargs.get(n) is not None]
        if caches:
            raise UnsupportedSharding(
                "attention with tokens sharded over tp_y cannot cache keys and values for generation",
                got=caches[0],
                allowed="attention_shape 1d, or 2d with attention_scatter head",
                hint="use_cache=False",
            )
        grid = self.state.grid
        length = grid.batch[1]
        first = self.state.groups[Y].rank() * grid.span
        # Rows after the end of the sequence repeat the last position; they are dropped after attention.
        rows = torch.arange(first, first + grid.span, device=device).clamp_(max=length - 1)
        out = dict(kwargs)
        if out.get("position_embeddings") is not None:
            out["position_embeddings"] = tuple(t.index_select(1, rows) for t in out["position_embeddings"])
        if out.get("position_ids") is not None:
            out["position_ids"] = out["position_ids"].index_select(1, rows)
        mask = out.get("attention_mask")
        if mask is None:
            columns = torch.arange(length, device=device)
            out["attention_mask"] = (columns <= rows.unsqueeze(1)).view(1, 1, -1, length)
        else:
            out["attention_mask"] = mask.index_select(2, rows)
        return out

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the keys and values of all spans; return (keys, values) of full sequences, each [B, H, S, K]."""
        widths = (key.shape[-1], value.shape[-1])
        joined = torch.cat((key, value), dim=-1).transpose(1, 2)  # B, span, H, K
        batch, span, heads, _ = joined.shape
        flat = joined.reshape(1, batch * span, -1)
        spans = gather(flat, 1, self.state.groups[Y], Purpose.KEY_VALUE_GATHER)
        whole = self.state.grid.from_spans(spans)
        joined = whole.reshape(batch, -1, heads, sum(widths)).transpose(1, 2)
        return joined.split(widths, dim=-1)  # type: ignore[no-any-return]


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """Gather keys and values, then run the model's attention; registered in transformers' attention interface."""
    from transformers import AttentionInterface

    spans: SpanAttention = getattr(module, _ATTRIBUTE)
    key, value = spans.gather(key, value)
    if spans.inner == "eager":  # each model's file in transformers defines this function
        inner = sys.modules[type(module).__module__].eager_attention_forward
    else:
        inner = AttentionInterface()[spans.inner]
    return inner(module, query, key, value, mask, **kwargs)
