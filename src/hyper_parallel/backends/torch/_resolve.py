"""Read a model: its decoder parts, its own sharding plan, and the layouts these give, compared with the plan's."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hyper_parallel.backends.torch._token_scores import SCORE, scores_tokens
from hyper_parallel.backends.torch.weights._initialise import base_parameters
from hyper_parallel.backends.torch.weights._lora import adapter_layouts
from hyper_parallel.errors import PlanMismatch, UnsupportedSharding
from hyper_parallel.ir import Layout, Plan, Rule
from hyper_parallel.shard import (
    ShardPlan,
    completed_rules,
    covers,
    derived_rules,
    normalise_plan,
    plan_layouts,
)


class PlaceholderModule(nn.Module):
    """Stands where a module that another rank holds stood; returns its first argument.

    Plain attributes and properties of that module and its class (`attention_type` of a layer, say) stay readable.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        values = dict(vars(original))
        for key in {*dir(type(original))} - {*dir(nn.Module)}:
            with suppress(Exception):  # a property of another kind of module, say
                if isinstance(value := getattr(original, key), str | int | float | tuple):
                    values[key] = value
        for key, value in values.items():
            if not key.startswith("_") and not isinstance(value, Tensor | nn.Module):
                self.__dict__[key] = value

    def forward(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        return first


class SlotList(nn.ModuleList):
    """A list of modules that shows stand-ins for them while whoever iterates it runs."""

    def slots(self) -> list[Any] | None:
        """The stand-ins; None: the modules themselves."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        slots = self.slots()
        return super().__iter__() if slots is None else iter(slots)

    def __getitem__(self, index: Any) -> Any:
        if (slots := self.slots()) is not None:
            return slots[index]
        chosen = list(self._modules.values())[index]
        return nn.ModuleList(chosen) if isinstance(index, slice) else chosen


def decoder_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList] | None:
    """The base model and its decoder layers, for a Hugging Face model with such a list; None for any other module.

    The base is the innermost module around the list that says which module embeds its inputs.
    """
    prefix = getattr(model, "base_model_prefix", None)
    if prefix is None or not hasattr(model, "config"):
        return None
    base = getattr(model, prefix, model)
    layers = getattr(base, "layers", None)
    if isinstance(layers, nn.ModuleList) and len(layers):
        return base, layers
    if (found := block_list(model)) is None:
        return None
    path, layers = found
    while path := path.rpartition(".")[0]:
        if hasattr(base := model.get_submodule(path), "get_input_embeddings"):
            return base, layers
    return model, layers


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Name and members of the list of layers that most of a model lies in; None for a model without one.

    Of the outermost lists, those in a module of the language part's config come first, then those of classes that the
    model says not to split (`_no_split_modules`).
    """
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    parts = [
        n for n, m in model.named_modules() if text is not None and m.__dict__.get("config") is text
    ]
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if (
            isinstance(module, nn.ModuleList)
            and not inside
            and next(module.parameters(), None) is not None
        ):
            lists[name] = module
    whole = set(getattr(model, "_no_split_modules", None) or ())
    of_text = {n: m for n, m in lists.items() if any(n.startswith(f"{p}.") for p in parts if p)}
    lists = of_text or lists
    named = {n: m for n, m in lists.items() if any(type(layer).__name__ in whole for layer in m)}
    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in (named or lists).items()}
    if not sizes:
        return None
    best = max(sizes, key=sizes.__getitem__)
    return best, lists[best]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Layers of the model's decoder, or of its `block_list`; none when it has no such list."""
    decoder = decoder_of(model)
    if decoder is not None:
        return list(decoder[1])
    found = block_list(model)
    return [] if found is None else list(found[1])


def text_config(model: nn.Module) -> Any:
    """The Hugging Face config of the model's language part; None for a module without one.

    Where layers have values of their own it is that of the first layer: the common one refuses to give them.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return text.per_layer_config[0] if getattr(text, "is_heterogeneous", False) else text


def final_norm(base: nn.Module) -> nn.Module:
    """The norm that follows the layers: by name, or the last one beside them."""
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
        if isinstance(norm := getattr(base, name, None), nn.Module):
            return norm
    for module in reversed([*base.children()]):
        if "norm" in type(module).__name__.lower():
            return module
    raise UnsupportedSharding(
        "no final norm was found after the decoder layers",
        where=type(base).__name__,
        got=", ".join(name for name, _ in base.named_children()),
        allowed="norm, final_layernorm, final_layer_norm, ln_f, or a module of a class *Norm*",
    )


def resolve_layouts(model: nn.Module, plan: Plan) -> ShardPlan:
    """Layouts of the model's own parameters, which must be the ones the plan holds, and of its adapters.

    Raises:
        PlanMismatch: HP307 with the first parameter that differs.
        RuleError: HP204, NotDivisible: HP203, UnsupportedSharding: HP205 from the layouts themselves.
    """
    params = [(name, tuple(p.shape), ()) for name, p in base_parameters(model)]
    config, text = getattr(model, "config", None), text_config(model)
    for rule in plan.strategy.rules if config is None else ():
        if rule.style in ("kv_replicate", "qkv", "latent", "norm_heads"):
            raise UnsupportedSharding(
                f"style `{rule.style}` needs the heads of a Hugging Face decoder's config",
                where=rule.pattern,
                got=type(model).__name__,
                allowed="colwise, rowwise, vocab, head, gate_up, replicate",
            )
    tp = plan.strategy.tp
    # A plain module has no heads to check; what needs them refuses it by name.
    heads, kv_heads, head_dim = _heads(text, tp * plan.strategy.cp)
    shard_plan = plan_layouts(
        params,
        module_rules(model),
        plan.strategy,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_number(text, "vocab_size", tp),
    )
    if tp > 1:
        _require_linear(model, shard_plan.styles)
    if plan.strategy.recompute != "none" and not layers_of(model):
        raise UnsupportedSharding(
            "recompute needs a model with a list of layers of one class",
            where=type(model).__name__,
            got=f"recompute={plan.strategy.recompute}",
            hint="parallel.recompute=none",
        )
    strategy = plan.strategy
    if strategy.tp * strategy.cp * strategy.pp > 1 and is_reversible(model):
        raise UnsupportedSharding(
            "layers run again in a backward of their own, which knows no collectives",
            where=type(model).__name__,
            got=f"tp={strategy.tp} cp={strategy.cp} pp={strategy.pp}",
            allowed="dp_replicate, dp_shard",
            hint="parallel.tp=1 parallel.cp=1 parallel.pp=1",
        )
    _compare(shard_plan.layouts, plan, model)
    adapters = adapter_layouts(model, shard_plan.layouts, plan.strategy)
    return replace(shard_plan, layouts=shard_plan.layouts | adapters)


def is_reversible(model: nn.Module) -> bool:
    """Whether layers compute their inputs from their outputs in backward, as Reformer's do."""
    return any(hasattr(module, "backward_pass") for module in model.modules())


def _require_linear(model: nn.Module, styles: dict[str, str]) -> None:
    """Refuse to split a module that computes something else than `nn.Linear`."""
    for name, module in model.named_modules():
        split = styles.get(name) in ("colwise", "rowwise", "qkv", "gate_up", "kv_replicate", "head")
        if split and type(module).forward is not nn.Linear.forward and module._parameters:
            if any(p.dim() == 1 and n == "weight" for n, p in module.named_parameters()):
                continue  # the scale of a norm over heads
            raise UnsupportedSharding(
                "only nn.Linear can be split over ranks",
                where=name,
                got=type(module).__name__,
                hint=f"'parallel.rules={{{starred(name)}: replicate}}'",
            )


def starred(name: str) -> str:
    """A parameter name with `*` for every index, the form plans use."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _number(config: Any, key: str, default: int) -> int:
    value = getattr(config, key, None)
    return value if isinstance(value, int) else default


def module_rules(model: nn.Module) -> tuple[Rule, ...]:
    """Rules of a Hugging Face model, embedding and head included; none for any other module.

    Those of its configuration class where they name all of it, else what its structure says.
    """
    config = text_config(model)
    if config is None:
        return ()
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    rules, _ = normalise_plan(getattr(config, "base_model_tp_plan", None), prefix)
    rules = [
        rule for rule in rules if rule.style not in ("vocab", "head")
    ]  # plans since 5.24 name them
    ends = _end_rules(model)
    planned = (*ends, *completed_rules(getattr(config, "model_type", ""), prefix), *rules)
    shapes = {name: tuple(p.shape) for name, p in base_parameters(model)}
    heads, kv_heads, head_dim = _heads(config, 1)
    if _has_decoder(model) and covers(shapes.items(), planned, heads, kv_heads, head_dim):
        return planned
    linear = [n for n, m in model.named_modules() if type(m).forward is nn.Linear.forward]
    shared = {n for n, _ in base_parameters(model, remove_duplicate=False)} - shapes.keys()
    # Modules around a choice of attention put another one, which nothing was put around, in place of the chosen.
    choosers = {n for n, m in model.named_modules() if hasattr(m, "set_attention_type")}
    choosers -= {n.rpartition(".")[0] for n in choosers}
    linear = [n for n in linear if ".".join(n.split(".")[:-2]) not in choosers]
    linear = [n for n in linear if not _joins_to_input(model.get_submodule(n.rpartition(".")[0]))]
    # Of modules that share a parameter only one has its name; the others would not be split.
    names = {id(p): name for name, p in model.named_parameters()}
    shared |= {
        names[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if n in shared
    }
    linear = [
        n
        for n in linear
        if f"{n}.weight" in shapes and shared.isdisjoint((f"{n}.weight", f"{n}.bias"))
    ]
    experts = (rule for rule in rules if rule.style == "experts")
    found = (*ends, *experts, *derived_rules(shapes, frozenset(linear), heads, kv_heads))
    if covers(shapes.items(), found, heads, kv_heads, head_dim) and not _has_decoder(model):
        return tuple(rule for rule in found if rule.style != "vocab")  # so that the stream is whole
    return found


@functools.lru_cache(maxsize=256)  # layers are many, their classes few
def _source(kind: type[nn.Module]) -> str | None:
    """The text of a module's forward pass; None: there is none."""
    with suppress(OSError, TypeError):
        return inspect.getsource(kind.forward)
    return None


def _joins_to_input(module: nn.Module) -> bool:
    """Whether a module gives its inner result the width of its input, by a name for it; a rank has less."""
    if (source := _source(type(module))) is not None:
        named = re.search(r", ([a-z]\w*) = hidden_states\.(?:size\(\)|shape\b)", source)
        return named is not None and f", {named[1]})" in source
    return False


def _end_rules(model: nn.Module) -> tuple[Rule, ...]:
    """Rules that split embedding and head; where one has no such form and the other shares its weight, neither."""
    names = {id(module): name for name, module in model.named_modules()}
    ends: dict[str, nn.Module] = {}
    for get, style in (("get_input_embeddings", "vocab"), ("get_output_embeddings", "head")):
        with suppress(AttributeError, NotImplementedError):  # the class does not say which it is
            if (module := getattr(model, get)()) is not None and id(module) in names:
                ends[style] = module
    embedding, head = ends.get("vocab"), ends.get("head")
    weights = {id(p) for end in ends.values() for p in end.parameters(recurse=False)}
    owned = [
        id(p) for n, m in model.named_modules() if m not in ends.values()
        for p in m.parameters(recurse=False)
    ]  # fmt: skip
    if not weights.isdisjoint(owned):
        return ()
    one = head is not None and not {id(p) for p in head.parameters()}.isdisjoint(
        [] if embedding is None else [id(p) for p in embedding.parameters()]
    )
    whole = {"vocab"} if embedding is not None and not _splits_rows(embedding) else set()
    whole |= {"head"} if head is not None and type(head).forward is not nn.Linear.forward else set()
    if whole and one:
        return ()
    ends = {style: module for style, module in ends.items() if style not in whole}
    scores = (Rule(SCORE, "replicate"),) if scores_tokens(model) else ()
    return (*(Rule(names[id(module)], style) for style, module in ends.items()), *scores)


def _splits_rows(module: nn.Module) -> bool:
    """Whether an embedding is one of rows alone, which a factor may scale."""
    own = type(module).forward is not nn.Embedding.forward and not hasattr(module, "embed_scale")
    return isinstance(module, nn.Embedding) and not (
        own or module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    )


def _has_decoder(model: nn.Module) -> bool:
    """Whether a model is embedding, decoder layers and a final norm, so that its stream can be cut between them.

    It cannot where the norm comes before the layers too, as NanoChat's does.
    """
    if (decoder := decoder_of(model)) is None:
        return False
    base = decoder[0]
    with suppress(UnsupportedSharding):  # no norm
        norm = final_norm(base)
        if (source := _source(type(base))) is None:
            return False
        calls = [source.count(f"self.{n}(") for n, m in base.named_children() if m is norm]
        return calls in ([], [0], [1])
    return False


def _heads(config: Any, default: int) -> tuple[int, int, int]:
    """Query heads, key and value heads, and the width of one; `default` heads where no config says."""
    heads = _number(config, "num_attention_heads", default)
    # Latent attention expands its own key and value for every head.
    latent = _number(config, "kv_lora_rank", 0) > 0
    kv_heads = heads if latent else _number(config, "num_key_value_heads", heads)
    return (
        heads,
        kv_heads,
        _number(config, "head_dim", _number(config, "hidden_size", heads) // heads),
    )


def _compare(layouts: dict[str, Layout], plan: Plan, model: nn.Module) -> None:
    own = {starred(name): layout for name, layout in layouts.items()}
    planned = {starred(name): layout for name, layout in dict(plan.layouts).items()}
    # A head that shares the embedding's weight is one parameter in torch, two in a plan.
    tied = {n for n, _ in base_parameters(model, remove_duplicate=False)} - layouts.keys()
    for name in sorted(own.keys() | planned.keys()):
        mine, theirs = own.get(name), planned.get(name)
        if mine is None and name in tied:
            continue
        if mine is None or theirs is None or _cuts(mine) != _cuts(theirs):
            raise PlanMismatch(
                f"the plan does not fit this model at `{name}`",
                got=f"model: {mine if mine is not None else 'no such parameter'}",
                allowed=f"plan: {theirs if theirs is not None else 'no such parameter'}",
                hint="hyper-parallel plan MODEL -o plan.json",
            )


def _cuts(layout: Layout) -> tuple[list[tuple[tuple[str, ...], int]], tuple[str, ...]]:
    return [(axes, layout.parts_of(dim)) for dim, axes in enumerate(layout.axes)], layout.one_of
