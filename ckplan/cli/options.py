"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Amp(str, Enum):
    """Target type of autocast; as ``ckplan.training.step.AMP``."""

    BF16 = "bf16"
    FP16 = "fp16"


class Shard(str, Enum):
    """Sharding scheme of several ranks; as ``ckplan.graph.sharding.SCHEMES``."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP2 = "fsdp2"


class EjectFormat(str, Enum):
    """Output format of a plan; "torch" or one of ``ckplan.ejecting.settings.TOOLS``."""

    TORCH = "torch"
    TRANSFORMERS = "transformers"
    DEEPSPEED = "deepspeed"
    MEGATRON = "megatron"


class Method(str, Enum):
    """Solving method; as ``ckplan.solving.solve.METHODS``."""

    CHAIN = "chain"
    MILP = "milp"


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="hf:ID_OR_FOLDER, timm:NAME, torchvision:NAME or diffusers:FOLDER; or "
        "model.py[:factory] or package.module:factory, whose factory, by default "
        "build(), returns (model, batch), (model, batch, loss_fn) or a dict.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="An option of the factory; repeatable."
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE:DTYPE",
        help="For a model without a factory: 8x3x224x224:float32; repeatable.",
    ),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:KERNEL]",
        help="adamw, adam, sgd, momentum, adafactor, adamw8bit (predicted only), none "
        "or own; with foreach, fused or single.  [default: own if there is one, else "
        "adamw, as torch chooses]",
    ),
]
AmpOption = Annotated[
    Amp | None, typer.Option(help="Forward and loss under autocast to this type.")
]
Accumulate = Annotated[
    int, typer.Option(min=1, metavar="N", help="Batches per step of the optimizer.")
]
Clip = Annotated[
    float | None,
    typer.Option(metavar="NORM", help="Clip the gradients to this norm."),
]
Scaler = Annotated[
    bool, typer.Option("--scaler", help="Scale the loss, for --amp fp16.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")]
ShardOption = Annotated[
    Shard | None,
    typer.Option("--shard", help="Plan the step of one rank under this scheme."),
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size", min=1, metavar="N", help="With --shard: number of ranks."
    ),
]
Units = Annotated[
    list[str] | None,
    typer.Option(
        "--unit",
        metavar="MODULES",
        help="With fsdp2 and zero3: modules gathered together, h.[0..11]; "
        "repeatable.  [default: the layers]",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Argument(help="From `ckplan profile`.  [default: newest of traces/]"),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="Instead of a budget: the memory of a card of `ckplan gpus`.",
    ),
]
Reserve = Annotated[
    str,
    typer.Option(
        metavar="SIZE", help="Memory to leave free: taken off the budget first."
    ),
]
Expandable = Annotated[
    bool,
    typer.Option(
        "--expandable-segments",
        help="With --gpu: PYTORCH_ALLOC_CONF has expandable_segments:True.",
    ),
]
OBJECTIVE_OPTIONS = "--budget, --gpu, --max-overhead, --min-memory or --knee"
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
