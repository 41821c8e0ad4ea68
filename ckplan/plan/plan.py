"""The plan: the regions to recompute, and how.

``file.py`` reads and writes it as YAML.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckplan import units
from ckplan.errors import PlanError, did_you_mean
from ckplan.plan.names import OpName
from ckplan.plan.region import PROGRAM, RERUN, TILES
from ckplan.plan.tiles import RowTiles, Tiles

WAYS = (PROGRAM, RERUN, TILES)
ENCODINGS = ("bits", "int16", "int32")
EAGER, COMPILED = "eager", "compiled"
CODES = (EAGER, COMPILED)
"""The code that a region is for: what runs uncompiled, or inside ``torch.compile``."""
BOUNDS = ("any_schedule", "this_plan_space")
EXAMPLE_BY = f"by: {PROGRAM}"
EXAMPLE_FOR = f"for: {EAGER}"
EXAMPLE_ENCODE = "encode: {attn.attn_dropout/bernoulli_: bits}"

PLAN_SUFFIXES = (".yaml", ".yml")  # of the names of plan files
FINGERPRINT_KEYS = (
    *("torch", "device", "source", "batch", "parameters", "forwards", "compiled"),
)
"""``forwards``: how often a step runs the model, if more than once; calls are numbered
over all of them. ``compiled`` is the digest of a joint graph; plans for uncompiled code
lack it."""
DECIMALS = 4  # of overheads


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """Calls whose activations are dropped after forward, except the saved ops.

    Raises:
        PlanError: ``by`` is not in ``WAYS``, an encoding not in ``ENCODINGS``, or the
            code not in ``CODES``. Or
            a region that is not by PROGRAM names ops, is a run of calls, or is nested.
            Or one that is not by TILES has tiles.
    """

    calls: str  # a pattern (names.py); every call it matches is a region
    by: str = PROGRAM  # see region.py
    save: tuple[OpName, ...] = ()
    encode: tuple[tuple[OpName, str], ...] = ()  # (op, encoding)
    # File and line of `calls` or `run`, then of every op: see `ops`.
    where: tuple[str, ...] = field(default=(), compare=False, repr=False)
    run: tuple[str, str] | None = None  # first and last of sibling calls, one region
    inner: tuple[
        PlannedRegion, ...
    ] = ()  # regions inside, used while this one is recomputed
    tiles: Tiles | RowTiles | None = None  # of a region by TILES, which has them always
    offload: tuple[OpName, ...] = ()  # kept elsewhere: see applying/moving
    code: str = ""  # one of CODES; "": what the plan is for

    def __post_init__(self) -> None:
        """Check the combination of fields."""
        check_way(self.by)
        if self.code:
            check_code(self.code)
        for _, name in self.encode:
            check_encoding(name)
        if self.ops and self.by != PROGRAM:
            word = "save" if self.save else "encode" if self.encode else "offload"
            raise PlanError(
                f"cannot {word} ops of {self.title!r}: {word} needs by: program",
                needed=f"by: program, or no {word}",
                hint="by: program, which rebuilds dropped values op by op",
            )
        if self.run is not None and self.by != PROGRAM:
            raise PlanError(
                f"cannot run the calls {self.title!r} again: a run needs by: program",
                needed="by: program, or calls in place of run",
                hint="by: program, which rebuilds dropped values op by op",
            )
        if self.inner and self.by != PROGRAM:
            raise _not_nested(f"{self.title!r}, which runs again as a whole,")
        if self.tiles is not None and self.by != TILES:
            raise PlanError(
                f"cannot cut {self.title!r} into tiles: tiles need by: {TILES}",
                needed=f"by: {TILES}, or no tiles",
                hint=f"by: {TILES}, which runs a head and its loss, or an MLP",
            )
        if self.tiles is None and self.by == TILES:
            object.__setattr__(self, "tiles", Tiles())
        for one in self.inner:
            if one.by != PROGRAM or one.encode or one.offload or one.code:
                raise _not_nested(repr(one.title))

    @property
    def title(self) -> str:
        """The name in messages: the pattern of the calls, or the ends of a run."""
        return self.calls if self.run is None else " to ".join(self.run)

    @property
    def ops(self) -> tuple[OpName, ...]:
        """The saved ops, the encoded and the offloaded ones, as in ``where``."""
        return (*self.save, *(op for op, _ in self.encode), *self.offload)

    def located(self, error: PlanError, place: int = 0) -> PlanError:
        """Add file and line to an error; ``place`` is an index into ``where``."""
        what = ": ".join((*self.where[place : place + 1], error.what))
        return PlanError(what, needed=error.needed, hint=error.hint)

    def check(self, check: Callable[..., None], *args: object) -> None:
        """Run a check; adds file and line to its error."""
        try:
            check(*args)
        except PlanError as error:
            raise self.located(error) from None


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's prediction for the planned step."""

    peak_bytes: int
    peak_at: str
    overhead: float  # fraction of an unplanned step
    unplanned_peak_bytes: int
    moved_bytes: int = 0  # of offloaded tensors, out; the same come back
    stall_seconds: float = 0.0  # in the overhead: a step waits for their copies
    host_bytes: int = 0  # of pinned host memory that they move to, on a GPU

    def __post_init__(self) -> None:
        """Round as the file does, so that reading gives back what was written."""
        object.__setattr__(self, "overhead", _rounded(self.overhead))
        object.__setattr__(self, "stall_seconds", round(float(self.stall_seconds), 9))


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The regions to recompute. Other fields are for checks and for the reader."""

    model: str = ""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    budget_bytes: int | None = None
    predicted: Prediction | None = None
    bound: Mapping[str, float] = field(
        default_factory=dict
    )  # key of BOUNDS -> overhead
    regions: tuple[PlannedRegion, ...] = ()
    workload: Mapping[str, Any] = field(default_factory=dict)  # see workload.py

    def __post_init__(self) -> None:
        """Round as the file does, so that reading gives back what was written."""
        bound = {key: _rounded(overhead) for key, overhead in self.bound.items()}
        object.__setattr__(self, "bound", bound)
        for one in self.regions:
            if one.code == COMPILED != self.code:
                raise one.located(_no_compiled_code(one))

    def __repr__(self) -> str:
        """One line; the file has all."""
        found = [f"<plan for {self.model or 'a model'}: {len(self.regions)} regions"]
        if self.predicted is not None:
            found.append(f"peak {units.format_bytes(self.predicted.peak_bytes)}")
            found.append(
                f"time {units.format_percent(self.predicted.overhead, sign=True)}"
            )
        return ", ".join(found) + ">"

    @property
    def code(self) -> str:
        """What the plan is for: one of ``CODES``. Regions may say otherwise."""
        return COMPILED if "compiled" in self.fingerprint else EAGER

    def for_code(self, code: str) -> Plan:
        """The plan with the regions for one of ``CODES`` alone.

        Of a plan for compiled code, the regions for what runs uncompiled are a plan
        without fingerprint, budget or prediction, which are those of the whole.
        """
        regions = tuple(r for r in self.regions if (r.code or self.code) == code)
        if code == EAGER != self.code:
            return Plan(self.model, regions=regions, workload=self.workload)
        return replace(self, regions=regions)

    @property
    def calls_in_tiles(self) -> tuple[str, ...]:
        """The calls that run in tiles, in words."""
        return tuple(one.title for one in self.regions if one.tiles is not None)


def plan_fingerprint(graph_fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of the step that a plan was made for.

    Args:
        graph_fingerprint: ``Graph.fingerprint``.

    Returns:
        The torch version, device, source and batch, if known, and a hash of 16
        hexadecimal digits of the names and shapes of the parameters.
    """
    found = {
        k: graph_fingerprint[k] for k in FINGERPRINT_KEYS if k in graph_fingerprint
    }
    if "parameters" in found:
        text = json.dumps(found["parameters"], sort_keys=True)
        found["parameters"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def check_model(plan: Plan, graph_fingerprint: Mapping[str, Any]) -> None:
    """Refuse a plan for another model than a step's, as far as both are known.

    Raises:
        PlanError: Names or shapes of the parameters differ.
    """
    made_for = plan.fingerprint.get("parameters")
    here = plan_fingerprint(graph_fingerprint).get("parameters")
    if None not in (made_for, here) and made_for != here:
        raise PlanError(
            f"the plan for {plan.model or 'a model'} is not of this trace: names and "
            f"shapes of its parameters have the digest {made_for}, not {here}",
            needed="a plan and a trace of one model",
            hint="`ckplan show FILE`, which says of which model each is",
        )


def differences(
    plan_fp: Mapping[str, Any], other_fp: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return a line for every field in which two fingerprints differ.

    Fields that only one of them has are not compared, nor is the source: one model
    has many names.

    >>> differences({"torch": "2.13.0", "device": "cpu"}, {"torch": "2.12.0"})
    ('torch: plan 2.13.0, here 2.12.0',)
    """
    here = dict(_flat(other_fp))
    return tuple(
        f"{name}: plan {value}, here {here.get(name, 'nothing')}"
        for name, value in _flat(plan_fp)
        if name.partition(".")[0] in other_fp
        and name != "source"
        and here.get(name) != value
    )


def _flat(fingerprint: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for key, value in fingerprint.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in _flat(value))
        else:
            yield key, value


def _rounded(overhead: float) -> float:
    return round(float(overhead), DECIMALS)


def check_way(text: str) -> str:
    """Return ``text`` if it is one of ``WAYS``.

    Raises:
        PlanError: It is not.
    """
    needed = f"by: {' or by: '.join(WAYS)}"
    return _check_choice(text, WAYS, "recompute by", needed, EXAMPLE_BY)


def check_code(text: str) -> str:
    """Return ``text`` if it is one of ``CODES``.

    Raises:
        PlanError: It is not.
    """
    needed = f"for: {' or for: '.join(CODES)}"
    return _check_choice(text, CODES, "plan a region for", needed, EXAMPLE_FOR)


def check_encoding(text: str) -> str:
    """Return ``text`` if it is one of ``ENCODINGS``.

    Raises:
        PlanError: It is not.
    """
    needed = ", ".join(ENCODINGS)
    return _check_choice(text, ENCODINGS, "encode as", needed, EXAMPLE_ENCODE)


def _check_choice(
    text: str, choices: tuple[str, ...], verb: str, needed: str, example: str
) -> str:
    if text in choices:
        return text
    near = did_you_mean(text, choices)
    hint = f"did you mean {near!r}?" if near else example
    raise PlanError(f"cannot {verb} {text!r}", needed=needed, hint=hint)


def _no_compiled_code(region: PlannedRegion) -> PlanError:
    return PlanError(
        f"cannot plan {region.title!r} for compiled code: the plan is for eager code",
        needed="a plan for compiled code, whose fingerprint has the key compiled",
        hint="leave for out, or ckplan profile --compile and ckplan solve",
    )


def _not_nested(what: str) -> PlanError:
    return PlanError(
        f"cannot nest {what} in this way",
        needed="by: program for both, and no encode or offload (nor for) inside",
        hint="encode and offload in the outermost region; all regions can use it",
    )
