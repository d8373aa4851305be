"""Rules that assign a style to each module, from a model's own plan or the table of families.

A style states the sharding of a module's weight over the tensor-parallel axis and of its input and output.
`normalise_plan` converts plans of Hugging Face configuration classes. Hugging Face styles without an exact
implementation map to the names in `REFUSED`. `plan_layouts` replicates modules with such a style, or raises HP205.
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
        "replicate": "parameters replicated; the module acts on each position of the sequence shard independently",
        "whole": "parameters replicated; the module and its siblings process all tokens on every rank",
    }
)
"""Meaning of each style that a rule may name."""

PACKED: Final = ("qkv", "gate_up")
"""Styles of projections that are stacked in one weight."""
COLUMN_STYLES: Final = ("colwise", "kv_replicate", *PACKED)
"""Styles of column-parallel projections."""
WHOLE: Final = "whole"
"""Style of modules that are replicated because no rule shards them. Every rank then computes them for all tokens."""

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "packed_colwise": "several projections packed in one weight",
        "packed_rowwise": "several projections packed in one weight",
        "gather_output": "a projection whose output must be replicated",
        "split_input": "a projection whose input is replicated",
        "unsupported": "a module whose plan uses a style that is not implemented",
    }
)
"""Meaning of each unsupported style of Hugging Face plans."""

_FROM_HUGGING_FACE: Final = {
    **{style: style for style in ("colwise", "rowwise", "packed_colwise", "packed_rowwise")},
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), "gather_output"),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), "split_input"),
    **dict.fromkeys(("replicated_with_grad_allreduce", "sequence_parallel", "replicate"), "replicate"),
    "embedding_rowwise": "vocab",
    "moe_tp_experts": "experts",
}


@lru_cache(maxsize=4096)  # a search requests layouts of one model under many strategies
def match(pattern: str, name: str) -> str | None:
    """Return the leading part of a parameter name that a pattern matches; None if it does not match.

    Each dot-separated part of the pattern is a glob for one part of the name, also for a `*` in place of a layer index.
    A pattern with fewer parts than the name matches an enclosing module.

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
    """Return the name of the parameter or module to which a rule assigns its style; None if the rule does not apply.

    A rule with `experts`, `replicate`, `whole` or a key of `REFUSED` also applies to the parameters of submodules, each
    under the name of its own module. Any other rule must name the parameter, or the module that owns the parameter.
    """
    owner = match(rule.pattern, param)
    if owner is None or "." not in param[len(owner) + 1 :]:
        return owner
    whole_subtree = rule.style in ("replicate", "experts", WHOLE, *REFUSED)
    return param.rpartition(".")[0] if whole_subtree else None


def normalise_plan(plan: Mapping[str, str] | None, prefix: str = "") -> tuple[Rule, ...]:
    """Return the rules of a Hugging Face tensor-parallel plan, patterns with most parts first.

    A projection outside of the layers with replicated output becomes `head`, and modules inside `moe_tp_experts` become
    `experts`. A style without an equivalent becomes `unsupported`: `plan_layouts` replicates the module, or raises
    HP205 if it lies between sharded projections.

    Args:
        plan: Dict from pattern to style name, such as `base_model_tp_plan` of a configuration class or `_tp_plan` of a
            model; None if there is none.
        prefix: Prefix of every pattern; `model.` for the base model inside a causal language model.
    """
    plan = plan or {}
    expert_modules = tuple(p for p, style in plan.items() if style == "moe_tp_experts")
    rules = []
    for pattern, theirs in plan.items():
        style = _FROM_HUGGING_FACE.get(theirs, "unsupported")
        if style == "gather_output" and "*" not in pattern:
            style = "head"  # outside of layers the only projection is the head; the loss accepts sharded logits
        if pattern.startswith(tuple(f"{module}." for module in expert_modules)):
            style = "experts"
        rules.append(Rule(prefix + pattern, style))
    rules.sort(key=lambda rule: -len(rule.pattern.split(".")))
    return tuple(rules)


def _of(module: str, **styles: str) -> dict[str, str]:
    """Return the styles of the children of one module in every layer, by module pattern."""
    return {f"{module}.{part}": style for part, style in styles.items()}


_ATTENTION: Final = _of("self_attn", q_proj="colwise", k_proj="colwise", v_proj="colwise", o_proj="rowwise")
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
"""Plan (style by module pattern) of each model type's configuration class, as converted by `normalise_plan`."""
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
"""Styles by module pattern, per model type, of modules that shard exactly but not by the class's plan."""
FAMILIES: Final = tuple(_FAMILIES)
"""Model types with an entry in the table of plans."""


def completed_rules(model_type: str, prefix: str = "model.") -> tuple[Rule, ...]:
    """Return rules for modules that can be sharded exactly, but not by the Hugging Face plan of the model family.

    Args:
        model_type: `model_type` of the config; the result is empty for a family without such rules.
        prefix: Prefix of every pattern, as in `normalise_plan`.
    """
    layer = _COMPLETED.get(model_type, {})
    return tuple(Rule(f"{prefix}layers.*.{name}", style) for name, style in layer.items())


def family_rules(model_type: str) -> tuple[Rule, ...]:
    """Return the rules of a model family, for decoder layers, embedding and head.

    Args:
        model_type: `model_type` of the config; a type without an entry gets the rules of `llama`, whose module names
            most decoder-only models use. `plan_layouts` replicates matrices with other names, or raises HP205 if no
            matrix can be sharded.
    """
    layer = _FAMILIES.get(model_type, _LLAMA)
    rules = [Rule(f"model.layers.*.{name}", style) for name, style in layer.items()]
    rules.sort(key=lambda rule: -len(rule.pattern.split(".")))
    ends = Rule("model.embed_tokens", "vocab"), Rule("lm_head", "head")
    return (*completed_rules(model_type), *rules, *ends)
