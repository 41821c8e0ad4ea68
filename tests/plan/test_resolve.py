"""Names of a plan and regions of a graph: there, back, and what is not there."""

import pytest
from graphs import Forward, chain
from hypothesis import given
from hypothesis import strategies as st

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.file import dumps, loads
from ckplan.plan.names import OpName
from ckplan.plan.outputs import name_ops
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.region import PROGRAM, RERUN, Region
from ckplan.plan.resolve import describe, resolve
from ckplan.simulating.simulate import simulate

BLOCKS = chain(4)
CELLS = chain(4, block="cell")


def _plan(*regions: str) -> Plan:
    lines = "".join(f"- {region}\n" for region in regions)
    return loads(f"ckplan: 1\nregions:\n{lines}", "plan.yaml")


def _call(graph: Graph, name: str) -> int:
    return [str(call) for call in graph.calls].index(name)


def _op(graph: Graph, name: str, number: int) -> int:
    return [i for i, op in enumerate(graph.ops) if op.name == name][number]


# -- the graphs that tests are made of -----------------------------------------------


def test_a_chain_can_be_replayed_and_planned():
    large = chain(4, width_bytes=10**5, hidden_bytes=4 * 10**5)  # against random states
    planned = simulate(large, resolve(_plan("calls: h.[0..3]"), large))
    assert planned.peak_bytes < simulate(large).peak_bytes
    unplanned = simulate(BLOCKS)
    assert planned.recompute_seconds > 0
    assert unplanned.live_bytes[-1] == sum(
        BLOCKS.bytes_by_kind[kind] for kind in ("parameter", "gradient", "input")
    )


def test_blocks_of_a_chain_are_alike_but_for_the_last_whose_output_dies_sooner():
    calls = [_call(BLOCKS, f"h.{i}#0") for i in range(3)]
    assert len({BLOCKS.signature(call) for call in calls}) == 1


# -- names of ops --------------------------------------------------------------------


def test_ops_are_named_by_owner_and_occurrence():
    expected = [
        "norm/native_layer_norm",
        "mlp/addmm",
        "mlp/gelu",
        "mlp/addmm#1",
        "./native_dropout",
        "./add",
    ]
    for name in ("h.0#0", "h.2#0"):
        assert list(map(str, name_ops(BLOCKS, _call(BLOCKS, name)))) == expected
    names = list(map(str, name_ops(BLOCKS, _call(BLOCKS, ".#0"))))
    assert names[:6] == [
        f"h.0/{n[2:]}" if n[0] == "." else f"h.0.{n}" for n in expected
    ]


def test_modules_that_are_not_below_the_region_keep_their_name():
    forward = Forward()
    x = forward.given(8)
    with forward.call("encoder"), forward.call("shared.embedding"):
        forward.op("embedding", [x], makes=[8])
    names = name_ops(forward.graph(), 0)
    assert names == [OpName("shared.embedding", "embedding")]


# -- resolving -----------------------------------------------------------------------


def test_a_plan_without_regions_means_none():
    assert resolve(Plan(), BLOCKS) == ()


def test_patterns_become_one_region_per_call_in_order_of_calls():
    found = resolve(_plan("{calls: h.3, by: rerun}", "calls: h.[0..1]"), BLOCKS)
    calls = [_call(BLOCKS, f"h.{i}#0") for i in (0, 1, 3)]
    assert found == tuple(map(Region, calls, [PROGRAM, PROGRAM, RERUN]))


def test_saves_become_ops_and_outputs_of_every_call():
    region = (
        "{calls: cell, save: [mlp/addmm#1, ./native_dropout@1, norm/native_layer_norm]}"
    )
    found = resolve(_plan(region), CELLS)
    assert found[2].save == {
        (_op(CELLS, "addmm", 5), 0),
        (_op(CELLS, "native_dropout", 2), 1),
        *((_op(CELLS, "native_layer_norm", 2), m) for m in range(3)),
    }
    assert len(found) == 4


@pytest.mark.parametrize(
    ("regions", "line", "found", "needed", "hint"),
    [
        (["calls: h.[0..4]"], 3, "'h.[0..4]': no module 'h.4'", "", "'h.[0..3]'?"),
        (["calls: h.0", "calls: x"], 4, "no module 'x' ran", "", ""),
        (["calls: h.[0-3]"], 3, "cannot read the calls", "[a..b]", "'h.[0..3]'?"),
        (["calls: h.0#1"], 3, "there is no h.0#1", "h.0#0", ""),
        (
            ["calls: h.0", "calls: h.[1..2]\n  save:\n  - mlp/gelu\n  - mlp/adm"],
            7,
            "cannot save 'mlp/adm' in region 'h.[1..2]': h.1#0 runs no such op",
            "mlp/addmm, mlp/addmm#1",
            "did you mean 'mlp/addmm'?",
        ),
        (["{calls: h.0, save: [mlp/gelu#1@0]}"], 3, "no such op", "", "'mlp/gelu'?"),
        (["{calls: h.0, save: [Q/QQQ]}"], 3, "no such op", "norm/nat", "leave it out"),
        (
            ["{calls: h.1, save: [./native_dropout@2]}"],
            3,
            "'./native_dropout@2' in region 'h.1': in h.1#0 it has no such output",
            "@0, @1",
            "every output",
        ),
        (
            ["calls: h.0\n  encode:\n    mlp/gelu: bits"],
            5,
            "cannot encode 'mlp/gelu' as bits in region 'h.0'",
            "an op whose tensor has a smaller form",
            "",
        ),
        (
            ["{calls: h.0, encode: {./native_dropout@1: int16}}"],
            3,
            "cannot encode './native_dropout@1' as int16",
            "'bits'",
            "",
        ),
        (
            [
                "calls: h.0\n  save: [./native_dropout]\n"
                "  encode: {./native_dropout@1: bits}"
            ],
            5,
            "the region saves it as well",
            "either save or encode",
            "leave it out of save",
        ),
        (["{calls: h.0, encode: {Q/Q: bits}}"], 3, "no such op", "norm/nat", "leave"),
        (["calls: h.0", "calls: h.[0..1]"], 4, "h.0#0 is in both 'h.0' and", "", ""),
        (
            ["calls: h.0", "calls: h.0"],
            4,
            "regions overlap",
            "do not overlap",
            "remove",
        ),
        (
            ["calls: h.1.mlp", "calls: h.[0..3]"],
            3,
            "overlap: h.1.mlp#0 ('h.1.mlp') is inside h.1#0 ('h.[0..3]')",
            "do not overlap",
            "remove",
        ),
        (
            ["calls: .", "calls: h.3.mlp"],
            4,
            "h.3.mlp#0 ('h.3.mlp') is inside .#0",
            "",
            "",
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused(
    regions: list[str], line: int, found: str, needed: str, hint: str
):
    with pytest.raises(PlanError) as caught:
        resolve(_plan(*regions), BLOCKS)
    error = caught.value
    assert error.what.startswith(f"plan.yaml, line {line}: ")
    assert found in error.what
    assert needed in error.needed
    assert hint in error.hint


def test_an_op_without_outputs_cannot_be_saved():
    forward = Forward()
    x = forward.given(8)
    with forward.call("fc"):
        forward.op("_assert_async", [x])
    with pytest.raises(PlanError, match="an op that returns a tensor"):
        resolve(_plan("{calls: fc, save: [./_assert_async]}"), forward.graph())


def test_plans_that_no_file_holds_have_errors_without_a_line():
    with pytest.raises(PlanError) as caught:
        resolve(Plan(regions=(PlannedRegion("h.9"),)), BLOCKS)
    assert caught.value.what.startswith("cannot find the calls 'h.9'")


# -- describing ----------------------------------------------------------------------


def test_no_regions_are_described_by_none():
    assert describe(BLOCKS, []) == ()


def _saving(graph: Graph, name: str, *saves: tuple[str, int, int]) -> Region:
    save = frozenset((_op(graph, op, number), output) for op, number, output in saves)
    return Region(_call(graph, name), save=save)


def test_calls_that_save_the_same_are_folded():
    regions = [
        _saving(BLOCKS, "h.0#0", ("gelu", 0, 0), ("addmm", 0, 0)),
        _saving(BLOCKS, "h.1#0", ("addmm", 2, 0), ("gelu", 1, 0)),
        _saving(BLOCKS, "h.2#0"),
        Region(_call(BLOCKS, "h.3#0"), by=RERUN),
    ]
    names = (OpName("mlp", "addmm"), OpName("mlp", "gelu"))
    expected = (
        PlannedRegion("h.[0..1]", save=names),
        PlannedRegion("h.2"),
        PlannedRegion("h.3", by=RERUN),
    )
    assert describe(BLOCKS, regions) == expected
    assert describe(BLOCKS, reversed(regions)) == expected


def test_calls_of_one_module_are_folded():
    regions = [Region(_call(CELLS, f"cell#{i}")) for i in range(4)]
    assert describe(CELLS, regions) == (PlannedRegion("cell"),)
    assert describe(CELLS, regions[1:]) == (PlannedRegion("cell#[1..3]"),)


def test_outputs_are_named_where_not_all_are_saved():
    norm = "native_layer_norm"
    regions = [
        _saving(BLOCKS, "h.0#0", (norm, 0, 2), (norm, 0, 1), ("native_dropout", 0, 1)),
        _saving(BLOCKS, "h.1#0", (norm, 1, 2), (norm, 1, 1), (norm, 1, 0)),
    ]
    first, second = describe(BLOCKS, regions)
    saves = [f"norm/{norm}@1", f"norm/{norm}@2", "./native_dropout@1"]
    assert list(map(str, first.save)) == saves
    assert list(map(str, second.save)) == [f"norm/{norm}"]


@st.composite
def _regions(draw: st.DrawFn, graph: Graph) -> list[Region]:
    """Regions on calls of which none lies inside another."""
    chosen: list[int] = []
    for call in draw(st.permutations(range(len(graph.calls))))[:5]:
        if not any(
            graph.is_within(call, c) or graph.is_within(c, call) for c in chosen
        ):
            chosen.append(call)
    regions = []
    for call in chosen:
        found = graph.calls[call]
        outputs = [
            (op, output)
            for op in range(found.start, found.stop)
            for output in range(len(graph.ops[op].outputs))
        ]
        save = draw(st.frozensets(st.sampled_from(outputs), max_size=6))
        forms = [place for place in outputs if place in graph.encoding_of]
        encode = draw(st.frozensets(st.sampled_from(forms))) if forms else frozenset()
        kept = save or encode
        by = PROGRAM if kept else draw(st.sampled_from([PROGRAM, RERUN]))
        regions.append(Region(call, by, save, encode=encode - save))
    return regions


@pytest.mark.parametrize("graph", [BLOCKS, CELLS], ids=["blocks", "cells"])
@given(data=st.data())
def test_resolving_is_the_reverse_of_describing(graph: Graph, data: st.DataObject):
    regions = data.draw(_regions(graph))
    plan = Plan(regions=describe(graph, regions))
    plan = loads(dumps(plan), "plan.yaml")
    assert resolve(plan, graph) == tuple(sorted(regions, key=lambda r: r.call))


# -- runs of calls -------------------------------------------------------------------


def test_a_run_is_one_region_from_its_first_call_to_its_last():
    plan = _plan("{run: [h.0, h.2], save: [h.1.mlp/addmm#1]}")
    (region,) = resolve(plan, BLOCKS)
    first, last = (_call(BLOCKS, name) for name in ("h.0#0", "h.2#0"))
    assert (region.call, region.last) == (first, last)
    names = [str(name) for name in name_ops(BLOCKS, first, last)]
    assert names[:2] == ["h.0.norm/native_layer_norm", "h.0.mlp/addmm"]
    (saved,) = region.save
    assert names[saved[0] - BLOCKS.calls[first].start] == "h.1.mlp/addmm#1"
    assert describe(BLOCKS, [region]) == plan.regions


def test_a_run_of_one_module_names_the_numbers_of_its_calls():
    plan = _plan("run: [cell#1, cell#3]", "calls: cell#0")
    regions = resolve(plan, CELLS)
    assert [region.last is None for region in regions] == [True, False]
    again = Plan(regions=describe(CELLS, regions))
    assert resolve(again, CELLS) == regions
    assert again.regions[1].run == ("cell#1", "cell#3")


@pytest.mark.parametrize(
    ("regions", "found"),
    [
        (["run: [h.2, h.0]"], "cannot make one region of h.2 to h.0"),
        (["run: [h.1, h.1]"], "cannot make one region of h.1 to h.1"),
        (["run: [h.0, h.1.mlp]"], "cannot make one region of h.0 to h.1.mlp"),
        (["run: [h.0, h.9]"], "no module 'h.9' ran"),
        (["run: [h.0, h.2]", "calls: h.1"], "regions overlap"),
        (["run: [h.0, h.2]", "calls: h.1.mlp"], "regions overlap"),
        (["run: [h.0, h.2]", "run: [h.2, h.3]"], "regions overlap"),
        (["{run: [h.0, h.2], save: [mlp/addmm]}"], "runs no such op"),
    ],
)
def test_a_run_that_cannot_be_names_the_line(regions: list[str], found: str):
    with pytest.raises(PlanError, match=r"plan.yaml, line \d: .*") as caught:
        resolve(_plan(*regions), BLOCKS)
    assert found in caught.value.what


def test_a_run_that_does_not_say_which_call_is_meant():
    with pytest.raises(PlanError, match="cell is meant: it runs 4 times"):
        resolve(_plan("run: [cell, cell#3]"), CELLS)
