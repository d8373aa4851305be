"""plan(): price every legal strategy, take the fastest that fits, and keep why the others lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import Candidates, Scores, score, step_collectives
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Layout, Plan, Rejected, Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.planner._check import check_degrees, check_legal
from hyper_parallel.planner._context import LOCAL, Context, resolve
from hyper_parallel.planner._nearest import nothing_fits, nothing_legal
from hyper_parallel.planner._reasons import not_executable, searched, slower, too_big
from hyper_parallel.planner._space import Limits, check_pins, enumerate_space
from hyper_parallel.topology import Supernode
from hyper_parallel.units import format_bytes

TOO_BIG_SHOWN = 2


def plan(
    model: str | Path | ModelSpec,
    topology: str | Supernode = LOCAL,
    workload: Workload | None = None,
    *,
    num_devices: int | None = None,
    strategy: Strategy | None = None,
    pins: Mapping[str, int] | None = None,
    top: int = 5,
) -> Plan:
    """The fastest strategy of a model on a machine that fits in memory, as a Plan.

    Args:
        model: Preset name, Hugging Face directory, config.json, or a ModelSpec.
        topology: Preset name, YAML file, `local` for this machine, or a Supernode. On `local` only what this version
            can run is chosen; elsewhere the notes say when a plan cannot be run yet.
        workload: What a step is; None, or no batch number in it: assumed, and said in the notes.
        num_devices: Devices to use; None: the product of the degrees of `strategy`, else all of the topology.
        strategy: Price exactly this one instead of searching.
        pins: Degrees that are fixed, such as `{"tp": 8}`.
        top: Runners-up to keep.

    Raises:
        DegreesMismatch: HP301 when the strategy does not multiply to `num_devices`.
        NotDivisible, UnsupportedSharding, BatchMismatch: When the strategy is not legal.
        NoLegalStrategy: HP302 when no combination of degrees is legal.
        DoesNotFit: HP401 when none fits; the hint is the nearest change that does.
    """
    if strategy is not None:
        check_degrees(strategy, num_devices)
        context = resolve(model, topology, workload, strategy.world_size)
        return evaluate(context, strategy)
    context = resolve(model, topology, workload, num_devices)
    limits = Limits(
        context.num_devices, check_pins(pins), (), executable=context.supernode.name == LOCAL
    )
    return search(context, limits, top=top)


def evaluate(context: Context, strategy: Strategy, where: str | None = None) -> Plan:
    """The Plan of exactly one strategy.

    Args:
        context: Model, machine and workload.
        strategy: Degrees and choices.
        where: Where the degrees were set, for errors.
    """
    workload = context.workload.resolve(strategy.dp)
    check_legal(context.numbers, workload, strategy, where)
    scores = score(context.numbers, context.machine, workload, Candidates.of(strategy, workload))
    notes = []
    if scores.memory_bytes[0] > context.machine.memory_bytes:
        notes.append(
            f"the predicted peak of {format_bytes(scores.memory_bytes[0])} exceeds the device's "
            f"{format_bytes(context.machine.memory_bytes)}"
        )
    return _make(context, strategy, workload, scores, 0, notes=tuple(notes), where=where)


def search(context: Context, limits: Limits, base: Strategy | None = None, top: int = 5) -> Plan:
    """The best Plan within limits.

    Args:
        context: Model, machine and workload.
        limits: What may be chosen; its `tp` is filled in here.
        base: Strategy whose rules are kept.
        top: Runners-up to keep.
    """
    limits = replace(limits, tp=context.tp_degrees(limits.num_devices, limits.executable))
    numbers, machine = context.numbers, context.machine
    space = enumerate_space(numbers, context.workload, limits)
    candidates = space.candidates
    if len(candidates) == 0:
        raise nothing_legal(context, limits, space.ruled_out)
    scores = score(numbers, machine, context.workload, candidates)
    fits = scores.memory_bytes <= machine.memory_bytes
    if not fits.any():
        raise nothing_fits(context, limits, int(scores.memory_bytes.min()))
    ranking = _Ranking.of(candidates, scores, fits)
    best, *others = ranking.take(top + 1)
    base = base or Strategy()
    strategy, workload = candidates.at(best, base, context.workload)
    rejected = tuple(
        _rejected(context, candidates, scores, ranking, best, i, base)
        for i in (*ranking.too_big(best, TOO_BIG_SHOWN), *others)
    )
    notes: tuple[str, ...] = (searched(len(candidates), int(fits.sum()), space.ruled_out),)
    if strategy.recompute == "full" and 0 in limits.recompute:
        notes += ("activations are recomputed because it is the fastest choice that fits",)
    return _make(context, strategy, workload, scores, best, rejected, notes)


def _joined(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """One integer per row that orders rows as the columns do, the first column first.

    Each value is replaced by its place among the few values of its column, so that six degrees fit one integer.
    """
    joined = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values = np.unique(column)
        joined = joined * len(values) + np.searchsorted(values, column)
    return joined


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Candidates in order of predicted seconds per token.

    Attributes:
        order: Indices of all candidates, best first.
        fits: Which candidates fit in memory.
        per_token_s: Seconds per token.
        meshes: Key of the degrees, equal for candidates that differ only in batch and memory choices.
    """

    order: NDArray[np.intp]
    fits: NDArray[np.bool_]
    per_token_s: NDArray[np.float64]
    meshes: NDArray[np.int64]

    @classmethod
    def of(cls, c: Candidates, scores: Scores, fits: NDArray[np.bool_]) -> _Ranking:
        """Rank; ties go to the smaller tp, cp, pp and ep, then to less memory."""
        per_token = scores.step_s / (c.microbatch * c.accumulation * c.dp_replicate * c.dp_shard)
        # Equal to a part in 10^9 is a tie: the rest is rounding.
        rounded = np.round(per_token / per_token.min() * 1e9)
        order = np.lexsort((scores.memory_bytes, _joined(c.tp, c.cp, c.pp, c.ep), rounded))
        meshes = _joined(c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp, c.ep)
        return cls(order, fits, per_token, meshes)

    def take(self, number: int) -> list[int]:
        """The best candidates that fit, one per mesh."""
        return self._distinct(self.order[self.fits[self.order]], number)

    def too_big(self, best: int, number: int) -> list[int]:
        """The fastest candidates that would beat `best` but do not fit on any choice of batch and memory."""
        fitting = set(self.meshes[self.fits].tolist())
        faster = (i for i in self.order if self.per_token_s[i] < self.per_token_s[best])
        wanted = (i for i in faster if not self.fits[i] and int(self.meshes[i]) not in fitting)
        return self._distinct(wanted, number)

    def _distinct(self, indices: Iterator[np.intp] | NDArray[np.intp], number: int) -> list[int]:
        seen: dict[int, int] = {}
        for i in indices:
            seen.setdefault(int(self.meshes[i]), int(i))
            if len(seen) == number:
                break
        return list(seen.values())


def _rejected(
    context: Context,
    candidates: Candidates,
    scores: Scores,
    ranking: _Ranking,
    best: int,
    index: int,
    base: Strategy,
) -> Rejected:
    strategy, _ = candidates.at(index, base, context.workload)
    memory = int(scores.memory_bytes[index])
    if not ranking.fits[index]:
        reason = too_big(memory, context.machine.memory_bytes)
    else:
        share = ranking.per_token_s[index] / ranking.per_token_s[best]
        reason = slower(
            scores.cost_at(best),
            float(scores.step_s[best]),
            scores.cost_at(index),
            float(scores.step_s[best] * share),
        )
    return Rejected(strategy, reason, float(scores.step_s[index]), memory)


def _layouts(
    context: Context, strategy: Strategy, where: str | None
) -> tuple[dict[str, Layout], tuple[str, ...]]:
    """Layouts and their notes; none, with a note, for what this version only predicts.

    What is meant to run now (`where` is given, or the machine is this one) is refused instead.
    """
    must_run = where is not None or context.supernode.name == LOCAL
    later = not_executable(strategy)
    if later is not None and not must_run:
        return {}, (later,)
    try:
        sharded = context.shard(strategy, where)
    except UnsupportedSharding as error:
        if must_run:
            raise
        return {}, (
            f"this version cannot run this plan yet ({error.what}): the layouts are left out",
        )
    return sharded.layouts, sharded.notes


def _make(
    context: Context,
    strategy: Strategy,
    workload: Workload,
    scores: Scores,
    index: int,
    rejected: tuple[Rejected, ...] = (),
    notes: tuple[str, ...] = (),
    where: str | None = None,
) -> Plan:
    layouts, told = _layouts(context, strategy, where)
    notes = (*context.notes, *told, *notes)
    collectives = step_collectives(context.model, layouts, strategy, workload) if layouts else ()
    cost = scores.cost_at(index)
    return Plan(
        model=context.model_ref(),
        topology=context.supernode.name,
        peak_flops=context.machine.peak_flops,
        workload=workload,
        strategy=strategy,
        layouts=layouts,
        step_s=sum(term.seconds for term in cost),
        cost=cost,
        memory=scores.memory_at(index),
        memory_capacity_bytes=context.machine.memory_bytes,
        collectives=collectives,
        rejected=rejected,
        notes=notes,
    )
