"""Proves that a trace takes the path that training takes, however a model is given.

Every workload of configs/workloads, the zoo's included, and many tiny models of other
families are profiled in four forms: with libraries imported before the factory runs;
imported inside the factory, while tensors are fake, in a process that has imported none
before; as a real model given to ``ckplan.profile``; and inside the factory for CUDA,
without a GPU. The first three must hold the same ops and bytes. In every form the trace
is compared with a forward on plain tensors of torch: by op on the CPU, by function of
torch for CUDA, where other kernels run.

    python scripts/paths.py
    python scripts/paths.py --only tiny_llama_grouped

Layers, batches and lengths of the workloads are cut, which changes no path. Rows are
kept beside the table, in a file of JSON lines; a run that was cut goes on from there.
``--fresh`` begins anew. Exit code 1 if a form differs or takes another path.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.pool import Pool
from typing import Any

from _measuring import (
    Report,
    finish,
    location_of,
    make_parser,
    make_table,
    results_path,
    run,
    say,
    workloads,
    zoo,
)
from _path_models import MODELS
from forms import CARD, facts_of

from ckplan.errors import CkplanError
from ckplan.tracing.path_check import NOTE_SAME
from ckplan.tracing.profile import profile, profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.randomness import seed_everything
from ckplan.training.workload import as_workload
from ckplan.units import format_bytes

FORMS = ("top", "inside", "given", "cuda")
CUTS = {"layers": 2, "batch": 2, "length": 32}
HEADERS = ("model", "compared with", "forward ops", "peak", "CPU forms", "CUDA")


@dataclass(frozen=True)
class Row:
    """One model in four forms."""

    model: str
    forward_ops: int
    peak_bytes: int
    same: bool  # ops and bytes of the three forms on the CPU
    paths: dict[str, str]  # form -> what the forward on plain tensors says

    def cells(self) -> list[str]:
        """A row of the table."""
        plain = self.paths["inside"].removeprefix(NOTE_SAME).rpartition(":")[0]
        return [
            self.model,
            plain.strip() or self.paths["inside"],
            f"{self.forward_ops:,}",
            format_bytes(self.peak_bytes),
            "same" if self.same else "DIFFER",
            "same path" if self.paths["cuda"].startswith(NOTE_SAME) else "see below",
        ]

    def broken(self) -> Iterator[str]:
        """Where the claim does not hold."""
        if not self.same:
            yield f"{self.model}: the forms on the CPU differ"
        for form, said in self.paths.items():
            if not said.startswith(NOTE_SAME):
                yield f"{self.model}, {form}: {said}"


def main() -> int:
    """Profile every model in four forms; print the table, write it."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", default=[])
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    names = [*MODELS, *workloads(), *zoo()]
    kept = results_path("paths", ".jsonl")
    if args.fresh:
        kept.unlink(missing_ok=True)
    rows = {}
    if kept.exists():
        found = map(json.loads, kept.read_text().splitlines())
        rows = {one["model"]: Row(**one) for one in found}
    refused: list[str] = []
    with _process() as loaded:  # where libraries are imported
        for name in names:
            if name not in rows and (name in args.only or not args.only):
                say(name)
                try:
                    rows[name] = row_of(name, loaded)
                except CkplanError as error:
                    refused.append(f"{name}: refused: {error.what}")
                    continue
                with kept.open("a") as file:
                    file.write(json.dumps(asdict(rows[name])) + "\n")
    chosen = [rows[name] for name in names if name in (args.only or rows)]
    report = Report(
        "paths",
        "The path that training takes",
        (__doc__ or "").partition("\n    python")[0],
        [
            f"{len(chosen)} of {len(names)} models:",
            make_table(HEADERS, [row.cells() for row in chosen], texts=2),
        ],
        [*refused, *(what for row in chosen for what in row.broken())],
    )
    return finish(report, args, whole=len(chosen) == len(names))


def row_of(name: str, loaded: Pool) -> Row:
    """Profile one model in four forms."""
    facts = {form: _seen(name, form, loaded) for form in FORMS}
    here = [facts[form] for form in FORMS[:3]]
    return Row(
        name,
        here[0]["num_forward"],
        here[0]["peak_bytes"],
        all(one == here[0] for one in here),
        {form: "; ".join(one["path"]) for form, one in facts.items()},
    )


def _process() -> Pool:
    return multiprocessing.get_context("fork").Pool(1)


def _seen(name: str, form: str, loaded: Pool) -> dict[str, Any]:
    if form in ("top", "given"):
        return loaded.apply(_facts, (name, form))
    with _process() as fresh:
        return fresh.apply(_facts, (name, form))


class _Spec(WorkloadSpec):
    """A model of this program; ``late`` imports its file inside the factory."""

    late = True

    def load(self) -> Callable[[], Any]:
        """Return the factory."""
        if self.target in MODELS:
            return lambda: as_workload(MODELS[self.target](), self.target)
        if self.late:
            return lambda: self._cut().build()
        return self._cut().load()

    def _cut(self) -> WorkloadSpec:
        whole = WorkloadSpec(location_of(self.target))
        made = whole.load()
        factory = next(
            cell.cell_contents
            for cell in made.__closure__ or ()
            if inspect.isfunction(cell.cell_contents)
        )
        there = inspect.signature(factory).parameters
        cuts = {name: size for name, size in CUTS.items() if name in there}
        return WorkloadSpec(whole.target, cuts)


class _Early(_Spec):
    late = False


def _facts(name: str, form: str) -> dict[str, Any]:
    if form in ("top", "given"):
        import transformers.masking_utils  # noqa: F401 - as a file that imports it
    if form == "given":
        seed_everything(0)
        made = _Early(name).load()()
        return facts_of(
            profile(
                made.model,
                made.batch,
                loss=made.loss,
                gpu=CARD,
                device="cpu",
                replay=False,
            )
        )
    spec = _Early(name) if form == "top" else _Spec(name)
    device = "cuda" if form == "cuda" else "cpu"
    return facts_of(profile_workload(spec, device=device, gpu=CARD, replay=False))


if __name__ == "__main__":
    run(main)
