"""Layouts of all parameters of a model under a strategy, derived from rules.

The steps are: assign a rule to every parameter, refuse inexact combinations, check sizes, derive layouts. Tensor
parallelism shards first and FSDP shards the result, so `dp_shard` is the innermost axis of dim 0:

    model.layers.*.mlp.up_proj.weight     [mlp:tp_x.dp_shard, embed]
    model.layers.*.mlp.down_proj.weight   [embed:dp_shard, mlp:tp_x]

For stacked projections that are sharded separately, tensor parallelism shards the rows of each and FSDP the columns:

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
    starred,
    with_rules,
)
from hyper_parallel.shard._grid import shards_hidden_over_y, tensor_axes
from hyper_parallel.shard._rules import REFUSED, STYLES, WHOLE, applies
from hyper_parallel.shard._sizes import check_context, fit_sizes


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Layout of every parameter of a model, and sharding style of every module.

    Attributes:
        layouts: Layout of each parameter, by the name in the input.
        styles: Final style by module name, or by parameter name if a rule names the parameter. Experts are listed by
            the module that contains them all. Without tensor parallelism, all other styles are `replicate`.
        notes: Sentences about parameters that are not sharded as their rule states, with reasons.
        hidden_cut: Whether the hidden dim of the residual stream is sharded over tp_y.
        whole_stream: Whether every tensor-parallel rank holds the residual stream of all tokens.
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
    staged: bool = False,
) -> ShardPlan:
    """Return the layouts of all parameters under a strategy.

    Args:
        params: Name, logical shape and logical dims (or ()) of every parameter. Names may contain `*` as layer index.
            A tied parameter is listed under each of its names, so that each of its modules gets a style.
        rules: Rules of the model, from `family_rules` or `normalise_plan`. `strategy.rules` are tried before them;
            the first match wins.
        strategy: Degrees of the axes.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head; distinguishes key and value projections from query projections by size.
        vocab_size: Rows of the embedding.
        tied: Name of the parameter with the same storage, by name of each tied parameter; None: no ties.
        where: Value of `where` of every error; None: errors have no `where`.
        staged: Whether pp may be combined with tensor-parallel ranks that hold all tokens; see `keep_whole`.

    Raises:
        NotDivisible: HP203 when a degree does not divide a size of the model, such as heads, or other degrees.
        RuleError: HP204 when a rule of the strategy matches no parameter or has an unknown style, when a style does not
            fit its parameter, or when tied parameters get two layouts.
        UnsupportedSharding: HP205 for unsupported axes, and for modules that cannot be sharded exactly.
    """
    listed = list(params)
    try:
        check_context(strategy, num_heads)
        _check_rules(strategy.rules, [name for name, _, _ in listed])
        assigned = mark_experts([_find(p, (*strategy.rules, *rules)) for p in listed])
        check_experts(assigned, strategy)
        notes: list[str] = []
        whole_stream = strategy.tp > 1 and not is_covered(assigned)
        if strategy.tp > 1:
            sizes = Sizes(strategy, num_heads, num_kv_heads, head_dim, vocab_size)
            assigned = _fit(assigned, sizes, whole_stream, notes, staged)
        else:
            assigned = [p if p.style == EXPERTS else replace(p, style="replicate") for p in assigned]
        hidden_cut = shards_hidden_over_y(assigned, strategy)
        layouts = {param.name: _layout(param, strategy, hidden_cut) for param in assigned}
        _check_tied(layouts, tied or {}, strategy.rules)
    except HyperParallelError as error:
        error.where = where
        raise
    styles = {container(p) if p.style == EXPERTS else p.owner: p.style or "replicate" for p in assigned}
    return ShardPlan(layouts, styles, tuple(dict.fromkeys(notes)), hidden_cut, whole_stream)


def _fit(assigned: list[Param], sizes: Sizes, whole_stream: bool, notes: list[str], staged: bool) -> list[Param]:
    if whole_stream:
        if sizes.strategy.overlap.block_executor != "serial":
            raise UnsupportedSharding(
                "`overlap.tp` needs sharded tokens, but every tensor-parallel rank of this model holds all tokens",
                got=f"overlap={sizes.strategy.overlap}",
                changes={"overlap.tp": "none"},
            )
        assigned = keep_whole(assigned, sizes, notes, staged)
    refuse_shapes(assigned, sizes)
    assigned = fit_sizes(fit_vocabulary(assigned, sizes, notes), sizes, notes)
    check_widths(assigned, sizes) if whole_stream else check_pairs(assigned, sizes)
    return assigned


def replicated_matrices(
    params: Iterable[tuple[str, tuple[int, ...]]], rules: Sequence[Rule]
) -> tuple[frozenset[str], bool]:
    """Return the matrices that the rules replicate on the tensor-parallel ranks, for any degree.

    Returns:
        (names of the matrices, whether every rank holds the residual stream of all tokens). The second is true if a
        parameter other than a norm has no supported style.
    """
    assigned = _assign(params, rules)
    cut = ("vocab", "head", EXPERTS)
    whole = (None, *REFUSED, WHOLE, "replicate")
    names = (p.name for p in assigned if len(p.shape) > 1 and p.style not in cut and p.style in whole)
    return frozenset(names), not is_covered(assigned)


def covers(
    params: Iterable[tuple[str, tuple[int, ...]]],
    rules: Sequence[Rule],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> bool:
    """Return whether the rules let tensor parallelism shard the residual stream.

    They must assign supported, consistent styles to all parameters except norms.
    """
    assigned = _assign(params, rules)
    try:
        check_pairs(assigned, Sizes(Strategy(), num_heads, num_kv_heads, head_dim, 1))
    except UnsupportedSharding:
        return False
    return is_covered(assigned)


def _assign(params: Iterable[tuple[str, tuple[int, ...]]], rules: Sequence[Rule]) -> list[Param]:
    return mark_experts([_find((name, shape, ()), rules) for name, shape in params])


def _find(param: tuple[str, tuple[int, ...], tuple[str, ...]], rules: Sequence[Rule]) -> Param:
    name, shape, dims = param
    for rule in rules:
        owner = applies(rule, name)
        if owner is not None:
            return Param(name, shape, dims, owner, rule.style)
    return Param(name, shape, dims, module_of(name) or name, None)


def _check_tied(layouts: Mapping[str, Layout], tied: Mapping[str, str], rules: Sequence[Rule]) -> None:
    for name, source in tied.items():
        if name in layouts and source in layouts and layouts[name].axes != layouts[source].axes:
            raise RuleError(
                f"`{name}` and `{source}` are one parameter but get two layouts",
                got=f"{layouts[name]} and {layouts[source]}",
                changes=with_rules({module_of(name): "replicate", module_of(source): "replicate"}, rules),
            )


def _check_rules(rules: Sequence[Rule], names: Sequence[str]) -> None:
    for rule in rules:
        remaining = [other for other in rules if other is not rule]
        if rule.style not in STYLES:
            style = rule.style.lower().removesuffix("parallel")  # also the class names of PyTorch
            near = difflib.get_close_matches(style, STYLES, n=1)
            raise RuleError(
                f"the rule for `{rule.pattern}` names a style that does not exist",
                got=rule.style,
                allowed=tuple(STYLES),
                changes=with_rules({rule.pattern: near[0] if near else "replicate"}, remaining),
            )
        if not any(applies(rule, name) for name in names):
            modules = sorted({starred(module_of(name)) for name in names})
            near = difflib.get_close_matches(rule.pattern, modules, n=1, cutoff=0.3)
            raise RuleError(
                f"the rule for `{rule.pattern}` matches no module",
                got=rule.pattern,
                allowed=modules,
                changes=with_rules({near[0]: rule.style}, remaining) if near else None,
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
