"""A model's config made small: fewer and narrower layers of the same architecture, for short runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
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
        ("hidden_size_per_layer_input mamba_d_state mamba_d_ssm ssm_state_size", 8),
        ("n_group topk_group first_k_dense_replace n_shared_experts num_expert_group", 1),
        ("num_experts_per_tok num_experts_per_token moe_topk moe_top_k zero_expert_num", 2),
        ("q_lora_rank image_size rel_extent mamba_chunk_size chunk_size", 16),
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
"""Sizes of a tiny model, for the keys that a config has, in its parts too."""

_DEPTH: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_WORDS: Final = re.compile(r"_token(_id|_index)?$|^vocab_size")
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


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
        if isinstance(value, Mapping) and key.endswith("_config"):
            found[key] = shrunk(
                value, narrow=narrow, keep_vocabulary=keep_vocabulary, unused=unused
            )
        elif isinstance(value, list) and depth > LAYERS and len(value) == depth:
            found[key] = [value[i] for i in kept]
        elif key in _POSITIONS or (_WORDS.search(key) and keep_vocabulary):
            continue
        elif _WORDS.search(key) and isinstance(value, int) and value > 2 and key not in SIZES:
            found[key] = next(unused)
        elif (
            key in SIZES
            and isinstance(value, (int, float))
            and not isinstance(value, bool)
            and (narrow or key in _DEPTH or isinstance(SIZES[key], float))
        ):
            found[key] = type(value)(min(value, SIZES[key]))
    if narrow:
        _fit(config, found)
    return found


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
