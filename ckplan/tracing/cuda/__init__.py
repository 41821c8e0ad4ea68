"""What a step would do on CUDA, traced on a machine without a GPU.

A build of torch without CUDA cannot run autograd on fake CUDA tensors, so the step is
traced on fake CPU tensors and *translated* while it runs, at four levels:

==============  =======================================================================
``autocast``    CUDA's lists of ops and its cache of casts, at the key of autocast
``kernels``,    the op that CUDA would call, at the key of autograd, beneath every
``attention``   composite; torch's own formula for it then saves what CUDA saves
``outputs``     types and shapes that CUDA's kernels return, below autograd
``pretend``     what Python code is told: ``torch.cuda.is_available()``, devices
``memory``      what kernels and the allocator hold beyond tensors
==============  =======================================================================
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ckplan.tracing.cuda.attention import Attention
from ckplan.tracing.cuda.autocast import Autocast
from ckplan.tracing.cuda.kernels import Kernels
from ckplan.tracing.cuda.outputs import Outputs
from ckplan.tracing.cuda.pretend import pretended
from ckplan.tracing.cuda.words import Capability, Words, overload


@contextmanager
def translated(capability: Capability) -> Iterator[Words]:
    """A scope in which fake CPU tensors act as if they were on a GPU.

    It replaces kernels and functions of torch for the whole process while it lasts.
    Real tensors go on as before, but for autocast, which has CUDA's lists.

    Args:
        capability: Compute capability of the GPU: ``(8, 0)`` is an A100.

    Yields:
        What was translated, in words, as far as the scope has come.
    """
    words = Words()
    autocast = Autocast(words)
    attention = Attention(capability, words)
    tables = (
        ("AutocastCPU", autocast.kernels),
        ("AutogradCPU", _for_fakes(Kernels(words).table | attention.table)),
    )
    with ExitStack() as stack:
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced is the purpose
            for key, table in tables:
                for name, kernel in table.items():
                    library.impl(name, kernel, key)
        stack.enter_context(autocast.switched())
        stack.enter_context(pretended(capability, words))
        outputs = stack.enter_context(Outputs(words))
        stack.enter_context(outputs.answering())
        yield words


def _for_fakes(table: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Kernels that leave real tensors to torch's composites."""

    def guarded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        composite = overload(name).decompose

        def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            chosen = kernel if isinstance(first, FakeTensor) else composite
            return chosen(first, *args, **kwargs)

        return run

    return {name: guarded(name, kernel) for name, kernel in table.items()}
