"""Tiny models of six families, with the names of their Hugging Face configurations."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from hyper_parallel.backends.torch.forward_variants import cache_argument

_LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 8},
    "gpt2": None,
}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "loss_type": "ForCausalLM",
}


def tiny_model(family, seed=0, **changes):
    extra = FAMILIES.get(family, {})
    values = _GPT2 if extra is None else {**_LLAMA_LIKE, **extra}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**values, **changes})
    return AutoModelForCausalLM.from_config(config)


def tokens(seed, batch=2, length=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (batch, length), generator=generator)


def static_cache(model, length=32, batch=2):
    """A static cache with its tensors allocated."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    with torch.no_grad():
        model(tokens(99, batch, 4), use_cache=True, **{cache_argument(model.forward): cache})
    cache.reset()
    return cache
