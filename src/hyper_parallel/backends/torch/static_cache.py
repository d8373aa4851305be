"""Generation steps of fixed shape: a prompt step that fills a KV cache of fixed length, a decode step that extends it.

Both are pure functions of their inputs and the cache's tensors: no Python counter decides anything, so a step can be
recorded once and run at every position. The prompt step attends to its own keys, as with a growing cache. The decode
step attends to the full cache under a mask that is an input.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StaticCache
from transformers.cache_utils import StaticLayer

from hyper_parallel.backends.torch.forward_variants import cache_argument, ungrouped_experts
from hyper_parallel.backends.torch.parallel_handle import known_properties
from hyper_parallel.errors import NoLoss

_PLAIN = {"full_attention", "sliding_attention"}


class FixedLayer(StaticLayer):
    """Keys and values of one layer, [B, H, N, K] each.

    While `position` is None a prompt is written from slot 0 on; else one token is written to slot `position` [1].
    """

    # Lets transformers omit the mask of a prompt, as with a growing cache.
    is_compileable = False
    _layer_type = None

    def __init__(self, length: int) -> None:
        super().__init__(max_cache_len=length)
        del self.cumulative_length
        self.position: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values of the full length, shaped like the first ones."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            like.new_zeros(*like.shape[:2], self.max_cache_len, like.shape[-1])
            for like in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values at the current position and return the whole cache."""
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
        """Return the number of keys that a mask covers, and their offset."""
        return (query_length if self.position is None else self.max_cache_len), 0

    def get_seq_length(self) -> int:
        """Return 0: masks are built from positions, not from the length of the cache."""
        return 0


def why_no_own_cache(model: Any) -> str | None:
    """Return why a model cannot use a cache and masks of this package, or None."""
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
        return "decoding with it was measured to differ from a pass over the full text"
    return None


def why_no_static_cache(model: Any) -> str | None:
    """Return why a model's generation steps cannot have fixed shapes, or None."""
    if why := why_no_own_cache(model):
        return why
    if why := ungrouped_experts(model, model.dtype):
        return f"experts run one by one, each on a number of rows that depends on the data: {why}"
    return None


def new_cache(model: Any, length: int) -> Any:
    """Return a cache of `length` slots; the first step allocates its tensors."""
    layers = StaticCache(config=model.config, max_cache_len=length).layers
    return Cache(layers=[FixedLayer(length) for _ in layers])


def cache_tensors(cache: Any) -> dict[str, Tensor]:
    """Return keys and values by name, in layer order; a layer that shares those of another layer has none."""
    return {
        f"cache.{index}.{name}": getattr(layer, name)
        for index, layer in enumerate(cache.layers)
        if layer.is_initialized
        for name in ("keys", "values")
    }


def bind_cache(cache: Any, tensors: dict[str, Tensor]) -> None:
    """Replace the tensors of a cache by `tensors`, named as in `cache_tensors`."""
    for index, layer in enumerate(cache.layers):
        keys, values = (tensors.get(f"cache.{index}.{name}") for name in ("keys", "values"))
        if keys is not None:
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values


def prompt_inputs(model: Any, ids: list[int]) -> dict[str, Tensor]:
    """Return the inputs of the prompt step: token ids and positions [1, S]."""
    tokens = torch.tensor([ids], device=model.device)
    return {"input_ids": tokens, "position_ids": torch.arange(len(ids)).to(tokens).unsqueeze(0)}


def decode_inputs(model: Any, token: int, position: int, length: int) -> dict[str, Tensor]:
    """Return the inputs of the decode step: one token, its position, and the mask [1, 1, 1, N] per kind of layer."""
    positions = torch.tensor([[position]], device=model.device)
    return {
        "input_ids": torch.tensor([[token]], device=model.device),
        "position_ids": positions,
        **masks(model, positions, length, model.dtype),
    }


def masks(model: Any, positions: Tensor, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the mask [B, 1, S, N] per kind of layer for queries at positions [B, S] and N = `length` cache slots.

    A slot holds the key of one position. Masks are boolean for torch's attention; for eager attention of the model they
    are summands of `dtype`.
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
    """Return the `attention_mask` argument of a model: masks by kind of layer, one mask for all layers, or None."""
    by_kind = {k.removeprefix("mask."): v for k, v in inputs.items() if k.startswith("mask.")}
    if by_kind and not getattr(model.config.get_text_config(decoder=True), "layer_types", None):
        (mask,) = by_kind.values()
        return mask
    return by_kind or None


def run_step(model: Any, cache: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Run a decode step if the inputs have masks, else a prompt step; return the logits [V] after the last token."""
    mask = mask_argument(model, inputs)
    position = None if mask is None else inputs["position_ids"][0]
    for layer in cache.layers:
        layer.position = position
    with torch.no_grad():
        # Only the last position is needed: [1, 1, V] instead of [1, S, V].
        out = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(model.forward): cache},
        )
    logits: Tensor = out.logits[0, -1]
    return logits


@dataclass(frozen=True)
class TextSteps:
    """Prompt and decode step of one text.

    Attributes:
        prompt_tokens: Number of tokens of the prompt.
        length: Number of cache slots, for prompt and continuation.
    """

    prompt_tokens: int
    length: int

    def new_cache(self, model: Any) -> Any:
        """Return a cache; see `new_cache`."""
        return new_cache(model, self.length)

    def example(self, model: Any, *, prompt: bool) -> dict[str, Tensor]:
        """Return inputs of a step with its shapes."""
        if prompt:
            return prompt_inputs(model, [0] * self.prompt_tokens)
        return decode_inputs(model, 0, 0, self.length)

    def run(self, model: Any, cache: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Run a step; see `run_step`."""
        return run_step(model, cache, inputs)


class StaticSteps:
    """Prompt and decode steps with a cache of `length` slots, for prompt and continuation."""

    def __init__(self, model: Any, length: int) -> None:
        self.model, self.length, self.position = model, length, 0
        self.cache = new_cache(model, length)

    def prompt(self, ids: list[int]) -> Tensor:
        """Return the logits [V] after the prompt."""
        self.position = len(ids)
        return run_step(self.model, self.cache, prompt_inputs(self.model, ids))

    def next(self, token: int) -> Tensor:
        """Return the logits [V] after one more token."""
        inputs = decode_inputs(self.model, token, self.position, self.length)
        self.position += 1
        return run_step(self.model, self.cache, inputs)


class GrowingSteps:
    """Prompt and decode steps of any model, with a cache that grows with the text.

    The model returns the state for its next step (keys and values, or a recurrent state) under the name of the
    argument of its forward. Without such a state, or if cached steps were measured to differ from a pass over the full
    text, every step recomputes the full text.

    Args:
        model: Model of texts, or of texts with media.
        media: Arrays of the images and recordings of the prompt, by their names in the model's forward. With media, the
            model derives positions itself.
        per_token: Names of the arrays with one number for each token.
    """

    def __init__(
        self, model: Any, media: Mapping[str, Any] | None = None, per_token: Collection[str] = ()
    ) -> None:
        self.model, self._per_token = model, per_token
        self._media = {name: _on_device(array, model) for name, array in (media or {}).items()}
        properties = known_properties(model)
        self._caches = properties is None or properties.growing_cache.agrees
        self._parameters = inspect.signature(model.forward).parameters
        self._text: list[int] = []
        self._memory: dict[str, Any] = {}

    def prompt(self, ids: list[int]) -> Tensor:
        """Return the logits [V] after the prompt."""
        self._text, self._memory = [], {}
        return self._step(ids)

    def next(self, token: int) -> Tensor:
        """Return the logits [V] after one more token."""
        return self._step([token])

    def _step(self, ids: list[int]) -> Tensor:
        self._text += ids
        read = ids if self._memory else self._text
        kwargs: dict[str, Any] = {"logits_to_keep": 1}
        if self._media:
            kwargs |= {} if self._memory else self._padded_media()
        elif self._caches:
            # A model may derive positions from the cache of its first layer; a recurrent layer has no length.
            positions = torch.arange(len(self._text) - len(read), len(self._text))
            kwargs["position_ids"] = positions.to(self.model.device).unsqueeze(0)
        with torch.no_grad():
            out = self.model(
                input_ids=torch.tensor([read], device=self.model.device),
                use_cache=self._caches,
                **{name: value for name, value in kwargs.items() if name in self._parameters},
                **self._memory,
            )
        if self._caches:
            self._memory = {name: out[name] for name in out if name in self._parameters}
            if self._media:  # of the prompt alone
                self._memory.pop("attention_mask", None)
        if out.logits.shape[1] not in (1, len(read)):  # block diffusion: a canvas, not the text
            raise NoLoss(
                "the model returns logits of other positions than those of its tokens",
                where=type(self.model).__name__,
                got=f"{out.logits.shape[1]} positions for {len(read)} tokens",
                allowed="models that predict the next token of each token of a text",
            )
        logits: Tensor = out.logits[0, -1]
        return logits

    def _padded_media(self) -> dict[str, Tensor]:
        """Return the arrays of the media; those with one number for each token are padded to the length of the text."""
        size = len(self._text)
        # Some models derive the positions of a prompt only with a mask.
        found = {"attention_mask": torch.ones(1, size, dtype=torch.long, device=self.model.device)}
        for name, array in self._media.items():
            missing = size - array.shape[-1] if name in self._per_token else 0
            found[name] = torch.nn.functional.pad(array, (0, missing)) if missing else array
        return found


def _on_device(array: Any, model: Any) -> Tensor:
    tensor = torch.from_numpy(array).to(model.device)
    return tensor.to(model.dtype) if tensor.is_floating_point() else tensor
