"""Plans activation checkpointing: the fastest training step that fits in memory.

    graph = ckplan.profile(model, batch)
    plan = ckplan.solve(graph, budget="12GiB")
    ckplan.apply(model, plan)

Importing this package imports nothing else. Every name is loaded at its first use. Only
``profile``, ``record``, ``auto``, ``verify``, ``dry_run``, ``apply``, ``planned``,
``remove``, ``status``, ``compile``, ``backend``, ``tune``, ``largest_batch``,
``tile_head``, ``tile_rows``, ``tiled_cross_entropy``, ``check_bits`` and
``update_in_groups`` import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckplan.applying import apply, planned, remove, status
    from ckplan.applying.tiling import (
        check_bits,
        tile_head,
        tile_rows,
        tiled_cross_entropy,
    )
    from ckplan.auto import auto
    from ckplan.autotune import largest_batch, tune
    from ckplan.compiling import backend, compile
    from ckplan.errors import CkplanError, InfeasibleError
    from ckplan.fitting.fit import fit
    from ckplan.graph.file import load as load_graph
    from ckplan.graph.file import save as save_graph
    from ckplan.graph.graph import Graph
    from ckplan.graph.sharding import shard
    from ckplan.plan.file import load as load_plan
    from ckplan.plan.file import save as save_plan
    from ckplan.plan.plan import Plan
    from ckplan.report.html import save_report
    from ckplan.report.tuned_page import save_tuned_report
    from ckplan.solving.solve import frontier
    from ckplan.solving.solve import solve_plan as solve
    from ckplan.tracing.costs.spill_rate import spill_link, spill_rate
    from ckplan.tracing.profile import profile
    from ckplan.tracing.record import record
    from ckplan.training.grouped_updates import update_in_groups
    from ckplan.tuning.answer import plan_of as tuned_plan
    from ckplan.verifying.dry_run import dry_run
    from ckplan.verifying.verify import verify

    __version__: str

__all__ = [
    "CkplanError",
    "Graph",
    "InfeasibleError",
    "Plan",
    "__version__",
    "apply",
    "auto",
    "backend",
    "check_bits",
    "compile",
    "dry_run",
    "fit",
    "frontier",
    "largest_batch",
    "load_graph",
    "load_plan",
    "planned",
    "profile",
    "record",
    "remove",
    "save_graph",
    "save_plan",
    "save_report",
    "save_tuned_report",
    "shard",
    "solve",
    "spill_link",
    "spill_rate",
    "status",
    "tile_head",
    "tile_rows",
    "tiled_cross_entropy",
    "tune",
    "tuned_plan",
    "update_in_groups",
    "verify",
]

_HOME = {
    "CkplanError": "ckplan.errors:CkplanError",
    "Graph": "ckplan.graph.graph:Graph",
    "InfeasibleError": "ckplan.errors:InfeasibleError",
    "Plan": "ckplan.plan.plan:Plan",
    "apply": "ckplan.applying:apply",
    "auto": "ckplan.auto:auto",
    "backend": "ckplan.compiling:backend",
    "check_bits": "ckplan.applying.tiling:check_bits",
    "compile": "ckplan.compiling:compile",
    "dry_run": "ckplan.verifying.dry_run:dry_run",
    "fit": "ckplan.fitting.fit:fit",
    "frontier": "ckplan.solving.solve:frontier",
    "largest_batch": "ckplan.autotune:largest_batch",
    "load_graph": "ckplan.graph.file:load",
    "load_plan": "ckplan.plan.file:load",
    "planned": "ckplan.applying:planned",
    "profile": "ckplan.tracing.profile:profile",
    "record": "ckplan.tracing.record:record",
    "remove": "ckplan.applying:remove",
    "save_graph": "ckplan.graph.file:save",
    "save_plan": "ckplan.plan.file:save",
    "save_report": "ckplan.report.html:save_report",
    "save_tuned_report": "ckplan.report.tuned_page:save_tuned_report",
    "shard": "ckplan.graph.sharding:shard",
    "solve": "ckplan.solving.solve:solve_plan",
    "spill_link": "ckplan.tracing.costs.spill_rate:spill_link",
    "spill_rate": "ckplan.tracing.costs.spill_rate:spill_rate",
    "status": "ckplan.applying:status",
    "tile_head": "ckplan.applying.tiling:tile_head",
    "tile_rows": "ckplan.applying.tiling:tile_rows",
    "tiled_cross_entropy": "ckplan.applying.tiling:tiled_cross_entropy",
    "tune": "ckplan.autotune:tune",
    "tuned_plan": "ckplan.tuning.answer:plan_of",
    "update_in_groups": "ckplan.training.grouped_updates:update_in_groups",
    "verify": "ckplan.verifying.verify:verify",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module at first use."""
    if name == "__version__":
        value: object = _version()
    elif name in _HOME:
        module, _, attribute = _HOME[name].partition(":")
        value = getattr(importlib.import_module(module), attribute)
    else:
        raise AttributeError(f"module 'ckplan' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ckplan")
    except PackageNotFoundError:  # run from source, not installed
        return "unknown"
