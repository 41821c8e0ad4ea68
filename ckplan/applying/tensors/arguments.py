"""Arguments of torch function calls, in a form that can be compared.

Forwards that call the same functions with the same numbers, on tensors of the same
geometry and data flow, run the same ops. So a recorded program is valid for every
forward that makes the same calls. Checking calls costs a fraction of recording ops.

Tensors get numbers by first appearance: 0, 1, 2 and so on if a function returned them,
-1, -2, -3 and so on if they came from outside.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ckplan.applying.tensors.geometry import KINDS, UnknownArgumentError
from ckplan.applying.tensors.numbers import bits_of, is_data
from ckplan.applying.tensors.sharing import PLAIN

_ATTENTION = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.nn.functional.multi_head_attention_forward,
)
_SEQUENCES = (tuple, list, torch.Size)
_FACTS = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_leaf",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_quantized",
        "is_sparse",
        "itemsize",
        "nbytes",
    }
)
_QUERIES = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.stride,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.element_size,
        torch.Tensor.storage_offset,
        torch.Tensor.get_device,
        torch.Tensor.__len__,
        torch.Tensor.is_conj,
        torch.Tensor.is_neg,
        torch.Tensor.untyped_storage,
        torch.Tensor.register_hook,  # runs no op, and says nothing of those that run
        torch.ops.prim.device.default,
        torch.ops.aten.lift_fresh.default,  # of from_numpy: on its way in
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        *(one.__get__ for name in _FACTS if (one := getattr(torch.Tensor, name, None))),
    }
)


_BY_SIZES = (
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.Tensor.expand,
    torch.Tensor.as_strided,
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
)
_HANDS_OUT = frozenset(("numpy", "__array__", "__dlpack__", "data_ptr"))
_WITH_SIZES = frozenset(  # in their second argument, of packed sequences for most
    {
        "gru",
        "lstm",
        "rnn_relu",
        "rnn_tanh",
        "tensor_split",
        "_pack_padded_sequence",
        "_pad_packed_sequence",
    }
)


def only_checks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether numbers that a function reads from tensors decide only if it fails."""
    if func is not torch.nn.functional.one_hot:
        return False
    return kwargs.get("num_classes", args[1] if len(args) > 1 else -1) >= 0


def takes_sizes(func: Any) -> bool:
    """Whether the sizes that a function is given show in what it returns."""
    return func in _BY_SIZES


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor.

    Raises:
        UnknownArgumentError: It has no storage of its own, such as sparse tensors
            and tensors that ``torch.func`` wraps.
    """
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        raise UnknownArgumentError from None


def version_of(tensor: torch.Tensor) -> int:
    """The version of a tensor; inference tensors have none."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def is_query(func: Any) -> bool:
    """Whether a function only queries a tensor's geometry."""
    try:
        if func in _QUERIES:
            return True
    except TypeError:
        return False
    if getattr(func, "__name__", "") != "__get__":
        return False
    return getattr(getattr(func, "__self__", None), "__name__", "") in _FACTS


def hands_out(func: Any) -> bool:
    """Whether a function exposes a tensor's bytes to writes outside torch."""
    return getattr(func, "__name__", "") in _HANDS_OUT


def moves(func: Any) -> bool:
    """Whether a function gives a tensor the bytes of another (``data``).

    No function mode sees ``set_``, which is an op.
    """
    of = getattr(getattr(func, "__self__", None), "__name__", "")
    return getattr(func, "__name__", "") == "__set__" and of == "data"


def reads_sizes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether sizes in a tensor, read outside all modes, decide which ops run."""
    if getattr(func, "__name__", "") not in _WITH_SIZES or len(args) < 2:
        return False
    sizes = args[1]
    return isinstance(sizes, torch.Tensor) and not sizes.is_floating_point()


def switches(func: Any) -> tuple[Any, ...]:
    """Global state that decides a call's ops and may change during a forward."""
    found = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )
    if func not in _ATTENTION:
        return found
    return (*found, *[is_allowed() for is_allowed in _ATTENTION_KERNELS])


def are_switched(known: tuple[Any, ...], func: Any) -> bool:
    """Whether ``switches`` are these; faster without autocast."""
    if len(known) > 4 or any(known[2:]) or torch._C._is_any_autocast_enabled():
        return known == switches(func)
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    return grad is known[0] and dtype is known[1]


_ATTENTION_KERNELS = (  # that ``torch.nn.attention.sdpa_kernel`` allows
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)
_SETTINGS = (
    torch.get_default_dtype,
    torch.is_autocast_cache_enabled,
    torch._C._get_deterministic_algorithms,
    torch._C._get_mkldnn_enabled,
    torch._C._get_cudnn_enabled,
    *_ATTENTION_KERNELS,
)
_DEVICES = ("cpu", "cuda")


def settings() -> tuple[Any, ...]:
    """Global state that decides a call's ops and may change between forwards."""
    casts = torch._C._is_any_autocast_enabled()
    types = [torch.get_autocast_dtype(device) for device in _DEVICES] if casts else ()
    return (*types, *[setting() for setting in _SETTINGS])


class Slots:
    """Numbers the tensors that functions take and return."""

    def __init__(self, meet: Callable[[torch.Tensor], None]) -> None:
        """Begin a forward; ``meet`` is called once for each outside tensor."""
        self._known: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}
        self._meet: Callable[[torch.Tensor], None] | None = meet
        self._num_inputs = 0
        self._num_made = 0
        # Tensors that calls returned, and the last call took -> writes between the two.
        self.writes: dict[int, int] = {}
        self._versions: list[int] = []  # of returned tensors when they were returned

    def freeze(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        makes_tensor: bool = False,
    ) -> tuple[Any, ...]:
        """The arguments of a call in a form that can be compared.

        The form is flat, since every call of every forward needs one: a container
        gives its type and length, then its items.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            makes_tensor: Whether the first one, if it is data, may be any data.

        Raises:
            UnknownArgumentError: An argument cannot be compared.
        """
        self.writes = {}
        found: list[Any] = [len(args)]
        if makes_tensor and args and is_data(args[0]):
            found.append(is_data)
            args = args[1:]
        self._freeze(args, found)
        if kwargs:
            found += kwargs
            self._freeze(kwargs.values(), found)
        return tuple(found)

    def _freeze(self, values: Iterable[Any], found: list[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind in PLAIN:
                found += kind, value
            elif kind in KINDS or isinstance(value, torch.Tensor):
                found += torch.Tensor, self._number(value)
            elif kind in _SEQUENCES:
                found += kind, len(value)
                self._freeze(value, found)
            elif kind is float:
                found += kind, value.hex()
            elif kind is dict and all(type(key) is str for key in value):
                found += kind, len(value), *value
                self._freeze(value.values(), found)
            elif kind is slice:
                found.append(kind)
                self._freeze((value.start, value.stop, value.step), found)
            elif isinstance(value, enum.Enum):
                found += kind, value
            else:
                bits = bits_of(value)
                if bits is None:
                    raise UnknownArgumentError
                found += kind, bits

    def returned(self, value: Any) -> None:
        """Number the tensors that a function returned."""
        if isinstance(value, torch.Tensor):
            known = self._known.get(id(value))
            if known is None or known[1]() is not value:
                self._known[id(value)] = (self._num_made, weakref.ref(value))
                self._num_made += 1
                self._versions.append(version_of(value))
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.returned(item)

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that some call took or returned."""
        return self._known[id(tensor)][0]

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that some call took came from outside."""
        number, _ = self._known.get(id(tensor), (0, None))
        return number < 0

    def resume(
        self,
        made: Sequence[weakref.ref[torch.Tensor]],
        met: Sequence[weakref.ref[torch.Tensor]],
    ) -> None:
        """Go on after tensors were numbered elsewhere, in these orders."""
        self._num_made, self._num_inputs = len(made), len(met)
        self._versions = [0] * len(made)  # not known
        numbers = (*range(len(made)), *range(-1, -1 - len(met), -1))
        for number, one in zip(numbers, (*made, *met), strict=True):
            tensor = one()
            if tensor is not None:
                self._known[id(tensor)] = (number, one)

    def close(self) -> None:
        """End the forward; drop all references, so that no cycle remains."""
        self._known.clear()
        self._meet = None

    def _number(self, tensor: torch.Tensor) -> int:
        known = self._known.get(id(tensor))
        number = known[0] if known is not None and known[1]() is tensor else None
        if number is not None:
            if number >= 0 and not tensor.is_inference():
                self.writes[number] = tensor._version - self._versions[number]
            return number
        self._num_inputs += 1
        self._known[id(tensor)] = (-self._num_inputs, weakref.ref(tensor))
        assert self._meet is not None, "internal error: a call after the forward"
        self._meet(tensor)
        return -self._num_inputs
