"""Reduction of a model's config: fewer and narrower layers of the same architecture, for short runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hyper_parallel.trainer.small_sizes import (
    FAMILY_SIZES,
    HEADS,
    HIDDEN,
    LAYERS,
    SIZES,
    SPANS,
    VOCAB,
)

_DEPTH: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_WORDS: Final = re.compile(r"_token(_id|_index)?$|^vocab_size")
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")

TINY_PARAMETERS: Final = 600_000
"""Maximum parameters of a model with steps of milliseconds on one core."""
SMALL_PARAMETERS: Final = 4_000_000
"""Maximum parameters of a model with steps well below a second on one core."""

MAX_POSITIONS: Final = 64
"""Positions of a model of `small_configs`."""


def shrink_config(
    config: Mapping[str, Any],
    *,
    narrow: bool = True,
    keep_vocabulary: bool = False,
    unused: Iterator[int] | None = None,
) -> dict[str, Any]:
    """Return a config with at most `LAYERS` layers, covering every kind of layer, without dropout.

    Args:
        config: Values of a `config.json`, with parts (text, vision, audio) as inner mappings.
        narrow: Also reduce the width of layers to `SIZES`.
        keep_vocabulary: Keep the vocabulary and special tokens.
        unused: Token ids that no text has, for image and similar tokens.
    """
    unused = itertools.count(VOCAB - 18) if unused is None else unused
    depth = next((config[key] for key in _DEPTH if isinstance(config.get(key), int)), 0)
    layers = _select_layers(config, depth)
    result: dict[str, Any] = {}
    for key, value in config.items():
        result[key] = value
        if isinstance(value, Mapping) and depth > LAYERS and _by_layer(value):
            choices = {"narrow": narrow, "keep_vocabulary": keep_vocabulary, "unused": unused}
            result[key] = {
                str(position): shrink_config(value[i], **choices)
                for position, i in enumerate(map(str, layers))
                if i in value
            }
        elif isinstance(value, Mapping) and key.endswith("_config"):
            result[key] = shrink_config(
                value, narrow=narrow, keep_vocabulary=keep_vocabulary, unused=unused
            )
        elif isinstance(value, list) and depth > LAYERS and len(value) == depth:
            limit = SIZES.get(key) if narrow else None
            result[key] = [_clip(value[i], limit) for i in layers]
        elif key in _POSITIONS or (_WORDS.search(key) and keep_vocabulary):
            continue
        elif _WORDS.search(key) and isinstance(value, int) and value > 2 and key not in SIZES:
            result[key] = next(unused)
        elif key in SIZES and (narrow or key in _DEPTH or isinstance(SIZES[key], float)):
            result[key] = _clip(value, SIZES[key])
    if narrow:
        _adjust_dependent_sizes(config, result)
    return result


def small_configs(config: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield small configs of the same architecture, the preferred one first.

    Token spans (windows, chunks, blocks) are reduced to a few tokens in all of them.

    Yields:
        Description of the reduction, maximum number of parameters for which to try it, and the config's values.
    """
    family_sizes = FAMILY_SIZES.get(str(config.get("model_type")), {})
    full, narrow = _without_dropout(config), shrink_config(config)
    yield "the config itself", TINY_PARAMETERS, _short_spans(full)
    yield "shrunk", SMALL_PARAMETERS, _short_spans(merge_sizes(narrow, family_sizes))
    yield "shrunk", SMALL_PARAMETERS, _short_spans(narrow)
    yield "the config itself", SMALL_PARAMETERS, _short_spans(full)
    yield "with few layers", SMALL_PARAMETERS, _short_spans(shrink_config(config, narrow=False))
    yield "the config itself", SMALL_PARAMETERS, dict(full)


def merge_sizes(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the values of `own`, whose inner mappings are merged into those of the config."""
    merged = dict(config)
    for key, value in own.items():
        old = merged.get(key)
        merged[key] = value
        if isinstance(value, Mapping) and isinstance(old, Mapping) and not _by_layer(value):
            merged[key] = merge_sizes(old, value) if key.endswith("_config") else value
    return merged


def _without_dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_dropout(value)
        if isinstance(value, Mapping)
        else 0.0
        if isinstance(SIZES.get(key), float) and isinstance(value, float)
        else value
        for key, value in config.items()
    }


def _short_spans(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose spans and positions are a few tokens."""
    short: dict[str, Any] = {}
    for key, value in config.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, Mapping) and not str(key).startswith("vision"):
            short[key] = _short_spans(value)
        elif key in SPANS and number and value > 0:
            short[key] = min(value, SPANS[key])
        elif key in _POSITIONS and number:
            short[key] = min(value, MAX_POSITIONS)
        else:
            short[key] = value
    return short


def _clip(value: Any, limit: Any) -> Any:
    """Return a number clipped to `limit`; other values, or without a limit, unchanged."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value)(min(value, limit)) if number and limit is not None else value


def _by_layer(value: Mapping[str, Any]) -> bool:
    """Return whether a mapping has configs of layers by their numbers."""
    return bool(value) and all(
        str(key).isdigit() and isinstance(one, Mapping) for key, one in value.items()
    )


def _select_layers(config: Mapping[str, Any], depth: int) -> list[int]:
    """Return the layers to keep: the first of every kind, then the first ones."""
    lists = [v for v in config.values() if isinstance(v, list) and len(v) == depth]
    kinds: dict[str, int] = {}
    for i in range(depth):
        kinds.setdefault(repr([values[i] for values in lists]), i)
    firsts: Sequence[int] = list(kinds.values())[:LAYERS]
    remaining = [i for i in range(depth) if i not in firsts]
    return sorted([*firsts, *remaining[: LAYERS - len(firsts)]])


def _adjust_dependent_sizes(config: Mapping[str, Any], result: dict[str, Any]) -> None:
    """Adjust sizes that depend on each other."""
    heads = config.get("num_attention_heads")
    if result.get("kv_lora_rank") or heads == config.get("num_key_value_heads", heads):
        # Latent attention expands one key and value per head.
        result.update(
            {k: result["num_attention_heads"] for k in ("num_key_value_heads",) if k in result}
        )
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "mrope_section" in rope:
        # Sections of the time, height and width positions sum to half of the rotated dims.
        size = result.get("head_dim") or HIDDEN // HEADS
        half = int(size * rope.get("partial_rotary_factor", 1)) // 2
        result["rope_parameters"] = {
            **rope,
            "mrope_section": [half - 2 * (half // 3)] + 2 * [half // 3],
        }
