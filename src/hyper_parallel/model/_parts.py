"""Builders of parameter lists: attention, latent attention, MLP, experts. All pure; shapes as torch stores them.

Letters: D embed, H heads, G kv heads, K head width, F mlp width, E experts, V vocab.
"""

from __future__ import annotations

from hyper_parallel.model._model_spec import AttentionSpec, MlpSpec, ParamSpec

LAYER = "model.layers.*"
"""Prefix of a layer's parameters in every Llama-like model."""

Params = tuple[ParamSpec, ...]


def linear(name: str, out: tuple[str, int], inner: tuple[str, int], bias: bool = False) -> Params:
    """Weight [out, in] and, when asked, bias [out] of a linear layer; `out` and `inner` are (dim, size)."""
    weight = ParamSpec(f"{name}.weight", (out[1], inner[1]), (out[0], inner[0]))
    return (weight, ParamSpec(f"{name}.bias", (out[1],), (out[0],))) if bias else (weight,)


def norm(name: str, size: int, dim: str = "embed") -> Params:
    """Scale of an RMSNorm."""
    return (ParamSpec(f"{name}.weight", (size,), (dim,)),)


def norms(hidden: int, names: tuple[str, ...]) -> Params:
    """Norms of a layer over the residual width."""
    return tuple(p for name in names for p in norm(f"{LAYER}.{name}", hidden))


def attention_params(
    hidden: int,
    spec: AttentionSpec,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: str = "none",
    sinks: bool = False,
    fused: bool = False,
) -> Params:
    """Grouped-query attention.

    Args:
        hidden: D.
        spec: Heads and widths.
        qkv_bias: Biases on query, key and value.
        o_bias: Bias on the output projection.
        qk_norm: Norms of query and key: none, over each head (Qwen3, Gemma 3), or over all heads together (OLMo 2).
        sinks: One learned score per head that no value belongs to (GPT-OSS).
        fused: Query, key and value stacked in one projection (Phi-3).
    """
    at = f"{LAYER}.self_attn"
    embed = ("embed", hidden)
    heads = ("heads", spec.num_heads * spec.qk_head_dim)
    kv_heads = ("kv_heads", spec.num_kv_heads * spec.qk_head_dim)
    out: Params = (ParamSpec(f"{at}.sinks", (spec.num_heads,), ("heads",)),) if sinks else ()
    if fused:
        out += linear(f"{at}.qkv_proj", ("qkv", heads[1] + 2 * kv_heads[1]), embed, qkv_bias)
    else:
        out += linear(f"{at}.q_proj", heads, embed, qkv_bias)
        out += linear(f"{at}.k_proj", kv_heads, embed, qkv_bias)
        out += linear(f"{at}.v_proj", kv_heads, embed, qkv_bias)
    out += linear(f"{at}.o_proj", embed, heads, o_bias)
    if qk_norm == "head":
        out += norm(f"{at}.q_norm", spec.qk_head_dim, "head_dim")
        out += norm(f"{at}.k_norm", spec.qk_head_dim, "head_dim")
    elif qk_norm == "heads":
        out += norm(f"{at}.q_norm", heads[1], "heads")
        out += norm(f"{at}.k_norm", kv_heads[1], "kv_heads")
    return out


def latent_attention_params(
    hidden: int,
    spec: AttentionSpec,
    *,
    q_lora: int | None,
    kv_lora: int,
    rope_dim: int,
    bias: bool = False,
) -> Params:
    """Multi-head latent attention: low-rank query and key-value projections with norms between.

    Args:
        hidden: D.
        spec: Heads and widths; `qk_head_dim` includes the rotary part.
        q_lora: Rank of the query; None is one full projection.
        kv_lora: Rank of key and value.
        rope_dim: Width of the rotary key that all heads share.
        bias: Biases on the projections into the latent and out of attention.

    Source: DeepSeek-V2 technical report 2024, section 2.1.
    """
    at = f"{LAYER}.self_attn"
    embed = ("embed", hidden)
    q_heads = ("heads", spec.num_heads * spec.qk_head_dim)
    kv_out = ("heads", spec.num_heads * (spec.qk_head_dim - rope_dim + spec.v_head_dim))
    if q_lora is None:
        out = linear(f"{at}.q_proj", q_heads, embed)
    else:
        out = linear(f"{at}.q_a_proj", ("q_lora", q_lora), embed, bias)
        out += norm(f"{at}.q_a_layernorm", q_lora, "q_lora")
        out += linear(f"{at}.q_b_proj", q_heads, ("q_lora", q_lora))
    out += linear(f"{at}.kv_a_proj_with_mqa", ("kv_latent", kv_lora + rope_dim), embed, bias)
    out += norm(f"{at}.kv_a_layernorm", kv_lora, "kv_lora")
    out += linear(f"{at}.kv_b_proj", kv_out, ("kv_lora", kv_lora))
    return out + linear(f"{at}.o_proj", embed, ("heads", spec.num_heads * spec.v_head_dim), bias)


def mlp_params(
    hidden: int, width: int, *, at: str = "mlp", bias: bool = False, fused: bool = False
) -> Params:
    """Gated MLP: gate and up [F, D] (stacked [2F, D] when `fused`), down [D, F]."""
    at = f"{LAYER}.{at}"
    embed, mlp = ("embed", hidden), ("mlp", width)
    if fused:
        return linear(f"{at}.gate_up_proj", ("gate_up", 2 * width), embed, bias) + linear(
            f"{at}.down_proj", embed, mlp, bias
        )
    return (
        linear(f"{at}.gate_proj", mlp, embed, bias)
        + linear(f"{at}.up_proj", mlp, embed, bias)
        + linear(f"{at}.down_proj", embed, mlp, bias)
    )


def expert_params(hidden: int, spec: MlpSpec) -> Params:
    """Router [E, D] and experts as two tensors: gate_up [E, 2F, D] and down [E, D, F]."""
    at, num, width = f"{LAYER}.mlp", spec.num_experts, spec.intermediate_size
    out: Params = (
        *linear(f"{at}.gate", ("router", num), ("embed", hidden)),
        ParamSpec(
            f"{at}.experts.gate_up_proj", (num, 2 * width, hidden), ("expert", "gate_up", "embed")
        ),
        ParamSpec(f"{at}.experts.down_proj", (num, hidden, width), ("expert", "embed", "mlp")),
    )
    if spec.shared_intermediate_size:
        out += mlp_params(hidden, spec.shared_intermediate_size, at="mlp.shared_experts")
    return out


def interleaved_expert_params(hidden: int, spec: MlpSpec) -> Params:
    """GPT-OSS experts: stored (in, out), gate and up interleaved column by column, everything with a bias."""
    at, num, width = f"{LAYER}.mlp", spec.num_experts, spec.intermediate_size
    pairs = "gate_up_pairs"
    return (
        *linear(f"{at}.router", ("router", num), ("embed", hidden), bias=True),
        ParamSpec(
            f"{at}.experts.gate_up_proj", (num, hidden, 2 * width), ("expert", "embed", pairs)
        ),
        ParamSpec(f"{at}.experts.gate_up_proj_bias", (num, 2 * width), ("expert", pairs)),
        ParamSpec(f"{at}.experts.down_proj", (num, width, hidden), ("expert", "mlp", "embed")),
        ParamSpec(f"{at}.experts.down_proj_bias", (num, hidden), ("expert", "embed")),
    )


def head(vocab: int, hidden: int, tied_to: str | None) -> ParamSpec:
    """The output projection [V, D]."""
    return ParamSpec("lm_head.weight", (vocab, hidden), ("vocab", "embed"), tied_to)
