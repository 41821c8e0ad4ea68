"""Load a workload from ``model.py``: a model, a batch, a loss and an optimizer.

``configs/README.md`` defines the contract. A factory returns
``(model, batch)``, ``(model, batch, loss_fn)`` or a mapping with keys ``model``,
``batch``, ``loss`` and ``optimizer``. A file without a factory may hold one module,
used with ``--input``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import nn
from torch.nn.parameter import is_lazy

from ckplan.errors import CkplanError, WorkloadError, did_you_mean
from ckplan.plan.plan import plan_fingerprint
from ckplan.sources.source import open_source, parse_source
from ckplan.training.fingerprint import parameter_shapes
from ckplan.training.importing import import_location, workload_error
from ckplan.training.workload import CONTRACT, Workload, as_workload, at_rows

DEFAULT_FACTORY = "build"
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass(frozen=True)
class WorkloadSpec:
    """Location and options of a workload, from which any process can build it.

    ``target`` is ``path/to/model.py``, ``path/to/model.py:factory``,
    ``package.module:factory`` or a source of a model without a file, such as
    ``hf:FOLDER``; ``options`` are passed to the factory or the source; ``inputs`` are
    ``8x3x224x224:float32`` shapes for a bare module. ``parameters`` is the digest of
    the names and shapes that the model must have, as a plan's fingerprint holds it.
    ``rows`` is the number of rows to which the batch is cut or repeated, at dimension
    ``batch_dim`` of its tensors; None is 0 unless that is seen to be time.
    """

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    parameters: str | None = None
    rows: int | None = None
    batch_dim: int | None = None

    def __post_init__(self) -> None:
        """Accept a path as the target."""
        object.__setattr__(self, "target", str(self.target))

    @property
    def name(self) -> str:
        """A short name for files: of the file or module, then the factory."""
        source = parse_source(self.target)
        if source is not None:
            return source.title
        location, factory = self._split()
        name = Path(location).name.removesuffix(".py").rpartition(".")[2] or "model"
        return name if factory in (None, DEFAULT_FACTORY) else f"{name}-{factory}"

    def load(self) -> Callable[[], Workload]:
        """Import the target and return a function that builds the workload.

        Raises:
            WorkloadError: The target is missing, is not Python, or has no factory.
        """
        build = partial(self._cut, self._loaded())
        return build if self.parameters is None else partial(self._checked, build)

    def _cut(self, build: Callable[[], Workload]) -> Workload:
        """The batch at the rows that are asked for."""
        return at_rows(build(), self.rows, self.batch_dim)

    def _checked(self, build: Callable[[], Workload]) -> Workload:
        """Refuse a model with other parameters before anything runs."""
        workload = build()
        model = workload.model
        if any(map(is_lazy, model.parameters())):
            return workload  # it is refused as such
        here = plan_fingerprint({"parameters": parameter_shapes(model)})["parameters"]
        if here != self.parameters:
            kind, count = type(model).__name__, len(list(model.parameters()))
            raise WorkloadError(
                f"{self.target} builds another model than the plan's: a {kind} with "
                f"{count} parameters, whose names and shapes have the digest {here}",
                needed=f"the model that was profiled, of digest {self.parameters}",
                hint="the factory and every --set of `ckplan profile`, or leave them "
                "out: the plan knows them",
            )
        return workload

    def _loaded(self) -> Callable[[], Workload]:
        if parse_source(self.target) is not None:
            return self._from_source()
        location, factory_name = self._split()
        module = import_location(location)
        factory = getattr(module, factory_name or DEFAULT_FACTORY, None)
        if factory is None and factory_name is None:
            return partial(self._from_bare_module, module, location)
        if isinstance(factory, nn.Module) or (
            isinstance(factory, type) and issubclass(factory, nn.Module)
        ):
            return partial(self._from_module, str(factory_name), factory, location)
        if not callable(factory):
            raise _no_factory(module, location, factory_name or DEFAULT_FACTORY)
        if self.inputs:
            raise WorkloadError(
                f"cannot use --input with {factory_name or DEFAULT_FACTORY}(), which "
                "returns the batch",
                needed="a factory, or a module and --input, not both",
                hint="leave out --input",
            )
        _check_options(factory, self.options, self.target)
        name = f"{location}:{factory_name or DEFAULT_FACTORY}"
        return lambda: as_workload(_call(factory, self.options, name), name)

    def build(self) -> Workload:
        """Import the target and make the workload on the default device.

        Raises:
            WorkloadError: As for ``load``; or the factory fails or returns no workload.
        """
        return self.load()()

    def _split(self) -> tuple[str, str | None]:
        location, colon, name = self.target.rpartition(":")
        if colon and re.fullmatch(r"[A-Za-z_]\w*", name):
            return location, name
        return self.target, None

    def _from_source(self) -> Callable[[], Workload]:
        if self.inputs:
            raise WorkloadError(
                f"cannot use --input beside {self.target}, which makes the batch",
                needed="--batch for its sizes",
                hint="leave out --input",
            )
        make = open_source(self.target, self.options)

        def build() -> Workload:
            try:
                made = make()
            except CkplanError:
                raise
            except Exception as error:
                raise workload_error(self.target, error) from error
            return Workload(
                made.model,
                made.batch,
                made.loss,
                target=made.target,
                source=self.target,
                assumptions=made.assumptions,
            )

        return build

    def _from_bare_module(self, module: ModuleType, location: str) -> Workload:
        found = _own_modules(module)
        if len(found) != 1 or not self.inputs:
            what = ", ".join(name for name, _ in found) or "none"
            raise WorkloadError(
                f"cannot build a workload: {location} has no factory "
                f"'{DEFAULT_FACTORY}' (modules found: {what})",
                needed="a function build() that returns "
                + CONTRACT
                + ", or exactly one nn.Module and --input SHAPE:DTYPE",
                hint="ckplan profile model.py --input 8x3x224x224:float32",
            )
        return self._from_module(*found[0], location)

    def _from_module(
        self, name: str, made: nn.Module | type[nn.Module], location: str
    ) -> Workload:
        if isinstance(made, type):
            _check_arguments(made, self.options, f"{location}:{name}")
        if not self.inputs:
            raise WorkloadError(
                f"cannot build a workload: {location}:{name} has no batch",
                needed="--input SHAPE:DTYPE for every argument of its forward",
                hint="ckplan profile model.py --input 8x3x224x224:float32",
            )
        if isinstance(made, type):
            made = _call(made, self.options, f"{location}:{name}")
        return Workload(made, tuple(parse_input(text) for text in self.inputs))


def as_spec(target: object) -> WorkloadSpec:
    """Convert a ``WorkloadSpec`` or its target alone to a ``WorkloadSpec``.

    Raises:
        WorkloadError: It is neither, such as a model, which no process can rebuild.
    """
    if isinstance(target, WorkloadSpec):
        return target
    if isinstance(target, (str, Path)):
        return WorkloadSpec(str(target))
    raise WorkloadError(
        f"cannot build a workload from a {type(target).__name__}",
        needed="'model.py', 'model.py:factory' or a WorkloadSpec",
        hint="a function build() in a file, that returns " + CONTRACT,
    )


def parse_options(settings: Iterable[str]) -> dict[str, Any]:
    """Parse ``["layers=24", "name=gpt2"]`` as options with YAML scalars as values."""
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            raise WorkloadError(
                f"cannot read the option: --set {setting!r}",
                needed="NAME=VALUE",
                hint="--set layers=24",
            )
        options[name] = _option(value)
    return options


def _option(text: str) -> Any:
    """Parse a YAML scalar; ``1e-3``, a string in YAML, is parsed as a number."""
    if _EXPONENT.fullmatch(text):
        return float(text)
    with suppress(yaml.YAMLError, ValueError):  # ValueError: an invalid date
        return yaml.safe_load(text) if text else ""
    return text


def parse_input(text: str) -> torch.Tensor:
    """Make a tensor of ``8x3x224x224:float32``: random floats or integer zeros."""
    shape, _, dtype_name = text.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    if not re.fullmatch(r"\d+(x\d+)*", shape) or not isinstance(dtype, torch.dtype):
        raise WorkloadError(
            f"cannot read the input: {text!r}",
            needed="SHAPE:DTYPE, sizes joined by 'x' and a torch dtype",
            hint="--input 8x3x224x224:float32",
        )
    sizes = [int(size) for size in shape.split("x")]
    if dtype.is_floating_point:
        return torch.randn(sizes, dtype=dtype)
    return torch.zeros(sizes, dtype=dtype)


def _own_modules(module: ModuleType) -> list[tuple[str, Any]]:
    """Modules of a file, else its module classes that need no arguments."""
    found: list[tuple[str, Any]] = [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, nn.Module)
    ]
    if found:
        return found
    return [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
        and _needs_no_arguments(value)
    ]


def _needs_no_arguments(function: Callable[..., object]) -> bool:
    return all(map(_has_default, inspect.signature(function).parameters.values()))


def _has_default(parameter: inspect.Parameter) -> bool:
    variadic = parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD
    return parameter.default is not parameter.empty or parameter.kind in variadic


def _check_switch(parameter: inspect.Parameter, value: object) -> None:
    """Refuse a value such as ``maybe`` for a switch, where it would count as on."""
    if isinstance(parameter.default, bool) and value not in (True, False, None):
        raise WorkloadError(
            f"cannot use the option {parameter.name}={value}: it is a switch",
            needed="true or false",
            hint=f"--set {parameter.name}={str(not parameter.default).lower()}",
        )


def _check_arguments(
    kind: type[nn.Module], options: Mapping[str, Any], target: str
) -> None:
    """Refuse a class of models whose arguments no option gives."""
    missing = [
        parameter.name
        for parameter in inspect.signature(kind).parameters.values()
        if not _has_default(parameter) and parameter.name not in options
    ]
    if missing:
        names = ", ".join(missing)
        raise WorkloadError(
            f"{target} is a class, and its argument {names} is missing",
            needed="a function build() in a file, that returns " + CONTRACT,
            hint=f"in model.py: def build(): return {kind.__name__}({names}), batch",
        )


def _check_options(
    factory: Callable[..., object], options: Mapping[str, Any], target: str
) -> None:
    parameters = inspect.signature(factory).parameters
    for name, value in options.items():
        if name in parameters:
            _check_switch(parameters[name], value)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in options:
        if name not in parameters:
            near = did_you_mean(name, parameters)
            raise WorkloadError(
                f"{target}: the factory takes no option '{name}'",
                needed="one of " + (", ".join(parameters) or "none at all"),
                hint=f"did you mean '{near}'?" if near else "leave it out",
            )


def _call(
    factory: Callable[..., object], options: Mapping[str, Any], name: str
) -> object:
    try:
        return factory(**options)
    except Exception as error:
        raise workload_error(name, error) from error


def _no_factory(module: ModuleType, location: str, name: str) -> WorkloadError:
    functions = [n for n, v in vars(module).items() if inspect.isfunction(v)]
    near = did_you_mean(name, functions)
    return WorkloadError(
        f"cannot build the workload: {location} has no function '{name}'",
        needed="one of " + (", ".join(functions) or "none: the file has no function"),
        hint=f"did you mean '{near}'?" if near else "name it: model.py:FACTORY",
    )
