"""Two gloo processes that train: what they print, what each one's allocator holds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ckplan.verifying.fork_server import fork_to

ROOT = Path(__file__).parents[2]

RANK = """
import os, sys
import torch
import torch.distributed as dist
sys.path[:0] = {paths!r}
rank = int(sys.argv[1])
torch.set_num_threads(1)
meet = "file://{meet}"
dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
{source}
dist.destroy_process_group()
sys.stdout.flush()
# Gloo's threads may still let go of tensors, and abort where Python is gone before.
os._exit(0)
"""

BEGIN = """
import os, runpy, sys
sys.argv[1:] = ["{0}", *{1!r}]
os.dup2(os.open("{3}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
runpy.run_path("{2}", run_name="__main__")
"""

TRAIN = """
import hashlib, json
from itertools import accumulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import record_function
import ckplan
from ckplan.training.allocator import log_allocations
from ckplan.training.losses import call_model, loss_of
from ckplan.training.workload import tensors_of
from dataclasses import replace

scheme, accumulate_steps = sys.argv[2], int(sys.argv[3])
mesh = init_device_mesh("cpu", (2,))

def wrapped(model):
    if scheme == "ddp":
        return nn.parallel.DistributedDataParallel(model, init_sync=False)
    for unit in units(model):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def digest_of(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()

def measured(plan):
    with log_allocations("step") as log:
        torch.manual_seed(0)
        workload = make()
        if plan:
            ckplan.apply(workload.model, plan)
        whole = wrapped(workload.model)
        workload = replace(workload, model=whole)
        optimizer = torch.optim.AdamW(whole.parameters(), 1e-3)
        torch.manual_seed(1 + rank)
        for step in range(6):
            optimizer.zero_grad()
            for _ in range(accumulate_steps - 1):
                loss, _ = loss_of(workload, call_model(workload))
                (loss / accumulate_steps).backward()
                del loss
            with record_function(f"step{step}"):
                output = call_model(workload)
                loss = loss_of(workload, output)[0] / accumulate_steps
                loss.backward()
                del output, loss
                optimizer.step()
    times = [when for when, _ in log.events]
    levels = list(accumulate(size for _, size in log.events))
    starts, tops = [], []
    for name, (start, stop) in sorted(log.spans.items())[1:]:
        first = sum(when < start for when in times)
        inside = levels[first : sum(when <= stop for when in times)]
        starts.append(levels[first - 1])
        tops.append(max(inside) - levels[first - 1])
    held = [*whole.parameters(), *whole.buffers(), *tensors_of(workload.batch)]
    held += [v for state in optimizer.state.values() for v in state.values()]
    held += [p.grad for p in whole.parameters()] * (accumulate_steps > 1)
    local = [getattr(t, "_local_tensor", t) for t in held]
    storages = [t.untyped_storage() for t in local]
    held = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    parameters = [getattr(p, "_local_tensor", p) for p in whole.parameters()]
    # Gloo lets go of tensors on threads of its own, where the profiler does not always
    # see it: levels only ever seem too high. DDP copies nothing there.
    peak = (min(starts) if scheme == "ddp" else held) + min(tops)
    return peak, digest_of(parameters)

print(json.dumps([measured(plan) for plan in sys.argv[4:] + [None]]))
"""


class Trained(NamedTuple):
    """What one rank did under one plan."""

    peak_bytes: int
    digest: str  # of its parameters after the steps


def run_two(folder: Path, source: str, *options: str) -> list[str]:
    """Run Python in two processes of one group.

    Args:
        folder: For files, which are left there.
        source: Finds ``rank``, ``sys``, ``os``, ``torch``, ``dist``, and ``options``
            from ``sys.argv[2]`` on.
        options: Strings.

    Returns:
        What each rank printed.
    """
    script, meet = folder / "rank.py", folder / "meet"
    places = {"paths": [*sys.path, str(ROOT)], "meet": meet}
    script.write_text(RANK.format(source=source, **places))
    meet.unlink(missing_ok=True)
    errors = [folder / f"errors{rank}" for rank in range(2)]
    processes = [
        fork_to(BEGIN.format(rank, options, script, file), os.environ)
        for rank, file in enumerate(errors)
    ]
    try:
        said = [process.stdout.read().decode() for process in processes]
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
    for code, file in zip(codes, errors, strict=True):
        assert code == 0, file.read_text()[-3000:]
    return said


def train_two(
    folder: Path,
    source: str,
    scheme: str,
    plans: Sequence[Path],
    *,
    accumulate: int = 1,
) -> list[list[Trained]]:
    """Train with each plan, then without.

    Args:
        folder: For files, which are left there.
        source: Python that defines ``make() -> Workload``, and ``units(model)``, the
            modules that are gathered as one.
        scheme: ``ddp`` or ``fsdp2``.
        plans: Files.
        accumulate: Backwards before the optimizer takes a step.

    Returns:
        By rank.
    """
    said = run_two(folder, source + TRAIN, scheme, str(accumulate), *map(str, plans))
    found = (json.loads(out.splitlines()[-1]) for out in said)
    return [[Trained(*one) for one in rank] for rank in found]
