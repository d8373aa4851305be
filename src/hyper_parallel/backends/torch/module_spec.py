"""ModelSpec of a module, for models that no reader of `hyper_parallel.model` knows.

The module may have any class, on the meta device or not. Parameters, ties and layers are read from the module; heads,
windows and the number of experts per token from its Hugging Face config, if it has one. The notes list values that are
assumed because neither has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from hyper_parallel.backends.torch.model_layouts import module_rules
from hyper_parallel.backends.torch.model_structure import block_list, text_config
from hyper_parallel.backends.torch.weights.initialization import base_parameters
from hyper_parallel.model import AttentionSpec, Block, MlpSpec, ModelSpec, ParamSpec

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
_VISITED = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
)
_SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def read_model(model: nn.Module, name: str) -> ModelSpec:
    """Return the description of a module for planning.

    Args:
        model: Any module; parameter values are not read.
        name: Display name.

    Returns:
        Description with one block for all layers of equal parameters and attention, under the names of the module.
    """
    config = text_config(model)
    hidden = _number(config, ("hidden_size", "n_embd", "d_model")) or _embedding_width(model)
    path, layers = block_list(model) or ("", nn.ModuleList())
    ends = _ends(model)
    inside: list[list[ParamSpec]] = [[] for _ in layers]
    outside: dict[str, list[ParamSpec]] = {"embedding": [], "final_norm": [], "head": []}
    first: dict[int, str] = {}
    for full, param in base_parameters(model, remove_duplicate=False):
        # A shared weight belongs to the first module that has it and counts once.
        owner = first.setdefault(id(param), full)
        shape, tied = tuple(param.shape), None if owner == full else owner
        index, _, rest = full.removeprefix(f"{path}.").partition(".")
        if path and full.startswith(f"{path}.") and index.isdecimal():
            spec = ParamSpec(f"{path}.*.{rest}", shape, _dims(rest, shape, hidden), tied)
            inside[int(index)].append(spec)
        else:
            end = ends.get(full.rpartition(".")[0], "final_norm")
            dims = _dims(full, shape, hidden)
            if end != "final_norm" and len(shape) == 2:
                dims = ("vocab", "embed")
            outside[end].append(ParamSpec(full, shape, dims, tied))
    decoder = tuple(_decoder(model, inside, list(layers), hidden))
    if not layers:  # the cost model treats the module as one layer
        decoder = (Block("decoder", (0,), tuple(outside.pop("final_norm"))),)
    blocks = (
        Block("embedding", (), tuple(outside["embedding"])),
        *decoder,
        *(Block(n, (), tuple(outside[n])) for n in ("final_norm", "head") if outside.get(n)),
    )
    return ModelSpec(
        name=name,
        family=getattr(config, "model_type", None) or type(model).__name__,
        dtype=_dtype(model),
        hidden_size=hidden,
        num_layers=max(1, len(layers)),
        vocab_size=_number(config, ("vocab_size",)) or _rows(outside),
        tied_embeddings=any(p.tied_to for p in outside["head"]),
        blocks=blocks,
        notes=tuple(_notes(model, blocks)),
        max_position_embeddings=_number(config, _POSITIONS) or None,
        rules=tuple((rule.pattern, rule.style) for rule in module_rules(model)),
    )


def _notes(model: nn.Module, blocks: tuple[Block, ...]) -> Iterator[str]:
    """Yield the notes of the plan: the source of the description, and assumed values."""
    yield f"`{type(model).__name__}` was read from the module itself"
    if any(b.name == "moe_decoder" for b in blocks) and not _number(text_config(model), _VISITED):
        yield "the config has no number of experts per token: costs assume one"
    if num_layers := sum(b.count for b in blocks if b.layers and not b.attention):
        yield f"{num_layers} layers have no known attention: costs include their matrices only"


def _decoder(
    model: nn.Module, params: list[list[ParamSpec]], layers: list[nn.Module], hidden: int
) -> Iterator[Block]:
    """Yield the layers, with one block for all layers of equal parameters, attention and feed-forward part."""
    config, whole = text_config(model), getattr(model, "config", None)
    varied = getattr(whole, "is_heterogeneous", False)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, (layer, own) in enumerate(zip(layers, params, strict=True)):
        attention = _attention(layer, whole.per_layer_config[i] if varied else config, i, hidden)
        kinds.setdefault((tuple(own), attention, _mlp(own, config, hidden)), []).append(i)
    for (own, attention, mlp), indices in kinds.items():
        kind = "moe_decoder" if mlp and mlp.num_experts else "decoder"
        yield Block(kind, tuple(indices), own, attention, mlp)


def _ends(model: nn.Module) -> dict[str, str]:
    """Return the block (embedding or head) of the modules that embed tokens or positions or compute logits."""
    ends = {name: "embedding" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    names = {id(module): name for name, module in model.named_modules()}
    for end, get in (("embedding", "get_input_embeddings"), ("head", "get_output_embeddings")):
        with suppress(AttributeError, NotImplementedError):
            module = getattr(model, get)()
            if id(module) in names:
                ends[names[id(module)]] = end
    return ends


def _rows(outside: dict[str, list[ParamSpec]]) -> int:
    return next((p.shape[0] for p in (*outside["embedding"], *outside["head"])), 1)


def _embedding_width(model: nn.Module) -> int:
    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    widths = [p.shape[-1] for p in model.parameters() if p.dim()]
    return table.embedding_dim if table is not None else max(widths, key=widths.count, default=1)


def _dims(name: str, shape: tuple[int, ...], hidden: int) -> tuple[str, ...]:
    words = ["embed" if size == hidden else "features" for size in shape]
    parts = [*name.split("."), ""]
    # One parameter of all experts, or of the first expert of a list.
    fused = "experts" in parts and not parts[parts.index("experts") + 1].isdecimal()
    return ("expert", *words[1:]) if fused and len(shape) > 1 else tuple(words)


def _attention(layer: nn.Module, config: Any, index: int, hidden: int) -> AttentionSpec | None:
    """Return the attention of a layer with a submodule of that name that has parameters; None for unknown attention."""
    named = (n.rpartition(".")[2] for n, m in layer.named_modules() if [*m.parameters()])
    heads = _number(config, _HEADS)
    if not heads or not any(
        ("attn" in n or "attention" in n) and "linear" not in n and "norm" not in n for n in named
    ):
        return None
    kv_heads = 1 if getattr(config, "multi_query", False) is True else _number(config, _KV_HEADS)
    kv_heads = kv_heads or heads
    width = _number(config, ("head_dim",)) or max(1, hidden // heads)
    types = getattr(config, "layer_types", None)
    kind = types[index] if isinstance(types, list) and index < len(types) else ""
    window = _number(config, ("sliding_window",)) if "sliding" in kind or not kind else 0
    if latent := _number(config, ("kv_lora_rank",)):
        rope = _number(config, ("qk_rope_head_dim",))
        key = _number(config, ("qk_nope_head_dim",)) + rope or width
        value = _number(config, ("v_head_dim",)) or width
        return AttentionSpec("mla", heads, heads, key, value, None, latent + rope)
    kind = "sliding" if window else "full"
    return AttentionSpec(kind, heads, kv_heads, width, width, window or None, 2 * kv_heads * width)


def _mlp(params: list[ParamSpec], config: Any, hidden: int) -> MlpSpec | None:
    """Return the feed-forward part of a layer, from its experts or from the width in the config or the matrices."""
    matrices = [
        p for p in params if p.is_matrix and "attn" not in p.name and "attention" not in p.name
    ]
    gated = any(
        "gate" in p.name.rsplit(".", 2)[-2] or p.name.endswith("gate_up_proj") for p in matrices
    )
    inner = [size for p in matrices if "mlp" in p.name for size in p.shape if size != hidden]
    width = _number(config, _WIDTHS) or max(inner, default=0)
    experts = [p for p in params if p.is_expert]
    if experts:
        narrow = _number(config, ("moe_intermediate_size",)) or width or experts[0].shape[-1]
        shared = _number(config, _SHARED) or _number(config, ("n_shared_experts",)) * narrow
        visited = _number(config, _VISITED) or 1
        return MlpSpec(narrow, True, experts[0].shape[0], visited, shared)
    if width and any(width in p.shape or 2 * width in p.shape for p in matrices):
        return MlpSpec(width, gated)
    return None


def _number(config: Any, keys: tuple[str, ...]) -> int:
    """Return the first positive integer among the values of some keys, or 0."""
    values: Iterator[Any] = (getattr(config, key, None) for key in keys)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), 0)


def _dtype(model: nn.Module) -> str:
    parameter: Tensor | None = next(iter(model.parameters()), None)
    return "float32" if parameter is None else str(parameter.dtype).removeprefix("torch.")
