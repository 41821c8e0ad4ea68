"""Load what ``model.py`` offers: a model, a batch, and what trains them.

The contract is section "workload" of the README: a factory returns ``(model, batch)``,
``(model, batch, loss_fn)`` or a mapping with keys ``model``, ``batch``, ``loss`` and
``optimizer``; a file without a factory may hold one module, with ``--input``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils import _pytree as pytree

from ckplan.errors import WorkloadError, did_you_mean

DEFAULT_FACTORY = "build"
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_CONTRACT = "(model, batch), (model, batch, loss_fn) or a dict with 'model' and 'batch'"


@dataclass(frozen=True)
class Workload:
    """A model, one batch, and optionally how to train it."""

    model: nn.Module
    batch: Any  # a mapping is passed as keywords, a tuple or list as positionals
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class WorkloadSpec:
    """Where a workload comes from: everything that a fresh process needs to build it.

    ``target`` is ``path/to/model.py``, ``path/to/model.py:factory`` or
    ``package.module:factory``; ``options`` are passed to the factory; ``inputs`` are
    ``8x3x224x224:float32`` shapes for a bare module.
    """

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short name for files: the stem of the path or the last module name."""
        return Path(self._split()[0]).stem.rpartition(".")[2] or "model"

    def load(self) -> Callable[[], Workload]:
        """Import the target and find what builds the workload.

        Raises:
            WorkloadError: The target is missing, is no Python, or has no factory.
        """
        location, factory_name = self._split()
        module = _import(location)
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
                f"cannot use --input beside {factory_name or DEFAULT_FACTORY}(), which "
                "makes the batch",
                needed="a factory, or a module and --input, not both",
                hint="leave out --input",
            )
        _check_options(factory, self.options, self.target)
        name = f"{location}:{factory_name or DEFAULT_FACTORY}"
        return lambda: as_workload(_call(factory, self.options, name), name)

    def build(self) -> Workload:
        """Import the target and make the workload on the default device.

        Raises:
            WorkloadError: As for ``load``, or the factory raises or returns nonsense.
        """
        return self.load()()

    def _split(self) -> tuple[str, str | None]:
        location, colon, name = self.target.rpartition(":")
        if colon and re.fullmatch(r"[A-Za-z_]\w*", name):
            return location, name
        return self.target, None

    def _from_bare_module(self, module: ModuleType, location: str) -> Workload:
        found = _own_modules(module)
        if len(found) != 1 or not self.inputs:
            what = ", ".join(name for name, _ in found) or "none"
            raise WorkloadError(
                f"cannot build a workload: {location} has no factory "
                f"'{DEFAULT_FACTORY}' (modules found: {what})",
                needed="a function build() that returns "
                + _CONTRACT
                + ", or exactly one nn.Module and --input SHAPE:DTYPE",
                hint="ckplan profile model.py --input 8x3x224x224:float32",
            )
        return self._from_module(*found[0], location)

    def _from_module(
        self, name: str, made: nn.Module | type[nn.Module], location: str
    ) -> Workload:
        if not self.inputs:
            raise WorkloadError(
                f"cannot build a workload: nobody says what {location}:{name} is given",
                needed="--input SHAPE:DTYPE for every argument of its forward",
                hint="ckplan profile model.py --input 8x3x224x224:float32",
            )
        if isinstance(made, type):
            made = _call(made, self.options, f"{location}:{name}")
        return Workload(made, tuple(parse_input(text) for text in self.inputs))


def as_spec(target: object) -> WorkloadSpec:
    """What a caller says of a workload: a ``WorkloadSpec``, or its target alone.

    Raises:
        WorkloadError: It is neither, like a model, which no fresh process could build.
    """
    if isinstance(target, WorkloadSpec):
        return target
    if isinstance(target, (str, Path)):
        return WorkloadSpec(str(target))
    raise WorkloadError(
        f"cannot build a workload from a {type(target).__name__}",
        needed="'model.py', 'model.py:factory' or a WorkloadSpec",
        hint="a function build() in a file, that returns " + _CONTRACT,
    )


def parse_options(settings: Iterable[str]) -> dict[str, Any]:
    """``["layers=24", "name=gpt2"]`` as keyword options, values as YAML scalars."""
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
    """A YAML scalar; ``1e-3``, which YAML takes for a text, is a number, too."""
    if _EXPONENT.fullmatch(text):
        return float(text)
    with suppress(yaml.YAMLError, ValueError):  # of a day that is not there
        return yaml.safe_load(text) if text else ""
    return text


def parse_input(text: str) -> torch.Tensor:
    """``8x3x224x224:float32`` as a tensor: random floats, or integers of zeros."""
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


def as_workload(made: object, name: str) -> Workload:
    """Check what a factory returned.

    Raises:
        WorkloadError: It is no workload; the message says what it was.
    """
    parts: dict[str, Any]
    if isinstance(made, Mapping):
        unknown = set(made) - {"model", "batch", "loss", "optimizer"}
        if unknown:
            raise _nonsense(name, f"has an unknown key {min(map(str, unknown))!r}")
        parts = {str(key): value for key, value in made.items()}
    elif isinstance(made, tuple) and len(made) in (2, 3):
        parts = dict(zip(("model", "batch", "loss"), made, strict=False))
    else:
        raise _nonsense(name, f"is of type {type(made).__name__}")
    if not isinstance(parts.get("model"), nn.Module):
        kind = type(parts.get("model")).__name__
        raise _nonsense(name, f"has a model of type {kind}, no torch.nn.Module")
    if "batch" not in parts or not tensors_of(parts["batch"]):
        raise _nonsense(name, "has a batch without a single tensor")
    if parts.get("loss") is not None and not callable(parts["loss"]):
        raise _nonsense(name, f"has a loss of type {type(parts['loss']).__name__}")
    optimizer = parts.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise _nonsense(name, f"has an optimizer of type {type(optimizer).__name__}")
    return Workload(**parts)


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in a nested container, in order."""
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def rows_of(workload: Workload) -> int:
    """How many rows a batch has: the first size of its first tensor that has one."""
    sizes = (t.shape[0] for t in tensors_of(workload.batch) if t.dim())
    return next(sizes, 0)


def first_rows(workload: Workload, rows: int) -> Workload:
    """The same workload with the first rows of its batch, copied."""
    whole = rows_of(workload)

    def first(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, torch.Tensor) and leaf.dim()
        return leaf[:rows].clone() if is_tensor and leaf.shape[0] == whole else leaf

    return replace(workload, batch=pytree.tree_map(first, workload.batch))


def on_device(workload: Workload, device: torch.device) -> Workload:
    """The workload moved to a device, model in place.

    Raises:
        WorkloadError: A tensor is neither there nor on the default device.
    """
    for tensor in tensors_of(workload.batch):
        if tensor.device.type not in ("cpu", device.type):
            raise WorkloadError(
                f"the batch is on another device: a tensor of shape "
                f"{tuple(tensor.shape)} is on {tensor.device}, the model goes to "
                f"{device}",
                needed=f"a batch on cpu or {device.type}",
                hint="build model and batch on the default device; ckplan moves them",
            )
    for name, parameter in workload.model.named_parameters():
        if parameter.device.type not in ("cpu", device.type):
            raise WorkloadError(
                f"the model is on another device: '{name}' is on {parameter.device}",
                needed=f"parameters on cpu or {device.type}",
                hint="build model and batch on the default device; ckplan moves them",
            )

    if device.type == "cpu":
        return workload

    moved = {id(leaf): leaf.to(device) for leaf in tensors_of(workload.batch)}
    batch = pytree.tree_map(lambda leaf: moved.get(id(leaf), leaf), workload.batch)
    model = workload.model.to(device)
    return Workload(model, batch, workload.loss, workload.optimizer)


def _import(location: str) -> ModuleType:
    if location.endswith(".py") or "/" in location or Path(location).exists():
        return _import_file(Path(location))
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if not f"{location}.".startswith(f"{error.name}."):  # another is missing
            raise _raised(location, error) from error
        raise WorkloadError(
            f"cannot import the workload: {location} ({error})",
            needed="a path to a Python file, or package.module:factory",
            hint="ckplan profile path/to/model.py",
        ) from None
    except Exception as error:
        raise _raised(location, error) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")])
        raise WorkloadError(
            f"cannot read the workload: {path} is not there",
            needed="a Python file with a function build()",
            hint=f"did you mean '{near}'?" if near else "check the path",
        )
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"ckplan_workload_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(
            f"cannot read the workload: {path} is no Python file",
            needed="a Python file with a function build()",
            hint="give the file a name that ends in .py",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise WorkloadError(
            f"cannot read the workload: {path} is no Python ({error})",
            needed="a Python file with a function build()",
            hint=f"python -m py_compile {path}",
        ) from None
    except Exception as error:
        if "no known parent package" in str(error) and not path.is_absolute():
            dotted = ".".join(path.with_suffix("").parts)
            raise WorkloadError(
                f"cannot import the workload: {path} is part of a package ({error})",
                needed="a file of its own, or package.module:factory",
                hint=f"ckplan profile {dotted}:{DEFAULT_FACTORY}",
            ) from None
        raise _raised(str(path), error) from error
    finally:
        with suppress(ValueError):  # the file may have changed the path
            sys.path.remove(folder)
    return module


def _own_modules(module: ModuleType) -> list[tuple[str, Any]]:
    """Modules and argument-free module classes that a file itself defines."""
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
    return all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        for p in inspect.signature(function).parameters.values()
    )


def _check_options(
    factory: Callable[..., object], options: Mapping[str, Any], target: str
) -> None:
    parameters = inspect.signature(factory).parameters
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
        raise _raised(name, error) from error


def _raised(name: str, error: BaseException) -> WorkloadError:
    lines = str(error).strip().splitlines() or [""]
    return WorkloadError(
        f"cannot build the workload: {name} raised {type(error).__name__}: {lines[0]}",
        needed="a factory that returns " + _CONTRACT,
        hint=_where(error),
    )


def _where(error: BaseException) -> str:
    """The innermost line of the traceback that is not ours."""
    trace = error.__traceback__
    found = "run the factory alone in Python"
    while trace is not None:
        code = trace.tb_frame.f_code
        if "ckplan_workload_" in str(trace.tb_frame.f_globals.get("__name__")):
            found = f"look at {code.co_filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _no_factory(module: ModuleType, location: str, name: str) -> WorkloadError:
    functions = [n for n, v in vars(module).items() if inspect.isfunction(v)]
    near = did_you_mean(name, functions)
    return WorkloadError(
        f"cannot build the workload: {location} has no function '{name}'",
        needed="one of " + (", ".join(functions) or "none: the file has no function"),
        hint=f"did you mean '{near}'?" if near else "name it: model.py:FACTORY",
    )


def _nonsense(name: str, found: str) -> WorkloadError:
    return WorkloadError(
        f"cannot build the workload: what {name} returned {found}",
        needed=_CONTRACT,
        hint="return model, {'input_ids': ids, 'labels': ids}",
    )
