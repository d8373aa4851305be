"""Candidates: strategies as columns of numbers, for vectorized prediction; and closed forms of pipeline time.

The closed forms give the split of layers into stages, the bubble and the microbatches in flight. F, B and W are the
seconds of one microbatch on one rank: forward, gradients of inputs, gradients of weights. A rank takes F + B + W
seconds per microbatch; t is the maximum over ranks and S the sum. With p ranks, m microbatches and v virtual stages
per rank, a step takes m t plus the bubble:

    GPipe, 1F1B       S - t                    every rank is filled and drained once
    interleaved       (S - t) / v              filled and drained by virtual stages
    ZB-H1             (S - t) (F + B - W) / (F + B + W), with W moved into the bubble
    ZBV               (S - t) max(0, F + B - 2W) / (F + B + W): 0 if F, B and W are equal
    DualPipeV         (S - t) (F + 2B - W) / 2 / (F + B + W), a forward and a backward at the same time
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyper_parallel.ir import AXES, Overlap, Strategy, Workload
from hyper_parallel.ir.strategy import BLOCK_SHAPES, CpKind, ScheduleKind

Array = NDArray[np.float64]
Axis = tuple[Array, Array]
"""Degree and stride of an axis of a process group; the stride is the distance in ranks between neighbours."""

SCHEDULES: Final[tuple[ScheduleKind, ...]] = get_args(ScheduleKind)
"""Pipeline schedules; column `schedule` is an index."""

SHAPES: Final = BLOCK_SHAPES
"""Tensor-parallel schemes of a block with tp_y > 1; columns `attention_shape` and `mlp_shape` are indices."""

RECOMPUTE: Final[tuple[Literal["none", "selective", "full"], ...]] = ("none", "selective", "full")
"""Kinds of recomputation; column `recompute` is an index."""
FULL_EXCEPT_LAST: Final = 3
"""Value of column `recompute`: full recomputation except in the last layers of a stage.

The peak is in the backward of these last layers, so it includes no recomputed activations.
"""


_ORDERED: Final = (("pp",), ("dp_replicate", "dp_shard"), ("cp",), ("tp_x",), ("tp_y",))
"""Groups of adjacent mesh axes in the order of `ir.AXES`."""
ORDERS: Final = tuple(tuple(itertools.chain(*axes)) for axes in itertools.permutations(_ORDERED))
"""Orders of the mesh axes, outer to inner; column `order` is an index, 0 the order of `ir.AXES`.

The two data-parallel axes stay adjacent.
"""

VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    "attention_shape": SHAPES, "mlp_shape": SHAPES, "attention_scatter": ("head", "token"), "schedule": SCHEDULES,
    "gathered_inputs": ("keep", "re-gather"), "recompute": RECOMPUTE, "offload": (False, True), "order": ORDERS,
}  # fmt: skip
"""Values of the fields of `Strategy` whose column is an index into them."""
COLUMN_OF: Final = {
    "attention_scatter": "attention_tokens", "gathered_inputs": "regather", "virtual_stages": "vpp",
}  # fmt: skip
"""Dict from field of `Strategy` to its column, where the names differ."""
_NUMBERS: Final = (*AXES, "ep", "virtual_stages")
"""Fields of `Strategy` that are numbers with a column of their own; other columns depend on several fields."""

_DEFAULTS: Final = {
    **dict.fromkeys(("recompute", "order", "offload", "regather", "attention_tokens", "cp_gather"), 0.0),
    **dict.fromkeys(("attention_shape", "mlp_shape"), float(SHAPES.index("2d"))),
    "zero": 3.0,
}
"""Default of a column of `Candidates` by name, if it is not 1."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Strategies with their batch numbers; every field is a column of float64.

    Columns have one length, or shapes that broadcast, so that a grid of choices need not be materialized. `take`,
    `strategy_at` and `len` require columns of one length.
    """

    pp: Array  # pipeline ranks
    vpp: Array  # virtual stages (model chunks) of a rank
    schedule: Array  # index into `SCHEDULES`; ignored with pp = 1
    dp_replicate: Array
    dp_shard: Array  # data-parallel ranks that shard states according to `zero`
    cp: Array  # context-parallel ranks
    # Ulysses ranks inside cp, which exchange heads; the key-value ring has cp / cp_ulysses positions
    cp_ulysses: Array
    tp_x: Array  # tensor-parallel ranks on x; with tp_y = 1, tensor parallelism is 1-D
    tp_y: Array  # tensor-parallel ranks on y
    # index into `SHAPES` for the attention block; ignored with tp_y = 1
    attention_shape: Array
    mlp_shape: Array  # index into `SHAPES` for the feed-forward block
    ep: Array  # expert-parallel ranks, folded over dp_shard x cp x tp
    etp: Array  # tensor-parallel ranks of one expert
    microbatch: Array  # sequences per microbatch and data-parallel rank
    accumulation: Array  # microbatches per step
    recompute: Array  # index into `RECOMPUTE`
    # states sharded over dp_shard (x cp): 0 none, 1 optimizer states, 2 also gradients, and parameters while unused
    # (gathered in forward and kept for backward), 3 the same with parameters re-gathered in backward
    zero: Array
    order: Array  # index into `ORDERS`
    offload: Array  # 1 if bytes that exceed the device's memory are offloaded to host memory
    regather: Array  # 1 if gathered inputs are re-gathered in backward instead of kept
    # 1 if 2-D attention scatters tokens instead of heads over y, and gathers keys and values
    attention_tokens: Array
    cp_gather: Array  # 1 if all keys and values are gathered instead of passed around a ring
    # parts of a microbatch that overlap, 1 or 2; -n while a search has not chosen: any number up to n, for a lower
    # bound of the time
    halves: Array
    ep_chunks: Array  # chunks of the experts' tokens; negative as for `halves`
    tp_chunks: Array  # chunks of the tokens of attention and MLP; negative as for `halves`

    @classmethod
    def of_columns(cls, **columns: ArrayLike) -> Candidates:
        """Return candidates with the given columns, and defaults for the others.

        Defaults: degrees, microbatch and accumulation 1; no overlap, recomputation or offload; gathered inputs kept;
        1F1B, or interleaved if vpp > 1; ring attention; ZeRO-3; order `ir.AXES`; 2-D blocks; etp = 1, or tp if ep = 1.
        """
        arrays: dict[str, Any] = {k: np.asarray(v, dtype=np.float64) for k, v in columns.items()}
        length = max((v.shape for v in arrays.values() if v.ndim == 1), default=(1,))
        # Flat columns are broadcast to one length; columns of an open grid are unchanged.
        all_flat = all(v.ndim < 2 for v in arrays.values())
        shared: dict[float, Array] = {}

        def column(name: str, default: Any) -> Array:
            array: Array = np.asarray(arrays.get(name, default), dtype=np.float64)
            if not all_flat or array.shape == length:
                return array
            value = array.item()
            if value not in shared:
                shared[value] = np.broadcast_to(array, length)
            return shared[value]

        derived = ("schedule", "etp")
        names = (name for name in cls.__slots__ if name not in derived)
        row = {name: column(name, _DEFAULTS.get(name, 1.0)) for name in names}
        interleaved = np.where(row["vpp"] > 1, SCHEDULES.index("interleaved"), 1.0)
        row["schedule"] = column("schedule", interleaved)
        row["etp"] = column("etp", np.where(row["ep"] > 1, 1.0, row["tp_x"] * row["tp_y"]))
        return cls(**row)

    @classmethod
    def of(cls, strategy: Strategy, workload: Workload) -> Candidates:
        """Return a single candidate for a strategy and a resolved workload."""
        assert workload.microbatch is not None, "the workload must be resolved"
        assert workload.accumulation_steps is not None, "the workload must be resolved"
        s = strategy
        columns = {COLUMN_OF.get(n, n): getattr(s, n) for n in _NUMBERS}
        columns |= {COLUMN_OF.get(n, n): v.index(getattr(s, n)) for n, v in VALUES.items()}
        # Gradients of a single microbatch are reduced layer by layer, so ZeRO 1 equals ZeRO 2.
        single_microbatch = s.zero_stage == 1 and workload.accumulation_steps == 1
        return cls.of_columns(
            **columns,
            microbatch=workload.microbatch, accumulation=workload.accumulation_steps, etp=s.expert_tp,
            zero=2 if single_microbatch else s.zero_stage,
            cp_ulysses=s.ulysses, cp_gather=int(s.cp_kind == "all_gather"),
            halves=1 + int(s.overlap.half_batch), ep_chunks=s.overlap.ep_chunks,
            # Operators over symmetric memory divide the tokens by ranks.
            tp_chunks=s.tp if s.overlap.tp_symmetric else s.overlap.tp_chunks,
        )  # fmt: skip

    @property
    def tp(self) -> Array:
        """Tensor-parallel ranks, tp_x * tp_y."""
        return self.tp_x * self.tp_y

    @property
    def dp(self) -> Array:
        """Data-parallel ranks, dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Array:
        """Number of devices."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def any_overlap(self) -> bool:
        """True if any candidate overlaps communication inside layers, or a search has not yet chosen its overlap."""
        return any(bool((x != 1).any()) for x in (self.halves, self.ep_chunks, self.tp_chunks))

    def __len__(self) -> int:
        return len(self.pp)

    def take(self, indices: NDArray[np.bool_] | NDArray[np.intp]) -> Candidates:
        """Return the candidates at the given indices, or those for which a mask is True."""
        return Candidates(*(getattr(self, name)[indices] for name in Candidates.__slots__))

    def strategy_at(self, index: int, base: Strategy, workload: Workload) -> tuple[Strategy, Workload]:
        """Return one candidate as a strategy and its resolved workload.

        Args:
            index: Index of the candidate.
            base: Strategy from which the result takes the fields that are no columns: rules, `recompute_layers`, and
                with pp > 1 schedule file and layers per stage. `overlap.tp_symmetric` becomes False.
            workload: Workload from which the result takes sequence length and number formats.
        """
        row = {name: int(getattr(self, name)[index]) for name in Candidates.__slots__}
        ulysses = row["cp_ulysses"]
        kind: CpKind = "all_gather" if row["cp_gather"] else "ring"
        if ulysses > 1:
            kind = "ulysses" if ulysses == row["cp"] else "hybrid"
        folded = 1 if row["ep"] > 1 else row["tp_x"] * row["tp_y"]
        named: dict[str, Any] = {n: row[COLUMN_OF.get(n, n)] for n in _NUMBERS}
        named |= {n: v[row[COLUMN_OF.get(n, n)]] for n, v in VALUES.items()}
        strategy = replace(
            base,
            **named,
            cp_kind=kind, cp_ulysses=ulysses if kind == "hybrid" else 1, reshard_after_forward=row["zero"] != 2,
            zero=(0, 1, None, None)[row["zero"]], etp=None if row["etp"] == folded else row["etp"],
            overlap=Overlap(
                row["halves"] == 2, max(1, row["ep_chunks"]), max(1, row["tp_chunks"])
            ),
        )  # fmt: skip
        if strategy.pp == 1:  # without a pipeline, choices of pipelining have their defaults
            names = ("schedule", "schedule_file", "virtual_stages", "stage_layers")
            strategy = replace(strategy, **{name: getattr(Strategy(), name) for name in names})
        resolved = replace(workload, microbatch=row["microbatch"], accumulation_steps=row["accumulation"]).resolve(
            strategy.dp
        )
        return strategy, resolved


def shape_of(c: Candidates) -> tuple[int, ...]:
    """Return the broadcast shape of all columns."""
    shapes = {getattr(c, name).shape for name in Candidates.__slots__}
    return np.broadcast_shapes(*shapes)


def distinct(columns: Sequence[Array]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return (index of the first row of each group of equal rows, index of the group of every row).

    The result is that of `numpy.unique` over rows up to the order of the groups, in a fraction of its time.
    """
    varied = [c for c in columns if c.strides != (0,) and (c != c[:1]).any()] or [columns[0]]
    order = np.lexsort(varied)
    new = np.zeros(len(order), dtype=np.bool_)
    new[:1] = True
    for column in varied:
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    index = np.empty(len(order), dtype=np.intp)
    index[order] = np.cumsum(new) - 1
    return order[new], index


Speed = Callable[[Array], Array]
"""Function from the fraction of ranks that run to the speed of one rank, relative to its speed while all ranks run."""


@dataclass(frozen=True, slots=True)
class StageSplit:
    """Split of layers into pipeline stages: layer counts and times, as arrays over candidates.

    If ranks share cores, `layers`, `head` and `slowest` are scaled, see `split_layers_closed_form`.
    """

    fullest: Array  # layers of the fullest stage among those without the head
    last: Array  # layers of the stage with the head
    layers: Array  # layers of the slowest stage
    head: Array  # 1 if the slowest stage has the head
    remaining_s: Array  # seconds of one microbatch over all stages but the slowest
    slowest: Array  # seconds of one microbatch on the slowest stage


def split_layers_closed_form(
    c: Candidates, layers: int, layer_s: Array, head_s: Array, even: bool, pace: Speed | None = None
) -> StageSplit:
    """Return the split of equal layers into pipeline stages, with the head on the last stage.

    `layer_s` and `head_s` are seconds of one microbatch. The split minimizes the time of the slowest stage. With
    `even`, stages have equal numbers of layers, except for the last stage, which has the rest.

    If ranks share cores (`pace` is set), busy ranks are faster while others are idle. The time per microbatch is then
    the larger of two bounds: the mean stage at the greatest total throughput, and the slowest stage running alone.
    """
    p, single_stage = c.pp, c.pp <= 1
    total = layers * layer_s + head_s
    if single_stage.all():
        all_layers, nothing = np.full(1, float(layers)), np.zeros(1)
        return StageSplit(all_layers, all_layers, all_layers, np.ones(1), nothing, total)

    def slowest_of(last: Array) -> tuple[Array, Array]:
        """Return (most layers of a stage but the last, seconds of the slowest stage) for `last` on the last stage."""
        # The other p - 1 stages have the remaining layers; the fullest of them or the last stage is slowest.
        fullest = np.ceil((layers - last) / np.maximum(p - 1.0, 1.0))
        return fullest, np.maximum(fullest * layer_s, last * layer_s + head_s)

    # An even split puts the fewest layers on the stage with the head.
    last = np.maximum(layers - np.ceil(layers / p) * (p - 1.0), 0.0)
    if not even:
        ideal = np.floor((total / p - head_s) / layer_s)
        for guess in (ideal, ideal + 1.0):
            clipped = np.clip(guess, 0.0, np.maximum(layers - (p - 1.0), 0.0))
            last = np.where(slowest_of(clipped)[1] < slowest_of(last)[1], clipped, last)
    fullest = slowest_of(last)[0]
    last, fullest = np.where(single_stage, layers, last), np.where(single_stage, layers, fullest)
    with_head = single_stage | (last * layer_s + head_s >= fullest * layer_s)
    slowest = np.where(with_head, last * layer_s + head_s, fullest * layer_s)
    share = np.ones(1)
    if pace is not None:
        slowest_alone = _by_stages(p, lambda k: 1.0 / pace(k)[0])
        most_work = _by_stages(p, lambda k: np.max(k * pace(k)))
        share = np.maximum(slowest_alone, total / p / slowest / most_work)
    layers_of_slowest, head = np.where(with_head, last, fullest) * share, with_head * share
    slowest = slowest * share
    remaining_s = np.maximum(total - slowest, 0.0)
    return StageSplit(fullest, last, layers_of_slowest, head, remaining_s, slowest)


def bubble_seconds(
    c: Candidates,
    remaining_s: Array,
    forward: Array,
    backward: Array,
    weight: Array,
    pace: Speed | None = None,
) -> Array:
    """Return the seconds of pipeline fill and drain (the bubble) per step.

    `forward`, `backward` and `weight` are seconds of one layer for F, B + W and W. `remaining_s` are the seconds of one
    microbatch on all stages except the slowest.

    If ranks share cores, the formula assumes that 1, 2, ... p - 1 ranks are busy for equal numbers of microbatches of
    fill and drain, at the speed that `pace` gives.

    Sources: Narayanan et al. 2021, sections 2.2 and 2.3; Qi et al. 2023 (zero bubble), sections 2 and 6; DeepSeek-AI
    2024 (DualPipe), section 3.2.1.
    """
    all_layers = forward + backward
    factors = {
        "interleaved": 1.0 / np.maximum(c.vpp, 1.0),
        "zb-h1": np.maximum(0.0, all_layers - 2.0 * weight) / all_layers,
        "zbv": np.maximum(0.0, all_layers - 3.0 * weight) / all_layers,
        "dualpipev": np.maximum(0.0, 2.0 * all_layers - forward - 3.0 * weight) / 2.0 / all_layers,
    }
    factor: Array = np.ones(1)
    for name, value in factors.items():
        factor = np.where(c.schedule == SCHEDULES.index(name), value, factor)
    if pace is not None:
        mean = _by_stages(c.pp, lambda k: float(np.mean(1.0 / pace(k)[:-1])) if len(k) > 1 else 1.0)
        factor = factor * np.maximum(0.0, 2.0 * mean - 1.0)
    return np.where(c.pp > 1, remaining_s * factor, 0.0)


def _by_stages(p: Array, value: Callable[[Array], Array | float]) -> Array:
    """Return the array of `value([1/n, 2/n, ... 1])` for each number of stages n in `p`."""
    result = np.ones(np.shape(p))
    for ranks in np.unique(p):
        shares = np.arange(1.0, ranks + 1.0) / ranks
        result = np.where(p == ranks, value(shares), result)
    return result


def in_flight(c: Candidates, rank: Array | int = 0) -> Array:
    """Return the largest number of microbatches in flight on pipeline rank `rank`.

    A microbatch counts as 1 if all layers of the rank hold its activations, as 1 / v if one of v virtual stages does.
    On the first rank, the number is p for 1F1B, ZB-H1 and ZBV, m for GPipe, p + (p - 1) / v for interleaved schedules,
    and p + 1/2 for DualPipeV. In 1F1B every rank has one microbatch fewer than the previous rank; in interleaved
    schedules, 2 / v fewer. In the other schedules all ranks have equal numbers. All are at least 1 and at most m.

    Sources: Korthikanti et al. 2022, section 4.2.3; Qi et al. 2023, section 6; DeepSeek-AI 2024, table 2.
    """
    p = c.pp
    counts: dict[str, Array] = {
        "gpipe": c.accumulation,
        "1f1b": p - rank,
        "interleaved": p + (p - 1.0 - 2.0 * rank) / np.maximum(c.vpp, 1.0),
        "dualpipev": p + 0.5,
    }
    result: Array = p * 1.0
    for name, value in counts.items():
        result = np.where(c.schedule == SCHEDULES.index(name), value, result)
    return np.where(p > 1, np.minimum(c.accumulation, np.maximum(result, 1.0)), 1.0)
