"""Which targets are sources, and which options each kind of source takes.

A source is ``hf:ID_OR_FOLDER``, a path to a ``config.json``, ``timm:NAME``,
``torchvision:NAME`` or ``diffusers:FOLDER``. Every other target is a user's file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ckplan.errors import WorkloadError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Made:
    """What a source makes: a model, a batch with labels, and what was assumed."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    assumptions: tuple[str, ...] = ()
    target: Any = None  # what the loss alone gets


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of source: the module that opens it, and the options that it takes."""

    module: str
    options: tuple[str, ...]
    example: str


KINDS: dict[str, Kind] = {
    "hf": Kind(
        "ckplan.sources.from_transformers",
        ("task", "batch", "dtype", "lora", "attention", "trust_remote_code"),
        "hf:FOLDER",
    ),
    "timm": Kind("ckplan.sources.from_timm", ("batch", "dtype"), "timm:resnet50"),
    "torchvision": Kind(
        "ckplan.sources.from_torchvision", ("batch", "dtype"), "torchvision:resnet50"
    ),
    "diffusers": Kind(
        "ckplan.sources.from_diffusers", ("batch", "dtype", "lora"), "diffusers:FOLDER"
    ),
}
OPTIONS = tuple(dict.fromkeys(name for kind in KINDS.values() for name in kind.options))
"""Options of sources; an option of another name changes the configuration."""


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed target: its kind, one of ``KINDS``, and the name within that kind."""

    kind: str
    name: str

    @property
    def title(self) -> str:
        """A short name for files, such as ``Llama-3.1-8B``."""
        path = PurePath(
            Path(self.name).resolve() if self.name[:1] == "." else self.name
        )
        last = path.parent.name if path.name == CONFIG_FILE else path.name
        return re.sub(r"[^\w.-]+", "_", last) or "model"


@dataclass(frozen=True, slots=True)
class Ask:
    """The options of a source, parsed."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the configuration


def parse_source(target: str) -> Source | None:
    """The source that a target names; None if it names a user's file or module.

    >>> parse_source("hf:gpt2"), parse_source("model.py:build")
    (Source(kind='hf', name='gpt2'), None)
    """
    if PurePath(target).name == CONFIG_FILE and not target.startswith((*_PREFIXES,)):
        return Source("hf", target)
    kind, colon, name = target.partition(":")
    if not colon or kind not in KINDS:
        return None
    if name[:1] == "~":  # which shells leave as it is after a colon
        name = str(Path(name).expanduser())
    return Source(kind, name)


def open_source(target: str, options: Mapping[str, Any]) -> Callable[[], Made]:
    """Import what a source needs, read its configuration, and return its factory.

    The factory builds model and batch on the default device, as a user's factory does.

    Args:
        target: A target for which ``parse_source`` finds a source.
        options: Options of the kind; others change fields of the configuration.

    Raises:
        WorkloadError: A package is missing, the configuration is not found or not
            known, or an option does not fit.
    """
    source = parse_source(target)
    assert source is not None, "internal error: the target is no source"
    kind = KINDS[source.kind]
    if not source.name:
        raise WorkloadError(
            f"cannot read the source: {target!r} has no name",
            needed="a name, an id or a folder after the colon",
            hint=f"ckplan profile {kind.example}",
        )
    own = {name: value for name, value in options.items() if name in OPTIONS}
    for name in own:
        if name not in kind.options:
            raise WorkloadError(
                f"cannot use {flag(name)} with '{source.kind}:'",
                needed=", ".join(map(flag, kind.options)),
                hint=f"leave out {flag(name)}",
            )
    changes = {name: value for name, value in options.items() if name not in own}
    factory: Callable[[], Made] = import_module(kind.module).open_source(
        Ask(source.name, own, changes)
    )
    return factory


def flag(option: str) -> str:
    """An option as on the command line: ``--trust-remote-code``."""
    return "--" + option.replace("_", "-")


def check_fields(changes: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse changes of fields that a configuration does not have.

    Raises:
        WorkloadError: A field is unknown.
    """
    for name in changes:
        if name not in known:
            near = did_you_mean(name, known)
            raise WorkloadError(
                f"cannot use --set {name}=...: the configuration has no such field",
                needed="a field of the configuration, such as "
                + ", ".join(sorted(known)[:5]),
                hint=f"did you mean '{near}'?" if near else "leave it out",
            )


_PREFIXES = tuple(f"{kind}:" for kind in KINDS)
