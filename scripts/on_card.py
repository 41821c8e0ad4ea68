"""Proves on a real card what is otherwise predicted, in at most ten minutes.

First the tests marked ``gpu`` run that matter most, then the engine is timed on tiny
tensors. Then eight models take their steps under autocast to bfloat16 and in float32:
unplanned, with every layer run again (``by: rerun``), and planned for three budgets, a
quarter, a half and three quarters of the way from the unplanned peak to the floor. Each
way has a process of its own. All of them are on the card together, and take timed steps
in turns. Beside what the allocator and the clock say stands what was predicted: from
ops measured alone on this card, and by the roofline of its kind, as ``--gpu`` has it.
Launch-bound is the share of a step in which the device has nothing to do. The device's
seconds are those between CUDA events, launched while it sleeps.

    scripts/on_card
    scripts/on_card --only gpt2 --minutes 3
    scripts/on_card --device cpu --only configs/workloads/mlp.py -o /tmp/tried.md

It needs no network and no installation. The page of results and a file with its rows
are written after every row, so that a run that was cut leaves what it had; the next one
goes on from there. ``--fresh`` begins anew, with ``--only`` for these models alone. A
row that fails says why, and the run goes on.

Exit code 1 if a test or a row fails, bits differ, or a peak is above its budget.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _card_results import CPU, EngineRow, Results, Row, load, one_line, page_of, save
from _card_tests import ALL, run_tests
from _measuring import make_parser, results_path, run, say

from ckplan.errors import CkplanError

if TYPE_CHECKING:
    from _card_session import Session
    from _card_steps import Model

TITLE = "On a card: predicted beside measured"
LEAST_TORCH = (2, 11)
# what ckplan and the models import; the rest of what torch brings is not asked for
NEEDED = ("torch", "transformers", "numpy", "networkx", "yaml", "rich", "typer")
TYPES_IN_ORDER = ("bf16", "fp32")
RESERVE_SECONDS = 15  # to end processes and write the page
TESTS_SHARE, ENGINE_SHARE = 0.2, 0.1  # of all minutes, at most
START_SECONDS = 120  # to import torch, perhaps for the first time
MODEL_SECONDS = 150  # for one model in one type, at most
TIMED_SHARE = 0.01  # of all minutes: the timed steps of one model in one type


class TimeIsUpError(Exception):
    """A piece of work took all the time that it had."""


class Clock:
    """The time that is left, and alarms that keep to it."""

    def __init__(self, minutes: float, start: float | None = None) -> None:
        self.all_seconds = 60 * minutes
        begin = time.monotonic() if start is None else start
        self._end = (
            begin + self.all_seconds - min(RESERVE_SECONDS, self.all_seconds / 4)
        )

    @property
    def left(self) -> float:
        """Seconds until the end, not below zero."""
        return max(0.0, self._end - time.monotonic())

    @contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """A scope that ends after so many seconds, and never after the end of all.

        Raises:
            TimeIsUpError: It took longer.
        """

        def ring(number: int, frame: Any) -> None:
            raise TimeIsUpError

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, max(min(seconds, self.left), 1e-3))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class Book:
    """The results so far, written after every change."""

    def __init__(self, results: Results, page_path: Path, keys: Sequence[str]) -> None:
        self.results = results
        self.page_path = page_path
        self._keys = keys  # "gpt2, bf16", of what is to be measured

    @property
    def missing(self) -> list[str]:
        """What is not measured yet."""
        return [key for key in self._keys if not self._is_done(key)]

    def _is_done(self, key: str) -> bool:
        if key in (TESTS_KEY, ENGINE_KEY):
            return bool(self.results.tests if key == TESTS_KEY else self.results.engine)
        model, _, types = key.rpartition(", ")
        return self.results.is_done(model, types)

    def write(self, results: Results) -> None:
        """Keep results."""
        self.results = results
        claim = (__doc__ or "").partition("\n\n    ")[0]
        page = page_of(results, TITLE, claim, self.missing)
        save(results, rows_path(self.page_path), self.page_path, page)

    def write_rows(self, rows: Sequence[Row]) -> None:
        """Keep rows, in place of those of the same names."""
        self.write(self.results.with_rows(rows))


TESTS_KEY, ENGINE_KEY = "tests", "engine"


def main() -> int:
    """Measure what is not measured yet, as long as there is time."""
    args = arguments()
    clock = Clock(args.minutes)
    check_output(args)
    check_packages()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from _card_session import Session
    from _card_steps import chosen

    models = chosen(args.only)
    with Session(args.device, args.settings) as session:
        machine = told(session, clock)
        say(", ".join(f"{key} {value}" for key, value in machine.items()))
        page_path = args.output or default_path(machine["card"])
        results = Results(machine)
        if args.only or not args.fresh:
            results = load(rows_path(page_path), machine)
        if args.fresh:
            results = results.without({model.name for model in models})
        keys = [f"{model.name}, {t}" for t in TYPES_IN_ORDER for model in models]
        both = () if args.only else (TESTS_KEY, ENGINE_KEY)
        book = Book(results, page_path, [*both, *keys])
        measure(book, session, models, clock)
    print(page_path.read_text())
    say(f"wrote {page_path}")
    if book.missing:
        say(f"not reached: {'; '.join(book.missing)}; run it again to go on")
    return 1 if book.results.broken() else 0


def told(session: Session, clock: Clock) -> dict[str, str]:
    """The machine.

    Raises:
        CkplanError: There is no card, or it does not answer.
    """
    seconds = min(START_SECONDS, clock.left)
    try:
        with clock.at_most(seconds):
            return session.machine()
    except TimeIsUpError:
        raise CkplanError(
            f"cannot measure on a card: it did not answer within {seconds:.0f} s",
            needed="a card that answers, and time to import torch",
            hint="nvidia-smi, or more --minutes",
        ) from None


def measure(
    book: Book, session: Session, models: Sequence[Model], clock: Clock
) -> None:
    """Tests, engine, then every model in every type, until the time is up."""
    book.write(book.results)
    if TESTS_KEY in book.missing:
        seconds = min(TESTS_SHARE * clock.all_seconds, clock.left)
        say(f"tests, at most {seconds:.0f} s")
        tests = run_tests(seconds, session.tests or ALL)
        book.write(replace(book.results, tests=tuple(tests)))
    if ENGINE_KEY in book.missing:
        say("engine")
        seconds = ENGINE_SHARE * clock.all_seconds
        rows, why = attempt(session.engine, clock, seconds)
        found = rows or [EngineRow("all", failed=why)]
        if rows or clock.left:
            book.write(replace(book.results, engine=tuple(found)))
    for key in book.missing:
        model, types = parsed(key, models)
        if not clock.left or model is None:
            break
        say(f"{key}: {clock.left:.0f} s left")
        work = steps_of(book, session, model, types, clock)
        _, why = attempt(work, clock, MODEL_SECONDS)
        if why and clock.left:
            book.write_rows(failed_rows(book.results, model.name, types, why))


def steps_of(
    book: Book, session: Session, model: Model, types: str, clock: Clock
) -> Callable[[], None]:
    """The work of one model in one type."""
    timed_seconds = TIMED_SHARE * clock.all_seconds
    return lambda: session.steps(model, types, timed_seconds, book.write_rows)


def parsed(key: str, models: Sequence[Model]) -> tuple[Model | None, str]:
    """The model and the types that are missing."""
    name, _, types = key.rpartition(", ")
    return next((model for model in models if model.name == name), None), types


def attempt(work: Callable[[], Any], clock: Clock, seconds: float) -> tuple[Any, str]:
    """What a piece of work returns, or why it does not."""
    try:
        with clock.at_most(seconds):
            return work(), ""
    except TimeIsUpError:
        return None, f"took longer than {seconds:.0f} s"
    except CkplanError as error:
        return None, error.what
    except Exception as error:  # of a card that nobody tried: a row, not the end
        return None, one_line(error)


def failed_rows(results: Results, model: str, types: str, why: str) -> list[Row]:
    """Rows that say why they were not measured: those begun, or one for all."""
    begun = [r for r in results.rows if (r.model, r.types) == (model, types)]
    if not begun:
        return [Row(model, types, "all", failed=why, done=True)]
    return [row if row.done else replace(row, failed=why, done=True) for row in begun]


# -- what must be there --------------------------------------------------------------


def check_packages() -> None:
    """Refuse where something is missing that this needs.

    Raises:
        CkplanError: A package is missing, or torch is too old.
    """
    for package in NEEDED:
        if find_spec(package) is None:
            raise CkplanError(
                f"cannot measure here: {sys.executable} has no package {package!r}",
                needed=", ".join(NEEDED),
                hint="PYTHON=/path/to/python scripts/on_card, one that has them",
            )
    check_torch(_version("torch"))


def check_torch(found: str) -> None:
    """Refuse a torch that is too old.

    Raises:
        CkplanError: It is.
    """
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if numbers and numbers < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise CkplanError(
            f"cannot measure here: torch {found} is too old",
            needed=f"torch {least} or later",
            hint="PYTHON=/path/to/python scripts/on_card, one that has it",
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""  # not installed, but found: from a checkout


# -- files and options ---------------------------------------------------------------


def check_output(args: argparse.Namespace) -> None:
    """Refuse a page that would not be one of a card, or where its rows are kept.

    Raises:
        CkplanError: It is one of these.
    """
    if args.output is None and (args.device == CPU or args.settings):
        raise CkplanError(
            "cannot tell where to write: this is no measurement of a card as it is",
            needed="-o FILE, for --device cpu and for --set",
            hint="-o /tmp/on_card.md",
        )
    if args.output is not None and rows_path(args.output) == args.output:
        raise CkplanError(
            f"cannot write the page to '{args.output}': rows are kept there",
            needed="the name of a page",
            hint=f"-o {args.output.with_suffix('.md')}",
        )


def rows_path(page_path: Path) -> Path:
    """The file of rows beside a page."""
    return page_path.with_suffix(".json")


def default_path(card: str) -> Path:
    """The page of a card and this month."""
    words = re.findall(r"[a-z0-9]+", card.lower().replace("nvidia", ""))
    return results_path("on_card", ".md", "_".join(words) or "card")


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = make_parser(__doc__, settings=True)
    parser.add_argument(
        "--minutes",
        metavar="N",
        type=minutes,
        default=10.0,
        help="when it ends, whatever is left to do  [default: 10]",
    )
    parser.add_argument(
        "--only",
        metavar="NAME,...",
        type=lambda text: text.split(","),
        action="extend",
        default=[],
        help="measure these models, or the workloads of these files, and run no tests  "
        "[default: all]",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="[default: cuda]"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="forget the rows of earlier runs; with --only, those of its models",
    )
    return parser.parse_args()


def minutes(text: str) -> float:
    """Minutes above zero."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"minutes above zero, not {text!r}")
    return found


if __name__ == "__main__":
    run(main)
