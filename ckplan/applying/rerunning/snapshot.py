"""Snapshot of the state that a forward may read and change beside its inputs.

Parameters, as far as others take their place, and whether they require gradients,
buffers, plain attributes of modules and lists, dicts and sets in them, hooks around
forwards, and the random states of torch, Python, NumPy and of generators, those that
modules hold included.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckplan.applying.rebuilding.digest import Digest, digest
from ckplan.applying.rerunning.attributes import (
    REGISTRIES,
    Containers,
    Content,
    Modules,
    Seen,
    are_same,
    holds,
    is_state,
)
from ckplan.applying.rerunning.sources import Source
from ckplan.applying.tensors.arguments import version_of


@dataclass
class Snapshot:
    """State that a forward may read and change beside its inputs."""

    content: Content
    attributes: list[Seen]
    containers: Containers
    hookless: list[dict[int, Any]]  # where there are no hooks
    parameters: list[tuple[dict[str, Any], dict[str, Any]]]
    trained: tuple[list[nn.Parameter], list[bool]]  # whether they require gradients
    buffers: list[tuple[dict[str, Any], dict[str, Any]]]
    contents: list[tuple[torch.Tensor, torch.Tensor, int]]
    random: list[tuple[Source, Any]]

    @classmethod
    def of(cls, modules: Modules, sources: Iterable[Source]) -> Snapshot:
        """Take a snapshot of modules, as they were looked at now."""
        return cls(
            content=modules.content,
            attributes=modules.attributes,
            containers=modules.containers,
            hookless=modules.hookless,
            parameters=modules.named_parameters,
            trained=(modules.parameters, [*map(_is_trained, modules.parameters)]),
            buffers=modules.buffers,
            contents=[
                (b, _elements(b).clone(), version_of(b))
                for b in filter(is_state, modules.tensors)
            ],
            random=[(one, one.state()) for one in (*sources, *modules.sources)],
        )

    def settle(self) -> list[tuple[torch.Tensor, int, Digest | None]]:
        """Free the state that did not change.

        Returns:
            Unchanged buffers, with their versions and digests.
        """
        same = [
            (b, version, digest(b) if b.device.type == "cpu" else None)
            for b, copy, version in self.contents
            if _is_same(b, copy, version)
        ]
        unchanged = {id(buffer) for buffer, *_ in same}
        self.contents = [one for one in self.contents if id(one[0]) not in unchanged]
        self.random = [one for one in self.random if not one[0].is_at(one[1])]
        return same

    def restore(self, now: Snapshot | None = None) -> None:
        """Restore the state.

        Args:
            now: The state as it is, if that is known.
        """
        known = now is not None and now.content is self.content
        if not known and not self.content.is_now():
            self._restore_attributes()
        known = now is not None and now.containers is self.containers
        if not known and not self.containers.are_now():
            for container, content in self.containers.found:
                _fill(container, content)
        for hooks in filter(None, self.hookless):
            hooks.clear()
        parameters, trained = self.trained
        if [*map(_is_trained, parameters)] != trained:
            _train(zip(parameters, trained, strict=True))
        for buffer, copy, _ in self.contents:
            _elements(buffer).copy_(copy)
        for source, state in self.random:
            source.put(state)

    def _restore_attributes(self) -> None:
        for everything, before, plain in self.attributes:
            if not are_same(everything, before):
                _restore_plain(everything, plain)
        for named, before in self.parameters:
            _put_back(named, before)
        changed = [one for one in self.buffers if not are_same(*one)]
        for named, before in changed:
            named.clear()
            named.update(before)


def _restore_plain(everything: dict[str, Any], plain: dict[str, Any]) -> None:
    now = {k: v for k, v in everything.items() if k not in REGISTRIES}
    if not are_same(now, plain):
        everything.update(plain)
        for key in now.keys() - plain.keys():
            del everything[key]


def _put_back(named: dict[str, Any], before: dict[str, Any]) -> None:
    """Put parameters back where others took their place."""
    if not are_same(named, before):
        named.update({k: v for k, v in before.items() if _is_other(named.get(k), v)})


def _fill(container: Any, content: Any) -> None:
    """Restore the content of a container if it changed."""
    if holds(container, content):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


def _is_other(now: Any, before: Any) -> bool:
    """Whether a parameter took another's place, as ``functional_call`` puts it there.

    What shards a model puts tensors of its own kinds and sizes there, and means it.
    """
    both = type(now) is type(before) is nn.Parameter
    return both and now is not before and now.shape == before.shape


def _train(trained: Iterable[tuple[nn.Parameter, bool]]) -> None:
    """Set whether parameters require gradients."""
    for parameter, requires_grad in trained:
        if parameter.is_leaf and parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)


_is_trained = operator.attrgetter("requires_grad")


def _elements(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer's elements, each once where it is expanded.

    Through ``.data``, so that writes do not invalidate saved tensors of autograd.
    """
    bare = buffer.data
    for dim, (size, stride) in enumerate(zip(bare.shape, bare.stride(), strict=True)):
        if size > 1 and not stride:
            bare = bare.narrow(dim, 0, 1)
    return bare


def _is_same(buffer: torch.Tensor, copy: torch.Tensor, version: int) -> bool:
    """Whether a buffer is unchanged; writes to ``.data`` add no version."""
    return version_of(buffer) == version and shows_same(buffer, copy)


def shows_same(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether the bytes are unchanged, if comparing is cheap."""
    checks_digest = type(buffer) is torch.Tensor and buffer.device.type == "cpu"
    return not checks_digest or torch.equal(_elements(buffer), copy)
