"""Rebuild what a region dropped, op by op, with the module's own forward untouched.

A ``Rebuilder`` belongs to one forward of a region. When autograd wants a dropped
tensor, just the ops that it needs run again. Which ops those are was written down while
that forward ran (``record.py``), or in an earlier forward that this one was seen to
repeat call by call (``replay.py``). So another shape, another branch or another number
gives another program, never a stale one.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from ckplan.applying.calls import version_of
from ckplan.applying.likeness import Likeness, is_alike
from ckplan.applying.random_state import random_state, set_random_state
from ckplan.encodings import Encoded, decode
from ckplan.errors import ApplyError
from ckplan.program import Flow, Program, Rebuild

_Place: TypeAlias = tuple[torch.device, torch.Generator | None]
"""Whose random state: a generator, or the device's own."""


class Ref(NamedTuple):
    """A tensor argument: a view of a value."""

    value: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False


class Step(NamedTuple):
    """An op that ran."""

    func: Any  # an OpOverload
    args: list[Any]  # tensors as Ref, also inside lists
    kwargs: dict[str, Any]
    generator: torch.Generator | None
    device: torch.device
    in_grad_mode: bool  # some kernels ask: LSTMs keep a workspace


@dataclass(slots=True)
class Held:
    """A value that a region keeps to rebuild from."""

    tensor: torch.Tensor
    version: int
    offset: int  # in its storage, during forward
    size: torch.Size  # during forward

    def moved(self, region: str) -> int:
        """By how much it now lies elsewhere in its storage; 0 for most.

        Raises:
            ApplyError: It is not what it was in forward.
        """
        tensor = self.tensor
        if version_of(tensor) != self.version:
            shape = tuple(tensor.shape)
            raise ApplyError(
                f"cannot rebuild {region}: a tensor of shape {shape} that it reads "
                f"was changed in place after its forward (version {self.version} then, "
                f"{version_of(tensor)} now)",
                needed="parameters and inputs that stay as they are until backward",
                hint="update parameters after backward, or leave this call out",
            )
        if tensor.size() != self.size:  # DeepSpeed lets go of a parameter's data
            raise _not_gathered(region, self.size)
        return tensor.storage_offset() - self.offset


@dataclass(slots=True)
class Handle:
    """Where saved tensors of a forward find what rebuilds them."""

    rebuilder: Rebuilder | None = None
    # Values that autograd saved before an op filled them -> what they are then.
    filled: dict[int, int] = field(default_factory=dict)


class Kept(NamedTuple):
    """A saved tensor that stays, and the version autograd expects."""

    tensor: torch.Tensor
    version: int
    name: str  # of the region, for errors


@dataclass(slots=True, eq=False)
class Dropped:
    """A saved tensor that is rebuilt when it is wanted."""

    handle: Handle
    ref: Ref
    part: int  # the inner region that saved it, counted from 1
    like: Likeness | None = None  # what it looked like, in a first forward
    tensor: torch.Tensor | None = None  # once wanted, until its node lets this go


class Rebuilder:
    """What one forward of a region leaves behind for its backward."""

    def __init__(
        self,
        name: str,
        program: Program,
        steps: Mapping[int, Step],
        held: Mapping[int, Held],
        encoded: Mapping[int, Encoded],
        states: Mapping[int, torch.Tensor],
    ) -> None:
        """Take over what a forward leaves behind.

        Args:
            name: What errors call the region.
            program: What rebuilds its dropped values.
            steps: At least those that the program runs.
            held: Values to rebuild from, at least those that the program holds.
            encoded: Values in a smaller form, at least those that it decodes.
            states: Of the random generator before every random step that it runs.
        """
        self.name = name
        runs = program.runs()
        self._left = _Leftovers(
            name,
            program.flow,
            steps,
            {value: held[value] for value in program.holds},
            {value: encoded[value] for value in program.decodes},
            {step: states[step] for step in runs.keys() & states.keys()},
            runs,
        )
        for one in self._left.held.values():
            one.version = version_of(one.tensor)
        values = {value: one.tensor for value, one in self._left.held.items()}
        self._rebuild = Rebuild(program, _Kernels(self._left, values))
        self._warned = False

    def unpack(self, ref: Ref, part: int) -> torch.Tensor:
        """The dropped tensor again.

        Args:
            ref: The tensor.
            part: The inner region that saved it, counted from 1; 0 if none did.

        Raises:
            ApplyError: What it is rebuilt from changed.
        """
        level = self._rebuild.level(ref.value, part)
        values = level.machine.values
        in_grad_mode = torch.is_grad_enabled()  # with create_graph
        try:
            if ref.value not in values:
                with _below_autograd():
                    level.want(ref.value)
            if torch.is_grad_enabled():
                torch.set_grad_enabled(False)
            tensor = _view(values[ref.value], ref)
        finally:
            if torch.is_grad_enabled() != in_grad_mode:
                torch.set_grad_enabled(in_grad_mode)
            if self._left.generators:
                self._left.leave_generators_as_found()
        level.release(ref.value)
        return tensor

    def warn_of(self, tensor: torch.Tensor) -> None:
        """Say of a rebuilt tensor that it is not what was dropped; once."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name} was rebuilt otherwise than it ran: a tensor of shape "
                f"{tuple(tensor.shape)} is not what its forward saved, so gradients "
                "may be wrong; see ckplan verify, or run it again (by: rerun)",
                stacklevel=3,
            )


@dataclass(slots=True)
class _Leftovers:
    """What a forward leaves behind, for a region and those inside it."""

    name: str
    flow: Flow
    steps: Mapping[int, Step]
    held: dict[int, Held]
    encoded: dict[int, Encoded]
    states: dict[int, torch.Tensor]
    runs: Counter[int]  # of steps, still to come
    generators: dict[_Place, torch.Tensor] = field(default_factory=dict)  # as found

    def draw_again(self, step: int) -> None:
        """Let a random step draw what it drew."""
        self.runs[step] -= 1
        state = self.states.get(step)
        if state is not None:
            place = (self.steps[step].device, self.steps[step].generator)
            if place not in self.generators:
                self.generators[place] = random_state(*place)
            set_random_state(*place, state)
            if not self.runs[step]:
                del self.states[step]

    def leave_generators_as_found(self) -> None:
        """Put back the random states from before."""
        for place, state in self.generators.items():
            set_random_state(*place, state)
        self.generators.clear()


class _Kernels:
    """The machine that ``program.Rebuild`` drives, one for every inner region, too."""

    def __init__(
        self,
        left: _Leftovers,
        values: dict[int, torch.Tensor],
        around: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.values = values
        self._left = left
        self._around = around  # values of the region around this one

    def within(self) -> _Kernels:
        return _Kernels(self._left, {}, self.values)

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        """Run an op again."""
        op, flow, values = self._left.steps[step], self._left.flow, self.values
        present, moved = self._inputs(step)
        for value in copies:
            present[value] = _copy(present[value])
        args = [
            _give(x, present, moved) if type(x) in _WITH_TENSORS else x for x in op.args
        ]
        kwargs = {key: _give(x, present, moved) for key, x in op.kwargs.items()}
        self._left.draw_again(step)
        if torch.is_grad_enabled() != op.in_grad_mode:
            torch.set_grad_enabled(op.in_grad_mode)
        try:
            out = op.func(*args, **kwargs)
        except RuntimeError as error:
            _check_gathered(self._left.name, present.values(), error)
            raise
        for old, new in flow.overwrites[step].items():
            if new in keep:
                values[new] = present[old]
        returned = [out] if type(out) is torch.Tensor else tensors_in(out)
        for value, tensor in zip(flow.returned[step], returned, strict=True):
            if value in keep:
                values.setdefault(value, tensor)

    def _inputs(self, step: int) -> tuple[dict[int, torch.Tensor], dict[int, int]]:
        """What an op reads, and by how much that lies elsewhere now, where it does."""
        present: dict[int, torch.Tensor] = {}
        moved: dict[int, int] = {}
        values, held = self.values, self._left.held
        for value in self._left.flow.inputs[step]:
            if value in values:
                present[value] = values[value]
                if value in held and (by := held[value].moved(self._left.name)):
                    moved[value] = by
        return present, moved

    def decode(self, value: int) -> None:
        """Make a value from its encoded form."""
        self.values[value] = decode(self._left.encoded.pop(value))

    def fetch(self, value: int) -> None:
        """Take a value from the region around."""
        assert self._around is not None, "the outermost region has what it holds"
        self.values[value] = self._around[value]

    def free(self, value: int) -> None:
        """Let a value go."""
        self.values.pop(value, None)
        if self._around is None:
            self._left.held.pop(value, None)


def unpack(packed: Kept | Dropped) -> torch.Tensor:
    """Give autograd what it saved."""
    if isinstance(packed, Dropped):
        if packed.tensor is not None:
            return packed.tensor
        rebuilder = packed.handle.rebuilder
        if rebuilder is None:
            raise ApplyError(
                "a region's saved tensor is wanted before its forward is over",
                needed="backward after forward",
                hint="leave this call out of the plan",
            )
        ref, filled = packed.ref, packed.handle.filled
        if ref.value in filled:
            ref = ref._replace(value=filled[ref.value])
            packed.like = None  # it was looked at before
        packed.tensor = rebuilder.unpack(ref, packed.part)
        if packed.like is not None and not is_alike(packed.like, packed.tensor):
            rebuilder.warn_of(packed.tensor)
        return packed.tensor
    if version_of(packed.tensor) != packed.version:
        raise ApplyError(
            f"{packed.name} kept a tensor of shape {tuple(packed.tensor.shape)} for "
            f"backward, which was changed in place (version {packed.version} then, "
            f"{version_of(packed.tensor)} now)",
            needed="parameters and results that stay as they are until backward",
            hint="torch refuses this without a plan, too; change a copy",
        )
    return packed.tensor


def keep(tensor: torch.Tensor, name: str) -> Kept:
    """What stays of what autograd saves in a region.

    Not the graph behind it: an op's own output would hold the op that holds it, until
    backward comes by, which it may never do.
    """
    bare = tensor if tensor.grad_fn is None else tensor.detach()
    return Kept(bare, version_of(bare), name)


def _check_gathered(
    name: str, tensors: Iterable[torch.Tensor], error: RuntimeError
) -> None:
    """FSDP lets go of a parameter's bytes and keeps the parameter."""
    for tensor in tensors:
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise _not_gathered(name, tensor.shape) from error


def _not_gathered(name: str, shape: torch.Size) -> ApplyError:
    return ApplyError(
        f"cannot rebuild {name}: it reads a parameter of shape {tuple(shape)} that is "
        "not gathered now",
        needed="regions inside of what is gathered as one",
        hint="plan with `ckplan solve --shard fsdp2 --world-size N`; with DeepSpeed, "
        "name the layers to set_z3_leaf_modules",
    )


def hold(tensor: torch.Tensor) -> Held:
    """Hold a tensor's bytes, not the graph behind it.

    Of a view of a parameter the parameter: whoever gathers it may move its bytes.
    """
    if isinstance(tensor._base, torch.nn.Parameter):
        tensor = tensor._base
    elif tensor.grad_fn is not None:
        tensor = tensor.detach()
    return Held(tensor, version_of(tensor), tensor.storage_offset(), tensor.size())


def hold_copy(tensor: torch.Tensor) -> Held:
    """Hold what a tensor shows now: others write it, and nobody is told."""
    return hold(_copy(tensor))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that an op takes or returns in one place: one, several or none."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


_WITH_TENSORS = (Ref, list)  # arguments that may be or have one


def _give(
    argument: Any, present: Mapping[int, torch.Tensor], moved: Mapping[int, int]
) -> Any:
    """An argument as the op takes it."""
    if type(argument) is Ref:
        if argument.value in moved:
            offset = argument.offset + moved[argument.value]
            argument = argument._replace(offset=offset)
        return _view(present[argument.value], argument)
    if type(argument) is list:
        return [_give(item, present, moved) for item in argument]
    return argument


def _view(tensor: torch.Tensor, ref: Ref) -> torch.Tensor:
    """The view that an op had of a value, from any tensor on its storage."""
    view = _strided(tensor, ref)
    view = view.conj() if ref.is_conj else view
    return torch._neg_view(view) if ref.is_neg else view


def _strided(tensor: torch.Tensor, ref: Ref) -> torch.Tensor:
    if tensor.dtype == ref.dtype and not (tensor.is_conj() or tensor.is_neg()):
        same = tensor.size() == ref.size and tensor.stride() == ref.stride
        if same and tensor.storage_offset() == ref.offset:
            return tensor
        return tensor.as_strided(ref.size, ref.stride, ref.offset)
    bare = torch.empty(0, dtype=ref.dtype, device=tensor.device)
    return bare.set_(tensor.untyped_storage(), ref.offset, ref.size, ref.stride)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry on a copy of the whole storage.

    Made by an op, so that those who watch ops see it made.
    """
    storage = tensor.untyped_storage()
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if plain and tensor.nbytes == storage.nbytes():
        return tensor.detach().clone()
    every_byte = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    every_byte.set_(storage, 0, (storage.nbytes(),), (1,))
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return bare.set_(every_byte.clone().untyped_storage(), *place)


def _below_autograd() -> AbstractContextManager[object]:
    """As ops ran when they were recorded: what autograd and autocast made of them.

    Grad mode can be on below autograd, as it was for the kernels of the forward.
    """
    below: AbstractContextManager[object] = torch._C._AutoDispatchBelowAutograd()
    casting = [
        device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    ]
    if not casting:
        return below
    stack = ExitStack()
    stack.enter_context(below)
    for device in casting:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
