"""Linear programs, solved by HiGHS.

Source: Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import highspy


_SCALE = 1e4  # factor on costs; their differences are below the solver's tolerance
_METHODS: tuple[dict[str, str | float], ...] = (
    {"solver": "simplex"}, {"solver": "ipm"}, {"solver": "simplex", "presolve": "off"},
)  # fmt: skip
_TOLERANCES = dict.fromkeys(("primal_feasibility_tolerance", "dual_feasibility_tolerance"), 1e-9)


class SolverFailed(RuntimeError):
    """The solver found neither an optimum nor a proof of infeasibility."""


@dataclass
class LinearProgram:
    """Linear program: minimize cost . x over rows `low <= coefficients . x <= high` and bounds of the variables."""

    costs: list[float] = field(default_factory=list)
    lowers: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    rows: list[tuple[Mapping[int, float], float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Solver with the last solution, valid while only bounds change
        self._solver: highspy._core._Highs | None = None

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
        """Change the bound of a row of `at_least`."""
        coefficients, low, high = self.rows[row]
        if bound != low:
            self.rows[row] = coefficients, bound, high
            if self._solver is not None:
                self._solver.changeRowBounds(row, bound, high)

    def solve(self) -> np.ndarray | None:
        """Return a point of least cost; None when no point satisfies every row.

        After changes of bounds only, the solver starts from its last solution and takes a small part of the time.

        Raises:
            SolverFailed: The solver ended without an answer.
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
        """Return a solver with the whole program."""
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
            raise SolverFailed("HiGHS refuses the program: a number of it is not finite")
        return solver
