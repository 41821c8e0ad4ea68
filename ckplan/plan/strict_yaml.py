"""Read YAML strictly: checked records, and errors with file and line.

All scalars are read as strings and then checked. Tags and aliases are refused, so a
file cannot expand to more than its text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml
from yaml.reader import ReaderError

from ckplan.errors import CkplanError, PlanError, did_you_mean

T = TypeVar("T")

_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A node of a file, with its name, file and line for errors."""

    what: str  # "a region", or its key in quotes
    file: str
    line: int
    node: yaml.Node
    examples: Mapping[str, str]  # `what` -> example for hints

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.file}, line {self.line}"

    def error(self, found: str, *, needed: str, hint: str) -> PlanError:
        """Return an error at this place."""
        return PlanError(f"{self.where}: {found}", needed=needed, hint=hint)

    def locate(self, make: Callable[..., T], *args: object) -> T:
        """Call a function; adds this file and line to its errors."""
        try:
            return make(*args)
        except CkplanError as error:
            raise self.error(error.what, needed=error.needed, hint=error.hint) from None

    def text(self) -> str:
        """Return the scalar of this node."""
        return str(self._value(yaml.ScalarNode, "a single value"))

    def read(self, convert: Callable[[str], T]) -> T:
        """Return the scalar of this node, converted."""
        return self.locate(convert, self.text())

    def items(self, what: str) -> list[YamlNode]:
        """Return the items of this list; ``what`` names them in errors."""
        nodes = self._value(yaml.SequenceNode, "a list")
        return [self._inner(what, node, node) for node in nodes]

    def entries(self) -> dict[str, YamlNode]:
        """Return the entries of this mapping, each with the line of its key."""
        entries: dict[str, YamlNode] = {}
        for key, value in self._value(yaml.MappingNode, "a mapping"):
            name = self._inner("a key", key, key).text()
            entry = self._inner(repr(name), key, value)
            if name in entries:
                raise entry.error(
                    f"key {name!r} comes twice, first in line {entries[name].line}",
                    needed=f"every key of {self.what} once",
                    hint="remove one of the two",
                )
            entries[name] = entry
        return entries

    def record(
        self,
        keys: Collection[str],
        *,
        required: Collection[str] = (),
    ) -> dict[str, YamlNode]:
        """Return the entries of this mapping, after checking its keys.

        Args:
            keys: Allowed keys.
            required: Required keys.
        """
        entries = self.entries()
        needed = f"one of {', '.join(keys)}"
        for key in entries:
            if key not in keys:
                near = did_you_mean(key, keys)
                hint = f"did you mean {near!r}?" if near else f"leave {key!r} out"
                found = f"unknown key {key!r} in {self.what}"
                raise entries[key].error(found, needed=needed, hint=hint)
        for key in required:
            if key not in entries:
                found = f"missing key {key!r} in {self.what}"
                needed = f"{', '.join(required)} in {self.what}"
                raise self.error(found, needed=needed, hint=self.example(repr(key)))
        return entries

    def _value(self, kind: type[yaml.Node], needed: str) -> Any:
        node: Any = self.node
        if node.value == "" and not node.style:
            found = "empty"
        elif isinstance(node, kind):
            return node.value
        else:
            nouns = {"scalar": "a single value", "sequence": "a list"}
            found = nouns.get(node.id, "a mapping")
        hint = self.example(self.what)
        raise self.error(f"{self.what} is {found}", needed=needed, hint=hint)

    def example(self, what: str) -> str:
        """Return an example of a place, for hints."""
        return self.examples.get(what, "leave it out")

    def _inner(self, what: str, place: yaml.Node, node: yaml.Node) -> YamlNode:
        return YamlNode(what, self.file, _line(place), node, self.examples)


def compose(
    text: str, name: str, examples: Mapping[str, str], what: str = "the plan"
) -> YamlNode:
    """Read YAML into nodes, without converting scalars.

    Args:
        text: The whole file.
        name: The name of the file in errors.
        examples: Place -> example, for hints.
        what: The kind of file, such as "the plan".

    Raises:
        PlanError: ``text`` is not YAML, or empty.
    """
    try:
        root = yaml.compose(text, Loader=_Composer)
    except ReaderError as error:
        line = 1 + text.count("\n", 0, error.position)
        raise not_yaml(name, line, "a character that is not text", what) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise not_yaml(name, line, error.problem or str(error), what) from None
    if root is None:
        raise PlanError(
            f"{name}, line 1: {what} is empty",
            needed=f"YAML that holds {what}",
            hint=examples[what],
        )
    return YamlNode(what, name, _line(root), root, examples)


class _Composer(yaml.BaseLoader):
    """Makes nodes only; refuses tags, aliases and deep nesting."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = f"found the alias '*{event.anchor}'"
        elif event.tag:
            problem = f"found the tag '{event.tag}'"
        elif self._depth == _MAX_DEPTH:
            problem = f"found more than {_MAX_DEPTH} levels"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def not_yaml(name: str, line: int, problem: str, what: str = "the plan") -> PlanError:
    """Return the error for a file that is not plain YAML."""
    return PlanError(
        f"{name}, line {line}: cannot read {what}: {problem}",
        needed="YAML in UTF-8, without tags (!x) and aliases (*x)",
        hint='indent by spaces; inside [] and {}, put quotes: "int64[8,256]"',
    )


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
