"""Packed projections under tensor parallelism: which are cut part by part, and which exchange columns.

Parts of one size, each cut evenly, are cut apart: a rank holds the rows it works on and nothing is sent. FSDP then
needs the columns, which must divide, and a bias has none. Everything else is cut into equal slices of all rows, as
any matrix, and the columns of the output change hands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hyper_parallel.errors import RuleError
from hyper_parallel.ir import Part, equal_parts, gate_up_parts, qkv_parts
from hyper_parallel.shard._fit import Param, Sizes, divide, divide_kv, rule_hint

PACKED = ("qkv", "gate_up")


def fit_packed(found: Sequence[Param], sizes: Sizes, notes: list[str]) -> list[Param]:
    """Check packed projections against the degree and decide how each is cut.

    Raises:
        NotDivisible: HP203 when heads, the width or the rows do not divide.
        RuleError: HP204 when the weight does not stack what the style says.
    """
    halves = {p.shape[0] // 2 for p in found if p.style == "gate_up"}
    sizes = replace(sizes, widths=tuple(sorted({*sizes.widths, *halves})))
    biased = {p.module for p in found if p.style in PACKED and len(p.shape) == 1}
    return [_fit(p, sizes, p.module in biased, notes) if p.style in PACKED else p for p in found]


def _fit(param: Param, sizes: Sizes, biased: bool, notes: list[str]) -> Param:
    parts = packed_parts(param, sizes)
    if param.style == "qkv":
        divide_kv(param, sizes)
    else:
        divide("width", param.shape[0] // 2, param, sizes)
    reason = _exchange_reason(param, parts, sizes, biased)
    if reason is None:
        return replace(param, parts=len(parts))
    divide("rows", param.shape[0], param, sizes)
    notes.append(
        f"`{param.pattern}` is cut into equal rows and tp={sizes.tp} ranks exchange columns of its output: {reason}"
    )
    return param


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


def _exchange_reason(
    param: Param, parts: tuple[Part, ...], sizes: Sizes, biased: bool
) -> str | None:
    """Why the parts are not cut apart; None when they are."""
    if not equal_parts(parts, sizes.tp):
        return "its parts have different sizes, or fewer heads than ranks"
    degrees = sizes.strategy.degrees()
    shards = 1
    for axis in sizes.strategy.fsdp_axes:
        shards *= degrees[axis]
    if biased:
        return "it has a bias"
    if param.shape[1] % shards:
        return f"its {param.shape[1]} columns do not divide by the {shards} ranks of FSDP"
    return None
