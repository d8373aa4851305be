"""From rules to layouts: one layout for every parameter of a model under a strategy.

Order of work: every parameter finds its rule, what is not exact is refused, sizes are checked, layouts are written.
Tensor parallelism cuts first and FSDP cuts what it left, so `dp_shard` stands innermost on dim 0:

    model.layers.*.mlp.up_proj.weight     [mlp:tp_x.dp_shard, embed]
    model.layers.*.mlp.down_proj.weight   [embed:dp_shard, mlp:tp_x]

A weight whose stacked parts are cut apart leaves its rows to tensor parallelism, and FSDP cuts its columns:

    model.layers.*.mlp.gate_up_proj.weight   [gate_up/2:tp_x, embed:dp_shard]
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.errors import HyperParallelError, RuleError, UnsupportedSharding
from hyper_parallel.ir import Layout, Rule, Strategy
from hyper_parallel.shard._experts import (
    EXPERTS,
    check_experts,
    check_folding,
    container,
    even_dim,
    expert_layout,
    mark_experts,
)
from hyper_parallel.shard._fit import (
    Param,
    Sizes,
    check_pairs,
    check_widths,
    fit_vocabulary,
    is_covered,
    keep_whole,
    module_of,
    refuse_shapes,
    rule_hint,
)
from hyper_parallel.shard._grid import cuts_hidden, tensor_axes
from hyper_parallel.shard._rules import REFUSED, STYLES, WHOLE, applies
from hyper_parallel.shard._sizes import check_context, fit_sizes


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Layouts of all parameters of a model.

    Attributes:
        layouts: Parameter name, as given, to its layout.
        styles: Module (or parameter, where a rule names one) to the style it really has; without tensor parallelism
            every style is `replicate`, except that modules of routed experts are `experts`.
        notes: What a reader should know: where a style deviates from the model's own plan, and why.
        hidden_cut: The residual stream is cut over tp_y.
        whole_stream: Every tensor-parallel rank holds the residual stream of all tokens.
    """

    layouts: dict[str, Layout]
    styles: dict[str, str]
    notes: tuple[str, ...] = ()
    hidden_cut: bool = False
    whole_stream: bool = False


def plan_layouts(
    params: Iterable[tuple[str, tuple[int, ...], tuple[str, ...]]],
    rules: Sequence[Rule],
    strategy: Strategy,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    tied: Mapping[str, str] | None = None,
    where: str | None = None,
) -> ShardPlan:
    """Layouts of all parameters under a strategy.

    Args:
        params: Name, logical shape and logical dims (or ()) of every parameter. Names may hold `*` for the layer
            index or be concrete. A tied parameter is listed under each of its names, so that every module of it
            gets its style.
        rules: Rules of the model, from `family_rules` or `normalise_plan`. `strategy.rules` are tried before them;
            the first match wins.
        strategy: Degrees of the axes.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head; tells key and value projections from query projections where names do not.
        vocab_size: Rows of the embedding.
        tied: Parameter name to the name of the parameter it shares its storage with.
        where: Where the degrees were set, for errors.

    Raises:
        NotDivisible: HP203 when heads or widths do not divide by the tensor-parallel degree, or heads by Ulysses.
        RuleError: HP204 when a rule of the strategy matches nothing or names no style, or splits tied parameters
            differently.
        UnsupportedSharding: HP205 for axes that are not implemented, and for modules that this version cannot run
            exactly under tensor parallelism.
    """
    listed = list(params)
    try:
        check_folding(strategy)
        check_context(strategy, num_heads)
        _check_rules(strategy.rules, [name for name, _, _ in listed])
        found = mark_experts([_find(p, (*strategy.rules, *rules)) for p in listed])
        check_experts(found, strategy)
        notes: list[str] = []
        whole_stream = strategy.tp > 1 and not is_covered(found)
        if strategy.tp > 1:
            sizes = Sizes(strategy, num_heads, num_kv_heads, head_dim, vocab_size)
            found = keep_whole(found, sizes, notes) if whole_stream else found
            refuse_shapes(found, sizes)
            found = fit_sizes(fit_vocabulary(found, sizes, notes), sizes, notes)
            check_widths(found) if whole_stream else check_pairs(found, sizes)
        else:
            found = [p if p.style == EXPERTS else replace(p, style="replicate") for p in found]
        hidden_cut = cuts_hidden(found, strategy)
        layouts = {param.name: _layout(param, strategy, hidden_cut) for param in found}
        _check_tied(layouts, tied or {})
    except HyperParallelError as error:
        error.where = where
        raise
    styles = {
        container(p) if p.style == EXPERTS else p.owner: p.style or "replicate" for p in found
    }
    return ShardPlan(layouts, styles, tuple(dict.fromkeys(notes)), hidden_cut, whole_stream)


def uncut_modules(
    params: Iterable[tuple[str, tuple[int, ...]]], rules: Sequence[Rule]
) -> tuple[frozenset[str], bool]:
    """Return the matrices that tensor parallelism keeps whole on every rank, whatever its degree.

    Args:
        params: Name and shape of every parameter.
        rules: Rules of the model.

    Returns:
        Names of these matrices; and whether every rank holds the residual stream of all tokens, as it does where rules
        do not cover the model.
    """
    found = mark_experts([_find((name, shape, ()), rules) for name, shape in params])
    cut = ("vocab", "head", EXPERTS)
    whole = (None, *REFUSED, WHOLE, "replicate")
    names = (p.name for p in found if len(p.shape) > 1 and p.style not in cut and p.style in whole)
    return frozenset(names), not is_covered(found)


def covers(
    params: Iterable[tuple[str, tuple[int, ...]]],
    rules: Sequence[Rule],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> bool:
    """Whether rules name all of a model, so that its residual stream can be cut between its blocks."""
    found = mark_experts([_find((name, shape, ()), rules) for name, shape in params])
    try:
        check_pairs(found, Sizes(Strategy(), num_heads, num_kv_heads, head_dim, 1))
    except UnsupportedSharding:
        return False
    return is_covered(found)


def _find(param: tuple[str, tuple[int, ...], tuple[str, ...]], rules: Sequence[Rule]) -> Param:
    name, shape, dims = param
    for rule in rules:
        owner = applies(rule, name)
        if owner is not None:
            return Param(name, shape, dims, owner, rule.style)
    return Param(name, shape, dims, module_of(name) or name, None)


def _check_tied(layouts: Mapping[str, Layout], tied: Mapping[str, str]) -> None:
    for name, source in tied.items():
        if name in layouts and source in layouts and layouts[name].axes != layouts[source].axes:
            raise RuleError(
                f"`{name}` and `{source}` are one parameter but get two layouts",
                got=f"{layouts[name]} and {layouts[source]}",
                hint=rule_hint({module_of(name): "replicate", module_of(source): "replicate"}),
            )


def _check_rules(rules: Sequence[Rule], names: Sequence[str]) -> None:
    for rule in rules:
        if rule.style not in STYLES:
            near = difflib.get_close_matches(rule.style, STYLES, n=1)
            raise RuleError(
                f"the rule for `{rule.pattern}` names a style that does not exist",
                got=rule.style,
                allowed=tuple(STYLES),
                hint=rule_hint({rule.pattern: near[0] if near else "replicate"}),
            )
        if not any(applies(rule, name) for name in names):
            modules = sorted({module_of(name) for name in names})
            near = difflib.get_close_matches(rule.pattern, modules, n=1, cutoff=0.0)
            raise RuleError(
                f"the rule for `{rule.pattern}` matches no module",
                got=rule.pattern,
                hint=rule_hint({near[0]: rule.style}) if near else None,
            )


def _layout(param: Param, strategy: Strategy, hidden_cut: bool) -> Layout:
    layout = Layout.replicated(len(param.shape), dims=param.dims)
    if not param.shape:
        return layout
    if param.style == EXPERTS and strategy.ep > 1:
        return expert_layout(layout, param, strategy)
    if param.parts > 1:
        layout = layout.stack(0, param.parts)
    if strategy.tp > 1:
        for dim, axes in enumerate(tensor_axes(param, strategy, hidden_cut)):
            layout = layout.split(dim, *axes)
    dim = 1 if param.parts > 1 else 0
    if param.style == EXPERTS and len(param.shape) > 2:
        dim = even_dim(param.shape, strategy.dp_shard * strategy.cp)
    return layout.split(dim, *strategy.fsdp_axes)
