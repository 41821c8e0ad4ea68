"""What traces of ``form_models.py`` say, to compare the forms of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckplan.graph.graph import Graph
from ckplan.simulating.simulate import simulate
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training

HERE = Path(__file__).parent
CARD = "A100 40GB"  # its roofline stands for measuring


def facts_of(graph: Graph) -> dict[str, Any]:
    """Everything that a trace says of a step but seconds, as JSON has it."""
    calls = [f"{call.fqn}:{call.number}" for call in graph.calls]
    facts = {
        "ops": [
            (op.name, calls[op.call] if op.call >= 0 else "", *op.outputs)
            for op in graph.ops
        ],
        "num_forward": graph.num_forward,
        "bytes": [(one.bytes, one.kind, one.maker) for one in graph.storages],
        "peak_bytes": simulate(graph).peak_bytes,
        "path": [one for one in graph.notes if one.startswith(("path", "fake"))],
        "fake": any(one.startswith("traced under fake") for one in graph.notes),
    }
    found: dict[str, Any] = json.loads(json.dumps(facts))
    return found


def of_file(file: str, device: str, name: str) -> dict[str, Any]:
    """Facts of a model of one of the two files."""
    spec = WorkloadSpec(f"{HERE / file}:{name}")
    how = {"device": device, "gpu": CARD, "replay": False}
    return facts_of(profile_workload(spec, training=Training("sgd"), **how))
