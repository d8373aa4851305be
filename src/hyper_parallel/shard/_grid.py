"""Two tensor-parallel axes: which sizes must divide, and where x and y cut each weight.

A block (attention, MLP) has one of three shapes on the P = tp_x * tp_y ranks:

    shape    colwise [out, in]       rowwise [out, in]       activations between blocks
    1d       [out:tp_x.tp_y, in]     [out, in:tp_x.tp_y]     [T/P, D]
    2d       [out:tp_x, in:tp_y]     [out:tp_y, in:tp_x]     [T/tp_x, D/tp_y]
    weight   [out:tp_x.tp_y, in]     [out:tp_y, in:tp_x]     [T/P, D], weights gathered over y

The residual stream is [T/tp_x, D/tp_y] when every matrix of every layer is part of a 2d block, else [T/P, D]; norms on
it are cut over y in the first case, so the layouts say which of the two it is.

Sources: Xu et al. 2021 (GSPMD), section 3.2; Pope et al. 2022, sections 3.2.2 and 3.2.3 (2-D weight-stationary and
weight-gathered layouts).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hyper_parallel.errors import NotDivisible, RuleError, UnsupportedSharding
from hyper_parallel.ir import BLOCK_SHAPES, BlockShape, Strategy
from hyper_parallel.shard._fit import Param, Sizes, _role, rule_hint
from hyper_parallel.shard._packed import packed_parts

X, Y = "tp_x", "tp_y"
_BOTH = (X, Y)
_REGION_STYLES = ("colwise", "rowwise", "kv_replicate", "qkv", "gate_up")


@dataclass(frozen=True, slots=True)
class _Widths:
    """Sizes that two axes may have to divide."""

    heads: int  # query heads
    kv_heads: int  # key and value heads
    attention_rows: tuple[int, ...]  # rows of the attention's colwise weights
    hidden: tuple[int, ...]  # inputs of the colwise weights
    mlp: tuple[int, ...]  # widths inside the MLP blocks


def block_shape(param: Param, strategy: Strategy) -> BlockShape:
    """Shape of the block a projection belongs to."""
    return strategy.attention_shape if param.in_attention else strategy.mlp_shape


def fit_grid(found: list[Param], sizes: Sizes, notes: list[str]) -> list[Param]:
    """Check sizes against both axes; key and value projections with fewer heads than x ranks stay whole over x.

    Raises:
        NotDivisible: HP203 with the pairs of degrees that are legal.
        UnsupportedSharding: HP205 for combinations without meaning.
    """
    strategy = sizes.strategy
    _check_axes(strategy, sizes.where)
    for param in found:
        if param.style == "latent" and strategy.attention_shape != "1d":
            raise UnsupportedSharding(
                f"`{param.pattern}` (latent attention) is whole on every rank: on two axes its block has shape 1d",
                where=sizes.where,
                got=f"tp_x={strategy.tp_x}, tp_y={strategy.tp_y}, attention {_shown(strategy)}",
                allowed="attention_shape 1d",
                changes={"parallel.attention_shape": "1d"},
            )
        if param.style in ("norm_heads", "qkv") and exchanges_rows(strategy):
            raise UnsupportedSharding(
                f"`{param.pattern}` ({param.style}) needs a rank to compute the heads of its place among all ranks",
                where=sizes.where,
                got=f"attention {_shown(strategy)}",
                allowed="attention_shape 1d, or 2d with attention_scatter head",
                changes={"parallel.attention_shape": "2d", "parallel.attention_scatter": "head"},
            )
    found = [_packed(p, found, sizes) if p.style in ("qkv", "gate_up") else p for p in found]
    cut = [p for p in found if p.style in _REGION_STYLES and len(p.shape) == 2]
    roles = {p.name: _role(p, sizes) for p in found if p.style in (*_REGION_STYLES, "norm_heads")}
    into = [p for p in cut if p.style != "rowwise"]
    widths = _Widths(
        sizes.num_heads,
        sizes.num_kv_heads,
        tuple(sorted({p.shape[0] for p in into if p.in_attention})),
        tuple(sorted({p.shape[1] for p in into} | {p.shape[0] for p in cut if p not in into})),
        tuple(
            sorted(
                {
                    p.cut_size // (1 + (p.style == "gate_up"))
                    for p in cut
                    if roles[p.name] == "width"
                }
            )
        ),
    )
    problem = next(_problems(widths, strategy), None)
    if problem is not None:
        raise _refusal(problem, widths, sizes)
    alone = strategy.tp if strategy.attention_shape == "1d" else strategy.tp_x
    fitted = []
    for param in found:
        role = roles.get(param.name)
        if param.style == "kv_replicate" and role != "kv_heads":
            raise RuleError(
                f"style `kv_replicate` is for key and value projections, `{param.pattern}` is none",
                where=sizes.where,
                got=f"shape {param.shape}",
                hint=rule_hint({param.pattern: "colwise"}),
            )
        if param.style == "norm_heads":
            # The scale of heads that several ranks compute is whole on each; it is split over all ranks at once.
            if role == "kv_heads" and sizes.num_kv_heads % strategy.tp:
                param = replace(param, style="kv_replicate")
        elif role == "kv_heads" and sizes.num_kv_heads % alone:
            notes.append(
                f"`{param.pattern}` keeps its weight whole over {alone} ranks: {sizes.num_kv_heads} key and value "
                f"heads; each head is computed on {alone // sizes.num_kv_heads} ranks"
            )
            param = replace(param, style="kv_replicate")
        fitted.append(param)
    return fitted


def _check_axes(strategy: Strategy, where: str | None) -> None:
    if strategy.tp_x == 1:
        raise UnsupportedSharding(
            "tensor parallelism on y alone is the one-dimensional kind, which lies on x",
            where=where,
            got=f"tp_x=1, tp_y={strategy.tp_y}",
            changes={"parallel.tp_x": strategy.tp_y, "parallel.tp_y": 1},
        )
    if strategy.cp > 1 and exchanges_rows(strategy):
        raise UnsupportedSharding(
            "attention that cuts tokens over y cannot also be cut by context parallelism",
            where=where,
            got=f"cp={strategy.cp}, tp_y={strategy.tp_y}, attention {_shown(strategy)}",
            allowed="attention_shape 1d, or 2d with attention_scatter head",
            changes={"parallel.attention_shape": "2d", "parallel.attention_scatter": "head"},
        )


def _packed(param: Param, found: list[Param], sizes: Sizes) -> Param:
    """A packed projection: gate and up are cut apart in a 2d block; others exchange columns over all ranks."""
    s = sizes.strategy
    biased = any(p.module == param.module and len(p.shape) == 1 for p in found)
    shards = s.mesh().degree(s.fsdp_axes)
    apart = param.style == "gate_up" and s.mlp_shape == "2d"
    reason = None
    if param.style == "gate_up" and s.mlp_shape == "weight":
        reason = "moved weights have no form for stacked ones"
    elif apart and biased:
        reason = "it has a bias"
    elif apart and shards > 1:
        reason = "torch cannot assemble what FSDP, parts and a second axis cut together"
    elif not apart and param.shape[0] % s.tp:
        reason = f"its {param.shape[0]} rows do not divide by {s.tp} ranks"
    if reason is not None:
        raise UnsupportedSharding(
            f"`{param.pattern}` holds several projections and cannot be cut over two axes: {reason}",
            where=sizes.where,
            got=f"tp_x={s.tp_x}, tp_y={s.tp_y}, shapes {s.attention_shape}/{s.mlp_shape}",
            changes={"parallel.mlp_shape": "1d"}
            if param.style == "gate_up" and s.mlp_shape != "1d"
            else {"parallel.tp_x": s.tp, "parallel.tp_y": 1},
        )
    packed_parts(param, sizes)  # refuses a weight that does not stack what the style says
    return replace(param, parts=2) if apart else param


def exchanges_rows(strategy: Strategy) -> bool:
    """Whether a rank's queries are a part of the tokens, so that keys and values are gathered over y."""
    return strategy.tp_y > 1 and (
        strategy.attention_shape == "weight"
        or (strategy.attention_shape == "2d" and strategy.attention_scatter == "token")
    )


def _problems(widths: _Widths, strategy: Strategy) -> Iterator[tuple[str, int, str, int]]:
    """What does not divide: name, size, the axes and their degree."""
    x, y, ranks = strategy.tp_x, strategy.tp_y, strategy.tp
    if widths.attention_rows:
        shape = strategy.attention_shape
        whole_heads = shape == "1d" or (shape == "2d" and strategy.attention_scatter == "head")
        axes, degree = ("tp_x * tp_y", ranks) if whole_heads else ("tp_x", x)
        if widths.heads % degree:
            yield "heads", widths.heads, axes, degree
        degrees = {"1d": (ranks,), "2d": (x, degree), "weight": (x,)}[shape]
        for of in degrees:
            if widths.kv_heads % of and of % widths.kv_heads:
                yield "kv_heads", widths.kv_heads, "tp_x" if of == x else "tp_x * tp_y", of
        if shape == "weight":
            for rows in widths.attention_rows:
                if rows % ranks:
                    yield "rows", rows, "tp_x * tp_y", ranks
    if widths.mlp:
        on_x = strategy.mlp_shape == "2d"
        for size in widths.mlp:
            if size % (x if on_x else ranks):
                yield "width", size, *(("tp_x", x) if on_x else ("tp_x * tp_y", ranks))
    if {strategy.attention_shape, strategy.mlp_shape} != {"1d"}:
        for size in widths.hidden:
            if size % y:
                yield "hidden", size, "tp_y", y


def _refusal(problem: tuple[str, int, str, int], widths: _Widths, sizes: Sizes) -> NotDivisible:
    what, size, axes, degree = problem
    s = sizes.strategy
    pairs = [(s.tp // y, y) for y in range(2, s.tp) if s.tp % y == 0]
    legal = [p for p in pairs if _fits(widths, replace(s, tp_x=p[0], tp_y=p[1]))]
    shapes = [
        (a, m)
        for a in BLOCK_SHAPES
        for m in BLOCK_SHAPES
        if _fits(widths, replace(s, attention_shape=a, mlp_shape=m))
    ]
    changes: dict[str, object]
    if legal:
        near = min(legal, key=lambda p: abs(p[1] - s.tp_y))
        changes = {"parallel.tp_x": near[0], "parallel.tp_y": near[1]}
    elif shapes:
        a, m = min(shapes, key=lambda p: (p[0] != s.attention_shape) + (p[1] != s.mlp_shape))
        changes = {"parallel.attention_shape": a, "parallel.mlp_shape": m}
    else:
        wider = s.dp_shard * s.tp_y
        changes = {"parallel.tp_x": s.tp_x, "parallel.tp_y": 1, "parallel.dp_shard": wider}
    allowed = [f"tp_x={x} tp_y={y}" for x, y in legal] + [f"shapes {a}/{m}" for a, m in shapes]
    return NotDivisible(
        f"{axes} = {degree} does not divide {what}={size} with shapes {_shown(s)}/{s.mlp_shape}",
        where=sizes.where,
        got=f"{what}={size}, tp_x={s.tp_x}, tp_y={s.tp_y}",
        allowed=", ".join(allowed) or None,
        changes=changes,
    )


def _fits(widths: _Widths, strategy: Strategy) -> bool:
    return next(_problems(widths, strategy), None) is None


def _shown(strategy: Strategy) -> str:
    token = strategy.attention_shape == "2d" and strategy.attention_scatter == "token"
    return strategy.attention_shape + (" (token)" if token else "")


def cuts_hidden(found: list[Param], strategy: Strategy) -> bool:
    """Whether the residual stream is cut over y: all matrices of the layers belong to 2d blocks."""
    if strategy.tp_y == 1 or {strategy.attention_shape, strategy.mlp_shape} != {"2d"}:
        return False
    ends = ("vocab", "head")
    layers = [p for p in found if len(p.shape) > 1 and ".layers." in f".{p.name}"]
    rest = [p for p in found if len(p.shape) > 1 and p.style not in ends and p not in layers]
    norms = any(_on_stream(p) for p in found)
    return norms and bool(layers) and not rest and all(p.style in _REGION_STYLES for p in layers)


def _on_stream(param: Param) -> bool:
    """A vector that is no part of a block: a norm of the residual stream."""
    inside = ("attn", "attention", "mlp")
    parent = param.parent.rpartition(".")[2]
    return len(param.shape) == 1 and not any(word in parent for word in inside)


def grid_axes(param: Param, strategy: Strategy, hidden_cut: bool) -> tuple[tuple[str, ...], ...]:
    """Axes that cut each dim of a parameter.

    Args:
        param: A parameter with its final style.
        strategy: The strategy, tp_y above one.
        hidden_cut: Whether the residual stream is cut over y.
    """
    whole = ((),) * len(param.shape)
    if param.style in ("vocab", "head"):
        return (_BOTH, *whole[1:])
    if param.style not in _REGION_STYLES:
        if param.style == "norm_heads":
            return (_BOTH,)
        cut = hidden_cut and param.style in (None, "replicate") and _on_stream(param)
        return ((Y,),) if cut else whole
    shape = block_shape(param, strategy)
    if len(param.shape) == 1:
        if param.style == "rowwise":
            return ((Y,),) if shape == "2d" else whole
        if param.style == "kv_replicate":
            return whole
        # A vector of the attention module itself, such as its sinks, goes with the heads a rank computes.
        own = param.owner == param.name and not exchanges_rows(strategy)
        return (_BOTH,) if shape == "1d" or own else ((X,),)
    table: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
        ("colwise", "1d"): (_BOTH, ()),
        ("colwise", "2d"): ((X,), (Y,)),
        ("colwise", "weight"): (_BOTH, ()),
        ("rowwise", "1d"): ((), _BOTH),
        ("rowwise", "2d"): ((Y,), (X,)),
        ("rowwise", "weight"): ((Y,), (X,)),
        ("kv_replicate", "1d"): ((), ()),
        ("kv_replicate", "2d"): ((), (Y,)),
        ("kv_replicate", "weight"): ((Y,), ()),
    }
    style = "colwise" if param.style in ("qkv", "gate_up") else str(param.style)
    return table[style, shape]
