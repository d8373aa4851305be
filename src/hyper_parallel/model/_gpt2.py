"""Reader of GPT-2 and GPT-3 configs: learned positions, fused attention, ungated MLP, LayerNorm with bias, Conv1D."""

from __future__ import annotations

from hyper_parallel.model._config_json import ConfigView
from hyper_parallel.model._llama_like import Params, model_blocks, norm
from hyper_parallel.model._model_spec import AttentionSpec, Block, MlpSpec, ParamSpec

ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
DEFAULTS = {"max_position_embeddings": 1024, "tie_word_embeddings": True}
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

EMBEDDING = "transformer.wte.weight"
RULES = (("transformer.wte", "vocab"), ("lm_head", "head"), ("*", "whole"))
"""Pairs of module pattern and sharding style: tensor parallelism shards embedding and head, but no Conv1D weights."""


def read_blocks(config: ConfigView) -> tuple[Block, ...]:
    """Return the blocks of a model: embeddings of tokens and positions, decoder, final norm, head.

    Parameter names are those of transformers' `GPT2LMHeadModel`.

    Raises:
        ModelUnreadable: HP305 with missing keys, values of the wrong type, or unsupported features.
    """
    config.require(REQUIRED)
    if config.flag("add_cross_attention"):
        config.refuse(
            "`add_cross_attention` makes this the decoder of an encoder-decoder model, which is not supported",
            got="add_cross_attention=true",
            hint="use a causal language model",
        )
    hidden, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    heads = config.integer("num_attention_heads")
    positions = config.integer("max_position_embeddings")
    if hidden % heads:
        config.refuse(
            "`n_embd` is not a multiple of `n_head`",
            got=f"n_embd={hidden}, n_head={heads}",
            hint="correct one of the two",
        )
    width = config.optional_integer("intermediate_size") or 4 * hidden
    layer, embed, mlp = "transformer.h.*", ("embed", hidden), ("mlp", width)
    params = (
        *norm(f"{layer}.ln_1", hidden, bias=True),
        *_conv1d(f"{layer}.attn.c_attn", embed, ("qkv", 3 * hidden)),
        *_conv1d(f"{layer}.attn.c_proj", ("heads", hidden), embed),
        *norm(f"{layer}.ln_2", hidden, bias=True),
        *_conv1d(f"{layer}.mlp.c_fc", embed, mlp),
        *_conv1d(f"{layer}.mlp.c_proj", mlp, embed),
    )
    attention = AttentionSpec("full", heads, heads, hidden // heads, hidden // heads, None, 2 * hidden)
    embedding = (
        ParamSpec(EMBEDDING, (vocab, hidden), ("vocab", "embed")),
        ParamSpec("transformer.wpe.weight", (positions, hidden), ("position", "embed")),
    )
    layers = tuple(range(config.integer("num_hidden_layers")))
    decoder = Block("decoder", layers, params, attention, MlpSpec(width, gated=False))
    final_norm = norm("transformer.ln_f", hidden, bias=True)
    return model_blocks(config, embedding, (decoder,), final_norm)


def _conv1d(name: str, inner: tuple[str, int], out: tuple[str, int]) -> Params:
    """Return the parameters of transformers' Conv1D: weight [in, out] and bias [out]."""
    return (
        ParamSpec(f"{name}.weight", (inner[1], out[1]), (inner[0], out[0])),
        ParamSpec(f"{name}.bias", (out[1],), (out[0],)),
    )
