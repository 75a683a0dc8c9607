"""A number becomes text once, and reads the same everywhere."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.analysis.estimate import Estimate
from scalelab.checks import parse_bytes, parse_seconds
from scalelab.errors import UsageError
from scalelab.units import (
    GROUP_SEPARATOR,
    REST_HIDDEN,
    UNKNOWN,
    Quantity,
    Unit,
    choose_unit,
    format_bytes,
    format_count,
    format_duration,
    format_estimate,
    format_interval,
    format_known,
    format_points,
    format_quantity,
    format_seconds,
    format_share,
    format_value,
    list_some,
)

quantities = st.sampled_from([name for name in get_args(Quantity) if name != "text"])
magnitudes = st.floats(1e-6, 1e6)


def around(value: float, half_width: float) -> Estimate:
    return Estimate(value=value, low=value - half_width, high=value + half_width)


@st.composite
def draw_estimates(draw: st.DrawFn) -> Estimate:
    value = draw(magnitudes) * draw(st.sampled_from((1, -1)))
    return around(value, abs(value) * draw(st.floats(1e-3, 0.5)))


def format_column(quantity: Quantity, entries: list[Estimate | float | None]) -> list[str]:
    unit = choose_unit(quantity, entries)
    return [
        format_estimate(entry, unit) if isinstance(entry, Estimate) else format_value(entry, unit) for entry in entries
    ]


def count_decimals(number: str) -> int:
    return len(number.removesuffix(" %").partition(".")[2])


def test_a_column_of_times_has_one_unit_and_one_number_of_decimals() -> None:
    steps: list[Estimate | float | None] = [around(0.413, 0.002), around(0.2147, 0.0014)]
    assert choose_unit("seconds", steps).symbol == "ms"
    assert format_column("seconds", steps) == ["413.0 ± 2.0", "214.7 ± 1.4"]


def test_the_reference_row_has_no_interval_and_the_same_decimals() -> None:
    assert format_column("ratio", [1.0, around(1.9236, 0.0203)]) == ["1.00", "1.92 ± 0.02"]


def test_shares_are_whole_percents_unless_all_of_them_are_small() -> None:
    assert format_column("share", [1.0, 0.9618]) == ["100 %", "96 %"]
    assert format_column("share", [0.0, 0.031]) == ["0 %", "3 %"]
    assert format_column("share", [0.0, 0.018, -0.003]) == ["0.0 %", "1.8 %", "−0.3 %"]


def test_an_interval_of_a_share_is_in_percent_too() -> None:
    assert format_column("share", [around(0.9618, 0.004), -0.03]) == ["96.2 ± 0.4 %", "−3.0 %"]


def test_a_lopsided_interval_prints_its_longer_arm() -> None:
    assert format_quantity("seconds", Estimate(value=0.2147, low=0.2143, high=0.2271)) == "215 ± 12 ms"


def test_a_zero_with_an_interval_shows_the_interval() -> None:
    assert format_column("seconds", [around(0.0, 0.0002)]) == ["0 ± 200"]
    assert format_column("share", [around(0.0, 0.004)]) == ["0.0 ± 0.4 %"]


def test_a_tiny_interval_is_rounded_up_and_an_exact_one_is_zero() -> None:
    column = format_column("seconds", [around(0.413, 1e-9), around(0.413, 0.02), around(0.2, 0.03)])
    assert column[0] == "413.0 ± 0.1"
    assert format_column("ratio", [around(1.5, 0.0)]) == ["1.50 ± 0.00"]


def test_whole_numbers_without_a_unit_have_no_decimals() -> None:
    assert format_column("number", [3, 40]) == ["3", "40"]
    assert format_column("bytes", [1_000_000, 64_000_000]) == ["1", "64"]


def test_five_digits_are_grouped_and_four_are_not() -> None:
    assert format_quantity("count", 1234) == "1234"
    assert format_quantity("count", 1_234_567) == GROUP_SEPARATOR.join(("1", "234", "567"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"), (3e-9, "3.00 ns"), (2.5e-5, "25.0 µs"), (0.413, "413 ms"), (0.99999, "1.00 s"),
        (75.0, "75.0 s"), (200.0, "3.33 min"), (9000.0, "2.50 h"), (-0.2, "−200 ms"),
    ],
)  # fmt: skip
def test_a_time_has_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (64e6, "64 MB"), (2.147e9, "2.15 GB")],
)
def test_a_size_is_decimal(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.9618, "96 %"), (0.031, "3.1 %"), (0.04, "4.0 %"), (0.0, "0 %"), (-0.031, "−3.1 %"),
        (0.0999, "10 %"), (0.0005, "0.05 %"), (1.04, "104 %"),
    ],
)  # fmt: skip
def test_a_share_in_a_sentence_has_two_digits(share: float, text: str) -> None:
    assert format_share(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "< 1 s"), (45, "45 s"), (59.6, "1 min"), (80, "1 min 20 s"), (3599.7, "1 h"),
        (7500, "2 h 5 min"), (86399.9, "1 d"), (273600, "3 d 4 h"), (-1, UNKNOWN),
    ],
)  # fmt: skip
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_rate_has_a_prefix_and_a_ratio_none() -> None:
    assert format_quantity("rate", 154.96) == "155"
    assert format_quantity("rate", 2.5e6) == "2.50 M"
    assert [format_quantity("rate", value) for value in (99_900.0, 1e5, 1e6, 1e9, 1.25e9, 1e12, 3e12)] == [
        "99\u202f900", "100 k", "1.00 M", "1.00 G", "1.25 G", "1.00 T", "3.00 T",
    ]  # fmt: skip
    assert format_quantity("bandwidth", 2.5e9) == "2.50 GB/s"
    assert format_quantity("latency", 2.5e-5) == "25.0 µs"
    assert format_quantity("ratio", 1.9236) == "1.92"


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, -math.inf])
def test_unknown_is_a_dash_everywhere(unknown: float | None) -> None:
    for write in (format_seconds, format_bytes, format_share, format_duration):
        assert write(unknown) == UNKNOWN
    for quantity in get_args(Quantity):
        assert format_quantity(quantity, unknown) == UNKNOWN
    assert format_estimate(None, choose_unit("seconds", [])) == UNKNOWN


def test_an_infinite_interval_is_none() -> None:
    assert format_column("ratio", [Estimate(value=2.0, low=0.0, high=math.inf)]) == ["2.00"]


def test_what_rounds_to_zero_has_no_sign() -> None:
    assert format_column("share", [-0.001, 0.5]) == ["0 %", "50 %"]


@given(quantities, st.lists(draw_estimates() | st.floats() | st.none(), max_size=6))
def test_any_column_prints_without_nan_and_inf(quantity: Quantity, entries: list[Estimate | float | None]) -> None:
    for text in format_column(quantity, entries):
        assert text
        assert "nan" not in text
        assert "inf" not in text


@given(quantities, st.lists(draw_estimates() | magnitudes, min_size=1, max_size=8))
def test_all_numbers_of_a_column_have_the_same_decimals(
    quantity: Quantity, entries: list[Estimate | float | None]
) -> None:
    numbers = [number for text in format_column(quantity, entries) for number in text.split(" ± ")]
    assert len({count_decimals(number) for number in numbers}) == 1


@given(quantities, st.lists(draw_estimates(), min_size=1, max_size=8))
def test_an_interval_never_prints_as_zero(quantity: Quantity, entries: list[Estimate | float | None]) -> None:
    for text in format_column(quantity, entries):
        assert set(text.partition(" ± ")[2]) & set("123456789")


@given(st.sampled_from(["seconds", "ratio", "number"]), st.floats(1e-3, 9e3), st.floats(1e-3, 0.5))
def test_a_single_interval_shows_one_or_two_significant_digits(
    quantity: Quantity, value: float, relative: float
) -> None:
    (text,) = format_column(quantity, [around(value, value * relative)])
    width = text.partition(" ± ")[2]
    significant = width.replace(".", "").lstrip("0")
    assert 1 <= len(significant) <= 2 or (count_decimals(width) == 0 and len(significant) <= 4)


@given(st.floats(1e-9, 1e7))
def test_a_time_survives_being_written_and_read(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=6e-3)


@given(st.integers(0, 10**14))
def test_a_size_survives_being_written_and_read(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=6e-3)


@given(st.floats(1, 1e6))
def test_a_duration_survives_being_written_and_read(seconds: float) -> None:
    assert parse_seconds(format_duration(seconds)) == pytest.approx(seconds, rel=0.03, abs=0.51)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MB", 512_000_000), ("2GiB", 2**31), ("1.5G", 1_500_000_000), ("4096", 4096), ("64 kB", 64_000),
        ("1Ki", 1024), ("10b", 10), ("1.5tib", 3 * 2**39), (" 7 MB ", 7_000_000),
    ],
)  # fmt: skip
def test_a_size_is_read_in_decimal_and_in_binary_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("10min", 600),
        ("90", 90),
        ("1.5h", 5400),
        ("200ms", 0.2),
        ("2m", 120),
        ("1 min 20 s", 80),
    ],
)
def test_a_time_is_read_with_and_without_a_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "MB", "-1GB", "1e9", "nan", "inf", "12iB", "3 apples", "1,5G", "9" * 400])
def test_a_size_that_cannot_be_read_is_named_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(UsageError, match=r"512MB, 2GiB, 1\.5G") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["", "s", "-5s", "1e3", "nan", "10 parsecs", "1min 5", "5s,3s", "9" * 400])
def test_a_time_that_cannot_be_read_is_named_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(UsageError, match=r"30s, 10min, 1\.5h, 200ms or 90") as caught:
        parse_seconds(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [(1, "rank", "1 rank"), (2, "rank", "2 ranks"), (0, "launch", "0 launches"), (1200, "step", "1200 steps")],
)
def test_a_count_agrees_with_its_noun(number: int, noun: str, words: str) -> None:
    assert format_count(number, noun) == words


def test_a_long_list_says_how_much_it_leaves_out() -> None:
    assert list_some(["a", "b"], 2) == "a, b"
    assert list_some([1, 2, 3], 2) == "1, 2 and 1 more"
    assert list_some(range(9), 3, REST_HIDDEN) == "0, 1, 2 …"
    assert list_some([], 3) == ""


def test_points_have_a_sign() -> None:
    assert format_points(-0.0141) == "−1.41"
    assert format_points(0.02, 1) == "+2.0"


def test_an_interval_wider_than_its_number_says_its_ends() -> None:
    assert format_known("seconds", Estimate(value=0.04, low=0.02, high=0.09)) == "20.0 ms to 90.0 ms"
    assert format_known("seconds", Estimate(value=0.04, low=-0.01, high=0.09)) == "at most 90.0 ms"
    assert format_known("share", Estimate(value=0.4, low=0.2, high=1.3)) == "20 % to 100 %"
    assert format_known("share", Estimate(value=0.4, low=-0.2, high=1.3)) == "unknown", "every share is at most 100 %"
    assert format_known("seconds", Estimate(value=-0.4, low=-1.9, high=-0.01)) == "unknown"
    assert format_known("ratio", Estimate(value=4.0, low=3.5, high=4.5)) == "4.0 ± 0.5"
    assert format_known("ratio", Estimate(value=4.0)) == "4.00"


def test_the_ends_of_a_wide_and_lopsided_interval_stand_beside_its_number() -> None:
    ratio, wide = Unit(decimals=2), Estimate(value=0.002, low=0.001, high=7.704)
    assert format_estimate(wide, Unit(symbol="ms", factor=1e-3)) == "2 (1 to 7704)"
    assert format_quantity("seconds", wide) == "2 (1 to 7704) ms"
    assert format_estimate(Estimate(value=1.4, low=0.36, high=3.8), Unit()) == "1.4 (0.4 to 3.8)", (
        "0 would be no speedup"
    )
    assert format_estimate(Estimate(value=1.43, low=0.55, high=1.55), ratio) == "1.43 (0.55 to 1.55)"
    assert format_estimate(Estimate(value=0.57, low=0.25, high=1.03), ratio) == "0.57 (0.25 to 1.03)"
    assert format_estimate(Estimate(value=1.43, low=1.30, high=1.44), ratio) == "1.43 ± 0.13", "narrow: ± will do"
    assert format_estimate(Estimate(value=1.43, low=0.83, high=1.93), ratio) == "1.43 ± 0.60", "not lopsided enough"


def test_an_end_has_a_further_digit_only_where_it_would_read_as_a_limit() -> None:
    assert format_interval("ratio", Estimate(value=1.16, low=1.05, high=1.25)) == "1.16 (1.05 to 1.25)"
    assert format_interval("ratio", Estimate(value=1.02, low=1.002, high=1.04)) == "1.020 (1.002 to 1.040)"


def test_an_accuracy_has_no_more_digits_than_its_interval_leaves() -> None:
    assert format_quantity("accuracy", Estimate(value=0.4493, low=0.237, high=0.6615)) == "45 ± 21 %"
    assert format_quantity("accuracy", Estimate(value=0.54661, low=0.5461, high=0.5471)) == "54.66 ± 0.05 %"
    assert format_quantity("accuracy", 0.5466) == "54.66 %"


def test_a_wide_interval_that_is_even_keeps_its_sign() -> None:
    assert format_estimate(Estimate(value=0.1, low=-0.4, high=0.6), Unit(decimals=1)) == "0.1 ± 0.5"
    assert format_estimate(Estimate(value=2.0, low=1.9, high=2.5), Unit(decimals=1)) == "2.0 ± 0.5"


def test_a_number_without_an_interval_keeps_its_digits_beside_wide_ones():
    column = choose_unit("ratio", [Estimate(value=1.95), around(54.3, 13.0)])
    assert column.decimals == 0
    assert [format_estimate(Estimate(value=value), column) for value in (1.0, 1.95, 57.7)] == ["1", "1.95", "57.7"]
    assert format_estimate(around(54.3, 13.0), column) == "54 ± 13"
