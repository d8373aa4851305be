"""Assembly of a Llama-like decoder from its config and its family entry."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from hyper_parallel.errors import ModelUnreadable
from hyper_parallel.model import _parts
from hyper_parallel.model._config_json import ConfigView
from hyper_parallel.model._families import Bias, Experts, Family
from hyper_parallel.model._model_spec import AttentionSpec, Block, MlpSpec, ParamSpec

EMBEDDING = "model.embed_tokens.weight"


class _Kind(NamedTuple):
    """What makes two layers differ."""

    experts: bool
    window: int | None


def read_blocks(config: ConfigView, family: Family) -> tuple[Block, ...]:
    """Embedding, decoder blocks by kind of layer, final norm and head.

    Raises:
        ModelUnreadable: HP305 naming missing keys, values of the wrong kind, or features that are not read.
    """
    config.require(family.required)
    _refuse_unread(config)
    hidden, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.integer("num_hidden_layers")
    windows = _windows(config, family, num_layers)
    kinds = [
        _Kind(has_experts, window)
        for has_experts, window in zip(
            _expert_layers(config, family.experts, num_layers), windows, strict=True
        )
    ]
    # dict.fromkeys keeps the order of first appearance: blocks come in the order of their first layer.
    decoder = tuple(
        _decoder_block(config, family, kind, tuple(i for i, k in enumerate(kinds) if k == kind))
        for kind in dict.fromkeys(kinds)
    )
    tied = EMBEDDING if config.flag("tie_word_embeddings") else None
    embed = ParamSpec(EMBEDDING, (vocab, hidden), ("vocab", "embed"))
    return (
        Block("embedding", (), (embed,)),
        *decoder,
        Block("final_norm", (), _parts.norm("model.norm", hidden)),
        Block("head", (), (_parts.head(vocab, hidden, tied),)),
    )


def _decoder_block(
    config: ConfigView, family: Family, kind: _Kind, layers: tuple[int, ...]
) -> Block:
    hidden = config.integer("hidden_size")
    attention, attention_params = _attention(config, family, kind.window)
    if kind.experts and family.experts is not None:
        mlp, mlp_params = _experts(config, family.experts)
    else:
        mlp = MlpSpec(config.integer("intermediate_size"), gated=True)
        mlp_params = _parts.mlp_params(
            hidden,
            mlp.intermediate_size,
            bias=_decided(config, family.mlp_bias),
            fused=family.fused_mlp,
        )
    norms = _parts.norms(hidden, family.norms)
    name = "moe_decoder" if mlp.num_experts else "decoder"
    return Block(name, layers, (*attention_params, *mlp_params, *norms), attention, mlp)


def _attention(
    config: ConfigView, family: Family, window: int | None
) -> tuple[AttentionSpec, _parts.Params]:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if family.attention == "mla":
        return _latent_attention(config, family, hidden, heads)
    kv_heads = config.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelUnreadable(
            "`num_attention_heads` is not a multiple of `num_key_value_heads`",
            where=config.where,
            got=f"num_attention_heads={heads}, num_key_value_heads={kv_heads}",
            hint="every key-value head serves a whole number of query heads; correct one of the two",
        )
    width = config.optional_integer("head_dim")
    if width is None:
        if hidden % heads:
            raise ModelUnreadable(
                "`hidden_size` is not a multiple of `num_attention_heads`, and `head_dim` is not given",
                where=config.where,
                got=f"hidden_size={hidden}, num_attention_heads={heads}",
                hint="add `head_dim` to the config",
            )
        width = hidden // heads
    kind = "full" if window is None else "sliding"
    spec = AttentionSpec(kind, heads, kv_heads, width, width, window, 2 * kv_heads * width)
    return spec, _parts.attention_params(
        hidden,
        spec,
        qkv_bias=_decided(config, family.qkv_bias),
        o_bias=_decided(config, family.o_bias),
        qk_norm=family.qk_norm,
        sinks=family.sinks,
        fused=family.fused_qkv,
    )


def _latent_attention(
    config: ConfigView, family: Family, hidden: int, heads: int
) -> tuple[AttentionSpec, _parts.Params]:
    kv_lora, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    qk_width = config.integer("qk_nope_head_dim") + rope
    # Every query head has its own key and value, expanded from the latent: `num_key_value_heads` plays no part.
    spec = AttentionSpec(
        "mla", heads, heads, qk_width, config.integer("v_head_dim"), None, kv_lora + rope
    )
    return spec, _parts.latent_attention_params(
        hidden,
        spec,
        q_lora=config.optional_integer("q_lora_rank"),
        kv_lora=kv_lora,
        rope_dim=rope,
        bias=_decided(config, family.qkv_bias),
    )


def _experts(config: ConfigView, experts: Experts) -> tuple[MlpSpec, _parts.Params]:
    hidden, width = config.integer("hidden_size"), config.integer(experts.width_key)
    num, per_token = config.integer("num_experts"), config.integer("num_experts_per_tok")
    if per_token > num:
        raise ModelUnreadable(
            "a token visits more experts than there are",
            where=config.where,
            got=f"num_experts_per_tok={per_token}, experts={num}",
            hint=f"set `num_experts_per_tok` to at most {num}",
        )
    shared = config.optional_integer(experts.shared_key, 0) or 0 if experts.shared_key else 0
    spec = MlpSpec(width, True, num, per_token, shared * width)
    if experts.storage == "interleaved":
        return spec, _parts.interleaved_expert_params(hidden, spec)
    return spec, _parts.expert_params(hidden, spec)


def _expert_layers(
    config: ConfigView, experts: Experts | None, num_layers: int
) -> tuple[bool, ...]:
    """Per layer: does it have experts."""
    if experts is None:
        return (False,) * num_layers
    if experts.layers == "step":
        step, dense = config.integer("decoder_sparse_step"), set(config.integers("mlp_only_layers"))
        return tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers))
    if experts.layers == "after_dense":
        first = config.integer("first_k_dense_replace", 0)
        return tuple(i >= first for i in range(num_layers))
    return (True,) * num_layers


def _windows(config: ConfigView, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Per layer: tokens its attention sees, or None for all."""
    if family.windows == "none":
        return (None,) * num_layers
    window = config.optional_integer("sliding_window")
    if family.windows == "all":
        return (window,) * num_layers
    if family.windows in ("upper", "switch") and not config.flag("use_sliding_window"):
        window = None
    if family.windows == "switch":
        return (window,) * num_layers
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            raise ModelUnreadable(
                "`layer_types` does not name one type per layer",
                where=config.where,
                got=f"{len(types) if isinstance(types, list) else types!r} for {num_layers} layers",
                hint="let `layer_types` have `num_hidden_layers` entries, or remove it",
            )
        return tuple(window if t == "sliding_attention" else None for t in types)
    if family.windows == "upper":
        first = config.integer("max_window_layers", 0)
        return tuple(window if i >= first else None for i in range(num_layers))
    pattern = config.integer("sliding_window_pattern")
    return tuple(window if (i + 1) % pattern else None for i in range(num_layers))


def _refuse_unread(config: ConfigView) -> None:
    """Refuse by name what would change the parameters or the attention and is not read."""
    types = config.get("layer_types")
    if isinstance(types, list):
        known = ("full_attention", "sliding_attention")
        other = [t for t, _ in groupby(types) if t not in known]
        if other:
            raise ModelUnreadable(
                "`layer_types` names a kind of layer that is not read",
                where=config.where,
                got=sorted({str(t) for t in other}),
                allowed=known,
                hint="models with other kinds of layers (linear attention, state space) cannot be planned yet",
            )
    if config.flag("use_bidirectional_attention"):
        raise ModelUnreadable(
            "`use_bidirectional_attention` makes this an encoder, not a causal language model",
            where=config.where,
            got="use_bidirectional_attention=true",
            hint="give a causal language model",
        )
    if config.get("moe_layer_freq") not in (None, 1):
        raise ModelUnreadable(
            "`moe_layer_freq` other than 1 is not read",
            where=config.where,
            got=config.get("moe_layer_freq"),
            allowed=1,
            hint="expert layers must follow `first_k_dense_replace` without gaps",
        )


def _decided(config: ConfigView, bias: Bias) -> bool:
    return bias if isinstance(bias, bool) else config.flag(bias)
