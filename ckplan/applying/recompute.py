"""Rebuild what a region dropped, op by op, with the module's own forward untouched.

While the region's forward runs, a dispatch mode writes down its ops and saved-tensor
hooks let go of what the plan drops. In backward, when autograd wants a dropped tensor,
just the ops that it needs run again.

The ops are written down anew at every forward. So a program always belongs to the step
it rebuilds: another shape, another branch or another number in the next step gives
another program, never a stale one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.encodings import Encoded, decode, encode
from ckplan.errors import ApplyError
from ckplan.program import Flow, Program, Rebuild, compile_program

Saves = Mapping[tuple[str, str, int], frozenset[int] | None]
"""(path, op name, occurrence) -> outputs to keep; None for all of them."""

Encodes = Mapping[tuple[str, str, int], Mapping[int | None, str]]
"""(path, op name, occurrence) -> outputs to keep in a smaller form, and in which."""

_Place: TypeAlias = tuple[torch.device, torch.Generator | None]
"""Whose random state: a generator, or the device's own."""

_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_RUNNING_STATISTICS = slice(3, 5)  # arguments of all three


class _Facts(NamedTuple):
    """What the recorder must know of an op, looked up once."""

    name: str
    is_view: bool
    writes: tuple[tuple[int, str], ...]  # arguments changed in place
    random: bool
    batch_norm: bool


@cache
def _facts(func: Any) -> _Facts:
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name = func.overloadpacket.__name__
    random = torch.Tag.nondeterministic_seeded in func.tags
    return _Facts(name, func.is_view, writes, random, name in _BATCH_NORMS)


class _Ref(NamedTuple):
    """A tensor argument: a view of a value."""

    value: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Step(NamedTuple):
    """An op that ran."""

    func: Any
    args: list[Any]  # tensors as _Ref, also inside lists
    kwargs: dict[str, Any]
    random_state: torch.Tensor | None  # of its generator, before it ran
    generator: torch.Generator | None
    device: torch.device


class _Access(NamedTuple):
    """The storages of an op, as ``program.Flow`` wants them."""

    reads: list[int]
    writes: list[int]
    outputs: list[int]


class _Kept(NamedTuple):
    """A saved tensor that stays, and the version autograd expects."""

    tensor: torch.Tensor
    version: int


class _Dropped(NamedTuple):
    """A saved tensor that is rebuilt when it is wanted."""

    region: ProgramRegion
    ref: _Ref


@dataclass(slots=True)
class _Held:
    """A value that the region keeps to rebuild from."""

    tensor: torch.Tensor
    version: int


class ProgramRegion(TorchDispatchMode):
    """One forward of a region, and what backward needs to rebuild it."""

    def __init__(self, name: str, saves: Saves, encodes: Encodes) -> None:
        super().__init__()
        self.name = name
        self.dropped_bytes = 0
        self.found: set[tuple[str, str, int]] = set()  # saves that named an op
        self.path: list[str] = [""]  # module paths below the region, innermost last
        self._saves = saves
        self._encodes = encodes
        self._names_ops = bool(saves or encodes)
        self._occurrences: dict[tuple[str, str], int] = defaultdict(int)
        self._flow = Flow()
        self._steps: dict[int, _Step] = {}
        self._numbers: dict[int, int] = {}  # address of a storage -> its number
        self._addresses: list[StorageWeakRef] = []  # keep addresses from being reused
        self._inside: set[int] = set()  # storages that the region made
        self._held: dict[int, _Held] = {}  # value -> tensor
        self._encoded: dict[int, Encoded] = {}  # value -> its smaller form
        self._values: dict[int, torch.Tensor] = {}  # what is present in backward
        self._wanted: list[int] = []  # values of dropped saved tensors
        self._rebuild: Rebuild | None = None
        self._program: Program | None = None
        self._generators: dict[_Place, torch.Tensor] = {}  # states to put back
        self._contexts = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against being compiled costs more than recording an op

    # -- forward ---------------------------------------------------------------------

    def open(self) -> None:
        """Begin to watch."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._contexts.enter_context(hooks)
        self._contexts.enter_context(self)

    def close(self) -> None:
        """Forward is over: find the program and hold only what it needs.

        Raises:
            ApplyError: The region overwrote an input that it would have to rebuild
            from.
        """
        self._contexts.close()
        kept = self._held.keys() - set(self._external_values())
        program = compile_program(self._flow, self._wanted, kept, self._encoded.keys())
        if program.lost:
            raise ApplyError(
                f"cannot rebuild {self.name}: its forward changes an input in place",
                needed="a region whose inputs are still there in backward",
                hint="leave this call out of the plan, or name a larger one",
            )
        self._program = program
        self._held = {value: self._held[value] for value in program.holds}
        for held in self._held.values():
            held.version = held.tensor._version
        self._values = {value: held.tensor for value, held in self._held.items()}
        self._steps = {step: self._steps[step] for step in program.steps}
        self._encoded = {value: self._encoded[value] for value in program.decodes}
        self._rebuild = Rebuild(program, self)
        self._numbers.clear()
        self._addresses.clear()

    def _external_values(self) -> Iterator[int]:
        return (v for v, maker in enumerate(self._flow.maker_of) if maker < 0)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        facts = _facts(func)
        if facts.is_view:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        reads: list[int] = []
        refs = [self._take(x, reads) for x in args]
        named = {key: self._take(x, reads) for key, x in kwargs.items()}
        generator = kwargs.get("generator") if facts.random else None
        device = _device_of(args, kwargs)
        state = _random_state(device, generator) if facts.random else None
        out = func(*args, **kwargs)
        returned = _tensors(out)
        known = len(self._addresses)
        outputs = [self._number(tensor, inside=True) for tensor in returned]
        writes = self._written(facts, args, kwargs) if facts.writes else []
        if len(self._addresses) > known or writes:
            if facts.batch_norm:
                refs[_RUNNING_STATISTICS] = None, None  # must not be updated twice
            number = self._flow.add(_Access(reads, writes, outputs))
            self._steps[number] = _Step(func, refs, named, state, generator, device)
            for value in self._flow.overwrites[number]:
                self._held.pop(value, None)
            if self._names_ops:
                self._save(facts.name, number, returned)
        return out

    def _take(self, argument: Any, reads: list[int]) -> Any:
        """An argument as a step keeps it, its storages added to what the op reads."""
        if isinstance(argument, torch.Tensor):
            number = self._number(argument)
            reads.append(number)
            return self._ref(argument, self._flow.value(number))
        if isinstance(argument, (list, tuple)):
            return [self._take(item, reads) for item in argument]
        return argument

    def _number(self, tensor: torch.Tensor, *, inside: bool = False) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = len(self._addresses)
            self._addresses.append(StorageWeakRef(storage))
            self._numbers[storage._cdata] = number
            if inside:
                self._inside.add(number)
            else:
                self._hold(self._flow.value(number), tensor)
        return number

    def _hold(self, value: int, tensor: torch.Tensor) -> None:
        if tensor.grad_fn is not None:
            tensor = tensor.detach()  # hold its bytes, not the graph behind it
        self._held[value] = _Held(tensor, tensor._version)

    def _ref(self, tensor: torch.Tensor, value: int) -> _Ref:
        offset = tensor.storage_offset()
        return _Ref(value, tensor.size(), tensor.stride(), offset, tensor.dtype)

    def _written(
        self, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        changed = (
            args[position] if position < len(args) else kwargs.get(name)
            for position, name in facts.writes
        )
        return [self._number(t) for value in changed for t in _tensors(value)]

    def _save(self, name: str, number: int, returned: list[torch.Tensor]) -> None:
        """Hold or encode the outputs that the plan names."""
        place = (self.path[-1], name)
        key = (*place, self._occurrences[place])
        self._occurrences[place] += 1
        values = self._flow.returned[number]
        if key in self._saves:
            self.found.add(key)
            outputs = self._saves[key]
            for position, value in enumerate(values):
                if outputs is None or position in outputs:
                    self._hold(value, returned[position])
        if key in self._encodes:
            self.found.add(key)
            forms = self._encodes[key]
            for position, value in enumerate(values):
                form = forms.get(position, forms.get(None))
                small = encode(form, returned[position]) if form else None
                if small is not None:
                    self._encoded[value] = small

    def _pack(self, tensor: torch.Tensor) -> _Kept | _Dropped:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number in self._inside and not tensor.is_conj():
            value = self._flow.value(number)
            if value not in self._held:
                if value not in self._wanted:
                    self.dropped_bytes += tensor.untyped_storage().nbytes()
                self._wanted.append(value)
                return _Dropped(self, self._ref(tensor, value))
        return _Kept(tensor, tensor._version)

    # -- backward: the machine that program.Rebuild drives ---------------------------

    def unpack(self, ref: _Ref) -> torch.Tensor:
        """The dropped tensor again."""
        rebuild = self._rebuild
        if rebuild is None or rebuild.exhausted(ref.value):
            raise ApplyError(
                f"{self.name} is wanted again after backward let it go",
                needed="one backward per forward",
                hint="leave this call out of the plan where retain_graph is used",
            )
        try:
            with torch.no_grad(), _no_autocast():
                rebuild.want(ref.value)
                tensor = _view(self._values[ref.value], ref)
        finally:
            self._leave_generators_as_found()
        rebuild.release(ref.value)
        return tensor

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        """Run an op again."""
        assert self._program is not None
        op = self._steps.pop(step)  # it runs once; its random state goes
        flow = self._program.flow
        present = {v: self._values[v] for v in flow.inputs[step] if v in self._values}
        for value in flow.inputs[step]:
            self._check_version(value)
        for value in copies:
            present[value] = _copy(present[value])
        args = [_give(x, present) for x in op.args]
        kwargs = {key: _give(x, present) for key, x in op.kwargs.items()}
        if op.random_state is not None:
            place = (op.device, op.generator)
            if place not in self._generators:
                self._generators[place] = _random_state(*place)
            _set_random_state(*place, op.random_state)
        out = op.func(*args, **kwargs)
        for old, new in flow.overwrites[step].items():
            if new in keep:
                self._values[new] = present[old]
        for value, tensor in zip(flow.returned[step], _tensors(out), strict=True):
            if value in keep:
                self._values.setdefault(value, tensor)

    def decode(self, value: int) -> None:
        """Make a value from its encoded form."""
        self._values[value] = decode(self._encoded.pop(value))

    def free(self, value: int) -> None:
        """Let a value go."""
        self._values.pop(value, None)
        self._held.pop(value, None)

    def _check_version(self, value: int) -> None:
        held = self._held.get(value)
        if held is not None and held.tensor._version != held.version:
            shape = tuple(held.tensor.shape)
            raise ApplyError(
                f"cannot rebuild {self.name}: a tensor of shape {shape} that it reads "
                f"was changed in place after its forward (version {held.version} then, "
                f"{held.tensor._version} now)",
                needed="parameters and inputs that stay as they are until backward",
                hint="update parameters after backward, or leave this call out",
            )

    def _leave_generators_as_found(self) -> None:
        for place, state in self._generators.items():
            _set_random_state(*place, state)
        self._generators.clear()


def _unpack(packed: _Kept | _Dropped) -> torch.Tensor:
    if isinstance(packed, _Dropped):
        return packed.region.unpack(packed.ref)
    if packed.tensor._version != packed.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by "
            "an inplace operation: a tensor of shape "
            f"{tuple(packed.tensor.shape)} is at version {packed.tensor._version}; "
            f"expected version {packed.version}"
        )
    return packed.tensor


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that an op takes or returns in one place: one, several or none."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _give(argument: Any, present: Mapping[int, torch.Tensor]) -> Any:
    """An argument as the op takes it."""
    if type(argument) is _Ref:
        return _view(present[argument.value], argument)
    if type(argument) is list:
        return [_give(item, present) for item in argument]
    return argument


def _view(tensor: torch.Tensor, ref: _Ref) -> torch.Tensor:
    """The view that an op had of a value, from any tensor on its storage."""
    if tensor.dtype == ref.dtype:
        same = tensor.size() == ref.size and tensor.stride() == ref.stride
        if same and tensor.storage_offset() == ref.offset:
            return tensor
        return tensor.as_strided(ref.size, ref.stride, ref.offset)
    bare = torch.empty(0, dtype=ref.dtype, device=tensor.device)
    return bare.set_(tensor.untyped_storage(), ref.offset, ref.size, ref.stride)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry on a copy of the whole storage."""
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage().clone()
    return bare.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device
    return torch.device(kwargs.get("device") or "cpu")


def _random_state(
    device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    if generator is not None:
        return generator.get_state()
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_random_state(
    device: torch.device, generator: torch.Generator | None, state: torch.Tensor
) -> None:
    if generator is not None:
        generator.set_state(state)
    elif device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _no_autocast() -> Any:
    """Recorded ops are what autocast made of the forward; it must not act again."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return nullcontext()
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack
