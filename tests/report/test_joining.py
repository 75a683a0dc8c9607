"""Several runs in one report: letters, findings, and the same figure of all of them in one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scalelab.report.charts.column_charts import plot_rates, plot_speedup
from scalelab.report.charts.plot import Axis, plot_bars, plot_lines
from scalelab.report.charts.step_times import plot_steps
from scalelab.report.document import Chart, Document, Section
from scalelab.report.findings import MAIN, REASON, Caution, Finding
from scalelab.report.joining import NamedDocument, join_documents, letter_runs, overlay_charts
from tests.report.samples import as_findings

RANKS = Axis(field="ranks", title="ranks", quantity="count")
SPEEDUP = Axis(field="speedup", title="speedup", quantity="ratio")


def draw(most: int = 4, **axis: Any) -> Chart:
    rows = [{"ranks": n, "speedup": 0.9 * n, "series": "ddp", "key": f"ddp-{n}"} for n in (1, 2, most)]
    guides = [{"ranks": n, "speedup": n, "series": name} for name in ("ideal", "Amdahl") for n in (1, most)]
    return plot_lines(title="Speedup", x=RANKS, y=replace(SPEEDUP, **axis), rows=rows, guides=guides)


def list_series(chart: Chart) -> set[str]:
    return {row["series"] for layer in chart.spec["layer"] for row in layer["data"]["values"]}


def make_own(name: str, chart: Chart, study: str = "strong-scaling") -> NamedDocument:
    document = Document(
        title="Strong scaling",
        findings=as_findings((f"{name} scales.",)),
        sections=(Section(charts=(chart,)),),
        cautions=(Caution(message="noisy", next_step="more rounds"),),
        environment=(("torch", "2.13.0"), ("host", name)),
    )
    return NamedDocument(name=name, study=study, document=document)


def compare(after: str) -> Document:
    return Document(
        title="Comparison", setting=f"A a · B {after}", sections=(Section(),), findings=as_findings(("B is faster.",))
    )


def test_lines_of_runs_lie_over_each_other_with_one_ideal_and_no_fits() -> None:
    chart = overlay_charts({"A": draw(), "B": draw(8)})
    assert chart is not None
    assert list_series(chart) == {"A · ddp", "B · ddp", "ideal"}
    colours = {tuple(layer["encoding"]["color"]["scale"]["domain"]) for layer in chart.spec["layer"]}
    assert len(colours) == 1
    assert sum("params" in layer for layer in chart.spec["layer"]) == 1


def test_figures_with_other_axes_or_of_bars_are_not_laid_over_each_other() -> None:
    bars = plot_bars(
        title="t", x=SPEEDUP, y=Axis(field="name", title="n", quantity="text"), rows=[{"speedup": 1, "name": "a"}]
    )
    assert overlay_charts({"A": draw(), "B": draw(title="efficiency")}) is None
    assert overlay_charts({"A": bars, "B": bars}) is None
    sized = {**draw().spec["layer"][-1], "encoding": {"size": {"field": "series"}}}
    parts = replace(draw(), spec={**draw().spec, "layer": [*draw().spec["layer"], sized]})
    assert overlay_charts({"A": parts, "B": parts}) is None
    steps = [{"series": "step", "place": n, "seconds": 0.1, "launch": 1, "step": n, "key": "a"} for n in range(3)]
    one = plot_steps(title="t", points=steps, medians=[{**row, "series": "launch median"} for row in steps])
    assert overlay_charts({"A": one, "B": one}) is None
    assert overlay_charts({"A": draw()}) is None


def read_ticks(chart: Chart, channel: str = "x") -> list[tuple[list[float], str]]:
    axes = [layer["encoding"][channel].get("axis", {}) for layer in chart.spec["layer"]]
    return [(axis["values"], axis.get("labelExpr", "")) for axis in axes if "values" in axis]


def test_ticks_of_joined_axes_have_the_labels_that_were_written_for_them() -> None:
    few, many = (
        plot_speedup(rows=[{"series": "a", "ranks": n, "speedup": 1.0 * n, "key": "a"} for n in ranks], laws={})
        for ranks in ((1, 2, 8), (1, 4, 16))
    )
    for charts in ({"A": few, "B": many}, {"A": many, "B": few}):
        overlaid = overlay_charts(charts)
        assert overlaid is not None
        assert all(found == read_ticks(many)[0] for found in read_ticks(overlaid))


def test_numbers_in_different_units_are_not_laid_over_each_other_though_axes_have_no_unit() -> None:
    small, large = (
        plot_rates(
            title="t",
            rows=[{"series": "a", "payload_bytes": size, "bandwidth": 1e9, "key": "a"} for size in sizes],
        )
        for sizes in ((4, 64, 2**20), (4, 2**24, 2**30))
    )
    assert overlay_charts({"A": small, "B": small}) is not None
    assert overlay_charts({"A": small, "B": large}) is None


def test_two_runs_are_compared_first_then_overlaid_then_shown_one_by_one() -> None:
    joined = join_documents([make_own("a", draw()), make_own("b", draw())], [compare("b")])
    assert joined.summary == ("B is faster.",)
    headings = [section.heading for section in joined.sections]
    assert headings == ["Step times side by side", "All runs in one figure", "A: a", "A: Results", "B: b", "B: Results"]
    assert [caution.message for caution in joined.cautions] == ["A: noisy", "B: noisy"]
    assert joined.environment == (("torch", "2.13.0"), ("A: host", "a"), ("B: host", "b"))


def test_of_three_runs_every_finding_says_who_b_is() -> None:
    own = [make_own(name, draw()) for name in "abc"]
    joined = join_documents(own, [compare("b"), compare("c")])
    assert joined.summary == ("B is faster. (B: b)", "B is faster. (B: c)")
    assert joined.setting == "A a · B b · C c"
    assert letter_runs(own * 10)[-1] == "D2"


def test_what_differs_is_said_first() -> None:
    slower = Finding(kind="verdict", text="ddp: B is slower.", weight=MAIN)
    same = replace(slower, weight=REASON)
    both = replace(compare("b"), findings=(replace(same, text="plain loop: no difference."), slower))
    joined = join_documents([make_own("a", draw()), make_own("b", draw())], [both])
    assert joined.summary[0] == "ddp: B is slower."


def test_runs_of_different_studies_share_no_figure() -> None:
    own = [make_own("a", draw()), make_own("b", draw(), "weak-scaling")]
    assert "All runs in one figure" not in [section.heading for section in join_documents(own, []).sections]
