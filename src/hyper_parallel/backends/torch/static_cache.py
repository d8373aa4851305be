"""KV cache of fixed length, and the masks with which attention reads it.

A decode step with such a cache is a pure function of its inputs and of the cache's tensors. It does not depend on a
Python counter, so it can be recorded once and run at every position.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from hyper_parallel.backends.torch.forward_variants import ungrouped_experts
from hyper_parallel.backends.torch.parallel_handle import known_properties

_PLAIN = {"full_attention", "sliding_attention"}


class FixedLayer(StaticLayer):
    """Cache of one layer with room for N tokens: keys and values [B, H, N, K].

    `position` is the index of the single token to write, a tensor [1]; None: write a prompt from index 0 on.
    """

    # With False, transformers omits the mask of a prompt, as with a growing cache.
    is_compileable = False
    _layer_type = None

    def __init__(self, length: int) -> None:
        super().__init__(max_cache_len=length)
        del self.cumulative_length
        self.position: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values for N tokens; other sizes, dtype and device are those of the arguments."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            like.new_zeros(*like.shape[:2], self.max_cache_len, like.shape[-1]) for like in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values at `position`; return the keys and values that attention reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.position is None:
            count = key_states.shape[-2]
            self.keys[:, :, :count].copy_(key_states)
            self.values[:, :, :count].copy_(value_states)
            return key_states, value_states
        self.keys.index_copy_(2, self.position, key_states)
        self.values.index_copy_(2, self.position, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that an attention mask covers, and the offset 0 of the first key."""
        return (query_length if self.position is None else self.max_cache_len), 0

    def get_seq_length(self) -> int:
        """Return 0: masks are built from positions, not from the length of the cache."""
        return 0


def why_no_own_cache(model: Any) -> str | None:
    """Return the reason why a model cannot use a `FixedLayer` cache with the masks of `masks`; None if it can."""
    config = model.config.get_text_config(decoder=True)
    unsupported = set(getattr(config, "layer_types", None) or ()) - _PLAIN
    if unsupported:
        return f"layers of kind {', '.join(sorted(unsupported))}"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "attention in chunks"
    if not getattr(model, "_can_compile_fullgraph", False):
        return "transformers has no cache of fixed length for it"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "its forward takes no position_ids"
    if model.config._attn_implementation not in ("sdpa", "eager"):
        return f"attention implementation {model.config._attn_implementation}"
    properties = known_properties(model)
    if properties is not None and not properties.fixed_cache.agrees:
        return "in a measurement, decoding with a cache of fixed length differed from a pass over the full text"
    return None


def why_no_static_cache(model: Any) -> str | None:
    """Return the reason why a model's decode steps cannot have fixed shapes; None if they can."""
    why = why_no_own_cache(model)
    if why is None and (ungrouped := ungrouped_experts(model, model.dtype)):
        why = f"experts run one by one, each on a number of rows that depends on the data: {ungrouped}"
    return why


def cache_tensors(cache: Any) -> dict[str, Tensor]:
    """Return the key and value tensors of the allocated layers of a cache, by name."""
    return {
        f"cache.{index}.{name}": getattr(layer, name)
        for index, layer in enumerate(cache.layers)
        if layer.is_initialized
        for name in ("keys", "values")
    }


def bind_cache(cache: Any, tensors: dict[str, Tensor]) -> None:
    """Replace tensors of a cache by `tensors`, named as in `cache_tensors`; layers without an entry do not change."""
    for index, layer in enumerate(cache.layers):
        keys, values = (tensors.get(f"cache.{index}.{name}") for name in ("keys", "values"))
        if keys is not None:
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values


def masks(model: Any, positions: Tensor, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return attention masks [B, 1, S, N] for N = `length` cached keys, by name: `mask.` and the kind of layer.

    The queries are at `positions` [B, S], and the key of position p has index p. Masks for `sdpa` are boolean, True
    where a query may attend to a key. Masks for eager attention are additive, of `dtype`. Call it only for a model for
    which `why_no_own_cache` returns None.
    """
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    slots, queries = torch.arange(length, device=positions.device), positions[:, None, :, None]
    visible = slots <= queries
    near = visible if window is None else visible & (slots > queries - window)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:  # one mask for all layers
        kinds = {"sliding_attention" if window is not None else "full_attention"}
    chosen = {"full_attention": visible, "sliding_attention": near}
    if model.config._attn_implementation != "sdpa":
        zero = torch.zeros((), dtype=dtype, device=positions.device)
        lowest = torch.finfo(dtype).min
        chosen = {kind: torch.where(mask, zero, lowest) for kind, mask in chosen.items()}
    return {f"mask.{kind}": chosen[kind] for kind in sorted(kinds)}


def mask_argument(model: Any, inputs: dict[str, Tensor]) -> Any:
    """Return a model's `attention_mask` from the result of `masks`: a dict by kind of layer, one mask, or None."""
    by_kind = {k.removeprefix("mask."): v for k, v in inputs.items() if k.startswith("mask.")}
    if by_kind and not getattr(model.config.get_text_config(decoder=True), "layer_types", None):
        (mask,) = by_kind.values()
        return mask
    return by_kind or None
