"""Layouts of experts: recognition of expert parameters, divisibility checks, sharding by `ep` and FSDP.

Expert parallelism shards the first dim of fused parameters, [experts, ...], into contiguous runs of experts. FSDP
shards each run over `edp`, the ranks with the same experts. It shards dim 0 if every rank gets whole experts, else the
first dim whose size is divisible by edp:

    64 experts, ep=8, edp=4    [expert:ep.edp, gate_up, embed]      2 experts each
    8 experts, ep=8, edp=4     [expert:ep, gate_up:edp, embed]      a quarter of one expert each

Experts in a list of modules (`experts.0.up_proj.weight`, `experts.1.up_proj.weight`, ...) are distributed over `ep`:
each rank owns a contiguous run of modules.

    `experts.*.up_proj.weight`, ep=8    [mlp, embed], one of ep

Tensor parallelism replicates experts and their router: each rank computes the expert layer on its own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hyper_parallel.errors import NotDivisible, UnsupportedSharding
from hyper_parallel.ir import Layout, Strategy
from hyper_parallel.shard._axis_changes import without_axes
from hyper_parallel.shard._fit import Param, module_of
from hyper_parallel.shard._rules import WHOLE
from hyper_parallel.units import divisors

EXPERTS = "experts"


def mark_experts(params: list[Param]) -> list[Param]:
    """Return the parameters with style `experts` for routed experts, and `replicate` for other members of their block.

    Routed experts are parameters in modules named `experts` and those with an expert dim. The router and other members
    act on each token alone. A style that a rule has assigned is kept, except `whole`.
    """
    marked = [
        replace(p, style=EXPERTS)
        if p.style in (None, WHOLE) and ("expert" in p.dims or EXPERTS in p.module.split("."))
        else p
        for p in params
    ]
    blocks = {module_of(container(p)) for p in marked if p.style == EXPERTS}
    return [
        replace(p, style="replicate") if p.style in (None, WHOLE) and blocks & {p.parent, p.module} else p
        for p in marked
    ]


def check_experts(params: list[Param], strategy: Strategy) -> None:
    """Check that experts can be sharded over `ep`; ep = 1 needs no experts.

    Raises:
        UnsupportedSharding: HP205 if experts are absent or in an unknown form.
        NotDivisible: HP203 if `ep` does not divide dp_shard * cp * tp or the number of experts of a layer. The hint is
            the largest divisor of `ep` that divides both.
    """
    if strategy.ep == 1:
        return
    experts = [p for p in params if p.style == EXPERTS]
    if not experts:
        raise UnsupportedSharding(
            "expert parallelism needs routed experts, and none were recognised in this model",
            got=f"ep={strategy.ep}",
            changes=without_axes(strategy, "ep"),
        )
    for param in experts:
        if not _index(param) and (container(param) != param.module or len(param.shape) < 2):
            raise UnsupportedSharding(
                f"`{param.pattern}` stores experts in a form that ep cannot shard",
                got=f"ep={strategy.ep}, {param.name} {param.shape}",
                allowed="parameters [experts, dim, ...] directly in `experts`, or modules experts.0, experts.1, ...",
                changes=without_axes(strategy, "ep"),
            )
    _check_divides(strategy, sorted({*(p.shape[0] for p in experts if not _index(p)), *_lengths(experts)}))


def _check_divides(s: Strategy, counts: Sequence[int]) -> None:
    number = math.gcd(*counts)
    experts = ", ".join(map(str, counts))
    inner = s.dp_shard * s.cp * s.tp
    legal = divisors(math.gcd(number, inner))
    near = max(e for e in legal if s.ep % e == 0)
    ranks = f"dp_shard * cp * tp = {inner}, the ranks over which ep shards experts"
    for size, divided, got in (
        (inner, ranks, f"dp_shard={s.dp_shard}, cp={s.cp}, tp={s.tp}"),
        (number, f"the {experts} experts of a layer", f"experts={experts}"),
    ):
        if size % s.ep:
            raise NotDivisible(
                f"ep={s.ep} does not divide {divided}",
                got=f"{got}, ep={s.ep}",
                allowed=f"ep {', '.join(map(str, legal))}",
                changes={"parallel.ep": near} if near > 1 else without_axes(s, "ep"),
            )


def _lengths(experts: list[Param]) -> list[int]:
    """Return the number of experts in each module list, except lists named with `*` instead of indices."""
    lists: dict[str, set[str]] = {}
    for param in experts:
        if index := _index(param):
            lists.setdefault(container(param), set()).add(index)
    return [len(indices) for indices in lists.values() if indices != {"*"}]


def expert_layout(layout: Layout, param: Param, strategy: Strategy) -> Layout:
    """Return the layout of an expert parameter for ep > 1.

    A fused tensor is sharded over its expert dim; a module of an expert list is on one ep rank. FSDP shards over edp.
    """
    listed = bool(_index(param))
    layout = replace(layout, one_of=("ep",)) if listed else layout.split(0, "ep")
    edp = strategy.expert_mesh().degree("edp")
    if edp == 1:
        return layout
    local = param.shape if listed else (param.shape[0] // strategy.ep, *param.shape[1:])
    return layout.split(even_dim(local, edp), "edp")


def even_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the first dim whose size is divisible by `ranks`; 0, which FSDP pads, if there is none."""
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def container(param: Param) -> str:
    """Return the name of the module that contains all experts of a layer, for an expert parameter `param`."""
    before, separator, _ = f".{param.module}.".partition(f".{EXPERTS}.")
    return f"{before}.{EXPERTS}".removeprefix(".") if separator else param.module


def _index(param: Param) -> str:
    """Return the index of the expert in its module list, as text; "" for a parameter that fuses all experts."""
    index = param.name.removeprefix(f"{container(param)}.").partition(".")[0]
    return index if index.isdecimal() or index == "*" else ""
