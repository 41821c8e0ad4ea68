"""What torch logs of errors on fake tensors, which ckplan reports or avoids."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def without_logs_of_fakes() -> Iterator[None]:
    """A scope in which torch does not log what fails on fake tensors."""
    before, _LOGGER.disabled = _LOGGER.disabled, True
    try:
        yield
    finally:
        _LOGGER.disabled = before
