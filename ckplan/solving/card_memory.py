"""The memory of a card, for a step that was profiled for that card."""

from __future__ import annotations

import shlex

from ckplan import gpus
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.plan.workload import as_arguments, plan_workload
from ckplan.simulating.allocations import is_on_card


def card_bytes(graph: Graph, gpu: str | None, gpu_memory: str | int | None) -> int:
    """Bytes available to the allocator of a card, by its name or its size.

    Args:
        graph: The recorded step, of that card.
        gpu: A card of ``ckplan gpus``.
        gpu_memory: Without a name, the memory of a card that is not listed.

    Raises:
        CkplanError: The card is not known, or the step is of another card or the CPU.
    """
    if gpu is None:
        assert gpu_memory is not None, "internal error: neither a card nor a size"
        check_profiled_for(graph, None)
        return gpus.usable_bytes_of(gpu_memory)
    card = gpus.find(gpu)
    check_profiled_for(graph, card)
    return card.usable_bytes


def check_profiled_for(graph: Graph, card: gpus.Gpu | None) -> None:
    """Raise if the bytes or seconds of a step are those of another card or the CPU.

    Args:
        graph: The recorded step.
        card: The card, or None for one of which only the size is known. For that one,
            and for one whose kernels are not known, any step on a GPU will do.

    Raises:
        CkplanError: With the command that profiles for that card.
    """
    made_for = graph.options.get("gpu")
    if made_for is None and is_on_card(graph):
        return  # seconds of the GPU that profiled, whose name is not recorded
    if made_for is not None and (
        card is None or card.platform != "cuda" or made_for == card.name
    ):
        return
    wanted = "a GPU" if card is None else card.name
    whose = "the CPU" if made_for is None else made_for
    raise CkplanError(
        f"cannot plan for {wanted}: this trace has the bytes and seconds of {whose}",
        needed=f"a trace for {wanted}; no GPU is needed to make it",
        hint=profile_command(graph, card),
    )


def doubts(graph: Graph, card: gpus.Gpu | None) -> str:
    """What of a step is not of the card that it is planned for; "" if all is."""
    if str(graph.fingerprint.get("device")) == "cpu":
        return "bytes are those of a CPU, as the trace was made with --device cpu"
    if card is not None and card.platform != "cuda":
        made_for = graph.options.get("gpu", "another GPU")
        return (
            f"bytes and seconds are those of {made_for}: the kernels of "
            f"{card.platform} are not known"
        )
    return ""


def profile_command(graph: Graph, card: gpus.Gpu | None) -> str:
    """The command that profiles the same workload for a card."""
    known = plan_workload(graph.options)
    known.pop("gpu", None)
    workload = as_arguments(known) if "target" in known else "model.py"
    is_cuda = card is not None and card.platform == "cuda"
    name = card.name if card is not None and is_cuda else gpus.DEFAULT
    how = " --compile" if "compiled" in graph.fingerprint else ""
    return f"ckplan profile {workload}{how} --gpu {shlex.quote(name)}"
