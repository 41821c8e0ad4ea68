"""What the engine adds to a layer of tiny tensors, in families of models.

Tensors are so small that kernels take no time, so the processor's own work is what is
measured: in seconds of the thread, of which other programs take none. All ways take
steps in turns in this process, each with a model of its own; figures are medians over
rounds of the seconds beyond the unplanned step's in the same round, per layer.

The last rows are what no engine in Python can do without, since torch calls it back for
every function and for every saved tensor. ``LEAST_WATCH``: a function mode compares
each function with the one it expects, and hooks number what is saved.
``LEAST_GUARDS``: it compares arguments, too, by matchers that are compiled for each
call, and nothing else that could differ: a change of an argument would give a wrong
gradient. ``LEAST_AGAIN``: the ops that are rebuilt are called once more, below
autograd, from the random states of the forward, with their arguments at hand, views of
what is rebuilt made anew. The last two bound a program that notices what differs.
``LEAST_RERUN``: forward runs again, from torch's random state, with such a mode and
hooks that number what is saved in both runs, and nothing else that a checkpoint does;
``LEAST_GUARDED_RERUN`` compares arguments in both: it bounds a rerun that notices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from statistics import median
from typing import Any, NamedTuple
from weakref import ref

import _measuring as measuring
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ckplan.applying import apply
from ckplan.applying.tensors.arguments import Slots, is_query
from ckplan.applying.tensors.matchers import Matcher, Matchers
from ckplan.applying.tensors.retained import tensors_in
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.plan.region import RERUN, Region
from ckplan.plan.resolve import describe
from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import find_repeated_layers
from ckplan.solving.menu import Menus
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.randomness import draws, seed_everything
from ckplan.training.step import Training, TrainingStep, make_step

_TEXT = {"layers": 12, "width": 32, "heads": 4, "batch": 2, "length": 16, "vocab": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**_TEXT, "dropout": 0.1},
    "llama": {**_TEXT, "groups": 2},
    "bert": {**_TEXT, "dropout": 0.1},
    "resnet50": {"batch": 2, "size": 32},
}
STEP, BY_HAND, RERUN_ALL = "unplanned", "torch's checkpoint", "by: rerun"
NOTHING, EVERYTHING = "by: program, nothing saved", "by: program, everything saved"
LEAST_WATCH = "least: functions compared, tensors numbered"
LEAST_AGAIN = "least: rebuilt ops alone"
LEAST_GUARDS = "least: functions and arguments compared, tensors numbered"
LEAST_RERUN = "least: forward again, functions compared in both"
LEAST_GUARDED_RERUN = "least: forward again, arguments compared in both"
DROPPED_ROUNDS = 3
_LIMITS = {  # of checkpointing's total, and the ways whose sum is the least possible
    NOTHING: (0.55, (LEAST_GUARDS, LEAST_AGAIN)),
    RERUN_ALL: (1.15, (LEAST_GUARDED_RERUN,)),
}
HEADERS = ("layer of", "way", "forward us", "backward us", "of torch's checkpoint")
TRAINING = Training("none")

Seconds = tuple[float, float]  # of the thread: forward and backward


def layer_rows(rounds: int) -> tuple[list[list[str]], list[str]]:
    """The rows of all families, and what of the claim they break."""
    rows: list[list[str]] = []
    broken: list[str] = []
    for family, options in FAMILIES.items():
        measuring.say(f"layers of {family}")
        extra = per_layer(family, options, rounds)
        whole = sum(extra[BY_HAND])
        for way, seconds in extra.items():
            share = sum(seconds) / whole
            micro = [f"{1e6 * one:+.0f}" for one in seconds]
            shown = "" if way == STEP else f"{share:.2f}"
            rows.append([family, way, *micro, shown])
        for way, (most, parts) in _LIMITS.items():
            share = sum(extra[way]) / whole
            least = sum(sum(extra[part]) for part in parts) / whole
            if share > most:
                broken.append(
                    f"{way} takes {share:.2f} of torch's checkpoint in layers of "
                    f"{family}; asked: {most}, least possible: {least:.2f}"
                )
    return rows, broken


def per_layer(family: str, options: dict[str, Any], rounds: int) -> dict[str, Seconds]:
    """Seconds per layer of the unplanned step, and beyond it of all other ways."""
    spec = WorkloadSpec(measuring.location_of(family), options)
    graph = profile_workload(spec, training=TRAINING, replay=False, in_step=False)
    layers = find_repeated_layers(graph, Menus(Simulator(graph)))
    names = [graph.calls[layer].fqn for layer in layers]
    ways = {
        STEP: _step(spec, lambda model: None),
        BY_HAND: _step(spec, partial(_checkpoint, names)),
        RERUN_ALL: _planned(spec, graph, [Region(one, RERUN) for one in layers]),
        NOTHING: _planned(spec, graph, [Region(one) for one in layers]),
        EVERYTHING: _planned(
            spec, graph, [Region(one, save=_outputs(graph, one)) for one in layers]
        ),
        LEAST_WATCH: _step(spec, partial(_watch, names, _Compared)),
        LEAST_GUARDS: _step(spec, partial(_watch, names, _Guarded)),
        LEAST_AGAIN: _step(spec, partial(_run_ops_again, graph, layers)),
        LEAST_RERUN: _step(spec, partial(_watch_twice, names, _Compared)),
        LEAST_GUARDED_RERUN: _step(spec, partial(_watch_twice, names, _Guarded)),
    }
    taken: dict[str, list[Seconds]] = {way: [] for way in ways}
    for number in range(rounds + DROPPED_ROUNDS):
        for way in reversed(ways) if number % 2 else ways:
            taken[way].append(_timed(ways[way]))
    kept = {way: found[DROPPED_ROUNDS:] for way, found in taken.items()}
    return {
        way: _beyond(found, kept[STEP] if way != STEP else None, len(layers))
        for way, found in kept.items()
    }


def _beyond(
    found: Sequence[Seconds], unplanned: Sequence[Seconds] | None, layers: int
) -> Seconds:
    less = [(0.0, 0.0)] * len(found) if unplanned is None else unplanned
    pairs = list(zip(found, less, strict=True))
    forward, backward = (median(a[i] - b[i] for a, b in pairs) / layers for i in (0, 1))
    return forward, backward


def _step(spec: WorkloadSpec, change: Callable[[Any], object]) -> TrainingStep:
    seed_everything(measuring.SEED)
    workload = spec.build()
    change(workload.model)
    return make_step(workload, TRAINING)


def _planned(spec: WorkloadSpec, graph: Graph, regions: list[Region]) -> TrainingStep:
    plan = Plan(regions=describe(graph, regions))
    return _step(spec, lambda model: apply(model, plan))


def _checkpoint(names: Sequence[str], model: Any) -> None:
    for name in names:
        layer = model.get_submodule(name)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _outputs(graph: Graph, layer: int) -> frozenset[tuple[int, int]]:
    """Every output that a region on a layer can save."""
    call = graph.calls[layer]
    return frozenset(
        (op, number)
        for op in range(call.start, call.stop)
        for number in range(len(graph.ops[op].outputs))
    )


# -- the least that an engine does ---------------------------------------------------


class _Compared(TorchFunctionMode):
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


class _Guarded(TorchFunctionMode):
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
        if not call.matches(args, kwargs, self._made, (), self._met, self._meet):
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

    def _meet(self, number: int, tensor: torch.Tensor) -> bool:
        self._met.append(ref(tensor))
        return True


_Mode = type[_Compared] | type[_Guarded]


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


def _watch(names: Sequence[str], mode: _Mode, model: Any) -> None:
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


def _watch_twice(names: Sequence[str], mode: _Mode, model: Any) -> None:
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


def _run_ops_again(graph: Graph, layers: Sequence[int], model: Any) -> None:
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


# -- time ----------------------------------------------------------------------------


def _timed(step: TrainingStep) -> Seconds:
    marks: list[float] = []
    replace(step, on_phase=lambda phase: marks.append(time.thread_time())).run()
    forward, backward, end = marks
    return backward - forward, end - backward
