"""Ranges of the numbers of a plan: a file with larger ones is refused before anything is built from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hyper_parallel.ir.plan import Plan
    from hyper_parallel.ir.strategy import Strategy

_MOST_RANKS: Final = 1 << 20
_MOST_STAGES: Final = 1 << 16
_MOST_TOKENS: Final = 1 << 48
_MOST_CHUNKS: Final = 64
_DEGREES: Final = (
    "pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "ep", "cp_ulysses", "virtual_stages", "etp",
)  # fmt: skip


def range_problem(plan: Plan) -> str:
    """Return the first number of a plan that is out of its range, or nothing."""
    return next(_problems(plan), "")


def _problems(plan: Plan) -> Iterator[str]:
    strategies = {"$.strategy": plan.strategy}
    strategies |= {f"$.rejected[{i}].strategy": r.strategy for i, r in enumerate(plan.rejected)}
    strategies |= {f"$.pareto[{i}].strategy": a.strategy for i, a in enumerate(plan.pareto)}
    strategies |= {
        f"$.sensitivity[{i}].strategy": x.strategy for i, x in enumerate(plan.sensitivity)
    }
    for path, strategy in strategies.items():
        yield from _of_strategy(path, strategy)
    for name in ("seq_len", "tokens_per_step", "microbatch", "accumulation_steps"):
        value = getattr(plan.workload, name)
        if value is not None and not 1 <= value <= _MOST_TOKENS:
            yield f"$.workload.{name}: {value}, not 1 to {_MOST_TOKENS}"
    if len(plan.stages) > _MOST_STAGES:
        yield f"$.stages: {len(plan.stages)} stages, more than {_MOST_STAGES}"
    if plan.roles is not None and not 0 <= plan.roles.rollout_ranks <= _MOST_RANKS:
        yield f"$.roles.rollout_ranks: {plan.roles.rollout_ranks}, not 0 to {_MOST_RANKS}"


def _of_strategy(path: str, strategy: Strategy) -> Iterator[str]:
    for name in _DEGREES:
        degree = getattr(strategy, name)
        if degree is not None and not 1 <= degree <= _MOST_RANKS:
            yield f"{path}.{name}: {degree}, not 1 to {_MOST_RANKS}"
    for name in ("ep_chunks", "tp_chunks"):
        if not 1 <= (chunks := getattr(strategy.overlap, name)) <= _MOST_CHUNKS:
            yield f"{path}.overlap.{name}: {chunks}, not 1 to {_MOST_CHUNKS}"
    if strategy.world_size > _MOST_RANKS:
        yield f"{path}: degrees of {strategy.world_size} ranks, more than {_MOST_RANKS}"
    if strategy.stages > _MOST_STAGES:
        yield f"{path}: {strategy.stages} pipeline stages, more than {_MOST_STAGES}"
    if min(strategy.stage_layers, default=0) < 0:
        yield f"{path}.stage_layers: a negative number of layers"
