"""Histograms and the ranges that were chosen for them."""

from __future__ import annotations

from dataclasses import replace

from scalelab.report.charts.amounts import (
    MOST_BINS,
    HistogramBins,
    align_bins,
    join_bins,
    list_bars,
    list_marks,
    plot_histogram,
)
from scalelab.report.charts.plot import Row
from tests.report.charts.figures import draw, list_texts, list_values

BINS = HistogramBins(low=-1.0, high=1.0, counts=(1, 0, 30, 9))


def test_every_bin_that_holds_something_is_a_bar() -> None:
    bars = list_bars("weights", BINS)
    assert [(bar["from"], bar["to"], bar["count"]) for bar in bars] == [(-1, -0.5, 1), (0, 0.5, 30), (0.5, 1, 9)]


def test_joined_bins_count_the_same() -> None:
    bins = HistogramBins(low=0.0, high=10.0, counts=tuple(range(1000)))
    joined = join_bins(bins)
    assert len(joined.counts) <= MOST_BINS
    assert sum(joined.counts) == sum(bins.counts)
    assert joined.high >= bins.high
    assert join_bins(BINS) == BINS


def test_series_of_one_chart_have_the_same_bins() -> None:
    """What two series share, as positive numbers before and after ReLU, has bars of the same height."""
    before = HistogramBins(low=-2.0, high=2.0, counts=(4, 6, 30, 10))
    after = HistogramBins(low=0.0, high=2.0, counts=(25, 15, 6, 4))
    aligned = align_bins({"before": before, "after": after})
    assert aligned["before"] == before
    assert aligned["after"].counts == (0, 0, 40, 10)
    wider = align_bins({"before": before, "after": replace(after, low=1.0, high=5.0, counts=(1, 2, 3, 4) * 2)})
    assert sum(wider["after"].counts) == 20
    assert wider["after"].high >= 5


def test_chosen_range_and_deviations_are_lines_with_names() -> None:
    places = [
        ("chosen", "range", -0.9),
        ("chosen", "range", 0.9),
        ("deviation", "mean + 3σ", 0.7),
        ("chosen", "", None),
    ]
    marks: list[Row] = [dict(mark) for mark in list_marks(places)]
    chart = plot_histogram(title="conv1", axis_title="weight", bins={"weights": BINS}, marks=marks)
    assert chart is not None
    assert [value["at"] for value in list_values(chart, "rule")] == [-0.9, 0.9, 0.7]
    assert set(list_texts(chart)) == {"range", "mean + 3σ"}
    assert "mean + 3σ" in draw(chart)


def test_nothing_counted_is_no_figure() -> None:
    assert plot_histogram(title="", axis_title="", bins={"w": HistogramBins(low=0.0, high=1.0, counts=(0, 0))}) is None
    assert plot_histogram(title="", axis_title="", bins={}) is None
