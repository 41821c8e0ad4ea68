"""Names: what patterns mean, that folding is the reverse, and what ops are called."""

import copy
import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckplan.errors import PlanError
from ckplan.graph.fqn import Call, call_name
from ckplan.graph.patterns import expand_calls, expand_modules, fold_calls
from ckplan.plan.names import OpCounter, OpName


def _each(*fqns: str, times: int = 1) -> list[Call]:
    return [(fqn, number) for fqn in fqns for number in range(times)]


GPT = [
    *_each(
        "wte", *(f"h.{i}{part}" for i in range(12) for part in ("", ".attn", ".mlp"))
    ),
    *_each("encoder.cell", times=16),
    *_each("head", ""),
]
RESNET = _each("conv1", *(f"layer{i}.{j}" for i in (1, 2) for j in range(i + 1)), "fc")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head", [("head", 0)]),
        ("head#0", [("head", 0)]),
        (".", [("", 0)]),
        (".#0", [("", 0)]),
        ("h.[0..2].mlp", _each("h.0.mlp", "h.1.mlp", "h.2.mlp")),
        ("h.1[0..1]", _each("h.10", "h.11")),
        ("h.[3..3]", _each("h.3")),
        ("encoder.cell", _each("encoder.cell", times=16)),
        ("encoder.cell#[2..3]", [("encoder.cell", 2), ("encoder.cell", 3)]),
        ("encoder.cell#15", [("encoder.cell", 15)]),
    ],
)
def test_a_pattern_means_these_calls(pattern: str, expected: list[Call]):
    assert tuple(expected) == expand_calls(pattern, GPT)


def test_ranges_may_stand_in_several_places():
    expected = _each("layer1.0", "layer1.1", "layer2.0", "layer2.1")
    assert tuple(expected) == expand_calls("layer[1..2].[0..1]", RESNET)
    lstm = _each("cell.0", "cell.1", times=3)
    expected = [("cell.0", 1), ("cell.0", 2), ("cell.1", 1), ("cell.1", 2)]
    assert tuple(expected) == expand_calls("cell.[0..1]#[1..2]", lstm)


def test_calls_come_in_the_order_in_which_they_ran():
    ran = [("h.1", 0), ("h.0", 0), ("h.1", 1)]
    assert tuple(ran) == expand_calls("h.[0..1]", iter(ran))


def test_numbers_are_integers_and_not_text():
    with pytest.raises(PlanError, match="no module 'layer_1' ran"):
        expand_calls("layer_[1..2]", _each("layer_01", "layer_02"))


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "#0",
        "#x",
        "head#",
        "head#x",
        "head#-1",
        "head#01",
        "head#0#0",
        "head##0",
        "h.[3..1]",
        "h.[0-11]",
        "h.[0:11]",
        "h.[0,11]",
        "h.[0...11]",
        "h.[a..b]",
        "h.[01..02]",
        "h.[0.. 2]",
        "h.[0..2",
        "h.0..2]",
        "h.[]",
        "h.[[0..2]]",
        "encoder.cell#[15..0]",
        "encoder.cell#[0-15]",
        "encoder.cell#1[0..2]",
        f"h.[0..{'9' * 5000}]",
    ],
)
def test_a_malformed_pattern_is_refused_with_the_right_form(pattern: str):
    with pytest.raises(PlanError) as caught:
        expand_calls(pattern, GPT)
    assert f"cannot read the calls {pattern!r}" == caught.value.what
    needed = "FQN or FQN#n, with [a..b], a <= b, for any number; '.' is the root"
    assert needed == caught.value.needed


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("h.[0-11]", "did you mean 'h.[0..11]'?"),
        ("h.[3..1].mlp", "did you mean 'h.[1..3].mlp'?"),
        ("encoder.cell#[0, 15]", "did you mean 'encoder.cell#[0..15]'?"),
        ("h.[a..b]", "cell#[0..15]"),
    ],
)
def test_a_pattern_that_is_nearly_right_is_put_right(pattern: str, hint: str):
    with pytest.raises(PlanError) as caught:
        expand_calls(pattern, GPT)
    assert hint == caught.value.hint


@pytest.mark.parametrize(
    ("pattern", "missing", "hint"),
    [
        ("haed", "haed", "did you mean 'head'?"),
        ("h.3.atn", "h.3.atn", "did you mean 'h.3.attn'?"),
        ("h.12", "h.12", "did you mean 'h.[0..11]'?"),
        ("h.[0..12].mlp", "h.12.mlp", "did you mean 'h.[0..11].mlp'?"),
        ("h.[0..999999999]", "h.12", "did you mean 'h.[0..11]'?"),
        ("h.*", "h.*", "did you mean 'h.[0..11]'?"),
        ("layers.[0..11]", "layers.0", "did you mean 'h.[0..11]'?"),
        ("h.3.attention", "h.3.attention", "did you mean 'h.3.attn'?"),
        ("bananas", "bananas", "`ckplan show TRACE` lists them"),
        ("head ", "head ", "did you mean 'head'?"),
    ],
)
def test_a_module_that_is_not_there_brings_up_the_nearest(
    pattern: str, missing: str, hint: str
):
    with pytest.raises(PlanError) as caught:
        expand_calls(pattern, GPT)
    expected = f"cannot find the calls {pattern!r}: no module {missing!r} ran"
    assert (expected, hint) == (caught.value.what, caught.value.hint)


def test_of_several_stages_the_nearest_is_brought_up():
    with pytest.raises(PlanError) as caught:
        expand_calls("layer2.7", RESNET)
    assert caught.value.hint == "did you mean 'layer2.[0..2]'?"


def test_every_member_of_every_range_must_be_there():
    with pytest.raises(PlanError, match=r"no module 'layer1\.2' ran"):
        expand_calls("layer[1..2].[0..2]", RESNET)


def test_a_call_that_is_not_there_brings_up_those_that_are():
    ran = [("cell", number) for number in (0, 1, 2, 5)]
    with pytest.raises(PlanError) as caught:
        expand_calls("cell#[1..3]", ran)
    expected = (
        "error: cannot find the calls 'cell#[1..3]': there is no cell#3\n"
        "  needed: cell#[0..2], cell#5\n"
        "  try:    cell for every call of this module"
    )
    assert expected == str(caught.value)


def test_a_model_without_calls_has_none_to_name():
    with pytest.raises(PlanError):
        expand_calls(".", [])


@pytest.mark.parametrize(
    ("chosen", "calls", "expected"),
    [
        ([], GPT, []),
        (_each(*(f"h.{i}" for i in range(8))), GPT, ["h.[0..7]"]),
        (
            _each("h.0", "h.1", "h.3", "h.5", "h.6"),
            GPT,
            ["h.[0..1]", "h.3", "h.[5..6]"],
        ),
        (_each("head", ""), GPT, ["head", "."]),
        (_each("encoder.cell", times=16), GPT, ["encoder.cell"]),
        (_each("encoder.cell", times=15), GPT, ["encoder.cell#[0..14]"]),
        ([("encoder.cell", 3)], GPT, ["encoder.cell#3"]),
        (RESNET, RESNET, ["conv1", "layer1.[0..1]", "layer2.[0..2]", "fc"]),
        (
            _each("layer1.0", "layer2.0", "layer1.1", "layer2.1"),
            RESNET,
            ["layer[1..2].[0..1]"],
        ),
        (
            _each("cell.0", "cell.1", times=2),
            _each("cell.0", "cell.1", times=3),
            ["cell.[0..1]#[0..1]"],
        ),
        ([("", 1)], _each("", times=2), [".#1"]),
        (_each("block_01", "block_02"), _each("block_01", "block_02"), None),
    ],
)
def test_calls_are_folded_into_few_patterns(
    chosen: list[Call], calls: list[Call], expected: list[str] | None
):
    if expected is None:  # padded numbers are text
        expected = [fqn for fqn, _ in chosen]
    assert tuple(expected) == fold_calls(chosen, calls)


_parts = st.sampled_from(["a", "b2", "h", "01", "x10y3", *map(str, range(12))])
_fqns = st.one_of(st.just(""), st.lists(_parts, min_size=1, max_size=3).map(".".join))


@st.composite
def _models(draw: st.DrawFn) -> tuple[list[Call], list[Call]]:
    """Draw all the calls of a model in the order they ran, and some of them."""
    fqns = draw(st.lists(_fqns, min_size=1, max_size=25, unique=True))
    calls = [call for fqn in fqns for call in _each(fqn, times=draw(st.integers(1, 5)))]
    chosen = [call for call in calls if draw(st.booleans())]
    return draw(st.permutations(calls)), draw(st.permutations(chosen))


@given(_models())
def test_folded_calls_expand_to_exactly_the_calls_chosen(
    model: tuple[list[Call], list[Call]],
):
    calls, chosen = model
    expanded = [
        call for p in fold_calls(chosen, calls) for call in expand_calls(p, calls)
    ]
    assert sorted(chosen) == sorted(expanded)  # each once


@given(_models())
def test_folding_depends_on_what_is_chosen_and_not_on_the_order(
    model: tuple[list[Call], list[Call]],
):
    calls, chosen = model
    folded = fold_calls(chosen, calls)
    assert folded == fold_calls(sorted(chosen) * 2, calls)
    assert len(folded) <= len(chosen)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 39))
def test_a_run_of_equal_blocks_is_one_pattern(num_blocks: int, times: int, first: int):
    calls = _each(*(f"m.{i}.mlp" for i in range(60)), times=times)
    last = min(first + num_blocks, 60) - 1
    chosen = _each(*(f"m.{i}.mlp" for i in range(first, last + 1)), times=times)
    number = f"[{first}..{last}]" if last > first else str(first)
    assert (f"m.{number}.mlp",) == fold_calls(chosen, calls)


@pytest.mark.parametrize("strange", [("haed", 0), ("head", 1), ("", 7)])
def test_folding_calls_that_did_not_run_is_refused(strange: Call):
    with pytest.raises(PlanError, match="cannot find the calls"):
        fold_calls([("head", 0), strange], GPT)


@pytest.mark.parametrize("fqn", ["a#1", "x[0..1]", "x]"])
def test_a_module_that_no_pattern_can_name_is_refused_only_when_chosen(fqn: str):
    calls = _each("a", "x0", "x1", fqn)
    assert fold_calls(_each("a"), calls) == ("a",)
    with pytest.raises(PlanError, match="cannot name the calls"):
        fold_calls(_each(fqn), calls)


def test_folding_a_large_model_takes_no_time_to_speak_of():
    calls = _each(*(f"layers.{i}.experts.{j}" for i in range(80) for j in range(128)))
    expected = ("layers.[0..79].experts.[0..127]",)
    assert expected == fold_calls(calls, calls)
    assert tuple(calls) == expand_calls(*expected, calls)


@pytest.mark.parametrize("call", GPT)
def test_the_name_of_a_call_means_that_call(call: Call):
    assert (call,) == expand_calls(call_name(*call), GPT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("attn.c_attn/addmm", OpName("attn.c_attn", "addmm")),
        ("./mul", OpName("", "mul")),
        ("mlp/addmm#1", OpName("mlp", "addmm", 1)),
        ("gates/split@2", OpName("gates", "split", 0, 2)),
        ("gates/split#3@0", OpName("gates", "split", 3, 0)),
        ("0/native_batch_norm", OpName("0", "native_batch_norm")),
        ("attn.attn_dropout/bernoulli_", OpName("attn.attn_dropout", "bernoulli_")),
        ("a/b#1.c/mylib.op", OpName("a/b#1.c", "mylib.op")),
    ],
)
def test_an_op_is_read_and_written_the_same(text: str, expected: OpName):
    assert expected == OpName.parse(text)
    assert text == str(expected)


def test_the_first_occurrence_may_be_spelt_out():
    assert OpName.parse("mlp/addmm") == OpName.parse("mlp/addmm#0")


def test_the_code_of_the_region_itself_has_the_empty_path():
    assert OpName.parse("./mul").path == ""
    assert OpName("", "mul") == OpName(".", "mul")


_op_names = st.builds(
    OpName,
    st.sampled_from(["", "mlp", "attn.c_attn", "0.1"]),
    st.sampled_from(["addmm", "mul_", "_softmax"]),
    st.integers(0, 99),
    st.none() | st.integers(0, 9),
)


@given(_op_names)
def test_every_op_name_survives_text_copies_and_processes(op: OpName):
    assert op == OpName.parse(str(op))
    assert op == copy.deepcopy(op) == pickle.loads(pickle.dumps(op))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "addmm",
        "/addmm",
        "mlp/",
        "mlp/addmm#",
        "mlp/addmm#x",
        "mlp/addmm#01",
        "mlp/addmm#-1",
        "mlp/addmm@",
        "mlp/addmm@0#1",
        "mlp/addmm #1",
        "mlp/addmm\n",
    ],
)
def test_what_is_no_op_name_is_refused_with_what_would_be(text: str):
    with pytest.raises(PlanError) as caught:
        OpName.parse(text)
    expected = (
        f"error: cannot read the op {text!r}\n"
        "  needed: PATH/NAME#k@m, where '#k' and '@m' may be left out\n"
        "  try:    mlp.c_fc/addmm, or ./addmm for the region's own code"
    )
    assert expected == str(caught.value)


def test_ops_are_counted_per_module_and_name_while_they_run():
    ran = [
        ("mlp", "addmm"),
        ("", "add"),
        ("mlp", "addmm"),
        ("attn", "addmm"),
        (".", "add"),
    ]
    expected = ["mlp/addmm", "./add", "mlp/addmm#1", "attn/addmm", "./add#1"]
    ops = OpCounter()
    assert expected == [str(ops.name(*op)) for op in ran]


def test_two_regions_count_on_their_own():
    def names(ops: OpCounter) -> Sequence[str]:
        return [str(ops.name("mlp", "addmm")) for _ in range(2)]

    assert names(OpCounter()) == names(OpCounter())


def test_more_calls_than_any_module_has_are_refused_at_once() -> None:
    with pytest.raises(PlanError, match="more than 1000000"):
        expand_modules("cell#[0..999999999]", ["cell"])
