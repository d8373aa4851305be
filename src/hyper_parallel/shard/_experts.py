"""Layouts of experts: which parameters they are, what divides, and how `ep` and FSDP cut them.

Expert parallelism cuts the first dim of the fused parameters, [experts, ...], into contiguous runs of experts; FSDP
cuts what is left over `edp`, the ranks that hold the same experts. It cuts dim 0 again when each of them gets a whole
number of experts, else the first dim that divides:

    64 experts, ep=8, edp=4    [expert:ep.edp, gate_up, embed]      2 experts each
    8 experts, ep=8, edp=4     [expert:ep, gate_up:edp, embed]      a quarter of one expert each

Experts in a list of modules, `experts.0.up_proj.weight`, `experts.1.up_proj.weight` and so on, are not cut but dealt
out: a rank holds a contiguous run of modules and nothing of the others.

    `experts.*.up_proj.weight`, ep=8    [mlp, embed], one of ep

Tensor parallelism leaves experts, and the router beside them, whole: the layer works on each rank's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hyper_parallel.errors import NotDivisible, UnsupportedSharding
from hyper_parallel.ir import Layout, Strategy
from hyper_parallel.shard._fit import Param, divisors, module_of
from hyper_parallel.shard._rules import WHOLE

EXPERTS = "experts"


def mark_experts(found: list[Param]) -> list[Param]:
    """Give the style `experts` to experts that no rule covers, and `replicate` to what stands beside them.

    A module that is named `experts`, or a parameter with an expert dim, holds routed experts. The router and other
    uncovered direct members of the same block work position by position.
    """
    marked = [
        replace(p, style=EXPERTS)
        if p.style in (None, WHOLE) and ("expert" in p.dims or EXPERTS in p.module.split("."))
        else p
        for p in found
    ]
    blocks = {module_of(container(p)) for p in marked if p.style == EXPERTS}
    return [
        replace(p, style="replicate")
        if p.style in (None, WHOLE) and blocks & {p.parent, p.module}
        else p
        for p in marked
    ]


def check_folding(strategy: Strategy) -> None:
    """Refuse a degree of `ep` that does not divide the ranks it folds over, HP203."""
    s = strategy
    what = f"dp_shard * cp * tp = {_inner(s)}, the ranks that experts fold over"
    _check_divides(s, _inner(s), what, f"dp_shard={s.dp_shard}, cp={s.cp}, tp={s.tp}")


def check_experts(found: list[Param], strategy: Strategy) -> None:
    """Refuse a degree of `ep` that the experts of the model do not allow, HP205 or HP203."""
    if strategy.ep == 1:
        return
    experts = [p for p in found if p.style == EXPERTS]
    if not experts:
        raise UnsupportedSharding(
            "expert parallelism needs routed experts, and no module of this model is known to hold any",
            got=f"ep={strategy.ep}",
            changes={"parallel.ep": 1},
        )
    for param in experts:
        if not _index(param) and (container(param) != param.module or len(param.shape) < 2):
            raise UnsupportedSharding(
                f"`{param.pattern}` holds experts in a form that ep cannot divide",
                got=f"ep={strategy.ep}, {param.name} {param.shape}",
                allowed="parameters [experts, ...], or modules experts.0, experts.1, ...",
                changes={"parallel.ep": 1},
            )
    number = math.gcd(*(p.shape[0] for p in experts if not _index(p)), *_lengths(experts))
    _check_divides(strategy, number, f"the {number} experts of a layer", f"experts={number}")


def _inner(strategy: Strategy) -> int:
    return strategy.dp_shard * strategy.cp * strategy.tp


def _check_divides(strategy: Strategy, number: int, what: str, got: str) -> None:
    if number % strategy.ep:
        allowed = divisors(math.gcd(number, _inner(strategy)))
        raise NotDivisible(
            f"ep={strategy.ep} does not divide {what}",
            got=f"{got}, ep={strategy.ep}",
            allowed=f"ep {', '.join(map(str, allowed))}",
            changes={"parallel.ep": max(e for e in allowed if e <= strategy.ep)},
        )


def _lengths(experts: list[Param]) -> list[int]:
    """Modules in every list of experts; names of a plan have `*` for the index, so they do not tell it."""
    lists: dict[str, set[str]] = {}
    for param in experts:
        if index := _index(param):
            lists.setdefault(container(param), set()).add(index)
    return [len(indices) for indices in lists.values() if indices != {"*"}]


def expert_layout(layout: Layout, param: Param, strategy: Strategy) -> Layout:
    """Layout of a parameter of experts, fused or of one in a list, ep above 1."""
    listed = bool(_index(param))
    layout = replace(layout, one_of=("ep",)) if listed else layout.split(0, "ep")
    edp = strategy.expert_mesh().degree("edp")
    if edp == 1:
        return layout
    local = param.shape if listed else (param.shape[0] // strategy.ep, *param.shape[1:])
    return layout.split(even_dim(local, edp), "edp")


def even_dim(shape: Sequence[int], ranks: int) -> int:
    """First dimension that ranks cut into equal shards, else the first: FSDP pads what it cuts unevenly."""
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def container(param: Param) -> str:
    """The module of all experts of a layer: for a list of modules the list, else the owner of the parameter."""
    before, found, _ = f".{param.module}.".partition(f".{EXPERTS}.")
    return f"{before}.{EXPERTS}".removeprefix(".") if found else param.module


def _index(param: Param) -> str:
    """What follows the container in the name: the index of one of several modules in a list of experts; else ""."""
    index = param.name.removeprefix(f"{container(param)}.").partition(".")[0]
    return index if index.isdecimal() or index == "*" else ""
