"""Trace a step for CUDA on a machine without a GPU.

A build of torch with CUDA runs the step on fake CUDA tensors and dispatches to CUDA's
ops itself; only queries to the GPU are replaced (``fake_cuda_without_gpu``). A CPU
build cannot run autograd on fake CUDA tensors. There the step runs on fake CPU tensors
and is *translated* while it runs (``cpu_as_cuda``). The modules serve these ways:

=================  ==========  =========================================================
``autocast``       translated  CUDA's lists of ops and its cache of casts, at autocast's
                               dispatch key
``kernels``        translated  the ops that CUDA calls, at autograd's dispatch key,
                               below composites; torch's formulas then save the same
                               tensors as on CUDA. Recurrent nets: both
``attention``      both        the attention kernel that the card takes, chosen by
                               ``sdpa_backend``
``outputs``        both        dtypes and shapes that CUDA's kernels return, below
                               autograd, where torch's fake kernels differ
``patched_torch``  both        answers to Python code, such as
                               ``torch.cuda.is_available()``
``fake_runtime``   both        fake streams, events, generators and device properties
``workspaces``     both        bytes that kernels need beyond their outputs, with
                               ``simulating/reductions`` for partial results,
                               ``sorting`` for sorted indices,
                               ``attention_workspaces`` for attention and
                               ``layouts`` for copies
``memory``         both        the allocator's blocks, cuBLAS's workspaces
=================  ==========  =========================================================
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ckplan.gpus import Gpu
from ckplan.tracing.cuda.attention import Attention
from ckplan.tracing.cuda.autocast import Autocast
from ckplan.tracing.cuda.kernels import Kernels
from ckplan.tracing.cuda.outputs import Outputs
from ckplan.tracing.cuda.patched_torch import (
    amp_without_gpu,
    cuda_calls_on_cpu,
    patched_cuda_queries,
)
from ckplan.tracing.cuda.translation import (
    Capability,
    TranslationNotes,
    composite,
    overload,
)
from ckplan.tracing.faking.python_engine import use_python_engine
from ckplan.tracing.recording.recorder import hide_constant_transfers


@contextmanager
def cpu_as_cuda(
    capability: Capability, gpu: Gpu | None = None
) -> Iterator[TranslationNotes]:
    """A scope in which fake CPU tensors act as if they were on a GPU.

    It replaces kernels and functions of torch for the whole process while it lasts.
    Real tensors are not affected, except that autocast uses CUDA's lists.

    Args:
        capability: Compute capability of the GPU, such as ``(8, 0)`` for an A100.
        gpu: The card, for further queries of the workload.

    Yields:
        Notes on what was translated so far.
    """
    words = TranslationNotes()
    autocast = Autocast(words)
    kernels = Kernels(words).table | Attention(capability, words).table
    with ExitStack() as stack:
        stack.enter_context(_registered("AutocastCPU", autocast.kernels))
        stack.enter_context(_registered("AutogradCPU", _for_fakes(kernels)))
        stack.enter_context(autocast.switched())
        stack.enter_context(patched_cuda_queries(capability, words, gpu))
        stack.enter_context(amp_without_gpu())
        stack.enter_context(cuda_calls_on_cpu(words))
        outputs = stack.enter_context(Outputs(words))
        stack.enter_context(outputs.patched_optimizer_queries())
        yield words


@contextmanager
def compiled_as_cuda(capability: Capability) -> Iterator[TranslationNotes]:
    """A scope in which torch's compiler traces fake CPU tensors as if on a GPU.

    It decomposes dropout as for a GPU anyway. Queries of the workload's code are not
    answered: the compiler would trace the answers.

    Args:
        capability: Compute capability of the GPU.

    Yields:
        Notes on what was translated so far.
    """
    words = TranslationNotes()
    autocast = Autocast(words)
    kernels = Kernels(words).table | Attention(capability, words).table
    del kernels["dropout"]
    with (
        _registered("AutocastCPU", autocast.kernels),
        _registered("AutogradCPU", _for_fakes(kernels)),
        autocast.switched(),
        amp_without_gpu(),
    ):
        yield words


@contextmanager
def fake_cuda_without_gpu(
    capability: Capability, gpu: Gpu | None = None
) -> Iterator[TranslationNotes]:
    """A scope in which fake CUDA tensors need no GPU, in a build of torch with CUDA.

    Backward runs in the Python engine, since torch's engine needs the GPU's streams.

    Args:
        capability: Compute capability of the GPU, such as ``(8, 0)`` for an A100.
        gpu: The card, for further queries of the workload.

    Yields:
        Notes on what was replaced in torch so far.
    """
    words = TranslationNotes()
    kernels = Kernels(words).recurrent | Attention(capability, words).table
    with ExitStack() as stack:
        stack.enter_context(_instead_of_torchs(kernels, words))
        stack.enter_context(patched_cuda_queries(capability, words, gpu))
        stack.enter_context(amp_without_gpu())
        stack.enter_context(use_python_engine())
        stack.enter_context(hide_constant_transfers())
        outputs = stack.enter_context(Outputs(words))
        stack.enter_context(outputs.patched_optimizer_queries())
        yield words


@contextmanager
def fake_cuda_with_gpu() -> Iterator[TranslationNotes]:
    """A scope that corrects outputs of fake tensors on a local GPU.

    Torch dispatches to the card's ops itself. Some of its fake kernels return other
    dtypes or sizes than the real ones.

    Yields:
        Notes on what was replaced in torch so far.
    """
    words = TranslationNotes()
    with ExitStack() as stack:
        stack.enter_context(_instead_of_torchs(Kernels(words).recurrent, words))
        outputs = stack.enter_context(Outputs(words))
        stack.enter_context(outputs.patched_optimizer_queries())
        yield words


@contextmanager
def _instead_of_torchs(
    kernels: Mapping[str, Callable[..., Any]], words: TranslationNotes
) -> Iterator[None]:
    """A scope that replaces kernels of fake CUDA tensors, also of recurrent nets."""
    casts = Autocast(words, "cuda").recurrent
    with (
        _registered("AutocastCUDA", casts),
        _registered("AutogradCUDA", _for_fakes(kernels)),
        _weights_apart(),
    ):
        yield


def _weights_apart() -> AbstractContextManager[object]:
    """A scope in which recurrent nets do not flatten their weights.

    On a GPU the weights are in one buffer with the same number of bytes.
    """
    name = "flatten_parameters"
    return mock.patch.object(torch.nn.RNNBase, name, lambda self: None)


@contextmanager
def _registered(key: str, table: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """A scope in which these kernels are registered at a dispatch key."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of replaced kernels
            for name, kernel in table.items():
                library.impl(name, kernel, key)
        _forget_kernels(table)
        yield
    finally:
        library._destroy()
        _forget_kernels(table)


def _forget_kernels(names: Iterable[str]) -> None:
    """Let torch's compiler look for kernels again: it remembers those it has run."""
    for name in names:
        overload(name)._dispatch_cache.clear()


def _for_fakes(table: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Wrap kernels so that real tensors still run torch's composites.

    So does what the compiler traces in another thread, which is not for a GPU.
    """
    here = threading.get_ident()

    def is_traced(tensor: torch.Tensor) -> bool:
        by_compiler = isinstance(tensor, FunctionalTensor)
        return isinstance(tensor, FakeTensor) or (
            by_compiler and threading.get_ident() == here
        )

    def guarded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        torchs = partial(composite, name)

        def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            chosen = kernel if is_traced(first) else torchs
            return chosen(first, *args, **kwargs)

        return run

    return {name: guarded(name, kernel) for name, kernel in table.items()}
