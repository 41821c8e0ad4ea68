"""Options of a model without a file: its task, batch, dtype, adapters and attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Annotated, Any

import typer

from ckplan.errors import CkplanError


class Attention(str, Enum):
    """Attention of transformers; as ``ckplan.sources.from_transformers.ATTENTION``."""

    SDPA = "sdpa"
    EAGER = "eager"


Task = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="TASK",
        help="hf: what the model is trained for, such as causal-lm.  [default: that of "
        "the configuration's architecture]",
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        "--batch",
        metavar="SIZES",
        help="Sizes of a source's batch: 8x1024 tokens, 32x3x224x224 pixels.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Of a source's parameters: fp32, bf16 or fp16.  [default: that of the "
        "configuration, else fp32]",
    ),
]
Lora = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="r=RANK[,MODULES]",
        help="Train low-rank adapters of these modules alone; needs peft.",
    ),
]
AttentionOption = Annotated[
    Attention | None,
    typer.Option("--attention", help="hf: which attention the model runs."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="hf: run Python code that comes with the model."
    ),
]


@dataclass(frozen=True)
class SourceOptions:
    """Options of sources, as one block."""

    task: Task = None
    batch: Batch = None
    dtype: Dtype = None
    lora: Lora = None
    attention: AttentionOption = None
    trust_remote_code: TrustRemoteCode = False

    def settings(self, target: str) -> dict[str, Any]:
        """The options that are given, by name.

        Raises:
            CkplanError: One is given, but the target is a user's file.
        """
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        given = {
            name: value.value if isinstance(value, Enum) else value
            for name, value in values
            if value not in (None, False)
        }
        if given:
            _check_is_source(target, next(iter(given)))
        return given

    def at_length(self, target: str, longest: int) -> SourceOptions:
        """These options with a batch of tokens that is as long as ``--lengths`` says.

        A length that ``--batch`` names stays, and so do targets that make their batch.
        """
        from ckplan.sources.batches.sizes import DEFAULT_ROWS
        from ckplan.sources.source import parse_source

        source, rows = parse_source(target), self.batch or str(DEFAULT_ROWS)
        if source is None or source.kind != "hf" or not rows.isdecimal():
            return self
        return replace(self, batch=f"{rows}x{longest}")


@contextmanager
def blaming_lengths(batch: str | None) -> Iterator[None]:
    """Name ``--lengths`` where the batch that was assumed from them does not fit."""
    try:
        yield
    except CkplanError as error:
        given = f"cannot use --batch {batch}: "
        if batch is None or not error.what.startswith(given):
            raise
        from ckplan.training.lengths import no_lengths

        raise no_lengths(error.what.removeprefix(given)) from None


def _check_is_source(target: str, option: str) -> None:
    from ckplan.sources.source import KINDS, flag, parse_source

    if parse_source(target) is None:
        raise CkplanError(
            f"cannot use {flag(option)} with '{target}', which makes its own model",
            needed="a source: " + ", ".join(kind.example for kind in KINDS.values()),
            hint=f"--set {option}=..., if the factory has that option",
        )
