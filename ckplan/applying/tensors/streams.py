"""Order of streams for tensors rebuilt on one and used on another."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class StreamOrder:
    """The stream that a region's tensors were last made or used on.

    Autograd runs a node on the stream of its forward op, and the node's saved tensors
    are rebuilt there. If forward ran on several streams, a value can be made on one
    and needed on another.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin on the stream of a device that is current now."""
        self._device = device
        self._last = torch.cuda.current_stream(device)

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current stream wait for the last one, if it is another.

        Args:
            tensors: Tensors that may be read there; their bytes stay allocated.
        """
        now = torch.cuda.current_stream(self._device)
        if now == self._last:
            return
        now.wait_stream(self._last)
        for tensor in tensors:
            if tensor.device == self._device:
                tensor.record_stream(now)
        self._last = now


def stream_order(tensors: Iterable[torch.Tensor]) -> StreamOrder | None:
    """The stream order for tensors; None if they are on no GPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else StreamOrder(device)
