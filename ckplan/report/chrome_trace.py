"""Live bytes as counters and ops as slices, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from ckplan import files
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.report.samples import sample_moments
from ckplan.simulating.simulate import Timeline

_MICROSECONDS = 1e6


def save_chrome_trace(
    path: Path, timelines: Mapping[str, Timeline], *, force: bool
) -> None:
    """Write one process for every timeline, in the JSON trace event format.

    Recomputation has no slices of its own: its bytes appear before the op of backward
    that needs them.
    """
    events = [
        event
        for process, (name, timeline) in enumerate(timelines.items(), 1)
        for event in _events(process, name, timeline)
    ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    files.write_text(path, text, force=force)


def _events(process: int, name: str, timeline: Timeline) -> Iterable[dict[str, Any]]:
    graph = timeline.graph
    begins = [0.0, *accumulate(graph.critical_seconds)]
    common = {"pid": process, "tid": 1}
    yield {**common, "name": "process_name", "ph": "M", "args": {"name": name}}
    for number, op in enumerate(graph.ops):
        call = "" if op.call == OUTSIDE_CALLS else graph.calls[op.call].fqn
        yield {
            **common,
            "name": op.name,
            "cat": graph.phase(number),
            "ph": "X",
            "ts": begins[number] * _MICROSECONDS,
            "dur": graph.critical_seconds[number] * _MICROSECONDS,
            "args": {"module": call},
        }
    for moment in sample_moments(timeline):
        yield {
            **common,
            "name": "live bytes",
            "ph": "C",
            "ts": begins[moment // 2] * _MICROSECONDS,
            "args": timeline.bytes_by_kind(moment),
        }
