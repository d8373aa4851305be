"""Layouts of a model's parameters, and the `ModelSpec` of any torch module, which the planner reads.

`hyper_parallel.model` reads a ModelSpec from the config of a known model family. For other modules, parameters, tied
weights and layers are read from the module itself, also on the meta device. Heads, windows and the number of experts
per token are read from the module's Hugging Face config, if it has one. Other values are assumed. The notes of the
ModelSpec name an assumed number of experts per token, and layers whose attention is unknown.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from torch import nn

from hyper_parallel.backends.torch.layer_flow import count_norm_calls
from hyper_parallel.backends.torch.model_structure import text_config, view_of
from hyper_parallel.backends.torch.token_scores import SCORE, scores_tokens
from hyper_parallel.backends.torch.weights.initialization import base_parameters
from hyper_parallel.backends.torch.weights.lora import adapter_layouts, has_adapters
from hyper_parallel.errors import PlanMismatch, UnsupportedSharding
from hyper_parallel.ir import Layout, Plan, Rule, Strategy
from hyper_parallel.model import AttentionSpec, Block, MlpSpec, ModelSpec, ParamSpec
from hyper_parallel.shard import (
    COLUMN_STYLES,
    STYLES,
    ShardPlan,
    completed_rules,
    covers,
    derived_rules,
    module_of,
    normalise_plan,
    plan_layouts,
    without_axes,
)

_STYLES_OF_HEADS: Final = ("kv_replicate", "qkv", "latent", "norm_heads")
"""Sharding styles that need the number of attention heads."""
_WIDTH_OF_INPUT: Final = ("TrOCRAttention",)
"""Attention classes that cannot be sharded, because they reshape attention's output to the width of their input."""


def resolve_layouts(model: nn.Module, plan: Plan) -> ShardPlan:
    """Return the layouts of a model's parameters and adapters, and check that the plan has the same layouts.

    Raises:
        PlanMismatch: HP307 for the first parameter, in order of names, whose layout differs.
        RuleError: HP204 for invalid sharding rules.
        NotDivisible: HP203 for a parallel degree that does not divide the size of a dim.
        UnsupportedSharding: HP205 for a model that the strategy cannot shard.
    """
    params = [(name, tuple(p.shape), ()) for name, p in base_parameters(model)]
    strategy, text = plan.strategy, text_config(model)
    if text is None:
        _refuse_styles_of_heads(model, strategy)
    _require_dims(params, strategy)
    # A module without a config has no heads to check; styles that need heads raise above.
    heads, kv_heads, head_dim = _heads(text, strategy.tp * strategy.cp)
    shard_plan = plan_layouts(
        params,
        module_rules(model),
        strategy,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_number(text, "vocab_size") or strategy.tp,
        staged=True,
    )
    if strategy.tp > 1:
        _require_linear(model, shard_plan.styles)
    if strategy.recompute != "none" and not view_of(model).layers:
        raise UnsupportedSharding(
            "recompute needs a model with a list of layers of one class",
            where="training.recompute",
            got=f"recompute={strategy.recompute}, {type(model).__name__}",
            hint="training.recompute=none training.recompute_layers=null",
        )
    if strategy.tp * strategy.cp * strategy.pp > 1 and is_reversible(model):
        raise UnsupportedSharding(
            "tp, cp and pp do not support reversible layers, whose backward recomputes without collectives",
            where=type(model).__name__,
            got=f"tp={strategy.tp} cp={strategy.cp} pp={strategy.pp}",
            allowed="dp_replicate, dp_shard",
            changes=without_axes(strategy, *(axis for axis in ("tp", "cp", "pp") if getattr(strategy, axis) > 1)),
        )
    if has_adapters(model) and is_reversible(model):
        raise UnsupportedSharding(
            "reversible layers need gradients of their inputs, but with adapters the embedding is frozen",
            where="lora",
            got=type(model).__name__,
            hint="lora=null",
        )
    _compare(shard_plan.layouts, plan, model)
    adapters = adapter_layouts(model, shard_plan.layouts, strategy)
    return replace(shard_plan, layouts=shard_plan.layouts | adapters)


def is_reversible(model: nn.Module) -> bool:
    """Return whether backward recomputes the inputs of layers from their outputs (reversible layers, as in Reformer).

    A reversible layer is recognized by its method `backward_pass`.
    """
    return any(hasattr(module, "backward_pass") for module in model.modules())


def _refuse_styles_of_heads(model: nn.Module, strategy: Strategy) -> None:
    """Raise HP205 for the first rule with a style that needs the number of attention heads."""
    for rule in strategy.rules:
        if rule.style in _STYLES_OF_HEADS:
            raise UnsupportedSharding(
                f"style `{rule.style}` splits at attention heads, but the number of heads is unknown: "
                "the model has no Hugging Face config",
                where=f"parallel.rules: {rule.pattern}",
                got=type(model).__name__,
                allowed=[style for style in STYLES if style not in _STYLES_OF_HEADS],
                hint=f"give `{rule.pattern}` an allowed style, or remove the rule and use FSDP instead of tp",
            )


def _require_dims(params: Sequence[tuple[str, tuple[int, ...], Any]], strategy: Strategy) -> None:
    """Raise HP205 for scalar parameters with data or context parallelism, which use FSDP."""
    scalar = next((name for name, shape, _ in params if not shape), None)
    if scalar is not None and strategy.dp * strategy.cp > 1:
        degrees = f"dp_replicate={strategy.dp_replicate}, dp_shard={strategy.dp_shard}"
        raise UnsupportedSharding(
            "FSDP does not support scalar parameters",
            where=scalar,
            got=f"{degrees}, cp={strategy.cp}",
            allowed="parameters with at least one dim",
            hint=f"give `{scalar}` the shape [1]",
        )


def _require_linear(model: nn.Module, styles: dict[str, str]) -> None:
    """Raise HP205 if a rule shards a module that is neither an `nn.Linear` nor a norm over heads."""
    for name, module in model.named_modules():
        split = styles.get(name) in (*COLUMN_STYLES, "rowwise", "head")
        if split and type(module).forward is not nn.Linear.forward and module._parameters:
            if any(p.dim() == 1 and n == "weight" for n, p in module.named_parameters()):
                continue  # the scale of a norm over heads
            raise UnsupportedSharding(
                f"a rule shards a {type(module).__name__}, but only nn.Linear can be sharded over ranks",
                where=name,
                got=type(module).__name__,
                hint=f"'parallel.rules={{{starred(name)}: replicate}}', without other rules that match it",
            )


def starred(name: str) -> str:
    """Return a parameter name with `*` for every index, as in plans."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def module_rules(model: nn.Module) -> tuple[Rule, ...]:
    """Return the sharding rules of a Hugging Face model, embedding and head included; () for any other module.

    The rules of the config class (`base_model_tp_plan`) are used if they cover all parameters of a decoder. Otherwise
    the rules are derived from the structure of the model.
    """
    config = text_config(model)
    if config is None:
        return ()
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    rules = normalise_plan(getattr(config, "base_model_tp_plan", None), prefix)
    # Plans of transformers since 5.24 contain embedding and head, whose rules come from `_end_rules`.
    rules = [rule for rule in rules if rule.style not in ("vocab", "head")]
    ends = _end_rules(model)
    planned = (*ends, *completed_rules(getattr(config, "model_type", ""), prefix), *rules)
    shapes = {name: tuple(p.shape) for name, p in base_parameters(model)}
    heads, kv_heads, head_dim = _heads(config, 1)
    if _has_decoder(model) and covers(shapes.items(), planned, heads, kv_heads, head_dim):
        return planned
    shared = {n for n, _ in base_parameters(model, remove_duplicate=False)} - shapes.keys()
    # Modules with `set_attention_type` replace their attention module at run time by an unwrapped one.
    choosers = {n for n, m in model.named_modules() if hasattr(m, "set_attention_type")}
    choosers -= {module_of(n) for n in choosers}
    narrowed = {n for n, m in model.named_modules() if type(m).__name__ in _WIDTH_OF_INPUT}
    # A parameter shared by modules has the name of one of them; the other modules would not be sharded.
    names = {id(p): name for name, p in model.named_parameters()}
    shared |= {names[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if n in shared}
    linear = frozenset(
        n
        for n, m in model.named_modules()
        if type(m).forward is nn.Linear.forward
        and module_of(n) not in narrowed
        and module_of(module_of(n)) not in choosers
        and f"{n}.weight" in shapes
        and shared.isdisjoint((f"{n}.weight", f"{n}.bias"))
    )
    experts = (rule for rule in rules if rule.style == "experts")
    derived = (*ends, *experts, *derived_rules(shapes, linear, heads, kv_heads))
    if covers(shapes.items(), derived, heads, kv_heads, head_dim) and not _has_decoder(model):
        # Without a sharded embedding, activations are replicated.
        return tuple(rule for rule in derived if rule.style != "vocab")
    return derived


def _end_rules(model: nn.Module) -> tuple[Rule, ...]:
    """Return rules for the embedding and the head that can be sharded, and for the score head of a reward model.

    Return () if another module shares a weight of the embedding or head, or if both share a weight and one of them
    cannot be sharded.
    """
    names = {module: name for name, module in model.named_modules()}
    ends = _declared_ends(model)
    embedding, head = ends.get("vocab"), ends.get("head")
    weights = {id(p) for end in ends.values() for p in end.parameters(recurse=False)}
    owned = [
        id(p) for n, m in model.named_modules() if m not in ends.values()
        for p in m.parameters(recurse=False)
    ]  # fmt: skip
    if not weights.isdisjoint(owned):
        return ()
    weights_of = {style: {id(p) for p in end.parameters()} for style, end in ends.items()}
    tied = not weights_of.get("vocab", set()).isdisjoint(weights_of.get("head", ()))
    whole = {"vocab"} if embedding is not None and not _splits_rows(embedding) else set()
    whole |= {"head"} if head is not None and type(head).forward is not nn.Linear.forward else set()
    if whole and tied:
        return ()
    ends = {style: module for style, module in ends.items() if style not in whole}
    scores = (Rule(SCORE, "replicate"),) if scores_tokens(model) else ()
    return (*(Rule(names[module], style) for style, module in ends.items()), *scores)


def _declared_ends(model: nn.Module) -> dict[str, nn.Module]:
    """Return the embedding ("vocab") and the output head ("head") from the getters of a Hugging Face model."""
    modules, ends = {*model.modules()}, dict[str, nn.Module]()
    for style, get in (("vocab", "get_input_embeddings"), ("head", "get_output_embeddings")):
        with suppress(AttributeError, NotImplementedError):  # the class does not name the module
            if (module := getattr(model, get)()) in modules:
                ends[style] = module
    return ends


def _splits_rows(module: nn.Module) -> bool:
    """Return whether an embedding can be sharded by rows: its forward looks up rows and scales them at most."""
    own = type(module).forward is not nn.Embedding.forward and not hasattr(module, "embed_scale")
    return isinstance(module, nn.Embedding) and not (
        own or module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    )


def _has_decoder(model: nn.Module) -> bool:
    """Return whether activations can be sharded: the model has an embedding, decoder layers and a final norm.

    The result is False if the norm also runs before the layers, as in NanoChat.
    """
    view = view_of(model)
    if view.base is None:
        return False
    try:
        norm = view.final_norm()
    except UnsupportedSharding:
        return False
    memo = _memo(type(model), type(view.base))
    if "calls" not in memo:
        memo["calls"] = count_norm_calls(model, view.layers, norm)
    return memo["calls"] <= 1


@functools.lru_cache(maxsize=256)
def _memo(model: type[nn.Module], base: type[nn.Module]) -> dict[str, int]:
    """Return the dict in which results for the classes of a model and its decoder are cached."""
    return {}


def _heads(config: Any, default: int) -> tuple[int, int, int]:
    """Return the number of query heads, the number of key and value heads, and the head width, from a model's config.

    `default` is the number of query heads if the config does not contain it.
    """
    heads = _number(config, "num_attention_heads") or default
    # Latent attention expands its own key and value for every head.
    is_latent = _number(config, "kv_lora_rank") > 0
    kv_heads = heads if is_latent else _number(config, "num_key_value_heads") or heads
    width = (_number(config, "hidden_size") or heads) // heads
    return heads, kv_heads, _number(config, "head_dim") or width


def _compare(layouts: dict[str, Layout], plan: Plan, model: nn.Module) -> None:
    own = {starred(name): layout for name, layout in layouts.items()}
    planned = {starred(name): layout for name, layout in dict(plan.layouts).items()}
    # A head tied to the embedding is one parameter in torch and two in a plan.
    tied = {n for n, _ in base_parameters(model, remove_duplicate=False)} - layouts.keys()
    for name in sorted(own.keys() | planned.keys()):
        actual, wanted = own.get(name), planned.get(name)
        if actual is None and name in tied:
            continue
        if actual is None or wanted is None or _cuts(actual) != _cuts(wanted):
            raise PlanMismatch(
                f"the layout of `{name}` in the plan differs from its layout in this model",
                got=f"model: {actual if actual is not None else 'no such parameter'}",
                allowed=f"plan: {wanted if wanted is not None else 'no such parameter'}",
                hint="create the plan from this model: hp.plan_of(model, strategy)",
            )


def _cuts(layout: Layout) -> tuple[list[tuple[tuple[str, ...], int]], tuple[str, ...]]:
    return [(axes, layout.parts_of(dim)) for dim, axes in enumerate(layout.axes)], layout.one_of


_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
_VISITED = (*("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts"),)
_SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def read_model(model: nn.Module, name: str) -> ModelSpec:
    """Return the `ModelSpec` of any module, for the planner; `name` is the name in reports.

    Shapes, structure and config are read, but no parameter values: parameters may be on the meta device.
    """
    config = text_config(model)
    hidden = _number(config, "hidden_size", "n_embd", "d_model") or _embedding_width(model)
    view = view_of(model)
    path, layers = view.path, view.layers
    dtypes = (str(p.dtype).removeprefix("torch.") for p in model.parameters())
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
            end = ends.get(module_of(full), "final_norm")
            dims = _dims(full, shape, hidden)
            if end != "final_norm" and len(shape) == 2:
                dims = ("vocab", "embed")
            outside[end].append(ParamSpec(full, shape, dims, tied))
    rows = (p.shape[0] for p in (*outside["embedding"], *outside["head"]))
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
        dtype=next(dtypes, "float32"),
        hidden_size=hidden,
        num_layers=max(1, len(layers)),
        vocab_size=_number(config, "vocab_size") or next(rows, 1),
        tied_embeddings=any(p.tied_to for p in outside["head"]),
        blocks=blocks,
        notes=tuple(_notes(model, blocks)),
        max_position_embeddings=_number(config, *_POSITIONS) or None,
        rules=tuple((rule.pattern, rule.style) for rule in module_rules(model)),
    )


def _notes(model: nn.Module, blocks: tuple[Block, ...]) -> Iterator[str]:
    yield f"`{type(model).__name__}` was read from the module itself"
    visited = _number(text_config(model), *_VISITED)
    if any(b.name == "moe_decoder" for b in blocks) and not visited:
        yield "the config has no number of experts per token: costs assume one"
    if num_layers := sum(b.count for b in blocks if b.layers and not b.attention):
        yield f"{num_layers} layers have no known attention: costs include their matrices only"


def _decoder(model: nn.Module, params: list[list[ParamSpec]], layers: list[nn.Module], hidden: int) -> Iterator[Block]:
    """Yield one block for each set of layers with equal parameters, attention and feed-forward part."""
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
    """Return the block name "embedding" or "head" of each embedding and of the output head, by module name."""
    ends = {name: "embedding" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    names = {module: name for name, module in model.named_modules()}
    for style, module in _declared_ends(model).items():
        ends[names[module]] = "embedding" if style == "vocab" else "head"
    return ends


def _embedding_width(model: nn.Module) -> int:
    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    widths = [p.shape[-1] for p in model.parameters() if p.dim()]
    return table.embedding_dim if table is not None else max(widths, key=widths.count, default=1)


def _dims(name: str, shape: tuple[int, ...], hidden: int) -> tuple[str, ...]:
    words = ["embed" if size == hidden else "features" for size in shape]
    parts = [*name.split("."), ""]
    # An index after `experts` means a list of experts; otherwise one parameter contains all experts.
    fused = "experts" in parts and not parts[parts.index("experts") + 1].isdecimal()
    return ("expert", *words[1:]) if fused and len(shape) > 1 else tuple(words)


def _attention(layer: nn.Module, config: Any, index: int, hidden: int) -> AttentionSpec | None:
    """Return the attention of a layer as the model's config describes it.

    The result is None if the config has no number of heads, or if no submodule with parameters is named attention.
    """
    named = (n.rpartition(".")[2] for n, m in layer.named_modules() if [*m.parameters()])
    heads = _number(config, *_HEADS)
    if not heads or not any(("attn" in n or "attention" in n) and "linear" not in n and "norm" not in n for n in named):
        return None
    is_multi_query = getattr(config, "multi_query", False) is True
    kv_heads = 1 if is_multi_query else _number(config, *_KV_HEADS) or heads
    width = _number(config, "head_dim") or max(1, hidden // heads)
    types = getattr(config, "layer_types", None)
    kind = types[index] if isinstance(types, list) and index < len(types) else ""
    window = _number(config, "sliding_window") if "sliding" in kind or not kind else 0
    if latent := _number(config, "kv_lora_rank"):
        rope = _number(config, "qk_rope_head_dim")
        key = _number(config, "qk_nope_head_dim") + rope or width
        value = _number(config, "v_head_dim") or width
        return AttentionSpec("mla", heads, heads, key, value, None, latent + rope)
    kind = "sliding" if window else "full"
    return AttentionSpec(kind, heads, kv_heads, width, width, window or None, 2 * kv_heads * width)


def _mlp(params: list[ParamSpec], config: Any, hidden: int) -> MlpSpec | None:
    """Return the feed-forward part of a layer; None if the layer has neither experts nor a matrix of this width.

    The width is read from the config, or from the shapes of matrices if the config has none.
    """
    matrices = [p for p in params if p.is_matrix and "attn" not in p.name and "attention" not in p.name]
    gated = any("gate" in p.name.rsplit(".", 2)[-2] or p.name.endswith("gate_up_proj") for p in matrices)
    inner = [size for p in matrices if "mlp" in p.name for size in p.shape if size != hidden]
    width = _number(config, *_WIDTHS) or max(inner, default=0)
    experts = [p for p in params if p.is_expert]
    if experts:
        narrow = _number(config, "moe_intermediate_size") or width or experts[0].shape[-1]
        shared = _number(config, *_SHARED) or _number(config, "n_shared_experts") * narrow
        visited = _number(config, *_VISITED) or 1
        return MlpSpec(narrow, True, experts[0].shape[0], visited, shared)
    if width and any(width in p.shape or 2 * width in p.shape for p in matrices):
        return MlpSpec(width, gated)
    return None


def _number(config: Any, *keys: str) -> int:
    """Return the first positive integer among the values of `keys` in a config; 0 if there is none."""
    values: Iterator[Any] = (getattr(config, key, None) for key in keys)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), 0)
