"""What `tune` takes as the samples of a batch, and a doubt about it."""

from __future__ import annotations

from collections.abc import Mapping

from ckplan.graph.batch import row_dims
from ckplan.graph.graph import Graph
from ckplan.tuning.search import WaySearch

_OF_STEP = "step."  # names of tensors that the workload's own step takes
_GROWS = 1.01  # FLOPs per sample at a larger batch, relative to a smaller one


def dims_and_doubt(search: WaySearch) -> tuple[dict[str, int], str | None]:
    """Name of a tensor -> the dimension that was changed; and a note, if samples mix.

    A forward that does more for a sample the more there are compares samples, or its
    batch is something else, such as the time of a sequence.

    Args:
        search: Of a way whose batches were recorded.
    """
    both = (batches.recorded for batches in (search.one, search.several))
    recorded = next((found for found in both if len(found) > 1), None)
    if recorded is None:
        return {}, None
    few, many = sorted([*recorded][:2])  # the first ones are near the workload's own
    small, large = (_forward_flops(recorded[n]) / n for n in (few, many))
    found = row_dims(recorded[few], recorded[many])
    dims = {name.removeprefix(_OF_STEP): dim for name, dim in found.items()}
    doubt = None
    if large > small * _GROWS:
        doubt = (
            f"FLOPs per sample grow by {large / small - 1:.0%} from batch {few} to "
            f"{many}: samples are compared with each other, or are at another "
            "dimension (--batch-dim)"
        )
    return dims, doubt


def dims_words(dims: Mapping[str, int]) -> str:
    """The dimensions of rows in words.

    >>> dims_words({"ids": 0, "labels": 0}), dims_words({"0": 1, "mask": 0})
    ('dimension 0 of ids, labels', 'dimension 1 of input 0; dimension 0 of mask')
    """
    named: dict[int, list[str]] = {}
    for name, dim in dims.items():
        named.setdefault(dim, []).append(f"input {name}" if name.isdigit() else name)
    parts = (f"dimension {dim} of {', '.join(found)}" for dim, found in named.items())
    return "; ".join(parts)


def _forward_flops(graph: Graph) -> int:
    return sum(op.flops for op in graph.ops[: graph.num_forward])
