"""Which sizes must divide by the degrees of tensor parallelism, and what stays whole or exchanges columns instead.

Key and value projections of fewer heads than ranks stay whole, and each head is computed on several ranks. Packed
projections whose parts have one size, each cut evenly, are cut part by part: a rank holds the rows it works on and
nothing is sent. FSDP then needs the columns, which must divide, and a bias has none. Other packed ones are cut into
equal slices of all rows, as any matrix, and the columns of the output change hands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyper_parallel.errors import NotDivisible, RuleError, UnsupportedSharding
from hyper_parallel.ir import (
    BLOCK_SHAPES,
    Part,
    Strategy,
    equal_parts,
    gate_up_parts,
    qkv_parts,
    ulysses_degree,
)
from hyper_parallel.shard._fit import Param, Sizes, rule_hint
from hyper_parallel.shard._grid import block_shape, exchanges_rows

PACKED = ("qkv", "gate_up")
_CUT = ("colwise", "rowwise", "kv_replicate", "norm_heads", *PACKED)
_HEAD_SCATTER = {"parallel.attention_shape": "2d", "parallel.attention_scatter": "head"}

Cut = tuple[Param, str]
"""A parameter that is cut, and what by: `heads`, `kv_heads` or `width`."""
Problem = tuple[Param, str, int, str, int]
"""What does not divide: parameter, name and size, axes and their degree."""


def legal_tp(num_heads: int, num_kv_heads: int, *widths: int) -> list[int]:
    """Tensor-parallel degrees that keep attention heads whole and cut every width into equal slices.

    A degree t is legal when t divides `num_heads` and every width, and either t divides `num_kv_heads` (key and value
    heads are split) or `num_kv_heads` divides t (each is computed on t / num_kv_heads ranks).

    Args:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        widths: Further sizes that tensor parallelism splits, such as the width of the MLP.
    """
    return [
        t
        for t in range(1, num_heads + 1)
        if num_heads % t == 0
        and (num_kv_heads % t == 0 or t % num_kv_heads == 0)
        and all(width % t == 0 for width in widths)
    ]


def check_axes(strategy: Strategy, where: str | None = None) -> None:
    """Raise when the axes of a strategy do not fit each other, whatever the model.

    Raises:
        NotDivisible: HP203 when ep does not divide the ranks it folds over.
    """
    inner = strategy.dp_shard * strategy.cp * strategy.tp
    if inner % strategy.ep:
        allowed = [e for e in range(1, inner + 1) if inner % e == 0]
        raise NotDivisible(
            f"ep={strategy.ep} does not divide dp_shard * cp * tp = {inner}, the ranks that experts fold over",
            where=where,
            got=f"dp_shard={strategy.dp_shard}, cp={strategy.cp}, tp={strategy.tp}, ep={strategy.ep}",
            allowed=f"ep {', '.join(str(e) for e in allowed)}",
            changes={"parallel.ep": max(e for e in allowed if e <= strategy.ep)},
        )


def check_context(strategy: Strategy, num_heads: int, where: str | None = None) -> None:
    """Raise when attention cannot be spread over the context-parallel ranks as the strategy says.

    Sequences of any length can: they are padded. Ulysses ranks need query heads that they divide, after tensor
    parallelism; key and value heads are repeated where they are fewer.

    Raises:
        NotDivisible: HP203 with the nearest Ulysses degree.
    """
    s = strategy
    if s.cp == 1:
        return
    heads, ulysses = num_heads // s.tp, ulysses_degree(s.cp, s.cp_kind, s.cp_ulysses)
    allowed = [u for u in range(1, s.cp + 1) if s.cp % u == 0 and heads % u == 0]
    near = max((u for u in allowed if u <= ulysses), default=1)
    kind = "hybrid" if near > 1 else "ring"
    if s.cp_kind != "hybrid" and s.cp_ulysses > 1:
        raise NotDivisible(
            f"`cp_ulysses` is a choice of cp_kind=hybrid, not of {s.cp_kind}",
            where=where,
            got=f"cp_kind={s.cp_kind}, cp_ulysses={s.cp_ulysses}",
            changes={"parallel.cp_kind": "hybrid", "parallel.cp_ulysses": s.cp_ulysses},
        )
    if ulysses not in allowed:
        raise NotDivisible(
            "Ulysses ranks must divide cp and the query heads of one tensor-parallel rank",
            where=where,
            got=f"{ulysses} Ulysses ranks, cp={s.cp}, {heads} heads",
            allowed=allowed,
            changes={"parallel.cp_kind": kind, "parallel.cp_ulysses": near},
        )


def fit_sizes(found: list[Param], sizes: Sizes, notes: list[str]) -> list[Param]:
    """Check sizes against one axis or two, and decide what stays whole and how packed projections are cut.

    Raises:
        NotDivisible: HP203 with the degrees, or the pairs of them, that are legal.
        RuleError: HP204 when a weight is not what its style says.
        UnsupportedSharding: HP205 for combinations without meaning.
    """
    s = sizes.strategy
    if s.tp_y > 1:
        _check_two_axes(found, sizes)
    biased = {p.module for p in found if p.style in PACKED and len(p.shape) == 1}
    fit_packed = _packed if s.tp_y == 1 else _packed_on_two_axes
    exchanged: list[str] = []
    found = [
        fit_packed(p, sizes, p.module in biased, exchanged) if p.style in PACKED else p
        for p in found
    ]
    # A rowwise bias is whole, so its size plays no part.
    cut = [p for p in found if p.style in _CUT and (len(p.shape) == 2 or p.style != "rowwise")]
    cut.sort(key=lambda p: p.style in PACKED)
    roles = {p.name: _role(p, sizes) for p in cut}
    cuts = [(p, roles[p.name]) for p in cut]
    problem = next(_problems(cuts, sizes, s), None)
    if problem is not None:
        raise _refusal(problem, cuts, sizes)
    found = [_fit_kv(p, roles.get(p.name), sizes, notes) for p in found]
    notes += exchanged
    return found


def _role(param: Param, sizes: Sizes) -> str:
    """`heads`, `kv_heads` or `width`: what a parameter is cut by."""
    split = -1 if param.style == "rowwise" else 0
    if param.dims and {"heads", "kv_heads"} & {param.dims[split]}:
        return param.dims[split]
    if not param.in_attention:
        return "width"
    leaf = param.module.rpartition(".")[2]
    if leaf in ("k_proj", "v_proj"):
        return "kv_heads"
    kv_width = sizes.num_kv_heads * sizes.head_dim
    looks_kv = param.cut_size == kv_width and sizes.num_kv_heads != sizes.num_heads
    known = leaf in ("q_proj", "o_proj") or param.style == "rowwise"
    return "kv_heads" if looks_kv and not known else "heads"


def _width(param: Param) -> int:
    """Width of a block that a parameter of role `width` spans."""
    return param.cut_size // (2 if param.style == "gate_up" else 1)


def _problems(cuts: Sequence[Cut], sizes: Sizes, s: Strategy) -> Iterator[Problem]:
    everywhere, on_x = ("tp_x * tp_y", s.tp), ("tp_x", s.tp_x)
    for p, role in cuts:
        shape = block_shape(p, s)
        whole_heads = shape == "1d" or (shape == "2d" and s.attention_scatter == "head")
        if role == "width":
            axes, degree = on_x if shape == "2d" else everywhere
            if _width(p) % degree:
                yield p, "width", _width(p), axes, degree
        elif sizes.num_heads % (everywhere if whole_heads else on_x)[1]:
            yield p, "heads", sizes.num_heads, *(everywhere if whole_heads else on_x)
        elif role == "kv_heads" or p.style == "qkv":
            # Of a 2d block x cuts the weights, and all ranks the heads.
            cutting = (everywhere if shape == "1d" else on_x, everywhere if whole_heads else on_x)
            for axes, degree in cutting:
                if sizes.num_kv_heads % degree and degree % sizes.num_kv_heads:
                    yield p, "kv_heads", sizes.num_kv_heads, axes, degree
        packed = p.style in PACKED and p.parts == 1
        moved = shape == "weight" and p.in_attention and p.style != "rowwise" and len(p.shape) == 2
        if (packed or moved) and p.shape[0] % s.tp:
            yield p, "rows", p.shape[0], *everywhere
    if s.tp_y > 1 and {s.attention_shape, s.mlp_shape} != {"1d"}:
        for p, _ in cuts:
            hidden = p.shape[0] if p.style == "rowwise" else p.shape[-1]
            if len(p.shape) == 2 and hidden % s.tp_y:
                yield p, "hidden", hidden, "tp_y", s.tp_y


def _refusal(problem: Problem, cuts: Sequence[Cut], sizes: Sizes) -> NotDivisible:
    """The error, with what divides instead."""
    param, what, size, axes, degree = problem
    s = sizes.strategy
    if s.tp_y == 1:
        widths = sorted({_width(p) for p, role in cuts if role == "width"})
        legal = legal_tp(sizes.num_heads, sizes.num_kv_heads, *widths)
        return NotDivisible(
            f"tp={s.tp} does not divide {what}={size} in `{param.pattern}`",
            where=sizes.where,
            got=f"{what}={size}, tp={s.tp}",
            allowed=f"tp {', '.join(str(t) for t in legal)}",
            changes={"parallel.tp": max((t for t in legal if t <= s.tp), default=1)},
        )

    def fits(other: Strategy) -> bool:
        return next(_problems(cuts, sizes, other), None) is None

    pairs = [(s.tp // y, y) for y in range(2, s.tp) if s.tp % y == 0]
    pairs = [(x, y) for x, y in pairs if fits(replace(s, tp_x=x, tp_y=y))]
    shapes = [
        (a, m)
        for a in BLOCK_SHAPES
        for m in BLOCK_SHAPES
        if fits(replace(s, attention_shape=a, mlp_shape=m))
    ]
    changes: dict[str, object]
    if pairs:
        x, y = min(pairs, key=lambda p: abs(p[1] - s.tp_y))
        changes = {"parallel.tp_x": x, "parallel.tp_y": y}
    elif shapes:
        a, m = min(shapes, key=lambda p: (p[0] != s.attention_shape) + (p[1] != s.mlp_shape))
        changes = {"parallel.attention_shape": a, "parallel.mlp_shape": m}
    else:
        wider = s.dp_shard * s.tp_y
        changes = {"parallel.tp_x": s.tp_x, "parallel.tp_y": 1, "parallel.dp_shard": wider}
    allowed = [f"tp_x={x} tp_y={y}" for x, y in pairs] + [f"shapes {a}/{m}" for a, m in shapes]
    return NotDivisible(
        f"{axes} = {degree} does not divide {what}={size} with shapes {_shown(s)}/{s.mlp_shape}",
        where=sizes.where,
        got=f"{what}={size}, tp_x={s.tp_x}, tp_y={s.tp_y}",
        allowed=", ".join(allowed) or None,
        changes=changes,
    )


def _fit_kv(param: Param, role: str | None, sizes: Sizes, notes: list[str]) -> Param:
    """The parameter, whole where ranks outnumber its key and value heads."""
    s, heads = sizes.strategy, sizes.num_kv_heads
    if param.style == "kv_replicate" and role != "kv_heads":
        raise RuleError(
            f"style `kv_replicate` is for key and value projections, `{param.pattern}` is none",
            where=sizes.where,
            got=f"shape {param.shape}",
            hint=rule_hint({param.pattern: "colwise"}),
        )
    # The scale of heads that several ranks compute is whole on each; it is split over all ranks at once.
    on_x = s.tp_y > 1 and s.attention_shape != "1d" and param.style != "norm_heads"
    ranks = s.tp_x if on_x else s.tp
    if role != "kv_heads" or heads % ranks == 0:
        return param
    notes.append(
        f"`{param.pattern}` keeps its weight whole: {heads} key and value heads on {'tp_x' if on_x else 'tp'}={ranks} "
        f"ranks; each head is computed on {ranks // heads} ranks"
    )
    return replace(param, style="kv_replicate")


def packed_parts(param: Param, sizes: Sizes) -> tuple[Part, ...]:
    """The projections a packed weight stacks; HP204 when its rows are not theirs."""
    rows = param.shape[0]
    if param.style == "gate_up":
        parts = gate_up_parts(rows)
    else:
        parts = qkv_parts(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    if sum(p.rows for p in parts) != rows:
        raise RuleError(
            f"style `{param.style}` does not describe `{param.pattern}`",
            where=sizes.where,
            got=f"{rows} rows",
            allowed=f"{' + '.join(str(p.rows) for p in parts)} rows",
            hint=rule_hint({param.pattern: "colwise"}),
        )
    return parts


def _packed(param: Param, sizes: Sizes, biased: bool, notes: list[str]) -> Param:
    """A packed projection on one axis, cut apart or into equal rows."""
    s, parts = sizes.strategy, packed_parts(param, sizes)
    shards = s.mesh().degree(s.fsdp_axes)
    if not equal_parts(parts, s.tp):
        reason = "its parts have different sizes, or fewer heads than ranks"
    elif biased:
        reason = "it has a bias"
    elif param.shape[1] % shards:
        reason = f"its {param.shape[1]} columns do not divide by the {shards} ranks of FSDP"
    else:
        return replace(param, parts=len(parts))
    notes.append(
        f"`{param.pattern}` is cut into equal rows and tp={s.tp} ranks exchange columns of its output: {reason}"
    )
    return param


def _packed_on_two_axes(param: Param, sizes: Sizes, biased: bool, _: list[str]) -> Param:
    """A packed projection: gate and up are cut apart in a 2d block; others exchange columns over all ranks."""
    s = sizes.strategy
    apart = param.style == "gate_up" and s.mlp_shape == "2d"
    reason = None
    if param.style == "gate_up" and s.mlp_shape == "weight":
        reason = "moved weights have no form for stacked ones"
    elif apart and biased:
        reason = "it has a bias"
    elif apart and s.mesh().degree(s.fsdp_axes) > 1:
        reason = "torch cannot assemble what FSDP, parts and a second axis cut together"
    elif not apart and param.shape[0] % s.tp:
        reason = f"its {param.shape[0]} rows do not divide by {s.tp} ranks"
    if reason is not None:
        one_axis = {"parallel.tp_x": s.tp, "parallel.tp_y": 1}
        in_mlp = param.style == "gate_up" and s.mlp_shape != "1d"
        raise UnsupportedSharding(
            f"`{param.pattern}` holds several projections and cannot be cut over two axes: {reason}",
            where=sizes.where,
            got=f"tp_x={s.tp_x}, tp_y={s.tp_y}, shapes {s.attention_shape}/{s.mlp_shape}",
            changes={"parallel.mlp_shape": "1d"} if in_mlp else one_axis,
        )
    packed_parts(param, sizes)  # refuses a weight that does not stack what the style says
    return replace(param, parts=2) if apart else param


def _check_two_axes(found: Sequence[Param], sizes: Sizes) -> None:
    """Refuse what has no meaning on two tensor-parallel axes."""
    s = sizes.strategy
    if s.tp_x == 1:
        raise UnsupportedSharding(
            "tensor parallelism on y alone is the one-dimensional kind, which lies on x",
            where=sizes.where,
            got=f"tp_x=1, tp_y={s.tp_y}",
            changes={"parallel.tp_x": s.tp_y, "parallel.tp_y": 1},
        )
    if s.cp > 1 and exchanges_rows(s):
        raise UnsupportedSharding(
            "attention that cuts tokens over y cannot also be cut by context parallelism",
            where=sizes.where,
            got=f"cp={s.cp}, tp_y={s.tp_y}, attention {_shown(s)}",
            allowed="attention_shape 1d, or 2d with attention_scatter head",
            changes=_HEAD_SCATTER,
        )
    for param in found:
        if param.style == "latent" and s.attention_shape != "1d":
            raise UnsupportedSharding(
                f"`{param.pattern}` (latent attention) is whole on every rank: on two axes its block has shape 1d",
                where=sizes.where,
                got=f"tp_x={s.tp_x}, tp_y={s.tp_y}, attention {_shown(s)}",
                allowed="attention_shape 1d",
                changes={"parallel.attention_shape": "1d"},
            )
        if param.style in ("norm_heads", "qkv") and exchanges_rows(s):
            raise UnsupportedSharding(
                f"`{param.pattern}` ({param.style}) needs a rank to compute the heads of its place among all ranks",
                where=sizes.where,
                got=f"attention {_shown(s)}",
                allowed="attention_shape 1d, or 2d with attention_scatter head",
                changes=_HEAD_SCATTER,
            )


def _shown(s: Strategy) -> str:
    token = s.attention_shape == "2d" and s.attention_scatter == "token"
    return s.attention_shape + (" (token)" if token else "")
