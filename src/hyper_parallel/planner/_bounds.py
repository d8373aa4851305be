"""Rows of strategies, complete and partial ones: their prices, of partial ones lower bounds, and what fits.

A partial strategy lacks columns, and is priced with what is open at its best: without an order any group is on the
fastest links of the machine, without `zero` nothing is shared, and memory is that of whatever shards most. Memory is
freed in three ways: inputs that were gathered for matmuls are gathered again in backward, activations are computed
again, and what exceeds the device lies in host memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import (
    RECOMPUTE,
    Candidates,
    Machine,
    Setting,
    distinct,
    few_layers,
    memory_key,
    offloaded_bytes,
    step_seconds,
)
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner._space import Columns, Space
from hyper_parallel.topology import Tier

Array = NDArray[np.float64]
Axis = tuple[Array, Array]
Choice: TypeAlias = tuple[int, int, int]
"""Ways to free memory, columns `offload`, `regather` and `recompute`."""

FULL: Final = RECOMPUTE.index("full")
FREED: Final = ("offload", "regather", "recompute")
"""Columns that are solved inside a strategy, as a `Choice`."""
PRICES: Final = ("per_token_s", "memory_bytes", "layers")
"""Seconds per token, peak bytes, and layers of a rank that are recomputed as column `recompute` says, -1 for all."""
TIE: Final = 1e-9
"""Values that differ by less, relatively, are equal: the rest is rounding."""
_MANY: Final = 1e12  # microbatches, so many that nothing is left of what comes once per step
_DEGREES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "ep")


def select(rows: Columns, which: NDArray[np.intp] | NDArray[np.bool_]) -> Columns:
    """Some of the rows."""
    if which.dtype == np.bool_:
        which = np.flatnonzero(which)  # an index is read faster than a mask
    return {name: column[which] for name, column in rows.items()}


def join(parts: Sequence[Columns]) -> Columns:
    """All rows of several; no row of no column when there are none."""
    if not parts:
        return dict.fromkeys((*Candidates.__slots__, *PRICES), np.empty(0))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def count(rows: Columns) -> int:
    """How many rows there are."""
    return len(next(iter(rows.values())))


def tuples(rows: Columns, names: Sequence[str] = _DEGREES) -> list[tuple[int, ...]]:
    """Some columns of every row, as whole numbers: its degrees."""
    table = np.column_stack([rows[name] for name in names]).astype(int)
    return [tuple(row) for row in table.tolist()]


def ranked(rows: Columns) -> NDArray[np.intp]:
    """Positions, fastest first; ties go to smaller tp, cp, pp and ep, then to less memory and plainer choices."""
    value = rows["per_token_s"]
    rounded = np.round(value / value.min() / TIE) if len(value) else value
    plain = [rows[name] for name in sorted(rows) if name not in PRICES]
    keys = (*plain, rows["layers"], rows["memory_bytes"], rows["ep"], rows["pp"], rows["cp"])
    return np.lexsort((*keys, rows["tp_x"] * rows["tp_y"], rounded))


def strategy_at(
    rows: Columns, position: int, base: Strategy, workload: Workload
) -> tuple[Strategy, Workload]:
    """One complete strategy with its resolved workload; arguments as for `Candidates.at`."""
    row = {n: rows[n][[position]] for n in rows if n in Candidates.__slots__}
    strategy, resolved = Candidates.of_columns(**row).at(0, base, workload)
    layers = int(rows["layers"][position])
    return replace(strategy, recompute_layers=layers if layers >= 0 else None), resolved


@dataclass(frozen=True, slots=True)
class RelaxedMachine(Machine):
    """The same devices on one tier, at least as fast as the real ones wherever the ranks of a group lie.

    A ring sends at the least rate of the tiers it crosses, so the fastest tier bounds it. An all-to-all uses the links
    of several tiers at once, and may send a token once for several copies of it to another domain.
    """

    exchange_gain: float = 1.0  # bandwidth of all sets of links together over the fastest
    first_size: int = 1  # devices in the innermost domain
    joined_size: float = np.inf  # devices in the domain outside of which other links are used
    outside_bytes_s: float = np.inf  # bandwidth of all of those other links together

    @classmethod
    def around(cls, machine: Machine) -> RelaxedMachine:
        """All ranks as if on the fastest links, with the least latency."""
        sets: list[float] = []
        for tier in machine.tiers:
            reached = tier.bytes_s.value * machine.link_share(tier)
            if tier.shares_links and sets:
                sets[-1] = max(sets[-1], reached)
            else:
                sets.append(reached)
        first, latency = machine.tiers[0], min(t.latency_s.value for t in machine.tiers)
        rate = replace(first.bytes_s, value=max(sets) / machine.link_share(first))
        one = Tier("relaxed", 0, rate, replace(first.latency_s, value=latency), "full_mesh")
        joined = link_domains(machine)
        return cls(
            **{name: getattr(machine, name) for name in Machine.__slots__} | {"tiers": (one,)},
            exchange_gain=sum(sets) / max(sets),
            first_size=first.size or 1,
            joined_size=float(joined[0]) if joined else np.inf,
            outside_bytes_s=sum(sets[1:]) if joined else np.inf,
        )

    def all_to_all_seconds(
        self, local_bytes: Array, *axes: Axis, copies: float = 1.0, message: float = np.inf
    ) -> Array:
        """At most the seconds of the real machine, see `Machine.all_to_all_seconds`."""
        size, copies = reduce(np.multiply, [degree for degree, _ in axes]), max(copies, 1.0)
        near = np.minimum(size, self.first_size)
        # Inside the first domain a token goes once to each rank that holds several of its receivers.
        distinct = size * (1.0 - (1.0 - 1.0 / size) ** copies) / copies
        share = ((near - 1.0) * np.minimum(1.0, distinct) + (size - near) / copies) / size
        tier = self.tiers[0]
        inside = share / (tier.bytes_s.value * self.link_share(tier) * self.exchange_gain)
        if np.isfinite(self.outside_bytes_s):
            # What no domain holds leaves it, in the best case once for all copies to another domain.
            leaving = np.maximum(size - self.joined_size, 0.0) / size / copies
            piece = self.card.exchange / (1.0 + self.card.message_bytes / message)
            inside = np.maximum(inside, leaving / (self.outside_bytes_s * piece))
        return local_bytes * inside + self.latency(*axes)


def link_domains(machine: Machine) -> tuple[int, ...]:
    """Sizes of the domains beyond which other links are used; tiers of one fabric count as one domain."""
    return tuple(
        tier.size
        for tier, outer in itertools.pairwise(machine.tiers)
        if tier.size and not outer.shares_links
    )


class Pricer:
    """Seconds and bytes of rows; counts the rows.

    Attributes:
        choices: Ways to free memory that are priced, the plainest first; the leanest comes last.
        may: Which of them may be taken; the others are only the ends of lines.
        usual: The fastest: nothing recomputed or offloaded.
        capacity: Bytes of a device, with what rounding may add.
        rows: Rows priced.
    """

    def __init__(self, space: Space) -> None:
        self.space, self.request, self.rows = space, space.request, 0
        self.machine = self.request.machine
        self.relaxed = RelaxedMachine.around(self.machine)
        self.capacity = self.machine.memory_bytes * (1 + TIE)
        kinds, regathers, stack = space.recomputes, space.regathers, self.machine.stack
        if 0 in kinds and stack.flash and stack.selective_kept >= 1.0:
            # Selective recomputation that keeps as much is never of use.
            kinds = [k for k in kinds if k in (0, FULL)]
        if 0 in regathers and not stack.keep_gathered * stack.sequence_parallel:
            regathers = [0]
        self.kinds = kinds
        pairs = itertools.product(space.offloads, regathers, sorted({0, *kinds}))
        self.choices: list[Choice] = list(pairs)
        self.may = np.array([kind in kinds for *_, kind in self.choices])
        self.usual: Choice = (0, regathers[0], 0)
        # Of parameters and gradients sharded, or optimizer states alone, one holds least.
        self.leanest = [z for z in space.zeros if z in (3, 1)] or space.zeros

    def setting(self, columns: Columns, **fixed: float) -> Setting:
        """Rows to be priced, some columns of which are the same for all."""
        named: dict[str, Any] = {n: c for n, c in (columns | fixed).items() if n != "dp"}
        if "zero" in named:
            # As `Candidates.of`: one microbatch's gradients are reduced layer by layer in any case.
            alone = (named["zero"] == 1) & (np.asarray(named["accumulation"]) == 1)
            named["zero"] = np.where(alone, 2.0, named["zero"])
        rows = Candidates.of_columns(**named)
        self.rows += len(rows)
        machine = self.machine if "order" in columns else self.relaxed
        return Setting(self.request.numbers, machine, self.request.workload, rows)

    def tokens(self, columns: Columns) -> Array:
        """Tokens of a step."""
        sequences = columns["microbatch"] * columns["accumulation"] * columns["dp"]
        return sequences * self.request.workload.seq_len

    def seconds(self, columns: Columns, choice: Choice) -> Array:
        """Seconds per step under one choice, at least."""
        if not count(columns):
            return np.empty(0)
        fixed = dict(zip(("offload", "regather", "recompute"), map(float, choice), strict=True))
        if "zero" in columns:
            return step_seconds(self.setting(columns, **fixed))
        return step_seconds(self.setting(columns, **fixed, dp_shard=1.0, zero=0.0), "pace")

    def microbatch_s(self, columns: Columns) -> Array:
        """Least seconds per token of one microbatch over all layers, all stages equally full, without sharding."""
        once = dict.fromkeys(("pp", "dp_shard", "dp_replicate", "vpp"), 1.0)
        fixed = {**once, "zero": 0.0, "accumulation": _MANY, "regather": float(self.usual[1])}
        step = step_seconds(self.setting(columns, **fixed), "pace")
        ranks = columns["tp_x"] * columns["tp_y"] * columns["cp"]
        tokens = self.request.num_devices * columns["microbatch"] * self.request.workload.seq_len
        return step / _MANY * (1 - TIE) * ranks / tokens

    def peak(self, columns: Columns) -> Array:
        """Peak bytes under every choice, at least, [choices, rows]."""
        pairs = list(dict.fromkeys(choice[1:] for choice in self.choices))
        held = []
        for offload in self.space.offloads:
            ways = [
                offloaded_bytes(self.setting(columns, **open_, offload=float(offload)), pairs)
                for open_ in self._open(columns)
            ]
            held.append(np.minimum.reduce(ways))
        return np.concatenate(held)

    def few_layers(self, columns: Columns, choice: Choice) -> tuple[Array, Array]:
        """As few layers of a rank as have to be recomputed under a choice, and the peak bytes with them."""
        _, regather, kind = choice
        least, used = np.full(len(columns["pp"]), np.inf), np.zeros(len(columns["pp"]))
        for open_ in self._open(columns):
            setting = self.setting(columns, **open_, offload=0.0, regather=float(regather))
            few, held = few_layers(setting, kind, self.capacity)
            used, least = np.where(few < least, held, used), np.minimum(few, least)
        return least, used

    def _open(self, columns: Columns) -> list[dict[str, float]]:
        """What may stand for an open `zero`."""
        return [{}] if "zero" in columns else [{"zero": float(zero)} for zero in self.leanest]


class Completer:
    """Completes rows with the way to free memory, and cuts those that do not fit or cannot be among the best.

    Attributes:
        pricer: What prices the rows.
        threshold: Seconds per token that a strategy must beat.
        cut: Rows that were cut, by reason.
        priced: Complete strategies that were priced.
        least_bytes: Least peak of what did not fit.
    """

    def __init__(self, pricer: Pricer, threshold: float) -> None:
        self.pricer, self.threshold = pricer, threshold
        self.cut: Counter[str] = Counter()
        self.priced, self.least_bytes = 0, np.inf

    def faster(self, per_token_s: Array) -> NDArray[np.bool_]:
        """Which can still be among the best; the others are counted."""
        fast: NDArray[np.bool_] = per_token_s <= self.threshold * (1 + TIE)
        self.cut["slower by its bound"] += int((~fast).sum())
        return fast

    def complete(self, columns: Columns) -> tuple[Columns, Columns]:
        """Prices of rows that can be among the best, and the rows that do not fit at all.

        Of a partial strategy the fastest way to free memory is taken; of one with an order of its axes every way is a
        row of its own, for the best is found by simulation. A way that takes as long as another one is left out.
        Recomputation is of as few layers of a rank as make it fit: between nothing and everything recomputed, time and
        the bytes of every phase are linear in the layers, which are equal. What lies between is with offload the memory
        plan's, which drops single results at the price that the copies' term has.

        Memory is cheaper to price than time, so what cannot fit goes first; few of the columns matter to it, so each
        distinct row is priced once.
        """
        pricer = self.pricer
        first, index = distinct(memory_key(columns, pricer.request.workload.seq_len))
        keys = select(columns, first)
        held = pricer.peak(keys)
        can = (held <= pricer.capacity) & pricer.may[:, None]
        lean = can.any(axis=0)
        fits = lean[index]
        self.cut["does not fit in memory"] += int((~fits).sum())
        lost, columns, index = select(columns, ~fits), select(columns, fits), index[fits]
        if not lean.all():
            self.least_bytes = min(self.least_bytes, held[pricer.may][:, ~lean].min())
        tokens = pricer.tokens(columns)
        least = pricer.seconds(columns, pricer.usual)
        fast = self.faster(least / tokens)
        columns, index, least = select(columns, fast), index[fast], least[fast]
        most = self.threshold * (1 + TIE) * tokens[fast]
        best, cut_by_tp = np.full(len(index), np.inf), columns["tp_x"] * columns["tp_y"] > 1.0
        known: dict[Choice, Array] = {pricer.usual: least}

        def seconds(which: NDArray[np.intp], choice: Choice) -> Array:
            """Prices of some rows, each computed once; what is made again in full gathers its inputs anyway."""
            offload, regather, kind = choice
            choice = (offload, pricer.usual[1] if kind == FULL else regather, kind)
            values = known.setdefault(choice, np.full(len(index), np.nan))
            new = which[np.isnan(values[which])]
            values[new] = pricer.seconds(select(columns, new), choice)
            return values[which]

        ways: list[tuple[NDArray[np.intp], Array]] = []
        for number, choice in enumerate(pricer.choices):
            offload, regather, kind = choice
            # Nothing is better than what adds nothing.
            open_ = can[number][index] & (best > least * (1 + TIE))
            which = np.flatnonzero(open_ & (cut_by_tp | (regather == pricer.usual[1])))
            start = seconds(which, (0, regather, 0))
            which, start = which[start <= most[which]], start[start <= most[which]]
            if not len(which):
                continue
            some, memory = select(columns, which), held[number][index[which]]
            step, layers = seconds(which, choice), np.full(len(which), -1.0)
            if kind and not offload and 0 in pricer.kinds:
                distinct_keys, place = np.unique(index[which], return_inverse=True)
                few = pricer.few_layers(select(keys, distinct_keys), choice)
                needed, memory = (v[place] for v in few)
                all_layers = np.ceil(pricer.request.numbers.layers / some["pp"])
                step = start + needed / all_layers * (step - start)
                layers = np.where(needed < all_layers, needed, -1.0)
            ways.append((which, np.array(np.broadcast_arrays(step, memory, layers, *choice))))
            best[which] = np.minimum(best[which], step)
        return self._rows(columns, ways), lost

    def _rows(self, columns: Columns, ways: list[tuple[NDArray[np.intp], Array]]) -> Columns:
        which = np.concatenate([np.empty(0, dtype=np.intp), *(rows for rows, _ in ways)])
        table = np.concatenate([np.empty((6, 0)), *(values for _, values in ways)], axis=1)
        if "order" in columns:
            self.priced += len(which)
        else:
            # By more than rounding: of ways that are as fast the plainer is taken, which comes first.
            place = np.repeat(np.arange(len(ways)), [len(rows) for rows, _ in ways])
            fastest = np.lexsort((table[0] * (1 + TIE * place), which))
            fastest = fastest[np.diff(which[fastest], prepend=-1) > 0]
            which, table = which[fastest], table[:, fastest]
        rows = select(columns, which)
        table[0] /= self.pricer.tokens(rows)
        rows |= dict(zip((*PRICES, *FREED), table, strict=True))
        return select(rows, self.faster(table[0]))
