"""Options of commands that may plan with more than recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ckplan.cli.terminal import print_message

if TYPE_CHECKING:
    from ckplan.graph.graph import Graph
    from ckplan.simulating.moving import Link


@dataclass(frozen=True)
class LeverOptions:
    """What a plan may do besides recomputation."""

    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LEVERS",
            help="tiles: head and loss, MLPs, attentions, norms may run so; close: "
            "also where that rounds gradients in another place; groups: the optimizer "
            "may update groups of parameters. Several are joined by commas.",
        ),
    ] = None
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Activations may move to a file there, or to the host of a GPU: host.",
        ),
    ] = None
    spill_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes per second of that disk  [default: measured] or link.",
        ),
    ] = None

    @property
    def allowed(self) -> list[str]:
        """Levers by name.

        Raises:
            CkplanError: They do not go together.
        """
        from ckplan.solving.levers import allowed_levers

        return allowed_levers(self.allow or ())

    def link(self, graph: Graph, gpu: str | None) -> Link | None:
        """The way to a disk or the host; None without offload.

        Raises:
            CkplanError: The step cannot move there, or the rate is none.
        """
        from ckplan.simulating.moving import Link, is_on_gpu
        from ckplan.solving.offloading import behind_host, host_rate
        from ckplan.solving.solve import parse_rate

        rate = self.spill_rate
        if self.offload is None or self.offload == "none":
            if rate is not None:
                raise typer.BadParameter("--spill-rate needs --offload FOLDER or host")
            return None
        known = None if rate is None else parse_rate(rate)
        if self.offload == "host":
            return Link.of(graph, host_rate(graph, self.offload, gpu, known))
        found = _measured(self.offload) if known is None else Link(known)
        return behind_host(graph, found, gpu) if is_on_gpu(graph) else found


def _measured(folder: str) -> Link:
    """The way to a disk, measured and told."""
    from ckplan.report.moving import link_words
    from ckplan.tracing.costs.spill_rate import spill_link

    found = spill_link(folder)
    print_message(f"the disk of {folder} moves {link_words(found)}")
    return found
