"""Settings and levers: what ``tune`` may change about a step, as records.

A *setting* is a way to train: rows of the micro-batch, how many of them a step of the
optimizer accumulates, precision, optimizer, and a plan. A *lever* changes a setting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.graph.grouped_updates import group_size
from ckplan.graph.sharding import SCHEMES, Communication
from ckplan.plan.region import Region
from ckplan.simulating.extra_work import NO_EXTRA_WORK, ExtraWork
from ckplan.solving.levers import LEVERS as PLAN_LEVERS
from ckplan.solving.levers import allowed_levers, no_such_lever, split_levers

SAME, CLOSE, CHANGES = "same", "close", "changes"
"""Results of training: bit for bit, up to rounding, or other ones."""
KERNELS = ("fused", "foreach", "single")
_WITH_KERNELS = ("adamw", "adam", "sgd", "momentum")


@dataclass(frozen=True, slots=True)
class Way:
    """How a step trains, whatever its batch and its plan."""

    amp: str | None = None  # autocast type
    optimizer: str | None = None  # name and kernel; None: as the step has it
    scaler: bool = False  # of gradients
    options: tuple[tuple[str, str], ...] = ()  # more options of the workload
    shard: str | None = None  # scheme of ``graph.sharding``
    ranks: int = 1  # each with batches of its own
    tiles: str | None = None  # bits of a head in tiles: SAME or CLOSE
    offload: str | None = None  # where plans may move values
    compiled: bool = False  # forward, loss and backward, by torch.compile

    @property
    def title(self) -> str:
        """In words, such as ``bf16, adamw:fused``."""
        parts = [self.amp, self.optimizer, *(f"{k} {v}" for k, v in self.options)]
        parts.append(self.shard and f"{self.shard} over {self.ranks}")
        parts.append(self.tiles and f"tiles ({self.tiles} bits)")
        parts.append(self.offload and f"offload to {self.offload}")
        parts.append("compiled" if self.compiled else None)
        return ", ".join(filter(None, parts)) or "as given"


AS_TRACED = Way(optimizer="as traced")
"""That of a trace, which holds no other one."""


def with_scaler(way: Way) -> Way:
    """The way, with a scaler of gradients if it trains under autocast to fp16."""
    return replace(way, scaler=True) if way.amp == "fp16" else way


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to train that fits in memory, and what it costs."""

    way: Way
    batch: int  # rows of a micro-batch
    accumulate: int  # micro-batches per step of the optimizer
    regions: tuple[Region, ...]  # of its plan; none: unplanned
    peak_bytes: int  # of all tensors
    step_seconds: float  # of a step of the optimizer: all micro-batches, and of
    # communication what nothing hides, if its rate is known
    overhead: float  # of the plan, as a fraction of the step without it
    profiled: bool  # the graph was recorded at this batch, not drawn
    extra: ExtraWork = NO_EXTRA_WORK  # of its plan, per sample
    communication: Communication | None = None  # of several ranks, if its rate is known

    @property
    def samples(self) -> int:
        """Rows of a step of the optimizer, of all ranks."""
        return self.batch * self.accumulate * self.way.ranks

    @property
    def samples_per_second(self) -> float:
        """Rows trained on per second."""
        return self.samples / self.step_seconds

    @property
    def seconds_per_sample(self) -> float:
        """Its inverse."""
        return self.step_seconds / self.samples


def better(one: Setting | None, other: Setting | None) -> Setting | None:
    """The faster of two settings, of equal ones the first."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda setting: setting.samples_per_second)


@dataclass(frozen=True, slots=True)
class Lever:
    """One change of a way to train.

    ``sets`` are fields of ``Way``; two levers that set the same field exclude each
    other. ``excludes`` names further ones, with the reason.
    """

    name: str
    bits: str  # SAME, CLOSE or CHANGES
    sets: tuple[tuple[str, Any], ...]
    excludes: tuple[tuple[str, str], ...] = ()  # lever -> why not with it
    caution: str = ""  # what to know before training with it

    def pulled(self, way: Way) -> Way:
        """The way with this lever."""
        if dict(self.sets).get("options"):
            options = (*way.options, *dict(self.sets)["options"])
            return replace(way, options=tuple(dict(options).items()))
        return replace(way, **dict(self.sets))

    def left_out(self, way: Way, given: Way) -> Way:
        """The way without this lever: its fields are those that were given.

        Of the options of a workload, its own alone.
        """
        changes = {key: getattr(given, key) for key, _ in self.sets}
        if "options" in changes:
            own = dict(dict(self.sets)["options"])
            kept = [one for one in way.options if one[0] not in own]
            kept += [one for one in given.options if one[0] in own]
            changes["options"] = tuple(kept)
        return replace(way, **changes)

    @property
    def kernel(self) -> str | None:
        """The optimizer kernel that it sets, one of ``KERNELS``; None of others."""
        kernel = self.name.partition(":")[2]
        return kernel if kernel in KERNELS else None

    def is_in(self, way: Way) -> bool:
        """Whether a way already has this lever."""
        return self.pulled(way) == way


_IN_16_BITS = "the parameters are in 16 bits already: autocast has nothing to cast"
_ONE_SEARCH = "plans with both are `ckplan solve`'s: their search takes minutes"
_ONLY_SAVED = "plans for compiled code choose what is saved, and nothing else"
_ONE_RANK = "compiled steps are profiled for one rank"
_NOT_COMPILED = (
    *((name, _ONLY_SAVED) for name in ("tiles", "close", "offload")),
    *((name, _ONE_RANK) for name in SCHEMES),
)
ALLOWED = {
    lever.name: lever
    for lever in (
        Lever("bf16", CHANGES, (("amp", "bf16"), ("scaler", False))),
        Lever("fp16", CHANGES, (("amp", "fp16"), ("scaler", True))),
        Lever(
            "pure-bf16",
            CHANGES,
            (("options", (("dtype", "bf16"),)),),
            (("bf16", _IN_16_BITS), ("fp16", _IN_16_BITS)),
        ),
        Lever("adafactor", CHANGES, (("optimizer", "adafactor"),)),
        Lever(
            "adamw8bit",
            CHANGES,
            (("optimizer", "adamw8bit"),),
            caution="adamw8bit is predicted only and does not train: `ckplan verify` "
            "refuses it, and checks its memory with --fake; bitsandbytes trains",
        ),
        Lever("lora", CHANGES, (("options", (("lora", "r=16"),)),)),
        Lever("tiles", SAME, (("tiles", SAME),)),
        Lever("close", CLOSE, (("tiles", CLOSE),)),
        Lever(
            "offload",
            SAME,
            (("offload", "host"),),
            (("tiles", _ONE_SEARCH), ("close", _ONE_SEARCH)),
        ),
        Lever("compile", CLOSE, (("compiled", True),), _NOT_COMPILED),
    )
}
"""Levers that need a word: they change the numbers of training, or need memory of the
host; only with ``--allow``. Schemes of ``graph.sharding`` are further ones."""
NAMES = (*ALLOWED, *SCHEMES)


def levers_of(
    way: Way, allow: str | Iterable[str], ranks: int = 1
) -> tuple[Lever, ...]:
    """The levers that may change a way: kernels of its optimizer, and allowed ones.

    Args:
        way: How the step trains.
        allow: Names of further levers; several are a list, or joined by commas.
        ranks: How many processes there are to shard over.

    Raises:
        CkplanError: A name is not one of ``NAMES``, or ranks and schemes to shard do
            not go together.
    """
    names = split_levers(allow)
    for name in names:
        if name not in NAMES:
            raise no_such_lever(name, NAMES)
    allowed_levers(name for name in names if name in PLAN_LEVERS)
    schemes = [name for name in names if name in SCHEMES]
    if bool(schemes) != (ranks > 1):
        found = f"{ranks} ranks without a scheme to shard over them"
        if schemes:
            found = f"{schemes[0]!r} on one rank"
        raise CkplanError(
            f"cannot tune {found}",
            needed="two ranks or more, and how they may share the state of training: "
            + ", ".join(SCHEMES),
            hint="--world-size 8 --allow fsdp2",
        )
    shards = [Lever(s, CLOSE, (("shard", s), ("ranks", ranks))) for s in schemes]
    return (*_kernels(way), *(ALLOWED[n] for n in names if n in ALLOWED), *shards)


def _kernels(way: Way) -> list[Lever]:
    name, colon, _ = (way.optimizer or "adamw").partition(":")
    if colon or name not in _WITH_KERNELS:
        return []
    return [
        Lever(f"{name}:{kernel}", CLOSE, (("optimizer", f"{name}:{kernel}"),))
        for kernel in KERNELS
    ]


def kernel_of(graph: Graph) -> str | None:
    """The kernels of a step's optimizer, one of ``KERNELS``; None of an own one."""
    if graph.options.get("optimizer") == "own":
        return None
    names = {op.name for op in graph.ops[graph.backward_stop :]}
    if any(name.startswith("_fused_") for name in names):
        return "fused"
    return "foreach" if names & {"_foreach_addcdiv_", "_foreach_add_"} else "single"


def grouped_update(way: Way, graph: Graph) -> Lever | None:
    """The update of a step in groups of parameters; None if it frees nothing.

    Args:
        way: How the step trains.
        graph: The step.
    """
    size = group_size(graph) if kernel_of(graph) == "foreach" else None
    if size is None or way == AS_TRACED:
        return None
    name, _, _ = (way.optimizer or "adamw").partition(":")
    grouped = f"{name}:foreach={size}"
    return Lever(grouped, SAME, (("optimizer", grouped),))


def conflict(levers: Iterable[Lever], lever: Lever) -> str | None:
    """Why a lever cannot join others; None if it can."""
    for other in levers:
        for one, two in ((lever, other), (other, lever)):
            reason = dict(one.excludes).get(two.name)
            if reason is not None:
                return reason
        both = {key for key, _ in lever.sets} & {key for key, _ in other.sets}
        if both - {"options"} and other.name != lever.name:
            return f"{lever.name} and {other.name} set the same: {', '.join(both)}"
    return None
