"""Compiled steps of cards with the update of an optimizer, which is not compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ckplan.compiling.elsewhere import NOTE_NO_OPTIMIZER
from ckplan.compiling.step import profile_compiled
from ckplan.errors import WorkloadError
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, GeneratedCode
from ckplan.graph.updates import with_update_of
from ckplan.simulating.simulate import Simulator
from ckplan.training.loading import WorkloadSpec


class CompiledSteps:
    """Steps whose forward, loss and backward are compiled, traced once each."""

    def __init__(self, how: Mapping[str, Any]) -> None:
        """Nothing is traced yet.

        Args:
            how: Keyword arguments of ``profile_workload``.
        """
        self._how = {key: how[key] for key in ("gpu", "host", "seed") if key in how}
        self._known: dict[tuple[str, str | None], Graph] = {}

    def with_update(self, spec: WorkloadSpec, step: Graph, amp: str | None) -> Graph:
        """The compiled step of a workload; its update is that of the uncompiled one.

        Args:
            spec: The workload.
            step: Its uncompiled step.
            amp: The type of autocast, as ``Training.amp``.

        Raises:
            WorkloadError: It is for the CPU, accumulates, or cannot be traced compiled.
        """
        of_card = self._how.get("gpu") is not None
        if not of_card or step.num_batches > 1:
            raise WorkloadError(
                "cannot tune a compiled step "
                + ("that accumulates" if of_card else "without a card"),
                needed="a step of one micro-batch, for a card: the peak of code for "
                "the CPU is known where it is generated",
                hint="ckplan.compile(model, '80%'), or ckplan compare model.py "
                "--compile",
            )
        found = with_update_of(self._traced(spec, amp), step)
        if found is None:
            raise WorkloadError(
                "cannot tune the compiled step: its parameters and gradients are not "
                "those of the uncompiled one",
                needed="an optimizer that updates what the compiled step trains",
                hint="leave out --allow compile",
            )
        # Plans of compiled code divide the joint graph, which takes a second for each.
        line = Simulator(found).run()
        bare = GeneratedCode((), line.peak_bytes, line.peak_bytes, line.peak_at, 0.0)
        return replace(found, generated=(bare,))

    def _traced(self, spec: WorkloadSpec, amp: str | None) -> Graph:
        key = str(spec), amp
        if key not in self._known:
            torch.compiler.reset()  # it compiles a function for few shapes
            graph = profile_compiled(spec, amp=amp, plans=False, **self._how)
            notes = (note for note in graph.notes if note != NOTE_NO_OPTIMIZER)
            # What backward begins with is no gradient of a parameter.
            storages = (
                replace(one, kind="temporary")
                if one.kind == "gradient" and one.maker == BEFORE_STEP
                else one
                for one in graph.storages
            )
            self._known[key] = replace(
                graph, storages=tuple(storages), notes=tuple(notes)
            )
        return self._known[key]
