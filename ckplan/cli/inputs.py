"""Convert command-line values to arguments of the rest of ckplan."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ckplan.cli.terminal import print_message
from ckplan.errors import CkplanError

if TYPE_CHECKING:
    from ckplan.graph.graph import Graph
    from ckplan.graph.sharding import Sharding
    from ckplan.plan.plan import Plan
    from ckplan.training.loading import WorkloadSpec
    from ckplan.training.remembered import ScriptSpec
    from ckplan.training.script import Script
    from ckplan.training.step import Training

TRACES = Path("traces")
_MOST_BESIDE = 5  # traces in the folder of a plan
_LONGEST_NAME = 120
_NOT_PLANS = (".py", ".json", ".gz")


def shard_for_rank(graph: Graph, sharding: Sharding | None) -> Graph:
    """Derive the step of one rank if sharding is requested."""
    if sharding is None:
        return graph
    from ckplan.graph.sharding import sharded
    from ckplan.simulating.peers import peer_rate

    return sharded(graph, sharding, peer_rate(graph))


def load_step(trace: Path | None, sharding: Sharding | None) -> Graph:
    """Load the named trace or the newest one, as the step of one rank."""
    from ckplan.graph import file as trace_file

    return shard_for_rank(trace_file.load(trace or newest_trace()), sharding)


def check_output(path: Path, force: bool, hint: str | None = None) -> None:
    """Raise early if the output file cannot be written; ``hint`` says how to force."""
    if path.is_dir():
        raise CkplanError(
            f"cannot write '{path}': it is a folder",
            needed="the name of a file",
            hint=f"-o {path / 'NAME'}",
        )
    if path.is_file() and not force:
        from ckplan import files

        raise files.exists(path, hint)


def check_plan_output(path: Path, force: bool) -> None:
    """Raise early if a plan cannot be written there; nor over a trace or a script."""
    if path.suffix in _NOT_PLANS:
        raise CkplanError(
            f"cannot write the plan to '{path}': a plan is YAML",
            needed="the name of a plan",
            hint="-o plan.yaml",
        )
    check_output(path, force)


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


def default_trace(name: str, workload: Mapping[str, Any], device: str | None) -> Path:
    """Where the trace of a workload is by default: each option changes its name.

    Args:
        name: Of the file and the factory.
        workload: The options, as ``plan_workload`` returns them.
        device: Device of the step; a card implies it.
    """
    parts = [*workload.get("set", ()), *workload.get("input", ())]
    others = (key for key in workload if key not in ("target", "set", "input"))
    parts += [f"{key}={workload[key]}" for key in others]
    if device not in (None, "cpu") and "gpu" not in workload:
        parts.append(str(device))
    whole = re.sub(r"[^\w.=+-]", "_", "-".join((name, *parts)), flags=re.ASCII)
    if len(whole) > _LONGEST_NAME:
        digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
        whole = f"{whole[:_LONGEST_NAME]}-{digest}"
    return TRACES / f"{whole}.json.gz"


def trace_of_script(script: Script) -> Path:
    """Where the trace of a script is by default."""
    return default_trace(script.stem, {"set": script.arguments}, None)


def trace_of_plan(
    spec: WorkloadSpec | ScriptSpec, training: Training, seed: int, plan: Plan
) -> Path:
    """Where the trace of a plan's workload is by default."""
    from ckplan.training.remembered import ScriptSpec

    if isinstance(spec, ScriptSpec):
        return trace_of_script(spec.script)
    from ckplan.plan.workload import plan_workload
    from ckplan.training.remembered import describe_workload

    card = {"gpu": plan.workload["gpu"]} if "gpu" in plan.workload else {}
    known = describe_workload(spec, seed)
    options = {"workload": known, **training.as_options(), **card}
    device = plan.fingerprint.get("device")
    name = compiled_name(spec.name) if "compiled" in plan.fingerprint else spec.name
    return default_trace(name, plan_workload(options), device)


def compiled_name(name: str) -> str:
    """What the trace of a compiled step is called."""
    return f"{name}-compiled"


def mean_trace(path: Path) -> Path:
    """Where the trace of the mean length is, beside that of the longest."""
    head, dot, tail = path.name.partition(".")
    return path.with_name(f"{head}.mean{dot}{tail}")


def find_mean(graph: Graph, path: Path, sharding: Sharding | None) -> Graph | None:
    """The step at the mean length, if the trace was made of several lengths."""
    from ckplan.graph import file as trace_file

    beside = mean_trace(path)
    if "lengths" not in graph.options or not beside.is_file():
        return None
    found = shard_for_rank(trace_file.load(beside), sharding)
    return found if found.options == graph.options else None


def trace_for_plan(plan: Plan, usual: Path, path: Path | None) -> Graph | None:
    """The trace that a plan was made of: the workload's default one, or one near it.

    Args:
        plan: The plan.
        usual: Where the trace of the workload is by default.
        path: The plan's file, if traces of its folder may be meant.
    """
    from ckplan.graph import file as trace_file
    from ckplan.plan.plan import plan_fingerprint

    with suppress(CkplanError):  # also without a trace, a plan can be used
        found = trace_file.load(usual) if usual.is_file() else None
        known = plan.fingerprint  # a plan that is written by hand has none
        if found and (not known or plan_fingerprint(found.fingerprint) == known):
            return found
    folders = [] if path is None else [path.resolve().parent, usual.parent]
    found_there = (trace_in(folder, plan) for folder in folders)
    return next(filter(None, found_there), None)


def trace_in(folder: Path, plan: Plan) -> Graph | None:
    """The trace that a plan was made of, if it is among the newest of a folder.

    Args:
        folder: Whose traces are looked at.
        plan: What its file has: the workload, and its unplanned peak.
    """
    from ckplan.graph import file as trace_file
    from ckplan.plan.plan import plan_fingerprint
    from ckplan.plan.workload import plan_workload
    from ckplan.simulating.simulate import simulate

    wanted = plan.predicted and plan.predicted.unplanned_peak_bytes
    with suppress(OSError):
        files = folder.glob("*.json.gz")
        newest = sorted(files, key=lambda one: -one.stat().st_mtime)
        for one in newest[:_MOST_BESIDE]:
            with suppress(CkplanError):
                graph = trace_file.load(one)
                if (
                    plan_workload(graph.options) == plan.workload
                    and plan_fingerprint(graph.fingerprint) == plan.fingerprint
                    and simulate(graph).peak_bytes == wanted
                ):
                    return graph
    return None


def target_and_plan(given: Sequence[str]) -> tuple[str | None, Path]:
    """Tell the target from the plan, in either order; a plan may be alone.

    Raises:
        BadParameter: There is no plan, or there are more than two arguments.
    """
    if len(given) > 2:
        raise typer.BadParameter(f"a target and a plan are enough: {given[2]}")
    plans = [text for text in given if _is_plan(text)]
    if len(given) == 1:
        if not plans:
            raise typer.BadParameter(f"a plan is missing: {given[0]} PLAN")
        return None, Path(plans[0])
    # Where files do not tell, the plan comes last.
    plan = plans[0] if len(plans) == 1 else given[1]
    target = given[1] if plan is given[0] else given[0]
    return target, Path(plan)


def target_and_wish(
    given: Sequence[str], budget: str | None
) -> tuple[str | None, Path | None]:
    """The target and the plan, as far as they are given.

    Raises:
        BadParameter: There is neither plan nor budget.
    """
    if len(given) == 1 and not _is_plan(given[0]):
        if budget is None:
            raise typer.BadParameter(f"a plan is missing, or --budget: {given[0]} PLAN")
        return given[0], None
    return target_and_plan(given)


def check_wish(
    plan: Path | None, budget: str | None, save: Path | None, force: bool
) -> None:
    """Refuse a budget beside a plan, and to save a plan that is a file, or over one.

    Raises:
        BadParameter: They do not go together.
        CkplanError: The file is there.
    """
    if plan is not None and budget is not None:
        raise typer.BadParameter("a plan has a budget already: a plan or --budget")
    if plan is not None and save is not None:
        raise typer.BadParameter("--save goes with --budget, or with --compile")
    if save is not None:
        check_plan_output(save, force)


def _is_plan(text: str) -> bool:
    from ckplan.plan.plan import PLAN_SUFFIXES

    path = Path(text)
    other = path.suffix in _NOT_PLANS
    return path.suffix in PLAN_SUFFIXES or (path.is_file() and not other)


def is_trace_file(source: str) -> bool:
    """Whether a source is the file of a trace, by its name or its content."""
    from ckplan.sources.source import parse_source

    if parse_source(source) is not None:
        return False
    path = Path(source)
    if path.name.endswith((".json", ".json.gz")):
        return True
    return path.is_file() and is_trace(path.read_bytes()[:1000])


def is_trace(data: bytes) -> bool:
    """Whether data are those of a trace, intact or damaged; else it can be a plan."""
    gzipped, json_object = data[:2] == b"\x1f\x8b", data[:1] == b"{"
    return gzipped or (json_object and b"ckplan_graph" in data[:1000])
