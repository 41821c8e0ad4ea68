"""What is rebuilt on one stream of a GPU and used on another, in the right order."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class StreamOrder:
    """The stream that a region's tensors were last made or used on.

    Autograd runs a node on the stream that its forward op ran on, and what the node
    asks for is rebuilt there. Where forward ran on several streams, a value is made on
    one and wanted on another.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin on the stream of a device that is current now."""
        self._device = device
        self._last = torch.cuda.current_stream(device)

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current stream wait for the last one, if it is another.

        Args:
            tensors: What may be read there; until then, its bytes go to nobody else.
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
    """For what is rebuilt from tensors; None if they are on no GPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else StreamOrder(device)
