"""The model of a row: a config.json made of its shape and of the family that its name implies."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from hyper_parallel.calibration._row import RowError, RunRow
from hyper_parallel.model import Block, ModelSpec, ParamSpec, spec_from_config

_LATENT: Final = re.compile(r"deepseek[-_ ]?(v2|v3|r1)|kimi[-_ ]?k2|moonlight")
"""Names of models with multi-head latent attention."""
_SINKS: Final = re.compile(r"gpt[-_ ]?oss")
"""Names of models with sinks, biases and windows in every other layer."""
_QUERY_RANK_FROM: Final = 5120
"""Hidden size from which latent attention compresses its queries too: DeepSeek-V2 does, V2-Lite does not."""
_VOCABULARY: Final = 128_000
"""Where none is stated: that of Llama 3 without its special tokens."""


def model_of(row: RunRow, notes: list[str]) -> ModelSpec:
    """The model of a row that states layers, hidden size and heads.

    Args:
        row: The row.
        notes: Sentences about gaps that were filled; more are added.

    Raises:
        RowError: When the numbers are no model's.
        ModelUnreadable: HP305 for what only the reader of the family sees.
    """
    assert row.layers, "it is stated"
    assert row.hidden, "it is stated"
    assert row.heads, "it is stated"
    name, experts, gated = row.model or "model", row.experts or 0, row.gated != 0
    kv_heads = row.kv_heads or row.heads
    width = row.head_dim or row.hidden // row.heads
    if not width or row.heads % kv_heads:
        wrong = f"hidden = {row.hidden}" if not width else f"kv_heads = {kv_heads}"
        raise RowError(f"{wrong} does not fit heads = {row.heads}")
    if row.topk and row.topk > experts > 0:
        raise RowError(f"topk = {row.topk} is more than the {experts} experts")
    ffn = row.ffn or ((row.moe_ffn or 0) if experts else 4 * row.hidden)
    if not ffn:
        raise RowError("what is missing: `moe_ffn`, the width of an expert")
    vocabulary = row.vocab or _VOCABULARY
    values = {"kv_heads": kv_heads, "head_dim": width, "ffn": ffn, "vocab": vocabulary}
    if experts:
        values |= {"topk": row.topk or min(2, experts), "moe_ffn": row.moe_ffn or ffn}
    notes += [
        f"{key}={value}: not stated" for key, value in values.items() if not getattr(row, key)
    ]
    tied = not gated and not experts
    if not tied and not experts and _named_as_tied(row, values):
        tied = True
        notes.append("embedding and head are tied: by the parameters in the model's name")
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": row.hidden, "intermediate_size": ffn, "num_hidden_layers": row.layers,
        "num_attention_heads": row.heads, "num_key_value_heads": kv_heads, "head_dim": width,
        "vocab_size": vocabulary, "tie_word_embeddings": tied,
    }  # fmt: skip
    dense = min(row.dense_layers or 0, row.layers) if experts else row.layers
    shared = (row.shared_experts or 0) if experts else 0
    if experts:
        config |= {
            "model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": values["topk"],
            "moe_intermediate_size": values["moe_ffn"], "mlp_only_layers": list(range(dense)),
        }  # fmt: skip
    if _LATENT.search(name.lower()):
        notes.append("latent attention (MLA, 512 + 64 wide): by the model's name")
        config |= {
            "model_type": "deepseek_v3", "n_shared_experts": shared or None, "first_k_dense_replace": dense,
            "q_lora_rank": 1536 if row.hidden >= _QUERY_RANK_FROM else None,
        }  # fmt: skip
        shared = 0
    elif _SINKS.search(name.lower()):
        notes.append("every other layer sees 128 tokens: by the model's name")
        config |= {"model_type": "gpt_oss", "intermediate_size": values.get("moe_ffn", ffn)}
    spec = spec_from_config(config, name=name)
    if gated and not shared:
        return spec
    blocks = tuple(_changed(b, row.hidden, gated, shared) for b in spec.blocks)
    return replace(spec, blocks=blocks)


def _changed(block: Block, hidden: int, gated: bool, shared: int) -> Block:
    """A block with a plain feed-forward part, or with shared experts beside the routed ones."""
    mlp, params = block.mlp, block.params
    if mlp is None:
        return block
    if not gated:
        params = tuple(
            replace(p, shape=(p.shape[0], p.shape[1] // 2, p.shape[2]))
            if p.name.endswith("experts.gate_up_proj")
            else p
            for p in params
            if not p.name.endswith("mlp.gate_proj.weight")
        )
    if shared and mlp.num_experts:
        width, at = shared * mlp.intermediate_size, "model.layers.*.mlp.shared_experts"
        mlp = replace(mlp, shared_intermediate_size=width)
        inputs = ("gate_proj", "up_proj") if gated else ("up_proj",)
        wide = [ParamSpec(f"{at}.{n}.weight", (width, hidden), ("mlp", "embed")) for n in inputs]
        params += (*wide, ParamSpec(f"{at}.down_proj.weight", (hidden, width), ("embed", "mlp")))
    return replace(block, params=params, mlp=replace(mlp, gated=gated))


def _named_as_tied(row: RunRow, values: dict[str, int]) -> bool:
    """Whether the count in a dense model's name fits with one embedding matrix and not with two."""
    billions = re.search(r"(\d+(?:\.\d+)?)B\b", row.model)
    if not billions:
        return False
    layers, hidden, heads = row.layers or 0, row.hidden or 0, row.heads or 0
    attention = 2 * (heads + values["kv_heads"]) * values["head_dim"]
    layer, named = attention + 3 * values["ffn"], 1e9 * float(billions[1])
    one, two = (abs((layers * layer + n * values["vocab"]) * hidden / named - 1.0) for n in (1, 2))
    return one < 0.01 and two > 0.03
