"""A model's config made small: fewer and narrower layers of the same architecture, for short runs."""

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
"""Parameters of a model whose steps take milliseconds on one core."""
SMALL_PARAMETERS: Final = 4_000_000
"""Parameters of a model whose steps take well below a second on one core."""

MOST_POSITIONS: Final = 64
"""Positions of a model of `small_configs`."""


def shrunk(
    config: Mapping[str, Any],
    *,
    narrow: bool = True,
    keep_vocabulary: bool = False,
    unused: Iterator[int] | None = None,
) -> dict[str, Any]:
    """A config with at most `LAYERS` layers, of every kind that it has, without dropout.

    Args:
        config: Values of a `config.json`, its parts (text, vision, audio) as inner mappings.
        narrow: Make layers narrow too, as `SIZES` says.
        keep_vocabulary: Leave the vocabulary and special tokens as they are.
        unused: Tokens that no text has, for images and the like.
    """
    unused = itertools.count(VOCAB - 18) if unused is None else unused
    depth = next((config[key] for key in _DEPTH if isinstance(config.get(key), int)), 0)
    kept = _layers_kept(config, depth)
    found: dict[str, Any] = {}
    for key, value in config.items():
        found[key] = value
        if isinstance(value, Mapping) and depth > LAYERS and _by_layer(value):
            choices = {"narrow": narrow, "keep_vocabulary": keep_vocabulary, "unused": unused}
            found[key] = {
                str(at): shrunk(value[i], **choices)
                for at, i in enumerate(map(str, kept))
                if i in value
            }
        elif isinstance(value, Mapping) and key.endswith("_config"):
            found[key] = shrunk(
                value, narrow=narrow, keep_vocabulary=keep_vocabulary, unused=unused
            )
        elif isinstance(value, list) and depth > LAYERS and len(value) == depth:
            limit = SIZES.get(key) if narrow else None
            found[key] = [_at_most(value[i], limit) for i in kept]
        elif key in _POSITIONS or (_WORDS.search(key) and keep_vocabulary):
            continue
        elif _WORDS.search(key) and isinstance(value, int) and value > 2 and key not in SIZES:
            found[key] = next(unused)
        elif key in SIZES and (narrow or key in _DEPTH or isinstance(SIZES[key], float)):
            found[key] = _at_most(value, SIZES[key])
    if narrow:
        _fit(config, found)
    return found


def small_configs(config: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield small configs of the same architecture, the preferred one first.

    Spans of tokens (windows, chunks, blocks) become a few tokens in all of them.

    Yields:
        How the config was made, the largest number of parameters for which it is worth trying, and its values.
    """
    own = FAMILY_SIZES.get(str(config.get("model_type")), {})
    whole, narrow = _without_dropout(config), shrunk(config)
    yield "the config itself", TINY_PARAMETERS, _short_spans(whole)
    yield "shrunk", SMALL_PARAMETERS, _short_spans(merge_sizes(narrow, own))
    yield "shrunk", SMALL_PARAMETERS, _short_spans(narrow)
    yield "the config itself", SMALL_PARAMETERS, _short_spans(whole)
    yield "with few layers", SMALL_PARAMETERS, _short_spans(shrunk(config, narrow=False))
    yield "the config itself", SMALL_PARAMETERS, dict(whole)


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
            short[key] = min(value, MOST_POSITIONS)
        else:
            short[key] = value
    return short


def _at_most(value: Any, limit: Any) -> Any:
    """Return a number that is at most `limit`; anything else, or without a limit, unchanged."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value)(min(value, limit)) if number and limit is not None else value


def _by_layer(value: Mapping[str, Any]) -> bool:
    """Return whether a mapping has a config for each of some layers, by their numbers."""
    return bool(value) and all(
        str(key).isdigit() and isinstance(one, Mapping) for key, one in value.items()
    )


def _layers_kept(config: Mapping[str, Any], depth: int) -> list[int]:
    """Which layers stay: the first of every kind, then the first ones."""
    lists = [v for v in config.values() if isinstance(v, list) and len(v) == depth]
    kinds: dict[str, int] = {}
    for i in range(depth):
        kinds.setdefault(repr([values[i] for values in lists]), i)
    firsts: Sequence[int] = list(kinds.values())[:LAYERS]
    others = [i for i in range(depth) if i not in firsts]
    return sorted([*firsts, *others[: LAYERS - len(firsts)]])


def _fit(config: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Sizes that depend on one another."""
    heads = config.get("num_attention_heads")
    if found.get("kv_lora_rank") or heads == config.get("num_key_value_heads", heads):
        # Latent attention expands its own key and value for every head.
        found.update(
            {k: found["num_attention_heads"] for k in ("num_key_value_heads",) if k in found}
        )
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "mrope_section" in rope:
        # Sections of the positions of time, height and width add up to half of what is rotated.
        size = found.get("head_dim") or HIDDEN // HEADS
        half = int(size * rope.get("partial_rotary_factor", 1)) // 2
        found["rope_parameters"] = {
            **rope,
            "mrope_section": [half - 2 * (half // 3)] + 2 * [half // 3],
        }
