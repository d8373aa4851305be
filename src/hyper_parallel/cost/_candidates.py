"""Candidates: many strategies as columns of numbers, so that all of them are priced at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.ir.strategy import BLOCK_SHAPES, CpKind, ScheduleKind

Array = NDArray[np.float64]
Axis = tuple[Array, Array]
"""Degree and stride of one axis of a group."""

SCHEDULES: Final[tuple[ScheduleKind, ...]] = get_args(ScheduleKind)
"""Pipeline schedules; column `schedule` is an index into this."""

SHAPES: Final = BLOCK_SHAPES
"""Tensor-parallel schemes of a block when tp_y > 1; columns `attention_shape` and `mlp_shape` are indices."""

RECOMPUTE: Final[tuple[Literal["none", "selective", "full"], ...]] = ("none", "selective", "full")
"""Recomputation; column `recompute` is an index."""
SOME: Final = 3
"""Column `recompute` of full recomputation that leaves the last layers: they are worked on while everything is held, so
nothing is made again beside it."""


def _orders() -> tuple[tuple[str, ...], ...]:
    units = (("pp",), ("dp_replicate", "dp_shard"), ("cp",), ("tp_x",), ("tp_y",))
    found = (tuple(itertools.chain(*order)) for order in itertools.permutations(units))
    # permutations() starts with the units as they are: index 0 is the mesh's own order.
    return tuple(found)


ORDERS: Final = _orders()
"""Orders of the mesh axes, outer to inner; column `order` is an index, 0 the order of `ir.AXES`.

The two data-parallel axes stay together, so that experts fold over ranks of one replica.
"""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Strategies with their batch numbers; every field is a column, as float64.

    Columns are of one length, or shapes that broadcast against each other: an open grid of choices is priced without
    being written out. `take`, `at` and `len` are for columns of one length.
    """

    pp: Array  # pipeline stages
    vpp: Array  # virtual stages (model chunks) of a rank
    schedule: Array  # index into `SCHEDULES`; has no meaning with one stage
    dp_replicate: Array
    dp_shard: Array  # data-parallel ranks that share states as `zero` says
    cp: Array  # context-parallel ranks
    # ranks inside cp that exchange heads for sequence; a key-value ring runs over the other cp / it
    cp_ulysses: Array
    tp_x: Array  # tensor-parallel ranks on x; alone it is 1-D with sequence parallelism
    tp_y: Array  # tensor-parallel ranks on y
    # index into `SHAPES` for the attention block; has no meaning with tp_y = 1
    attention_shape: Array
    mlp_shape: Array  # the same for the feed-forward block
    ep: Array  # expert-parallel ranks, folded over dp_shard x cp x tp
    etp: Array  # tensor-parallel ranks of one expert
    microbatch: Array  # sequences per microbatch and data-parallel rank
    accumulation: Array  # microbatches per step
    recompute: Array  # index into `RECOMPUTE`
    # what is sharded over dp_shard (x cp): 0 nothing, 1 optimizer states, 2 and gradients (parameters are gathered once
    # per microbatch and kept for backward), 3 and parameters (gathered again in backward)
    zero: Array
    order: Array  # index into `ORDERS`
    offload: Array  # 1 where what exceeds the device's memory lies in host memory
    regather: Array  # 1 where gathered inputs are gathered again in backward instead of kept
    # 1 where 2-D attention scatters tokens over y, and gathers keys and values, instead of heads
    attention_tokens: Array
    cp_gather: Array  # 1 where all keys and values are gathered instead of passed around a ring

    @classmethod
    def of_columns(cls, **columns: ArrayLike) -> Candidates:
        """Candidates from some of the columns; the others get defaults.

        Defaults: degrees, microbatch and accumulation 1; 1F1B, or interleaved 1F1B where vpp > 1; no recomputation;
        ZeRO-3; the mesh's own order; 2-D blocks (without effect when tp_y = 1); an expert is cut by tp where ep = 1
        and else by nothing.
        """
        given: dict[str, Any] = {k: np.asarray(v, dtype=np.float64) for k, v in columns.items()}
        length = max((v.shape for v in given.values() if v.ndim == 1), default=(1,))
        # Flat columns are made equally long; columns of an open grid are left as they are.
        flat = all(v.ndim < 2 for v in given.values())
        shared: dict[float, Array] = {}

        def column(name: str, default: Any) -> Array:
            found: Array = np.asarray(given.get(name, default), dtype=np.float64)
            if not flat or found.shape == length:
                return found
            value = found.item()
            if value not in shared:
                shared[value] = np.broadcast_to(found, length)
            return shared[value]

        degrees = ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "cp_ulysses", "tp_x", "tp_y")
        row = {name: column(name, 1.0) for name in (*degrees, "ep", "microbatch", "accumulation")}
        interleaved = np.where(row["vpp"] > 1, SCHEDULES.index("interleaved"), 1.0)
        row["schedule"] = column("schedule", interleaved)
        row["etp"] = column("etp", np.where(row["ep"] > 1, 1.0, row["tp_x"] * row["tp_y"]))
        plain = ("recompute", "order", "offload", "regather", "attention_tokens", "cp_gather")
        for name in plain:
            row[name] = column(name, 0.0)
        for name in ("attention_shape", "mlp_shape"):
            row[name] = column(name, SHAPES.index("2d"))
        row["zero"] = column("zero", 3.0)
        return cls(**row)

    @classmethod
    def of(cls, strategy: Strategy, workload: Workload) -> Candidates:
        """One strategy with a resolved workload."""
        assert workload.microbatch is not None, "the workload must be resolved"
        assert workload.accumulation_steps is not None, "the workload must be resolved"
        s = strategy
        # A single microbatch's gradients are reduced layer by layer, whatever waits for the last one.
        alone = s.zero_stage == 1 and workload.accumulation_steps == 1
        return cls.of_columns(
            pp=s.pp, dp_replicate=s.dp_replicate, dp_shard=s.dp_shard, cp=s.cp, tp_x=s.tp_x, tp_y=s.tp_y, ep=s.ep,
            microbatch=workload.microbatch, accumulation=workload.accumulation_steps,
            vpp=s.virtual_stages, schedule=SCHEDULES.index(s.schedule), cp_ulysses=s.ulysses,
            attention_shape=SHAPES.index(s.attention_shape), mlp_shape=SHAPES.index(s.mlp_shape),
            recompute=RECOMPUTE.index(s.recompute), zero=2 if alone else s.zero_stage, etp=s.expert_tp,
            order=ORDERS.index(s.order), offload=int(s.offload),
            regather=int(s.gathered_inputs == "re-gather"), attention_tokens=int(s.attention_scatter == "token"),
            cp_gather=int(s.cp_kind == "all_gather"),
        )  # fmt: skip

    @property
    def tp(self) -> Array:
        """Tensor-parallel ranks, tp_x * tp_y."""
        return self.tp_x * self.tp_y

    @property
    def dp(self) -> Array:
        """Ranks that see different sequences, dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Array:
        """Devices."""
        return self.pp * self.dp * self.cp * self.tp

    def __len__(self) -> int:
        return len(self.pp)

    def take(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> Candidates:
        """The candidates a mask or an index list selects."""
        return Candidates(*(getattr(self, name)[which] for name in Candidates.__slots__))

    def at(self, index: int, base: Strategy, workload: Workload) -> tuple[Strategy, Workload]:
        """One candidate as a strategy and its resolved workload.

        Args:
            index: Row.
            base: Strategy whose rules, pipeline schedule and cut of the layers are kept.
            workload: Workload whose sequence length and number formats are kept.
        """
        row = {name: int(getattr(self, name)[index]) for name in Candidates.__slots__}
        ulysses = row["cp_ulysses"]
        one: CpKind = "all_gather" if row["cp_gather"] else "ring"
        kind: CpKind = one if ulysses == 1 else "ulysses" if ulysses == row["cp"] else "hybrid"
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
        )  # fmt: skip
        if strategy.pp == 1:  # the choices of a pipeline go with it
            default = Strategy()
            strategy = replace(
                strategy,
                schedule=default.schedule,
                schedule_file=default.schedule_file,
                virtual_stages=default.virtual_stages,
                stage_layers=default.stage_layers,
            )
        resolved = replace(
            workload,
            microbatch=row["microbatch"],
            accumulation_steps=row["accumulation"],
        ).resolve(strategy.dp)
        return strategy, resolved


def shape_of(c: Candidates) -> tuple[int, ...]:
    """Shape that all columns broadcast to."""
    shapes = {getattr(c, name).shape for name in Candidates.__slots__}
    return np.broadcast_shapes(*shapes)


def distinct(columns: Sequence[Array]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """A row of every distinct kind, and for every row which of them it is, of columns of one length.

    As numpy.unique of rows, which compares them as bytes and takes several times as long.
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
