"""The trace file: a graph as JSON, gzipped when the name ends in ``.gz``.

It loads without torch and is never executed. Unknown keys are errors.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from ckplan import files
from ckplan.collector import collection_off
from ckplan.errors import GraphError
from ckplan.graph import rows
from ckplan.graph.graph import FORMAT_VERSION, Graph
from ckplan.graph.records import (
    Call,
    Encoding,
    EngineCosts,
    Hazard,
    Storage,
    TensorType,
    TiledBits,
)

_WITHOUT_LINES = 8  # format without lines, shapes and types; read as not known
_NEW_KEYS = {"lines", "op_lines", "tensors", "storage_tensors"}
_TOP_KEYS = {
    "ckplan_graph",
    "model",
    "fingerprint",
    "options",
    "notes",
    "costs",
    "engine",
    "num_forward",
    "num_backward",
    "names",
    "calls",
    "ops",
    "storages",
    "saved",
    "encodings",
    "hazards",
    *_NEW_KEYS,
}
# Keys of what only some steps have: tests of tiles, plans of compiled code.
_TILED, _GENERATED = "tiled", "generated"
_FUNCTIONS, _INSIDE = "functions", "inside"  # of functions of torch, if known
_KEPT = "kept_backwards"  # of steps that keep the graph
_OPTIONAL = {_TILED, _GENERATED, _FUNCTIONS, _INSIDE, _KEPT}
_LEAST_ENGINE_COSTS = 2  # earlier versions wrote no more
_UNKNOWN = -1  # in place of a row of "lines" or "tensors"


def dumps(graph: Graph) -> str:
    """The graph as JSON text, the same text for the same graph."""
    names = sorted({op.name for op in graph.ops})
    number = {name: i for i, name in enumerate(names)}
    ops = [
        [
            number[op.name],
            op.call,
            op.reads,
            op.writes,
            op.outputs,
            op.workspace,
            op.flops,
            op.moved_bytes,
            round(op.seconds, 9),
            int(op.random),
            round(op.launch_seconds, 9),
        ]
        for op in graph.ops
    ]
    content = {
        "ckplan_graph": FORMAT_VERSION,
        "model": graph.model,
        "fingerprint": dict(graph.fingerprint),
        "options": dict(graph.options),
        "notes": graph.notes,
        "costs": graph.costs,
        "engine": _engine_row(graph.engine),
        "num_forward": graph.num_forward,
        "num_backward": graph.num_backward,
        "names": names,
        "calls": [
            [c.fqn, c.number, c.parent, c.start, c.stop, c.module, c.arguments, c.state]
            for c in graph.calls
        ],
        "ops": ops,
        "storages": [[s.bytes, s.kind, s.maker, s.last] for s in graph.storages],
        "saved": [rows.of_saved(one) for one in graph.saved],
        "encodings": [
            [*row[:-2], round(row[-2], 9), round(row[-1], 9)]
            for row in map(astuple, graph.encodings)
        ],
        "hazards": [astuple(hazard) for hazard in graph.hazards],
        **_lines(graph),
        **_tensors(graph),
        **({_TILED: [astuple(one) for one in graph.tiled]} if graph.tiled else {}),
        **({_KEPT: graph.kept_backwards} if graph.kept_backwards else {}),
        **_generated(graph),
        **_functions(graph),
    }
    return json.dumps(content, separators=(",", ":")) + "\n"


def _generated(graph: Graph) -> dict[str, Any]:
    found = [[*astuple(one)[:-1], round(one.overhead, 9)] for one in graph.generated]
    return {_GENERATED: found} if found else {}


def _functions(graph: Graph) -> dict[str, Any]:
    called = [call.functions for call in graph.calls]
    inside = [number for number, op in enumerate(graph.ops) if op.is_inside]
    counts = {} if called == [None] * len(called) else {_FUNCTIONS: called}
    return {**counts, **({_INSIDE: inside} if inside else {})}


def _lines(graph: Graph) -> dict[str, Any]:
    """The lines, each once, and the row of each op's line."""
    lines = sorted({op.line for op in graph.ops} - {""})
    row = {"": _UNKNOWN} | {line: i for i, line in enumerate(lines)}
    return {"lines": lines, "op_lines": [row[op.line] for op in graph.ops]}


def _tensors(graph: Graph) -> dict[str, Any]:
    """The types of tensors, each once, and the row of each storage's type."""
    types = sorted({one.tensor for one in graph.storages if one.tensor is not None})
    row: dict[TensorType | None, int] = {one: i for i, one in enumerate(types)}
    row[None] = _UNKNOWN
    types_of = [row[one.tensor] for one in graph.storages]
    return {"tensors": types, "storage_tensors": types_of}


def loads(text: str, name: str) -> Graph:
    """Read what ``dumps`` wrote; ``name`` is what errors call it.

    Raises:
        GraphError: Not JSON, an unknown version or key, or a value out of range.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("ckplan:"):
            raise _other_file(name, "plan", f"ckplan show {name}") from None
        if name.endswith(".py"):
            raise _other_file(name, "workload", f"ckplan profile {name}") from None
        raise _unreadable(name, f"is not complete JSON ({error})") from None
    if not isinstance(content, dict) or "ckplan_graph" not in content:
        raise _unreadable(name, "is not a ckplan trace")
    version = content["ckplan_graph"]
    if version not in (FORMAT_VERSION, _WITHOUT_LINES):
        raise _unreadable(name, f"has format {version!r}")
    keys = _TOP_KEYS - (_NEW_KEYS if version == _WITHOUT_LINES else set())
    unknown, missing = set(content) - keys - _OPTIONAL, keys - set(content)
    if unknown or missing:
        word = "unknown" if unknown else "missing"
        raise _unreadable(name, f"has {word} key {min(unknown or missing)!r}")
    try:
        if not isinstance(content["model"], str):
            raise TypeError("the model has no name")
        return _from_content(content)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise _unreadable(name, f"has a malformed record ({error})") from None


def _from_content(content: dict[str, Any]) -> Graph:
    names = dict(enumerate(content["names"]))
    lines, tensors = _columns(content)
    ops = [
        rows.op(names, line, *row)
        for row, line in zip(content["ops"], lines, strict=True)
    ]
    for number in content.get(_INSIDE, ()):
        ops[range(len(ops)).index(number)] = replace(ops[number], is_inside=True)
    return Graph(
        model=str(content["model"]),
        fingerprint=dict(content["fingerprint"]),
        ops=tuple(ops),
        storages=tuple(
            Storage(size, kind, maker, last, tensor)
            for (size, kind, maker, last), tensor in zip(
                content["storages"], tensors, strict=True
            )
        ),
        saved=tuple(map(rows.saved, content["saved"])),
        calls=tuple(
            Call(
                fqn, n, parent, start, stop, module, tuple(given), tuple(state), called
            )
            for (fqn, n, parent, start, stop, module, given, state), called in zip(
                content["calls"],
                content.get(_FUNCTIONS, [None] * len(content["calls"])),
                strict=True,
            )
        ),
        encodings=tuple(Encoding(*row) for row in content["encodings"]),
        hazards=tuple(
            Hazard(call, kind, reason, tuple(guarded_by))
            for call, kind, reason, guarded_by in content["hazards"]
        ),
        num_forward=content["num_forward"],
        num_backward=content["num_backward"],
        notes=tuple(content["notes"]),
        costs=str(content["costs"]),
        engine=EngineCosts(*content["engine"]),
        options=dict(content["options"]),
        tiled=tuple(TiledBits(*row) for row in content.get(_TILED, ())),
        kept_backwards=tuple((start, stop) for start, stop in content.get(_KEPT, ())),
        generated=tuple(rows.code(*row) for row in content.get(_GENERATED, ())),
    )


def _engine_row(costs: EngineCosts) -> list[float]:
    """The costs of the engine; the last ones are left out if nothing was measured."""
    row, default = [round(cost, 9) for cost in astuple(costs)], astuple(EngineCosts())
    while len(row) > _LEAST_ENGINE_COSTS and row[-1] == default[len(row) - 1]:
        row.pop()
    return row


def _columns(
    content: dict[str, Any],
) -> tuple[Sequence[str], Sequence[TensorType | None]]:
    """The line of every op and the tensor of every storage."""
    if content["ckplan_graph"] == _WITHOUT_LINES:
        return [""] * len(content["ops"]), [None] * len(content["storages"])
    lines = {_UNKNOWN: "", **dict(enumerate(content["lines"]))}
    types: dict[int, TensorType | None] = {_UNKNOWN: None}
    for row, (dtype, shape) in enumerate(content["tensors"]):
        types[row] = TensorType(dtype, tuple(shape))
    return (
        [lines[row] for row in content["op_lines"]],
        [types[row] for row in content["storage_tensors"]],
    )


def _unreadable(name: str, found: str) -> GraphError:
    return GraphError(
        f"cannot read the trace: {name} {found}",
        needed=f"a graph file of format {FORMAT_VERSION} as `ckplan profile` writes it",
        hint="run `ckplan profile model.py` again, with this version of ckplan",
    )


def _other_file(name: str, kind: str, hint: str) -> GraphError:
    return GraphError(
        f"cannot read the trace: {name} is a {kind}, not a trace",
        needed="a graph file, as `ckplan profile` writes it",
        hint=f"{hint}, or name its trace",
    )


def save(graph: Graph, path: str | Path, *, force: bool = False) -> None:
    """Write a graph file, whole or not at all; gzipped if the name ends in ``.gz``.

    Raises:
        CkplanError: It is no graph, the file exists and ``force`` is not set, or it
            cannot be written.
    """
    if not isinstance(graph, Graph):
        raise _no_graph(graph, "save")
    content = dumps(graph).encode()
    if Path(path).suffix == ".gz":
        content = gzip.compress(content, compresslevel=6, mtime=0)
    files.write_bytes(path, content, force=force)


def step_of(given: Graph | str | Path) -> Graph:
    """A step, or that of a file.

    Raises:
        GraphError: It is neither, or see ``load``.
    """
    if isinstance(given, (str, Path)):
        return load(given)
    if not isinstance(given, Graph):
        raise _no_graph(given, "solve")
    return given


def _no_graph(given: object, verb: str) -> GraphError:
    return GraphError(
        f"cannot {verb} a {type(given).__name__} as a step",
        needed="a recorded step, or the path of its file",
        hint="ckplan.solve(ckplan.profile(model, batch), budget='12GiB')",
    )


def load(path: str | Path) -> Graph:
    """Read a graph file, gzipped or not.

    Raises:
        CkplanError: The file is missing.
        GraphError: The file is cut, of another version or not a graph.
    """
    content = files.read_bytes(path, "trace")
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(str(path), f"is cut or damaged ({error})") from None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise _unreadable(str(path), "is not text") from None
    with collection_off():
        return loads(text, str(path))
