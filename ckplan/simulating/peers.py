"""The rate at which the card of a step sends to other cards of its machine."""

from __future__ import annotations

from ckplan import gpus
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph


def peer_rate(graph: Graph) -> int | None:
    """Bytes per second to the others, and from them at once; None if not known."""
    try:
        return gpus.find(str(graph.options["gpu"])).peer
    except (KeyError, CkplanError):
        return None
