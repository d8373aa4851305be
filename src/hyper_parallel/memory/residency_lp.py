"""Linear program that minimizes the seconds of waits and recomputation, under a target of device bytes.

A position is an index in the order of the operators. A store copies a storage from the device to DRAM, a prefetch
copies it back; each direction is one serial channel. Compared with the list of actions that is written later, the
program is relaxed in two ways. Fractions of storages may be offloaded. Copied bytes are interchangeable: only the total
of bytes that must be stored or reloaded by each position counts, not which storage they belong to.

The rows state the bytes at sampled positions, the traffic of both channels up to each sample, and the waits. A sample
is the position with the most bytes in an interval, and stands for the other positions of that interval.

Linear programs are solved by HiGHS. Source: Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hyper_parallel.memory.memory_machine import Channel, MemoryMachine

if TYPE_CHECKING:
    import highspy


_SCALE = 1e4  # factor on costs: differences of unscaled costs are below the solver's tolerance
_METHODS: tuple[dict[str, str | float], ...] = (
    {"solver": "simplex"}, {"solver": "ipm"}, {"solver": "simplex", "presolve": "off"},
)  # fmt: skip
_TOLERANCES = dict.fromkeys(("primal_feasibility_tolerance", "dual_feasibility_tolerance"), 1e-9)


class SolverFailed(RuntimeError):
    """Error of a solver that found neither an optimum nor a proof of infeasibility."""


@dataclass
class LinearProgram:
    """Linear program: minimize cost . x over rows `low <= coefficients . x <= high` and bounds of the variables."""

    costs: list[float] = field(default_factory=list)
    lowers: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    rows: list[tuple[Mapping[int, float], float, float]] = field(default_factory=list)
    # Solver with the last solution, valid while only bounds change
    _solver: highspy._core._Highs | None = field(default=None, init=False, repr=False)

    def variable(self, upper: float = np.inf, cost: float = 0.0, lower: float = 0.0) -> int:
        """Add a variable and return its index."""
        self._solver = None
        self.costs.append(cost)
        self.lowers.append(lower)
        self.uppers.append(upper)
        return len(self.costs) - 1

    def at_least(self, coefficients: Mapping[int, float], bound: float) -> int:
        """Add a row with a lower bound and return its index."""
        self._solver = None
        self.rows.append((coefficients, bound, np.inf))
        return len(self.rows) - 1

    def equal(self, coefficients: Mapping[int, float], value: float) -> None:
        """Add a row with a fixed value."""
        self._solver = None
        self.rows.append((coefficients, value, value))

    def change_bound(self, row: int, bound: float) -> None:
        """Change the lower bound of a row that `at_least` has added."""
        coefficients, low, high = self.rows[row]
        if bound != low:
            self.rows[row] = coefficients, bound, high
            if self._solver is not None:
                self._solver.changeRowBounds(row, bound, high)

    def solve(self) -> np.ndarray | None:
        """Return the values of all variables at an optimum; None if the program is infeasible.

        If only bounds have changed since the last call, the solver starts from its last solution, which is much faster.

        Raises:
            SolverFailed: When the solver rejects the program or ends without an answer.
        """
        import highspy  # imported here: it takes 4 MiB in every rank

        solver, self._solver = self._solver, None
        for options in ({}, *_METHODS):
            if options:
                solver = self._loaded(options)
            elif solver is None:
                continue
            assert solver is not None
            solver.run()
            status = solver.getModelStatus()
            if status == highspy.HighsModelStatus.kOptimal:
                self._solver = solver
                return np.array(solver.getSolution().col_value)
            if status == highspy.HighsModelStatus.kInfeasible:
                self._solver = solver
                return None
        assert solver is not None
        raise SolverFailed(f"HiGHS ended without an answer: {solver.modelStatusToString(status)}")

    def _loaded(self, options: Mapping[str, str | float]) -> highspy._core._Highs:
        import highspy

        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.costs), len(self.rows)
        lp.col_cost_ = _SCALE * np.array(self.costs)
        lp.col_lower_, lp.col_upper_ = np.array(self.lowers), np.array(self.uppers)
        lp.row_lower_ = np.array([low for _, low, _ in self.rows])
        lp.row_upper_ = np.array([high for _, _, high in self.rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(row) for row, _, _ in self.rows)])
        lp.a_matrix_.index_ = np.array([v for row, _, _ in self.rows for v in row])
        lp.a_matrix_.value_ = np.array([x for row, _, _ in self.rows for x in row.values()])
        solver = highspy._core._Highs()  # its subclass `Highs` prints a banner
        for name, value in {"output_flag": False, "threads": 1, **_TOLERANCES, **options}.items():
            solver.setOptionValue(name, value)
        if solver.passModel(lp) == highspy.HighsStatus.kError:
            raise SolverFailed("HiGHS rejects the program, because it contains a number that is not finite")
        return solver


# Tie-breaking costs make one of equally good choices the best for every solver. They depend on the square of a
# fraction's index too, else choices whose indices have the same sum would cost the same.
_TIE_BREAK, _GOLDEN = 1e-7, (5**0.5 - 1) / 2
_LATE_WAIT_COST = 1e-4  # extra cost of a wait at the end of the step
_TARGET_TOLERANCE = 2e-3  # fraction of the bytes to save; a smaller excess adds no position
_DIGITS = 6  # decimals of a solution in which solvers agree
_TRAFFIC_COST = 1e-3  # cost of a second of copying: among equal waits, fewer copies win


@dataclass(frozen=True)
class LPOptimum:
    """Optimum of the linear program.

    Attributes:
        fractions: Values of the fraction variables, by index.
        seconds: Seconds of the step.
        waits_s: Seconds of waits and recomputation, by sample; the last entry is for the end of the step.
    """

    fractions: np.ndarray
    seconds: float
    waits_s: np.ndarray


class ResidencyLP:
    """Linear program over fractions, from 0 to 1, of storages that are offloaded, reloaded or recomputed.

    Args:
        profile: Device bytes at every position without offload.
        seconds: Compute seconds of every position.
        machine: Machine with the channels between device and DRAM.
        positions: Sampled positions, ascending.
    """

    def __init__(
        self, profile: np.ndarray, seconds: Sequence[float], machine: MemoryMachine, positions: np.ndarray
    ) -> None:
        self.lp = LinearProgram()
        self._ends = np.cumsum(seconds)
        self._starts = np.concatenate(([0.0], self._ends))
        self.positions = positions
        # For each position, the index of the first sample at or after it.
        self._sample: list[int] = np.searchsorted(positions, np.arange(len(profile) + 1)).tolist()
        self._full_profile = profile
        # Absent bytes as (fraction variable, low, high, bytes).
        self._spans: list[tuple[int, int, int, int]] = []
        self._profile = profile[self.positions]
        self._between_s = np.diff([0.0, *self._starts[self.positions], self._starts[-1]])
        self.step_s = float(self._starts[-1])
        self._store, self._prefetch = machine.store, machine.prefetch
        self._dram_bytes = machine.dram_bytes
        self._flash = (machine.copy_out, machine.copy_in)
        # bytes of one unit in the solver, so that its numbers are near 1
        self._unit = max(float(profile.max()), 1.0)
        # If operators have no seconds, the unit of time is a copy of the peak bytes.
        self._unit_s = self.step_s or self._unit / machine.store.bytes_s
        count = len(self.positions) + 1
        # Changes per sample, by fraction variable: absent bytes, bytes that should have left, bytes that may be stored,
        # bytes due back, seconds of delay, bytes in DRAM.
        self._absent, self._leave, self._final, self._due, self._longer, self._dram = (
            [dict[int, float]() for _ in range(count)] for _ in range(6)
        )
        # The same for bytes being prefetched if every copy starts as late as possible, and bytes of begun prefetches.
        self._coming, self._started = ([dict[int, float]() for _ in range(count)] for _ in range(2))
        self._longest_s = 0.0  # longest prefetch in seconds
        # Per direction of flash copies, seconds by fraction variable; and size to the variable of its DRAM buffer.
        self._flash_seconds: tuple[dict[int, float], dict[int, float]] = {}, {}
        self._flash_buffers: dict[int, int] = {}
        self._stalls: list[tuple[int, range, float]] = []
        self._waits: list[int] = []
        self._byte_rows: list[int] = []  # rows of the bytes of each sample
        self._store_rows: list[int] = []  # rows of the stores of each interval
        self._num_fractions = self._count = 0

    def add_fraction(self) -> int:
        """Add a fraction, a variable from 0 to 1, and return its index."""
        self._count += 1
        unlike = self._count * _GOLDEN % 1 + self._count**2 * _GOLDEN % 1 / 100
        return self.lp.variable(1.0, _TIE_BREAK * (1 + unlike))

    def add_sum_le(self, fractions: Sequence[int], whole: int) -> None:
        """Add a row: the sum of `fractions` is at most the fraction `whole`."""
        self.lp.at_least({whole: 1.0, **dict.fromkeys(fractions, -1.0)}, 0.0)

    def add_at_most_one(self, fractions: Sequence[int]) -> None:
        """Add a row: the sum of `fractions` is at most 1."""
        self.lp.at_least(dict.fromkeys(fractions, -1.0), -1.0)

    def add_dram_bytes(self, fraction: int, low: int, high: int, num_bytes: int) -> None:
        """Add `num_bytes` times a fraction to the bytes in DRAM at positions [low, high).

        Unlimited DRAM needs no rows. If the machine has flash, part of these bytes may pass through a buffer to flash.
        """
        if self._dram_bytes is None:
            return
        in_dram = {fraction: 1.0}
        outbound, inbound = self._flash
        if outbound is not None and inbound is not None:
            in_dram[via_flash := self.add_fraction()] = -1.0
            self.add_sum_le([via_flash], fraction)
            for lane, channel in zip(self._flash_seconds, (outbound, inbound), strict=True):
                lane[via_flash] = channel.seconds(num_bytes) / self._unit_s
            if num_bytes not in self._flash_buffers:
                self._flash_buffers[num_bytes] = self.add_fraction()
            self.add_sum_le([via_flash], self._flash_buffers[num_bytes])
        for variable, sign in in_dram.items():
            self._add(self._dram[self._sample[low]], variable, sign * num_bytes / self._unit)
            self._add(self._dram[self._sample[high]], variable, -sign * num_bytes / self._unit)

    def same_sample(self, a: int, b: int) -> bool:
        """Return whether the first sampled position at or after `a` is also the first at or after `b`."""
        return self._sample[a] == self._sample[b]

    def add_absence(self, fraction: int, low: int, high: int, num_bytes: int) -> None:
        """Subtract `num_bytes` (may be negative) times a fraction from the device bytes at positions [low, high)."""
        self._spans.append((fraction, low, high, num_bytes))
        self._add_span(self._absent, fraction, low, high, num_bytes)

    def add_offload(self, fraction: int, low: int, high: int, num_bytes: int) -> None:
        """Subtract `num_bytes` times a fraction from the device bytes at positions [low, high), and add a prefetch.

        All bytes count as resident from the start of the prefetch.
        """
        idle_s = self._starts[high] - self._starts[low]
        copy_s = min(self._prefetch.seconds(num_bytes), idle_s / 2)
        self._longest_s = max(self._longest_s, copy_s)
        start = int(np.searchsorted(self._starts, self._starts[high] - copy_s, "right")) - 1
        begins = min(max(start, low), high)
        self._spans.append((fraction, low, high, num_bytes))
        self._add_span(self._absent, fraction, low, begins, num_bytes)
        self._add_span(self._coming, fraction, begins, high, num_bytes)
        self.add_prefetch(fraction, high, num_bytes, begins)

    def add_store(self, fraction: int, final: int, leaves: int, num_bytes: int) -> None:
        """Add a store of `num_bytes` times the variable with index `fraction`.

        The storage is last written at position `final`, where the store may start. Its bytes leave the device at
        position `leaves`, or when the store ends if that is later.
        """
        self._add(self._final[self._sample[final]], fraction, self._channel_units(self._store, num_bytes))
        self._add(self._leave[self._sample[leaves]], fraction, self._channel_units(self._store, num_bytes))
        self.lp.costs[fraction] += self._traffic_cost(self._store.seconds(num_bytes))

    def add_prefetch(self, fraction: int, position: int, num_bytes: int, begins: int) -> None:
        """Add a prefetch of `num_bytes` times the variable with index `fraction`, complete before `position`.

        The bytes are resident from position `begins`.
        """
        copied = self._channel_units(self._prefetch, num_bytes)
        self._add(self._due[self._sample[position]], fraction, copied)
        self._add(self._started[self._sample[begins]], fraction, copied)
        self.lp.costs[fraction] += self._traffic_cost(self._prefetch.seconds(num_bytes))

    def add_gap_stall(self, fraction: int, low: int, high: int, num_bytes: int, stored: bool) -> None:
        """Add a wait if the copies of a fraction take longer than the operators at positions [low, high).

        The copies are a prefetch and, if `stored`, a store.
        """
        copies_s = self._prefetch.seconds(num_bytes)
        if stored:
            copies_s += self._store.seconds(num_bytes)
        stall_s = copies_s - (self._ends[high - 1] - self._ends[low - 1])
        if stall_s > 0:
            samples = range(self._sample[low], self._sample[high] + 1)
            self._stalls.append((fraction, samples, stall_s / self._unit_s))

    def add_delay(self, fraction: int, position: int, seconds: float) -> None:
        """Add `seconds` times a fraction to the duration of a position."""
        self._add(self._longer[self._sample[position]], fraction, seconds / self._unit_s)

    def solve(self, target_bytes: int, reserve: Mapping[int, float]) -> LPOptimum | None:
        """Return the optimum with the least waits and recomputation within a target; None if the target is infeasible.

        No fraction may be added afterwards.

        Args:
            target_bytes: Maximum of device bytes at the sampled positions.
            reserve: Dict from position to bytes to keep free there. The number of positions is the key for the end of
                the step: there, the store channel stays free for the time in which it could copy that many bytes.

        Raises:
            SolverFailed: When the solver ends without an answer.
        """
        if not self._waits:
            self._num_fractions = len(self.lp.costs)
            self._add_sample_rows()
        samples = zip(self._byte_rows, self.positions.tolist(), self._profile.tolist(), strict=True)
        for row, position, resident in samples:
            need = (resident + reserve.get(position, 0.0) - target_bytes) / self._unit
            self.lp.change_bound(row, need if need > 0 else -np.inf)
        late_s = reserve.get(len(self._full_profile), 0.0) / self._store.bytes_s
        for row, between_s in zip(self._store_rows[::-1], self._between_s[::-1].tolist(), strict=True):
            self.lp.change_bound(row, min(late_s - between_s, 0.0) / self._unit_s)
            late_s = max(late_s - between_s, 0.0)
        result = self.lp.solve()
        if result is None:
            return None
        result = result.round(_DIGITS)
        waits = result[self._waits] * self._unit_s
        return LPOptimum(result[: self._num_fractions], self.step_s + float(waits.sum()), waits)

    def violated_positions(self, optimum: LPOptimum, target_bytes: int) -> np.ndarray:
        """Return the position with the most bytes in each interval between samples whose bytes exceed the target.

        An excess of up to `_TARGET_TOLERANCE` is ignored. Adding these positions as samples is the separation step of
        the sampled program.
        """
        change = np.zeros(len(self._full_profile) + 1)
        indices, lows, highs, sizes = np.array(self._spans, dtype=np.int64).reshape(-1, 4).T
        absent = optimum.fractions[indices] * sizes
        np.add.at(change, lows, -absent)
        np.add.at(change, highs, absent)
        resident = self._full_profile + np.cumsum(change[:-1])
        most = target_bytes + _TARGET_TOLERANCE * max(float(self._full_profile.max()) - target_bytes, 0.0)
        intervals = np.split(resident, self.positions)
        starts = np.concatenate(([0], self.positions))
        return np.array(
            [
                start + int(np.argmax(interval))
                for start, interval in zip(starts.tolist(), intervals, strict=True)
                if len(interval) and interval.max() > most
            ],
            dtype=np.int64,
        )

    def sum_by_sample(self, seconds: np.ndarray) -> np.ndarray:
        """Return, per sample, the sum of `seconds` (by position) since the previous sample; last, the remaining sum."""
        sums = np.concatenate(([0.0], np.cumsum(seconds)))
        return np.diff(sums[np.concatenate(([0], self.positions + 1, [len(seconds)]))])

    def max_by_sample(self, num_bytes: np.ndarray) -> np.ndarray:
        """Return, per sample, the maximum of `num_bytes` (by position) since the previous sample.

        For the last sample, positions after it are included.
        """
        return np.maximum.reduceat(num_bytes, np.concatenate(([0], self.positions[:-1] + 1)))

    def _add_sample_rows(self) -> None:
        lp, count = self.lp, len(self.positions)
        channels = (self._store, self._prefetch)
        unit_s = [self._unit / channel.bytes_s / self._unit_s for channel in channels]
        before: tuple[int, ...] = ()
        dram: tuple[int, ...] = ()
        total_waits, later = list[int](), list[int]()
        for j in range(count + 1):
            self._waits.append(lp.variable(cost=1.0 + j * _LATE_WAIT_COST / count))
            absent = self._running_total(self._absent[j], before[:1], lower=-np.inf)
            leave = self._running_total(self._leave[j], before[1:2])
            final = self._running_total(self._final[j], before[2:3])
            due = self._running_total(self._due[j], before[3:4])
            begun = self._running_total(self._started[j], before[4:5])
            coming = self._running_total(self._coming[j], before[5:6])
            total_waits.append(self._running_total({self._waits[j]: 1.0}, tuple(total_waits[-1:])))
            copied = outbound, inbound = lp.variable(), lp.variable()
            for lane, seconds in enumerate(unit_s):
                grows = {copied[lane]: 1.0, **dict.fromkeys(before[6 + lane : 7 + lane], -1.0)}
                lp.at_least(grows, 0.0)
                carried = {v: -seconds * x for v, x in grows.items()}
                row = lp.at_least({**carried, self._waits[j]: 1.0}, -self._between_s[j] / self._unit_s)
                if lane == 0:
                    self._store_rows.append(row)
            if self._longer[j]:
                longer = {fraction: -x for fraction, x in self._longer[j].items()}
                lp.at_least({**longer, self._waits[j]: 1.0}, 0.0)
            (lp.at_least if j < count else lp.equal)({final: 1.0, outbound: -1.0}, 0.0)
            lp.at_least({inbound: 1.0, due: -1.0}, 0.0)
            if self._dram_bytes is not None:
                dram = (self._running_total(self._dram[j], dram, lower=-np.inf),)
                buffers = {y: -size / self._unit for size, y in self._flash_buffers.items()}
                lp.at_least({dram[0]: -1.0, **buffers}, -self._dram_bytes / self._unit)
            # Also resident: bytes that should have left but are not stored yet, and bytes prefetched early.
            leaving, early = lp.variable(), lp.variable()
            lp.at_least({leaving: 1.0, outbound: 1.0, leave: -1.0}, 0.0)
            lp.at_least({early: 1.0, inbound: -1.0, begun: 1.0}, 0.0)
            if j < count:
                later.append(lp.variable())
                lp.at_least({coming: 1.0, later[j]: -1.0}, 0.0)
                resident = {absent: 1.0, leaving: -1.0, early: -1.0, later[j]: 1.0}
                self._byte_rows.append(lp.at_least(resident, -np.inf))
            before = (absent, leave, final, due, begun, coming, outbound, inbound)
        # A prefetch that runs while the compute lane waits need not begin before the wait.
        times = np.cumsum(self._between_s)
        lasts = np.searchsorted(times, times + self._longest_s).clip(max=count).tolist()
        for j, returning in enumerate(later):
            waits = {total_waits[lasts[j]]: 1.0, total_waits[j]: -1.0} if lasts[j] > j else {}
            lp.at_least({returning: -unit_s[1], **waits}, 0.0)
        for fraction, samples, stall in self._stalls:
            lp.at_least({**{self._waits[j]: 1.0 for j in samples}, fraction: -stall}, 0.0)
        # Flash copies have no order in the program, so their seconds are limited over the whole step only.
        for via_flash in self._flash_seconds:
            if via_flash:
                busy = {fraction: -seconds for fraction, seconds in via_flash.items()}
                lp.at_least({**dict.fromkeys(self._waits, 1.0), **busy}, -1.0)

    def _add_span(self, changes: list[dict[int, float]], fraction: int, low: int, high: int, num_bytes: int) -> None:
        a, b = self._sample[low], self._sample[high]
        if a < b:
            self._add(changes[a], fraction, num_bytes / self._unit)
            self._add(changes[b], fraction, -num_bytes / self._unit)

    def _add(self, changes: dict[int, float], fraction: int, value: float) -> None:
        changes[fraction] = changes.get(fraction, 0.0) + value

    def _channel_units(self, channel: Channel, num_bytes: int) -> float:
        """Return the bytes of a copy plus the bytes that its latency costs on the channel, in units of the solver."""
        return (num_bytes + channel.latency_s * channel.bytes_s) / self._unit

    def _traffic_cost(self, seconds: float) -> float:
        return _TRAFFIC_COST * seconds / self._unit_s

    def _running_total(self, changes: dict[int, float], before: tuple[int, ...], lower: float = 0.0) -> int:
        """Add a variable equal to the previous sample's total plus the changes at this sample, and return its index."""
        total = self.lp.variable(lower=lower)
        row = {fraction: -value for fraction, value in changes.items()}
        self.lp.equal({**row, total: 1.0, **dict.fromkeys(before, -1.0)}, 0.0)
        return total
