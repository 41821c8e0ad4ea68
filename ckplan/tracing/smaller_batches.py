"""Where a step on real tensors does not fit in memory: trace two smaller batches."""

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
    """A step on real tensors needs more memory than there is."""

    def without_traceback(self) -> DoesNotFitError:
        """The same without the frames that hold what filled the memory."""
        return DoesNotFitError(self.what, needed=self.needed, hint=self.hint)


def profile_smaller_batches(
    build: _Build,
    trace: Callable[[_Build], _T],
    as_graph: Callable[[_T], Graph],
    shapes_of: Callable[[Workload], Any],
    failure: DoesNotFitError,
) -> Graph:
    """Profile the two largest halves of a batch that fit, and draw on to the whole.

    Args:
        build: Makes the workload.
        trace: Records a step of what another ``build`` makes.
        as_graph: Measures what was recorded.
        shapes_of: The fingerprint of a batch.
        failure: Raised if no half fits, either.

    Raises:
        DoesNotFitError: The batch cannot be made small enough.
        GraphError: The step runs other ops at another batch.
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
    """What makes the same workload with fewer rows of the batch."""
    return lambda scope: first_rows(build(scope), rows)
