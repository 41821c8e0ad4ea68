"""Known GPUs: their memory, and the roofline time of an op.

The figures are in ``configs/gpus.yaml``, each with its source. The roofline of S.
Williams, A. Waterman and D. Patterson ("Roofline: an insightful visual performance
model for multicore architectures", 2009) gives the least time of an op on the
GPU: its FLOPs at the peak rate of its dtype, or its bytes at full bandwidth, whichever
takes longer. In addition, the CPU needs time to launch every op.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ckplan.errors import CkplanError, did_you_mean
from ckplan.plan.strict_yaml import YamlNode, compose
from ckplan.units import parse_bytes

FORMAT_VERSION = 1
RATES = ("fp32", "tf32", "fp16", "bf16")
FIGURES = (
    "memory",
    "capacity",
    "context",
    "bandwidth",
    "launch_us",
    "capability",
    "multiprocessors",
    "tflops",
)
_TOP_KEYS = ("ckplan_gpus", "documents", "gpus")
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
_SIZE = re.compile(r"\d+gb")
_BRANDS = re.compile(r"nvidia|geforce|tesla|[^a-z0-9]")


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
    cards = load()
    wanted = _plain(name)
    rest = {name: _plain(name).removeprefix(wanted) for name in cards}
    exact = [card for name, card in cards.items() if _plain(name) == wanted]
    found = exact or [c for name, c in cards.items() if _SIZE.fullmatch(rest[name])]
    if len(found) == 1 and wanted:
        return found[0]
    several = len(found) > 1 and wanted
    begun = (name for name in cards if wanted and _plain(name).startswith(wanted))
    near = found[0].name if several else next(begun, did_you_mean(name, cards))
    raise CkplanError(
        f"{'more than one card' if several else 'no card'} is called {name!r}",
        needed="one of "
        + ", ".join(c.name for c in (found if several else [*cards.values()])),
        hint=f"--gpu {near!r}"
        if near
        else "`ckplan gpus` lists them with their figures",
    )


@cache
def load() -> dict[str, Gpu]:
    """Every card of the table that comes with ckplan, by name."""
    path = _table()
    return parse(path.read_text(encoding="utf-8"), str(path))


def parse(text: str, name: str) -> dict[str, Gpu]:
    """Read a table of cards.

    Args:
        text: YAML, as in ``configs/gpus.yaml``.
        name: The name of the table in error messages.

    Raises:
        PlanError: A key or a figure is unknown, missing or invalid. The error names
            the line.
    """
    root = compose(text, name, _EXAMPLES, "the table of cards")
    top = root.record(_TOP_KEYS, required=_TOP_KEYS)
    if top["ckplan_gpus"].text() != str(FORMAT_VERSION):
        raise top["ckplan_gpus"].error(
            f"format {top['ckplan_gpus'].text()!r}",
            needed=f"ckplan_gpus: {FORMAT_VERSION}",
            hint="the table of this version of ckplan",
        )
    documents = {key: part.text() for key, part in top["documents"].entries().items()}
    gpus = top["gpus"].entries()
    return {key: _card(key, part, documents) for key, part in gpus.items()}


def _card(name: str, part: YamlNode, documents: Mapping[str, str]) -> Gpu:
    keys = (*FIGURES, "sources")
    found = part.record(keys, required=keys)
    rates = found["tflops"].record(RATES, required=("fp32",))
    cited = found["sources"].record(FIGURES, required=FIGURES)
    sizes = [found[key].read(parse_bytes) for key in FIGURES[:4]]
    memory_bytes, capacity_bytes, context_bytes, bandwidth = sizes
    if not memory_bytes >= capacity_bytes > context_bytes:
        raise part.error(
            f"{name} offers {capacity_bytes} B of {memory_bytes} B",
            needed="memory of no less than capacity, and capacity of more than context",
            hint="the units: 24GiB on the board, 23.64GiB that CUDA offers",
        )
    return Gpu(
        name,
        memory_bytes,
        capacity_bytes,
        context_bytes,
        bandwidth,
        launch_seconds=_number(found["launch_us"]) / 1e6,
        capability=_capability(found["capability"]),
        multiprocessors=_count(found["multiprocessors"]),
        flop_rates={rate: _number(value) * 1e12 for rate, value in rates.items()},
        sources={key: _document(cited[key], documents) for key in FIGURES},
    )


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


def _table() -> Path:
    """The path of the table: beside this file if installed, else in the repository."""
    beside = Path(__file__).with_name("gpus.yaml")
    if beside.is_file():
        return beside
    return Path(__file__).parent.parent / "configs" / "gpus.yaml"
