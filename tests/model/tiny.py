"""Tiny configs of every family, with the switches that change names, shapes or ties."""

BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE = {**BASE, "head_dim": 12}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    **BASE,
    **EXPERTS,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 100,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BIAS = {"attention_bias": True}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
SLIDING = {"use_sliding_window": True, "sliding_window": 16}

VARIANTS = [
    ("llama", "plain", BASE),
    ("llama", "wide-bias-tied", {**WIDE, **BIAS, **TIED, "mlp_bias": True}),
    ("mistral", "plain", BASE),
    ("mistral", "no-window", {**WIDE, "sliding_window": None}),
    ("mixtral", "plain", {**BASE, "num_local_experts": 4}),
    ("mixtral", "tied", {**WIDE, **TIED, "num_local_experts": 3, "sliding_window": 8}),
    ("qwen2", "plain", BASE),
    ("qwen2", "sliding-tied", {**BASE, **TIED, **SLIDING, "max_window_layers": 2}),
    ("qwen3", "plain", BASE),
    (
        "qwen3",
        "wide-bias-tied-sliding",
        {**WIDE, **BIAS, **TIED, **SLIDING, "max_window_layers": 1},
    ),
    ("qwen3_moe", "plain", {**BASE, **EXPERTS, "num_experts": 4}),
    ("qwen3_moe", "step", {**WIDE, **EXPERTS, "num_experts": 4, "decoder_sparse_step": 2}),
    (
        "qwen3_moe",
        "dense-first",
        {**WIDE, **EXPERTS, **SLIDING, **BIAS, "num_experts": 4, "mlp_only_layers": [0, 2]},
    ),
    ("deepseek_v3", "plain", MLA),
    ("deepseek_v3", "full-q", {**MLA, "q_lora_rank": None, "n_shared_experts": 2, **BIAS}),
    ("deepseek_v3", "no-dense", {**MLA, "first_k_dense_replace": 0, **TIED}),
    ("gpt_oss", "plain", {**BASE, "num_local_experts": 4}),
    (
        "gpt_oss",
        "no-bias-odd",
        {**WIDE, "num_local_experts": 4, "num_hidden_layers": 3, "attention_bias": False},
    ),
    ("gemma", "plain", BASE),
    ("gemma", "untied", {**WIDE, **UNTIED}),
    ("gemma2", "plain", BASE),
    ("gemma2", "bias", {**WIDE, **BIAS}),
    ("gemma3_text", "plain", {**BASE, "num_hidden_layers": 7}),
    ("gemma3_text", "untied", {**WIDE, **UNTIED}),
    ("phi3", "plain", BASE),
    ("phi3", "tied-sliding", {**BASE, **TIED, "sliding_window": 8}),
    ("olmo2", "plain", BASE),
    ("olmo2", "bias-tied", {**BASE, **BIAS, **TIED}),
    ("olmo3", "plain", BASE),
    ("olmo3", "short-window", {**BASE, "sliding_window": 8, "num_hidden_layers": 5}),
    ("glm", "plain", BASE),
    ("glm4", "plain", BASE),
    ("glm4", "no-bias-tied", {**WIDE, **TIED, "attention_bias": False}),
    ("gpt2", "plain", GPT2),
    ("gpt2", "inner-untied", {**GPT2, **UNTIED, "n_inner": 40}),
]
"""model_type, name of the variant, keyword arguments of its configuration class."""
