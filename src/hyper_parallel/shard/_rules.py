"""Rules: which module gets which style, from a model's own plan or from the table of families.

A style says how the weight of a module lies on the tensor-parallel axis and how its input and output are treated.
The vocabulary is ours; `normalise_plan` reads the one of Hugging Face configuration classes. A style of theirs that
this version cannot run exactly keeps a name of its own here, and `plan_layouts` refuses it under tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from hyper_parallel.ir import Rule

STYLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "colwise": "weight [out, in] split on out, bias split; output split",
        "rowwise": "weight split on in, bias whole and added once after the reduction",
        "vocab": "embedding [vocab, embed] split on vocab; partial rows are summed",
        "head": "language-model head [vocab, embed] split on vocab; logits stay split for the loss",
        "experts": "fused weights [experts, ...] split over ep on the first dim; tensor parallelism keeps them whole",
        "kv_replicate": "key or value projection kept whole; a rank computes the heads its queries use",
        "qkv": "query, key and value stacked in one weight: each part is split at whole heads",
        "gate_up": "gate and up stacked in one weight: each half is split",
        "latent": "projection or norm inside attention kept whole: every rank computes it for all tokens",
        "norm_heads": "norm over all heads together: scale split by heads, sums of squares added over the ranks",
        "inner": "parameters whole, used between split projections: the gradients of the ranks are added",
        "replicate": "parameters whole; the module works position by position on the sequence shard",
        "whole": "parameters whole; the module works on all tokens on every rank, and so does what stands beside it",
    }
)
"""Styles a rule may name, with their meaning."""

WHOLE: Final = "whole"
"""Style of what no rule names; where a model has such modules, its residual stream is not cut over the ranks."""

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "packed_colwise": "several projections packed in one weight",
        "packed_rowwise": "several projections packed in one weight",
        "gather_output": "a projection whose output must be whole on every rank",
        "split_input": "a projection whose input is whole on every rank",
        "unsupported": "a module whose plan uses a style that is not implemented",
    }
)
"""Styles a model's own plan may hold that are not implemented, with what they stand for: such modules stay whole."""

_FROM_HUGGING_FACE: Final = {
    **{style: style for style in ("colwise", "rowwise", "packed_colwise", "packed_rowwise")},
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), "gather_output"),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), "split_input"),
    **dict.fromkeys(
        ("replicated_with_grad_allreduce", "sequence_parallel", "replicate"), "replicate"
    ),
    "embedding_rowwise": "vocab",
    "moe_tp_experts": "experts",
}


@lru_cache(maxsize=4096)  # a search asks for the layouts of many strategies of one model
def match(pattern: str, name: str) -> str | None:
    """The leading part of a name that a pattern matches, or None.

    Patterns and names are cut at dots; a part of the pattern matches one part of the name, and `*` also matches the
    literal `*` that stands for the layer index. A pattern shorter than the name matches the module that contains it.

    >>> match("model.layers.*.mlp", "model.layers.*.mlp.up_proj.weight")
    'model.layers.*.mlp'
    """
    wanted, parts = pattern.split("."), name.split(".")
    if len(wanted) > len(parts):
        return None
    parts = parts[: len(wanted)]
    if all(fnmatchcase(part, glob) for part, glob in zip(parts, wanted, strict=True)):
        return ".".join(parts)
    return None


def applies(rule: Rule, param: str) -> str | None:
    """The name a rule takes hold of for a parameter: the parameter, its module, or None when it does not apply.

    A style that splits weights must name the module that owns them (or the parameter); `replicate`, `experts` and the
    styles that keep a module whole also hold for everything inside a module.
    """
    found = match(rule.pattern, param)
    if found is None or "." not in param[len(found) + 1 :]:
        return found
    whole_subtree = rule.style in ("replicate", "experts", WHOLE, *REFUSED)
    return param.rpartition(".")[0] if whole_subtree else None


def normalise_plan(
    plan: Mapping[str, str] | None, prefix: str = ""
) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """Rules from a Hugging Face tensor-parallel plan.

    Args:
        plan: Pattern to style name, as `base_model_tp_plan` of a configuration class or `_tp_plan` of a model holds
            it; None when the class has none.
        prefix: Put before every pattern; `model.` for the base model inside a causal language model.

    Returns:
        Rules with the most specific pattern first, and notes on what has no exact counterpart. A style that is not
        known becomes `unsupported`, which `plan_layouts` refuses under tensor parallelism: a weight kept whole next
        to split ones would give another result.
    """
    plan = plan or {}
    expert_modules = tuple(p for p, style in plan.items() if style == "moe_tp_experts")
    rules, notes = [], []
    for pattern, theirs in plan.items():
        style = _FROM_HUGGING_FACE.get(theirs)
        if style is None:
            style = "unsupported"
            notes.append(
                f"`{prefix}{pattern}`: style `{theirs}` of the model's plan is not implemented"
            )
        if style == "gather_output" and "*" not in pattern:
            style = "head"  # outside the layers only a head projects; its logits need not be whole for the loss
        if pattern.startswith(tuple(f"{module}." for module in expert_modules)):
            style = "experts"
        rules.append(Rule(prefix + pattern, style))
    rules.sort(key=lambda rule: -len(rule.pattern.split(".")))
    return tuple(rules), tuple(notes)


def _of(module: str, **styles: str) -> dict[str, str]:
    """Styles of the parts of one module of a layer."""
    return {f"{module}.{part}": style for part, style in styles.items()}


_ATTENTION: Final = _of(
    "self_attn", q_proj="colwise", k_proj="colwise", v_proj="colwise", o_proj="rowwise"
)
_HEAD_NORMS: Final = _of("self_attn", q_norm="replicate", k_norm="replicate")
_GATED: Final = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
_LLAMA: Final = {**_ATTENTION, **_of("mlp", **_GATED)}
_QWEN3: Final = {**_LLAMA, **_HEAD_NORMS}
_EXPERTS: Final = {
    **_of("mlp.experts", gate_up_proj="experts", down_proj="experts"),
    "mlp.experts": "experts",
}
_GATHERED_MLP: Final = _of("mlp", gate_up_proj="gather_output", down_proj="split_input")
_GLM: Final = {**_ATTENTION, **_GATHERED_MLP}
_OLMO: Final = {
    **dict.fromkeys((f"self_attn.{p}_proj" for p in "qkv"), "gather_output"),
    **_of("self_attn", o_proj="split_input"),
    **_of("mlp", **_GATED),
}
_PHI: Final = {**_of("self_attn", qkv_proj="gather_output", o_proj="split_input"), **_GATHERED_MLP}
_FAMILIES: Final[Mapping[str, Mapping[str, str]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "gemma2"), _LLAMA),
    **dict.fromkeys(("qwen3", "gemma3_text"), _QWEN3),
    "qwen3_moe": {**_QWEN3, **_EXPERTS},
    "mixtral": {**_ATTENTION, **_EXPERTS},
    "deepseek_v3": {**_EXPERTS, **_of("mlp.shared_experts", **_GATED), **_of("mlp", **_GATED)},
    "gpt_oss": {},  # its configuration class plans expert parallelism only
    "phi3": _PHI,
    **dict.fromkeys(("glm", "glm4"), _GLM),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO),
}
"""Plans of configuration classes, as `normalise_plan` reads them."""
_PACKED_MLP: Final = _of("mlp", gate_up_proj="gate_up", down_proj="rowwise")
_NORMED_HEADS: Final = {**_ATTENTION, **_of("self_attn", q_norm="norm_heads", k_norm="norm_heads")}
_LATENT: Final = _of(
    "self_attn", q_proj="colwise", q_a_proj="latent", q_a_layernorm="latent", q_b_proj="colwise",
    kv_a_proj_with_mqa="latent", kv_a_layernorm="latent", kv_b_proj="colwise", o_proj="rowwise",
)  # fmt: skip
_COMPLETED: Final[Mapping[str, Mapping[str, str]]] = {
    "phi3": {**_of("self_attn", qkv_proj="qkv", o_proj="rowwise"), **_PACKED_MLP},
    **dict.fromkeys(("glm", "glm4"), _PACKED_MLP),
    **dict.fromkeys(("olmo2", "olmo3"), _NORMED_HEADS),
    "gpt_oss": {**_ATTENTION, "self_attn.sinks": "colwise"},
    "deepseek_v3": _LATENT,
}
"""What the plan of a configuration class leaves whole, or gathers, although it splits exactly."""
FAMILIES: Final = tuple(_FAMILIES)
"""Model types with a plan of their own in the table."""


def completed_rules(model_type: str, prefix: str = "model.") -> tuple[Rule, ...]:
    """Rules that complete the plan of a family's configuration class; they go before it.

    Args:
        model_type: `model_type` of the config; a family without such rules gets none.
        prefix: Put before every pattern, as in `normalise_plan`.
    """
    layer = _COMPLETED.get(model_type, {})
    return tuple(Rule(f"{prefix}layers.*.{name}", style) for name, style in layer.items())


def family_rules(model_type: str) -> tuple[Rule, ...]:
    """Rules of a model family, without its framework: decoder layers, embedding and head.

    Args:
        model_type: `model_type` of the config; one that is not in the table gets the rules of `llama`, whose module
            names most decoder-only models share. Where the names differ, `plan_layouts` finds matrices that no rule
            covers and refuses tensor parallelism.
    """
    layer = _FAMILIES.get(model_type, _LLAMA)
    layer = _FAMILIES.get(model_type, _LLAMA)
    rules = [Rule(f"model.layers.*.{name}", style) for name, style in layer.items()]
    rules.sort(key=lambda rule: -len(rule.pattern.split(".")))
    ends = Rule("model.embed_tokens", "vocab"), Rule("lm_head", "head")
    return (*completed_rules(model_type), *rules, *ends)
