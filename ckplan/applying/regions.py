"""Attach regions to the calls of a model, and remove them.

A region is a pair of hooks on its module: names, types, ``state_dict`` and ``forward``
stay unchanged, and a copy of the model has its own regions. Only ``by: rerun`` replaces
``forward``, by an instance attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ckplan.applying.hooks.attached import attached_by, attached_to
from ckplan.applying.hooks.choices import Choice, RegionStatus
from ckplan.applying.hooks.forwards import GuardedForward, RerunForward
from ckplan.applying.hooks.hooks import Chooser, ParentHooks, PathHooks, RegionHooks
from ckplan.applying.hooks.matching import choices_of
from ckplan.applying.hooks.plan_warnings import warn_of_differences
from ckplan.applying.hooks.session import Session, StepHooks, running
from ckplan.applying.moving.mover import Mover
from ckplan.applying.moving.stores import HOST
from ckplan.applying.tiling.heads import TiledHead, check_head
from ckplan.applying.tiling.row_calls import TiledRows, check_row_wise
from ckplan.errors import ApplyError, PlanError
from ckplan.graph.fqn import is_around
from ckplan.plan.file import load
from ckplan.plan.plan import Plan
from ckplan.plan.region import PROGRAM, RERUN, TILES
from ckplan.plan.tiles import RowTiles, Tiles
from ckplan.training.warm_up import warm_up_vector_kernels
from ckplan.training.workload import check_not_lazy


@dataclass(frozen=True, slots=True, repr=False)
class Status:
    """The plan on a model, and counters of its regions."""

    plan: Plan
    regions: tuple[RegionStatus, ...]
    spilled_bytes: int = 0  # of the file that tensors move to
    host_bytes: int = 0  # of pinned host memory that a GPU's tensors move to

    def __repr__(self) -> str:
        """One line per region."""
        return "\n".join(
            f"{r.call}: {r.by}, ran {r.runs} times, recorded {r.recorded}, kept "
            f"{r.kept}, dropped {r.dropped_bytes} B"
            for r in self.regions
        )


def apply(
    model: nn.Module, plan: Plan | str | Path, *, spill: str | Path | None = None
) -> nn.Module:
    """Rewrite a model in place so that its regions drop and rebuild activations.

    Names, types, ``state_dict`` and results stay as they are. Applying replaces what an
    earlier plan attached. Regions act only with gradients enabled.

    Args:
        model: The model that the plan was made for.
        plan: A plan, or the path of a plan file.
        spill: Folder of the file that tensors move to, for plans with ``offload``;
            ``"host"``, the default of plans for CUDA: host memory of a GPU.

    Returns:
        The same model.

    Raises:
        PlanError: The plan names calls that the model does not have, or regions that
            overlap, or is for compiled code; the model is left as it was.
        ApplyError: It is no plan, the model has lazy parameters without a shape, or
            ``spill`` is missing or cannot be written.
    """
    plan = load(Path(plan)) if isinstance(plan, (str, Path)) else plan
    _check_kinds(model, plan)
    mover = mover_for(plan, spill, _device_of(model, plan))
    return apply_with(model, plan, mover)


def apply_with(model: nn.Module, plan: Plan, mover: Mover) -> nn.Module:
    """Apply a plan as ``apply`` does, with what moves its offloaded tensors."""
    _check_uncompiled(plan)
    check_not_lazy(model, "apply a plan to", ApplyError)
    modules = dict(model.named_modules())
    choices = choices_of(plan.regions, modules)
    for choice in choices:
        choice.mover = mover
    tiled = [choice for choice in choices if choice.region.by == TILES]
    for choice in tiled:
        is_head = isinstance(choice.region.tiles, Tiles)
        check = check_head if is_head else check_row_wise
        choice.region.check(check, choice.fqn, modules[choice.fqn])
        choice.region.check(_check_every_call, choice)
    warn_of_differences(plan, model)
    _take_off(model)
    wrappers = [_in_tiles(choice, modules[choice.fqn]) for choice in tiled]
    warm_up_vector_kernels()
    session = Session(plan, mover, choices=choices)
    reruns: dict[str, list[Choice]] = {}
    for one in wrappers:
        session.wrap_forward(one)
    for choice in choices:
        if choice.region.by == RERUN:
            reruns.setdefault(choice.fqn, []).append(choice)
    for fqn, found in reruns.items():
        chooser = Chooser(session, fqn, found)
        session.wrap_forward(RerunForward(modules[fqn], chooser))
    programs = [choice for choice in choices if choice.region.by == PROGRAM]
    _attach_programs(session, modules, programs)
    of_model = StepHooks(session)
    of_model.hook_begin(model)
    of_model.hook_end(model, last=True)
    return model


def _device_of(model: nn.Module, plan: Plan) -> str:
    """Where a model is, or will be."""
    devices = {p.device.type for p in model.parameters()} & {"cpu", "cuda"}
    planned = str(plan.fingerprint.get("device", "cpu")).partition(":")[0]
    return devices.pop() if len(devices) == 1 else planned


def mover_for(plan: Plan, spill: str | Path | None, device_type: str) -> Mover:
    """What moves the offloaded tensors of a plan to a folder, or to the host.

    Raises:
        ApplyError: The plan needs a folder and has none, the folder cannot be written,
            there is no GPU, or too little room for what the plan is predicted to move.
    """
    if not any(region.offload for region in plan.regions):
        return Mover(None)
    spill = spill or None
    made = plan.predicted
    fits_host = made is None or not made.host_bytes < made.moved_bytes
    on_gpu = str(plan.fingerprint.get("device")).startswith("cuda")
    if spill is None and on_gpu and fits_host:
        spill = HOST
    if spill is None:
        raise ApplyError(
            "cannot offload: the plan moves tensors to a file, and no folder is given",
            needed="a folder on a local disk that can be written",
            hint="--spill FOLDER, or ckplan.apply(model, plan, spill=FOLDER)",
        )
    place = HOST if str(spill) == HOST else Path(spill)
    return Mover(place, made.moved_bytes if made else 0, device_type)


def _check_every_call(choice: Choice) -> None:
    if choice.numbers is not None:
        raise PlanError(
            f"cannot tile single calls of {choice.fqn}: {choice.name}",
            needed="tiles for every call of a module",
            hint=f"calls: {choice.fqn}",
        )


def _in_tiles(choice: Choice, module: nn.Module) -> TiledHead | TiledRows:
    tiles = choice.region.tiles
    assert tiles is not None
    kind = TiledRows if isinstance(tiles, RowTiles) else TiledHead
    return kind(module, choice.fqn, tiles, choice)  # type: ignore[arg-type]


def _check_kinds(model: object, plan: object) -> None:
    if not (isinstance(model, nn.Module) and isinstance(plan, Plan)):
        raise ApplyError(
            f"cannot apply a {type(plan).__name__} to a {type(model).__name__}",
            needed="a plan, or the path of its file, and a module",
            hint="ckplan.apply(model, ckplan.solve(graph, budget='12GiB'))",
        )


def _check_uncompiled(plan: Plan) -> None:
    if "compiled" in plan.fingerprint:
        raise PlanError(
            f"cannot apply the plan of '{plan.model}': it is for compiled code",
            needed="a plan for uncompiled code, from ckplan.solve",
            hint="ckplan.compile(model, plan)",
        )


def remove(model: nn.Module) -> nn.Module:
    """Remove the plans of the model and of all modules in it.

    Raises:
        ApplyError: The argument is not a model.
    """
    for module in _modules_of(model):
        _take_off(module)
    return model


def _take_off(model: nn.Module) -> None:
    session = _session_of(model)
    if session is not None:
        running.abandon(session)
        running.numbers.pop(session, None)
        for one in [*attached_by(session, model)]:
            one.take_off()


def applied_plan(model: nn.Module) -> Plan | None:
    """The plan that was applied to a model itself; None if none was."""
    session = _session_of(model)
    return None if session is None else session.plan


def status(model: nn.Module) -> Status:
    """Counters of a model's regions, in the order of the plan.

    If only submodules have plans, the first of them is reported.

    Raises:
        ApplyError: It is no model, or neither it nor any module in it has a plan.
    """
    sessions = map(_session_of, _modules_of(model))
    session = next(filter(None, sessions), None)
    if session is None:
        raise ApplyError(
            f"{type(model).__name__} has no plan",
            needed="a model that ckplan.apply was called on",
            hint="ckplan.apply(model, 'plan.yaml')",
        )
    regions = tuple(choice.status() for choice in session.choices)
    mover = session.mover
    return Status(session.plan, regions, mover.file_bytes, mover.host_bytes)


@contextmanager
def planned(
    model: nn.Module, plan: Plan | str | Path, *, spill: str | Path | None = None
) -> Iterator[nn.Module]:
    """Apply a plan for a ``with`` block, then restore the previous plan.

    Args and errors are those of ``apply``.
    """
    before = _session_of(model)
    apply(model, plan, spill=spill)
    try:
        yield model
    finally:
        _take_off(model)
        if before is not None:
            apply_with(model, before.plan, before.mover)


def _modules_of(model: object) -> Iterator[nn.Module]:
    if not isinstance(model, nn.Module):
        raise ApplyError(
            f"cannot find the plan of a {type(model).__name__}",
            needed="the module that ckplan.apply was called on",
            hint="ckplan.status(model)",
        )
    return model.modules()


def _session_of(model: nn.Module) -> Session | None:
    found = (one for one in attached_to(model) if isinstance(one, StepHooks))
    return next((one.session for one in found), None)


def _attach_programs(
    session: Session, modules: Mapping[str, nn.Module], programs: Sequence[Choice]
) -> None:
    """Attach hooks to regions, to callers of runs, and to modules inside.

    Hooks are prepended: hooks attached later run earlier, at begin and at end.
    """
    regions = _region_hooks(session, modules, programs)
    makers: dict[str, ParentHooks] = {}
    for choice in (*programs, *(inner for c in programs for _, inner in c.within())):
        for fqn in choice.makers:
            maker = makers.setdefault(fqn, ParentHooks(fqn, session))
            maker.choices.append(choice)
    for fqn, hooks in regions.items():
        hooks.hook_end(modules[fqn])
    for fqn in _followed(programs, modules):
        path = PathHooks(fqn, session)
        path.hook_begin(modules[fqn])
        path.hook_end(modules[fqn])
    for fqn, hooks in regions.items():
        hooks.hook_begin(modules[fqn])
    for fqn, maker in makers.items():
        maker.hook_begin(modules[fqn])
        maker.hook_end(modules[fqn])
    for fqn in {*(c.fqn for c in programs if c.last is None), *makers}:
        session.wrap_forward(GuardedForward(modules[fqn], session.interrupted))


def _region_hooks(
    session: Session, modules: Mapping[str, nn.Module], programs: Sequence[Choice]
) -> dict[str, RegionHooks]:
    """The modules at whose calls regions, or nested regions, begin or end."""
    inner = [pair for choice in programs for pair in choice.within()]
    ends = [fqn for c in (*programs, *(one for _, one in inner)) for fqn in c.ends]
    hooks = {fqn: RegionHooks(fqn, session) for fqn in ends}
    for choice in programs:
        hooks[choice.fqn].choices.append(choice)
        hooks[choice.fqn].switches += (
            module
            for name, module in modules.items()
            if is_around(choice.reach, name)
            and hasattr(module, "gradient_checkpointing")
        )
    for pair in inner:
        hooks[pair[1].fqn].inner.append(pair)
    return hooks


def _followed(programs: Iterable[Choice], modules: Mapping[str, nn.Module]) -> set[str]:
    """Modules in whose forward a plan names an op, and all modules inside those.

    Only there must an op be told from those of the modules around. TorchScript's
    modules take no hooks.
    """
    found: set[nn.Module] = set()
    for choice in programs:
        inside = {
            module
            for one in (choice, *(inner for _, inner in choice.within()))
            for named in _named(one, modules)
            for module in named.modules()
        }
        found |= inside - ({modules[choice.fqn]} if choice.last is None else set())
    return {
        fqn
        for fqn, module in modules.items()
        if module in found and not isinstance(module, torch.jit.ScriptModule)
    }


def _named(choice: Choice, modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """The modules that its ops may be those of: below it, or shared with others."""
    for path in {op.path for op in choice.region.ops}:
        for top in (choice.top, *choice.makers):
            below = f"{top}.{path}".strip(".")
            fqn = below if below in modules else path
            if fqn in modules:
                yield modules[fqn]
