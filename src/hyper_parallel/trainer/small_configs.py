"""Reduction of a model's config: fewer and narrower layers of the same architecture, for short runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

HIDDEN, LAYERS, HEADS, VOCAB = 32, 4, 4, 320
SIZES: Final[dict[str, Any]] = {
    key: value
    for keys, value in (
        ("hidden_size n_embd d_model dim emb_dim embed_dim model_dim embedding_size", HIDDEN),
        ("embedding_dim out_hidden_size vision_output_dim projector_input_dim", HIDDEN),
        (
            "projector_output_dim text_hidden_size hidden_size_global backbone_hidden_size hidden_dim",
            HIDDEN,
        ),
        ("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers", LAYERS),
        ("num_attention_heads n_head n_heads num_heads decoder_attention_heads", HEADS),
        ("encoder_attention_heads swa_num_attention_heads linear_num_heads index_n_heads", HEADS),
        ("num_key_value_heads num_kv_heads swa_num_key_value_heads depth", 2),
        ("intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff dff", 48),
        ("ffn_hidden_size d_inner dim_ff intermediate_size_mlp mlp_dim lru_width", 48),
        ("max_position_embeddings n_positions n_ctx max_seq_len model_max_length", 128),
        ("num_experts num_local_experts n_routed_experts", 4),
        ("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size", 24),
        ("shared_experts_intermediate_size shared_intermediate_size", 24),
        ("qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank head_dim dim_head", 8),
        ("swa_head_dim linear_head_dim index_head_dim laurel_rank d_rel", 8),
        ("linear_key_head_dim linear_value_head_dim", 8),
        ("linear_num_key_heads", 2),
        ("linear_num_value_heads", 4),
        ("hidden_size_per_layer_input mamba_d_state mamba_d_ssm ssm_state_size", 8),
        ("n_group topk_group first_k_dense_replace n_shared_experts num_expert_group", 1),
        ("num_experts_per_tok num_experts_per_token moe_topk moe_top_k zero_expert_num", 2),
        ("q_lora_rank qk_head_dim image_size rel_extent mamba_chunk_size chunk_size", 16),
        ("mamba_dt_rank patch_size index_topk rotary_dim", 4),
        ("vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab", VOCAB),
        ("embd_pdrop resid_pdrop attn_pdrop emb_pdrop dropout attention_dropout", 0.0),
        ("hidden_dropout activation_dropout summary_first_dropout layerdrop drop_rate", 0.0),
        ("hidden_dropout_prob attention_probs_dropout_prob hidden_dropout_rate", 0.0),
        ("attention_dropout_prob ffn_dropout emb_dropout dropout_rate dropout_p", 0.0),
        ("residual_dropout resid_dropout embed_dropout drop_path_rate", 0.0),
        ("router_jitter_noise input_jitter_noise decoder_layerdrop encoder_layerdrop", 0.0),
        ("pad_token_id num_kv_shared_layers", 0),
        ("bos_token_id", 1),
        ("eos_token_id", 2),
    )
    for key in keys.split()
}
"""Sizes, dropout rates and special tokens of a small model by config key, also in nested configs."""

SPANS: Final[dict[str, int]] = {
    key: tokens
    for keys, tokens in (
        ("sliding_window sliding_window_size attention_window_size keep_window_size", 4),
        ("local_attention_window_len window_size attention_chunk_size chunk_size", 4),
        ("mamba_chunk_size block_size index_block_size index_topk", 4),
        ("heavily_compressed_attention", 4),
        ("index_kpool index_topk_blocks compressed_sparse_attention", 2),
    )
    for key in keys.split()
}
"""Token spans of layers (windows, chunks, blocks) by config key, short enough to have an effect on a short text."""

_PAIRS = ["linear_attention", "hybrid"] * 2
_SPARSE = ["dense", "sparse"] * 2
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_DOTS3 = {
    "head_dim": 16,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "mlp_layer_types": _SPARSE,
    "per_layer_config": {i: {"num_attention_heads": 2, "num_key_value_heads": 2} for i in (1, 3)},
}
_QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "hc_lowrank": 8, "ple_embed_dim": 32, "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_FULL_ROPE = {"rope_parameters": {"full_attention": _ROPE}}
_MROPE = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}}
_CODES = {"base_channels": 32, "latent_channels": 32, "num_res_blocks": 1}
_SOUNDS = {"num_filters": 4, "downsampling_ratios": [2, 4], "depths": [1, 1, 1]}
_SAM = {"sam_config": {"output_channels": 8, "downsample_channels": [16, 32]}}
_VOCAB = {"unpadded_vocab_size": SIZES["vocab_size"]}
FAMILY_SIZES: Final[dict[str, dict[str, Any]]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glm_ocr", "glmga"), _MROPE),
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    },
    "glm5_next": {"text_config": {"index_kpool": 2, "qk_rope_head_dim": 0}},
    "paddleocr_vl": _MROPE,
    "step3p7": {"text_config": {"sliding_window": 8}},
    "cohere_compass": {"text_config": _FULL_ROPE},
    "cohere_compass_text": _FULL_ROPE,
    "apertus1p5": {
        "image_token_offset": 64, "audio_token_offset": 192, "vision_config": {**_CODES, "codebook_size": 128},
        "audio_config": {
            "codebook_size": 128, "codebook_dim": HIDDEN, "decoder_hidden_size": 32, "decoder_num_layers": 2,
            "decoder_intermediate_size": 48, "num_filters": 2,
        },
    },
    "aria": {"projector_patch_to_query_dict": {"16": 4}},
    **{key: {"mm_tokens_per_image": 4} for key in ("gemma3", "shieldgemma2")},
    "bailing_hybrid": {"layer_group_size": 2},
    # On short sequences the model switches to this attention in its first step.
    "big_bird": {"attention_type": "original_full"},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "chameleon": {
        "vocabulary_map": {"<image>": 303, **{f"IMGIMG{letter}Z": 304 + i for i, letter in enumerate("ABCDEFGH")}},
        "vq_config": {**_CODES, "num_embeddings": 8},
    },
    "cohere2_vision": {"alignment_intermediate_size": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "deepseek_ocr2": {"vision_config": _SAM, "text_config": {"mlp_layer_types": _SPARSE}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"output_channels": 8}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2}},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"mlp_layer_types": _SPARSE, "adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_output_size": HIDDEN},
    },
    "dots3_note_text": _DOTS3,
    "emu3": {
        "vocabulary_map": {
            "<image>": 303, "<|extra_200|>": 304, **{f"<|visual token {i:06}|>": 305 + i for i in range(8)},
        },
        "vq_config": {**_CODES, "codebook_size": 8, "hidden_size": 4 * HIDDEN},
    },
    "ernie4_5_vl_moe": {
        "text_config": {"moe_num_experts": 4, "moe_k": 2, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "fast_vlm": {"vision_config": {"hidden_size": 2048}},
    "florence2": {
        "vision_config": {
            "depths": [1] * 4, "embed_dim": [8, 16, 16, 32], "num_heads": [2] * 4, "num_groups": [2] * 4,
            "patch_size": [7, 3, 3, 3], "projection_dim": HIDDEN, "window_size": 4,
        },
    },
    "fun_asr_nano": {
        "adaptor_config": {"hidden_size": HIDDEN, "intermediate_size": HIDDEN // 4},
        "audio_config": {"num_timestamp_prediction_layers": 1},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {
        "downsample_rate": "1/2", "projector_dropout": 0.0, "deepstack_layer_map": [[1, 0]],
        "spatial_target_layers": [1, 2, 3, 3], "vision_config": {"hidden_size": 2 * HIDDEN},
    },
    **{key: {"projector_config": {"encoder_hidden_size": HIDDEN}} for key in ("granite_speech", "granite_speech_plus")},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "hy_v4_vl": {"vision_config": {"max_image_size": 16}},
    "hunyuan_vl": {"vision_config": {"max_image_size": 16}, **_MROPE},
    "kimi_k25": {"projection_hidden_size": HIDDEN},
    "glmasr": {"audio_config": {"intermediate_size": 4 * HIDDEN}},
    "llama4": {"vision_config": {"intermediate_size": 4 * HIDDEN}},
    **{key: {"text_config": _VOCAB} for key in ("inkling2", "inkling2_loop")},
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), _VOCAB),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus": {
        "vision_config": {"projection_dim": HIDDEN},
        "vq_config": {**_CODES, "num_embeddings": 64, "projection_dim": HIDDEN, "image_token_embed_dim": HIDDEN},
    },
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kosmos-2.5": {"latent_query_num": 16},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": HIDDEN}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemo_speechlm": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": HIDDEN}}},
        "text_config": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
    },
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8},
    "mistral4": {"head_dim": 16},
    "molmo2": {
        "image_patch_id": 318, "vision_config": {"image_size": [16, 16], "num_position_embeddings": 16},
        "adapter_config": {"vision_feature_layer": [3, 1]},
    },
    "mllama": {"vision_config": {"intermediate_layers_indices": [1, 2], "vision_output_dim": 3 * HIDDEN}},
    "moss_transcribe_diarize": {"audio_config": {"max_source_positions": 16}},
    "muse_glimmer": {"projector_hidden_size": HIDDEN, "out_hidden_size": 4 * HIDDEN},
    "muse_spark": {
        "out_hidden_size": 4 * HIDDEN, "projector_hidden_size": HIDDEN, "text_config": {"moe_hidden_size": HIDDEN},
        "audio_config": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    },
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 16},
        "text_config": {
            "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 24,
        },
        "projector_hidden_size": HIDDEN, "vision_hidden_size": HIDDEN,
    },
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {
                "embed_dim": HIDDEN, "depth": 2, "num_heads": 2, "patch_size": 4, "img_size": [16, 16],
                "ref_feat_shape": [4, 4], "global_pool": "",
            },
        },
    },
    "phi4_multimodal": {
        "vision_config": {"crop_size": 16},
        "audio_config": {
            "num_blocks": 2, "ext_pw_out_channel": 32, "nemo_conv_channels": 32,
            "depthwise_separable_out_channel": 32, "bias_max_distance": 16, "input_size": 16, "nemo_final_size": 2,
        },
    },
    "paligemma": {"projection_dim": HIDDEN},
    "pix2struct": {"text_config": {"d_kv": 8}, "vision_config": {"d_kv": 8}},
    "qwen2_audio": {"audio_config": {"max_source_positions": 16}},
    "qwen3_asr": {"audio_config": {"downsample_hidden_size": 8, "output_dim": HIDDEN}},
    "qwen3_omni_moe_thinker": {"audio_config": {"downsample_hidden_size": 8, "output_dim": HIDDEN}},
    "qwen2_5_omni_thinker": {**_MROPE, "audio_config": {"max_source_positions": 16, "output_dim": HIDDEN}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "is_decoder": True, "attn_layers": ["local"] * LAYERS, "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [16, 16], "attention_head_size": 8, "feed_forward_size": 48,
        "local_attn_chunk_length": 8, "max_position_embeddings": 32, "local_attention_probs_dropout_prob": 0.0,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16, "pronunciation_vocab_size": 32, "shape_embed_dim": 16,
        "shape_vocab_size": 32,
    },
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 4}},
    "unlimited_ocr": {"vision_config": _SAM},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": {**_SOUNDS, "vae_std": 0.0},
        "semantic_tokenizer_encoder_config": _SOUNDS,
    },
    "vipllava": {"vision_feature_layer": [-2, -3, 1]},
    "vision-encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "voxtral": {"audio_config": {"intermediate_size": 4 * HIDDEN, "max_source_positions": 16}},
    "xlstm": {"num_blocks": LAYERS},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": _PAIRS, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {
        "layers_block_type": _PAIRS, "hybrid_layer_ids": [1, 3], "attention_hidden_size": 64,
        "attention_head_dim": 16, "mamba_headdim": 8, "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""Additional config values by model type, such as sizes that depend on each other and lists with an entry per layer."""

_DEPTH: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_WORDS: Final = re.compile(r"_token(_id|_index)?$|^vocab_size")
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")

TINY_PARAMETERS: Final = 600_000
"""Maximum parameters of a config that is tried with its own layers and widths, before reduced configs."""
SMALL_PARAMETERS: Final = 4_000_000
"""Maximum parameters of a reduced config, and of an unreduced config that is tried after them."""

MAX_POSITIONS: Final = 64
"""Maximum `max_position_embeddings` of all configs of `small_configs` but the last."""


def shrink_config(
    config: Mapping[str, Any],
    *,
    narrow: bool = True,
    keep_vocabulary: bool = False,
    unused: Iterator[int] | None = None,
) -> dict[str, Any]:
    """Return a config of the same architecture with at most `LAYERS` layers and without dropout.

    The first layer of every kind is kept, as far as `LAYERS` permits.

    Args:
        config: Values of a `config.json`, with nested mappings for text, vision and audio parts.
        narrow: Whether to also reduce the width of layers to `SIZES`.
        keep_vocabulary: Whether to keep vocabulary size and special tokens.
        unused: Token ids for image tokens and other placeholders, which must not occur in text; None: the highest ids
            of the small vocabulary.
    """
    unused = itertools.count(VOCAB - 18) if unused is None else unused
    shrink = partial(shrink_config, narrow=narrow, keep_vocabulary=keep_vocabulary, unused=unused)
    depth = next((config[key] for key in _DEPTH if isinstance(config.get(key), int)), 0)
    layers = _select_layers(config, depth)
    result: dict[str, Any] = {}
    for key, value in config.items():
        result[key] = value
        if isinstance(value, Mapping) and depth > LAYERS and _by_layer(value):
            result[key] = {str(position): shrink(value[i]) for position, i in enumerate(map(str, layers)) if i in value}
        elif isinstance(value, Mapping) and key.endswith("_config"):
            result[key] = shrink(value)
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
    """Yield small configs of the same architecture without dropout, in order of preference.

    Token spans (windows, chunks, blocks) and positions are reduced in all configs but the last.

    Yields:
        (description of the reduction, maximum number of parameters for this reduction, values of the config). The
        caller skips a config whose model has more parameters.
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
    """Return `config` updated with `own`; nested configs (keys ending in `_config`) are merged recursively."""
    merged = dict(config)
    for key, value in own.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        is_nested = both and key.endswith("_config") and not _by_layer(value)
        merged[key] = merge_sizes(old, value) if is_nested else value
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
    """Return the config with spans limited to `SPANS` and positions to `MAX_POSITIONS`, except in vision parts."""
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
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value)(min(value, limit)) if number and limit is not None else value


def _by_layer(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(str(key).isdigit() and isinstance(one, Mapping) for key, one in value.items())


def _select_layers(config: Mapping[str, Any], depth: int) -> list[int]:
    """Return the indices of at most `LAYERS` layers: the first of every kind, filled up with the lowest indices."""
    lists = [v for v in config.values() if isinstance(v, list) and len(v) == depth]
    kinds: dict[str, int] = {}
    for i in range(depth):
        kinds.setdefault(repr([values[i] for values in lists]), i)
    firsts: Sequence[int] = list(kinds.values())[:LAYERS]
    remaining = [i for i in range(depth) if i not in firsts]
    return sorted([*firsts, *remaining[: LAYERS - len(firsts)]])


def _adjust_dependent_sizes(config: Mapping[str, Any], result: dict[str, Any]) -> None:
    """Adapt key-value heads and `mrope_section` of `result` to its reduced number and size of heads."""
    heads = config.get("num_attention_heads")
    ungrouped = result.get("kv_lora_rank") or heads == config.get("num_key_value_heads", heads)
    if ungrouped and "num_key_value_heads" in result:
        # Without grouped-query attention, and in latent attention, every head has a key and a value.
        result["num_key_value_heads"] = result["num_attention_heads"]
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "mrope_section" in rope:
        # The sections for time, height and width must sum to half of the rotated dims.
        size = result.get("head_dim") or HIDDEN // HEADS
        half = int(size * rope.get("partial_rotary_factor", 1)) // 2
        result["rope_parameters"] = {
            **rope,
            "mrope_section": [half - 2 * (half // 3)] + 2 * [half // 3],
        }
