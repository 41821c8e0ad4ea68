"""Hooks around the calls of a model: where regions open and close while it runs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ckplan.applying.hooks.attached import Attached
from ckplan.applying.hooks.choices import Choice
from ckplan.applying.hooks.session import (
    Args,
    Kwargs,
    OpenRegion,
    Session,
    chosen,
    raised,
    running,
)
from ckplan.applying.tensors.arguments import settings
from ckplan.applying.tensors.compiled import uncompiled_function
from ckplan.graph.fqn import Call, call_name


@dataclass
class RegionHooks(Attached):
    """Hooks around a module at whose calls regions begin or end."""

    fqn: str
    session: Session
    choices: list[Choice] = field(default_factory=list)  # of regions that begin here
    inner: list[tuple[Choice, Choice]] = field(default_factory=list)  # nested regions
    switches: list[nn.Module] = field(default_factory=list)  # of transformers, inside
    handles: list[RemovableHandle] = field(default_factory=list)

    @uncompiled_function
    def begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Open a region if one begins with this call."""
        call = self.fqn, self.session.count(self.fqn)
        self.session.check_began(call, self.choices)
        running.calls.append((self.session, call))
        choice = chosen(self.choices, call[1])
        if choice is not None and running.regions:
            self._warn_inside(choice, running.regions[-1])
        elif choice is not None:
            self.session.check_autocast(module, self.fqn)
            running.place(choice)
            kind = choice.programs.find(_key(module, args, kwargs))
            region = choice.begin(choice.title or type(module).__name__, kind)
            switched_off = [m for m in self.switches if m.gradient_checkpointing]
            for switched in switched_off:
                switched.gradient_checkpointing = False
            region.open()
            running.regions.append(
                OpenRegion(
                    choice,
                    region,
                    kind,
                    self.session,
                    choice.last or call,
                    switched_off,
                )
            )
        if running.regions:
            running.regions[-1].begin_inner(self.inner, call)

    def _warn_inside(self, choice: Choice, around: OpenRegion) -> None:
        if around.session is self.session:
            what = f"{choice.name} runs inside {around.choice.name}, a region already"
            self.session.warn_once("inside", what)

    @uncompiled_function
    def end(
        self, module: nn.Module, args: Args, kwargs: Kwargs, output: object
    ) -> None:
        """Close the region that ends with this call; called even if forward raised."""
        del module, args, kwargs
        if not running.calls:
            return  # abandoned: an outer call was interrupted
        session, call = running.calls.pop()
        if running.regions:
            found = running.regions[-1]
            if found.session is session:
                found.end_inner(call)
                if found.last == call:
                    running.regions.pop().close(learn=not raised(output))


@dataclass
class ParentHooks(Attached):
    """Hooks around a module that may call the modules of runs.

    A run ends no later than this module's call.
    """

    fqn: str
    session: Session
    choices: list[Choice] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)

    @uncompiled_function
    def begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Note that the module runs."""
        del module, args, kwargs
        running.made_by.append((self.session, self.fqn))

    @uncompiled_function
    def end(
        self, module: nn.Module, args: Args, kwargs: Kwargs, output: object
    ) -> None:
        """Close a run whose last call never came."""
        del module, args, kwargs
        if (self.session, self.fqn) in running.made_by[-1:]:
            running.made_by.pop()
        found = running.regions[-1] if running.regions else None
        if found is not None and found.choice in self.choices:
            running.regions.pop().close(learn=False)
            if output is not None:  # else it raised
                what = f"{found.choice.name} is no run: its last call never came"
                found.session.warn_once("run", what)


@dataclass
class PathHooks(Attached):
    """Hooks around a module inside a region: they track which module runs."""

    fqn: str
    session: Session
    handles: list[RemovableHandle] = field(default_factory=list)

    @uncompiled_function
    def begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Enter the module."""
        del module, args, kwargs
        if running.regions:
            running.regions[-1].region.path.enter(self.fqn)

    @uncompiled_function
    def end(
        self, module: nn.Module, args: Args, kwargs: Kwargs, output: object
    ) -> None:
        """Leave the module."""
        del module, args, kwargs, output
        if running.regions:
            running.regions[-1].region.path.leave()


def _key(module: nn.Module, args: Args, kwargs: Kwargs) -> Hashable:
    """The program-cache key of a forward."""
    given = [
        (x.shape, x.dtype, x.requires_grad)
        for x in (*args, *kwargs.values())
        if isinstance(x, torch.Tensor)
    ]
    return module.training, settings(), *given


@dataclass
class Chooser:
    """Tells a re-run module whether this call is a region."""

    session: Session
    fqn: str
    choices: list[Choice]

    def __call__(self) -> str | None:
        """The name of the region that begins now; None if none begins."""
        call = self._call()
        self.session.check_began(call, self.choices)
        choice = chosen(self.choices, call[1])
        if choice is None:
            return None
        choice.runs += 1
        return call_name(*call)

    def _call(self) -> Call:
        """The call that begins; hooks may have counted it already."""
        if running.calls:
            session, call = running.calls[-1]
            if session is self.session and call[0] == self.fqn:
                return call
        return self.fqn, self.session.count(self.fqn)
