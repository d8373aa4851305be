"""Sharding rules derived from names and shapes of matrices, for models without a complete tensor-parallel plan.

Two structures are recognised: MLPs of input and output projections, and attention with separate query, key, value and
output projections. The rows of the attention projections must match the heads in the config. A block with an
unrecognised parameter is replicated. A module is sharded in all layers or in none. The last rule, `Rule("*", "whole")`,
replicates all other modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from hyper_parallel.ir import Rule
from hyper_parallel.shard._fit import module_of, starred
from hyper_parallel.shard._rules import WHOLE

_FEED_FORWARD: Final = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("input_linear",), "output_linear"),
    (("w1", "w3"), "w2"),
    (("w1", "v1"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("linear_1",), "linear_2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
)
_ATTENTION: Final = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),
    (("self.query", "self.key", "self.value"), ("output.dense",)),
)
_GATES: Final = ("gate_proj", "g_proj")
_PACKED_HALVES: Final = ("gate_up_proj", "input_linear")

Shapes = Mapping[str, tuple[int, ...]]


def derived_rules(params: Shapes, linear: frozenset[str], num_heads: int, num_kv_heads: int) -> tuple[Rule, ...]:
    """Return rules derived from the names and shapes of a model's parameters, sorted by pattern; `*` is last.

    Args:
        params: Shape of each parameter by full name, layer index included.
        linear: Names of the modules that compute x W^T + b. No other weight matrix is sharded.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
    """
    groups: dict[tuple[str, bool], list[dict[str, str]]] = {}
    bases = {
        ".".join(parts[:i])
        for parts in (name.split(".") for name in linear)
        for i in range(len(parts) - 2, len(parts))
        if i > 0 and "experts" not in parts
    }
    for base in sorted(bases):
        inside = {n: s for n, s in params.items() if n.startswith(f"{base}.")}
        feed_forward = _feed_forward(base, inside, linear)
        attention = _attention(base, inside, linear, num_heads, num_kv_heads)
        for kind, styles in ((False, feed_forward), (True, attention)):
            if styles is not None:
                groups.setdefault((starred(base), kind), []).append(styles)
    rules = []
    for styles, *rest in groups.values():
        # The modules of a pattern are replicated if layers disagree or one of them is not recognised.
        patterns = {starred(name): style for name, style in styles.items()}
        named = {name for group in (styles, *rest) for name in group}
        same = all({starred(n): s for n, s in other.items()} == patterns for other in rest)
        if same and all(name in named for name in linear if starred(name) in patterns):
            rules += [Rule(pattern, style) for pattern, style in patterns.items()]
    return (*sorted(rules, key=lambda rule: rule.pattern), Rule("*", WHOLE))


def _members(base: str, leaves: tuple[str, ...], linear: frozenset[str]) -> list[str] | None:
    names = [f"{base}.{leaf}" for leaf in leaves]
    return names if linear.issuperset(names) else None


def _feed_forward(base: str, inside: Shapes, linear: frozenset[str]) -> dict[str, str] | None:
    """Return the style of each projection of an MLP, by module name; None if `base` has no MLP projections.

    {}, which replicates the MLP, if its shapes do not match or another parameter may act on its hidden activations.
    """
    for leaves, last in _FEED_FORWARD:
        names = _members(base, (*leaves, last), linear)
        if names is None:
            continue
        *into, out = names
        hidden, width = inside[f"{out}.weight"]
        rows = 2 * width if leaves[0] in _PACKED_HALVES else width
        siblings = {n: s for n, s in inside.items() if module_of(n) not in names}
        # A decoder layer has other parameters too; one whose first dim is the MLP's width may scale its activations.
        layer = base.rpartition(".")[2].isdecimal() or leaves[0] == "intermediate.dense"
        alone = width not in {s[0] for s in siblings.values() if s} if layer else not siblings
        fits = all(inside[f"{n}.weight"] == (rows, hidden) for n in into)
        style = "gate_up" if rows != width else "colwise"
        return {**dict.fromkeys(into, style), out: "rowwise"} if fits and alone else {}
    return None


def _attention(
    base: str, inside: Shapes, linear: frozenset[str], num_heads: int, num_kv_heads: int
) -> dict[str, str] | None:
    """Return the style of each projection of an attention module, by module or parameter name.

    {}, which replicates the module, if its shapes or parameters are not recognised; None if `base` is not attention.
    """
    # Other modules can have projections with these names.
    named = "attn" in base.rpartition(".")[2] or "attention" in base.rpartition(".")[2]
    for leaves, outs in _ATTENTION if named else ():
        into = _members(base, leaves, linear)
        out = next((f"{base}.{o}" for o in outs if f"{base}.{o}" in linear), None)
        if into is None or out is None:
            continue
        query, *keys = into
        rows = inside[f"{query}.weight"][0]
        head = rows // num_heads
        ok = rows == num_heads * head == inside[f"{out}.weight"][1]
        ok = ok and all(inside[f"{n}.weight"][0] == num_kv_heads * head for n in keys)
        styles = {**dict.fromkeys(into, "colwise"), out: "rowwise"}
        for name, shape in inside.items():
            owner = module_of(name)
            leaf = owner.removeprefix(f"{base}.")
            if owner in styles or leaf.startswith("output."):
                continue
            if shape == (head,) and re.match(r"[qk]\w*norm$", leaf):
                styles[owner] = "inner"
            elif name == f"{base}.sinks" and shape == (num_heads,):
                styles[name] = "colwise"
            elif leaf in _GATES and owner in linear and shape[0] == rows:
                styles[owner] = "colwise"
            else:
                ok = False
        return styles if ok else {}
    return None
