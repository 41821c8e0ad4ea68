"""What a step would do on CUDA, traced on a machine without a GPU.

A build of torch with CUDA runs the step on fake CUDA tensors: it dispatches to CUDA's
ops itself, but for what it would ask the GPU (``fake_cuda_without_gpu``). A CPU build
cannot run autograd on fake CUDA tensors, so the step is traced on fake CPU tensors and
*translated* while it runs (``cpu_as_cuda``). What is shared and what is not:

==============  ==========  ===========================================================
``autocast``    translated  CUDA's lists of ops and its cache of casts, at the key of
                            autocast
``kernels``     translated  the op that CUDA would call, at the key of autograd, beneath
                            every composite; torch's own formula for it then saves what
                            CUDA saves. Recurrent nets: both
``attention``   both        the kernel that the card would take, which
                            ``attention_choice`` knows
``outputs``     both        types and shapes that CUDA's kernels return, below autograd,
                            where torch's own fake kernels do not know them
``pretend``     both        what Python code is told: ``torch.cuda.is_available()``
``answers``     both        streams, events, generators and properties that it is given
``workspaces``  both        what kernels need beyond the tensors they return, with
                            ``reductions`` for the parts that those put aside,
                            ``sorting`` for what indices are sorted in,
                            ``attention_workspaces`` for attention and ``layouts`` for
                            copies
``memory``      both        the allocator's blocks, cuBLAS's workspaces
==============  ==========  ===========================================================
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

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
from ckplan.tracing.cuda.translation import Capability, TranslationNotes, composite
from ckplan.tracing.faking.python_engine import use_python_engine
from ckplan.tracing.recording.recorder import hide_constant_transfers


@contextmanager
def cpu_as_cuda(
    capability: Capability, gpu: Gpu | None = None
) -> Iterator[TranslationNotes]:
    """A scope in which fake CPU tensors act as if they were on a GPU.

    It replaces kernels and functions of torch for the whole process while it lasts.
    Real tensors go on as before, but for autocast, which has CUDA's lists.

    Args:
        capability: Compute capability of the GPU: ``(8, 0)`` is an A100.
        gpu: What else the workload may ask of it.

    Yields:
        What was translated, in words, as far as the scope has come.
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
def fake_cuda_without_gpu(
    capability: Capability, gpu: Gpu | None = None
) -> Iterator[TranslationNotes]:
    """A scope in which fake CUDA tensors need no GPU, in a build of torch with CUDA.

    Backward is stepped through, since torch's engine asks for the GPU's streams.

    Args:
        capability: Compute capability of the GPU: ``(8, 0)`` is an A100.
        gpu: What else the workload may ask of it.

    Yields:
        What was done in place of torch, in words, as far as the scope has come.
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
    """A scope in which fake tensors on a GPU that is here get what its kernels return.

    Torch knows the card and dispatches to its ops; of some, its fake kernels return
    other types or sizes than the real ones.

    Yields:
        What was done in place of torch, in words, as far as the scope has come.
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
    """A scope in which fake CUDA tensors go to kernels of ours, and recurrent nets."""
    casts = Autocast(words, "cuda").recurrent
    with (
        _registered("AutocastCUDA", casts),
        _registered("AutogradCUDA", _for_fakes(kernels)),
        _weights_apart(),
    ):
        yield


def _weights_apart() -> AbstractContextManager[object]:
    """A scope in which recurrent nets do not ask where their weights lie.

    On a GPU they lie in one buffer, which has as many bytes.
    """
    name = "flatten_parameters"
    return mock.patch.object(torch.nn.RNNBase, name, lambda self: None)


@contextmanager
def _registered(key: str, table: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """A scope in which ops have these kernels."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced is the purpose
            for name, kernel in table.items():
                library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


def _for_fakes(table: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Kernels that leave real tensors to torch's composites."""

    def guarded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        torchs = partial(composite, name)

        def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            chosen = kernel if isinstance(first, FakeTensor) else torchs
            return chosen(first, *args, **kwargs)

        return run

    return {name: guarded(name, kernel) for name, kernel in table.items()}
