"""Which degrees are legal: the checks a strategy passes before any layout is made."""

from __future__ import annotations

from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Strategy

_NOT_YET = ("pp", "cp", "tp_y", "ep")


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
    """Raise when a strategy uses an axis that layouts are not made for yet.

    Raises:
        UnsupportedSharding: HP205 for pp, cp, tp_y or ep above 1.
    """
    for axis in _NOT_YET:
        degree = strategy.degrees()[axis]
        if degree > 1:
            more = "" if axis == "ep" else f" parallel.dp_shard={strategy.dp_shard * degree}"
            raise UnsupportedSharding(
                f"axis `{axis}` is not implemented",
                where=where,
                got=f"{axis}={degree}",
                allowed="dp_replicate, dp_shard, tp_x",
                hint=f"parallel.{axis}=1{more}",
            )
