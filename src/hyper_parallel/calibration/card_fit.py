"""Fitting cards to published runs: few constants, each with a prior, one vote per group of runs.

A constant is fitted as a factor on what is believed of it (or on what its share leaves), with a prior width; runs
enter by the log ratio of predicted and measured step time, rows of one group share one vote, and large residuals
count linearly (Huber). So a constant that no run speaks about stays what it was, and one outlier moves little.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.calibration._constants import (
    CONSTANTS,
    C,
    Constant,
    apply,
    believed,
    check_card_file,
    write_card,
)
from hyper_parallel.calibration._prediction import Cards, machine_of, predict, setting_of
from hyper_parallel.calibration._published_run import PublishedRun, read_run
from hyper_parallel.calibration.csv_rows import RowError, read_rows
from hyper_parallel.cost import ModelNumbers, numbers_of, step_seconds
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.units import GiB

Array = NDArray[np.float64]
Names = NDArray[np.str_]

NOISE: Final = 0.04
"""Log ratio between repeated runs of one configuration that a step time cannot be known better than."""
HUBER: Final = 1.5
"""Residual, in units of `NOISE`, from which a run counts linearly."""
_STEP: Final = 1e-3
"""Move of a log factor for a difference quotient: far above rounding, far below any prior's width."""
_ROUNDS: Final = 6
_SETTLED: Final = 0.02
"""Gauss-Newton steps at most, and the move of every factor, in widths of its prior, at which they end."""
_RESERVE_STEP: Final = 1e7
"""Bytes that a reserve is a multiple of: what published memory is rounded to, 0.01 GiB."""
_FITTED: Final = "fitted to published runs; believed: "

FOLDS: Final[Mapping[str, Callable[[PublishedRun], str]]] = {
    "group": lambda run: run.group,
    "device": lambda run: run.row.device,
    "model": lambda run: run.row.model,
    "stack": lambda run: run.stack,
    # Dense runs stay in: what is known of a mixture of experts when its own runs are unknown.
    "moe_model": lambda run: run.row.model if run.kind == "moe" else "",
}
"""What may be left out of a fit together; runs of the fold "" stay in."""


def read_runs(path: str | Path) -> list[PublishedRun]:
    """The rows of a CSV that can be read."""
    runs = []
    for row in read_rows(path)[1]:
        try:
            runs.append(read_run(row))
        except (RowError, HyperParallelError):
            continue
    return runs


@dataclass(frozen=True, slots=True)
class _Case:
    """A run prepared for being priced with many cards."""

    run: PublishedRun
    numbers: ModelNumbers
    recompute: str
    measured_s: float

    @classmethod
    def of(cls, run: PublishedRun, cards: Cards) -> _Case:
        """The run with the recomputation that fits by what is believed."""
        assert run.step_s, "only measured runs are fitted"
        recompute = run.recompute or predict(run, cards).recompute
        return cls(run, ModelNumbers.of(run.model), recompute, run.step_s)

    def card_names(self, cards: Cards) -> set[str]:
        """The cards that price this run."""
        machine = machine_of(self.run, cards)
        return {machine.card.name, machine.stack.name}

    def log_ratio(self, cards: Cards) -> float:
        """Logarithm of predicted over measured step time."""
        machine = machine_of(self.run, cards)
        seconds = step_seconds(setting_of(self.run, self.numbers, machine, self.recompute))
        return math.log(float(seconds[0]) / self.measured_s)


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of fitting."""

    cards: Cards  # cards with the fitted numbers
    factors: Mapping[str, float]  # log factor of every constant
    runs: tuple[PublishedRun, ...]  # runs that were used
    before: Array  # log ratio of predicted over measured step time with what was believed
    after: Array  # the same with the fitted cards
    left_out: Array  # the same for each run by cards that were fitted without its fold
    # half width of the 80 % interval in log ratio: by kind of model for runs whose model was left out, and,
    # `KIND_unknown_stack`, for runs whose stack was left out and priced with the card of another
    interval: Mapping[str, float]
    # share of left-out runs, one vote per group, that lie in an interval made without them, by kind
    coverage: Mapping[str, float]

    def errors(self, log_ratios: Array, kind: str) -> Array:
        """Absolute relative error of every group of one kind of model: the median over its rows.

        Args:
            log_ratios: `before`, `after` or `left_out`.
            kind: dense or moe.
        """
        groups = defaultdict[str, list[float]](list)
        for run, value in zip(self.runs, log_ratios, strict=True):
            if run.kind == kind:
                groups[run.group].append(abs(math.expm1(float(value))))
        return np.asarray([np.median(values) for values in groups.values()])

    def summary(self) -> list[str]:
        """The accuracy and the constants as lines of text."""
        lines = [
            f"{len(self.runs)} runs; error of predicted step time, median over groups (90th percentile)"
        ]
        for kind in ("dense", "moe"):
            columns = [self.errors(v, kind) for v in (self.before, self.after, self.left_out)]
            if columns[0].size:
                shown = [f"{np.median(e):.1%} ({np.quantile(e, 0.9):.1%})" for e in columns]
                lines.append(
                    f"{kind}, {columns[0].size} groups: believed {shown[0]}, fitted {shown[1]}, left out {shown[2]}"
                )
        for kind, share in self.coverage.items():
            lines.append(f"{kind}: {share:.0%} of what was left out lies in its 80 % interval")
        lines.append("factors on what was believed:")
        lines += [f"  {name}: {math.exp(value):.3f}" for name, value in self.factors.items()]
        return lines


def write_cards(folder: Path, fit: Fit) -> list[Path]:
    """Write every card that a fit may have changed, one file each, complete in itself."""
    names = sorted({name for constant in CONSTANTS for name in constant.cards})
    for name in names:
        check_card_file(Path(folder) / f"{name}.yaml")
    paths = []
    for name in names:
        path = Path(folder) / f"{name}.yaml"
        write_card(path, fit.cards.device.get(name), fit.cards.stack.get(name), name)
        paths.append(path)
    return paths


def fit_runs(
    runs: Sequence[PublishedRun],
    shipped: Cards,
    *,
    constants: Sequence[Constant] = CONSTANTS,
    leave_out: str | None = "group",
) -> Fit:
    """Fit the constants of cards to runs.

    Args:
        runs: Runs with a measured step time; others are left aside.
        shipped: Cards; fitting starts from their priors.
        constants: What may change.
        leave_out: What is left out together for `left_out`, a key of `FOLDS`; None: nothing.
    """
    start = believed(shipped)
    cases = [_Case.of(run, start) for run in runs if run.step_s]
    runs = tuple(case.run for case in cases)
    sizes = Counter(run.group for run in runs)
    votes = np.asarray([1.0 / sizes[run.group] for run in runs])
    widths = np.asarray([c.sd for c in constants])
    uses = [case.card_names(start) for case in cases]

    def residuals(factors: Array) -> Array:
        cards = apply(start, factors, constants)
        return np.asarray([case.log_ratio(cards) for case in cases])

    factors = np.zeros(len(constants))
    before = now = residuals(factors)
    slopes = np.zeros((len(cases), len(constants)))
    for _ in range(_ROUNDS):
        for j, constant in enumerate(constants):
            moved = factors.copy()
            moved[j] += _STEP
            cards = apply(start, moved, constants)
            for i, used in enumerate(uses):
                if not used.isdisjoint(constant.cards):
                    slopes[i, j] = (cases[i].log_ratio(cards) - now[i]) / _STEP
        last, factors = factors, _solve(now, slopes, factors, votes, widths)
        now = residuals(factors)
        if np.abs((factors - last) / widths).max() < _SETTLED:
            break

    folds = {k: np.asarray([fold(run) for run in runs]) for k, fold in FOLDS.items()}

    def without(fold: str, unknown_stack: bool = False) -> Array:
        """Residual of each run by cards fitted without its fold; linear in the factors around the full fit."""
        left_out = now.copy()
        for name in dict.fromkeys(folds[fold]):
            if not name:
                continue
            mine = folds[fold] == name
            cards = apply(start, _solve(now, slopes, factors, votes * ~mine, widths), constants)
            for i in np.flatnonzero(mine):
                case = cases[i]
                if unknown_stack:
                    case = replace(case, run=case.run.priced_as_unknown())
                left_out[i] = case.log_ratio(cards)
        return left_out

    left_out = unseen = strange = now
    if leave_out:
        left_out = without(leave_out)
        # A new run is most often of a model that no run has shown, and sometimes of a stack that none has.
        unseen, strange = without("model"), without("stack", unknown_stack=True)
    interval, covered = dict[str, float](), dict[str, float]()
    for kind in sorted({run.kind for run in runs}):
        mine = np.asarray([run.kind == kind for run in runs])
        width = half_width(unseen[mine], votes[mine], folds["model"][mine])
        other = half_width(strange[mine], votes[mine], folds["stack"][mine])
        interval |= {kind: width, f"{kind}_unknown_stack": max(width, other)}
        if leave_out and len(set(folds[leave_out][mine])) > 1:
            covered[kind] = coverage(left_out[mine], votes[mine], folds[leave_out][mine])
    fitted = _memory_not_too_low(apply(start, factors, constants), runs)
    cards = _described(start, fitted, constants, interval)
    named = {c.name: float(f) for c, f in zip(constants, factors, strict=True)}
    return Fit(cards, named, runs, before, now, left_out, interval, covered)


def _solve(now: Array, slopes: Array, factors: Array, votes: Array, widths: Array) -> Array:
    """Log factors that minimise the residuals, linear around `factors`: Huber's loss times votes, and the priors.

    Residuals `now` are [runs], their `slopes` [runs, constants]; `widths` are those of the priors.
    Source: robust regression, Huber 1964; priors as ridge penalties.
    """
    from scipy.optimize import least_squares

    weights = np.concatenate([votes, np.ones(len(widths))])
    knee = np.concatenate([np.full(len(votes), HUBER**2), np.full(len(widths), np.inf)])

    def loss(squares: Array) -> Any:
        """Value and two derivatives by the square: linear in it up to the knee, in its root beyond."""
        squares = np.maximum(squares, 1e-24)
        inside, reach = squares <= knee, HUBER / np.sqrt(squares)
        value = np.where(inside, squares, 2.0 * HUBER * np.sqrt(squares) - HUBER**2)
        slope = np.where(inside, 1.0, reach)
        return weights * np.stack([value, slope, np.where(inside, 0.0, -0.5 * reach / squares)])

    result = least_squares(
        lambda f: np.concatenate([(now + slopes @ (f - factors)) / NOISE, f / widths]),
        factors,
        lambda f: np.vstack([slopes / NOISE, np.diag(1.0 / widths)]),
        loss=loss,
        x_scale=widths,
    )
    return np.asarray(result.x)


def _memory_not_too_low(cards: Cards, runs: Sequence[PublishedRun]) -> Cards:
    """Cards with the least reserve, per stack, with which no published memory is predicted too low."""
    for run in runs:
        short = (run.row.mem_gib or 0.0) * GiB - float(predict(run, cards).scores.memory_bytes[0])
        if short > 0.0:
            stack = cards.stack_for(run.stack)
            more = math.ceil((stack.reserve_bytes + short) / _RESERVE_STEP) * _RESERVE_STEP
            stacks = {**cards.stack, run.stack: replace(stack, reserve_bytes=more)}
            cards = Cards(cards.device, stacks)
    return cards


def half_width(residual: Array, votes: Array, folds: Names, share: float = 0.8) -> float:
    """Absolute residual that a share of the votes of runs still to come stays below.

    Runs of a fold are alike, so that k folds tell as much as k runs: of these the share (1 + 1/k) must lie below, at
    most all.

    Source: split conformal prediction, Papadopoulos et al. 2002.
    """
    share = min(1.0, share * (1.0 + 1.0 / len(set(folds))))
    size = np.abs(residual)
    order = np.argsort(size)
    reached = np.cumsum(votes[order]) / votes.sum()
    place = min(int(np.searchsorted(reached, share - 1e-9)), len(size) - 1)
    return float(size[order][place])


def coverage(residual: Array, votes: Array, folds: Names) -> float:
    """Share of the votes within the half width that the other folds' residuals give."""
    inside = 0.0
    for name in dict.fromkeys(folds):
        mine = folds == name
        width = half_width(residual[~mine], votes[~mine], folds[~mine])
        inside += float(votes[mine & (np.abs(residual) <= width)].sum())
    return inside / float(votes.sum())


def _described(
    start: Cards, fitted: Cards, constants: Sequence[Constant], interval: Mapping[str, float]
) -> Cards:
    """Fitted cards that say of every changed number what was believed and that it was fitted."""
    changed = {name for c in constants for name in c.cards}
    left = {True: "stack was left out and priced as another", False: "model was left out"}
    of_interval = {
        f"interval.{kind}": f"80 % of runs whose {left['_' in kind]}, one vote per group"
        for kind in interval
    }

    def describe(old: C, new: C) -> C:
        sources, priors, fitted = dict(old.sources), dict(old.priors), numbers_of(new)
        for path, value in numbers_of(old).items():
            if path in sources and fitted[path] != value:
                sources[path] = _FITTED + sources[path].removeprefix(_FITTED)
                priors[path] = value
        return replace(new, sources=sources, priors=priors)

    device = {k: describe(start.device[k], v) for k, v in fitted.device.items()}
    stack = {k: describe(start.stack[k], v) for k, v in fitted.stack.items()}
    for name in changed & {*stack}:
        sources = {**stack[name].sources, **of_interval}
        stack[name] = replace(stack[name], interval=dict(interval), sources=sources)
    return Cards(device, stack)
