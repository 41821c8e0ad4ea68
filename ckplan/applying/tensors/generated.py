"""Functions from generated source, which share their code where they are alike.

What differs between them are free variables. As globals, Python would look each up anew
in every call: it remembers where a name was found only while functions of the same code
have the same globals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from ckplan.applying.tensors.sharing import Shared, exactly

_MOST_SOURCES = 4096


def generate(
    lines: Sequence[str],
    constants: Mapping[str, Any],
    names: dict[str, Any],
    file: str,
) -> Callable[..., Any]:
    """Make a function, or find one that is the same.

    Args:
        lines: Its source; the first one defines it.
        constants: What it refers to, and others of the same source to something else.
        names: What all of them refer to: one dict, with the builtins.
        file: Its file, in tracebacks.
    """
    body = "\n ".join(lines)
    name = lines[0].removeprefix("def ").partition("(")[0]
    source = f"def make({', '.join(constants)}):\n {body}\n return {name}"
    make = FunctionType(_compiled(source, file), names)
    function: FunctionType = make(*constants.values())
    return _FUNCTIONS.one(exactly(function.__code__, id(names), constants), function)


_FUNCTIONS: Shared[FunctionType] = Shared()


@lru_cache(_MOST_SOURCES)
def _compiled(source: str, file: str) -> CodeType:
    module = compile(source, file, "exec")
    return next(one for one in module.co_consts if isinstance(one, CodeType))
