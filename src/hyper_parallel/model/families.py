"""Supported model families, one entry each: config keys, defaults and parts.

All Llama-like families share one reader (`_llama_like.py`) and differ only in their entry below; GPT-2 has other names
and a separate reader (`_gpt2.py`). Defaults are those of the family's configuration class in transformers, for keys
that published configs may omit.

Source: transformers 5.23, `configuration_*.py` and `modeling_*.py` of each family; a test builds every family on the
meta device and compares all names, shapes and ties.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal

from hyper_parallel.model._config_json import STANDARD_KEYS

Bias = bool | str
"""Whether a layer has a bias: True, False, or the config key that states it."""

_NORMS = ("input_layernorm", "post_attention_layernorm")
_SANDWICH_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers with experts in a family, and the form in which their weights are stored.

    Attributes:
        width_key: Config key of one expert's width.
        layers: Layers with experts. all; step: every `decoder_sparse_step`-th, except those in `mlp_only_layers`;
            after_dense: from layer `first_k_dense_replace` on.
        storage: stacked: gate and up as [E, 2F, D]; interleaved: GPT-OSS's transposed form with biases.
        shared_key: Config key of the number of shared experts.
        checkpoint_names: Names of one expert's gate, up and down in published files, which store experts separately.
        checkpoint_block: Name of the expert module in published files.
    """

    width_key: str
    layers: Literal["all", "step", "after_dense"] = "all"
    storage: Literal["stacked", "interleaved"] = "stacked"
    shared_key: str | None = None
    checkpoint_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    checkpoint_block: str = "mlp"


@dataclass(frozen=True, slots=True)
class Family:
    """Description of one `model_type` for the reader of configs.

    Attributes:
        defaults: Values of keys that a config omits. An omitted key without a default reads as None.
        aliases: Map from standard key to the family's key.
        attention: Grouped-query attention or DeepSeek's latent attention.
        qkv_bias: Bias on query, key and value.
        o_bias: Bias on the output projection.
        mlp_bias: Bias on the MLP.
        qk_norm: Norms of queries and keys: per head, or one over all heads.
        sinks: Learned attention sinks.
        fused_qkv: Query, key and value stacked (`qkv_proj`).
        fused_mlp: Gate and up stacked (`gate_up_proj`).
        norms: Names of a layer's norms outside of attention.
        windows: Layers with a window of `sliding_window` tokens, if that key is set: none; all; switch: all, if
            `use_sliding_window`; upper: from layer `max_window_layers` on, if `use_sliding_window`; pattern: all except
            every n-th (n = `sliding_window_pattern`). For upper and pattern, `layer_types` selects the layers if set.
        experts: Mixture of experts; None for a family without experts.
        required: Keys that must have a value in the config or in `defaults`; otherwise the reader raises HP305.
    """

    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    attention: Literal["gqa", "mla"] = "gqa"
    qkv_bias: Bias = False
    o_bias: Bias = False
    mlp_bias: Bias = False
    qk_norm: Literal["none", "head", "heads"] = "none"
    sinks: bool = False
    fused_qkv: bool = False
    fused_mlp: bool = False
    norms: tuple[str, ...] = _NORMS
    windows: Literal["none", "all", "upper", "switch", "pattern"] = "none"
    experts: Experts | None = None
    required: tuple[str, ...] = STANDARD_KEYS


_MOE_KEYS = (*STANDARD_KEYS, "num_experts", "num_experts_per_tok")
_LOCAL = MappingProxyType({"num_experts": "num_local_experts"})
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

_BiasedAttention = partial(Family, qkv_bias="attention_bias", o_bias="attention_bias")
"""Constructor of a family in which the config key `attention_bias` states the bias of all attention projections."""

LLAMA = _BiasedAttention(mlp_bias="mlp_bias")
"""Entry of Llama, also used for a Llama-like decoder of an unknown family."""

_GLM = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}
_GEMMA = {"tie_word_embeddings": True, "vocab_size": 256000, "head_dim": 256}
_GEMMA_WINDOW = {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096}

FAMILIES: Mapping[str, Family] = MappingProxyType({
    "llama": LLAMA,
    "mistral": Family(defaults={"num_key_value_heads": 8, "sliding_window": 4096}, windows="all"),
    "mixtral": Family(
        defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2, "num_experts": 8},
        aliases=_LOCAL, windows="all", required=_MOE_KEYS,
        experts=Experts(
            "intermediate_size", checkpoint_names=("w1", "w3", "w2"), checkpoint_block="block_sparse_moe",
        ),
    ),
    "qwen2": Family(defaults={"num_key_value_heads": 32, **_QWEN_WINDOW}, qkv_bias=True, windows="upper"),
    "qwen3": _BiasedAttention(
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW}, qk_norm="head", windows="upper",
    ),
    "qwen3_moe": _BiasedAttention(
        defaults={
            "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1,
            "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
        },
        aliases=_LOCAL, qk_norm="head", windows="switch", required=(*_MOE_KEYS, "moe_intermediate_size"),
        experts=Experts("moe_intermediate_size", layers="step"),
    ),
    "deepseek_v3": Family(
        defaults={
            "moe_intermediate_size": 2048, "n_shared_experts": 1, "num_experts": 256, "num_experts_per_tok": 8,
            "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128,
        },
        aliases=MappingProxyType({"num_experts": "n_routed_experts"}), attention="mla", qkv_bias="attention_bias",
        required=(*_MOE_KEYS, "moe_intermediate_size"),
        experts=Experts("moe_intermediate_size", layers="after_dense", shared_key="n_shared_experts"),
    ),
    "gpt_oss": _BiasedAttention(
        defaults={
            "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2,
            "attention_bias": True, "num_experts": 128, "num_experts_per_tok": 4,
        },
        aliases=_LOCAL, sinks=True, windows="pattern", required=_MOE_KEYS,
        experts=Experts("intermediate_size", storage="interleaved"),
    ),
    "gemma": _BiasedAttention(defaults={**_GEMMA, "num_attention_heads": 16, "num_key_value_heads": 16}),
    "gemma2": _BiasedAttention(
        defaults={**_GEMMA, **_GEMMA_WINDOW, "sliding_window_pattern": 2}, norms=_SANDWICH_NORMS, windows="pattern",
    ),
    "gemma3_text": _BiasedAttention(
        defaults={**_GEMMA, **_GEMMA_WINDOW, "vocab_size": 262208, "sliding_window_pattern": 6},
        qk_norm="head", norms=_SANDWICH_NORMS, windows="pattern",
    ),
    "phi3": Family(windows="all", fused_qkv=True, fused_mlp=True),
    "olmo2": _BiasedAttention(qk_norm="heads", norms=_POST_NORMS),
    "olmo3": _BiasedAttention(
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
        qk_norm="heads", norms=_POST_NORMS, windows="pattern",
    ),
    "glm": Family(defaults=_GLM, qkv_bias="attention_bias", fused_mlp=True),
    "glm4": Family(
        defaults=_GLM, qkv_bias="attention_bias", fused_mlp=True,
        norms=(*_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
})  # fmt: skip
"""Reader entries by `model_type`, for the Llama-like families."""

FAMILIES_READ: Final = (*sorted(FAMILIES), "gpt2")
"""`model_type` of every family that is read without transformers; `TEXT_PARTS` maps further ones to these."""

TEXT_PARTS: Mapping[str, str] = MappingProxyType({
    "gemma3": "gemma3_text", "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_text": "qwen3",
})  # fmt: skip
"""`model_type` of the decoder family, by `model_type` of a multimodal model or of its text part."""

KEEPS_MORE: Final = ("gemma2", "phi3")
"""Families whose layers keep more activations than the formulas predict."""
