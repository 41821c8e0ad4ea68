"""Which backward runs, and whether another may follow through the same graph."""

from __future__ import annotations

import torch

NOT_KEPT = -1


def kept_backward() -> int:
    """The number of a backward with ``retain_graph=True``; else ``NOT_KEPT``.

    With ``create_graph=True``, the graph of backward holds what it takes, which then
    need not be made anew.
    """
    number = torch._C._current_graph_task_id()
    if number < 0 or torch.is_grad_enabled():
        return NOT_KEPT
    keeps = torch._C._autograd._get_current_graph_task_keep_graph()
    return number if keeps else NOT_KEPT
