"""Prices of rows of strategies, complete ones and lower bounds of partial ones.

A bound prices a partial strategy without the terms that what is still open may avoid, on a machine that is at least as
fast as the real one wherever the ranks of a group may lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import (
    RECOMPUTE,
    Candidates,
    Machine,
    ModelNumbers,
    Setting,
    few_layers,
    offloaded_bytes,
    step_seconds,
)
from hyper_parallel.ir import Workload
from hyper_parallel.planner._relaxed import RelaxedMachine
from hyper_parallel.planner._rows import TIE, SearchGoal
from hyper_parallel.planner._space import Columns, Space

Array = NDArray[np.float64]
Choice: TypeAlias = tuple[int, int]
"""Whether inputs are gathered again, and the kind of recomputation: columns `regather` and `recompute`."""

FULL: Final = RECOMPUTE.index("full")
_MANY: Final = 1e12  # microbatches, so many that nothing is left of what comes once per step


class RowPricer:
    """Seconds and bytes of rows within the limits of one search; counts the rows.

    Attributes:
        numbers: The model.
        machine: The machine.
        workload: Sequence length and number formats.
        space: What is legal.
        goal: What is searched for.
        relaxed: The machine with every group on its fastest links.
        kinds: Kinds of recomputation that may be chosen.
        regathers: Whether inputs may be gathered again; the faster way first.
        rows: Rows priced.
    """

    def __init__(
        self,
        numbers: ModelNumbers,
        machine: Machine,
        workload: Workload,
        space: Space,
        goal: SearchGoal,
    ) -> None:
        self.numbers, self.machine, self.workload = numbers, machine, workload
        self.space, self.goal = space, goal
        self.relaxed = RelaxedMachine.around(machine)
        self.kinds, self.regathers = space.recomputes(), space.regathers()
        stack = machine.stack
        if 0 in self.kinds and stack.flash and stack.selective_kept >= 1.0:
            # Selective recomputation that keeps as much is never of use.
            self.kinds = [k for k in self.kinds if k in (0, FULL)]
        if 0 in self.regathers and not stack.keep_gathered * stack.sequence_parallel:
            self.regathers = [0]
        self.rows = 0

    @property
    def capacity(self) -> float:
        """Bytes of a device, with what rounding may add."""
        return self.goal.capacity_bytes * (1 + TIE)

    def candidates(self, columns: Mapping[str, Array | float], **fixed: float) -> Candidates:
        """Strategies to be priced, some columns of which are the same for all."""
        named = {n: c for n, c in columns.items() if n != "dp" and n not in fixed}
        if "zero" in named:
            # As `Candidates.of`: one microbatch's gradients are reduced layer by layer in any case.
            alone = (named["zero"] == 1) & (named["accumulation"] == 1)
            named["zero"] = np.where(alone, 2.0, named["zero"])
        rows = Candidates.of_columns(**named, **fixed)
        self.rows += len(rows)
        return rows

    def tokens(self, columns: Columns) -> Array:
        """Tokens of a step."""
        sequences = columns["microbatch"] * columns["accumulation"] * columns["dp"]
        return sequences * self.workload.seq_len

    def seconds(
        self,
        columns: Columns,
        choice: Choice,
        machine: Machine,
        parts: Literal["all", "pace"] = "all",
        **fixed: float,
    ) -> Array:
        """Seconds per step of strategies under one choice."""
        if not len(next(iter(columns.values()))):
            return np.empty(0)
        c = self.candidates(columns, regather=float(choice[0]), recompute=float(choice[1]), **fixed)
        return step_seconds(Setting(self.numbers, machine, self.workload, c), parts)

    def peak(
        self, columns: Columns, choices: Sequence[Choice], machine: Machine, **fixed: float
    ) -> Array:
        """Peak bytes under every choice, [choices, rows]."""
        c = self.candidates(columns, **fixed)
        return offloaded_bytes(Setting(self.numbers, machine, self.workload, c), choices)

    def few_layers(self, columns: Columns, choice: Choice, **fixed: float) -> tuple[Array, Array]:
        """As few layers of a rank as have to be recomputed under a choice, and the peak bytes with them."""
        c = self.candidates(columns, regather=float(choice[0]), **fixed)
        setting = Setting(self.numbers, self.machine, self.workload, c)
        return few_layers(setting, choice[1], self.capacity)

    def microbatch_s(self, columns: Columns, machine: Machine) -> Array:
        """Least seconds per token of one microbatch over all layers, all stages equally full, without sharding."""
        once = {"pp": 1.0, "dp_shard": 1.0, "dp_replicate": 1.0, "zero": 0.0, "vpp": 1.0}
        usual = self.regathers[0], 0
        step = self.seconds(columns, usual, machine, "pace", **once, accumulation=_MANY)
        ranks = columns["tp_x"] * columns["tp_y"] * columns["cp"]
        tokens = self.space.limits.num_devices * columns["microbatch"] * self.workload.seq_len
        return step / _MANY * (1 - TIE) * ranks / tokens

    def bare_s(self, columns: Columns, choice: Choice) -> Array:
        """Seconds per step without what data parallelism decides."""
        return self.seconds(columns, choice, self.relaxed, "pace", dp_shard=1.0, zero=0.0)

    def lean_bytes(self, columns: Columns, choices: Sequence[Choice]) -> Array:
        """Least peak bytes, with everything sharded and offloaded that may be, [choices, rows]."""
        offload = float(self.space.rules.offload)
        least: Array = np.full(1, np.inf)
        for zero, may in self._leanest(columns):
            held = self.peak(columns, choices, self.relaxed, zero=zero, offload=offload)
            least = np.minimum(least, np.where(may, held, np.inf))
        return least

    def lean_layers(self, columns: Columns, choice: Choice) -> tuple[Array, Array]:
        """Fewest layers to recompute with everything sharded that may be; one where offload leaves it open."""
        least, used = np.full(len(columns["pp"]), np.inf), np.zeros(len(columns["pp"]))
        if self.space.rules.offload:
            return np.ones(len(least)), used
        for zero, may in self._leanest(columns):
            few, held = self.few_layers(columns, choice, zero=zero)
            better = may & (few < least)
            least, used = np.where(better, few, least), np.where(better, held, used)
        return least, used

    def _leanest(self, columns: Columns) -> Iterator[tuple[float, NDArray[np.bool_]]]:
        """Kinds of sharding of which one holds least, and the rows that may have them or what holds more."""
        wanted = self.space.zeros()
        for zero in wanted:
            # Parameters and gradients sharded hold less than gradients alone, optimizer states less than nothing.
            if (zero == 2 and 3 in wanted) or (zero == 0 and 1 in wanted):
                continue
            may = self.space.shards(zero, columns)
            if zero == 1 and 0 in wanted:
                may = may | self.space.shards(0, columns)
            yield float(zero), may

    def choices(self) -> list[Choice]:
        """All pairs of choices, and those that recompute nothing."""
        return list(itertools.product(self.regathers, sorted({0, *self.kinds})))
