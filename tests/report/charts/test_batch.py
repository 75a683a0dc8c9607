"""Figures against the batch, with what failed at their foot."""

from __future__ import annotations

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.batch import (
    describe_failures,
    leave_out_far,
    list_curve_batches,
    make_batch_axis,
    plot_against_batch,
    plot_search,
)
from scalelab.report.charts.plot import Axis, Row
from tests.report.charts.figures import draw, list_layers, list_texts, list_values

SECONDS = Axis(field="seconds", title="step", quantity="seconds")
ROWS: list[Row] = [
    {"batch": batch, "seconds": Estimate(value=0.001 * batch, low=0.0009 * batch, high=0.0011 * batch), "series": "m"}
    for batch in (1, 4, 16)
]
FAILED: list[Row] = [{"batch": 64, "status": "out of memory", "reason": "<b>no room</b>"}]


def test_failed_batches_are_crosses_at_the_foot_with_their_status() -> None:
    chart = plot_against_batch(title="t", x=make_batch_axis([1, 4, 16, 64]), y=SECONDS, rows=ROWS, failed=FAILED)
    assert chart is not None
    crosses = [layer for layer in list_layers(chart, "point") if layer["mark"].get("shape") == "cross"]
    assert [value["batch"] for layer in crosses for value in layer["data"]["values"]] == [64]
    assert list(list_texts(chart)) == ["out of memory"]
    svg = draw(chart)
    assert ">out of memory<" in svg
    assert "<b>" not in svg


def test_a_limit_and_a_knee_are_lines_with_names() -> None:
    chart = plot_against_batch(
        title="t",
        x=make_batch_axis([1, 4, 16]),
        y=SECONDS,
        rows=ROWS,
        levels=[{"seconds": 0.02, "label": "limit"}],
        knees=[{"batch": 8.5, "label": "95 % of the most"}],
    )
    assert chart is not None
    assert set(list_texts(chart)) == {"limit", "95 % of the most"}
    lines = [value for value in list_values(chart, "rule") if "label" in value]
    assert [(line.get("seconds"), line.get("batch")) for line in lines] == [(20, None), (None, 8.5)]
    draw(chart)


def test_one_point_is_no_figure() -> None:
    assert plot_against_batch(title="t", x=make_batch_axis([1]), y=SECONDS, rows=ROWS[:1], failed=FAILED) is None


def test_single_launches_far_above_are_told_and_not_drawn() -> None:
    raw: list[Row] = [{"batch": 4, "seconds": seconds, "series": "m"} for seconds in (0.004, 0.5)]
    assert leave_out_far(ROWS, raw, SECONDS) == raw[:1]
    chart = plot_against_batch(title="t", x=make_batch_axis([1, 4, 16]), y=SECONDS, rows=ROWS, raw=raw, caption="C.")
    assert chart is not None
    assert chart.caption == "C. Single launches far above, not drawn: 1."


def test_doubled_batches_are_logarithmic_with_a_tick_at_each() -> None:
    axis = make_batch_axis([1, 2, 4, 8])
    assert axis.is_log
    assert axis.ticks == (1, 2, 4, 8)
    assert not make_batch_axis([8, 10, 12]).is_log


def test_a_curve_reaches_from_the_smallest_batch_to_the_largest() -> None:
    batches = list_curve_batches([2, 4, 64])
    assert (batches[0], batches[-1]) == (2, pytest.approx(64))
    assert list_curve_batches([3]) == [3]


def test_a_caption_names_what_was_not_measured() -> None:
    assert describe_failures([]) == ""
    assert describe_failures(FAILED) == " Crosses at the bottom were not measured: batch 64 (out of memory)."


def test_a_search_is_drawn_probe_by_probe() -> None:
    rows: list[Row] = [
        {"number": 1, "batch": 4, "series": "ran", "ended": "ran"},
        {"number": 2, "batch": 9, "series": "did not fit", "ended": "out of memory: no room"},
    ]
    chart = plot_search(rows, largest=4)
    assert chart is not None
    assert "4." in chart.caption
    assert [value["ended"] for value in list_values(chart, "point")] == ["ran", "out of memory: no room"]
    draw(chart)
    assert plot_search(rows[:1], largest=4) is None
