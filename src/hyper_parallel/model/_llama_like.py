"""Reader of Llama-like decoders, from a config and the entry of its family; shapes are those that torch stores.

Letters: D embed, F mlp width, E experts, V vocab.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final

from hyper_parallel.model._config_json import ConfigView
from hyper_parallel.model._model_spec import AttentionSpec, Block, MlpSpec, ParamSpec
from hyper_parallel.model.families import Bias, Experts, Family

EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.*"
"""Prefix of a layer's parameters in every Llama-like model."""
_ATTENTION = f"{LAYER}.self_attn"

Params = tuple[ParamSpec, ...]


_MOST_LAYERS: Final = 100_000
"""Maximum number of layers, for configs that `check_config` has not checked. Layers are listed one by one."""


def read_blocks(config: ConfigView, family: Family) -> tuple[Block, ...]:
    """Return the blocks of a model: embedding, one decoder block per kind of layer, final norm and head.

    Raises:
        ModelUnreadable: HP305 with missing keys, values of the wrong type, or unsupported features.
    """
    config.require(family.required)
    _refuse_unread(config)
    hidden, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.integer("num_hidden_layers", maximum=_MOST_LAYERS)
    has_experts = _expert_layers(config, family.experts, num_layers)
    kinds = list(zip(has_experts, _windows(config, family, num_layers), strict=True))
    # dict.fromkeys keeps the order of first appearance: blocks are ordered by their first layer.
    decoder = tuple(
        _decoder_block(config, family, *kind, tuple(i for i, k in enumerate(kinds) if k == kind))
        for kind in dict.fromkeys(kinds)
    )
    embed = ParamSpec(EMBEDDING, (vocab, hidden), ("vocab", "embed"))
    return model_blocks(config, (embed,), decoder, norm("model.norm", hidden))


def model_blocks(
    config: ConfigView, embedding: Params, decoder: tuple[Block, ...], final_norm: Params
) -> tuple[Block, ...]:
    """Return the blocks in forward order; with `tie_word_embeddings`, the head is tied to the first of `embedding`."""
    table = embedding[0]
    tied = table.name if config.flag("tie_word_embeddings") else None
    return (
        Block("embedding", (), embedding),
        *decoder,
        Block("final_norm", (), final_norm),
        Block("head", (), (ParamSpec("lm_head.weight", table.shape, table.dims, tied),)),
    )


def _decoder_block(
    config: ConfigView,
    family: Family,
    has_experts: bool,
    window: int | None,
    layers: tuple[int, ...],
) -> Block:
    hidden = config.integer("hidden_size")
    attention, params = _attention(config, family, window)
    if has_experts and family.experts is not None:
        mlp, mlp_params = _experts(config, family.experts)
    else:
        mlp = MlpSpec(config.integer("intermediate_size"), gated=True)
        bias = _decided(config, family.mlp_bias)
        mlp_params = _mlp(hidden, mlp.intermediate_size, "mlp", bias, family.fused_mlp)
    for name in family.norms:
        mlp_params += norm(f"{LAYER}.{name}", hidden)
    name = "moe_decoder" if mlp.num_experts else "decoder"
    return Block(name, layers, params + mlp_params, attention, mlp)


def _attention(config: ConfigView, family: Family, window: int | None) -> tuple[AttentionSpec, Params]:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if family.attention == "mla":
        return _latent_attention(config, family, hidden, heads)
    kv_heads = config.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        config.refuse(
            "`num_attention_heads` is not a multiple of `num_key_value_heads`",
            got=f"num_attention_heads={heads}, num_key_value_heads={kv_heads}",
            hint="every key-value head serves a whole number of query heads; correct one of the two",
        )
    width = config.optional_integer("head_dim")
    if width is None:
        if hidden % heads:
            config.refuse(
                "`hidden_size` is not a multiple of `num_attention_heads`, and `head_dim` is not given",
                got=f"hidden_size={hidden}, num_attention_heads={heads}",
                hint="add `head_dim` to the config",
            )
        width = hidden // heads
    kind = "full" if window is None else "sliding"
    spec = AttentionSpec(kind, heads, kv_heads, width, width, window, 2 * kv_heads * width)
    embed, query, key = ("embed", hidden), ("heads", heads * width), ("kv_heads", kv_heads * width)
    bias = _decided(config, family.qkv_bias)
    params: Params = (ParamSpec(f"{_ATTENTION}.sinks", (heads,), ("heads",)),) if family.sinks else ()
    if family.fused_qkv:
        params += linear(f"{_ATTENTION}.qkv_proj", ("qkv", query[1] + 2 * key[1]), embed, bias)
    else:
        for name, out in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            params += linear(f"{_ATTENTION}.{name}", out, embed, bias)
    params += linear(f"{_ATTENTION}.o_proj", embed, query, _decided(config, family.o_bias))
    if family.qk_norm != "none":
        per_head = ("head_dim", width)
        normed = (per_head, per_head) if family.qk_norm == "head" else (query, key)
        for name, (dim, size) in zip(("q_norm", "k_norm"), normed, strict=True):
            params += norm(f"{_ATTENTION}.{name}", size, dim)
    return spec, params


def _latent_attention(config: ConfigView, family: Family, hidden: int, heads: int) -> tuple[AttentionSpec, Params]:
    """Return spec and parameters of DeepSeek's latent attention.

    Key-value projections are low-rank, and so are query projections if `q_lora_rank` is set, with a norm between the
    factors. All heads share the rotary key.

    Source: DeepSeek-V2 technical report 2024, section 2.1.
    """
    kv_lora, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    nope, v_width = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
    q_lora, bias = config.optional_integer("q_lora_rank"), _decided(config, family.qkv_bias)
    # Every query head has a separate key and value, expanded from the latent: `num_key_value_heads` is unused.
    spec = AttentionSpec("mla", heads, heads, nope + rope, v_width, None, kv_lora + rope)
    embed, query = ("embed", hidden), ("heads", heads * spec.qk_head_dim)
    if q_lora is None:
        params = linear(f"{_ATTENTION}.q_proj", query, embed)
    else:
        params = linear(f"{_ATTENTION}.q_a_proj", ("q_lora", q_lora), embed, bias)
        params += norm(f"{_ATTENTION}.q_a_layernorm", q_lora, "q_lora")
        params += linear(f"{_ATTENTION}.q_b_proj", query, ("q_lora", q_lora))
    shared, expanded = ("kv_latent", kv_lora + rope), ("heads", heads * (nope + v_width))
    params += linear(f"{_ATTENTION}.kv_a_proj_with_mqa", shared, embed, bias)
    params += norm(f"{_ATTENTION}.kv_a_layernorm", kv_lora, "kv_lora")
    params += linear(f"{_ATTENTION}.kv_b_proj", expanded, ("kv_lora", kv_lora))
    return spec, params + linear(f"{_ATTENTION}.o_proj", embed, ("heads", heads * v_width), bias)


def _mlp(hidden: int, width: int, path: str, bias: bool = False, fused: bool = False) -> Params:
    """Return the parameters of a gated MLP: gate and up [F, D], or stacked [2F, D] if `fused`, and down [D, F]."""
    embed, mlp = ("embed", hidden), ("mlp", width)
    inputs = {"gate_proj": mlp, "up_proj": mlp}
    if fused:
        inputs = {"gate_up_proj": ("gate_up", 2 * width)}
    params: Params = ()
    for name, out in inputs.items():
        params += linear(f"{LAYER}.{path}.{name}", out, embed, bias)
    return params + linear(f"{LAYER}.{path}.down_proj", embed, mlp, bias)


def _experts(config: ConfigView, experts: Experts) -> tuple[MlpSpec, Params]:
    """Return spec and parameters of a mixture of experts: router [E, D], gate_up [E, 2F, D] and down [E, D, F].

    Shared experts, if there are any, are a gated MLP. GPT-OSS stores experts as (in, out), with interleaved gate and up
    columns. Its router and experts have biases.
    """
    hidden, width = config.integer("hidden_size"), config.integer(experts.width_key)
    num, per_token = config.integer("num_experts"), config.integer("num_experts_per_tok")
    if per_token > num:
        config.refuse(
            "a token is routed to more experts than the model has",
            got=f"num_experts_per_tok={per_token}, experts={num}",
            hint=f"set `num_experts_per_tok` to at most {num}",
        )
    shared = config.optional_integer(experts.shared_key, 0) or 0 if experts.shared_key else 0
    spec = MlpSpec(width, True, num, per_token, shared * width)
    prefix, router, embed = f"{LAYER}.mlp", ("router", num), ("embed", hidden)
    inputs, outputs = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    if experts.storage == "interleaved":
        pairs = "gate_up_pairs"
        return spec, (
            *linear(f"{prefix}.router", router, embed, bias=True),
            ParamSpec(inputs, (num, hidden, 2 * width), ("expert", "embed", pairs)),
            ParamSpec(f"{inputs}_bias", (num, 2 * width), ("expert", pairs)),
            ParamSpec(outputs, (num, width, hidden), ("expert", "mlp", "embed")),
            ParamSpec(f"{outputs}_bias", (num, hidden), ("expert", "embed")),
        )
    params = (
        *linear(f"{prefix}.gate", router, embed),
        ParamSpec(inputs, (num, 2 * width, hidden), ("expert", "gate_up", "embed")),
        ParamSpec(outputs, (num, hidden, width), ("expert", "embed", "mlp")),
    )
    return spec, params + (_mlp(hidden, shared * width, "mlp.shared_experts") if shared else ())


def _expert_layers(config: ConfigView, experts: Experts | None, num_layers: int) -> tuple[bool, ...]:
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
    """Return the attention window of every layer in tokens; None for full attention."""
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
            config.refuse(
                "`layer_types` does not name one type per layer",
                got=f"{len(types) if isinstance(types, list) else types!r} for {num_layers} layers",
                hint="give `layer_types` as many entries as `num_hidden_layers`, or remove it",
            )
        return tuple(window if t == "sliding_attention" else None for t in types)
    if family.windows == "upper":
        first = config.integer("max_window_layers", 0)
        return tuple(window if i >= first else None for i in range(num_layers))
    pattern = config.integer("sliding_window_pattern")
    return tuple(window if (i + 1) % pattern else None for i in range(num_layers))


def _refuse_unread(config: ConfigView) -> None:
    """Raise ModelUnreadable (HP305) for a key that changes parameters or attention and is not supported."""
    types = config.get("layer_types")
    if isinstance(types, list):
        known = ("full_attention", "sliding_attention")
        unknown = [t for t, _ in groupby(types) if t not in known]
        if unknown:
            config.refuse(
                "`layer_types` names a layer type that is not supported",
                got=sorted({str(t) for t in unknown}),
                hint="use a model whose layers all have full or sliding-window attention",
                allowed=known,
            )
    if config.flag("use_bidirectional_attention"):
        config.refuse(
            "`use_bidirectional_attention` makes this an encoder, not a causal language model",
            got="use_bidirectional_attention=true",
            hint="use a causal language model",
        )
    if config.get("moe_layer_freq") not in (None, 1):
        config.refuse(
            "`moe_layer_freq` other than 1 is not supported",
            got=config.get("moe_layer_freq"),
            hint="expert layers must follow `first_k_dense_replace` without gaps",
            allowed=1,
        )


def _decided(config: ConfigView, bias: Bias) -> bool:
    return bias if isinstance(bias, bool) else config.flag(bias)


def linear(name: str, out: tuple[str, int], inner: tuple[str, int], bias: bool = False) -> Params:
    """Return the parameters of a linear layer: weight [out, in] and, with `bias`, bias [out].

    `out` and `inner` are pairs of logical dim name and size.
    """
    weight = ParamSpec(f"{name}.weight", (out[1], inner[1]), (out[0], inner[0]))
    return (weight, ParamSpec(f"{name}.bias", (out[1],), (out[0],))) if bias else (weight,)


def norm(name: str, size: int, dim: str = "embed", bias: bool = False) -> Params:
    """Return the parameters of a norm over the logical dim `dim`: scale and, with `bias`, bias."""
    parts = ("weight", "bias") if bias else ("weight",)
    return tuple(ParamSpec(f"{name}.{part}", (size,), (dim,)) for part in parts)
