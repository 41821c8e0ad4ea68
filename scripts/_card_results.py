"""What ``on_card`` found so far: records, the file that keeps them, and its page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _measuring import format_error, format_page, make_table

from ckplan import files
from ckplan.errors import CkplanError
from ckplan.units import format_bytes, format_percent

CPU = "cpu"  # in place of the name of a card
NOTHING = "n/a"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
MEMORY = (
    "model",
    "types",
    "step",
    "budget",
    "peak, predicted",
    "measured",
    "error",
    "allocated, predicted",
    "measured",
    "error",
    "reserved, predicted",
    "measured",
    "error",
    "bits equal",
    "what went wrong",
)
TIME = (
    "model",
    "types",
    "step",
    "step, predicted",
    "by roofline",
    "measured",
    "quartiles",
    "overhead, predicted",
    "by roofline",
    "measured",
    "quartiles",
    "device busy",
    "launch-bound, predicted",
    "measured",
)
ENGINE = (
    "way",
    "forward",
    "backward",
    "both, of torch's checkpoint",
    "forward, per torch call",
    "both, per saved tensor",
    "both, per rebuilt op",
    "what went wrong",
)


@dataclass(frozen=True)
class Costs:
    """Seconds that are predicted of a step."""

    step_seconds: float
    overhead: float  # fraction of the unplanned step
    device_seconds: float | None = None  # of kernels; None: nobody says


@dataclass(frozen=True)
class Row:
    """One way to take the step of a model, predicted and measured.

    Bytes are peak, allocated and reserved; the latter two exist on a GPU only.
    """

    model: str
    types: str
    step: str
    budget_bytes: int | None = None
    predicted_bytes: tuple[int | None, ...] = (None, None, None)
    predicted: Costs | None = None  # ops measured alone on this device
    roofline: Costs | None = None  # by the card's figures, as with --gpu
    measured_bytes: tuple[int | None, ...] = (None, None, None)
    bits: str = ""
    seconds: tuple[float, ...] = ()  # by round
    unplanned_seconds: tuple[float, ...] = ()  # of the same rounds
    device_seconds: float | None = None
    device_is_exact: bool = True  # False: the device waited, and was less busy
    failed: str = ""
    done: bool = False

    @property
    def name(self) -> str:
        """The row in a sentence."""
        return f"{self.model}, {self.types}, {self.step}"

    @property
    def overheads(self) -> list[float]:
        """The overhead of every round."""
        pairs = zip(self.seconds, self.unplanned_seconds, strict=False)
        return [one / other - 1 for one, other in pairs]

    @property
    def launch_bound(self) -> float | None:
        """Share of the measured step in which the device had nothing to do."""
        if self.device_seconds is None or not self.seconds:
            return None
        return max(0.0, 1 - self.device_seconds / statistics.median(self.seconds))

    def broken(self) -> Iterator[str]:
        """What must not be."""
        if self.failed:
            yield f"{self.name}: {self.failed}"
        if self.bits.startswith("no"):
            yield f"{self.name}: bits differ: {self.bits}"
        peak_bytes = self.measured_bytes[0]
        if None not in (self.budget_bytes, peak_bytes) and peak_bytes > (
            self.budget_bytes
        ):
            yield f"{self.name}: the measured peak is above the budget"

    def memory_cells(self) -> list[str]:
        """Its row of the table of bytes."""
        pairs = zip(self.predicted_bytes, self.measured_bytes, strict=True)
        budget = (
            "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        )
        wrong = self.failed or ("" if self.done else "not reached")
        return [
            *(self.model, self.types, self.step, budget),
            *(cell for pair in pairs for cell in _bytes(*pair)),
            self.bits or NOTHING,
            wrong,
        ]

    def time_cells(self) -> list[str]:
        """Its row of the table of seconds."""
        planned = self.step != UNPLANNED
        costs = (self.predicted, self.roofline)
        device = _milliseconds(self.device_seconds)
        share = _percent(self.launch_bound)
        if not self.device_is_exact:
            device, share = f"<= {device}", f">= {share}"
        return [
            *(self.model, self.types, self.step),
            *(_milliseconds(one and one.step_seconds) for one in costs),
            *_quartiles(self.seconds, _milliseconds),
            *(_overhead(one.overhead if one and planned else None) for one in costs),
            *_quartiles(self.overheads if planned else (), _overhead),
            device,
            _percent(_predicted_share(self.predicted)),
            share,
        ]


UNPLANNED, RERUN = "unplanned", "every layer rerun"


@dataclass(frozen=True)
class EngineRow:
    """What one way adds to a step of tiny tensors; seconds per layer."""

    way: str
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    of_checkpoint: float | None = None
    per_call_seconds: float | None = None
    per_saved_seconds: float | None = None
    per_rebuilt_seconds: float | None = None
    failed: str = ""

    def cells(self) -> list[str]:
        """A row of the table."""
        if self.failed:
            return [self.way, *[NOTHING] * (len(ENGINE) - 2), self.failed]
        share = NOTHING if self.of_checkpoint is None else f"{self.of_checkpoint:.2f}"
        return [
            self.way,
            _microseconds(self.forward_seconds),
            _microseconds(self.backward_seconds),
            share,
            _microseconds(self.per_call_seconds),
            _microseconds(self.per_saved_seconds),
            _microseconds(self.per_rebuilt_seconds),
            "",
        ]


@dataclass(frozen=True)
class TestRow:
    """The outcome of one test."""

    name: str
    outcome: str
    why: str = ""

    __test__ = False  # pytest must not collect it


@dataclass(frozen=True)
class Results:
    """Everything that is known."""

    machine: Mapping[str, str]
    rows: tuple[Row, ...] = ()
    engine: tuple[EngineRow, ...] = ()
    tests: tuple[TestRow, ...] = ()

    def with_rows(self, new: Iterable[Row]) -> Results:
        """The same, with rows in place of those of the same names, or at the end."""
        rows = {row.name: row for row in (*self.rows, *new)}
        return replace(self, rows=tuple(rows.values()))

    def without(self, models: Collection[str]) -> Results:
        """The same, without the rows of some models."""
        return replace(self, rows=tuple(r for r in self.rows if r.model not in models))

    def is_done(self, model: str, types: str) -> bool:
        """Whether every row of a model has been measured, or has failed."""
        rows = [r for r in self.rows if (r.model, r.types) == (model, types)]
        return bool(rows) and all(row.done for row in rows)

    def broken(self) -> list[str]:
        """Where something is not as it must be."""
        tests = (t for t in self.tests if t.outcome == FAILED)
        engine = (e for e in self.engine if e.failed)
        return [
            *(f"test {test.name}: {test.why or FAILED}" for test in tests),
            *(f"engine, {one.way}: {one.failed}" for one in engine),
            *(what for row in self.rows for what in row.broken()),
        ]


def one_line(error: Exception) -> str:
    """An error of any kind, as a cell of a table."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


# -- the file that keeps them --------------------------------------------------------


def load(path: Path, machine: Mapping[str, str]) -> Results:
    """What an earlier run on this machine found; nothing if there was none.

    Raises:
        CkplanError: The file is cut or changed, or is of another machine.
    """
    if not path.exists():
        return Results(machine)
    try:
        found = _from_json(json.loads(files.read_bytes(path, "rows of earlier runs")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CkplanError(
            f"cannot go on with '{path}': it is no file of results ({error})",
            needed="the file as an earlier run wrote it",
            hint="--fresh without --only, to begin anew",
        ) from None
    if found.machine != machine:
        changed = [k for k in machine if machine[k] != found.machine.get(k)]
        raise CkplanError(
            f"cannot go on with '{path}': it is of another machine "
            f"({', '.join(changed) or 'it says more of it'})",
            needed=", ".join(f"{k} {found.machine.get(k)}" for k in changed)
            or "a file of this version",
            hint="--fresh without --only, to begin anew, or another file with -o",
        )
    return found


def save(results: Results, rows_path: Path, page_path: Path, page: str) -> None:
    """Write rows and page, each whole or not at all."""
    files.write_text(rows_path, json.dumps(asdict(results), indent=1), force=True)
    files.write_text(page_path, page, force=True)


def _from_json(plain: dict[str, Any]) -> Results:
    return Results(
        plain["machine"],
        tuple(map(_row, plain["rows"])),
        tuple(EngineRow(**one) for one in plain["engine"]),
        tuple(TestRow(**one) for one in plain["tests"]),
    )


def _row(plain: dict[str, Any]) -> Row:
    lists = {k: tuple(v) for k, v in plain.items() if isinstance(v, list)}
    costs = {k: plain[k] and Costs(**plain[k]) for k in ("predicted", "roofline")}
    return Row(**{**plain, **lists, **costs})


# -- the page ------------------------------------------------------------------------


def page_of(results: Results, title: str, claim: str, missing: Sequence[str]) -> str:
    """The page of results, with what was not reached."""
    tests = [[t.name, t.outcome, t.why] for t in results.tests]
    memory = [row.memory_cells() for row in results.rows]
    times = [row.time_cells() for row in results.rows]
    engine = [row.cells() for row in results.engine]
    machine = list(results.machine.items())
    broken = results.broken()
    parts = [
        claim,
        make_table(("machine", "is"), machine, texts=2),
        *_section("Tests", ("test", "outcome", "why"), tests, texts=3),
        *_section("Bytes", MEMORY, memory, texts=3),
        *_section("Seconds", TIME, times, texts=3),
        *_section("Engine, microseconds per layer", ENGINE, engine, texts=1),
    ]
    if missing:
        parts.append("Not reached: " + "; ".join(missing) + ".")
    if broken:
        parts.append("\n".join(["**Broken:**", "", *(f"- {line}" for line in broken)]))
    elif not missing:
        parts.append("**Kept.**")
    used = results.machine["card"]
    return format_page(title, parts, "no GPU used" if used == CPU else used)


def _section(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int
) -> list[str]:
    return [f"## {title}", make_table(headers, rows, texts=texts)] if rows else []


def _bytes(predicted: int | None, measured: int | None) -> list[str]:
    cells = [NOTHING if b is None else format_bytes(b) for b in (predicted, measured)]
    known = predicted is not None and measured
    return [*cells, format_error(predicted, measured) if known else NOTHING]


def _predicted_share(predicted: Costs | None) -> float | None:
    if not predicted or predicted.device_seconds is None or not predicted.step_seconds:
        return None
    return max(0.0, 1 - predicted.device_seconds / predicted.step_seconds)


def _quartiles(values: Sequence[float], text: Any) -> list[str]:
    """The median, and the quartiles around it."""
    if len(values) < 2:
        return [text(values[0]) if values else NOTHING, NOTHING]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [text(middle), f"{text(low)} to {text(high)}"]


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e3 * seconds:.2f} ms"


def _microseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e6 * seconds:+.1f}"


def _percent(fraction: float | None) -> str:
    return NOTHING if fraction is None else format_percent(fraction)


def _overhead(fraction: float | None) -> str:
    return NOTHING if fraction is None else format_percent(fraction, sign=True)
