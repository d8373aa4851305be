"""Which degrees are legal: the checks a strategy passes before any layout is made."""

from __future__ import annotations

from hyper_parallel.errors import NotDivisible
from hyper_parallel.ir import Strategy, ulysses_degree


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

    Args:
        strategy: Degrees and choices.
        num_heads: Query heads of the model.
        where: Where the degrees were set, for errors.

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
