"""Where a step on real tensors does not fit in memory: trace two smaller batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils import _pytree as pytree

from ckplan.errors import WorkloadError
from ckplan.extrapolate import extrapolate
from ckplan.graph import Graph
from ckplan.training.workload import Workload, tensors_of

_T = TypeVar("_T")
_Build: TypeAlias = Callable[[Any], Workload]


class DoesNotFitError(WorkloadError):
    """A step on real tensors needs more memory than there is."""

    def alone(self) -> DoesNotFitError:
        """The same without the frames that hold what filled the memory."""
        return DoesNotFitError(self.what, needed=self.needed, hint=self.hint)


def from_smaller(
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
    rows, shapes = _rows(workload), shapes_of(workload)
    del workload
    many = rows // 2
    while many >= 2:
        few = many // 2
        try:
            large, small = (trace(_cut(build, rows, n)) for n in (many, few))
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


def _rows(workload: Workload) -> int:
    """How many rows a batch has: the first size of its first tensor that has one."""
    sizes = (t.shape[0] for t in tensors_of(workload.batch) if t.dim())
    return next(sizes, 0)


def _cut(build: _Build, rows: int, wanted: int) -> _Build:
    """What makes the same workload with fewer rows of the batch."""

    def first(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, torch.Tensor) and leaf.dim()
        return leaf[:wanted].clone() if is_tensor and leaf.shape[0] == rows else leaf

    def cut(scope: Any) -> Workload:
        workload = build(scope)
        batch = pytree.tree_map(first, workload.batch)
        return replace(workload, batch=batch)

    return cut
