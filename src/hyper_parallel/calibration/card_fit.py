"""Fit of cards to published runs: robust regression of a few constants, each with a prior.

A number x of a card is fitted as a factor on its prior value (or on 1 - x), regularized by the width of the prior. A
number that no run depends on therefore keeps its prior value. The residual of a run is the natural logarithm of
predicted over measured step time. A group of near-duplicate runs has the weight of one run, and large residuals count
linearly (Huber), so that an outlier has little effect.

For cross-validation, runs are divided into folds, such as all runs of one model. The runs of a fold are predicted with
cards that are fitted to the other folds.
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
    check_card_file,
    with_prior_values,
    write_card,
)
from hyper_parallel.calibration._prediction import Cards, machine_of, predict, setting_of
from hyper_parallel.calibration._published_run import PublishedRun, read_run
from hyper_parallel.calibration.csv_rows import RowError, read_rows
from hyper_parallel.cost import ModelNumbers, numbers_of, step_seconds
from hyper_parallel.errors import HyperParallelError, RunsUnreadable
from hyper_parallel.units import GiB

Array = NDArray[np.float64]
Names = NDArray[np.str_]

NOISE: Final = 0.04
"""Typical difference in step time of two runs of one configuration, as a natural logarithm of their ratio."""
HUBER: Final = 1.5
"""Residual, in units of `NOISE`, above which a run counts linearly instead of quadratically."""
_STEP: Final = 1e-3
"""Step of a log factor in numerical derivatives."""
_ROUNDS: Final = 6
_SETTLED: Final = 0.02
"""`_ROUNDS`: maximum number of Gauss-Newton steps. `_SETTLED`: change of all constants below which the steps end, in
standard deviations of the priors."""
_RESERVE_STEP: Final = 1e7
"""Fitted `StackCard.reserve_bytes` are a multiple of this: published memory is rounded to 0.01 GiB."""
_FITTED: Final = "fitted to published runs; believed: "

FOLDS: Final[Mapping[str, Callable[[PublishedRun], str]]] = {
    "group": lambda run: run.group,
    "device": lambda run: run.row.device,
    "model": lambda run: run.row.model,
    "stack": lambda run: run.stack,
    # Dense runs are kept, to evaluate predictions for a mixture of experts without its own runs.
    "moe_model": lambda run: run.row.model if run.kind == "moe" else "",
}
"""Functions that return the name of a run's fold, by kind of fold; runs of the fold "" are never left out."""


def read_runs(path: str | Path) -> list[PublishedRun]:
    """Return the runs in the valid rows of a CSV file; invalid rows are skipped.

    Raises:
        RunsUnreadable: HP314 when the file cannot be read; see `read_rows`.
    """
    runs = []
    for row in read_rows(path)[1]:
        try:
            runs.append(read_run(row))
        except (RowError, HyperParallelError):
            continue
    return runs


@dataclass(frozen=True, slots=True)
class _Case:
    run: PublishedRun
    numbers: ModelNumbers
    recompute: str
    measured_s: float

    @classmethod
    def of(cls, run: PublishedRun, cards: Cards) -> _Case:
        """Return the case of a measured run; if the row states no recomputation, `predict` with `cards` chooses it."""
        assert run.step_s, "only measured runs are fitted"
        recompute = run.recompute or predict(run, cards).recompute
        return cls(run, ModelNumbers.of(run.model), recompute, run.step_s)

    def card_names(self, cards: Cards) -> set[str]:
        machine = machine_of(self.run, cards)
        return {machine.card.name, machine.stack.name}

    def log_ratio(self, cards: Cards) -> float:
        """Return the natural logarithm of predicted over measured step time."""
        machine = machine_of(self.run, cards)
        seconds = step_seconds(setting_of(self.run, self.numbers, machine, self.recompute))
        return math.log(float(seconds[0]) / self.measured_s)


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of a fit: the fitted cards, residuals of all runs, and prediction intervals by cross-validation."""

    cards: Cards  # cards with the fitted numbers
    factors: Mapping[str, float]  # natural logarithm of the factor on every constant
    runs: tuple[PublishedRun, ...]  # runs used in the fit
    before: Array  # residual of every run with the prior values
    after: Array  # residual of every run with the fitted cards
    left_out: Array  # residual of every run with cards fitted without its fold; `after` without cross-validation
    # half width of the 80 % interval in natural logarithm: by kind of model, from runs whose model was left out; and
    # under `KIND_unknown_stack`, at least as wide, from runs whose stack was left out and priced as an unknown one
    interval: Mapping[str, float]
    # by kind of model with two or more folds, the fraction of left-out runs inside the interval of the other folds
    coverage: Mapping[str, float]

    def errors(self, log_ratios: Array, kind: str) -> Array:
        """Return the absolute relative error of the predicted step time of every group: the median over its runs.

        Args:
            log_ratios: Residuals `before`, `after` or `left_out`.
            kind: Kind of model of the groups: dense or moe.
        """
        groups = defaultdict[str, list[float]](list)
        for run, value in zip(self.runs, log_ratios, strict=True):
            if run.kind == kind:
                groups[run.group].append(abs(math.expm1(float(value))))
        return np.asarray([np.median(values) for values in groups.values()])

    def summary(self) -> list[str]:
        """Return lines of text about the accuracy and the fitted constants."""
        title = "error of predicted step time, median over groups (90th percentile)"
        lines = [f"{len(self.runs)} runs; {title}"]
        for kind in ("dense", "moe"):
            columns = [self.errors(v, kind) for v in (self.before, self.after, self.left_out)]
            if columns[0].size:
                texts = (f"{np.median(e):.1%} ({np.quantile(e, 0.9):.1%})" for e in columns)
                named = zip(("prior", "fitted", "left out"), texts, strict=True)
                errors = ", ".join(f"{name} {text}" for name, text in named)
                lines.append(f"{kind}, {columns[0].size} groups: {errors}")
        for kind, share in self.coverage.items():
            lines.append(f"{kind}: {share:.0%} of the left-out groups lie in their 80 % interval")
        lines.append("factors on the prior values:")
        lines += [f"  {name}: {math.exp(value):.3f}" for name, value in self.factors.items()]
        return lines


def write_cards(folder: Path, fit: Fit) -> list[Path]:
    """Write a file `NAME.yaml` for every card in `CONSTANTS`, and return the paths.

    Raises:
        OutputNotWritable: HP105 if a file cannot be written, or exists and is no card file.
    """
    names = {name for constant in CONSTANTS for name in constant.cards}
    paths = {name: Path(folder) / f"{name}.yaml" for name in sorted(names)}
    for path in paths.values():
        check_card_file(path)
    for name, path in paths.items():
        write_card(path, fit.cards.device.get(name), fit.cards.stack.get(name), name)
    return [*paths.values()]


def fit_runs(
    runs: Sequence[PublishedRun],
    shipped: Cards,
    *,
    constants: Sequence[Constant] = CONSTANTS,
    leave_out: str | None = "group",
) -> Fit:
    """Return cards with constants fitted to published runs, and the accuracy of the fit.

    Args:
        runs: Runs; those without a measured step time are ignored.
        shipped: Cards to fit, starting from their priors.
        constants: Constants to fit.
        leave_out: Kind of fold, a key of `FOLDS`, for `Fit.left_out` and `Fit.coverage`. Intervals leave out models and
            stacks for any kind. None: no cross-validation; intervals use the residuals of the fit.

    Raises:
        RunsUnreadable: HP314 if no run has a measured step time.
    """
    start = with_prior_values(shipped)
    cases = [_Case.of(run, start) for run in runs if run.step_s]
    if not cases:
        raise RunsUnreadable(
            "no run can be fitted: none is valid and has a measured step time",
            got=f"{len(runs)} valid runs",
            hint="add rows with `step_s` or `tok_s_dev`; `hyper-parallel predict` lists the errors of each row",
        )
    runs = tuple(case.run for case in cases)
    sizes = Counter(run.group for run in runs)
    weights = np.asarray([1.0 / sizes[run.group] for run in runs])
    problem = _Problem(start, constants, cases, weights)
    before = problem.residuals(np.zeros(len(constants)))
    solution = problem.solve(before)
    folds = {k: np.asarray([fold(run) for run in runs]) for k, fold in FOLDS.items()}
    left_out = unseen = strange = solution.residuals
    if leave_out:
        left_out = problem.residuals_left_out(solution, folds[leave_out])
        # A new run usually has a model that no earlier run has, and sometimes a stack that none has.
        unseen = problem.residuals_left_out(solution, folds["model"])
        strange = problem.residuals_left_out(solution, folds["stack"], unknown_stack=True)
    interval, covered = dict[str, float](), dict[str, float]()
    for kind in sorted({run.kind for run in runs}):
        of_kind = np.asarray([run.kind == kind for run in runs])
        width = half_width(unseen[of_kind], weights[of_kind], folds["model"][of_kind])
        stack_width = half_width(strange[of_kind], weights[of_kind], folds["stack"][of_kind])
        interval |= {kind: width, f"{kind}_unknown_stack": max(width, stack_width)}
        if leave_out and len(set(folds[leave_out][of_kind])) > 1:
            labels = folds[leave_out][of_kind]
            covered[kind] = coverage(left_out[of_kind], weights[of_kind], labels)
    fitted = _memory_not_too_low(apply(start, solution.factors, constants), runs)
    cards = _described(start, fitted, constants, interval)
    factors = {c.name: float(f) for c, f in zip(constants, solution.factors, strict=True)}
    return Fit(cards, factors, runs, before, solution.residuals, left_out, interval, covered)


@dataclass(frozen=True)
class _Solution:
    """Solution of a fit: log factors, residuals of the runs, and derivatives of the residuals [runs, constants]."""

    factors: Array
    residuals: Array
    slopes: Array


@dataclass(frozen=True)
class _Problem:
    start: Cards  # cards with the prior values
    constants: Sequence[Constant]
    cases: list[_Case]
    weights: Array  # weight of every run

    @property
    def prior_stds(self) -> Array:
        return np.asarray([c.sd for c in self.constants])

    def residuals(self, factors: Array) -> Array:
        cards = apply(self.start, factors, self.constants)
        return np.asarray([case.log_ratio(cards) for case in self.cases])

    def solve(self, before: Array) -> _Solution:
        """Return the solution by Gauss-Newton steps from the prior values, whose residuals are `before`."""
        uses = [case.card_names(self.start) for case in self.cases]
        factors, residuals, prior_stds = np.zeros(len(self.constants)), before, self.prior_stds
        slopes = np.zeros((len(self.cases), len(self.constants)))
        for _ in range(_ROUNDS):
            for j, constant in enumerate(self.constants):
                moved = factors.copy()
                moved[j] += _STEP
                cards = apply(self.start, moved, self.constants)
                for i, used in enumerate(uses):
                    if not used.isdisjoint(constant.cards):
                        slopes[i, j] = (self.cases[i].log_ratio(cards) - residuals[i]) / _STEP
            last, factors = factors, _solve(residuals, slopes, factors, self.weights, prior_stds)
            residuals = self.residuals(factors)
            if np.abs((factors - last) / prior_stds).max() < _SETTLED:
                break
        return _Solution(factors, residuals, slopes)

    def residuals_left_out(self, solution: _Solution, folds: Names, unknown_stack: bool = False) -> Array:
        """Return the residual of each run with cards fitted without its fold.

        The fit without a fold uses the derivatives of the fit with all runs.

        Args:
            solution: Solution of the fit with all runs.
            folds: Name of the fold of every run; runs of the fold "" are never left out.
            unknown_stack: Whether to predict left-out runs with the card for unknown stacks.
        """
        left_out = solution.residuals.copy()
        for name in dict.fromkeys(folds):
            if not name:
                continue
            in_fold = folds == name
            weights = self.weights * ~in_fold
            s = solution
            factors = _solve(s.residuals, s.slopes, s.factors, weights, self.prior_stds)
            cards = apply(self.start, factors, self.constants)
            for i in np.flatnonzero(in_fold):
                case = self.cases[i]
                if unknown_stack:
                    case = replace(case, run=case.run.priced_as_unknown())
                left_out[i] = case.log_ratio(cards)
        return left_out


def _solve(now: Array, slopes: Array, factors: Array, weights: Array, prior_stds: Array) -> Array:
    """Return the log factors that minimize Huber's loss of the residuals plus quadratic penalties for the priors.

    The residuals are linearized at `factors`: `now` are their values there [runs], `slopes` their derivatives [runs,
    constants]. `prior_stds` are the standard deviations of the priors. Source: robust regression, Huber 1964.
    """
    from scipy.optimize import least_squares

    row_weights = np.concatenate([weights, np.ones(len(prior_stds))])
    knee = np.concatenate([np.full(len(weights), HUBER**2), np.full(len(prior_stds), np.inf)])

    def loss(squares: Array) -> Any:
        squares = np.maximum(squares, 1e-24)
        inside, reach = squares <= knee, HUBER / np.sqrt(squares)
        value = np.where(inside, squares, 2.0 * HUBER * np.sqrt(squares) - HUBER**2)
        slope = np.where(inside, 1.0, reach)
        return row_weights * np.stack([value, slope, np.where(inside, 0.0, -0.5 * reach / squares)])

    result = least_squares(
        lambda f: np.concatenate([(now + slopes @ (f - factors)) / NOISE, f / prior_stds]),
        factors,
        lambda f: np.vstack([slopes / NOISE, np.diag(1.0 / prior_stds)]),
        loss=loss,
        x_scale=prior_stds,
    )
    return np.asarray(result.x)


def _memory_not_too_low(cards: Cards, runs: Sequence[PublishedRun]) -> Cards:
    """Return cards with `reserve_bytes` of stacks raised, so that no predicted memory is below the measured memory."""
    for run in runs:
        short = (run.row.mem_gib or 0.0) * GiB - float(predict(run, cards).scores.memory_bytes[0])
        if short > 0.0:
            stack = cards.stack_for(run.stack)
            reserve_bytes = math.ceil((stack.reserve_bytes + short) / _RESERVE_STEP) * _RESERVE_STEP
            stacks = {**cards.stack, run.stack: replace(stack, reserve_bytes=reserve_bytes)}
            cards = Cards(cards.device, stacks)
    return cards


def half_width(residual: Array, weights: Array, folds: Names) -> float:
    """Return the absolute residual that 80 % of future runs, by weight, are expected not to exceed.

    It is the quantile min(1, 0.8 (1 + 1/k)) of the absolute residuals. k is the number of folds, because the runs of
    one fold are similar and count as one.

    Source: split conformal prediction, Papadopoulos et al. 2002.
    """
    share = min(1.0, 0.8 * (1.0 + 1.0 / len(set(folds))))
    size = np.abs(residual)
    order = np.argsort(size)
    reached = np.cumsum(weights[order]) / weights.sum()
    index = min(int(np.searchsorted(reached, share - 1e-9)), len(size) - 1)
    return float(size[order][index])


def coverage(residual: Array, weights: Array, folds: Names) -> float:
    """Return the fraction of runs, by weight, with an absolute residual of at most `half_width` of the other folds."""
    inside = 0.0
    for name in dict.fromkeys(folds):
        in_fold = folds == name
        width = half_width(residual[~in_fold], weights[~in_fold], folds[~in_fold])
        inside += float(weights[in_fold & (np.abs(residual) <= width)].sum())
    return inside / float(weights.sum())


def _described(start: Cards, fitted: Cards, constants: Sequence[Constant], interval: Mapping[str, float]) -> Cards:
    """Return the fitted cards with prior value and source for every changed number, and with `interval` on stacks."""
    changed = {name for c in constants for name in c.cards}
    fold_text = {True: "stack was left out and priced as another", False: "model was left out"}
    of_interval = {
        f"interval.{kind}": f"80 % of runs whose {fold_text['_' in kind]}, one vote per group" for kind in interval
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
