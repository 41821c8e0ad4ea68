"""Units: what goes in exactly, what comes out legibly, what is refused how."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckplan.errors import UnitError
from ckplan.units import (
    GIB,
    format_bytes,
    format_flops,
    format_percent,
    format_seconds,
    parse_budget,
    parse_bytes,
    parse_percent,
)

UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12GB", 12 * 10**9),
        ("12GiB", 12 * 2**30),
        ("12 GB", 12 * 10**9),
        (" 12\tgib ", 12 * 2**30),
        ("800MiB", 800 * 2**20),
        ("800 KB", 800_000),
        ("64", 64),
        ("64 B", 64),
        ("0", 0),
        ("1.5e9", 1_500_000_000),
        ("1e3kb", 1_000_000),
        (".5GB", 500_000_000),
        ("0.1GB", 100_000_000),
        ("0.3 TB", 300_000_000_000),
        ("1.1GiB", 1_181_116_006),
        ("1000000TB", 10**18),
    ],
)
def test_a_size_is_read_exactly_and_rounded_down(text: str, expected: int):
    assert expected == parse_bytes(text)


def test_whole_numbers_pass_through():
    assert [parse_bytes(size) for size in (0, 7, 10**18)] == [0, 7, 10**18]
    with pytest.raises(UnitError, match="too large"):
        parse_bytes(10**18 + 1)
    assert parse_budget(7, unplanned_peak_bytes=1) == 7


@given(st.integers(0, 10**5), st.sampled_from(sorted(UNITS)), st.booleans())
def test_a_whole_number_of_units_is_that_many_bytes(
    number: int, unit: str, lower: bool
):
    text = f"{number} {unit.lower() if lower else unit}"
    assert number * UNITS[unit] == parse_bytes(text)


@given(st.integers(0, 10**15))
def test_every_decimal_of_a_gigabyte_counts(num_bytes: int):
    whole, rest = divmod(num_bytes, 10**9)
    assert num_bytes == parse_bytes(f"{whole}.{rest:09}GB")


BAD_SIZES = [
    "",
    " ",
    "GB",
    "-1",
    "+1",
    "-1GB",
    "12 bananas",
    "12Gi",
    "12GiBs",
    "1,5GB",
    "1.GB",
    "1.2.3",
    "1/2",
    "0x10",
    "1_000",
    "1 2",
    "nan",
    "inf",
    "1e400",
    "1e9999999999",
    "9" * 5000,
    "2000000TB",
    "\N{ARABIC-INDIC DIGIT THREE}GB",
    "12\N{KELVIN SIGN}B",
]


@pytest.mark.parametrize("text", BAD_SIZES)
def test_what_is_no_size_is_refused_with_what_would_be(text: str):
    for noun, parse in (
        ("size", parse_bytes),
        ("budget", lambda text: parse_budget(text, unplanned_peak_bytes=1000)),
    ):
        with pytest.raises(UnitError) as caught:
            parse(text)
        assert f"cannot read the {noun} {text.strip()!r}: " in caught.value.what
        assert "B, kB, MB, GB, TB, KiB, MiB, GiB" in caught.value.needed
        assert "GB" in caught.value.hint or "GiB" in caught.value.hint


@pytest.mark.parametrize("size", [-1, True, None, math.nan, [1]])
def test_a_value_of_another_kind_is_refused_not_crashed_on(size: object):
    with pytest.raises(UnitError):
        parse_bytes(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("12 bananas", "unknown unit 'bananas'"),
        ("-1", "not a number with a unit"),
        ("1e400", "too large"),
        ("80%", "unknown unit '%'"),
    ],
)
def test_the_error_says_what_was_found(text: str, reason: str):
    with pytest.raises(UnitError) as caught:
        parse_bytes(text)
    assert f"cannot read the size {text!r}: {reason}" == caught.value.what


def test_a_misspelt_unit_brings_up_the_right_one():
    with pytest.raises(UnitError) as caught:
        parse_bytes("12Gi")
    expected = (
        "error: cannot read the size '12Gi': unknown unit 'Gi'\n"
        "  needed: a number from 0 to 1000000TB with "
        "B, kB, MB, GB, TB, KiB, MiB, GiB or TiB\n"
        "  try:    did you mean 'GiB'?"
    )
    assert expected == str(caught.value)


@pytest.mark.parametrize("unit", ["k", "K", "m", "M", "g", "G", "t", "T"])
def test_a_bare_prefix_is_refused_with_both_readings(unit: str):
    with pytest.raises(UnitError) as caught:
        parse_bytes(f"1.5 {unit}")
    big = unit.upper()
    assert (
        f"1.5{big}B (powers of 1000) or 1.5{big}iB (powers of 1024)"
        == caught.value.needed
    )
    assert 1.5 * UNITS[f"{big}iB"] == parse_bytes(f"1.5{big}iB")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80%", 800),
        ("80 %", 800),
        ("12.5%", 125),
        ("0.19%", 1),
        ("150%", 1501),
        ("12B", 12),
    ],
)
def test_a_budget_may_be_a_share_of_the_unplanned_peak(text: str, expected: int):
    assert expected == parse_budget(text, unplanned_peak_bytes=1001)


@pytest.mark.parametrize("budget", ["0%", "0.01%", "0", "0 GiB", "0.5B", 0])
def test_a_budget_of_nothing_is_refused(budget: str | int):
    with pytest.raises(UnitError) as caught:
        parse_budget(budget, unplanned_peak_bytes=1001)
    assert f"cannot plan for the budget {budget!r}: it is 0 bytes" == caught.value.what
    assert caught.value.needed == "more than 0 bytes (the unplanned peak is 1001 B)"


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (192, "192 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (5_452_595, "5.20 MiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**30, "1.00 GiB"),
        (1_717_986_918, "1.60 GiB"),
        (3 * 2**40, "3072.00 GiB"),
        (-1_717_986_918, "-1.60 GiB"),
    ],
)
def test_bytes_are_printed_in_gib_or_in_what_is_legible(num_bytes: int, expected: str):
    assert expected == format_bytes(num_bytes)


@given(st.integers(0, 10**15))
def test_printed_bytes_are_within_half_a_hundredth_of_a_unit(num_bytes: int):
    number, unit = format_bytes(num_bytes).split()
    assert abs(num_bytes - float(number) * UNITS[unit]) <= 0.00501 * UNITS[unit]
    assert unit == "GiB" or float(number) < 1024


@given(st.integers(GIB, 10**13))
def test_from_a_gib_on_everything_is_in_gib(num_bytes: int):
    assert format_bytes(num_bytes).endswith(" GiB")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (2e-10, "0.20 ns"),
        (61e-6, "61.0 us"),
        (353e-6, "353 us"),
        (999.6e-6, "1.00 ms"),
        (0.00999, "9.99 ms"),
        (0.009996, "10.0 ms"),
        (0.1, "100 ms"),
        (1.234, "1.23 s"),
        (12345.6, "12346 s"),
        (-0.002, "-2.00 ms"),
        (math.inf, "inf s"),
    ],
)
def test_seconds_are_printed_with_three_digits(seconds: float, expected: str):
    assert expected == format_seconds(seconds)


@pytest.mark.parametrize(
    ("num_flops", "expected"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (1000, "1.00 kFLOP"),
        (999_999, "1.00 MFLOP"),
        (1_234_000_000_000, "1.23 TFLOP"),
        (5 * 10**18, "5000 PFLOP"),
    ],
)
def test_flops_are_printed_with_three_digits(num_flops: int, expected: str):
    assert expected == format_flops(num_flops)


@pytest.mark.parametrize(
    ("fraction", "plain", "signed"),
    [
        (0.031, "3.1 %", "+3.1 %"),
        (-0.031, "-3.1 %", "-3.1 %"),
        (-0.0001, "0.0 %", "+0.0 %"),
        (1.5, "150.0 %", "+150.0 %"),
    ],
)
def test_percent_has_one_decimal_and_a_sign_on_request(
    fraction: float, plain: str, signed: str
):
    assert plain == format_percent(fraction)
    assert signed == format_percent(fraction, sign=True)


@pytest.mark.parametrize(
    ("text", "fraction"),
    [("5%", 0.05), ("5 %", 0.05), ("0%", 0), ("12.5%", 0.125), ("250%", 2.5)],
)
def test_an_overhead_is_read_as_a_fraction(text: str, fraction: float):
    assert parse_percent(text) == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["5", "0.05", "-5%", "%", "five%", "nan%", "inf%"])
def test_an_overhead_that_is_no_percentage_is_refused(text: str):
    with pytest.raises(UnitError, match="cannot read the overhead"):
        parse_percent(text)


@pytest.mark.parametrize(("said", "meant"), [("0.75", "75%"), (".8", "80%"), ("0", "")])
def test_a_share_without_its_sign_is_understood_and_not_taken(
    said: str, meant: str
) -> None:
    with pytest.raises(UnitError) as caught:
        parse_budget(said, 1000)
    assert caught.value.hint == f"did you mean '{meant}'?" or not meant
    assert ("frontier" in caught.value.hint) == (not meant)
