"""One unit per axis, and ticks that can be read."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.axes import (
    CUT_NOTE,
    FEWEST_TICKS,
    MOST_TICKS,
    Axis,
    Plotted,
    choose_count_ticks,
    choose_log_ticks,
    convert_rows,
    cut_intervals,
    encode_axis,
    write_choice,
)
from scalelab.units import UNKNOWN

SECONDS = Axis(field="seconds", title="step", quantity="seconds")


def test_a_number_has_the_unit_and_the_text_of_its_axis() -> None:
    rows = [{"seconds": Estimate(value=0.413, low=0.411, high=0.415)}, {"seconds": None}]
    plotted = convert_rows(rows, (SECONDS,))
    known, unknown = plotted.values
    assert (known["seconds"], known["seconds_low"], known["seconds_high"]) == (413.0, 411.0, 415.0)
    assert known["seconds_text"] == "413.0 ± 2.0 ms"
    assert unknown == {"seconds": None, "seconds_text": UNKNOWN}
    assert plotted.titles["seconds"] == "step [ms]"


def test_stacks_choose_the_unit_of_their_parts() -> None:
    parts = [{"seconds": 3e-5}, {"seconds": 4e-5}, {"seconds": 0.05}]
    assert convert_rows(parts, (SECONDS,)).titles["seconds"] == "step [µs]"
    assert convert_rows(parts, (SECONDS,), scaled_as=[0.05]).titles["seconds"] == "step [ms]"


def test_a_wide_logarithmic_axis_has_labels_with_units_of_their_own() -> None:
    axis = Axis(field="size", title="message", quantity="bytes", is_log=True)
    plotted = convert_rows([{"size": 4}, {"size": 64_000_000}], (axis,))
    encoded = encode_axis(axis, plotted)
    assert plotted.titles["size"] == "message"
    assert all(f'"{label}"' in encoded["axis"]["labelExpr"] for label in ("10 B", "1 kB", "10 MB"))


def test_bandwidths_are_labelled_per_second() -> None:
    axis = Axis(field="rate", title="bus", quantity="bandwidth", is_log=True)
    encoded = encode_axis(axis, convert_rows([{"rate": 1e3}, {"rate": 1e9}], (axis,)))
    assert '"1 MB/s"' in encoded["axis"]["labelExpr"]


def test_measured_places_are_the_ticks() -> None:
    axis = Axis(field="ranks", title="ranks", quantity="count", ticks=(1, 2, 3), from_zero=False)
    encoded = encode_axis(axis, convert_rows([{"ranks": 1}, {"ranks": 3}], (axis,)))
    assert encoded["axis"]["values"] == [1, 2, 3]


@given(low=st.integers(0, 10**6), more=st.integers(0, 10**6))
def test_counts_have_whole_ticks_and_few(low: int, more: int) -> None:
    ticks = choose_count_ticks([low, low + more])
    assert all(isinstance(tick, int) for tick in ticks)
    assert len(ticks) <= MOST_TICKS + 2
    assert len({after - before for before, after in itertools.pairwise(ticks)}) <= 1


@given(low=st.floats(1e-6, 1e6), factor=st.floats(1.3, 1e6))
def test_a_logarithmic_axis_has_ticks_to_read_it_by(low: float, factor: float) -> None:
    ticks = choose_log_ticks(low, low * factor)
    assert len(ticks) >= FEWEST_TICKS
    assert ticks == sorted(set(ticks))
    assert all(low * 0.99 <= tick <= low * factor * 1.01 for tick in ticks)


def test_an_interval_that_leaves_no_room_is_cut_and_said_so() -> None:
    rows = [{"seconds": Estimate(value=0.01, low=-0.5, high=0.9)}, {"seconds": 0.02}]
    values, words = cut_intervals(convert_rows(rows, (SECONDS,)).values, SECONDS)
    assert words == CUT_NOTE
    assert values[0]["seconds_low"] == 0
    assert values[0]["seconds_high"] == pytest.approx(50)
    assert values[0]["seconds_text"].startswith("10 (−500 to 900)")  # the words keep the whole of it


def test_usual_intervals_stay_as_they_are() -> None:
    values = convert_rows([{"seconds": Estimate(value=0.01, low=0.009, high=0.011)}], (SECONDS,)).values
    assert cut_intervals(values, SECONDS) == (values, "")


def test_an_interval_that_reaches_an_ideal_is_seen_to_reach_it() -> None:
    speedup = Axis(field="speedup", title="speedup", quantity="ratio")
    values = convert_rows([{"speedup": Estimate(value=0.9, low=-0.5, high=9.0)}], (speedup,)).values
    ((cut,), _) = cut_intervals(values, speedup, [1.0, 8.0])
    assert (cut["speedup_low"], cut["speedup_high"]) == (0, 9)
    ((cut,), _) = cut_intervals(values, speedup)
    assert cut["speedup_high"] == pytest.approx(2.25)


@pytest.mark.parametrize("change", [-0.02, 0.0, 0.001])
def test_intervals_of_changes_are_whole_on_both_sides_of_zero(change: float) -> None:
    axis = Axis(field="change", title="change", quantity="accuracy", is_signed=True)
    values = convert_rows([{"change": Estimate(value=change, low=-0.08, high=0.07)}], (axis,)).values
    assert cut_intervals(values, axis) == (values, "")


def test_an_interval_ends_above_zero_where_an_axis_has_none() -> None:
    axis = Axis(field="seconds", title="step", quantity="seconds", is_log=True)
    values = convert_rows([{"seconds": Estimate(value=0.01, low=-0.5, high=0.02)}, {"seconds": 2.0}], (axis,)).values
    (cut, _), words = cut_intervals(values, axis)
    assert 0 < cut["seconds_low"] < cut["seconds"]
    assert words == CUT_NOTE


def test_no_accuracy_is_drawn_above_all_or_below_nothing() -> None:
    axis = Axis(field="accuracy", title="accuracy", quantity="accuracy")
    rows = [{"accuracy": Estimate(value=0.9, low=-0.2, high=1.7)}]
    ((value,), _) = cut_intervals(convert_rows(rows, (axis,)).values, axis)
    assert (value["accuracy_low"], value["accuracy_high"]) == (0, 100)


def test_an_axis_without_a_number_can_still_be_encoded() -> None:
    empty = Plotted(values=[], titles={"seconds": "step"})
    for is_log in (True, False):
        assert encode_axis(Axis(field="seconds", title="step", quantity="seconds", is_log=is_log), empty)


def test_names_in_labels_are_text_whatever_they_hold() -> None:
    written = write_choice([0, 1], ['<b>"', "b'"])
    assert written == 'datum.value < 0.5 ? "<b>\\"" : "b\'"'
