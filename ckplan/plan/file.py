"""The plan file: a plan as YAML, to read, diff and write by hand.

.. code-block:: yaml

    ckplan: 1
    regions:
      - calls: transformer.h.[0..7]
        by: program
        save: [attn.c_attn/addmm]
        encode: {attn.attn_dropout/bernoulli_: bits}
        offload: [mlp.c_fc/addmm]

All scalars are read as strings and then checked: ``1.10`` is a name. Nothing in a plan
is executed. Unknown content is an error that names its line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from yaml.representer import SafeRepresenter

from ckplan import files
from ckplan.errors import PlanError
from ckplan.graph.patterns import parse_call
from ckplan.plan.names import OpName
from ckplan.plan.numbers import count, fraction, whole_number
from ckplan.plan.plan import (
    BOUNDS,
    EXAMPLE_BY,
    EXAMPLE_ENCODE,
    EXAMPLE_FOR,
    FINGERPRINT_KEYS,
    Plan,
    PlannedRegion,
    Prediction,
    check_code,
    check_encoding,
    check_way,
)
from ckplan.plan.region import PROGRAM
from ckplan.plan.strict_yaml import YamlNode, compose, not_yaml
from ckplan.plan.tiles import SAME_BITS
from ckplan.plan.tiles_in_file import read_tiles, tiles_content
from ckplan.plan.workload import TRAINING_KEYS, read_workload
from ckplan.units import parse_bytes

FORMAT_VERSION = 1

_OTHER_FILES = {".py": "a Python file", ".json": "a trace", ".gz": "a trace"}
_MAX_COLUMNS = 88
_PREDICTION_KEYS = tuple(field.name for field in fields(Prediction))
_PREDICTED_ALWAYS = _PREDICTION_KEYS[:4]  # the others are of offloaded tensors
_REGION_KEYS = (
    *("calls", "run", "by", "save", "encode", "offload", "tiles", "bits"),
    *("difference", "regions", "for"),
)
_MOST_LEVELS = 16  # of nested regions
_EXAMPLES = {  # place in the file -> example
    "the plan": "`ckplan solve` writes one",
    "a region": "calls: transformer.h.[0..7]",
    "an op": "attn.c_attn/addmm",
    "'ckplan'": f"ckplan: {FORMAT_VERSION}",
    "'workload'": "workload: {target: model.py, set: [layers=24], amp: bf16}",
    "'training'": "training: {micro_batch: 12, accumulate: 4, amp: bf16}",
    "'set'": "set: [layers=24]",
    "'input'": "input: ['8x3x224x224:float32']",
    "'fingerprint'": "fingerprint: {torch: 2.13.0, device: cpu}",
    "'batch'": 'batch: {input_ids: "int64[8,256]"}',
    "'budget_bytes'": "budget_bytes: 12GiB",
    "'bound'": "bound: {any_schedule: 0.029}",
    "'regions'": "regions: [{calls: transformer.h.0}]",
    "'calls'": "calls: transformer.h.[0..7]",
    "'run'": "run: [transformer.h.0, transformer.h.3]",
    "a call": "run: [transformer.h.0, transformer.h.3]",
    "'by'": EXAMPLE_BY,
    "'for'": EXAMPLE_FOR,
    "'save'": "save: [attn.c_attn/addmm, mlp.c_fc/addmm]",
    "'encode'": EXAMPLE_ENCODE,
    "'offload'": "offload: [mlp.c_fc/addmm]",
    "'tiles'": "tiles: {tokens: 16, vocabulary: 16}",
    "'bits'": f"bits: {SAME_BITS}",
    "'difference'": "difference: 1.2e-03",
}


# -- writing -------------------------------------------------------------------------


def save(plan: Plan, path: str | Path, *, force: bool = False) -> None:
    """Write a plan file, whole or not at all.

    Raises:
        CkplanError: It is no plan, the file exists and ``force`` is not set, or it
            cannot be written.
    """
    if not isinstance(plan, Plan):
        raise _no_plan(plan, "save")
    files.write_text(path, dumps(plan), force=force)


def dumps(plan: Plan) -> str:
    """Return a plan as YAML, the same text for the same plan."""
    workload, training = dict(plan.workload), {}
    if "micro_batch" in workload:  # a setting of `tune`, apart from the workload
        training = {k: workload.pop(k) for k in TRAINING_KEYS if k in workload}
    content = {
        "ckplan": FORMAT_VERSION,
        "model": plan.model or None,
        "workload": workload or None,
        "training": training or None,
        "fingerprint": dict(plan.fingerprint) or None,
        "budget_bytes": plan.budget_bytes,
        "predicted": _prediction_content(plan.predicted) if plan.predicted else None,
        "bound": dict(plan.bound) or None,
        "regions": [_region_content(region) for region in plan.regions],
    }
    present = {key: value for key, value in content.items() if value is not None}
    one_line: Any = None  # PyYAML: one line if a node holds scalars only
    represent = SafeRepresenter(sort_keys=False, default_flow_style=one_line)
    root = represent.represent_data(present)
    _lay_out(root, indent=0)
    return _serialize(root)


def _prediction_content(predicted: Prediction) -> dict[str, object]:
    always = _PREDICTED_ALWAYS
    return {k: value for k, value in asdict(predicted).items() if value or k in always}


def _region_content(region: PlannedRegion) -> dict[str, object]:
    place = {"run": list(region.run)} if region.run else {"calls": region.calls}
    code = {"for": region.code} if region.code else {}
    content: dict[str, object] = {**place, **code, "by": region.by}
    if region.save:
        content["save"] = [str(op) for op in region.save]
    if region.encode:
        content["encode"] = {str(op): name for op, name in region.encode}
    if region.offload:
        content["offload"] = [str(op) for op in region.offload]
    if region.tiles is not None:
        content |= tiles_content(region.tiles)
    if region.inner:
        content["regions"] = [_region_content(one) for one in region.inner]
    return content


def _lay_out(mapping: Any, indent: int) -> None:
    """Use several lines for every region, and for values too long for one line."""
    mapping.flow_style = False
    for key, value in mapping.value:
        if isinstance(value, yaml.ScalarNode):
            continue
        if value.flow_style:  # nothing but scalars inside
            line = f"{key.value}: {_serialize(value)}".rstrip()
            value.flow_style = indent + len(line) <= _MAX_COLUMNS
        elif isinstance(value, yaml.MappingNode):
            _lay_out(value, indent + 2)
        else:
            for region in value.value:
                _lay_out(region, indent + 4)


def _serialize(node: yaml.Node) -> str:
    text: str = yaml.serialize(node, Dumper=_Dumper, width=2**31)
    return text


class _Dumper(yaml.SafeDumper):
    """Indents the items of a list below its key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)


# -- reading -------------------------------------------------------------------------


def load(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        CkplanError: There is no such file, or it cannot be read.
        PlanError: See ``loads``.
    """
    data = files.read_bytes(path, "plan")
    kind = _OTHER_FILES.get(Path(path).suffix)
    if kind is not None:
        raise PlanError(
            f"cannot read the plan '{path}': it is {kind}",
            needed="a plan that `ckplan solve` wrote, such as plan.yaml",
            hint="ckplan verify model.py plan.yaml",
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise not_yaml(str(path), line, "it is not text") from None
    return loads(text, str(path))


def as_plan(plan: object) -> Plan | None:
    """Return a plan: as it is, or read from the path of its file; None stays None.

    Raises:
        CkplanError: ``plan`` is of another type, or its file cannot be read.
    """
    if isinstance(plan, (str, Path)):
        return load(plan)
    if plan is None or isinstance(plan, Plan):
        return plan
    raise _no_plan(plan, "use")


def _no_plan(given: object, verb: str) -> PlanError:
    return PlanError(
        f"cannot {verb} a {type(given).__name__} as a plan",
        needed="a plan, or the path of its file",
        hint="ckplan.solve(graph, budget='12GiB')",
    )


def loads(text: str, name: str) -> Plan:
    """Read a plan from YAML; ``name`` is its name in error messages.

    Raises:
        PlanError: ``text`` is not YAML, a key is unknown, missing or duplicate, or a
            value is invalid.
    """
    root = compose(text, name, _EXAMPLES)
    version = root.entries().get("ckplan")
    if version:  # first: another version may have other keys
        version.read(_version)
    entries = root.record(("ckplan", *_READERS), required=("ckplan", "regions"))
    found = {key: _READERS[key](entries[key]) for key in _READERS if key in entries}
    training = found.pop("training", {})
    return Plan(**{**found, "workload": {**found.get("workload", {}), **training}})


def _fingerprint(part: YamlNode) -> dict[str, Any]:
    readers: dict[str, Callable[[YamlNode], Any]] = {
        "batch": _batch,
        "forwards": lambda entry: entry.read(count),
    }
    return {
        key: readers.get(key, YamlNode.text)(entry)
        for key, entry in part.record(FINGERPRINT_KEYS).items()
    }


def _batch(part: YamlNode) -> dict[str, str]:
    return {key: entry.text() for key, entry in part.entries().items()}


def _prediction(part: YamlNode) -> Prediction:
    entries = part.record(_PREDICTION_KEYS, required=_PREDICTED_ALWAYS)
    moved = entries.get("moved_bytes")
    stalls, host = entries.get("stall_seconds"), entries.get("host_bytes")
    return Prediction(
        peak_bytes=entries["peak_bytes"].read(whole_number),
        peak_at=entries["peak_at"].text(),
        overhead=entries["overhead"].read(fraction),
        unplanned_peak_bytes=entries["unplanned_peak_bytes"].read(whole_number),
        moved_bytes=moved.read(whole_number) if moved else 0,
        stall_seconds=stalls.read(fraction) if stalls else 0.0,
        host_bytes=host.read(whole_number) if host else 0,
    )


def _bound(part: YamlNode) -> dict[str, float]:
    return {key: entry.read(fraction) for key, entry in part.record(BOUNDS).items()}


def _region(part: YamlNode, level: int = 1) -> PlannedRegion:
    entries = part.record(_REGION_KEYS)
    part.locate(_calls_or_run, entries)
    place = entries.get("calls") or entries["run"]
    run = _ends(place) if "run" in entries else None
    by = entries["by"].read(check_way) if "by" in entries else PROGRAM
    ops = entries["save"].items("an op") if "save" in entries else []
    save = tuple(op.read(OpName.parse) for op in ops)
    coded = entries["encode"].entries() if "encode" in entries else {}
    encode = tuple(
        (form.locate(OpName.parse, op), form.read(check_encoding))
        for op, form in coded.items()
    )
    moved = entries["offload"].items("an op") if "offload" in entries else []
    offload = tuple(op.read(OpName.parse) for op in moved)
    where = tuple(named.where for named in (place, *ops, *coded.values(), *moved))
    calls = "" if run else place.text()
    inside = entries["regions"].items("a region") if "regions" in entries else []
    if inside and level == _MOST_LEVELS:
        raise PlanError(
            f"{inside[0].where}: regions lie inside regions too deeply",
            needed=f"at most {_MOST_LEVELS} levels",
            hint="leave the innermost regions out",
        )
    inner = tuple(_region(one, level + 1) for one in inside)
    code = entries["for"].read(check_code) if "for" in entries else ""
    rest = run, inner, read_tiles(entries), offload, code
    return part.locate(PlannedRegion, calls, by, save, encode, where, *rest)


def _calls_or_run(entries: Mapping[str, YamlNode]) -> None:
    if ("calls" in entries) == ("run" in entries):
        found = "both 'calls' and 'run'" if "run" in entries else "neither"
        raise PlanError(
            f"cannot read the region: it has {found}",
            needed="calls (one region each) or run (one region over several)",
            hint="calls: transformer.h.[0..7]",
        )


def _ends(part: YamlNode) -> tuple[str, str]:
    items = part.items("a call")
    if len(items) != 2:
        raise part.error(
            f"cannot read the run: it has {len(items)} calls",
            needed="two: the first and the last",
            hint=_EXAMPLES["'run'"],
        )
    for item in items:
        item.read(parse_call)
    return items[0].text(), items[1].text()


_READERS: dict[str, Callable[[YamlNode], Any]] = {
    "model": YamlNode.text,
    "workload": read_workload,
    "training": lambda part: read_workload(part, TRAINING_KEYS),
    "fingerprint": _fingerprint,
    "budget_bytes": lambda part: part.read(parse_bytes),
    "predicted": _prediction,
    "bound": _bound,
    "regions": lambda part: tuple(map(_region, part.items("a region"))),
}


def _version(text: str) -> None:
    if text != str(FORMAT_VERSION):
        raise PlanError(
            f"the plan is of format {text!r}",
            needed=f"ckplan: {FORMAT_VERSION}",
            hint="run `ckplan solve` again, with this version of ckplan",
        )
