"""A linear program's optimum, bounded from below by its dual.

An interior-point method in dense arithmetic finds approximate multipliers; weak duality turns any non-negative
multipliers into a bound that holds whatever the rounding, so nothing rests on the method having converged. Meant for
up to about a thousand variables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class LinearProgram:
    """Minimize cost . x where every row says `coefficients . x >= bound` and 0 <= x <= upper.

    Attributes:
        whole: Variables that are whole numbers in the problem this one relaxes; nothing here uses that.
    """

    costs: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float]] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)

    def variable(self, upper: float, cost: float = 0.0) -> int:
        """A new variable between 0 and a finite upper bound."""
        self.costs.append(cost)
        self.uppers.append(upper)
        return len(self.costs) - 1

    def at_least(self, coefficients: dict[int, float], bound: float) -> None:
        """A new row."""
        self.rows.append((coefficients, bound))

    def lower_bound(self, iterations: int = 60) -> float:
        """A number no feasible point costs less than; close to the optimum when one exists.

        Source: predictor-corrector steps, Mehrotra 1992; the bound is weak duality.
        """
        c, u = np.array(self.costs), np.array(self.uppers)
        live = u > 0
        a = np.zeros((len(self.rows), len(c)))
        b = np.zeros(len(self.rows))
        for at, (coefficients, bound) in enumerate(self.rows):
            for column, value in coefficients.items():
                a[at, column] = value
            b[at] = bound
        # Variables as shares of their bound and rows of comparable size: bytes and seconds differ by many magnitudes.
        scale = np.where(live, u, 1.0)
        a, c = (a * scale)[:, live], (c * scale)[live]
        size = np.abs(a).max(axis=1, initial=0.0)
        held = (size == 0) & (b <= 0)  # rows about nothing that hold anyway
        a, b, size = a[~held], b[~held], np.where(size == 0, 1.0, size)[~held]
        a, b = a / size[:, None], b / size
        unit = max(float(np.abs(c).max(initial=0.0)), 1e-300)
        return _interior_point(a, b, c / unit, iterations) * unit


def _bound(a: np.ndarray, b: np.ndarray, c: np.ndarray, y: np.ndarray) -> float:
    """Weak duality for 0 <= x <= 1: y . b + the least that the reduced costs can give."""
    y = np.maximum(y, 0.0)
    return float(y @ b + np.minimum(c - a.T @ y, 0.0).sum())


def _rows(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """All rows of the problem as upper bounds: -a x, x, -x."""
    return np.concatenate((-(a @ x), x, -x))


def _columns(a: np.ndarray, z: np.ndarray) -> np.ndarray:
    """The transpose of `_rows`."""
    m, n = a.shape
    return np.asarray(-(z[:m] @ a) + z[m : m + n] - z[m + n :])


@dataclass(frozen=True)
class _Newton:
    """The linear system of one iteration, solved for different targets of s * z."""

    a: np.ndarray
    inverse: np.ndarray
    primal: np.ndarray
    dual: np.ndarray
    s: np.ndarray
    z: np.ndarray

    def step(self, target: np.ndarray | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Changes of x, s and z."""
        s, z = self.s, self.z
        dx = self.inverse @ (-self.dual + _columns(self.a, z - target / s - z / s * self.primal))
        ds = -self.primal - _rows(self.a, dx)
        return dx, ds, (target - s * z - z * ds) / s


def _interior_point(a: np.ndarray, b: np.ndarray, c: np.ndarray, iterations: int) -> float:
    """The best bound on the way to minimize c . x with a x >= b, 0 <= x <= 1."""
    m, n = a.shape
    h = np.concatenate((-b, np.ones(n), np.zeros(n)))  # _rows(a, x) + s = h, s >= 0
    x = np.full(n, 0.5)
    s = np.maximum(h - _rows(a, x), 1.0)
    z = np.ones(len(h))
    best = _bound(a, b, c, np.zeros(m))
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            for _ in range(iterations):
                primal, dual = _rows(a, x) + s - h, c + _columns(a, z)
                mu = float(s @ z) / len(h)
                weight = z / s
                matrix = (a.T * weight[:m]) @ a
                matrix[np.diag_indices(n)] += weight[m : m + n] + weight[m + n :]
                newton = _Newton(a, np.linalg.inv(matrix), primal, dual, s, z)
                _, ds, dz = newton.step(0.0)
                after = float((s + _reach(s, ds) * ds) @ (z + _reach(z, dz) * dz)) / len(h)
                dx, ds, dz = newton.step((after / mu) ** 3 * mu - ds * dz)
                reach_s, reach_z = 0.99 * _reach(s, ds), 0.99 * _reach(z, dz)
                x, s, z = x + reach_s * dx, s + reach_s * ds, z + reach_z * dz
                best = max(best, _bound(a, b, c, z[:m]))
                if abs(float(c @ x) - best) <= 1e-6 * abs(best) and np.abs(primal).max() < 1e-6:
                    break
    except (np.linalg.LinAlgError, FloatingPointError):
        pass  # at the end of what double precision gives; the best bound so far holds
    return best


def _reach(value: np.ndarray, change: np.ndarray) -> float:
    """Longest step, at most 1, that keeps everything positive."""
    falls = change < 0
    with np.errstate(over="ignore"):  # a change of next to nothing reaches as far as one likes
        steps = -value[falls] / change[falls]
    return min(1.0, float(steps.min(initial=1.0 / 0.99)))
