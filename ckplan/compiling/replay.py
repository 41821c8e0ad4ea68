"""Replay generated code without running kernels: live bytes, exact.

The wrapper that Inductor generates for forward or backward is Python: it allocates
buffers, calls kernels on them, reuses and frees them. Here it runs on fake tensors,
which have sizes and no bytes; kernels do nothing, and ``ledger.py`` counts. Kernels
that are not generated (matrix products, convolutions, sorts) may allocate scratch
memory. It is measured once per distinct call, by running that kernel alone. On a card,
what cuBLAS keeps counts as held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ckplan.compiling.ledger import Ledger, Meter
from ckplan.compiling.lowering import Code, Lowered
from ckplan.compiling.torch_names import (
    ALIGNED,
    CHECKS,
    COMPILES_KERNELS,
    EXTERN_KERNELS,
    MAKES,
    FakeTensorMode,
)
from ckplan.compiling.workspaces import KernelBytes
from ckplan.errors import ApplyError
from ckplan.training.workload import device_of


@dataclass(frozen=True, slots=True)
class Replayed:
    """Bytes of one forward and backward."""

    # By inputs: parameters, buffers and the batch; on a card, by its libraries, too.
    held_bytes: int
    forward_peak_bytes: int  # above those
    saved_bytes: int  # alive between forward and backward, outputs included
    backward_peak_bytes: int
    gradient_bytes: int  # alive at the end
    library_bytes: int = 0  # of those held, what cuBLAS keeps
    # Most bytes of kernels that are not generated, by op and shapes.
    kernel_bytes: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, parameters and batch included."""
        return self.held_bytes + self.step_peak_bytes

    @property
    def step_peak_bytes(self) -> int:
        """Most bytes that the step allocates at once."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    @property
    def peak_at(self) -> str:
        """The half of the step that has the peak."""
        forward = self.forward_peak_bytes >= self.backward_peak_bytes
        return "compiled forward" if forward else "compiled backward"


def replay(lowered: Lowered, num_outputs: int) -> Replayed:
    """Replay one step: forward, then backward.

    The caller is taken to hold every output until backward ends, and the gradient of a
    scalar output, which ``loss.backward()`` makes. Gradients do not exist before the
    step and are alive at its end. Autograd copies those that are not laid out as their
    parameter, such as a convolution's, one after the other, before backward ends.

    Args:
        lowered: The generated code.
        num_outputs: How many outputs of forward are not saved values.

    Raises:
        ApplyError: The code does something that cannot be replayed.
    """
    kernels = KernelBytes()
    with _replay_errors():
        found = _replay(lowered, num_outputs, kernels)
        if kernels.measure():
            found = _replay(lowered, num_outputs, kernels)
    return found


def replay_known(lowered: Lowered, num_outputs: int) -> Replayed | None:
    """Replay a step as ``replay`` does; None where kernels are to be measured first."""
    kernels = KernelBytes()
    with _replay_errors():
        found = _replay(lowered, num_outputs, kernels)
    return None if kernels.wants_any else found


@contextmanager
def _replay_errors() -> Iterator[None]:
    try:
        yield
    except ApplyError:
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise ApplyError(
            f"cannot replay the generated code: {type(error).__name__}: {said}",
            needed="ops that run on fake tensors, and alone on zeros",
            hint="torch.compile without a plan, or ckplan.apply; please report it",
        ) from error


def replay_alone(code: Code) -> int:
    """Bytes that code without a backward allocates at once, beyond its inputs.

    Raises:
        Exception: Whatever the code raises on fake tensors.
    """
    kernels = KernelBytes()
    found = _replay_alone(code, kernels)
    return _replay_alone(code, kernels) if kernels.measure() else found


def _replay_alone(code: Code, kernels: KernelBytes) -> int:
    ledger = Ledger(device_of(code.inputs).type)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        given = [_fake(value) for value in code.inputs]
        for value in given:
            ledger.ignore(value)
        with Meter(ledger, kernels):
            _call(code, ledger, kernels, list(given))
    return ledger.peak_bytes


def _replay(lowered: Lowered, num_outputs: int, kernels: KernelBytes) -> Replayed:
    device = device_of(lowered.forward.inputs)
    ledger = Ledger(device.type)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        given = [_fake(value) for value in lowered.forward.inputs]
        held_bytes = sum(ledger.ignore(value) for value in given)
        with Meter(ledger, kernels):
            made = _call(lowered.forward, ledger, kernels, list(given))
            outputs, saved = made[:num_outputs], _sizes_first(made[num_outputs:])
            del made
            forward_peak_bytes, saved_bytes = ledger.peak_bytes, ledger.live_bytes
            library_bytes = kernels.end_thread(device)
            ledger.peak_bytes = 0
            gradients_in = lowered.backward.inputs[len(saved) :]
            tangents = [_fake(value) for value in gradients_in]
            roots = [t for t in tangents if isinstance(t, torch.Tensor) and not t.dim()]
            saved += tangents
            del tangents
            gradients = _call(lowered.backward, ledger, kernels, saved)
            _accumulate(gradients, lowered.forward.inputs)
            backward_peak_bytes, gradient_bytes = ledger.peak_bytes, ledger.live_bytes
            library_bytes += kernels.end_thread(device)
            del outputs, roots, gradients
    return Replayed(
        held_bytes + library_bytes,
        forward_peak_bytes,
        saved_bytes,
        backward_peak_bytes,
        gradient_bytes,
        library_bytes,
        kernels.seen,
    )


def _sizes_first(saved: list[Any]) -> list[Any]:
    """What forward saves, in the order in which backward takes it."""
    return sorted(saved, key=lambda one: isinstance(one, torch.Tensor))


def _accumulate(gradients: list[Any], inputs: Sequence[Any]) -> None:
    """Copy the gradients that autograd does not take as they are."""
    for place, (gradient, one) in enumerate(zip(gradients, inputs, strict=False)):
        if isinstance(gradient, torch.Tensor):
            is_shared = any(gradient is other for other in gradients[place + 1 :])
            if is_shared or not _laid_out_alike(gradient, one):
                del gradient
                gradients[place] = _fake(one)


def _laid_out_alike(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether strides are equal in all dimensions that have any."""
    strides = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(one == other for size, one, other in strides if size != 1)


def _fake(value: Any) -> Any:
    """A fresh tensor of the same geometry, under the active fake mode."""
    if not isinstance(value, torch.Tensor):
        return value
    how: Any = {"dtype": value.dtype, "device": value.device}
    return torch.empty_strided(value.shape, value.stride(), **how)


def _as_it_is(value: Any) -> Any:
    return value


class _Nothing:
    """Stands in for whatever compiles kernels, and for the kernels."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class _ExternKernels:
    """Kernels that are not generated: only their memory counts."""

    def __init__(self, ledger: Ledger, kernels: KernelBytes) -> None:
        self._ledger, self._kernels = ledger, kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def kernel(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            if out is None:
                return getattr(torch.ops.aten, name)(*args, **kwargs)
            call = getattr(torch, name)
            given = {**kwargs, "out": out}
            self._ledger.spike(self._kernels.bytes_of(call, args, given))
            return out

        return kernel


def _call(
    code: Code, ledger: Ledger, kernels: KernelBytes, args: list[Any]
) -> list[Any]:
    """Run a generated wrapper; like the real one, it consumes its arguments."""
    lines = code.source.splitlines()
    replaced = (COMPILES_KERNELS, EXTERN_KERNELS)
    source = "\n".join(line for line in lines if line not in replaced)
    names: dict[str, Any] = {
        "__name__": "replayed",
        "AsyncCompile": _Nothing(),
        "extern_kernels": _ExternKernels(ledger, kernels),
    }
    exec(compile(source, "generated code", "exec"), names)

    def view(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
        start = tensor.storage_offset() + offset
        return torch.as_strided(tensor, size, stride, start)

    def empty(on: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=on)

    names.update(
        dict.fromkeys(CHECKS, _Nothing()),
        **{name: partial(empty, device) for name, device in MAKES.items()},
        **{ALIGNED: _as_it_is},
        reinterpret_tensor=view,
        **code.constants,
    )
    return list(names["call"](args))
