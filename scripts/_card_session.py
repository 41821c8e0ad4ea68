"""What ``on_card`` does with torch: the machine, the engine, and steps of models.

Profiles and plans are made in one process that lives as long as the session does. If an
error of the device ends it, the next model gets a new one.
"""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from _card_engine import engine_rows
from _card_results import CPU, EngineRow, one_line
from _card_steps import (
    NUM_STEPS,
    Measurement,
    Model,
    Prepared,
    Write,
    add_roofline,
    card_like,
    halvings_for,
    planned,
    profiled,
    start,
)

from ckplan.errors import CkplanError
from ckplan.training.loading import WorkloadSpec, parse_options


@dataclass(frozen=True)
class Card:
    """The device that is measured."""

    name: str
    bytes: int | None = None
    like: str | None = None  # a card of `ckplan gpus`, whose roofline is its own


class Session:
    """The device, and a process that profiles on it.

    Args:
        device: ``cuda`` or ``cpu``.
        settings: Options of every workload, ``NAME=VALUE``.

    Raises:
        CkplanError: There is no card, or a setting is none.
    """

    def __init__(self, device: str, settings: Sequence[str] = ()) -> None:
        self.device = device
        self.tests: Sequence[str] = ()  # in place of all that matter
        self._settings = parse_options(settings)
        self._pool: ProcessPoolExecutor | None = None
        check_card(device)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process."""
        self._forget_pool()

    @cached_property
    def card(self) -> Card:
        """The device that is there."""
        found: Card = self._elsewhere(card_here) if self.device == "cuda" else Card(CPU)
        return found

    def machine(self) -> dict[str, str]:
        """What results depend on."""
        card = {"card": self.card.name}
        if self.device == "cuda":
            card |= {
                "roofline of": self.card.like or "no card that is known",
                "driver": driver(),
                "CUDA": str(torch.version.cuda),
                "cuDNN": str(torch.backends.cudnn.version()),
            }
        if halvings := halvings_for(self.card.bytes):
            card["batches"] = f"halved {halvings} times, as the card is small"
        if self._settings:
            card["settings"] = ", ".join(f"{k}={v}" for k, v in self._settings.items())
        return {**card, "torch": torch.__version__}

    def engine(self) -> list[EngineRow]:
        """What the engine adds to a layer of tiny tensors."""
        found: list[EngineRow] = self._elsewhere(engine_rows, self.device)
        return found

    def steps(self, model: Model, types: str, seconds: float, write: Write) -> None:
        """Predict and measure the steps of a model.

        Args:
            model: The model.
            types: A key of ``allocated.TYPES``.
            seconds: How long timed steps may take, about.
            write: Told the rows, whenever more is known.

        Raises:
            CkplanError: The model cannot be profiled or planned.
        """
        spec = model.spec(halvings_for(self.card.bytes), self._settings)
        graph = self._elsewhere(profiled, types, spec, self.device)
        with ExitStack() as scope:
            processes = [  # which import while plans are made, and nothing is timed
                scope.enter_context(start(spec, types, self.device))
                for _ in range(NUM_STEPS)
            ]
            prepared: Prepared = self._elsewhere(planned, model.name, types, graph)
            prepared = self._with_roofline(prepared, spec)
            write(prepared.rows)
            measurement = Measurement(prepared, spec, self.device, write)
            measurement.run(processes[: len(prepared.rows)], seconds)

    def _with_roofline(self, prepared: Prepared, spec: WorkloadSpec) -> Prepared:
        """The roofline of a card is a prediction more: without it, the rest stays."""
        if self.card.like is None:
            return prepared
        try:
            found: Prepared = self._elsewhere(
                add_roofline, prepared, spec, self.card.like
            )
        except CkplanError:
            return prepared
        return found

    def _elsewhere(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do something in the other process; its errors are raised here."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        try:
            found = self._pool.submit(_answered, work, *args).result()
        except BrokenProcessPool:
            self._forget_pool()
            raise CkplanError(
                "the process that profiles was ended",
                needed="memory, and a device without errors",
                hint="ckplan profile",
            ) from None
        except BaseException:  # the time is up: what it is at is of no use any more
            self._forget_pool()
            raise
        if isinstance(found, CkplanError):
            raise found
        return found

    def _forget_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)


def _answered(work: Callable[..., Any], *args: Any) -> Any:
    """What it returns, or its error, which crosses processes whatever it is."""
    try:
        return work(*args)
    except CkplanError as error:
        return error
    except Exception as error:
        return CkplanError(
            one_line(error), needed="a step that runs here", hint="ckplan profile"
        )


# -- the machine ---------------------------------------------------------------------


def check_card(device: str) -> None:
    """Refuse a machine without a card.

    Raises:
        CkplanError: There is none, or torch cannot use it.
    """
    if device != "cuda" or torch.cuda.is_available():
        return
    built = torch.backends.cuda.is_built()
    raise CkplanError(
        "cannot measure on a card: "
        + ("torch finds none" if built else f"torch {torch.__version__} has no CUDA"),
        needed="an NVIDIA card, its driver, and a build of torch with CUDA",
        hint="nvidia-smi, which lists cards; --device cpu tries this program without",
    )


def card_here() -> Card:
    """The card that is there, asked where a context on it does no harm."""
    found, capability = (
        torch.cuda.get_device_properties(0),
        torch.cuda.get_device_capability(0),
    )
    like = card_like(found.total_memory, capability)
    return Card(found.name, found.total_memory, like)


def driver() -> str:
    """Version of the card's driver, as far as it is told."""
    if shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    path = Path("/proc/driver/nvidia/version")
    lines = path.read_text().splitlines() if path.exists() else []
    return lines[0].partition("Module")[2].split()[0] if lines else "not known"
