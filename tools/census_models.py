"""Tiny configs of all model types of transformers: one table of sizes, and what some types need besides."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from hyper_parallel.trainer._shrink import HEADS, HIDDEN, LAYERS, SIZES

SEQ_LEN = 32
"""Tokens of a sequence of the census."""

PAIRS = ["linear_attention", "hybrid"] * 2
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
DOTS3 = {
    "head_dim": 16,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse"] * 2,
    "per_layer_config": {i: {"num_attention_heads": 2, "num_key_value_heads": 2} for i in (1, 3)},
}
QWEN4 = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16},
    **{"indexer_compress_ratio": 4, "hc_lowrank": 8, "ple_embed_dim": 32},
    **{"ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
MROPE = {
    "text_config": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
        }
    }
}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glm_ocr", "glmga"), MROPE),
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]},
                "partial_rotary_factor": 0.5,
            }
        }
    },
    "glm5_next": {"text_config": {"index_kpool": 2, "qk_rope_head_dim": 0}},
    "paddleocr_vl": MROPE,
    "step3p7": {"text_config": {"sliding_window": 8}},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
        }
    },
    "apertus1p5": {
        **{"image_token_offset": 64, "audio_token_offset": 192},
        "vision_config": {
            **{"base_channels": 32, "latent_channels": 32, "num_res_blocks": 1},
            "codebook_size": 128,
        },
        "audio_config": {
            **{
                "codebook_size": 128,
                "codebook_dim": HIDDEN,
                "decoder_hidden_size": 32,
                "decoder_num_layers": 2,
            },
            **{"decoder_intermediate_size": 48, "num_filters": 2},
        },
    },
    "bailing_hybrid": {"layer_group_size": 2},
    # It changes to this by itself in its first step on short sequences.
    "big_bird": {"attention_type": "original_full"},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "chameleon": {
        "vocabulary_map": {"<image>": 303},
        "vq_config": {"base_channels": 32, "latent_channels": 32, "num_res_blocks": 1},
    },
    "cohere2_vision": {"alignment_intermediate_size": 48},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": {"output_channels": 8, "downsample_channels": [16, 32]},
        },
        "text_config": {"mlp_layer_types": ["dense", "sparse"] * 2},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {"output_channels": 8}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2}},
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {
            **{"mlp_layer_types": ["dense", "sparse"] * 2, "adapter_in_dim": HIDDEN},
            "adapter_out_dim": HIDDEN,
        },
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_output_size": HIDDEN},
    },
    "dots3_note_text": DOTS3,
    "ernie4_5_vl_moe": {
        "text_config": {
            **{"moe_num_experts": 4, "moe_k": 2},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            },
        }
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "hy_v4_vl": {"vision_config": {"max_image_size": 16}},
    "hunyuan_vl": {"vision_config": {"max_image_size": 16}, **MROPE},
    "inkling2": {"text_config": {"unpadded_vocab_size": SIZES["vocab_size"]}},
    "inkling2_text": {"unpadded_vocab_size": SIZES["vocab_size"]},
    "inkling2_loop": {"text_config": {"unpadded_vocab_size": SIZES["vocab_size"]}},
    "inkling2_loop_text": {"unpadded_vocab_size": SIZES["vocab_size"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus": {
        "vision_config": {"projection_dim": HIDDEN},
        "vq_config": {
            **{"base_channels": 32, "latent_channels": 32, "num_res_blocks": 1},
            **{"num_embeddings": 64, "projection_dim": HIDDEN, "image_token_embed_dim": HIDDEN},
        },
    },
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8},
    "mistral4": {"head_dim": 16},
    "molmo2": {
        "vision_config": {"image_size": [16, 16], "num_position_embeddings": 16},
        "adapter_config": {"vision_feature_layer": [3, 1]},
    },
    "muse_glimmer": {"projector_hidden_size": HIDDEN},
    "muse_spark": {
        "projector_hidden_size": HIDDEN,
        "text_config": {"moe_hidden_size": HIDDEN},
        "audio_config": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    },
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 16},
        "text_config": {
            **{"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
            "moe_shared_expert_intermediate_size": 24,
        },
        **{"projector_hidden_size": HIDDEN, "vision_hidden_size": HIDDEN},
    },
    "phi4_multimodal": {
        "vision_config": {"crop_size": 16},
        "audio_config": {
            **{"num_blocks": 2, "ext_pw_out_channel": 32, "nemo_conv_channels": 32},
            **{"depthwise_separable_out_channel": 32, "bias_max_distance": 16, "input_size": 16},
            "nemo_final_size": 2,
        },
    },
    "qwen3_omni_moe_thinker": {
        "audio_config": {"downsample_hidden_size": 8, "output_dim": HIDDEN},
    },
    "qwen2_5_omni_thinker": MROPE,
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {
        **{"is_decoder": True, "attn_layers": ["local"] * LAYERS, "axial_pos_shape": [4, 8]},
        **{"axial_pos_embds_dim": [16, 16], "attention_head_size": 8, "feed_forward_size": 48},
        **{
            "local_attn_chunk_length": 8,
            "max_position_embeddings": SEQ_LEN,
            "local_attention_probs_dropout_prob": 0.0,
        },
    },
    "roc_bert": {
        **{"pronunciation_embed_dim": 16, "pronunciation_vocab_size": 32},
        **{"shape_embed_dim": 16, "shape_vocab_size": 32},
    },
    "unlimited_ocr": {
        "vision_config": {"sam_config": {"output_channels": 8, "downsample_channels": [16, 32]}},
    },
    "xlstm": {"num_blocks": LAYERS},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": PAIRS, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {
        **{"layers_block_type": PAIRS, "hybrid_layer_ids": [1, 3], "attention_hidden_size": 64},
        **{"attention_head_dim": 16, "mamba_headdim": 8, "adapter_rank": 8},
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What a model type needs besides: sizes that must fit each other, patterns as long as the layers."""


def tiny(name: str) -> dict[str, Any]:
    """The config of a model type, shrunk."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrunk(CONFIG_MAPPING[name], OWN.get(name, {}), itertools.count(302)).to_dict()
    return {"model_type": name, **{k: v for k, v in config.items() if k != "transformers_version"}}


def shrunk(cls: type[Any], own: dict[str, Any], unused: Iterator[int], base: Any = None) -> Any:
    """A config of a class with small sizes, its parts (text, vision, audio) shrunk likewise.

    Args:
        cls: The configuration class.
        own: Values that it needs besides `SIZES`; for a part: a dict of them.
        unused: Tokens that no text has, for images and the like.
        base: The class with its own values.
    """
    if base is None:
        try:
            base = cls()
        except Exception:  # a class whose own values are none that it takes
            base = cls(**own)
    sizes = dict(own)
    for key, value in base.to_dict().items():
        if key in SIZES and key not in own:
            whole = isinstance(value, int)  # strict classes take no float there
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
        # Sections of the positions of time, height and width add up to half of what is rotated.
        half = (
            int((sizes.get("head_dim") or HIDDEN // HEADS) * rope.get("partial_rotary_factor", 1))
            // 2
        )
        sizes["rope_parameters"] = {
            **rope,
            "mrope_section": [half - 2 * (half // 3)] + 2 * [half // 3],
        }
    for key in cls.sub_configs:
        if (part := getattr(base, key, None)) is not None:
            sizes[key] = shrunk(type(part), own.get(key, {}), unused, part).to_dict()
    return cls(**sizes)
