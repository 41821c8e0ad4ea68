"""Copies of this process, made by a fork, that work beside it."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any


def start_copy(work: Callable[..., object], *args: Any) -> BaseProcess:
    """Start a copy that calls a function, says nothing, and is not interrupted.

    It has the memory of this process, but not its threads: those of kernels are idle.

    Raises:
        OSError: There is no memory for one.
    """
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_silently, args=(work, *args), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _silently(work: Callable[..., object], *args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    sys.stdout = sys.stderr = io.StringIO()  # in a notebook, these have no number
    work(*args)
