"""Studies that vary one thing: what the class does for all of them, and the charts of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.answers.comparison import draw_comparison
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.charts.column_charts import draw_columns
from scalelab.report.document import Chart, Column, Document, Table
from scalelab.report.findings import Finding
from scalelab.report.tables import Field
from scalelab.studies.compile import Compile, Payoff, draw_payoffs
from scalelab.studies.dimensions import Dimensions
from scalelab.studies.dtypes import Dtypes
from scalelab.studies.loader_workers import LoaderWorkers
from scalelab.studies.model_size import ModelSize
from scalelab.studies.optimizers import Optimizers
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Configuration
from scalelab.studies.shared.sweep import Sweep, SweepStudy, name_fastest, relative_column, step_column
from scalelab.studies.throughput import Throughput
from tests.report.charts.figures import draw, list_layers, list_texts, list_values
from tests.report.samples import make_row
from tests.studies.answers import find_row
from tests.studies.sweeps import FEW, SMALL_TRANSFORMER, Change, run

MLP = Job(workload="mlp", device="cpu", threads_per_rank=1)


def vary(trial: Trial) -> float:
    """A step that differs from launch to launch."""
    return 0.1 + 0.01 * (trial.round % 3)


def list_charts(document: Document) -> dict[str, Chart]:
    return {chart.title: chart for section in document.sections for chart in section.charts}


def fail(is_failed: Callable[[Trial], bool]) -> Change:
    """Trials that run out of memory."""

    def change(result: TrialResult) -> TrialResult:
        if not is_failed(result.trial):
            return result
        return TrialResult(trial=result.trial, status=Status.OUT_OF_MEMORY, reason="no room")

    return change


@dataclass(frozen=True, kw_only=True)
class Widths(SweepStudy):
    """The smallest sweep: two widths of a network."""

    name: ClassVar[str] = "widths"
    title: ClassVar[str] = "Widths"
    question: ClassVar[str] = "Does width cost time?"
    row_header: ClassVar[str] = "width"

    @property
    def reference_name(self) -> str:
        return "narrow"

    def list_rows(self) -> Iterator[Configuration]:
        for name, width in (("narrow", 8), ("wide", 16)):
            yield self.configure(name, 4, replace(self.job, options={"dim": width}))

    def list_columns(self, sweep: Sweep) -> Iterable[Field[Arm]]:
        return step_column(), relative_column(sweep.reference)

    def list_findings(self, sweep: Sweep) -> Iterator[Finding]:
        return name_fastest(sweep, "width")


def take_by_width(trial: Trial) -> float:
    return 0.1 if trial.options["dim"] == 8 else 0.2


def test_a_sweep_says_its_rows_columns_and_findings_and_gets_the_rest(tmp_path: Path) -> None:
    document = run(Widths(job=MLP, sampling=FEW, ranks=2), tmp_path, take_by_width)
    (table,) = document.tables
    assert [row[0].value for row in table.rows] == ["narrow", "control", "wide"]
    assert [column.header for column in table.columns] == ["width", "step", "× reference"]
    assert find_row(table, "wide")["step_ratio"].value == pytest.approx(2.0)
    assert [finding.kind for finding in document.findings] == ["fastest", "verdict"]
    assert document.findings[0].subject == "narrow"
    assert [chart.title for chart in document.sections[0].charts] == ["Step time by width"]
    assert "ddp × 2" in document.setting
    assert not document.cautions


def test_a_control_that_differs_is_a_caution_with_its_ratio(tmp_path: Path) -> None:
    def disturb(trial: Trial) -> float:
        return take_by_width(trial) * (1.3 if trial.configuration == "control" else 1.0)

    document = run(Widths(job=MLP, sampling=FEW), tmp_path, disturb)
    (failed,) = (caution for caution in document.cautions if caution.kind == "control-failed")
    assert failed.subject == "narrow"
    assert failed.values["ratio"].value == pytest.approx(1.3)


def test_a_sweep_without_its_reference_compares_nothing(tmp_path: Path) -> None:
    change = fail(lambda trial: trial.options["dim"] == 8)
    document = run(Widths(job=MLP, sampling=FEW), tmp_path, take_by_width, change=change)
    assert find_row(document.tables[0], "wide")["step_ratio"].value is None
    assert find_row(document.tables[0], "narrow")["step_seconds"].value == "out of memory"
    assert not document.findings
    assert document.cautions[0].severity == "failure"


@pytest.mark.parametrize(
    ("study", "titles"),
    [
        (Dtypes(job=SMALL_TRANSFORMER, sampling=FEW), {"Step time by data type", "Step time over float32"}),
        (Optimizers(job=MLP, sampling=replace(FEW, phase_steps=3)), {"Step and update by optimizer"}),
        (
            LoaderWorkers(workers=(0, 1), sampling=replace(FEW, phase_steps=3)),
            {"Step time by workers", "A step in two parts", "An epoch"},
        ),
        (Throughput(job=MLP, sampling=FEW), {"Samples per second by launch"}),
        (Compile(job=MLP, sampling=FEW), {"Step time, eager and compiled", "Time to the end of the first step"}),
        (ModelSize(sizes=("dim=8", "dim=16"), job=MLP, sampling=FEW), {"Step by size and ranks"}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_study_has_its_figures(study: Any, titles: set[str], tmp_path: Path) -> None:
    charts = list_charts(run(study, tmp_path, vary))
    assert titles <= set(charts)
    for title in titles:
        assert "<svg" in draw(charts[title])


def test_a_data_type_that_failed_keeps_its_place(tmp_path: Path) -> None:
    study = Dtypes(job=SMALL_TRANSFORMER, sampling=FEW)
    charts = list_charts(run(study, tmp_path, vary, change=fail(lambda trial: trial.dtype == "float16")))
    chart = charts["Step time by data type"]
    assert list(list_texts(chart)) == ["out of memory", "out of memory"]
    assert "float16 cast (out of memory)" in chart.caption
    assert "control" not in [value["name"] for value in list_values(chart, "bar")]
    assert "The control is not drawn." in chart.caption


def test_a_study_of_which_nothing_ran_has_no_figures(tmp_path: Path) -> None:
    study = Dtypes(job=SMALL_TRANSFORMER, sampling=FEW)
    results = [TrialResult(trial=trial, status=Status.CRASHED, reason="x") for trial in study.plan()]
    assert not list_charts(study.conclude(results))
    assert not list_charts(study.conclude([]))


def test_two_dimensions_that_were_combined_are_a_heat_map(tmp_path: Path) -> None:
    vary_two = ("features+d_model=16,32", "tgt_length=4,8")
    study = Dimensions(vary=vary_two, grid=True, job=SMALL_TRANSFORMER, sampling=FEW)

    def is_largest(trial: Trial) -> bool:
        return trial.options.get("d_model") == 32 and trial.options.get("tgt_length") == 8

    charts = list_charts(run(study, tmp_path, vary, change=fail(is_largest)))
    chart = charts["Step time by features = d_model and tgt_length"]
    cells = [value for layer in list_layers(chart, "rect") for value in layer["data"]["values"]]
    assert len(cells) == 4
    assert [cell["key"] for cell in cells if cell["status"] == "out of memory"] == [
        "features = d_model = 32, tgt_length = 8"
    ]
    assert "base" in [cell["key"] for cell in cells]
    draw(chart)


def test_one_dimension_at_a_time_is_lines_with_their_powers(tmp_path: Path) -> None:
    study = Dimensions(vary=("features+d_model=32,64", "tgt_length=8"), job=SMALL_TRANSFORMER, sampling=FEW)
    charts = list_charts(run(study, tmp_path, lambda trial: 0.001 * int(trial.options.get("d_model", 16))))
    chart = charts["Step time by size of each dimension"]
    names = {value["series"] for value in list_values(chart, "line")}
    assert names == {"features = d_model: power", "tgt_length: power"}
    ends = [value["ratio"] for value in list_values(chart, "line") if value["series"].startswith("features")]
    assert ends == pytest.approx([1, 4])
    assert not any(title.startswith("Step time by features") for title in charts)


def test_a_balance_has_the_least_favourable_ends() -> None:
    cost, saving = Estimate(value=10.0, low=8.0, high=12.0), Estimate(value=0.1, low=0.05, high=0.15)
    payoff = Payoff(is_first=False, cost=cost, saving=saving, steps=Estimate(value=100.0))
    assert payoff.balance_after(100) == Estimate(value=0.0, low=-7.0, high=7.0)
    chart = draw_payoffs([payoff])
    assert max(value["steps"] for value in list_values(chart, "point")) == 200
    draw(chart)


def test_what_never_pays_is_drawn_all_the_same() -> None:
    payoff = Payoff(is_first=True, cost=Estimate(value=10.0), saving=Estimate(value=-0.1), steps=None)
    chart = draw_payoffs([payoff])
    assert min(value["balance"] for value in list_values(chart, "point")) < 0


def test_two_runs_are_ratios_around_one_and_steps_side_by_side() -> None:
    table = Table(
        columns=(
            Column(key="run", header="run", align="left"),
            Column(key="before_seconds", header="A step", quantity="seconds"),
            Column(key="after_seconds", header="B step", quantity="seconds"),
            Column(key="ratio", header="B / A", quantity="ratio"),
        ),
        rows=(
            make_row("ddp × 2", 0.2, 0.1, Estimate(value=0.5, low=0.4, high=0.6)),
            make_row("ddp × 4", 0.1, 0.1, Estimate(value=1.0, low=0.9, high=1.1)),
            make_row("ddp × 8", "crashed", 0.1, None),
        ),
    )
    ratio, steps = draw_comparison(table)
    assert [value["value"] for value in list_values(ratio, "point")] == [0.5, 1.0]
    assert "ddp × 8 (crashed)" in ratio.caption
    assert 1.0 in [value["value"] for value in list_values(ratio, "rule") if "name" not in value]
    assert {value["series"] for value in list_values(steps, "bar")} == {"A", "B"}
    draw(ratio)
    draw(steps)


def test_a_column_of_which_one_number_is_known_is_not_drawn() -> None:
    columns = (Column(key="run", header="run"), Column(key="step_seconds", header="step", quantity="seconds"))
    table = Table(columns=columns, rows=(make_row("a", 1.0), make_row("b", "crashed")))
    assert draw_columns(table, ["step_seconds"], title="t") is None
