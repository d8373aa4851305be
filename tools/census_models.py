"""Tiny configs of all model types of transformers: a table of common sizes, and exceptions of some types."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from hyper_parallel.trainer.small_configs import FAMILY_SIZES, HEADS, HIDDEN, SIZES

SEQ_LEN = 32
"""Tokens of a sequence of the census."""

_ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
CAUSAL: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in _ENCODERS},
    "xlm": {"causal": True},
}
"""Values that make a type causal, where its own values make it an encoder."""


def tiny(name: str) -> dict[str, Any]:
    """Return a config of a model type with small sizes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = FAMILY_SIZES.get(name, {}) | CAUSAL.get(name, {})
    config = shrunk(CONFIG_MAPPING[name], own, itertools.count(302)).to_dict()
    return {"model_type": name, **{k: v for k, v in config.items() if k != "transformers_version"}}


def shrunk(cls: type[Any], own: dict[str, Any], unused: Iterator[int], base: Any = None) -> Any:
    """Return a config of a class with small sizes; its parts (text, vision, audio) are shrunk likewise.

    Args:
        cls: The configuration class.
        own: Values in addition to `SIZES`; for a part of the config, a dict of values.
        unused: Token ids that do not occur in texts, for placeholders of media.
        base: Config whose values are the defaults; None: the defaults of the class.
    """
    if base is None:
        try:
            base = cls()
        except Exception:  # a class that rejects its own default values
            base = cls(**own)
    sizes = dict(own)
    for key, value in base.to_dict().items():
        if key in SIZES and key not in own:
            whole = isinstance(value, int)  # strict classes reject a float here
            sizes[key] = int(SIZES[key]) if whole else SIZES[key]
            if isinstance(value, list) and key in ("patch_size", "moe_intermediate_size"):
                sizes[key] = [SIZES[key]] * len(value)
        elif re.search(r"_token(_id|_index)?$", key) and isinstance(value, int) and value > 2:
            sizes[key] = next(unused)
    if sizes.get("kv_lora_rank"):
        # Latent attention expands its own key and value for every head.
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    rope = base.to_dict().get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        # The sections for time, height and width positions add up to half of the rotated dims.
        half = int((sizes.get("head_dim") or HIDDEN // HEADS) * rope.get("partial_rotary_factor", 1)) // 2
        sizes["rope_parameters"] = {
            **rope,
            "mrope_section": [half - 2 * (half // 3)] + 2 * [half // 3],
        }
    for key in cls.sub_configs:
        if (part := getattr(base, key, None)) is not None:
            sizes[key] = shrunk(type(part), own.get(key, {}), unused, part).to_dict()
    return cls(**sizes)
