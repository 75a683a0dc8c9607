"""Charts that every run with step samples gets, and what they leave out."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.errors import NothingMeasured
from scalelab.recipes.reproduce import Reproduce
from scalelab.records.store import RunStore
from scalelab.records.trial import Status, StepKind, StepSample, TrialResult
from scalelab.report.charts.step_times import OUTLIER, WARM_UP
from scalelab.report.document import Chart, Document, Section, render_json
from scalelab.report.renderers.markdown import render_markdown
from scalelab.report.renderers.terminal import render_terminal
from scalelab.studies.catalogue import derive_document
from scalelab.studies.shared.arms import TOO_SHORT, describe_status, group_arms
from scalelab.studies.shared.step_charts import (
    SERIES_POINTS,
    describe_spread,
    find_row,
    list_arms,
    plot_arm,
    plot_series,
    plot_spread,
    thin,
)
from scalelab.studies.shared.study import Sampling
from scalelab.studies.throughput import Throughput
from tests.records import make_record, make_result
from tests.report.charts.figures import draw, list_values
from tests.studies.answers import AlteredLauncher, answer, make_strong, set_machine

HEADING = "Step by step"


def test_a_timeline_of_a_recipe_stands_in_its_row() -> None:
    sections = [Section(heading=heading) for heading in ("", "S5 · Batches", "S5A · Injected delay")]
    assert [find_row(sections, part) for part in ("s5a.delay", "s5.batches", "s1.timing", "")] == [2, 1, None, None]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)


def find_charts(document: Document, heading: str = HEADING) -> tuple[Chart, ...]:
    return next((section.charts for section in document.sections if section.heading == heading), ())


def lose_largest(result: TrialResult) -> TrialResult:
    if result.trial.num_ranks < 4:
        return result
    return replace(result, status=Status.OUT_OF_MEMORY, samples=(), reason="too large")


def test_every_configuration_has_a_distribution_and_its_steps_in_order(tmp_path: Path) -> None:
    _, document = answer(make_strong(), tmp_path)
    spread, *series = find_charts(document)
    assert [chart.title for chart in series][-1] == "Steps of ddp × 4"
    assert len(series) == 5
    assert all("<svg" in draw(chart) for chart in (spread, series[0]))


def test_text_is_the_same_with_and_without_figures(tmp_path: Path) -> None:
    _, document = answer(make_strong(), tmp_path)
    bare = replace(
        document,
        sections=tuple(
            replace(section, charts=()) for section in document.sections if section.tables or section.paragraphs
        ),
    )
    for one, other in ((document, bare),):
        assert render_markdown(one) == render_markdown(other)
        assert render_terminal(one, 100) == render_terminal(other, 100)


def test_what_failed_is_named_in_the_distribution_and_in_every_caption(tmp_path: Path) -> None:
    _, document = answer(make_strong(), tmp_path, AlteredLauncher(lose_largest))
    spread = find_charts(document)[0]
    assert {"name": "ddp × 4", "status": "out of memory"} in [
        {key: value[key] for key in ("name", "status")} for value in list_values(spread, "text")
    ]
    speedup = document.sections[0].charts[0]
    assert "ddp × 4 (out of memory)" in spread.caption
    assert "ddp × 4 (out of memory)" in speedup.caption


def test_what_was_not_run_yet_has_its_place(tmp_path: Path) -> None:
    study = make_strong()
    answer(study, tmp_path)
    (path,) = tmp_path.iterdir()
    store = RunStore.open(path)
    for trial in store.trials():
        if trial.num_ranks == 4:
            (store.trial_directory(trial.name) / "result.json").unlink()
    document = derive_document(store)
    assert "ddp × 4 (not run yet)" in find_charts(document)[0].caption
    assert "ddp × 4 (not run yet)" in document.sections[0].charts[0].caption


def test_a_run_without_a_step_has_no_such_section(tmp_path: Path) -> None:
    lost = AlteredLauncher(lambda result: replace(result, status=Status.CRASHED, samples=()))
    with pytest.raises(NothingMeasured):
        answer(make_strong(), tmp_path, lost)
    (path,) = tmp_path.iterdir()
    assert find_charts(derive_document(RunStore.open(path))) == ()


def test_long_runs_stay_small_and_say_what_is_left_out(tmp_path: Path) -> None:
    study = make_strong(sampling=Sampling(rounds=3, steps=1500, phase_steps=2, comm_free_steps=0))
    _, document = answer(study, tmp_path)
    charts = find_charts(document)
    num_points = sum(len(list_values(chart, "point")) for chart in charts)
    assert num_points <= SERIES_POINTS
    assert all("evenly spaced" in chart.caption for chart in charts)
    assert len(json.dumps(json.loads(render_json(document)))) < 1_000_000


def test_warm_up_and_outliers_are_marked(tmp_path: Path) -> None:
    def disturb(result: TrialResult) -> TrialResult:
        last = max(sample.step for sample in result.samples if sample.kind == "clean")
        slow = [s._replace(step_seconds=9 * s.step_seconds) if s.step == last else s for s in result.samples]
        return replace(result, samples=tuple(slow))

    study = make_strong(sampling=Sampling(rounds=4, steps=20, warmup=3))
    answer(study, tmp_path, AlteredLauncher(disturb))
    (path,) = tmp_path.iterdir()
    results, _ = RunStore.open(path).results()
    arm = list_arms(study, results)[0]
    chart = plot_arm(arm, arm.label, 1000)
    kinds = [value["series"] for value in list_values(chart, "point")]
    assert kinds.count(WARM_UP) == 3 * 4
    assert kinds.count(OUTLIER) == 4
    assert "Outliers: 4." in chart.caption
    assert "first 3 steps" in chart.caption


def test_drift_over_launches_is_drawn_and_told(tmp_path: Path) -> None:
    study = make_strong(sampling=Sampling(rounds=8, steps=12))
    answer(study, tmp_path, AlteredLauncher(lambda r: r, step_seconds=lambda trial: 0.1 * (1 + trial.round / 10)))
    (path,) = tmp_path.iterdir()
    arm = list_arms(study, RunStore.open(path).results()[0])[0]
    chart = plot_arm(arm, arm.label, 1000)
    assert any(value["series"] == "trend over launches" for value in list_values(chart, "line"))
    assert "from the first launch to the last" in chart.caption


def make_steps(configuration: str, seconds: list[float]) -> TrialResult:
    trial = make_record(configuration=configuration)
    samples = (StepSample(0, step, StepKind.CLEAN, float(step), one) for step, one in enumerate(seconds))
    return make_result(trial, samples=tuple(samples))


@pytest.mark.parametrize(
    ("medians", "words"),
    [
        ((0.015, 0.04, 0.02), "No steady drift, but medians of launches range from 15.0 ms to 40.0 ms."),
        ((0.02, 0.021, 0.02), "No drift."),
        ((0.02,), "No drift."),
    ],
)
def test_launches_that_differ_without_a_trend_are_told(medians: tuple[float, ...], words: str) -> None:
    results = [
        replace(result, trial=replace(result.trial, round=number))
        for number, result in enumerate((make_steps("one", [one] * 8) for one in medians), 1)
    ]
    (arm,) = group_arms(results, 1).values()
    assert describe_spread(arm) == words


def test_a_long_warm_up_of_one_study_of_a_recipe_is_not_taken_off_another() -> None:
    slow = make_steps("s1.long.single-1", [5.0] * 10 + [1.0 + 0.001 * (step % 3) for step in range(30)])
    short = make_steps("s2.short.lr-0.1", [1.0, 1.001, 1.002, 1.0, 1.001])
    first, second = list_arms(Reproduce(recipe="scaling"), [slow, short])
    assert first.num_dropped >= 10
    assert second.is_measured
    alone = list_arms(make_strong(), [slow, short])[1]
    assert not alone.is_measured
    assert describe_status(alone) == TOO_SHORT, "it was run"


def test_nothing_measured_draws_nothing() -> None:
    assert plot_spread(Throughput(), [], {}) is None
    assert list(plot_series(Throughput(), [])) == []


def test_points_are_left_out_evenly() -> None:
    kept = thin(list(range(1000)), 100)
    assert (len(kept), kept[0], kept[-1]) == (100, 0, 999)
    assert max(b - a for a, b in itertools.pairwise(kept)) <= 11
