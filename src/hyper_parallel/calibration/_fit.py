"""Fitting cards to published runs: few constants, each with a prior, one vote per group of runs.

A constant is fitted as a factor on what is believed of it (or on what its share leaves), with a prior width; runs
enter by the log ratio of predicted and measured step time, rows of one group share one vote, and large residuals
count linearly (Huber). So a constant that no run speaks about stays what it was, and one outlier moves little.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.calibration._interval import coverage, half_width
from hyper_parallel.calibration._predict import (
    Cards,
    candidate_of,
    machine_of,
    predict,
    workload_of,
)
from hyper_parallel.calibration._runs import PublishedRun
from hyper_parallel.calibration._write import write_card
from hyper_parallel.cost import DeviceCard, ModelNumbers, StackCard, score

Array = NDArray[np.float64]
C = TypeVar("C", DeviceCard, StackCard)

NOISE: Final = 0.04
"""Log ratio between repeated runs of one configuration that a step time cannot be known better than."""
HUBER: Final = 1.5
"""Residual, in units of `NOISE`, from which a run counts linearly."""
_STEP: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Constant:
    """One number that runs may change, on one or several cards at once.

    Attributes:
        name: For people.
        sd: Width of the prior in log ratio.
        cards: Cards that share the factor.
        attributes: Attributes (`matmul.bfloat16`, `passes`) that share the factor; `matmul` means all its dtypes.
        rest: The factor is on what a share leaves, 1 - x, as for overlaps.
    """

    name: str
    sd: float
    cards: tuple[str, ...]
    attributes: tuple[str, ...]
    rest: bool = False


_HOPPER: Final = ("h100", "h100-96gb")
_BLACKWELL: Final = ("b200", "b300", "gb200", "gb300")
_MODERN: Final = ("megatron", "nemo", "megatron-bridge", "mindspeed", "jax")
_TORCH: Final = ("torchtitan", "torchtitan-2024", "torchtitan-eager", "torch-fsdp")
_STACKS: Final = (*_MODERN, *_TORCH, "nanotron", "megatron-2022")
_DEVICES: Final = ("a100", *_HOPPER, *_BLACKWELL, "ascend-910b", "ascend-910c")

CONSTANTS: Final = (
    Constant("matmul a100", 0.06, ("a100",), ("matmul",)),
    Constant("matmul hopper bf16", 0.06, _HOPPER, ("matmul.bfloat16",)),
    Constant("matmul hopper fp8", 0.08, _HOPPER, ("matmul.float8_e4m3fn",)),
    Constant("matmul blackwell fp8", 0.08, _BLACKWELL, ("matmul.float8_e4m3fn", "matmul.mxfp8")),
    Constant("matmul blackwell nvfp4", 0.12, _BLACKWELL, ("matmul.nvfp4",)),
    Constant("matmul ascend", 0.08, ("ascend-910b", "ascend-910c"), ("matmul",)),
    Constant("clock h100-96gb", 0.08, ("h100-96gb",), ("matmul", "attention")),
    Constant("clock b200", 0.06, ("b200",), ("matmul", "attention")),
    Constant("clock b300", 0.06, ("b300",), ("matmul", "attention")),
    Constant("clock gb200", 0.06, ("gb200",), ("matmul", "attention")),
    Constant("clock gb300", 0.06, ("gb300",), ("matmul", "attention")),
    Constant("attention hopper", 0.10, _HOPPER, ("attention",)),
    Constant("attention blackwell", 0.15, _BLACKWELL, ("attention",)),
    Constant("attention ascend", 0.20, ("ascend-910b", "ascend-910c"), ("attention",)),
    Constant("portable attention", 0.15, (*_HOPPER, *_BLACKWELL), ("portable",)),
    Constant("saturation", 0.20, _DEVICES, ("saturation",)),
    Constant("links", 0.10, _DEVICES, ("link",)),
    Constant("network", 0.15, _DEVICES, ("network",)),
    Constant("network exchanges", 0.30, _DEVICES, ("exchange",)),
    Constant("element-wise passes", 0.12, _STACKS, ("passes",)),
    Constant("eager passes", 0.20, ("torchtitan-eager", "nanotron"), ("passes",)),
    Constant("casts", 0.25, _STACKS, ("quantize_bytes",)),
    Constant("stack nemo", 0.03, ("nemo",), ("compute",)),
    Constant("stack megatron-bridge", 0.03, ("megatron-bridge",), ("compute",)),
    Constant("stack torchtitan", 0.03, ("torchtitan", "torchtitan-2024", "torchtitan-eager"), ("compute",)),
    Constant("stack mindspeed", 0.04, ("mindspeed",), ("compute",)),
    Constant("stack megatron-2022", 0.05, ("megatron-2022",), ("compute",)),
    Constant("stack nanotron", 0.08, ("nanotron",), ("compute",)),
    Constant("tensor-parallel overlap", 0.30, _MODERN, ("overlap_tp",), rest=True),
    Constant("straggling", 0.40, _STACKS, ("straggle",)),
    Constant("step overhead", 0.50, _STACKS, ("step_s",)),
    Constant("nanotron collectives", 0.30, ("nanotron",), ("network",)),
    Constant("nanotron tensors", 0.40, ("nanotron",), ("tail_tensors",)),
    Constant("experts", 0.20, _STACKS, ("moe",)),
    Constant("expert host work", 0.40, _STACKS, ("moe_host_s",)),
    Constant("expert releases", 0.40, _STACKS, ("moe_month",)),
    Constant("expert releases hopper", 1.00, _HOPPER, ("maturing",)),
    Constant("expert overlap", 0.30, _MODERN, ("overlap_ep",), rest=True),
)  # fmt: skip
"""What `calibrate --runs` may change."""


def apply(cards: Cards, factors: Array, constants: Sequence[Constant] = CONSTANTS) -> Cards:
    """Cards with the log factors of constants applied to what is believed of them."""
    device: dict[str, DeviceCard] = dict(cards.device)
    stack: dict[str, StackCard] = dict(cards.stack)
    for constant, log_factor in zip(constants, factors, strict=True):
        factor = math.exp(float(log_factor))
        for name in constant.cards:
            for attribute in constant.attributes:
                for table in (device, stack):
                    if name in table and hasattr(table[name], attribute.partition(".")[0]):
                        table[name] = _scaled(table[name], attribute, factor, constant.rest)  # type: ignore[assignment, type-var]
    return Cards(device, stack)


def _scaled(card: C, attribute: str, factor: float, rest: bool) -> C:
    name, _, key = attribute.partition(".")
    old: Any = getattr(card, name)

    def new(value: float) -> float:
        return max(0.0, 1.0 - (1.0 - value) * factor) if rest else value * factor

    value: Any = new(old) if isinstance(old, float | int) else dict(old)
    if isinstance(value, dict):
        value |= {k: new(v) for k, v in old.items() if not key or k == key}
    changed: dict[str, Any] = {name: value}
    return replace(card, **changed)


def believed(cards: Cards) -> Cards:
    """Cards with every fitted number set back to its prior."""

    def back(card: C) -> C:
        values: dict[str, Any] = {}
        for path, prior in card.priors.items():
            name, _, key = path.partition(".")
            old = values.get(name, getattr(card, name))
            values[name] = {**old, key: prior} if key else prior
        return replace(card, **values)

    return Cards(
        {k: back(v) for k, v in cards.device.items()}, {k: back(v) for k, v in cards.stack.items()}
    )


@dataclass(frozen=True, slots=True)
class _Case:
    """A run prepared for pricing again and again."""

    run: PublishedRun
    numbers: ModelNumbers
    recompute: str
    measured: float

    def card_names(self, cards: Cards) -> set[str]:
        """The cards that price this run."""
        machine = machine_of(self.run, cards, [])
        return {machine.card.name, machine.stack.name}

    def log_ratio(self, cards: Cards) -> float:
        """Logarithm of predicted over measured step time."""
        machine = machine_of(self.run, cards, [])
        candidate = candidate_of(self.run, self.recompute)
        workload = workload_of(self.run, machine.compute_dtype)
        seconds = score(self.numbers, machine, workload, candidate, "time").step_s[0]
        return math.log(float(seconds) / self.measured)


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of fitting.

    Attributes:
        cards: Cards with the fitted numbers.
        factors: Log factor of every constant.
        runs: Runs that were used.
        before: Log ratio of predicted over measured step time with what was believed.
        after: The same with the fitted cards.
        left_out: The same for each run by cards that were fitted without its group.
        interval: Half width of the 80 % interval in log ratio, by kind of model, of runs whose model was left out.
        coverage: Share of left-out runs, one vote per group, that lie in an interval made without them, by kind.
    """

    cards: Cards
    factors: Mapping[str, float]
    runs: tuple[PublishedRun, ...]
    before: Array
    after: Array
    left_out: Array
    interval: Mapping[str, float]
    coverage: Mapping[str, float]

    def errors(self, log_ratios: Array, kind: str) -> Array:
        """Absolute relative error of every group of one kind of model: the median over its rows.

        Args:
            log_ratios: `before`, `after` or `left_out`.
            kind: dense or moe.
        """
        found: dict[str, list[float]] = {}
        for run, value in zip(self.runs, log_ratios, strict=True):
            if bool(run.model.num_experts) == (kind == "moe"):
                found.setdefault(run.group, []).append(abs(math.expm1(float(value))))
        return np.asarray([float(np.median(values)) for values in found.values()])

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
        lines += [
            f"{kind}: {share:.0%} of what was left out lies in its 80 % interval"
            for kind, share in self.coverage.items()
        ]
        lines.append("factors on what was believed:")
        lines += [f"  {name}: {math.exp(value):.3f}" for name, value in self.factors.items()]
        return lines


def write_cards(folder: Path, fit: Fit) -> list[Path]:
    """Write every card that a fit may have changed, one file each, complete in itself."""
    paths = []
    for name in sorted({name for constant in CONSTANTS for name in constant.cards}):
        path = Path(folder) / f"{name}.yaml"
        write_card(path, fit.cards.device.get(name), fit.cards.stack.get(name), name)
        paths.append(path)
    return paths


def _group(run: PublishedRun) -> str:
    return run.group


def _model(run: PublishedRun) -> str:
    return run.row.get("model", "")


def fit_runs(
    runs: Sequence[PublishedRun],
    shipped: Cards,
    *,
    constants: Sequence[Constant] = CONSTANTS,
    rounds: int = 6,
    leave_out: Callable[[PublishedRun], str] | None = _group,
) -> Fit:
    """Fit the constants of cards to runs.

    Args:
        runs: Runs with a measured step time; others are left aside.
        shipped: Cards; fitting starts from their priors.
        constants: What may change.
        rounds: Gauss-Newton steps.
        leave_out: What is left out together for `left_out`, by default a group of runs; None: nothing.

    Source: robust regression, Huber 1964; priors as ridge penalties.
    """
    start = believed(shipped)
    measured = [(run, run.step_s) for run in runs]
    cases = [_case(run, seconds, start) for run, seconds in measured if seconds]
    groups = [case.run.group for case in cases]
    sizes = Counter(groups)
    votes = np.asarray([1.0 / sizes[g] for g in groups])
    widths = np.asarray([c.sd for c in constants])

    uses = [case.card_names(start) for case in cases]

    def residuals(factors: Array) -> Array:
        cards = apply(start, factors, constants)
        return np.asarray([case.log_ratio(cards) for case in cases])

    def moved_by(j: int, factors: Array) -> Array:
        """Residuals with one factor moved; only runs that use one of its cards are priced again."""
        moved = factors.copy()
        moved[j] += _STEP
        cards = apply(start, moved, constants)
        touched = [not used.isdisjoint(constants[j].cards) for used in uses]
        return np.asarray(
            [
                case.log_ratio(cards) if again else old
                for case, again, old in zip(cases, touched, now, strict=True)
            ]
        )

    factors = np.zeros(len(constants))
    before = now = residuals(factors)
    slopes = np.zeros((len(cases), len(constants)))
    for _ in range(rounds):
        for j in range(len(constants)):
            slopes[:, j] = (moved_by(j, factors) - now) / _STEP
        step = _solve(now, slopes, factors, votes, widths) - factors
        factors = factors + step
        now = residuals(factors)
        if np.abs(step / widths).max() < 0.02:
            break

    def without(fold: Callable[[PublishedRun], str]) -> Array:
        """Residual of each run by cards fitted without its fold."""
        found, folds = now.copy(), [fold(case.run) for case in cases]
        for name in dict.fromkeys(folds):
            keep = np.asarray([f != name for f in folds])
            other = _solve(now, slopes, factors, votes * keep, widths)
            cards = apply(start, other, constants)
            for i in np.flatnonzero(~keep):
                found[i] = cases[i].log_ratio(cards)
        return found

    left_out = without(leave_out) if leave_out else now
    routed = np.asarray([bool(case.run.model.num_experts) for case in cases])
    kinds = {"dense": ~routed, "moe": routed}
    # A new run is most often of a model that no run has shown: the interval is that of left-out models.
    unseen = without(_model) if leave_out else now
    models = np.asarray([_model(case.run) for case in cases])
    interval = {
        kind: half_width(unseen[mask], votes[mask], models[mask])
        for kind, mask in kinds.items()
        if mask.any()
    }
    folds = np.asarray([(leave_out or _group)(c.run) for c in cases])
    covered = {
        kind: coverage(left_out[mask], votes[mask], folds[mask])
        for kind, mask in kinds.items()
        if leave_out and len(set(folds[mask])) > 1
    }
    cards = _described(start, apply(start, factors, constants), constants, interval)
    found = {c.name: float(f) for c, f in zip(constants, factors, strict=True)}
    runs = tuple(case.run for case in cases)
    return Fit(cards, found, runs, before, now, left_out, interval, covered)


def _case(run: PublishedRun, seconds: float, cards: Cards) -> _Case:
    first = predict(run, cards)
    chosen = run.recompute or next(
        a.partition("=")[2].partition(":")[0]
        for a in first.assumptions
        if a.startswith("recompute=")
    )
    return _Case(run, ModelNumbers.of(run.model), chosen, seconds)


def _solve(now: Array, slopes: Array, factors: Array, votes: Array, widths: Array) -> Array:
    """Factors that minimise the linearised residuals with Huber weights and the priors."""
    target = slopes @ factors - now
    found = factors
    for _ in range(20):
        error = np.abs(now + slopes @ (found - factors)) / NOISE
        weights = votes * np.minimum(1.0, HUBER / np.maximum(error, 1e-12)) / NOISE**2
        normal = slopes.T @ (slopes * weights[:, None]) + np.diag(widths**-2.0)
        found = np.asarray(np.linalg.solve(normal, slopes.T @ (weights * target)))
    return found


def _described(
    start: Cards, found: Cards, constants: Sequence[Constant], interval: Mapping[str, float]
) -> Cards:
    """Fitted cards that say of every changed number what was believed and that it was fitted."""

    def describe(old: C, new: C) -> C:
        sources, priors = dict(old.sources), dict(old.priors)
        for path in old.sources:
            name, _, key = path.partition(".")
            a, b = getattr(old, name), getattr(new, name)
            a, b = (a[key], b[key]) if key else (a, b)
            if a != b:
                why = sources[path].partition("fitted to published runs; believed: ")
                sources[path] = f"fitted to published runs; believed: {why[2] or why[0]}"
                priors[path] = a
        return replace(new, sources=sources, priors=priors)

    device = {k: describe(start.device[k], v) for k, v in found.device.items()}
    stack = {k: describe(start.stack[k], v) for k, v in found.stack.items()}
    fitted = {name for c in constants for name in c.cards}
    told = {
        f"interval.{k}": "80 % of runs whose model was left out, one vote per group"
        for k in interval
    }
    stack = {
        k: replace(v, interval=dict(interval), sources={**v.sources, **told}) if k in fitted else v
        for k, v in stack.items()
    }
    return Cards(device, stack)
