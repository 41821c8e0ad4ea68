"""A program of binary variables, row by row, solved by HiGHS (extra ``milp``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckplan.errors import CkplanError
from ckplan.solving.solution import ExactResult

_UNIT = 1e-9  # seconds per unit of the objective
_RELATIVE_GAP = 1e-6
_OPTIMAL, _LIMIT, _INFEASIBLE = 0, 1, 2  # status codes of scipy


def check_solver() -> None:
    """Raise early if the solver is missing.

    Raises:
        CkplanError: scipy, which brings HiGHS, is not installed.
    """
    try:
        import scipy.optimize  # noqa: F401 - checks availability only
    except ImportError:
        raise CkplanError(
            "cannot solve exactly: scipy, which brings HiGHS, is not installed",
            needed="the extra 'milp'",
            hint="pip install 'ckplan[milp]'",
        ) from None


class BinaryProgram:
    """Minimize a sum of costs; every row is a sum of terms within a limit."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._rows: list[tuple[dict[int, float], float]] = []  # sum <= limit
        self._known: dict[tuple[Any, ...], int] = {}

    def knows(self, *key: Any) -> bool:
        """Whether a variable with this key exists."""
        return key in self._known

    def var(self, *key: Any, cost: float = 0.0) -> int:
        """Return the variable of a key; a new one gets the cost, in seconds."""
        if key not in self._known:
            self._known[key] = len(self._costs)
            self._costs.append(cost / _UNIT)
        return self._known[key]

    def row(self, terms: Mapping[int, float], limit: float) -> None:
        """Add the constraint that the sum of terms is at most a limit."""
        self._rows.append((dict(terms), limit))

    def solve(
        self,
        time_limit_seconds: float,
        step_seconds: float,
        waiting_seconds: float = 0.0,
    ) -> ExactResult:
        """Minimize with HiGHS; results are fractions of ``step_seconds``.

        Args:
            time_limit_seconds: Seconds after which the search stops.
            step_seconds: Of one batch.
            waiting_seconds: Of these, that the costs may fill without an overhead.

        Raises:
            CkplanError: HiGHS fails.
        """
        if any(not terms and limit < 0 for terms, limit in self._rows):
            return ExactResult(True, None, 0.0)
        if not self._costs or not step_seconds:
            return ExactResult(True, 0.0, 0.0)
        import numpy
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows = [(terms, limit) for terms, limit in self._rows if terms]
        entries = [
            (size, row, var)
            for row, (terms, _) in enumerate(rows)
            for var, size in terms.items()
        ]
        sizes, of_row, of_var = zip(*entries, strict=True)
        matrix = csr_array(
            (numpy.array(sizes, float), (of_row, of_var)),
            shape=(len(rows), len(self._costs)),
        )
        limits = numpy.array([limit for _, limit in rows], float)
        found = milp(
            numpy.array(self._costs),
            constraints=LinearConstraint(matrix, ub=limits),
            bounds=Bounds(0, 1),
            integrality=numpy.ones(len(self._costs)),
            options={
                "time_limit": time_limit_seconds,
                "mip_rel_gap": _RELATIVE_GAP,
            },
        )
        if found.status == _INFEASIBLE:
            return ExactResult(True, None, 0.0)
        if found.status not in (_OPTIMAL, _LIMIT):
            raise CkplanError(
                f"cannot solve exactly: HiGHS reports {found.message}",
                needed="a graph whose integer program HiGHS can solve",
                hint="solve without --method milp",
            )
        scale = _UNIT / step_seconds
        overhead = None if found.x is None else max(float(found.fun) * scale, 0.0)
        bound = float(found.mip_dual_bound or 0.0) * scale
        bound -= waiting_seconds / step_seconds
        return ExactResult(found.status == _OPTIMAL, overhead, max(bound, 0.0))
