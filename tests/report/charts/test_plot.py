"""Lines and bars: what is drawn for whom, and how it can be told apart."""

from __future__ import annotations

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import choose_dashes, choose_shapes, plot_bars, plot_lines
from tests.report.charts.figures import draw, list_layers, list_texts, list_values

RANKS = Axis(field="ranks", title="ranks", quantity="count", from_zero=False)
SPEEDUP = Axis(field="speedup", title="speedup", quantity="ratio")
SECONDS = Axis(field="seconds", title="time", quantity="seconds")
NAME = Axis(field="name", title="", quantity="text")
ROWS = [
    {"series": "ddp", "ranks": n, "speedup": Estimate(value=0.9 * n, low=0.8 * n, high=n), "regime": regime, "key": "a"}
    for n, regime in ((1, "own"), (2, "own"), (4, "shared"))
]


def test_points_of_another_regime_are_not_joined() -> None:
    chart = plot_lines(title="", x=RANKS, y=SPEEDUP, rows=ROWS)
    (line,) = list_layers(chart, "line")
    assert line["encoding"]["detail"] == [{"field": "regime", "type": "nominal"}]
    assert "<svg" in draw(chart)


def test_a_tooltip_says_what_a_table_says() -> None:
    chart = plot_lines(title="", x=RANKS, y=SPEEDUP, rows=ROWS)
    (points,) = list_layers(chart, "point")
    assert [one["field"] for one in points["encoding"]["tooltip"]] == ["series", "ranks_text", "speedup_text"]
    assert points["data"]["values"][1]["speedup_text"] == "1.80 ± 0.20"


def test_what_failed_is_a_cross_with_its_status_at_the_foot() -> None:
    failed = [{"series": "ddp", "ranks": 8, "status": "out of memory"}]
    chart = plot_lines(title="", x=RANKS, y=SPEEDUP, rows=ROWS, failed=failed)
    cross = list_layers(chart, "point")[-1]
    assert cross["mark"]["shape"] == "cross"
    assert cross["encoding"]["y"]["value"] < chart.spec["height"]
    assert cross["data"]["values"][0]["status"] == "out of memory"
    assert "<svg" in draw(chart)


def test_one_series_has_no_legend_and_several_have_shapes_of_their_own() -> None:
    alone = plot_lines(title="", x=RANKS, y=SPEEDUP, rows=ROWS)
    assert list_layers(alone, "point")[0]["encoding"]["color"]["legend"] is None
    names = ["a", "b", "ideal", "law"]
    assert len(set(choose_shapes(names, ["a", "b"]))) == 3
    assert len(set(map(tuple, choose_dashes(names, ["a", "b"])))) == 4


def test_bars_without_series_are_drawn() -> None:
    rows = [{"name": name, "seconds": 0.1} for name in "ab"]
    chart = plot_bars(title="", x=SECONDS, y=NAME, rows=rows)
    assert draw(chart).count('aria-roledescription="bar"') == 2


def test_a_bar_that_is_not_there_says_why() -> None:
    chart = plot_bars(
        title="", x=SECONDS, y=NAME, rows=[{"name": "a", "seconds": 0.1}], failed=[{"name": "b", "status": "crashed"}]
    )
    assert "crashed" in list(list_texts(chart))
    assert "crashed" in draw(chart)


def test_parts_are_named_inside_where_there_is_room() -> None:
    rows = [
        {"name": "rank 0", "series": "compute", "seconds": 0.09},
        {"name": "rank 0", "series": "exposed comm", "seconds": 0.001},
    ]
    chart = plot_bars(title="", x=SECONDS, y=NAME, rows=rows)
    inside = draw(chart).split("role-legend")[0]
    assert ">compute</text>" in inside
    assert ">exposed comm</text>" not in inside


def test_parts_share_the_unit_of_their_stack() -> None:
    rows = [{"name": "a", "series": part, "seconds": time} for part, time in (("x", 2e-5), ("y", 3e-5), ("z", 0.05))]
    (bar,) = list_layers(plot_bars(title="", x=SECONDS, y=NAME, rows=rows), "bar")
    assert bar["encoding"]["x"]["title"] == "time [ms]"


def test_raw_points_and_guides_lie_behind_what_was_estimated() -> None:
    raw = [{"series": "ddp", "ranks": 2, "speedup": 1.7}]
    guides = [{"series": "ideal", "ranks": n, "speedup": float(n)} for n in (1, 4)]
    chart = plot_lines(title="", x=RANKS, y=SPEEDUP, rows=ROWS, raw=raw, guides=guides)
    kinds = [layer["mark"]["type"] for layer in chart.spec["layer"]]
    assert kinds == ["circle", "line", "line", "rule", "point"]
    assert [value["speedup"] for value in list_values(chart, "circle")] == [1.7]


def test_legends_name_series_as_their_rows_do_whatever_was_in_the_names() -> None:
    hostile = "a\u202e\x1b[31mb\n"
    lines = plot_lines(title="", x=RANKS, y=SPEEDUP, rows=[dict(row) | {"series": hostile} for row in ROWS])
    bars = plot_bars(title="", x=SECONDS, y=NAME, rows=[{"name": "n", "series": hostile, "seconds": 1.0}])
    for chart in (lines, bars):
        for layer in chart.spec["layer"]:
            domain = layer["encoding"]["color"]["scale"]["domain"] if "color" in layer["encoding"] else []
            assert {row["series"] for row in layer["data"]["values"]} == {r"a\u202eb"}
            assert set(domain) <= {r"a\u202eb"}


def test_bars_without_a_title_of_their_names_still_say_in_tooltips_what_a_name_is() -> None:
    chart = plot_bars(title="", x=SECONDS, y=NAME, rows=[{"name": "ddp", "series": "a", "seconds": 1.0}])
    (bar,) = list_layers(chart, "bar")
    assert bar["encoding"]["y"]["title"] is None
    assert {"field": "name_text", "type": "nominal", "title": "run"} in bar["encoding"]["tooltip"]
