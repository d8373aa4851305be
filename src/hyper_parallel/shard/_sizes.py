"""Divisibility checks for tensor parallelism, and alternatives for sizes that are not divisible by the degree.

Key and value projections whose heads the ranks do not divide are replicated; each head is computed on several ranks.

A packed projection stacks several projections in one weight, such as query, key and value. If its parts have equal
divisible sizes, each part is sharded: every rank has the rows that it uses. FSDP then shards the columns, so the number
of columns must be divisible and a bias is not allowed. With one tensor-parallel axis, any other packed projection is
sharded into equal slices of all rows, and ranks exchange columns of the output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.errors import NotDivisible, RuleError, UnsupportedSharding
from hyper_parallel.ir import (
    BLOCK_SHAPES,
    Part,
    Strategy,
    Workload,
    equal_parts,
    gate_up_parts,
    qkv_parts,
)
from hyper_parallel.shard._boundary import TokenCut
from hyper_parallel.shard._fit import Param, Sizes, with_rules
from hyper_parallel.shard._grid import block_shape, shards_queries_by_token
from hyper_parallel.shard._rules import COLUMN_STYLES, PACKED
from hyper_parallel.units import divisors

_CUT = (*COLUMN_STYLES, "rowwise", "norm_heads")

Problem = tuple[Param, str, int, str, int]
"""Size that a degree does not divide: (parameter, name of the size, size, names of the axes, degree)."""


def legal_tp(num_heads: int, num_kv_heads: int, *widths: int) -> list[int]:
    """Return the tensor-parallel degrees that keep attention heads whole and divide every width.

    A degree t is legal when t divides `num_heads` and every width. Also, either t divides `num_kv_heads` (key and value
    heads are sharded), or `num_kv_heads` divides t (each head is computed on t / num_kv_heads ranks).

    Args:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        widths: Further sizes that tensor parallelism shards, such as the width of the MLP.
    """
    whole = divisors(math.gcd(num_heads, *widths))
    return [t for t in whole if num_kv_heads % t == 0 or t % num_kv_heads == 0]


def check_overlap(strategy: Strategy, workload: Workload) -> None:
    """Raise UnsupportedSharding (HP205) if the layers cannot overlap communication as `strategy.overlap` requests."""
    s, overlap = strategy, strategy.overlap
    if overlap.ep_chunks > 1 and s.ep == 1:
        problem = "`overlap.ep=chunks` needs expert parallelism"
        raise _overlap_error(problem, f"ep={s.ep}", {"overlap.ep": "none"})
    if overlap.block_executor != "serial":
        _check_blocks(strategy, workload)
    if not overlap.half_batch:
        return
    if s.tp == 1 and s.ep == 1:
        problem = "half-batches need tensor or expert parallelism: a layer has no other communication"
        raise _overlap_error(problem, f"tp={s.tp}, ep={s.ep}", {"overlap": "none"})
    illegal = {
        "pipeline parallelism": (s.pp > 1, f"pp={s.pp}"),
        "context parallelism": (s.cp > 1, f"cp={s.cp}"),
        **_features_without_overlap(s),
        "experts sharded over data-parallel ranks": (
            s.ep > 1 and s.expert_mesh().degree("edp") > 1 and s.zero_stage > 0,
            f"ep={s.ep}, dp_shard={s.dp_shard}",
        ),
    }
    changes = {"overlap.ep": "chunks", "overlap.tp": "none"} if s.ep > 1 else {"overlap": "none"}
    _refuse_features("half-batches do not work with", illegal, changes)
    sequences = workload.microbatch or 1
    if overlap.parts(sequences, workload.seq_len) == 1:
        even = next(n for n in (2 * sequences, 4 * sequences) if overlap.parts(n, workload.seq_len) > 1)
        steps, rest = divmod(sequences * (workload.accumulation_steps or 1), even)
        batch = {"training.microbatch": even, "training.accumulation_steps": max(1, steps)}
        if rest and workload.tokens_per_step is not None:
            batch["training.tokens_per_step"] = even * max(1, steps) * s.dp * workload.seq_len
        raise _overlap_error(
            "a microbatch of this size cannot be halved",
            f"microbatch={sequences}, seq_len={workload.seq_len}",
            batch,
        )


def _overlap_error(problem: str, got: str, changes: Mapping[str, object]) -> UnsupportedSharding:
    return UnsupportedSharding(problem, where="overlap", got=got, changes=changes)


_Features = Mapping[str, tuple[bool, str]]
"""Dict from a feature to (whether the strategy uses it, its setting)."""


def _refuse_features(problem: str, features: _Features, changes: Mapping[str, object]) -> None:
    for feature, (is_used, got) in features.items():
        if is_used:
            raise _overlap_error(f"{problem} {feature}", got, changes)


def _features_without_overlap(s: Strategy) -> _Features:
    return {
        "a second tensor-parallel axis": (s.tp_y > 1, f"tp_y={s.tp_y}"),
        "re-gathered inputs": (s.gathered_inputs == "re-gather", "gathered_inputs=re-gather"),
        "a memory plan": (s.offload, "offload"),
    }


def _check_blocks(strategy: Strategy, workload: Workload) -> None:
    s, chunks = strategy, strategy.overlap.tp_chunks
    features = {
        "one tensor-parallel rank": (s.tp == 1, f"tp={s.tp}"),
        "half-batches": (s.overlap.half_batch, "overlap.ep=half-batch"),
        **_features_without_overlap(s),
    }
    problem = f"`overlap.tp={s.overlap.block_executor}` does not work with"
    _refuse_features(problem, features, {"overlap.tp": "none"})
    tokens = TokenCut.of(s, workload).piece
    if tokens % chunks:
        fitting = [n for n in range(chunks - 1, 1, -1) if tokens % n == 0]
        raise _overlap_error(
            f"the tokens of a rank cannot be divided into {chunks} chunks",
            f"{tokens} tokens of a microbatch per tensor-parallel rank",
            {"overlap.chunks": fitting[0]} if fitting else {"overlap.tp": "none"},
        )


def check_context(strategy: Strategy, num_heads: int) -> None:
    """Raise NotDivisible (HP203) if attention cannot be sharded over the context-parallel ranks.

    The Ulysses degree must divide cp and the query heads of a tensor-parallel rank; key and value heads are repeated as
    needed, and sequences of any length are padded. `cp_ulysses` above 1 requires `cp_kind` hybrid.
    """
    s = strategy
    if s.cp == 1:
        return
    heads = num_heads // s.tp
    allowed = divisors(math.gcd(s.cp, heads))
    near = max(u for u in allowed if u <= (s.cp_ulysses if s.cp_ulysses > 1 else s.ulysses))
    changes = {"parallel.cp_kind": "hybrid" if near > 1 else "ring", "parallel.cp_ulysses": near}
    if s.cp_kind != "hybrid" and s.cp_ulysses > 1:
        raise NotDivisible(
            f"`cp_ulysses` requires cp_kind=hybrid, not {s.cp_kind}",
            got=f"cp_kind={s.cp_kind}, cp_ulysses={s.cp_ulysses}",
            changes=changes,
        )
    if s.ulysses not in allowed:
        raise NotDivisible(
            "Ulysses ranks must divide cp and the query heads of one tensor-parallel rank",
            got=f"{s.ulysses} Ulysses ranks, cp={s.cp}, {heads} heads",
            allowed=allowed,
            changes=changes,
        )


def fit_sizes(params: list[Param], sizes: Sizes, notes: list[str]) -> list[Param]:
    """Return the parameters with final styles for key, value and packed projections.

    Raises:
        NotDivisible: HP203 for a size that is not divisible by the degree of the axes that shard it.
        UnsupportedSharding: HP205 for a combination that two tensor-parallel axes do not support.
        RuleError: HP204 for a style that does not fit the shape of its parameter.
    """
    s = sizes.strategy
    if s.tp_y > 1:
        _check_two_axes(params, sizes)
    biased = {p.module for p in params if p.style in PACKED and len(p.shape) == 1}
    exchanged: list[str] = []
    params = [_fit_packed(p, sizes, p.module in biased, exchanged) if p.style in PACKED else p for p in params]
    params = [replace(p, role=_role(p, sizes)) for p in params]
    cuts = sorted((p for p in params if p.role), key=lambda p: p.style in PACKED)
    problem = next(_problems(cuts, sizes, s), None)
    if problem is not None:
        raise _refusal(problem, cuts, sizes)
    params = [_fit_kv(p, sizes, notes) for p in params]
    notes += exchanged
    return params


def _role(param: Param, sizes: Sizes) -> str | None:
    """Return the quantity that the degree must divide: heads, kv_heads or width; None if no dim is sharded by it."""
    if param.style not in _CUT or (param.style == "rowwise" and len(param.shape) != 2):
        return None
    split = -1 if param.style == "rowwise" else 0
    if param.dims and {"heads", "kv_heads"} & {param.dims[split]}:
        return param.dims[split]
    if not param.in_attention:
        return "width"
    if param.leaf in ("k_proj", "v_proj"):
        return "kv_heads"
    kv_width = sizes.num_kv_heads * sizes.head_dim
    looks_kv = param.cut_size == kv_width and sizes.num_kv_heads != sizes.num_heads
    known = param.leaf in ("q_proj", "o_proj") or param.style == "rowwise"
    return "kv_heads" if looks_kv and not known else "heads"


def _width(param: Param) -> int:
    return param.cut_size // (2 if param.style == "gate_up" else 1)


def _problems(cuts: Sequence[Param], sizes: Sizes, s: Strategy) -> Iterator[Problem]:
    everywhere, on_x = ("tp_x * tp_y", s.tp), ("tp_x", s.tp_x)
    for p in cuts:
        shape = block_shape(p, s)
        whole_heads = shape == "1d" or (shape == "2d" and s.attention_scatter == "head")
        if p.role == "width":
            axes, degree = on_x if shape == "2d" else everywhere
            if _width(p) % degree:
                yield p, "width", _width(p), axes, degree
        elif sizes.num_heads % (everywhere if whole_heads else on_x)[1]:
            yield p, "heads", sizes.num_heads, *(everywhere if whole_heads else on_x)
        elif p.role == "kv_heads" or p.style == "qkv":
            # In a 2d block, weights are sharded over x and heads over all ranks.
            cutting = (everywhere if shape == "1d" else on_x, everywhere if whole_heads else on_x)
            for axes, degree in cutting:
                if sizes.num_kv_heads % degree and degree % sizes.num_kv_heads:
                    yield p, "kv_heads", sizes.num_kv_heads, axes, degree
        packed = p.style in PACKED and p.parts == 1
        moved = shape == "weight" and p.in_attention and p.style != "rowwise" and len(p.shape) == 2
        if (packed or moved) and p.shape[0] % s.tp:
            yield p, "rows", p.shape[0], *everywhere
    if s.tp_y > 1 and {s.attention_shape, s.mlp_shape} != {"1d"}:
        for p in cuts:
            hidden = p.shape[0] if p.style == "rowwise" else p.shape[-1]
            if len(p.shape) == 2 and hidden % s.tp_y:
                yield p, "hidden", hidden, "tp_y", s.tp_y


def _refusal(problem: Problem, cuts: Sequence[Param], sizes: Sizes) -> NotDivisible:
    param, dimension, size, axes, degree = problem
    s = sizes.strategy

    def fits(other: Strategy) -> bool:
        return next(_problems(cuts, sizes, other), None) is None

    if s.tp_y == 1:
        widths = sorted({_width(p) for p in cuts if p.role == "width"})
        legal = [t for t in legal_tp(sizes.num_heads, sizes.num_kv_heads, *widths) if fits(replace(s, tp_x=t))]
        return NotDivisible(
            f"tp={s.tp} does not divide {dimension}={size} in `{param.pattern}`",
            got=f"{dimension}={size}, tp={s.tp}",
            allowed=f"tp {', '.join(str(t) for t in legal)}",
            changes={"parallel.tp": max((t for t in legal if t <= s.tp), default=1)},
        )
    pairs = [(s.tp // y, y) for y in range(2, s.tp) if s.tp % y == 0]
    pairs = [(x, y) for x, y in pairs if fits(replace(s, tp_x=x, tp_y=y))]
    shapes = list(itertools.product(BLOCK_SHAPES, BLOCK_SHAPES))
    shapes = [(a, m) for a, m in shapes if fits(replace(s, attention_shape=a, mlp_shape=m))]
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
        f"{axes} = {degree} does not divide {dimension}={size} "
        f"with attention shape {_shown(s)}, MLP shape {s.mlp_shape}",
        got=f"{dimension}={size}, tp_x={s.tp_x}, tp_y={s.tp_y}",
        allowed=", ".join(allowed) or None,
        changes=changes,
    )


def _fit_kv(param: Param, sizes: Sizes, notes: list[str]) -> Param:
    """Return the parameter, with style `kv_replicate` and a note if the ranks do not divide its key or value heads."""
    s, heads = sizes.strategy, sizes.num_kv_heads
    if param.style == "kv_replicate" and param.role != "kv_heads":
        raise RuleError(
            f"style `kv_replicate` applies to key and value projections only, not to `{param.pattern}`",
            got=f"shape {param.shape}",
            changes=with_rules({param.pattern: "colwise"}, sizes.strategy.rules),
        )
    # A head norm is sharded over all ranks; for heads that several ranks compute, its scale is replicated.
    on_x = s.tp_y > 1 and s.attention_shape != "1d" and param.style != "norm_heads"
    ranks = s.tp_x if on_x else s.tp
    if param.role != "kv_heads" or heads % ranks == 0:
        return param
    notes.append(
        f"`{param.pattern}` keeps its weight whole: {heads} key and value heads on {'tp_x' if on_x else 'tp'}={ranks} "
        f"ranks; each head is computed on {ranks // heads} ranks"
    )
    return replace(param, style="kv_replicate")


def packed_parts(param: Param, sizes: Sizes) -> tuple[Part, ...]:
    """Return the parts of a packed weight; raise RuleError (HP204) if their sizes do not add up to its rows."""
    rows = param.shape[0]
    if param.style == "gate_up":
        parts = gate_up_parts(rows)
    else:
        parts = qkv_parts(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    if sum(p.rows for p in parts) != rows:
        raise RuleError(
            f"the rows of `{param.pattern}` do not match style `{param.style}`",
            got=f"{rows} rows",
            allowed=f"{' + '.join(str(p.rows) for p in parts)} rows",
            changes=with_rules({param.pattern: "colwise"}, sizes.strategy.rules),
        )
    return parts


def _fit_packed(param: Param, sizes: Sizes, biased: bool, notes: list[str]) -> Param:
    """Return a packed projection, with `parts` set if each of its parts is sharded separately.

    If not, the projection is sharded into equal row slices; with one axis, a note states the reason. Raise RuleError
    (HP204) if the rows do not match the style, and UnsupportedSharding (HP205) for two axes that do not allow it.
    """
    s = sizes.strategy
    shards = s.mesh().degree(s.fsdp_axes)
    if s.tp_y > 1:
        apart = param.style == "gate_up" and s.mlp_shape == "2d"
        reason = None
        if param.style == "gate_up" and s.mlp_shape == "weight":
            reason = "shape weight does not support stacked projections"
        elif apart and biased:
            reason = "it has a bias"
        elif apart and shards > 1:
            reason = "torch cannot gather a parameter with stacked parts that FSDP and two more axes shard"
        elif not apart and param.shape[0] % s.tp:
            reason = f"its {param.shape[0]} rows are not divisible by {s.tp} ranks"
        if reason is not None:
            one_axis = {"parallel.tp_x": s.tp, "parallel.tp_y": 1}
            in_mlp = param.style == "gate_up" and s.mlp_shape != "1d"
            raise UnsupportedSharding(
                f"`{param.pattern}` stacks several projections and cannot be sharded over two axes: {reason}",
                got=f"tp_x={s.tp_x}, tp_y={s.tp_y}, shapes {s.attention_shape}/{s.mlp_shape}",
                changes={"parallel.mlp_shape": "1d"} if in_mlp else one_axis,
            )
        packed_parts(param, sizes)
        return replace(param, parts=2) if apart else param
    parts = packed_parts(param, sizes)
    if not equal_parts(parts, s.tp):
        reason = "its parts have different sizes, or fewer heads than ranks"
    elif biased:
        reason = "it has a bias"
    elif param.shape[1] % shards:
        reason = f"its {param.shape[1]} columns are not divisible by the {shards} ranks of FSDP"
    else:
        return replace(param, parts=len(parts))
    notes.append(
        f"`{param.pattern}` is sharded into equal row slices and ranks exchange columns of its output: {reason}"
    )
    return param


def _check_two_axes(params: Sequence[Param], sizes: Sizes) -> None:
    s, spans = sizes.strategy, shards_queries_by_token(sizes.strategy)
    degrees, shape = f"tp_x={s.tp_x}, tp_y={s.tp_y}", f"attention {_shown(s)}"
    if s.tp_x == 1:
        raise UnsupportedSharding(
            "one-dimensional tensor parallelism uses tp_x, not tp_y",
            got=degrees,
            changes={"parallel.tp_x": s.tp_y, "parallel.tp_y": 1},
        )
    needs_heads: dict[str, Any] = {
        "allowed": "attention_shape 1d, or 2d with attention_scatter head",
        "changes": {"parallel.attention_shape": "2d", "parallel.attention_scatter": "head"},
    }
    if s.cp > 1 and spans:
        raise UnsupportedSharding(
            "attention with tokens sharded over tp_y cannot be combined with context parallelism",
            got=f"cp={s.cp}, tp_y={s.tp_y}, {shape}",
            **needs_heads,
        )
    for param in params:
        if param.style == "latent" and s.attention_shape != "1d":
            raise UnsupportedSharding(
                f"`{param.pattern}` (latent attention) is replicated: on two axes it requires attention_shape 1d",
                got=f"{degrees}, {shape}",
                allowed="attention_shape 1d",
                changes={"parallel.attention_shape": "1d"},
            )
        if param.style in ("norm_heads", "qkv") and spans:
            raise UnsupportedSharding(
                f"`{param.pattern}` ({param.style}) requires heads to be sharded over all ranks",
                got=shape,
                **needs_heads,
            )


def _shown(s: Strategy) -> str:
    token = s.attention_shape == "2d" and s.attention_scatter == "token"
    return s.attention_shape + (" (token)" if token else "")
