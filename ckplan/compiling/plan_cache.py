"""What planning a compiled step has found, kept on disk: the next start is quick.

There is one file for each graph of Dynamo, machine, setting of Inductor and version of
torch and ckplan, beside the measured costs. It counts for no other joint graph, and is
made anew if it is old or cannot be read. Where torch hands out the code that it
compiles, that is replayed and compared.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckplan import files
from ckplan.compiling import nodes
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.partition import JointGraph, Saved
from ckplan.compiling.proposing import Candidate
from ckplan.compiling.replay import Replayed
from ckplan.compiling.torch_names import functorch_config, inductor_config
from ckplan.compiling.workspaces import bytes_of_all
from ckplan.errors import CkplanError
from ckplan.graph.records import SavingRegion
from ckplan.plan.region import Region
from ckplan.tracing.costs.cost_cache import LONGEST_SECONDS, cache_folder, machine_of
from ckplan.training.workload import device_of, tensors_of

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Known:
    """What planning has found of one joint graph."""

    joint: str  # digest of it
    fuses_more: bool | None  # which of two graphs simulates it; None: not known yet
    candidates: tuple[Candidate, ...] | None  # None: not proposed yet
    replayed: Mapping[Saved, Replayed]
    real: frozenset[Saved]  # of these, replayed from the very code that runs

    @property
    def real_ones(self) -> dict[Saved, Replayed]:
        """The replays of code that runs."""
        return {saved: self.replayed[saved] for saved in self.real}


def path_of(graph: DynamoGraph) -> Path | None:
    """The file of a graph; None if there is no folder for it."""
    folder = cache_folder()
    if folder is None:
        return None
    device = device_of(graph.inputs)
    settings = (
        graph.key,
        bytes_of_all(tensors_of(graph.inputs), device.type),
        files.source_digest(),
        sorted(machine_of(device).items()),
        sorted((name, repr(value)) for name, value in graph.options.items()),
        inductor_config.get_hash(),
        functorch_config.get_hash(),
    )
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:32]
    return folder / "compiled" / f"{digest}.json"


def digest_of(joint: JointGraph) -> str:
    """Equal for joint graphs that have the same plans, by the same names."""
    graphs = (joint.module.graph, joint.forward.graph, joint.backward.graph)
    modules = [nodes.modules_around(node) for node in nodes.ops_of(graphs[0])]
    text = f"{joint.digest} {joint.num_outputs} {modules} {[*map(str, graphs)]}"
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path, joint: JointGraph) -> Known | None:
    """What is known of a joint graph; None if nothing is, or it is too old."""
    with suppress(OSError, ValueError, TypeError, KeyError, IndexError):
        content = json.loads(path.read_bytes())
        is_young = time.time() - content["made"] < LONGEST_SECONDS
        if is_young and content["ckplan_compiled"] == FORMAT_VERSION:
            known = _known(content)
            return known if known.joint == digest_of(joint) else None
    return None


def write(path: Path, known: Known) -> None:
    """Keep what is known; if that cannot be written, it is found anew."""
    kept = [*known.replayed]
    kept += [one.saved for one in known.candidates or () if one.saved not in kept]
    names = sorted({name for saved in kept for name in saved or ()})
    number = {name: place for place, name in enumerate(names)}
    content = {
        "ckplan_compiled": FORMAT_VERSION,
        "made": time.time(),
        "joint": known.joint,
        "fuses_more": known.fuses_more,
        "names": names,
        "saved": [_places(saved, number) for saved in kept],
        "replayed": [asdict(one) for one in known.replayed.values()],
        "real": [kept.index(saved) for saved in known.real],
        "candidates": known.candidates
        and [_row(one, kept.index(one.saved)) for one in known.candidates],
    }
    with suppress(CkplanError):
        if not path.exists():
            _remove_old(path.parent)
        files.write_text(path, json.dumps(content, separators=(",", ":")), force=True)


def _places(saved: Saved, number: Mapping[str, int]) -> list[int] | None:
    return None if saved is None else sorted(number[name] for name in saved)


def _row(one: Candidate, saved: int) -> list[Any]:
    regions = [region.saving for region in one.regions]
    return [regions, one.simulated_peak_bytes, one.overhead, saved, one.saved_bytes]


def _known(content: Mapping[str, Any]) -> Known:
    names = content["names"]
    kept: list[Saved] = [
        None if row is None else frozenset(names[place] for place in row)
        for row in content["saved"]
    ]
    rows = content["candidates"]
    replayed = [Replayed(**row) for row in content["replayed"]]
    return Known(
        content["joint"],
        content["fuses_more"],
        None if rows is None else tuple(_candidate(row, kept) for row in rows),
        dict(zip(kept, replayed, strict=False)),
        frozenset(kept[place] for place in content["real"]),
    )


def _candidate(row: list[Any], kept: list[Saved]) -> Candidate:
    regions, simulated_peak_bytes, overhead, saved, saved_bytes = row
    found = tuple(
        Region.of(SavingRegion(call, last, tuple((op, out) for op, out in save)))
        for call, last, save in regions
    )
    return Candidate(found, simulated_peak_bytes, overhead, kept[saved], saved_bytes)


def _remove_old(folder: Path) -> None:
    """Remove files that are not read any more."""
    oldest = time.time() - LONGEST_SECONDS
    for path in folder.glob("*.json"):
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
