"""Known GPUs: their memory, and the roofline time of an op.

The figures are in ``configs/gpus.yaml``, each with its source, and in the table that
the environment variable ``CKPLAN_GPUS`` names. The roofline of S.
Williams, A. Waterman and D. Patterson ("Roofline: an insightful visual performance
model for multicore architectures", 2009) gives the least time of an op on the
GPU: its FLOPs at the peak rate of its dtype, or its bytes at full bandwidth, whichever
takes longer. In addition, the CPU needs time to launch every op.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from ckplan.errors import CkplanError, did_you_mean
from ckplan.plan.strict_yaml import YamlNode, compose
from ckplan.units import MIB, format_bytes, parse_bytes

_T = TypeVar("_T")

FORMAT_VERSION = 1
RATES = ("fp32", "tf32", "fp16", "bf16")
FIGURES = (
    *("memory", "capacity", "context", "bandwidth", "link", "peer", "launch_us"),
    *("capability", "multiprocessors", "tflops"),
)
DEFAULT = "A100 40GB"
"""The card for ``cuda`` if no GPU is installed and none is named."""
PLATFORMS = ("cuda", "rocm")
OWN_TABLE = "CKPLAN_GPUS"
"""Environment variable: the path of a table of one's own."""

_TOP_KEYS = ("ckplan_gpus", "documents", "gpus")
_OPTIONAL = ("platform", "price")
_LEAST = ("memory", "bandwidth", "tflops")  # what a table of one's own must have
ASSUMED_CONTEXT_BYTES = 600 * MIB
"""What CUDA takes of a card of which only the size is known."""
_ASSUMED_LAUNCH_US = 5.0
_ASSUMED_LINK = 12 * 10**9
_ASSUMED_CAPABILITY = (8, 9)
_ASSUMED_MULTIPROCESSORS = 80
_OFFERED = 0.975  # of the memory on the board, if nothing else is known
_ASSUMED_SOURCE = "assumed: the table does not say"
_EXAMPLES = {
    "the table of cards": "ckplan_gpus: 1",
    "'documents'": "documents: {l4: NVIDIA L4 data sheet}",
    "'gpus'": "gpus: {L4: {memory: 24GiB}}",
    "'tflops'": "tflops: {fp32: 30.3}",
    "'sources'": "sources: {memory: l4}",
}
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Compute capability -> resident threads per multiprocessor, if not 2048.

NVIDIA, "CUDA C++ Programming Guide", table "Technical Specifications per Compute
Capability".
"""
_SIZE = re.compile(r"[1-9]\d{0,2}gb")
_BRANDS = re.compile(r"nvidia|geforce|tesla|amd|instinct|generation|\bgpu\b|[^a-z0-9]")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and its figures."""

    name: str
    memory_bytes: int  # on the board
    capacity_bytes: int  # total that CUDA reports
    context_bytes: int  # used by a process before its first tensor
    bandwidth: int  # bytes per second
    launch_seconds: float  # CPU time to launch one op
    capability: tuple[int, int]  # compute capability, major and minor
    multiprocessors: int
    flop_rates: Mapping[str, float]  # of RATES -> dense FLOP per second; fp32 at least
    sources: Mapping[str, str]  # of FIGURES -> document
    platform: str = "cuda"  # one of PLATFORMS
    link: int = _ASSUMED_LINK  # bytes per second from pinned memory, and back at once
    peer: int = _ASSUMED_LINK  # bytes per second to the other cards of the machine
    price: float | None = None  # in any currency, of a table of one's own

    @property
    def assumed(self) -> tuple[str, ...]:
        """Figures that no document gives."""
        return tuple(key for key in FIGURES if self.sources.get(key) == _ASSUMED_SOURCE)

    @property
    def usable_bytes(self) -> int:
        """Bytes available to the allocator: tensors and fragmentation."""
        return self.capacity_bytes - self.context_bytes

    @property
    def threads(self) -> int:
        """Resident threads per multiprocessor."""
        return _THREADS.get(self.capability, 2048)

    def device_seconds(self, flops: int, moved_bytes: int, rate: str) -> float:
        """Roofline time of an op: the least time it takes on this GPU.

        Args:
            flops: Floating-point operations.
            moved_bytes: Bytes read and written.
            rate: One of ``RATES``; a dtype without a rate uses that of fp32.
        """
        flop_rate = self.flop_rates.get(rate, self.flop_rates["fp32"])
        return max(flops / flop_rate, moved_bytes / self.bandwidth)


def find(name: str) -> Gpu:
    """Find a card by name: ``"RTX 4090"``, ``"rtx4090"``, ``"NVIDIA L4"``.

    Raises:
        CkplanError: No card has that name, or several cards with different memory do.
    """
    cards, name = load(), str(name)
    wanted = _plain(name)
    rest = {name: _plain(name).removeprefix(wanted) for name in cards}
    exact = [card for name, card in cards.items() if _plain(name) == wanted]
    found = exact or [c for name, c in cards.items() if _SIZE.fullmatch(rest[name])]
    if len(found) == 1 and wanted:
        return found[0]
    several = len(found) > 1 and wanted
    near = found[0].name if several else _same_number(name, cards)
    raise CkplanError(
        f"{'more than one card' if several else 'no card'} is called {name!r}",
        needed="one of "
        + ", ".join(c.name for c in (found if several else [*cards.values()])),
        hint=f"--gpu {near!r}"
        if near
        else "--gpu-memory SIZE (of tune and fit: --budget SIZE), or a table of your "
        f"own: {OWN_TABLE}=FILE; `ckplan gpus` lists those there are",
    )


def usable_bytes_of(size: str | int) -> int:
    """Bytes available to the allocator on a card of which only the size is known.

    Raises:
        UnitError: The size cannot be read.
        CkplanError: CUDA itself takes no less.
    """
    capacity_bytes = parse_bytes(size)
    if capacity_bytes <= ASSUMED_CONTEXT_BYTES:
        taken = format_bytes(ASSUMED_CONTEXT_BYTES)
        raise CkplanError(
            f"cannot plan for a card of {format_bytes(capacity_bytes)}: CUDA itself "
            f"takes {taken}",
            needed="the memory of a card, with its unit",
            hint="--gpu-memory 16GB; --budget limits the bytes of tensors alone",
        )
    return capacity_bytes - ASSUMED_CONTEXT_BYTES


def load() -> dict[str, Gpu]:
    """Every card that comes with ckplan and of one's own table, by name.

    Raises:
        CkplanError: The table of one's own cannot be read.
    """
    own = os.environ.get(OWN_TABLE)
    return {**_included(), **(_own(own) if own else {})}


@cache
def _included() -> dict[str, Gpu]:
    path = _table()
    return parse(path.read_text(encoding="utf-8"), str(path))


def _own(path: str) -> dict[str, Gpu]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise CkplanError(
            f"cannot read the table of cards '{path}': {reason.lower()}",
            needed=f"a file like configs/gpus.yaml, which {OWN_TABLE} names",
            hint=f"unset {OWN_TABLE}, or name a file that exists",
        ) from None
    return parse(text, path, own=True)


def parse(text: str, name: str, *, own: bool = False) -> dict[str, Gpu]:
    """Read a table of cards.

    Args:
        text: YAML, as in ``configs/gpus.yaml``.
        name: The name of the table in error messages.
        own: Whether it is a user's, in which most figures and sources may be left
            out.

    Raises:
        PlanError: A key or a figure is unknown, missing or invalid. The error names
            the line.
    """
    root = compose(text, name, _EXAMPLES, "the table of cards")
    required = ("ckplan_gpus", "gpus") if own else _TOP_KEYS
    top = root.record(_TOP_KEYS, required=required)
    if top["ckplan_gpus"].text() != str(FORMAT_VERSION):
        raise top["ckplan_gpus"].error(
            f"format {top['ckplan_gpus'].text()!r}",
            needed=f"ckplan_gpus: {FORMAT_VERSION}",
            hint="the table of this version of ckplan",
        )
    listed = top["documents"].entries() if "documents" in top else {}
    documents = {key: part.text() for key, part in listed.items()}
    entries = top["gpus"].entries()
    return {key: _card(key, part, documents, own) for key, part in entries.items()}


def _card(name: str, part: YamlNode, documents: Mapping[str, str], own: bool) -> Gpu:
    keys = (*FIGURES, "sources", *_OPTIONAL)
    found = part.record(keys, required=_LEAST if own else (*FIGURES, "sources"))
    cited = found["sources"].record(FIGURES) if "sources" in found else {}
    if not own:
        found["sources"].record(FIGURES, required=FIGURES)
    rates = found["tflops"].record(RATES, required=("fp32",))
    memory_bytes = found["memory"].read(parse_bytes)

    def figure(key: str, read: Callable[[YamlNode], _T], assumed: _T) -> _T:
        return read(found[key]) if key in found else assumed

    capacity_bytes = figure("capacity", _bytes, int(_OFFERED * memory_bytes))
    context_bytes = figure("context", _bytes, ASSUMED_CONTEXT_BYTES)
    if not memory_bytes >= capacity_bytes > context_bytes:
        raise part.error(
            f"{name} offers {format_bytes(capacity_bytes)} of "
            f"{format_bytes(memory_bytes)}, and CUDA's context takes "
            f"{format_bytes(context_bytes)}",
            needed="memory of no less than capacity, and capacity of more than context",
            hint="the units: 24GiB on the board, 23.64GiB that CUDA offers",
        )
    return Gpu(
        name,
        memory_bytes,
        capacity_bytes,
        context_bytes,
        bandwidth=found["bandwidth"].read(parse_bytes),
        launch_seconds=figure("launch_us", _number, _ASSUMED_LAUNCH_US) / 1e6,
        capability=figure("capability", _capability, _ASSUMED_CAPABILITY),
        multiprocessors=figure("multiprocessors", _count, _ASSUMED_MULTIPROCESSORS),
        flop_rates={rate: _number(value) * 1e12 for rate, value in rates.items()},
        sources={
            key: _document(cited[key], documents)
            if key in cited
            else (f"{part.file}" if key in found else _ASSUMED_SOURCE)
            for key in FIGURES
        },
        platform=figure("platform", _platform, "cuda"),
        link=figure("link", _bytes, _ASSUMED_LINK),
        peer=figure("peer", _bytes, figure("link", _bytes, _ASSUMED_LINK)),
        price=figure("price", _number, None),
    )


def _bytes(part: YamlNode) -> int:
    return part.read(parse_bytes)


def _platform(part: YamlNode) -> str:
    text = part.text()
    if text not in PLATFORMS:
        raise part.error(
            f"{part.what} is {text!r}",
            needed=f"one of {', '.join(PLATFORMS)}",
            hint="platform: cuda, or leave it out",
        )
    return text


def _number(part: YamlNode) -> float:
    try:
        number = float(part.text())
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise part.error(
            f"{part.what} is {part.text()!r}",
            needed="a number above zero",
            hint=f"{part.what.strip(chr(39))}: 82.6",
        )
    return number


def _count(part: YamlNode) -> int:
    text = part.text()
    if not re.fullmatch("[1-9][0-9]*", text):
        raise part.error(
            f"{part.what} is {text!r}",
            needed="a whole number above zero",
            hint=f"{part.what.strip(chr(39))}: 108",
        )
    return int(text)


def _capability(part: YamlNode) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)\.(\d)", part.text())
    if found is None:
        raise part.error(
            f"{part.what} is {part.text()!r}",
            needed="major and minor number with a point between them",
            hint="capability: 8.0",
        )
    return int(found[1]), int(found[2])


def _document(part: YamlNode, documents: Mapping[str, str]) -> str:
    key = part.text()
    if key not in documents:
        raise part.error(
            f"the source of {part.what} is {key!r}",
            needed=f"one of {', '.join(documents)}",
            hint="name the document under 'documents'",
        )
    return documents[key]


def _plain(name: str) -> str:
    return _BRANDS.sub("", name.lower())


def _same_number(name: str, cards: Mapping[str, Gpu]) -> str | None:
    """A card of similar name and the same number: others are other cards."""

    def is_near(one: str) -> bool:
        longer = abs(len(_plain(one)) - len(_plain(name))) > 1  # Ti, Super, 16GB
        return not longer and _number_in(one) == _number_in(name) != ""

    return did_you_mean(name, filter(is_near, cards))


def _number_in(name: str) -> str:
    return re.sub(r"\D", "", _plain(name))


def _table() -> Path:
    """The path of the table: beside this file if installed, else in the repository."""
    beside = Path(__file__).with_name("gpus.yaml")
    if beside.is_file():
        return beside
    return Path(__file__).parent.parent / "configs" / "gpus.yaml"
