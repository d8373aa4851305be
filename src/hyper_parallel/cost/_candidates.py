"""Candidates: strategies as columns of numbers, priced in vectorized calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyper_parallel.ir import Overlap, Strategy, Workload
from hyper_parallel.ir.strategy import BLOCK_SHAPES, CpKind, ScheduleKind

Array = NDArray[np.float64]
Axis = tuple[Array, Array]
"""Degree and stride of one axis of a group."""

SCHEDULES: Final[tuple[ScheduleKind, ...]] = get_args(ScheduleKind)
"""Pipeline schedules; column `schedule` is an index."""

SHAPES: Final = BLOCK_SHAPES
"""Tensor-parallel schemes of a block with tp_y > 1; columns `attention_shape` and `mlp_shape` are indices."""

RECOMPUTE: Final[tuple[Literal["none", "selective", "full"], ...]] = ("none", "selective", "full")
"""Kinds of recomputation; column `recompute` is an index."""
FULL_EXCEPT_LAST: Final = 3
"""Value of column `recompute`: full recomputation except for the last layers of a stage. Their backward runs at the
peak, so the peak includes no recomputed activations.
"""


def _orders() -> tuple[tuple[str, ...], ...]:
    """Return the orders of the mesh axes."""
    units = (("pp",), ("dp_replicate", "dp_shard"), ("cp",), ("tp_x",), ("tp_y",))
    orders = (tuple(itertools.chain(*order)) for order in itertools.permutations(units))
    # permutations() starts with the input order: index 0 is the mesh's own order.
    return tuple(orders)


ORDERS: Final = _orders()
"""Orders of the mesh axes, outer to inner; column `order` is an index, 0 the order of `ir.AXES`.

The two data-parallel axes stay adjacent, so that experts fold over ranks of one replica.
"""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Strategies with their batch numbers; every field is a column of float64.

    Columns have one length, or shapes that broadcast against each other: an open grid of choices is priced without
    materializing it. `take`, `strategy_at` and `len` require columns of one length.
    """

    pp: Array  # pipeline stages
    vpp: Array  # virtual stages (model chunks) of a rank
    schedule: Array  # index into `SCHEDULES`; ignored with one stage
    dp_replicate: Array
    dp_shard: Array  # data-parallel ranks that shard states according to `zero`
    cp: Array  # context-parallel ranks
    # ranks inside cp that exchange heads for sequence; a key-value ring runs over the other cp / it
    cp_ulysses: Array
    tp_x: Array  # tensor-parallel ranks on x; alone it is 1-D with sequence parallelism
    tp_y: Array  # tensor-parallel ranks on y
    # index into `SHAPES` for the attention block; ignored with tp_y = 1
    attention_shape: Array
    mlp_shape: Array  # index into `SHAPES` for the feed-forward block
    ep: Array  # expert-parallel ranks, folded over dp_shard x cp x tp
    etp: Array  # tensor-parallel ranks of one expert
    microbatch: Array  # sequences per microbatch and data-parallel rank
    accumulation: Array  # microbatches per step
    recompute: Array  # index into `RECOMPUTE`
    # states sharded over dp_shard (x cp): 0 none, 1 optimizer states, 2 also gradients (parameters are gathered once
    # per microbatch and kept for backward), 3 also parameters (re-gathered in backward)
    zero: Array
    order: Array  # index into `ORDERS`
    offload: Array  # 1 if bytes that exceed the device's memory are offloaded to host memory
    regather: Array  # 1 if gathered inputs are re-gathered in backward instead of kept
    # 1 if 2-D attention scatters tokens over y, and gathers keys and values, instead of heads
    attention_tokens: Array
    cp_gather: Array  # 1 if all keys and values are gathered instead of passed around a ring
    # parts of a microbatch that layers run in, 1 or 2; negative in a partial strategy: up to that many, priced with a
    # lower bound
    halves: Array
    ep_chunks: Array  # chunks of the experts' tokens; negative as for `halves`
    tp_chunks: Array  # chunks of the tokens of a block; negative as for `halves`

    @classmethod
    def of_columns(cls, **columns: ArrayLike) -> Candidates:
        """Return candidates from some of the columns, with defaults for the others.

        Defaults: degrees, microbatch and accumulation 1; no overlap; 1F1B, or interleaved 1F1B if vpp > 1; no
        recomputation; ZeRO-3; the mesh's own order; 2-D blocks (no effect if tp_y = 1); etp = tp if ep = 1, else 1.
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

        degrees = ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "cp_ulysses", "tp_x", "tp_y")
        row = {name: column(name, 1.0) for name in (*degrees, "ep", "microbatch", "accumulation")}
        interleaved = np.where(row["vpp"] > 1, SCHEDULES.index("interleaved"), 1.0)
        row["schedule"] = column("schedule", interleaved)
        row["etp"] = column("etp", np.where(row["ep"] > 1, 1.0, row["tp_x"] * row["tp_y"]))
        collapse = ("recompute", "order", "offload", "regather", "attention_tokens", "cp_gather")
        for name in collapse:
            row[name] = column(name, 0.0)
        for name in ("halves", "ep_chunks", "tp_chunks"):
            row[name] = column(name, 1.0)
        for name in ("attention_shape", "mlp_shape"):
            row[name] = column(name, SHAPES.index("2d"))
        row["zero"] = column("zero", 3.0)
        return cls(**row)

    @classmethod
    def of(cls, strategy: Strategy, workload: Workload) -> Candidates:
        """Return one strategy with a resolved workload as a candidate."""
        assert workload.microbatch is not None, "the workload must be resolved"
        assert workload.accumulation_steps is not None, "the workload must be resolved"
        s = strategy
        # Gradients of a single microbatch are reduced layer by layer, so ZeRO 1 equals ZeRO 2.
        single_microbatch = s.zero_stage == 1 and workload.accumulation_steps == 1
        return cls.of_columns(
            pp=s.pp, dp_replicate=s.dp_replicate, dp_shard=s.dp_shard, cp=s.cp, tp_x=s.tp_x, tp_y=s.tp_y, ep=s.ep,
            microbatch=workload.microbatch, accumulation=workload.accumulation_steps,
            vpp=s.virtual_stages, schedule=SCHEDULES.index(s.schedule), cp_ulysses=s.ulysses,
            attention_shape=SHAPES.index(s.attention_shape), mlp_shape=SHAPES.index(s.mlp_shape),
            recompute=RECOMPUTE.index(s.recompute), zero=2 if single_microbatch else s.zero_stage, etp=s.expert_tp,
            order=ORDERS.index(s.order), offload=int(s.offload),
            regather=int(s.gathered_inputs == "re-gather"), attention_tokens=int(s.attention_scatter == "token"),
            cp_gather=int(s.cp_kind == "all_gather"), halves=1 + int(s.overlap.half_batch),
            ep_chunks=s.overlap.ep_chunks, tp_chunks=s.overlap.tp_chunks,
        )  # fmt: skip

    @property
    def tp(self) -> Array:
        """Tensor-parallel ranks, tp_x * tp_y."""
        return self.tp_x * self.tp_y

    @property
    def dp(self) -> Array:
        """Ranks with different sequences, dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Array:
        """Number of devices."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def any_overlap(self) -> bool:
        """True if a candidate overlaps communication inside of layers, or may do so."""
        return any(bool((x != 1).any()) for x in (self.halves, self.ep_chunks, self.tp_chunks))

    def __len__(self) -> int:
        return len(self.pp)

    def take(self, indices: NDArray[np.bool_] | NDArray[np.intp]) -> Candidates:
        """Return the candidates at some indices, or under a mask."""
        return Candidates(*(getattr(self, name)[indices] for name in Candidates.__slots__))

    def strategy_at(
        self, index: int, base: Strategy, workload: Workload
    ) -> tuple[Strategy, Workload]:
        """Return one candidate as a strategy and its resolved workload.

        Args:
            index: Row.
            base: Source of the rules, the schedule file and the layers per stage.
            workload: Source of the sequence length and number formats.
        """
        row = {name: int(getattr(self, name)[index]) for name in Candidates.__slots__}
        ulysses = row["cp_ulysses"]
        ring_kind: CpKind = "all_gather" if row["cp_gather"] else "ring"
        kind: CpKind = (
            ring_kind if ulysses == 1 else "ulysses" if ulysses == row["cp"] else "hybrid"
        )
        folded = 1 if row["ep"] > 1 else row["tp_x"] * row["tp_y"]
        strategy = replace(
            base,
            pp=row["pp"], dp_replicate=row["dp_replicate"], dp_shard=row["dp_shard"], cp=row["cp"],
            tp_x=row["tp_x"], tp_y=row["tp_y"], ep=row["ep"],
            attention_shape=SHAPES[row["attention_shape"]], mlp_shape=SHAPES[row["mlp_shape"]],
            cp_kind=kind, cp_ulysses=ulysses if kind == "hybrid" else 1,
            gathered_inputs="re-gather" if row["regather"] else "keep",
            attention_scatter="token" if row["attention_tokens"] else "head",
            schedule=SCHEDULES[row["schedule"]], virtual_stages=row["vpp"],
            recompute=RECOMPUTE[row["recompute"]], reshard_after_forward=row["zero"] != 2,
            zero=(0, 1, None, None)[row["zero"]], etp=None if row["etp"] == folded else row["etp"],
            order=ORDERS[row["order"]], offload=bool(row["offload"]),
            overlap=Overlap(
                row["halves"] == 2, max(1, row["ep_chunks"]), max(1, row["tp_chunks"])
            ),
        )  # fmt: skip
        if strategy.pp == 1:  # without a pipeline its choices have defaults
            default = Strategy()
            strategy = replace(
                strategy,
                schedule=default.schedule,
                schedule_file=default.schedule_file,
                virtual_stages=default.virtual_stages,
                stage_layers=default.stage_layers,
            )
        resolved = replace(
            workload, microbatch=row["microbatch"], accumulation_steps=row["accumulation"]
        ).resolve(strategy.dp)
        return strategy, resolved


def shape_of(c: Candidates) -> tuple[int, ...]:
    """Return the broadcast shape of all columns."""
    shapes = {getattr(c, name).shape for name in Candidates.__slots__}
    return np.broadcast_shapes(*shapes)


def distinct(columns: Sequence[Array]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the index of one row per distinct row, and the group of every row, for columns of one length.

    Equivalent to `numpy.unique` over rows, which compares bytes and takes several times as long.
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
