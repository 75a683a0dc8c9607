"""Memory in pieces, forecast above measured."""

from __future__ import annotations

import pytest

from scalelab.report.charts.memory import OTHERS, join_small, plot_categories
from scalelab.report.charts.plot import Row
from tests.report.charts.figures import draw, list_texts, list_values


def make_piece(side: str, series: str, size: float, name: str = "ddp × 2") -> Row:
    return {"name": name, "side": side, "series": series, "memory_bytes": size}


PIECES = [
    make_piece(side, series, size)
    for side in ("forecast", "measured")
    for series, size in (("parameters", 4e6), ("activations", 2e6))
]
TOTALS: list[Row] = [
    {"name": "ddp × 2", "side": "forecast", "memory_bytes": 6e6, "status": ""},
    {"name": "ddp × 2", "side": "measured", "memory_bytes": 6e6, "status": ""},
    {"name": "single", "side": "measured", "memory_bytes": None, "status": "out of memory"},
]


def test_bars_are_named_with_their_whole_and_a_missing_one_says_why() -> None:
    chart = plot_categories(title="t", rows=PIECES, totals=TOTALS)
    assert chart is not None
    assert set(list_texts(chart)) == {"forecast 6 MB", "measured 6 MB", "measured: out of memory"}
    assert sum(value["memory_bytes"] for value in list_values(chart, "bar")) == pytest.approx(12)
    assert "out of memory" in draw(chart)


def test_one_bar_is_no_figure() -> None:
    assert plot_categories(title="t", rows=PIECES[:2], totals=TOTALS) is None


def test_many_categories_share_a_piece_and_nothing_is_lost() -> None:
    rows = [make_piece("measured", f"category {number}", 1.0 + number) for number in range(12)]
    joined = join_small(rows)
    assert len({row["series"] for row in joined}) == 8
    assert sum(float(str(row["memory_bytes"])) for row in joined) == pytest.approx(78)
    assert [row["memory_bytes"] for row in joined if row["series"] == OTHERS] == [15.0]


def test_few_categories_stay_as_they_are() -> None:
    assert join_small(PIECES) == PIECES
