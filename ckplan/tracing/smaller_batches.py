"""Trace two smaller batches if a step on real tensors does not fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from ckplan.errors import WorkloadError
from ckplan.graph.extrapolate import extrapolate
from ckplan.graph.graph import Graph
from ckplan.training.workload import Workload, first_rows, rows_of

_T = TypeVar("_T")
_Build: TypeAlias = Callable[[Any], Workload]


class DoesNotFitError(WorkloadError):
    """A step on real tensors needs more memory than the machine has."""

    def without_traceback(self) -> DoesNotFitError:
        """The same error without the frames whose tensors filled the memory."""
        return DoesNotFitError(self.what, needed=self.needed, hint=self.hint)


def profile_smaller_batches(
    build: _Build,
    trace: Callable[[_Build], _T],
    as_graph: Callable[[_T], Graph],
    shapes_of: Callable[[Workload], Any],
    failure: DoesNotFitError,
) -> Graph:
    """Profile two fractions of a batch that fit, and extrapolate to the whole batch.

    The batch is halved until a fraction and its half both fit.

    Args:
        build: Makes the workload.
        trace: Records a step of the workload that another ``build`` makes.
        as_graph: Measures a recorded step and builds its graph.
        shapes_of: Gives the fingerprint of a workload's batch.
        failure: Raised if no fraction fits either.

    Raises:
        DoesNotFitError: The batch cannot be made small enough.
        GraphError: The step runs different ops at the two batch sizes.
    """
    workload = build(None)
    rows, shapes = rows_of(workload), shapes_of(workload)
    del workload
    many = rows // 2
    while many >= 2:
        few = many // 2
        try:
            large, small = (trace(_cut(build, n)) for n in (many, few))
        except DoesNotFitError:
            many = few
            continue
        graph = extrapolate(as_graph(small), as_graph(large), (few, many, rows))
        said = (
            f"extrapolated linearly from batches of {few} and {many} rows to {rows}: "
            f"{failure.what}"
        )
        fingerprint = {**graph.fingerprint, "batch": shapes}
        return replace(graph, fingerprint=fingerprint, notes=(*graph.notes, said))
    raise failure


def _cut(build: _Build, rows: int) -> _Build:
    """A builder of the same workload with fewer rows in the batch."""
    return lambda scope: first_rows(build(scope), rows)
