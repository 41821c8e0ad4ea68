"""What no engine in Python can do without, put around the layers of a model.

torch calls an engine back for every function and for every saved tensor; rebuilt ops
run once more. Each way here does only that, and notices less than an engine must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ckplan.applying.tensors.arguments import Slots, is_query
from ckplan.applying.tensors.matchers import Matcher, Matchers
from ckplan.applying.tensors.retained import tensors_in
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.training.randomness import draws


class Called(TorchFunctionMode):
    """Calls functions, and looks at nothing: what torch's own way here takes."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


class Compared(TorchFunctionMode):
    """Compares functions with those of the forward before."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()
        self._known, self._expected = known, iter(known[:])

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        expected = next(self._expected, None)
        if expected is None:
            self._known.append(func)
        elif expected is not func and expected != func:
            raise AssertionError(f"{func} instead of {expected}")
        return func(*args, **kwargs) if kwargs else func(*args)


class _Call(NamedTuple):
    func: Any
    matches: Matcher
    numbers: Sequence[int]  # of the tensors that it returned
    is_new: bool  # it returned one tensor, which no call had returned or taken


class Guarded(TorchFunctionMode):
    """Compares functions and arguments with those of the first forward."""

    def __init__(self, known: list[_Call]) -> None:
        super().__init__()
        self._learned = None if known else known
        self._calls = iter(known)
        self._next = next(self._calls, None)
        self._made: list[ref[torch.Tensor]] = []
        self._met: list[ref[torch.Tensor]] = []
        self._slots, self._matchers = Slots(lambda tensor: None), Matchers()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call = self._next
        if call is None or (call.func is not func and call.func != func):
            return self._other(func, args, kwargs or {})
        if not call.matches(args, kwargs, self._made, (), self._met, self):
            raise AssertionError(f"{func} with other arguments")
        out = func(*args, **kwargs) if kwargs else func(*args)
        if call.is_new:
            self._made.append(ref(out))
        else:
            for number, tensor in zip(call.numbers, tensors_in(out), strict=True):
                if number == len(self._made):
                    self._made.append(ref(tensor))
        self._next = next(self._calls, None)
        return out

    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_query(func):
            return func(*args, **kwargs)
        assert self._learned is not None, f"{func} is another call"
        matches = self._matchers.make(self._slots.freeze(args, kwargs))
        out = func(*args, **kwargs)
        made = max((max(one.numbers, default=-1) for one in self._learned), default=-1)
        self._slots.returned(out)
        numbers = [self._slots.number_of(one) for one in tensors_in(out)]
        is_new = isinstance(out, torch.Tensor) and numbers == [made + 1]
        self._learned.append(_Call(func, matches, numbers, is_new))
        return out

    def meet(self, number: int, tensor: torch.Tensor) -> bool:
        self._met.append(ref(tensor))
        return True


_Mode = type[Called] | type[Compared] | type[Guarded]


def _compared(mode: _Mode, forward: Callable[..., Any]) -> Callable[..., Any]:
    known: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode(known):
            return forward(*args, **kwargs)

    return run


def _numbered(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> int:
            saved.append(tensor)
            return len(saved) - 1

        with saved_tensors_hooks(pack, saved.__getitem__):
            return forward(*args, **kwargs)

    return run


def watch(names: Sequence[str], mode: _Mode, model: Any) -> None:
    """Run some modules under a mode, and number what they save."""
    for name in names:
        layer = model.get_submodule(name)
        layer.forward = _numbered(_compared(mode, layer.forward))


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        numbers, found = count(), list[torch.Tensor]()
        state = torch.get_rng_state()

        def fill(number: int) -> torch.Tensor:
            if not found:
                given = [_alone(one) for one in args]
                now = torch.get_rng_state()
                torch.set_rng_state(state)
                with torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x):
                    forward(*given, **kwargs)
                torch.set_rng_state(now)
            return found[number]

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor.detach())
            return tensor

        with saved_tensors_hooks(lambda tensor: next(numbers), fill):
            return forward(*args, **kwargs)

    return run


def _alone(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor) and argument.requires_grad:
        return argument.detach().requires_grad_()
    return argument


def watch_twice(names: Sequence[str], mode: _Mode, model: Any) -> None:
    """Run some modules under a mode, in forward and again in backward."""
    for name in names:
        layer = model.get_submodule(name)
        layer.forward = _again(_compared(mode, layer.forward))


class _Op(NamedTuple):
    func: Any
    args: Any  # of positional and keyword arguments; a view of what is rebuilt by place
    kwargs: Any
    draws: bool


class _View(NamedTuple):
    """An argument that is not laid out as the op left it that made its memory."""

    tensor: torch.Tensor
    place: tuple[Any, ...]  # size, stride, offset


class _Recorded(TorchDispatchMode):
    """Keeps the ops that run, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self._made: dict[int, tuple[Any, ...]] = {}  # by storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_map_only(torch.Tensor, self._as_given, (args, kwargs))
        self.ops.append(_Op(func, *given, draws(func, args, kwargs)))
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()._cdata
            self._made.setdefault(storage, _place_of(tensor))
        return out

    def _as_given(self, tensor: torch.Tensor) -> Any:
        made, place = self._made.get(tensor.untyped_storage()._cdata), _place_of(tensor)
        same = made is None or made == place
        return tensor.detach() if same else _View(tensor.detach(), place)


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.storage_offset()


def run_ops_again(graph: Graph, layers: Sequence[int], model: Any) -> None:
    """Call the ops of a layer that a program rebuilds, before its backward."""
    simulator = Simulator(graph)
    for layer in layers:
        call = graph.calls[layer]
        names = [op.name for op in graph.ops[call.start : call.stop]]
        again = {op - call.start for op in simulator.effect(Region(layer)).steps}
        module = model.get_submodule(call.fqn)
        module.forward = _called_again(module.forward, names, again)


def _called_again(
    forward: Callable[..., Any], names: Sequence[str], again: set[int]
) -> Callable[..., Any]:
    ops: list[_Op] = []

    def call(states: Iterator[torch.Tensor], gradient: torch.Tensor) -> None:
        found = torch.get_rng_state()
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, draws_again in ops:
                if draws_again:
                    torch.set_rng_state(next(states))
                func(*[_viewed(one) for one in args], **kwargs)
        torch.set_rng_state(found)

    def run(*args: Any, **kwargs: Any) -> Any:
        if ops:
            states = [torch.get_rng_state() for op in ops if op.draws]
            out = forward(*args, **kwargs)
        else:
            states = []
            with _Recorded() as found:
                out = forward(*args, **kwargs)
        returned = out[0] if isinstance(out, tuple) else out
        if ops:
            returned.register_hook(partial(call, iter(states)))
        else:
            ops.extend(_chosen(found.ops, names, again))
        return out

    return run


def _viewed(argument: Any) -> Any:
    if type(argument) is list:
        return [_viewed(one) for one in argument]
    if type(argument) is _View:
        return argument.tensor.as_strided(*argument.place)
    return argument


def _chosen(ops: Sequence[_Op], names: Sequence[str], again: set[int]) -> Iterator[_Op]:
    """The recorded ops of these numbers; the graph has no views."""
    number = 0
    for op in ops:
        if number < len(names) and op.func.overloadpacket.__name__ == names[number]:
            if number in again:
                yield op
            number += 1
    assert number == len(names), f"{names[number]} did not run"
