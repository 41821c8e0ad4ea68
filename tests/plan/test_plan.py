"""Plan files: what they look like, that reading is the reverse, what is refused how."""

import copy
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckplan.errors import CkplanError, PlanError
from ckplan.plan.file import dumps, load, loads, save
from ckplan.plan.names import OpName
from ckplan.plan.plan import (
    BOUNDS,
    Plan,
    PlannedRegion,
    Prediction,
    differences,
    plan_fingerprint,
)


def _ops(*names: str) -> tuple[OpName, ...]:
    return tuple(map(OpName.parse, names))


PLAN = Plan(
    model="GPT2LMHeadModel",
    fingerprint={
        "torch": "2.13.0",
        "device": "cpu",
        "batch": {"input_ids": "int64[8,256]", "0": "1.10"},
        "parameters": "82cbe8ad50cdbdad",
    },
    budget_bytes=629145600,
    predicted=Prediction(611319808, "backward of h.11", 0.0311, 1718226944),
    bound={"any_schedule": 0.029, "this_plan_space": 0.0},
    regions=(
        PlannedRegion("h.[0..7]", save=_ops("attn.c_attn/addmm", "mlp/gelu#1@0")),
        PlannedRegion("1.10", by="rerun"),
        PlannedRegion("cell#[0..15]", save=_ops(*(f"gate.{i}/addmm" for i in "01234"))),
    ),
)
TEXT = """\
ckplan: 1
model: GPT2LMHeadModel
fingerprint:
  torch: 2.13.0
  device: cpu
  batch: {input_ids: 'int64[8,256]', '0': '1.10'}
  parameters: 82cbe8ad50cdbdad
budget_bytes: 629145600
predicted:
  peak_bytes: 611319808
  peak_at: backward of h.11
  overhead: 0.0311
  unplanned_peak_bytes: 1718226944
bound: {any_schedule: 0.029, this_plan_space: 0.0}
regions:
  - calls: h.[0..7]
    by: program
    save: [attn.c_attn/addmm, mlp/gelu#1@0]
  - calls: '1.10'
    by: rerun
  - calls: cell#[0..15]
    by: program
    save: [gate.0/addmm, gate.1/addmm, gate.2/addmm, gate.3/addmm, gate.4/addmm]
"""


# -- writing -------------------------------------------------------------------------


def test_a_plan_is_written_like_this():
    assert dumps(PLAN) == TEXT


def test_a_plan_without_anything_is_two_lines():
    assert dumps(Plan()) == "ckplan: 1\nregions: []\n"


def test_lines_are_used_to_column_88_and_not_beyond():
    def text(last: str) -> str:
        ops = _ops(*(f"gate.{i}/addmm" for i in "0123"), f"{last}/addmm")
        return dumps(Plan(regions=(PlannedRegion("cell", save=ops),)))

    assert max(map(len, text("x" * 14).splitlines())) == 88
    assert "    save:\n      - gate.0/addmm\n" in text("x" * 15)


def test_overheads_have_four_decimals():
    predicted = Prediction(1, "here", 0.123456, 2)
    plan = Plan(predicted=predicted, bound={"any_schedule": 0.00004})
    assert predicted.overhead == 0.1235
    assert plan.bound == {"any_schedule": 0.0}
    assert "overhead: 0.1235" in dumps(plan)


def test_names_that_look_like_something_else_are_quoted_for_other_readers():
    regions = tuple(map(PlannedRegion, ("1.10", "true", "null", "0x1", "0")))
    text = dumps(Plan(regions=regions))
    assert all(f"calls: '{region.calls}'\n" in text for region in regions)


def test_only_programs_save():
    with pytest.raises(PlanError, match="save needs by: program"):
        PlannedRegion("h.0", by="rerun", save=_ops("mlp/gelu"))
    with pytest.raises(PlanError, match="did you mean 'rerun'"):
        PlannedRegion("h.0", by="re-run")


# -- reading what was written --------------------------------------------------------


def test_a_written_plan_reads_back():
    assert loads(TEXT, "plan.yaml") == PLAN


_words = st.text(max_size=12) | st.sampled_from(["~", "1.10", "- a", "a: b", "#", "*a"])
_op_names = st.builds(
    OpName,
    st.from_regex(r"[a-z0-9_.]{1,9}", fullmatch=True) | st.just(""),
    st.from_regex(r"[a-z_][a-z0-9_:-]{0,9}", fullmatch=True),
    st.integers(0, 11),
    st.none() | st.integers(0, 3),
)
_regions = st.builds(
    PlannedRegion, _words, save=st.lists(_op_names, max_size=9).map(tuple)
) | st.builds(PlannedRegion, _words, by=st.just("rerun"))
_ends = st.sampled_from(["h.0", "cell#3", ".", "1.10", "a.b.2#0"])
_regions |= st.builds(PlannedRegion, st.just(""), run=st.tuples(_ends, _ends))
_fingerprints = st.fixed_dictionaries(
    {},
    optional={
        "torch": _words,
        "device": _words,
        "batch": st.dictionaries(_words, _words, max_size=4),
        "parameters": _words,
    },
)
_bytes = st.integers(0, 10**18 - 1)
_overheads = st.floats(allow_nan=False, allow_infinity=False)
_plans = st.builds(
    Plan,
    model=_words,
    fingerprint=_fingerprints,
    budget_bytes=st.none() | _bytes,
    predicted=st.none() | st.builds(Prediction, _bytes, _words, _overheads, _bytes),
    bound=st.dictionaries(st.sampled_from(BOUNDS), _overheads),
    regions=st.lists(_regions, max_size=4).map(tuple),
)


@given(_plans)
def test_reading_is_the_reverse_of_writing(plan: Plan):
    text = dumps(plan)
    again = loads(text, "plan.yaml")
    assert again == plan
    assert dumps(again) == text


@given(st.text())
def test_any_text_is_a_plan_or_a_plan_error(text: str):
    try:
        loads(text, "plan.yaml")
    except PlanError as error:
        assert error.what.startswith("plan.yaml, line ")


def test_a_plan_survives_copies_and_pickles():
    plan = loads(TEXT, "plan.yaml")
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan


def test_files_are_written_and_read(tmp_path: Path):
    path = tmp_path / "plans" / "plan.yaml"
    save(PLAN, path, force=False)
    assert path.read_text() == TEXT
    assert load(path) == load(str(path)) == PLAN
    with pytest.raises(CkplanError, match="already exists"):
        save(Plan(), path, force=False)
    save(Plan(), path, force=True)
    assert load(path) == Plan()


# -- reading what people write -------------------------------------------------------


def test_a_plan_by_hand_needs_a_version_and_regions():
    text = """
    # The first two blocks again.
    ckplan: 1
    budget_bytes: 12GiB
    regions:
    - calls: h.[0..1]
    - by: "program"
      calls: '.'
      save:
      - ./addmm
    """
    plan = loads(text, "plan.yaml")
    regions = (PlannedRegion("h.[0..1]"), PlannedRegion(".", save=_ops("./addmm")))
    assert plan == Plan(budget_bytes=12 * 2**30, regions=regions)


@pytest.mark.parametrize("name", ["1.10", "1", "0x1", "yes", "null", "1e3", "12:30:45"])
def test_scalars_are_names_and_not_numbers(name: str):
    text = f"ckplan: 1\nmodel: {name}\nregions: [calls: {name}]"
    plan = loads(text, "plan.yaml")
    assert (plan.model, plan.regions[0].calls) == (name, name)


def test_regions_remember_where_they_were_written():
    regions = loads(TEXT.replace("[attn", "\n      [attn"), "plan.yaml").regions
    assert regions[0].where == ("plan.yaml, line 16", *["plan.yaml, line 19"] * 2)
    assert regions[1].where == ("plan.yaml, line 20",)


def _region(text: str) -> str:
    return f"ckplan: 1\nregions:\n  - calls: h.0\n    {text}\n"


def _top(text: str) -> str:
    return f"ckplan: 1\nregions: []\n{text}\n"


@pytest.mark.parametrize(
    ("text", "line", "found", "needed", "hint"),
    [
        # not YAML
        ("", 1, "the plan is empty", "YAML that holds the plan", "`ckplan solve`"),
        ("# nothing\n\n", 1, "the plan is empty", "YAML that holds the plan", ""),
        ("ckplan: 1\nregions: [\n", 3, "cannot read the plan: ", "YAML", ""),
        ("ckplan: 1\n\tregions: []", 2, "'\\t' that cannot start", "YAML", "spaces"),
        ("ckplan: 1\n\n model: \a", 3, "a character that is not", "YAML", ""),
        (_top("--- \nckplan: 1"), 3, "another document", "YAML", ""),
        (_top("bound: {any: x[1]}"), 3, "but got '['", "YAML", '"int64[8,256]"'),
        # YAML, but more than a plan needs
        ("ckplan: !!int 1", 1, "found the tag", "without tags", ""),
        ("!!python/object/apply:exit [3]", 1, "found the tag", "without tags", ""),
        ("ckplan: &x 1\nregions: *x", 2, "found the alias '*x'", "aliases (*x)", ""),
        ("[" * 99, 1, "more than 64 levels", "YAML", ""),
        # another version
        ("ckplan: 2\nnew: 1", 1, "is of format '2'", "ckplan: 1", "`ckplan solve`"),
        ("ckplan: 1.0\nregions: []", 1, "is of format '1.0'", "ckplan: 1", ""),
        # keys
        ("regions: []", 1, "missing key 'ckplan'", "ckplan, regions", "ckplan: 1"),
        ("\nckplan: 1", 2, "missing key 'regions'", "ckplan, regions", "[{calls: "),
        ("ckpaln: 1", 1, "unknown key 'ckpaln' in the plan", "", "mean 'ckplan'?"),
        (_top("budjet_bytes: 1"), 3, "unknown key", "model, ", "mean 'budget_bytes'?"),
        (_top("xyz: 1"), 3, "unknown key 'xyz'", "one of ckplan, ", "leave 'xyz' out"),
        (_top("offload: []"), 3, "unknown key 'offload' in the plan", "", ""),
        (_top("model: a\nmodel: b"), 4, "'model' comes twice, first in line 3", "", ""),
        (_top("<<: {model: a}"), 3, "unknown key '<<'", "", ""),
        (_top("? [a]\n: b"), 3, "a key is a list", "a single value", ""),
        (
            _region("sav: [a/b]"),
            4,
            "unknown key 'sav' in a region",
            "calls, run, by, save",
            "",
        ),
        (_region("by: rerun\n    by: rerun"), 5, "first in line 4", "once", "remove"),
        ("ckplan: 1\nregions:\n  - by: rerun", 3, "it has neither", "calls", ""),
        (_top("fingerprint: {troch: 2}"), 3, "unknown key 'troch' in", "", "'torch'?"),
        (_top("bound: {\n any: 1}"), 4, "unknown key 'any'", "any_schedule, this", ""),
        (_top("predicted: {}"), 3, "missing key 'peak_bytes'", "peak_at, ", ""),
        (_region("offload: {a/b: host}"), 4, "'offload' is a mapping", "a list", "["),
        (_region("offload: [ab]"), 4, "cannot read the op 'ab'", "PATH/NAME", ""),
        (
            _region("offload: [a/b]\n    by: rerun"),
            3,
            "offload needs by: program",
            "no offload",
            "",
        ),
        (
            _region("regions: [{calls: b, offload: [a/b]}]"),
            3,
            "cannot nest 'b'",
            "no encode or offload",
            "outermost",
        ),
        (_region("encode: {a/b: bit}"), 4, "as 'bit'", "bits, int16", "mean 'bits'?"),
        (_region("encode: {ab: bits}"), 4, "cannot read the op 'ab'", "PATH/NAME", ""),
        (_region("encode: [a/b]"), 4, "'encode' is a list", "a mapping", "encode: {"),
        (
            _region("encode: {a/b: bits}\n    by: rerun"),
            3,
            "encode needs by: program",
            "no encode",
            "",
        ),
        (_region("regions: a"), 4, "'regions' is a single", "a list", "[{calls: "),
        (_region("regions: [{}]"), 4, "it has neither", "calls (one region each)", ""),
        (_region("regions: [{calls: a, by: rerun}]"), 3, "cannot nest 'a'", "", ""),
        (
            "ckplan: 1\nregions: " + "[{calls: a, regions: " * 17 + "[]" + "}]" * 17,
            2,
            "too deeply",
            "at most 16 levels",
            "",
        ),
        (
            "ckplan: 1\nregions: [offload: [a/b]]",
            2,
            "it has neither",
            "calls",
            "",
        ),
        ("ckplan: 1\nregions: [run: [a, b, c]]", 2, "it has 3 calls", "two", "run: ["),
        ("ckplan: 1\nregions: [run: a]", 2, "'run' is a single value", "a list", "run"),
        (
            "ckplan: 1\nregions: [run: ['h.[0..1]', b]]",
            2,
            "cannot read the call 'h.[0..1]'",
            "one call",
            "run: [",
        ),
        (
            "ckplan: 1\nregions: [{calls: a, run: [a, b]}]",
            2,
            "it has both 'calls' and 'run'",
            "calls (one region each)",
            "",
        ),
        (
            "ckplan: 1\nregions: [{run: [a, b], by: rerun}]",
            2,
            "a run needs by: program",
            "",
            "",
        ),
        # types
        ("- ckplan: 1", 1, "the plan is a list", "a mapping", ""),
        ("ckplan", 1, "the plan is a single value", "a mapping", ""),
        ("ckplan: 1\nregions:\n", 2, "'regions' is empty", "a list", "regions: ["),
        ("ckplan: 1\nregions: {}", 2, "'regions' is a mapping", "a list", "regions: ["),
        ("ckplan: 1\nregions:\n- h.0", 3, "a region is a single", "a mapping", "calls"),
        ("ckplan: 1\nregions: [calls: [a]]", 2, "'calls' is a list", "a single", "h.["),
        (_region("save: mlp/gelu"), 4, "'save' is a single value", "a list", "save: ["),
        (_region("save:\n    - [a/b]"), 5, "an op is a list", "a single value", ""),
        (_region("save: [a/b,\n      ab]"), 5, "the op 'ab'", "PATH/NAME", ""),
        (
            _region("by: rerunn"),
            4,
            "by 'rerunn'",
            "by: program or by: rerun",
            "'rerun'",
        ),
        (_region("by: rerun\n    save: [a/b]"), 3, "save needs by: program", "", ""),
        (_top("model:"), 3, "'model' is empty", "a single value", "leave it out"),
        (_top("budget_bytes: 12g"), 3, "the size '12g'", "12GiB", "12GiB"),
        (_top("budget_bytes: [1]"), 3, "'budget_bytes' is a list", "", "12GiB"),
        (_top("bound: {any_schedule: .nan}"), 3, "'.nan'", "a fraction", ""),
        (_top("bound: {any_schedule: inf}"), 3, "'inf'", "a fraction", ""),
        (
            _top("fingerprint: {batch: int64}"),
            3,
            "'batch' is a single",
            "",
            "{input_ids",
        ),
        (_top("fingerprint: {batch: {x: [1]}}"), 3, "'x' is a list", "", ""),
    ],
)
def test_what_is_not_a_plan_is_refused(
    text: str, line: int, found: str, needed: str, hint: str
):
    with pytest.raises(PlanError) as caught:
        loads(text, "my plan.yaml")
    error = caught.value
    assert error.what.startswith(f"my plan.yaml, line {line}: ")
    assert found in error.what
    assert needed in error.needed
    assert hint in error.hint


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("peak_bytes", "1GiB", "whole number of bytes"),
        ("peak_bytes", "-1", "whole number of bytes"),
        ("peak_bytes", "1.5", "whole number of bytes"),
        ("unplanned_peak_bytes", "9" * 5000, "whole number of bytes"),
        ("overhead", "3%", "0.031 for 3.1 %"),
        ("overhead", "1e999", "0.031 for 3.1 %"),
    ],
)
def test_predictions_are_plain_numbers(key: str, value: str, needed: str):
    keys = ["peak_bytes", "peak_at", "overhead", "unplanned_peak_bytes"]
    lines = "\n".join(f"  {k}: {value if k == key else 1}" for k in keys)
    with pytest.raises(PlanError) as caught:
        loads(_top(f"predicted:\n{lines}"), "plan.yaml")
    assert f"cannot read the number '{value}'" in caught.value.what
    assert needed in caught.value.needed


@pytest.mark.serial
def test_a_small_text_cannot_become_a_huge_plan():
    bomb = "\n".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]" for i in range(1, 30))
    started = time.perf_counter()
    with pytest.raises(PlanError, match="alias"):
        loads(f"a0: &a0 [x]\n{bomb}", "plan.yaml")
    assert time.perf_counter() - started < 1


def test_nothing_in_a_plan_is_executed(tmp_path: Path):
    path = tmp_path / "proof"
    text = f"ckplan: !!python/object/apply:pathlib.Path.touch ['{path}']"
    with pytest.raises(PlanError, match="tag"):
        loads(text, "plan.yaml")
    assert not path.exists()


def test_errors_of_files_name_the_file(tmp_path: Path):
    path = tmp_path / "plan.yaml"
    with pytest.raises(CkplanError, match="cannot read the plan"):
        load(path)
    path.write_bytes(b"ckplan: 1\nmodel: \xff\n")
    with pytest.raises(PlanError, match="YAML in UTF-8") as caught:
        load(path)
    assert caught.value.what.startswith(f"{path}, line 2: ")
    path.write_text("ckplan: 1\nregoins: []\n")
    with pytest.raises(PlanError, match="did you mean 'regions'") as caught:
        load(path)
    assert caught.value.what.startswith(f"{path}, line 2: ")


@pytest.mark.parametrize("text", ["\ufeff" + TEXT, TEXT.replace("\n", "\r\n")])
def test_files_of_other_editors_are_read(tmp_path: Path, text: str):
    path = tmp_path / "plan.yaml"
    path.write_bytes(text.encode())
    assert load(path) == PLAN


# -- fingerprints --------------------------------------------------------------------

FINGERPRINT: dict[str, Any] = {
    "torch": "2.13.0",
    "device": "cpu",
    "batch": {"input_ids": "int64[8,256]", "labels": "int64[8,256]"},
    "parameters": {"wte.weight": "float32[50257,384]", "h.0.weight": "float32[4]"},
}


def test_a_plan_remembers_parameters_by_a_digest():
    found = plan_fingerprint({**FINGERPRINT, "other": "left out"})
    assert [*found] == ["torch", "device", "batch", "parameters"]
    assert {**found, "parameters": FINGERPRINT["parameters"]} == FINGERPRINT
    assert len(found["parameters"]) == 16
    assert int(found["parameters"], 16)
    assert loads(dumps(Plan(fingerprint=found)), "plan.yaml").fingerprint == found


def test_the_digest_depends_on_names_and_shapes_and_not_on_order():
    def digest(parameters: dict[str, str]) -> str:
        return plan_fingerprint({"parameters": parameters})["parameters"]

    parameters = FINGERPRINT["parameters"]
    assert digest(parameters) == digest(dict(reversed(parameters.items())))
    assert digest(parameters) != digest({**parameters, "h.0.weight": "float32[5]"})
    assert digest(parameters) != digest({"wte.weight": "float32[50257,384]"})


def test_differences_name_the_field_and_both_values():
    plan = plan_fingerprint(FINGERPRINT)
    assert differences(plan, plan) == ()
    batch = {"input_ids": "int64[16,256]", "mask": "bool[16,256]"}
    other = {**plan, "torch": "2.12.0", "batch": batch, "parameters": "0" * 16}
    assert differences(plan, other) == (
        "torch: plan 2.13.0, here 2.12.0",
        "batch.input_ids: plan int64[8,256], here int64[16,256]",
        "batch.labels: plan int64[8,256], here nothing",
        f"parameters: plan {plan['parameters']}, here {'0' * 16}",
    )


def test_what_only_one_side_knows_is_no_difference():
    plan = plan_fingerprint(FINGERPRINT)
    assert differences({}, plan) == ()
    assert differences(plan, {}) == ()
    assert differences({"batch": {}}, plan) == ()


def test_a_plan_says_how_often_a_step_runs_the_model() -> None:
    plan = Plan(regions=(), fingerprint={"forwards": 3})
    assert loads(dumps(plan), "plan.yaml").fingerprint == {"forwards": 3}
    for wrong in ("0", "many", "-1"):
        text = f"ckplan: 1\nfingerprint: {{forwards: {wrong}}}\nregions: []\n"
        with pytest.raises(PlanError, match=f"cannot read the number '{wrong}'"):
            loads(text, "plan.yaml")
