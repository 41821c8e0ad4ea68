"""Graph files: there and back, and what is not a graph is refused by name."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import networkx
import pytest
from graphs import Forward, chain, random_step
from hypothesis import given
from hypothesis import strategies as st

from ckplan.errors import CkplanError, GraphError
from ckplan.graph.file import dumps, load, loads, save
from ckplan.graph.graph import Graph
from ckplan.graph.records import (
    KINDS,
    OUTSIDE_CALLS,
    Encoding,
    EngineCosts,
    TensorType,
)

PLAIN = replace(
    chain(2, workspace_bytes=7), encodings=(Encoding(3, 0, "bits", 5, 0, 0, 0.1, 0.1),)
)


def described(graph: Graph) -> Graph:
    """With lines for ops and types for storages, some twice and some not known."""
    ops = (
        replace(op, line=f"m.py:{number % 5}" if number % 3 else "")
        for number, op in enumerate(graph.ops)
    )
    storages = (
        replace(one, tensor=TensorType("uint8", (1, one.bytes)) if number % 3 else None)
        for number, one in enumerate(graph.storages)
    )
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


GRAPH = described(PLAIN)
TEXT = dumps(GRAPH)

TRACES = Path(__file__).parents[2] / "traces"

Content = dict[str, Any]


def changed(change: Callable[[Content], object]) -> str:
    """The text of ``GRAPH`` after a change to its content."""
    content = json.loads(TEXT)
    change(content)
    return json.dumps(content)


def put(*path: str | int, value: object) -> Callable[[Content], None]:
    """Set what stands at a path through a graph's content."""

    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def call_named(graph: Graph, name: str) -> int:
    return [str(call) for call in graph.calls].index(name)


# -- there and back --------------------------------------------------------------------


@given(rng=st.randoms(use_true_random=False))
def test_text_of_any_graph_gives_it_back(rng: Random) -> None:
    graph = random_step(rng)
    for one in (graph, described(graph)):
        assert loads(dumps(one), "x") == one


def test_lines_and_types_stand_once_in_the_file() -> None:
    content = json.loads(TEXT)
    assert content["lines"] == ["m.py:0", "m.py:1", "m.py:2", "m.py:3", "m.py:4"]
    assert len(content["op_lines"]) == len(GRAPH.ops)
    rows = content["tensors"]
    assert rows and len(rows) == len({str(row) for row in rows})
    assert str(TensorType("float32", (8, 1024))) == "float32[8,1024]"


def test_a_file_of_format_8_is_read_without_lines_and_types() -> None:
    def aged(content: Content) -> None:
        content["ckplan_graph"] = 8
        for key in ("lines", "op_lines", "tensors", "storage_tensors"):
            del content[key]

    old = loads(changed(aged), "x")
    assert old == PLAIN
    assert dumps(old) == dumps(PLAIN)
    with pytest.raises(GraphError, match="x has unknown key 'lines'"):
        loads(changed(put("ckplan_graph", value=8)), "x")


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_file_gives_the_graph_back(tmp_path: Path, name: str) -> None:
    graph = replace(GRAPH, notes=("said",), options={"optimizer": "sgd"})
    save(graph, tmp_path / name)
    assert load(tmp_path / name) == graph
    packed = (tmp_path / name).read_bytes()[:2] == b"\x1f\x8b"
    assert packed == name.endswith(".gz")


def test_same_graph_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        save(chain(2), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (
        tmp_path / "b.json.gz"
    ).read_bytes()


def test_file_that_exists_is_overwritten_only_by_force(tmp_path: Path) -> None:
    save(GRAPH, tmp_path / "step.json")
    with pytest.raises(CkplanError, match="already exists"):
        save(chain(1), tmp_path / "step.json")
    assert load(tmp_path / "step.json") == GRAPH
    save(chain(1), tmp_path / "step.json", force=True)
    assert load(tmp_path / "step.json") == chain(1)


def test_name_decides_nothing_when_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "b.json.gz").write_text(TEXT)
    assert load(tmp_path / "a.json") == load(tmp_path / "b.json.gz") == GRAPH


# -- what is no graph ------------------------------------------------------------------


def test_gzip_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(dumps(chain(1)).encode(), mtime=0)
    path = tmp_path / "step.json.gz"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(GraphError, match="cannot read the trace"):
            load(path)


def test_gzip_with_a_flipped_bit_is_refused_or_the_same(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(dumps(chain(1)).encode(), mtime=0))
    path = tmp_path / "step.json.gz"
    for place in range(0, len(whole), 7):
        whole[place] ^= 16
        path.write_bytes(whole)
        whole[place] ^= 16
        try:
            assert load(path) == chain(1)  # the header's time and the like
        except GraphError as error:
            assert "cannot read the trace" in error.what


@pytest.mark.parametrize("length", [0, 1, 2, 100, len(TEXT) // 2, len(TEXT) - 2])
def test_text_that_is_cut_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "step.json"
    path.write_text(TEXT[:length])
    with pytest.raises(GraphError, match="is not complete JSON") as caught:
        load(path)
    assert str(path) in caught.value.what


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphError, match="is not text"):
        load(tmp_path / "step.json")


def test_file_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(CkplanError, match=r"cannot read the trace .*no such file"):
        load(tmp_path / "step.json")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"ckplan_graph"', "{}"])
def test_other_json_is_no_trace(text: str) -> None:
    with pytest.raises(GraphError, match="x is not a ckplan trace"):
        loads(text, "x")


@pytest.mark.parametrize("version", [0, 1, 7, 10, "9", None, [9]])
def test_other_versions_are_refused(version: object) -> None:
    with pytest.raises(GraphError, match="has format") as caught:
        loads(changed(put("ckplan_graph", value=version)), "x")
    assert "format 9" in caught.value.needed
    assert "ckplan profile" in caught.value.hint


@pytest.mark.serial
def test_a_graph_loads_as_quickly_as_20_000_ops_in_half_a_second() -> None:
    times = []
    for _ in range(10):
        start = time.process_time()
        graph = load(TRACES / "gpt2-xl.json.gz")
        times.append(time.process_time() - start)
    assert min(times) / len(graph.ops) < 0.5 / 20_000


def test_unknown_key_is_named() -> None:
    with pytest.raises(GraphError, match="x has unknown key 'colour'"):
        loads(changed(put("colour", value=1)), "x")


@pytest.mark.parametrize("key", sorted(set(json.loads(TEXT)) - {"ckplan_graph"}))
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(GraphError, match=f"x has missing key '{key}'"):
        loads(changed(lambda content: content.pop(key)), "x")


@pytest.mark.parametrize("row", ["ops", "storages", "saved", "calls", "encodings"])
def test_rows_of_another_length_are_refused(row: str) -> None:
    for change in (lambda c: c[row][0].append(0), lambda c: c[row][0].clear()):
        with pytest.raises(GraphError, match="malformed record"):
            loads(changed(change), "x")


@pytest.mark.parametrize(
    "change",
    [
        put("op_lines", 0, value=5),
        put("op_lines", 0, value=-2),
        put("op_lines", value=[]),
        put("lines", 0, value=7),
        put("storage_tensors", 0, value=1000),
        put("storage_tensors", value=[0]),
        put("tensors", 0, value=["uint8"]),
        put("tensors", 0, value=["uint8", [-1]]),
        put("tensors", 0, value=["uint8", [1.5]]),
        put("tensors", 0, value=[8, [1]]),
        put("tensors", 0, value=["uint8", 3]),
    ],
)
def test_lines_and_types_that_are_not_there_are_refused(
    change: Callable[[Content], None],
) -> None:
    with pytest.raises(GraphError, match=r"malformed|inconsistent"):
        loads(changed(change), "x")


INDICES = [
    ("num_forward",),
    ("num_backward",),
    ("ops", 3, 0),  # name
    ("ops", 3, 1),  # call
    ("ops", 3, 2, 0),  # a storage read
    ("ops", 3, 4, 0),  # a storage returned
    ("storages", 3, 2),  # maker
    ("saved", 3, 0),  # storage
    ("saved", 3, 1),  # call
    ("saved", 3, 2),  # at
    ("saved", 3, 3),  # wanted
    ("saved", 3, 4),  # done
    ("calls", 3, 2),  # parent
    ("calls", 3, 3),  # start
    ("calls", 3, 4),  # stop
    ("encodings", 0, 0),  # op
    ("encodings", 0, 1),  # output
]


def test_a_card_that_is_no_text_and_json_too_deep_are_refused() -> None:
    with pytest.raises(GraphError, match="5 is not a name"):
        loads(changed(put("options", value={"gpu": 5})), "x")
    with pytest.raises(GraphError, match="is not complete JSON"):
        loads("[" * 10**5, "x")
    with pytest.raises(GraphError, match="x is a plan, not a trace"):
        loads("ckplan: 1\nregions: []\n", "x")


@pytest.mark.parametrize("value", [-2, 10**6])
@pytest.mark.parametrize("path", INDICES, ids=lambda path: ".".join(map(str, path)))
def test_index_out_of_range_is_refused(path: tuple[str | int, ...], value: int) -> None:
    with pytest.raises(GraphError):
        loads(changed(put(*path, value=value)), "x")


@pytest.mark.parametrize("counts", [[1], [-1, 2], ["1", 2], [1.5, 2]])
def test_functions_are_counted_for_every_call(counts: list[Any]) -> None:
    graph = loads(changed(put("functions", value=[3] * len(GRAPH.calls))), "x")
    assert {call.functions for call in graph.calls} == {3}
    wrong = counts if len(counts) == 1 else [counts[0], *[2] * (len(GRAPH.calls) - 1)]
    with pytest.raises(GraphError, match=r"functions|malformed"):
        loads(changed(put("functions", value=wrong)), "x")


@pytest.mark.parametrize("number", [-1, 10**6, "1", None])
def test_ops_inside_of_functions_are_there(number: object) -> None:
    graph = loads(changed(put("inside", value=[1, 3])), "x")
    assert [n for n, op in enumerate(graph.ops) if op.is_inside] == [1, 3]
    assert loads(dumps(graph), "x") == graph
    with pytest.raises(GraphError, match="malformed"):
        loads(changed(put("inside", value=[1, number])), "x")


COSTS = [
    ("ops", 3, 5, 1, 0),  # workspace
    ("ops", 3, 6),  # FLOPs
    ("ops", 3, 7),  # bytes moved
    ("ops", 3, 8),  # seconds
    ("storages", 3, 0),  # bytes
    ("encodings", 0, 3),  # bytes
    ("encodings", 0, 4),  # workspace
    ("encodings", 0, 6),  # seconds
    ("engine", 0),  # seconds
    ("engine", 1),
]


@pytest.mark.parametrize(
    "value", [-1, None, "4", [], 1e300, float("nan"), float("inf")]
)
@pytest.mark.parametrize("path", COSTS, ids=lambda path: ".".join(map(str, path)))
def test_cost_that_is_no_natural_number_is_refused(
    path: tuple[str | int, ...], value: object
) -> None:
    with pytest.raises(GraphError):
        loads(changed(put(*path, value=value)), "x")


NUMBER = ("calls", 3, 1)  # of a call, which may be any
NO_INDICES = [
    *product([*INDICES, NUMBER], [None, "0", [], 1.5]),
    *product([("ops", 3, 1), ("saved", 3, 1), NUMBER], [0.0, "x"]),
    (NUMBER, -2),
]


@pytest.mark.parametrize(("path", "value"), NO_INDICES)
def test_index_of_another_type_is_refused(
    path: tuple[str | int, ...], value: object
) -> None:
    with pytest.raises(GraphError):
        loads(changed(put(*path, value=value)), "x")


def test_unknown_kind_is_named() -> None:
    with pytest.raises(GraphError, match="storage 3 is of kind 'colour'"):
        loads(changed(put("storages", 3, 1, value="colour")), "x")


# -- what a graph tells ----------------------------------------------------------------


def test_bytes_by_kind_count_every_storage_once() -> None:
    total = GRAPH.bytes_by_kind
    assert list(total) == list(KINDS)
    assert sum(total.values()) == sum(storage.bytes for storage in GRAPH.storages)
    assert total["parameter"] == 2 * 3 * 50


def test_seconds_of_the_step_are_those_of_its_ops() -> None:
    assert chain(1, seconds=0.5).step_seconds == 0.5 * len(chain(1).ops)


def launched(launch_seconds: float) -> Graph:
    graph = chain(1, seconds=0.5)
    ops = (replace(op, launch_seconds=launch_seconds) for op in graph.ops)
    return replace(graph, ops=tuple(ops))


@pytest.mark.parametrize(("launch_seconds", "longer"), [(0.25, 0.5), (0.75, 0.75)])
def test_a_step_takes_as_long_as_the_longer_of_device_and_launching(
    launch_seconds: float, longer: float
) -> None:
    """The first kernel waits for its launch, or the last launch for its kernel."""
    graph = launched(launch_seconds)
    shorter = min(launch_seconds, 0.5)
    assert graph.step_seconds == longer * len(graph.ops) + shorter
    assert graph.waiting_seconds == shorter
    assert graph.critical_seconds == (longer,) * len(graph.ops)
    assert loads(dumps(graph), "x") == graph


def test_what_the_engine_takes_adds_to_ops_that_run_again_where_the_cpu_is_busier() -> (
    None
):
    costs = EngineCosts(watch_seconds=0.01, rerun_seconds=0.125)
    for launch_seconds, longer in ((0.0, 0.625), (0.25, 0.5), (0.75, 0.875)):
        graph = replace(launched(launch_seconds), engine=costs)
        assert set(graph.recompute_op_seconds) == {longer}
        assert loads(dumps(graph), "x") == graph


def test_phases_follow_each_other() -> None:
    phases = [GRAPH.phase(moment) for moment in range(len(GRAPH.ops))]
    names = ["forward", "backward", "optimizer"]
    assert sorted(phases, key=names.index) == phases
    assert phases.count("forward") == GRAPH.num_forward
    assert phases.count("backward") == GRAPH.num_backward


def test_places_are_named_for_people() -> None:
    assert GRAPH.place(0) == "forward of h.0.norm"
    assert GRAPH.place(GRAPH.num_forward - 1) == "forward of the loss"
    assert GRAPH.place(GRAPH.backward_stop - 1).startswith("backward of h.0")
    assert GRAPH.place(len(GRAPH.ops) - 1) == "optimizer step"


def test_a_call_is_within_itself_and_what_is_around_it() -> None:
    inner, block, root = (call_named(GRAPH, n) for n in ("h.1.mlp#0", "h.1#0", ".#0"))
    other = call_named(GRAPH, "h.0#0")
    assert GRAPH.is_within(inner, inner)
    assert GRAPH.is_within(inner, block)
    assert GRAPH.is_within(inner, root)
    assert GRAPH.is_within(inner, OUTSIDE_CALLS)
    assert not GRAPH.is_within(block, inner)
    assert not GRAPH.is_within(inner, other)


def test_saved_tensors_of_a_run_are_those_of_its_calls_and_nothing_later() -> None:
    graph = chain(4)
    blocks = [call_named(graph, f"h.{i}#0") for i in range(4)]
    one_by_one = [i for block in blocks[1:3] for i in graph.saved_in(block)]
    assert graph.saved_in(blocks[1], blocks[2]) == one_by_one


def test_saved_tensors_of_a_run_exclude_what_the_next_call_saves_first() -> None:
    forward = Forward()
    x = forward.given(8)
    with forward.call(""):
        for block in range(3):
            with forward.call(str(block)):  # saves its input before its first op
                (x,) = forward.op("mul", [x], makes=[8], saves=[x])
    graph = forward.graph()
    assert graph.saved_in(1, 2) == [0, 1]
    assert graph.saved_in(1) == [0]
    assert graph.saved_in(0) == [0, 1, 2]


def test_what_the_parent_saves_between_two_calls_belongs_to_their_run_alone() -> None:
    forward = Forward()
    x = forward.given(8)
    with forward.call(""):
        with forward.call("0"):
            (x,) = forward.op("mul", [x], makes=[8])
        (x,) = forward.op("tanh", [x], makes=[8])
        forward.save(x)
        with forward.call("1"):
            (x,) = forward.op("mul", [x], makes=[8])
        forward.op("exp", [x], makes=[8], saves=[x])
    graph = forward.graph()
    assert graph.saved_in(1, 2) == [0]
    assert graph.saved_in(1) == graph.saved_in(2) == []
    assert graph.saved_in(0) == [0, 1]


def test_change_in_place_is_found_between_two_moments() -> None:
    forward = Forward()
    x = forward.given(8)
    (y,) = forward.op("mul", [x], makes=[8])
    forward.op("add_", [x], writes=[y])
    graph = forward.graph()
    assert graph.is_changed(y, 0, 2)
    assert graph.is_changed(y, 1, 2)
    assert not graph.is_changed(y, 0, 1)
    assert not graph.is_changed(y, 2, len(graph.ops))
    assert not graph.is_changed(x, 0, 2)


# -- networkx --------------------------------------------------------------------------


def test_networkx_has_an_edge_from_maker_to_reader() -> None:
    forward = Forward()
    x = forward.given(8)
    a, b = forward.op("split", [x], makes=[3, 5])
    (c,) = forward.op("mul", [a], makes=[7])
    forward.op("add_", [c], writes=[b])
    forward.op("sum", [b], makes=[1])
    dag = forward.graph("Model").to_networkx()
    assert dag.name == "Model"
    assert dag.nodes[0] == {"name": "split", "seconds": 1.0}
    forward_edges = {(t, h): d["bytes"] for t, h, d in dag.edges(data=True) if h < 4}
    assert forward_edges == {(0, 1): 3, (0, 2): 5, (1, 2): 7, (2, 3): 5}


@given(rng=st.randoms(use_true_random=False))
def test_networkx_is_acyclic_and_follows_the_order_of_the_step(rng: Random) -> None:
    graph = random_step(rng)
    dag = graph.to_networkx()
    assert dag.number_of_nodes() == len(graph.ops)
    assert networkx.is_directed_acyclic_graph(dag)
    assert all(tail < head for tail, head in dag.edges)


# -- signatures ------------------------------------------------------------------------


def test_identical_blocks_have_one_signature() -> None:
    graph = chain(5)
    blocks = [call_named(graph, f"h.{i}#0") for i in range(4)]
    assert len({graph.signature(block) for block in blocks}) == 1
    inner = [call_named(graph, f"h.{i}.mlp#0") for i in range(5)]
    assert len({graph.signature(call) for call in inner}) == 1
    assert graph.signature(inner[0]) != graph.signature(blocks[0])


@pytest.mark.parametrize(
    "options",
    [
        {"width_bytes": 101},
        {"hidden_bytes": 401},
        {"stats_bytes": 5},
        {"weight_bytes": 51},
        {"workspace_bytes": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_blocks_that_differ_in_bytes_differ_in_signature(
    options: dict[str, int],
) -> None:
    one, other = chain(2), chain(2, **options)
    block = call_named(one, "h.0#0")
    assert one.signature(block) != other.signature(block)


def test_blocks_differ_in_signature_by_what_they_save_or_change() -> None:
    def signature(*, saves: bool, in_place: bool, hazard: str = "") -> str:
        forward = Forward()
        x = forward.given(8)
        with forward.call("0", hazard=hazard):
            (y,) = forward.op("mul", [x], makes=[8])
            writes, makes = ([y], []) if in_place else ([], [8])
            forward.op("exp", [y], writes=writes, makes=makes)
            if saves:
                forward.save(y)
        return forward.graph().signature(0)

    variants = [
        signature(saves=False, in_place=False),
        signature(saves=True, in_place=False),
        signature(saves=False, in_place=True),
        signature(saves=True, in_place=True),
        signature(saves=True, in_place=True, hazard="writes to a buffer"),
    ]
    assert len(set(variants)) == len(variants)
