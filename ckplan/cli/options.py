"""Arguments and options that several commands share, alone and in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckplan.cli.terminal import print_message

if TYPE_CHECKING:
    from ckplan.cli.source_options import SourceOptions
    from ckplan.graph.graph import Graph
    from ckplan.graph.sharding import Sharding
    from ckplan.plan.plan import Plan
    from ckplan.training.loading import WorkloadSpec
    from ckplan.training.remembered import Remembered
    from ckplan.training.step import Training


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
TargetAndPlan = Annotated[
    list[str],
    typer.Argument(
        metavar="[TARGET] PLAN",
        help="A plan of `ckplan solve`, or by hand. Target and options that are not "
        "given are those that the plan remembers.",
    ),
]
MOST_SEED = 2**64 - 1  # of torch.manual_seed
Seed = Annotated[
    int, typer.Option(min=0, max=MOST_SEED, help="Seed of all random numbers.")
]
Trace = Annotated[
    Path | None,
    typer.Argument(help="From `ckplan profile`.  [default: newest of traces/]"),
]
Reserve = Annotated[
    str,
    typer.Option(
        metavar="SIZE", help="Memory to leave free: subtracted from the budget."
    ),
]
OBJECTIVE_OPTIONS = (
    "--budget, --gpu, --gpu-memory, --max-overhead, --min-memory or --knee"
)
Spill = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where the file of offloaded tensors is, for a time; or host, of a GPU.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Measure all ops again; ignore cached costs.")
]
TraceOutput = Annotated[
    Path | None,
    typer.Option("-o", help="The trace to write.  [default: traces/NAME.json.gz]"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@dataclass(frozen=True)
class StepOptions:
    """What a workload is built with, and how its step trains."""

    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="An option of the factory; repeatable."
        ),
    ] = None
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE:DTYPE",
            help="For a model without a factory: 8x3x224x224:float32; repeatable.",
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="ROWS",
            help="Cut or repeat the rows of the workload's batch to this number.",
        ),
    ] = None
    batch_dim: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="DIM",
            help="The dimension of the batch's tensors that counts rows.  [default: 0]",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KERNEL]",
            help="adamw, adam, sgd, momentum, adafactor, adamw8bit (predicted only), "
            "none or own; with foreach, fused or single; foreach=64MiB updates at most "
            "so many bytes of parameters at once.  [default: own if there is one, else "
            "adamw, as torch chooses]",
        ),
    ] = None
    amp: Annotated[
        Amp | None, typer.Option(help="Forward and loss under autocast to this type.")
    ] = None
    accumulate: Annotated[
        int, typer.Option(min=1, metavar="N", help="Batches per step of the optimizer.")
    ] = 1
    clip: Annotated[
        float | None,
        typer.Option(metavar="NORM", help="Clip the gradients to this norm."),
    ] = None
    scaler: Annotated[
        bool, typer.Option("--scaler", help="Scale the loss, for --amp fp16.")
    ] = False

    def completed(
        self, target: str | None, source: SourceOptions, seed: int, plan: Plan | None
    ) -> Remembered:
        """The workload to train, with what a plan remembers where none is given."""
        from ckplan.plan.workload import as_arguments
        from ckplan.training.remembered import complete

        made_for = {} if plan is None else plan.workload
        if made_for:
            print_message(f"the plan was made for {as_arguments(made_for)}")
        given = None if target is None else self.workload(target, source)
        if given is None and "target" in made_for:
            given = self.workload(made_for["target"], source)
        return complete(given, self.training(), seed, plan)

    def workload(self, target: str, source: SourceOptions) -> WorkloadSpec:
        """The workload to train."""
        from ckplan.training.loading import WorkloadSpec, parse_options

        settings = {**parse_options(self.settings or ()), **source.settings(target)}
        inputs = tuple(self.inputs or ())
        rows, dim = self.micro_batch, self.batch_dim
        return WorkloadSpec(target, settings, inputs, rows=rows, batch_dim=dim)

    def training(self) -> Training:
        """The training settings of a step."""
        from ckplan.training.step import Training

        return Training(**self.training_settings())

    @property
    def is_default(self) -> bool:
        """Whether the step trains as it does without any option."""
        return self.is_plain and self.amp is None

    @property
    def is_plain(self) -> bool:
        """Whether no option but autocast says how the step trains."""
        others = self.optimizer, self.clip
        alone = self.accumulate == 1 and not self.scaler
        return alone and all(one is None for one in others)

    @property
    def of_workload(self) -> bool:
        """Whether an option says how to make the workload."""
        sizes = self.micro_batch, self.batch_dim
        return bool(self.settings or self.inputs) or sizes != (None, None)

    def training_settings(self) -> dict[str, Any]:
        """The same as keyword arguments."""
        names = "optimizer", "accumulate", "clip", "scaler"
        amp = self.amp and self.amp.value
        return {"amp": amp, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class CardOptions:
    """A card whose memory is the limit, as PyTorch's allocator reserves it."""

    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="Instead of a budget: the memory of a card of `ckplan gpus`, for "
            "which the trace was made.",
        ),
    ] = None
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory",
            metavar="SIZE",
            help="Instead of a budget: the memory of any other card, such as 16GB.",
        ),
    ] = None
    expandable: Annotated[
        bool,
        typer.Option(
            "--expandable-segments",
            help="On a card: train with PYTORCH_ALLOC_CONF=expandable_segments:True.",
        ),
    ] = False

    @property
    def given(self) -> list[str]:
        """The values that are given."""
        return [one for one in (self.gpu, self.gpu_memory) if one is not None]

    def check_and_announce(self, graph: Graph) -> None:
        """Print how the budget follows from the card's memory.

        Raises:
            CkplanError: The step was not profiled for the card.
        """
        from ckplan.gpus import ASSUMED_CONTEXT_BYTES, find
        from ckplan.solving.card_memory import card_bytes, doubts
        from ckplan.units import format_bytes

        if not self.given:
            return
        usable_bytes = card_bytes(graph, self.gpu, self.gpu_memory)
        name, context_bytes = f"a card of {self.gpu_memory}", ASSUMED_CONTEXT_BYTES
        card = None if self.gpu is None else find(self.gpu)
        if doubt := doubts(graph, card):
            print_message(f"warning: {doubt}")
        if card is not None:
            name, context_bytes = card.name, card.context_bytes
        sizes = usable_bytes + context_bytes, context_bytes
        capacity, context = map(format_bytes, sizes)
        print_message(f"budget of {name}: {capacity} less {context} for CUDA's context")


@dataclass(frozen=True)
class ShardOptions:
    """The step of one rank of several."""

    shard: Annotated[
        Shard | None,
        typer.Option("--shard", help="Plan the step of one rank under this scheme."),
    ] = None
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size", min=1, metavar="N", help="With --shard: number of ranks."
        ),
    ] = None
    units: Annotated[
        list[str] | None,
        typer.Option(
            "--unit",
            metavar="MODULES",
            help="With fsdp2 and zero3: modules gathered together, such as h.[0..11]; "
            "repeatable.  [default: the layers]",
        ),
    ] = None

    def sharding(self) -> Sharding | None:
        """The sharding that the three options define; None without sharding."""
        shard, world_size = self.shard, self.world_size
        if (shard is None) != (world_size is None) or (self.units and shard is None):
            raise typer.BadParameter("--shard and --world-size go together")
        if shard is None or world_size is None:
            return None
        from ckplan.graph.sharding import Sharding

        return Sharding(shard.value, world_size, tuple(self.units or ()))


def with_blocks(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter that is an option block by the fields of the block.

    A block is a dataclass whose fields are options. The returned function takes the
    fields, in the place where ``command`` takes the block.
    """
    blocks: dict[str, tuple[Any, list[Parameter]]] = {}
    flat: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            options = list(signature(kind, eval_str=True).parameters.values())
            blocks[parameter.name] = kind, options
            flat += options
        else:
            flat.append(parameter)
    flat = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in flat]

    @wraps(command)
    def run(**values: Any) -> None:
        for block, (kind, options) in blocks.items():
            of_block = {option.name: values.pop(option.name) for option in options}
            values[block] = kind(**of_block)
        command(**values)

    run.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in flat}
    return run
