"""Plans that do not belong to a model: three lines, and nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckplan
from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.file import load
from ckplan.plan.resolve import resolve


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return x


def build() -> nn.Module:
    return nn.Sequential(Transformer(), nn.Linear(16, 4))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return ckplan.profile(build(), torch.randn(4, 16), replay=False)


def state_of(model: nn.Module) -> list[object]:
    """All that applying a plan could change."""
    return [
        (name, type(module), sorted(vars(module)), *map(list, hooks))
        for name, module in model.named_modules()
        for hooks in [(module._forward_hooks, module._forward_pre_hooks)]
    ]


MODEL = [  # regions, what is said, what to try
    ("calls: 'encoder.layer.[0..11]'", "the model has no module 'encoder.layer.0'", ""),
    ("calls: '0.layers.[0..2]'", "no module '0.layers.0'", "'0.h.[0..2]'?"),
    ("calls: 0.h.1.attention", "no module '0.h.1.attention'", "'0.h.1.attn'?"),
    ("calls: '0.h.[0..11]'", "no module '0.h.3'", "'0.h.[0..2]'?"),
    ("calls: '0.h.*.mlp'", "no module '0.h.*.mlp'", "'0.h.[0..2].mlp'?"),
    ("calls: '0.h.[0-2]'", "cannot read the calls", "'0.h.[0..2]'?"),
    ("calls: 0.h.1}, {calls: '0.h.[0..2]'", "overlap: 0.h.1 is named", "remove"),
    ("calls: '0'}, {calls: 0.h.1.mlp", "overlap: 0.h.1.mlp is inside 0", "remove"),
    ("run: [0.h.0, 0.h.1]}, {calls: 0.h.1.mlp", "0.h.1.mlp is inside", "remove"),
    ("run: [0.h.0, 0.h.0]", "cannot make one region", "run: "),
    ("run: [0.h.0, 0.h.0.mlp]", "cannot make one region", "run: "),
    ("run: [0.h.0, 0.h.9]", "no module '0.h.9'", "'0.h.[0..2]'?"),
    ("run: [0.h.0, 0.h.1, 0.h.2]", "it has 3 calls", "run: "),
    ("run: [0.h.0, 0.h.1], by: rerun", "a run needs by: program", "by: program"),
    ("calls: 0.h.0, by: rerun, save: [attn/addmm]", "save needs by: program", "by: "),
    ("calls: 0.h.0, by: replay", "cannot recompute by 'replay'", "by: program"),
    ("calls: 0.h.0, sav: [attn/addmm]", "unknown key 'sav'", "'save'?"),
    ("calls: 0.h.0, save: [addmm]", "cannot read the op 'addmm'", "mlp.c_fc/addmm"),
    ("calls: 0.h.0, save: [mlp.0/addmmm]", "has no op 'addmmm'", "'addmm'?"),
    ("calls: 0.h.0, encode: {mlp.0/bernouli_: bits}", "no op 'bernouli_'", "'bern"),
    ("calls: 0.h.0, encode: {mlp.0/addmm: zip}", "cannot encode as 'zip'", "bits"),
    ("calls: 0.h.0, regions: [{calls: 0.h.1}]", "0.h.1 is not inside", "move it"),
    (
        "calls: 0.h.0, regions: [{calls: 0.h.0.mlp, by: rerun}]",
        "line 2: cannot nest '0.h.0.mlp'",
        "encode",
    ),
    ("calls: [0.h.0]", "'calls' is a list", ""),
    ("calls: 0.h.0", "cannot read the plan", ""),  # the file is cut there
]


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("region", "what", "hint"), MODEL)
def test_a_plan_that_cannot_be_changes_nothing(
    region: str, what: str, hint: str, planned: bool, tmp_path: Path
) -> None:
    model, path = build(), tmp_path / "plan.yaml"
    if planned:
        path.write_text("ckplan: 1\nregions: [{calls: 0.h.2}]\n")
        ckplan.apply(model, path)
    end = "" if what == "cannot read the plan" else "}]"
    path.write_text(f"ckplan: 1\nregions: [{{{region}{end}\n")
    before = state_of(model)
    with pytest.raises(PlanError) as caught:
        ckplan.apply(model, path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert what in lines[0]
    assert hint in lines[2]
    assert lines[0].startswith(f"error: {path}, line ")
    assert lines[0].count("line ") == 1
    assert state_of(model) == before
    if planned:
        assert [r.call for r in ckplan.status(model).regions] == ["0.h.2"]


TRACE = [  # what only a trace can tell
    ("save: [attn/mm]", "'attn/mm' in region '0.h.0': 0.h.0#0 runs no", "'attn/addmm'"),
    ("save: [attention/addmm]", "runs no such op", "'attn/addmm'?"),
    ("save: ['mlp.0/addmm#7']", "runs no such op", "'mlp.0/addmm'?"),
    ("save: ['mlp.0/addmm@7']", "it has no such output", "leave '@'"),
    ("encode: {mlp.0/addmm: bits}", "cannot encode 'mlp.0/addmm' as bits", "masks"),
]


@pytest.mark.parametrize(("ops", "what", "hint"), TRACE)
def test_an_op_that_is_not_there_is_refused_where_there_is_a_trace(
    ops: str, what: str, hint: str, graph: Graph, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"ckplan: 1\nregions: [{{calls: 0.h.0, {ops}}}]\n")
    with pytest.raises(PlanError) as caught:
        resolve(load(path), graph)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert what in lines[0]
    assert hint in lines[2]
