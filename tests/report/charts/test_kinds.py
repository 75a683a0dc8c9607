"""The figures of steps, distributions, timelines, curves and predictions."""

from __future__ import annotations

import math

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.axes import CUT_NOTE, Axis
from scalelab.report.charts.column_charts import (
    MEASURED,
    MOST_SHOWN,
    PREDICTED,
    plot_curves,
    plot_efficiency,
    plot_fan,
    plot_rates,
    plot_speedup,
    trace_guides,
)
from scalelab.report.charts.step_times import (
    DRIFT,
    MEDIAN,
    OUTLIER,
    STEP,
    WARM_UP,
    plot_distribution,
    plot_steps,
    plot_timeline,
)
from tests.report.charts.figures import draw, list_layers, list_values


def test_the_ideal_is_straight_and_laws_end_where_they_were_fitted() -> None:
    rows = [{"series": "a", "ranks": n, "speedup": float(n) ** 0.9} for n in (1, 2, 4, 8)]
    chart = plot_speedup(rows=rows, laws={"law": math.sqrt}, reach=4)
    guided = list_layers(chart, "line")[0]["data"]["values"]
    assert max(one["ranks"] for one in guided if one["series"] == "ideal") == 8
    assert max(one["ranks"] for one in guided if one["series"] == "law") == 4
    assert all(one["speedup"] == pytest.approx(one["ranks"]) for one in guided if one["series"] == "ideal")
    assert list_layers(chart, "point")[0]["encoding"]["y"]["scale"]["type"] == "log"


def test_the_ideal_efficiency_is_one_whatever_the_ranks() -> None:
    rows = [{"series": "a", "ranks": n, "efficiency": 1 / n} for n in (1, 2)]
    chart = plot_efficiency(rows=rows, laws={"none": lambda _: 1.0})
    guided = list_layers(chart, "line")[0]["data"]["values"]
    assert {one["efficiency"] for one in guided if one["series"] == "ideal"} == {100.0}
    assert min(one["efficiency"] for one in guided if one["series"] == "none") == 50.0


def test_one_number_of_ranks_has_guides_of_one_point() -> None:
    assert trace_guides([2], {"ideal": float}, "speedup") == [{"series": "ideal", "ranks": 2, "speedup": 2.0}]


def test_launches_of_a_distribution_lie_on_lines_of_their_own() -> None:
    rows = [{"name": "a", "seconds": Estimate(value=0.1, low=0.09, high=0.11), "quarter": 0.095, "three_quarters": 0.2}]
    points = [{"name": "a", "seconds": 0.1, "launch": launch, "step": 3} for launch in (1, 2, 3)]
    failed = [{"name": "b", "status": "timed out"}]
    chart = plot_distribution(title="", rows=rows, points=points, failed=failed)
    places = [value["place"] for value in list_values(chart, "circle")]
    assert len(set(places)) == 3
    assert all(abs(place) < 0.5 for place in places)
    svg = draw(chart)
    assert "timed out" in svg
    assert ">b</text>" in svg


def test_warm_up_outliers_and_drift_have_shapes_of_their_own() -> None:
    kinds = (WARM_UP, STEP, OUTLIER)
    points = [{"place": n, "seconds": 0.1, "launch": 1, "step": n, "series": kind} for n, kind in enumerate(kinds)]
    medians = [{"place": n, "seconds": 0.1, "launch": 1, "series": MEDIAN} for n in (0, 2)]
    trend = [{"place": n, "seconds": 0.1 + n / 100, "launch": "all", "series": DRIFT} for n in (0, 2)]
    chart = plot_steps(title="", points=points, medians=medians, trend=trend)
    shape = list_layers(chart, "point")[0]["encoding"]["shape"]["scale"]
    assert shape["domain"] == [STEP, WARM_UP, OUTLIER, MEDIAN, DRIFT]
    assert len(set(shape["range"][:3])) == 3
    assert "<svg" in draw(chart)


def test_a_timeline_can_be_zoomed_and_tells_start_and_duration() -> None:
    rows = [
        {"series": lane, "lane": f"rank {rank} {lane}", "start": 0.001 * rank, "duration": 0.002, "name": "aten::mm"}
        for rank in (0, 1)
        for lane in ("communication", "compute")
    ]
    chart = plot_timeline(title="", rows=rows)
    (bars,) = list_layers(chart, "bar")
    zoom = next(param for param in bars["params"] if param["name"] == "zoom")
    assert zoom["bind"] == "scales"
    assert zoom["select"]["encodings"] == ["x"]
    assert bars["data"]["values"][-1]["duration_text"] == "2.00 ms"
    assert bars["data"]["values"][-1]["end"] == 3.0
    lanes = bars["encoding"]["y"]["scale"]["domain"]
    assert lanes == ["rank 0 communication", "rank 0 compute", "rank 1 communication", "rank 1 compute"]
    assert "<svg" in draw(chart)


def test_a_long_curve_marks_some_of_its_points_only() -> None:
    x, y = Axis(field="step", title="step", quantity="count"), Axis(field="loss", title="loss", quantity="loss")
    rows = [{"series": "train", "step": step, "loss": 2.0 - step / 1000} for step in range(1000)]
    chart = plot_curves(title="", x=x, y=y, rows=rows)
    assert len(list_values(chart, "line")) == 1000
    assert len(list_values(chart, "point")) <= MOST_SHOWN
    assert "<svg" in draw(chart)


def test_a_fan_has_a_band_for_what_is_predicted_and_none_for_what_was_measured() -> None:
    rows = [
        {"series": PREDICTED, "ranks": n, "seconds": Estimate(value=1 / n, low=0.5 / n, high=2 / n)} for n in (2, 8)
    ]
    rows += [{"series": MEASURED, "ranks": 1, "seconds": 1.0}]
    chart = plot_fan(title="", y=Axis(field="seconds", title="step", quantity="seconds", is_log=True), rows=rows)
    assert {value["series"] for value in list_values(chart, "area")} == {PREDICTED}
    assert "<svg" in draw(chart)


def test_bandwidth_is_drawn_over_many_sizes() -> None:
    rows = [{"series": "all-reduce", "payload_bytes": 4**n, "bandwidth": 1e3 * 3.0**n} for n in range(1, 14)]
    assert "1 MB/s" in draw(plot_rates(title="", rows=rows))


def test_names_with_controls_keep_their_rows_in_a_distribution() -> None:
    hostile = "a\u202eb\x07"
    rows = [{"name": hostile, "seconds": Estimate(value=0.1), "quarter": 0.09, "three_quarters": 0.2, "key": "k"}]
    points = [{"name": hostile, "seconds": 0.1, "launch": 1, "step": 0, "key": "k"}]
    chart = plot_distribution(title="", rows=rows, points=points, failed=[{"name": "c\x00", "status": "crashed"}])
    assert "<svg" in draw(chart)


def test_an_interval_of_a_median_ends_where_steps_still_show() -> None:
    wide = Estimate(value=0.1, low=0.0001, high=40.0)
    rows = [{"name": "a", "seconds": wide, "quarter": 0.09, "three_quarters": 0.2, "key": "k"}]
    points = [{"name": "a", "seconds": seconds, "launch": 1, "step": 0, "key": "k"} for seconds in (0.09, 0.3)]
    chart = plot_distribution(title="", rows=rows, points=points)
    reach = next(layer for layer in list_layers(chart, "rule") if layer["encoding"]["x"]["field"] == "seconds_low")
    assert reach["data"]["values"][0]["seconds_high"] == pytest.approx(750)
    assert CUT_NOTE in chart.caption


def test_numbers_that_lie_decades_apart_are_told_in_units_of_their_own() -> None:
    rows = [
        {"series": "a", "payload_bytes": size, "bandwidth": rate, "key": "a"}
        for size, rate in ((4, 927.0), (2**26, 2e8))
    ]
    first, last = list_values(plot_rates(title="", rows=rows), "point")
    assert (first["payload_bytes_text"], first["bandwidth_text"]) == ("4 B", "927 B/s")
    assert (last["payload_bytes_text"], last["bandwidth_text"]) == ("67.1 MB", "200 MB/s")
