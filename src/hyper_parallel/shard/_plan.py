"""From rules to layouts: one layout for every parameter of a model under a strategy.

Order of work: every parameter finds its rule, what is not exact is refused, sizes are checked, layouts are written.
Tensor parallelism cuts first and FSDP cuts what it left, so `dp_shard` stands innermost on dim 0:

    model.layers.*.mlp.up_proj.weight     [mlp:tp_x.dp_shard, embed]
    model.layers.*.mlp.down_proj.weight   [embed:dp_shard, mlp:tp_x]
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.errors import NotDivisible, RuleError, UnsupportedSharding
from hyper_parallel.ir import Layout, Rule, Strategy
from hyper_parallel.shard._checks import check_axes, legal_tp
from hyper_parallel.shard._rules import REFUSED, STYLES, applies

TP = "tp_x"
FSDP = "dp_shard"


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Layouts of all parameters of a model.

    Attributes:
        layouts: Parameter name, as given, to its layout.
        styles: Module (or parameter, where a rule names one) to the style it really has; without tensor parallelism
            every style is `replicate`.
        notes: What a reader should know: where a style deviates from the model's own plan, and why.
    """

    layouts: dict[str, Layout]
    styles: dict[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Param:
    """A parameter with the rule it found."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    owner: str
    style: str | None

    @property
    def module(self) -> str:
        return _module(self.name)

    @property
    def parent(self) -> str:
        return _module(self.module)

    @property
    def cut_size(self) -> int:
        """Size of the dim that tensor parallelism cuts."""
        return self.shape[-1 if self.style == "rowwise" else 0]

    @property
    def pattern(self) -> str:
        return _starred(self.module)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the checks need to know of the model and the strategy."""

    strategy: Strategy
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    where: str | None
    widths: tuple[int, ...] = ()

    @property
    def tp(self) -> int:
        return self.strategy.tp_x


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
            index or be concrete.
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
        NotDivisible: HP203 when heads or widths do not divide by the tensor-parallel degree.
        RuleError: HP204 when a rule of the strategy matches nothing or names no style, or splits tied parameters
            differently.
        UnsupportedSharding: HP205 for axes that are not implemented, and for modules that this version cannot run
            exactly under tensor parallelism.
    """
    check_axes(strategy, where)
    listed = list(params)
    _check_rules(strategy.rules, [name for name, _, _ in listed], where)
    found = [_find(p, (*strategy.rules, *rules)) for p in listed]
    notes: list[str] = []
    if strategy.tp_x > 1:
        sizes = _Sizes(strategy, num_heads, num_kv_heads, head_dim, vocab_size, where)
        for param in found:
            _refuse_inexact(param, sizes)
        found = _fit_vocabulary(found, sizes, notes)
        found = _fit_widths(found, sizes, notes)
        _check_pairs(found, sizes)
    else:
        found = [replace(param, style="replicate") for param in found]
    layouts = {param.name: _layout(param, strategy) for param in found}
    for name, source in (tied or {}).items():
        if name in layouts and source in layouts and layouts[name].axes != layouts[source].axes:
            raise RuleError(
                f"`{name}` and `{source}` are one parameter but get two layouts",
                where=where,
                got=f"{layouts[name]} and {layouts[source]}",
                hint=_rule_hint({_module(name): "replicate", _module(source): "replicate"}),
            )
    styles = {param.owner: param.style or "replicate" for param in found}
    return ShardPlan(layouts, styles, tuple(dict.fromkeys(notes)))


def _find(param: tuple[str, tuple[int, ...], tuple[str, ...]], rules: Sequence[Rule]) -> _Param:
    name, shape, dims = param
    for rule in rules:
        owner = applies(rule, name)
        if owner is not None:
            return _Param(name, shape, dims, owner, rule.style)
    return _Param(name, shape, dims, _module(name) or name, None)


def _check_rules(rules: Sequence[Rule], names: Sequence[str], where: str | None) -> None:
    for rule in rules:
        if rule.style not in STYLES:
            near = difflib.get_close_matches(rule.style, STYLES, n=1)
            raise RuleError(
                f"the rule for `{rule.pattern}` names a style that does not exist",
                where=where,
                got=rule.style,
                allowed=tuple(STYLES),
                hint=_rule_hint({rule.pattern: near[0] if near else "replicate"}),
            )
        if not any(applies(rule, name) for name in names):
            modules = sorted({_module(name) for name in names})
            near = difflib.get_close_matches(rule.pattern, modules, n=1, cutoff=0.0)
            raise RuleError(
                f"the rule for `{rule.pattern}` matches no module",
                where=where,
                got=rule.pattern,
                hint=_rule_hint({near[0]: rule.style}) if near else None,
            )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _starred(name: str) -> str:
    """The name with `*` for every layer index."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _rule_hint(rules: Mapping[str, str]) -> str:
    return f"'parallel.rules={{{', '.join(f'{p}: {s}' for p, s in rules.items())}}}'"


def _without_tp(strategy: Strategy) -> str:
    return f"parallel.tp=1 parallel.dp_shard={strategy.dp_shard * strategy.tp_x}"


def _refuse_inexact(param: _Param, sizes: _Sizes) -> None:
    """Refuse what has no exact form under tensor parallelism."""
    if param.style is not None and param.style in REFUSED:
        raise UnsupportedSharding(
            f"`{param.pattern}` cannot be split by tensor parallelism: {REFUSED[param.style]}",
            where=sizes.where,
            got=f"tp={sizes.tp}, style {param.style}",
            allowed="dp_replicate, dp_shard",
            hint=_without_tp(sizes.strategy),
        )
    leaf = param.name.rpartition(".")[2]
    # A vector named weight or bias is a norm: it works position by position. Anything else may mix positions or heads.
    if param.style is None and (len(param.shape) > 1 or leaf not in ("weight", "bias")):
        raise UnsupportedSharding(
            f"no rule covers `{_starred(param.name)}`: tensor parallelism is not known to be exact",
            where=sizes.where,
            got=f"shape {param.shape}, tp={sizes.tp}",
            hint=f"{_without_tp(sizes.strategy)}   (or, if it works position by position, "
            f"{_rule_hint({param.pattern: 'replicate'})})",
        )
    if param.style not in (None, "replicate") and not 1 <= len(param.shape) <= 2:
        raise UnsupportedSharding(
            f"style `{param.style}` needs a matrix or a vector, `{param.name}` is neither",
            where=sizes.where,
            got=f"shape {param.shape}",
            hint=_without_tp(sizes.strategy),
        )


def _fit_vocabulary(found: list[_Param], sizes: _Sizes, notes: list[str]) -> list[_Param]:
    """Keep embedding and head whole when the vocabulary does not divide; both, so that tied ones stay one."""
    rows = {p.shape[0] for p in found if p.style in ("vocab", "head")}
    if not rows or all(size % sizes.tp == 0 for size in rows | {sizes.vocab_size}):
        return found
    uneven = sorted(size for size in rows | {sizes.vocab_size} if size % sizes.tp)
    notes.append(
        f"embedding and head are kept whole: the vocabulary of {uneven[0]} does not divide by tp={sizes.tp}; "
        "the head works on the sequence shard of each rank"
    )
    return [replace(p, style="replicate") if p.style in ("vocab", "head") else p for p in found]


def _role(param: _Param, sizes: _Sizes) -> str:
    """`heads`, `kv_heads` or `width`: what a colwise or rowwise weight is cut by."""
    split = -1 if param.style == "rowwise" else 0
    if param.dims and {"heads", "kv_heads"} & {param.dims[split]}:
        return param.dims[split]
    parent, leaf = param.parent.rpartition(".")[2], param.module.rpartition(".")[2]
    if "attn" not in parent and "attention" not in parent:
        return "width"
    if leaf in ("k_proj", "v_proj"):
        return "kv_heads"
    kv_width = sizes.num_kv_heads * sizes.head_dim
    looks_kv = param.cut_size == kv_width and sizes.num_kv_heads != sizes.num_heads
    known = leaf in ("q_proj", "o_proj") or param.style == "rowwise"
    return "kv_heads" if looks_kv and not known else "heads"


def _fit_widths(found: list[_Param], sizes: _Sizes, notes: list[str]) -> list[_Param]:
    """Check heads and widths against the degree; key and value projections with too few heads stay whole."""
    cut = [p for p in found if p.style in ("colwise", "rowwise", "kv_replicate")]
    # A rowwise bias is whole, so its size plays no part.
    cut = [p for p in cut if len(p.shape) == 2 or p.style != "rowwise"]
    roles = {p.name: _role(p, sizes) for p in cut}
    widths = {p.cut_size for p in cut if roles[p.name] == "width"}
    sizes = replace(sizes, widths=tuple(sorted(widths)))
    fitted = []
    for param in found:
        role = roles.get(param.name)
        if role == "heads":
            _divide("heads", sizes.num_heads, param, sizes)
        elif role == "kv_heads":
            param = _fit_kv(param, sizes, notes)
        elif role == "width":
            _divide("width", param.cut_size, param, sizes)
        if param.style == "kv_replicate" and role != "kv_heads":
            raise RuleError(
                f"style `kv_replicate` is for key and value projections, `{param.pattern}` is none",
                where=sizes.where,
                got=f"shape {param.shape}",
                hint=_rule_hint({param.pattern: "colwise"}),
            )
        fitted.append(param)
    return fitted


def _fit_kv(param: _Param, sizes: _Sizes, notes: list[str]) -> _Param:
    _divide("heads", sizes.num_heads, param, sizes)
    heads, tp = sizes.num_kv_heads, sizes.tp
    if heads % tp == 0:
        return param
    if tp % heads:
        raise _not_divisible("kv_heads", heads, param, sizes)
    notes.append(
        f"`{param.pattern}` keeps its weight whole: {heads} key and value heads on tp={tp} ranks; "
        f"each head is computed on {tp // heads} ranks"
    )
    return replace(param, style="kv_replicate")


def _divide(what: str, size: int, param: _Param, sizes: _Sizes) -> None:
    if size % sizes.tp:
        raise _not_divisible(what, size, param, sizes)


def _not_divisible(what: str, size: int, param: _Param, sizes: _Sizes) -> NotDivisible:
    allowed = legal_tp(sizes.num_heads, sizes.num_kv_heads, *sizes.widths)
    best = max((t for t in allowed if t <= sizes.tp), default=1)
    return NotDivisible(
        f"tp={sizes.tp} does not divide {what}={size} in `{param.pattern}`",
        where=sizes.where,
        got=f"{what}={size}, tp={sizes.tp}",
        allowed=f"tp {', '.join(str(t) for t in allowed)}",
        hint=f"parallel.tp={best}",
    )


def _check_pairs(found: list[_Param], sizes: _Sizes) -> None:
    """A module that is cut going in is cut coming out: colwise and rowwise come together, nothing between is whole."""
    parents: dict[str, list[_Param]] = {}
    for param in found:
        if len(param.shape) == 2:
            parents.setdefault(param.parent, []).append(param)
    for parent, members in parents.items():
        into = [p for p in members if p.style in ("colwise", "kv_replicate")]
        out = [p for p in members if p.style == "rowwise"]
        whole = [p for p in members if p.style == "replicate" and into]
        attention = any(_role(p, sizes) != "width" for p in (*into, *out))
        between = [p for p in whole if attention or p.shape in {q.shape for q in into}]
        if bool(into) == bool(out) and not between:
            continue
        odd = (between or into or out)[0]
        raise UnsupportedSharding(
            f"the modules of `{_starred(parent)}` do not fit together: `{odd.pattern}` is {odd.style}",
            where=sizes.where,
            got=", ".join(f"{p.module.rpartition('.')[2]}={p.style}" for p in members),
            allowed="colwise projections in and rowwise projections out, or replicate for all",
            hint=_rule_hint({_starred(parent): "replicate"}),
        )


def _layout(param: _Param, strategy: Strategy) -> Layout:
    layout = Layout.replicated(len(param.shape), dims=param.dims)
    if not param.shape:
        return layout  # FSDP cannot cut a scalar
    if strategy.tp_x > 1:
        if param.style in ("colwise", "vocab", "head"):
            layout = layout.split(0, TP)
        elif param.style == "rowwise" and len(param.shape) == 2:
            layout = layout.split(1, TP)
    return layout.split(0, FSDP) if strategy.dp_shard > 1 else layout
