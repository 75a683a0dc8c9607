"""A run as series of numbers, and as TensorBoard and MLflow read them back."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.errors import UsageError
from scalelab.export.points import list_answers, list_points, make_name
from scalelab.export.trackers import check_uri, write_events, write_run
from scalelab.records.observations import CurvePoint, Fetch, Transfer
from scalelab.records.tasks import StepKind, StepSample
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Document
from tests.records import make_record, make_result
from tests.report.samples import build_strong_scaling, build_troubled_scaling

HOSTILE = "<script>'\"😀\u202e" + "x" * 300


def make_measured(**fields: object) -> TrialResult:
    """Two ranks, three steps, of which the slower rank counts."""
    trial = make_record(num_ranks=2, strategy="ddp", global_batch=8)
    samples = tuple(
        StepSample(rank, step, StepKind.CLEAN, 10.0 + step, 0.5 + 0.1 * rank + step, loss=1.0 / (step + 1))
        for step in range(3)
        for rank in range(2)
    )
    started = "2026-01-02T03:04:05+00:00"
    return replace(make_result(trial, samples=samples, started_at=started), **fields)  # type: ignore[arg-type]


def test_a_step_is_as_long_as_its_slowest_rank_and_rates_follow() -> None:
    points = {(point.tag, point.step): point.value for point in list_points(make_measured())}
    assert points["step_seconds/clean", 1] == pytest.approx(1.6)
    assert points["samples_per_second", 1] == pytest.approx(8 / 1.6)
    assert points["loss", 2] == pytest.approx(1 / 3)


def test_the_lines_of_a_training_are_told_apart_from_its_evaluations() -> None:
    curve = (
        CurvePoint(step=0, epoch=0.5, loss=2.0, learning_rate=0.1, seconds=1.0),
        CurvePoint(step=0, epoch=0.5, loss=None, accuracy=0.25, is_evaluation=True, seconds=2.0),
    )
    points = {point.tag: point for point in list_points(make_measured(curve=curve)) if "/" in point.tag}
    assert (points["train/loss"].value, points["test/accuracy"].value) == (2.0, 0.25)
    assert points["train/loss"].seconds == pytest.approx(0.6), "when the step had ended on every rank"
    assert points["test/accuracy"].seconds == pytest.approx(2.6), "the evaluation came after it"
    assert "test/loss" not in points


def test_every_number_of_a_step_has_the_time_at_which_the_step_ended_also_with_clocks_apart() -> None:
    result = make_measured(first_step_seconds=2.0)
    apart = tuple(sample._replace(start_seconds=sample.start_seconds + 9e5 * sample.rank) for sample in result.samples)
    for one in (result, replace(result, samples=apart)):
        times = {(point.tag, point.step): point.seconds for point in list_points(one)}
        assert times["step_seconds/clean", 1] == times["loss", 1] == pytest.approx(2.0 + 1.0 + 1.6)


def test_exchanges_and_readings_are_series_too() -> None:
    transfers = tuple(
        Transfer(
            rank=rank, operation="all_reduce", payload_bytes=8, repeat=repeat, num_calls=10,
            start_seconds=100.0 * rank + repeat, seconds=0.1 + 0.1 * rank,
        )
        for rank in range(2)
        for repeat in range(3)
    )  # fmt: skip
    points = list(list_points(make_measured(samples=(), transfers=transfers)))
    assert [(point.tag, point.step) for point in points] == [("call_seconds/8 bytes", repeat) for repeat in range(3)]
    assert [point.value for point in points] == pytest.approx([0.02] * 3)
    assert [point.seconds for point in points] == pytest.approx([0.2, 1.2, 2.2])
    fetches = tuple(
        Fetch(
            rank=0, order="shuffled", access="batch", cache="warm", epoch=epoch, batch=batch, num_samples=4,
            start_seconds=2.0 * epoch + batch, fetch_seconds=0.5, copy_seconds=0.0,
        )
        for epoch in range(2)
        for batch in range(2)
    )  # fmt: skip
    points = list(list_points(make_measured(samples=(), fetches=fetches)))
    assert {point.tag for point in points} == {"fetch_seconds/shuffled batch warm"}
    assert [point.step for point in points] == [0, 1, 2, 3]


def test_answers_are_every_number_of_the_tables_with_their_intervals() -> None:
    answers = dict(list_answers(build_strong_scaling()))
    assert answers["answer/Strong scaling/2/speedup"] == 1.9236
    assert answers["answer/Strong scaling/2/speedup/low"] == 1.9033
    assert not [name for name in dict(list_answers(build_troubled_scaling())) if "out of memory" in name]


@pytest.mark.parametrize(
    ("text", "name"), [("ddp × 2", "ddp - 2"), ("../../etc", "etc"), ("", "unnamed"), ("模型", "unnamed")]
)
def test_names_are_plain(text: str, name: str) -> None:
    assert make_name(text) == name


def test_a_hostile_name_is_short_and_plain() -> None:
    assert set(make_name(HOSTILE)) <= set("script-xu202e")
    assert len(make_name(HOSTILE)) <= 60


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = make_measured()
    failed = replace(make_measured(), status=Status.CRASHED, reason=HOSTILE, samples=())
    failed = replace(failed, trial=replace(failed.trial, round=2))
    count = write_events(tmp_path / "run", build_strong_scaling(), [result, failed])
    read = EventAccumulator(str(tmp_path / "run" / result.trial.name)).Reload()
    steps = read.Scalars("step_seconds/clean")
    assert [event.value for event in steps] == pytest.approx([0.6, 1.6, 2.6])
    assert [event.step for event in steps] == [0, 1, 2]
    answer = EventAccumulator(str(tmp_path / "run" / "answer")).Reload()
    (text,) = answer.Tensors("report")
    assert text.wall_time == steps[0].wall_time - 0.6 > 1.7e9, "an answer is as old as its run"
    assert "1.92 ± 0.02" in text.tensor_proto.string_val[0].decode()
    crashed = EventAccumulator(str(tmp_path / "run" / failed.trial.name)).Reload()
    assert crashed.Tensors("report")[0].tensor_proto.string_val[0].decode().startswith("crashed: <script>")
    assert count == len(list(list_points(result))) + len(dict(list_answers(build_strong_scaling())))
    with pytest.raises(UsageError, match="is not empty"):
        write_events(tmp_path / "run", build_strong_scaling(), [result])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own database code
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_mlflow_reads_back_what_was_written_and_takes_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    result = make_measured()
    failed = replace(result, status=Status.CRASHED, reason="it died", samples=(), trial=replace(result.trial, round=2))
    known = dict(os.environ)
    run = write_run(uri, "scalelab", "a-run", build_strong_scaling(), [result, failed], {"job.workload": "mlp"})
    assert dict(os.environ) == known
    client = mlflow.MlflowClient(uri)
    found = client.get_run(run)
    assert found.data.metrics["answer/Strong scaling/2/speedup"] == 1.9236
    assert found.data.params["job.workload"] == "mlp"
    assert {artifact.path for artifact in client.list_artifacts(run)} == {"report.md", "document.json", "tables.csv"}
    assert {file.name for file in tmp_path.iterdir()} == {"mlflow.db", "mlartifacts"}
    below = client.search_runs([found.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run}'")
    assert {child.info.status for child in below} == {"FINISHED", "FAILED"}
    assert found.info.end_time - found.info.start_time == round(1000 * result.wall_seconds)
    assert capsys.readouterr().out == ""
    (whole,) = (child for child in below if child.info.status == "FINISHED")
    assert [m.value for m in client.get_metric_history(whole.info.run_id, "step_seconds/clean")] == [0.6, 1.6, 2.6]
    with pytest.raises(UsageError, match="already"):
        write_run(uri, "scalelab", "a-run", build_strong_scaling(), [], {})


def test_a_server_that_is_not_there_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:9 failed"):
        write_run("http://127.0.0.1:9", "scalelab", "x", Document(title="t"), [], {})


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/x", "ftp://x", ""])
def test_what_mlflow_does_not_track_to_is_refused(uri: str) -> None:
    with pytest.raises(UsageError, match=r"sqlite:///mlflow\.db"):
        check_uri(uri)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(UsageError, match=r"scalelab\[mlflow\]"):
        write_run("sqlite:///x.db", "e", "n", Document(title="t"), [], {})
    with pytest.raises(UsageError, match=r"scalelab\[tensorboard\]"):
        write_events(tmp_path, Document(title="t"), [])
