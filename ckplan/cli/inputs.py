"""Convert command-line values to arguments of the rest of ckplan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckplan.cli.options import Amp, Shard
from ckplan.cli.terminal import print_message
from ckplan.errors import CkplanError

if TYPE_CHECKING:
    from ckplan.cli.source_options import SourceOptions
    from ckplan.graph.graph import Graph
    from ckplan.graph.sharding import Sharding
    from ckplan.training.loading import WorkloadSpec
    from ckplan.training.step import Training

TRACES = Path("traces")


def workload(
    target: str,
    settings: list[str] | None,
    inputs: list[str] | None,
    source: SourceOptions,
) -> WorkloadSpec:
    """The workload to train."""
    from ckplan.training.loading import WorkloadSpec, parse_options

    options = {**parse_options(settings or ()), **source.settings(target)}
    return WorkloadSpec(target, options, tuple(inputs or ()))


def make_training(
    optimizer: str | None,
    amp: Amp | None,
    accumulate: int,
    clip: float | None,
    scaler: bool,
) -> Training:
    """The training settings of a step."""
    from ckplan.training.step import Training

    return Training(optimizer, amp and amp.value, accumulate, clip, scaler)


def make_sharding(
    shard: Shard | None, world_size: int | None, units: list[str] | None
) -> Sharding | None:
    """The sharding that the three options define; None without sharding."""
    if (shard is None) != (world_size is None) or (units and shard is None):
        raise typer.BadParameter("--shard and --world-size go together")
    if shard is None or world_size is None:
        return None
    from ckplan.graph.sharding import Sharding

    return Sharding(shard.value, world_size, tuple(units or ()))


def shard_for_rank(graph: Graph, sharding: Sharding | None) -> Graph:
    """Derive the step of one rank if sharding is requested."""
    if sharding is None:
        return graph
    from ckplan.graph.sharding import sharded

    return sharded(graph, sharding)


def load_step(trace: Path | None, sharding: Sharding | None) -> Graph:
    """Load the named trace or the newest one, as the step of one rank."""
    from ckplan.graph import file as trace_file

    return shard_for_rank(trace_file.load(trace or newest_trace()), sharding)


def check_output(path: Path, force: bool) -> None:
    """Raise early if the output file cannot be written."""
    if path.is_dir():
        raise CkplanError(
            f"cannot write '{path}': it is a folder",
            needed="the name of a file",
            hint=f"-o {path / 'NAME'}",
        )
    if path.is_file() and not force:
        from ckplan import files

        raise files.exists(path)


def check_plot_output(path: Path, force: bool) -> None:
    """Raise early if the plot cannot be made or written."""
    from ckplan.report.plots import check_plot

    check_output(path, force)
    check_plot(path)


def check_page_output(path: Path, force: bool) -> None:
    """Raise early if the page cannot be written; its folder must exist."""
    check_output(path, force)
    if not path.parent.is_dir():
        raise CkplanError(
            f"cannot write '{path}': there is no folder '{path.parent}'",
            needed="a folder that exists",
            hint=f"mkdir -p {path.parent}",
        )


def print_gpu_budget(gpu: str) -> None:
    """Print how the budget follows from a card's memory."""
    from ckplan.gpus import find
    from ckplan.units import format_bytes

    card = find(gpu)
    capacity, context = map(format_bytes, (card.capacity_bytes, card.context_bytes))
    print_message(
        f"budget of {card.name}: {capacity} less {context} for CUDA's context"
    )


def newest_trace() -> Path:
    """Path of the most recently written trace."""
    from ckplan import files

    found = files.newest(TRACES, "*.json*")
    if found is None:
        raise CkplanError(
            f"cannot find a trace: there is none in {TRACES}/",
            needed="a trace that `ckplan profile` wrote",
            hint="ckplan profile model.py, or name the trace",
        )
    print_message(f"reading {found}")
    return found


def find_trace(name: str, path: Path | None) -> Graph | None:
    """Load the named trace, or the workload's default one if it is readable."""
    from ckplan.graph import file as trace_file

    if path is not None:
        return trace_file.load(path)
    usual = TRACES / f"{name}.json.gz"
    try:
        return trace_file.load(usual) if usual.is_file() else None
    except CkplanError:
        return None  # verify works without a trace


def is_trace(data: bytes) -> bool:
    """Whether data are those of a trace, intact or damaged; else it can be a plan."""
    gzipped, json_object = data[:2] == b"\x1f\x8b", data[:1] == b"{"
    return gzipped or (json_object and b"ckplan_graph" in data[:1000])
