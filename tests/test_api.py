"""scalelab from Python: flags as arguments, functions and live objects as workloads, answers as data."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
import torch
from torch import nn

import scalelab as sl
from scalelab.records.trial import Trial
from scalelab.report.document import Cell, Column, Table
from scalelab.report.results import make_frame

OPTIONS = {"progress": False, "rounds": 3, "steps": 12}


def play(trial: Trial) -> float:
    """A job that scales: half of the step is divided by the ranks."""
    return 0.01 + 0.01 / trial.num_ranks


def run_played(runs: Path, study: str = "strong-scaling", **flags: object) -> sl.Run:
    return sl.run(study, launcher=sl.FakeLauncher(play), runs_dir=runs, **OPTIONS | flags)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> sl.Run:
    return run_played(tmp_path_factory.mktemp("runs"), ranks=[1, 2, 4], global_batch_size=64, workload="mlp", dim=32)


def test_flags_are_arguments_wherever_they_are_in_a_study(played: sl.Run) -> None:
    trials = played.store.trials()
    assert {trial.num_ranks for trial in trials} == {1, 2, 4}
    assert {trial.round for trial in trials} == {1, 2, 3}
    assert {trial.options["dim"] for trial in trials} == {32}
    assert played.store.record.study == "strong-scaling"


def test_a_study_is_a_name_a_class_or_an_instance(tmp_path: Path) -> None:
    by_name = run_played(tmp_path, workload="mlp").store.record
    by_class = sl.run(sl.StrongScaling, workload="mlp", launcher=sl.FakeLauncher(play), runs_dir=tmp_path, **OPTIONS)
    sampling = sl.Sampling(rounds=3, steps=12, profile_steps=sl.StrongScaling().sampling.profile_steps)
    made = sl.StrongScaling(job=sl.Job(workload="mlp"), sampling=sampling)
    by_instance = sl.run(made, launcher=sl.FakeLauncher(play), runs_dir=tmp_path, progress=False)
    assert by_name.fields == by_class.store.record.fields == by_instance.store.record.fields


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"rank": [2]}, "argument of strong-scaling"),
        ({"ranks": "two"}, "ranks='two' has the wrong type"),
        ({"global_batch": 0}, "--global-batch"),
        ({"workload": nn.Linear(2, 2)}, "a model alone cannot be trained: add batches="),
        ({"workload": nn.Linear(2, 2), "batches": [], "batch_per_rank": 3}, "batch_per_rank"),
        ({"workload": 3}, "a workload of type int cannot be measured"),
        ({"workload": "mlp", "channels": 3}, "channels"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run_is_made(flags: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(sl.ScalelabError, match=words):
        run_played(tmp_path / "runs", **flags)
    assert not list((tmp_path / "runs").glob("*/run.json"))


def test_a_function_that_holds_a_file_says_what_to_do(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, pytest.raises(sl.ScalelabError, match="make such objects inside"):
        run_played(tmp_path / "runs", workload=lambda: log)


def test_an_importable_function_stays_where_it_is(tmp_path: Path) -> None:
    run = run_played(tmp_path, workload=build_here, width=4)
    assert run.store.trials()[0].workload == f"{Path(__file__).resolve()}:build_here"
    assert run.store.trials()[0].options == {"width": 4}


def build_here(batch_size: int, width: int = 8) -> tuple[nn.Module, list[torch.Tensor]]:
    return nn.Linear(width, 1), [torch.ones(batch_size, width)]


def test_tables_have_a_column_per_end_of_an_interval_and_units(played: sl.Run) -> None:
    import polars  # it starts threads, which workers would be forked without

    frame = played.table("scaling").to_pandas()
    assert list(frame["run"])[-1] == "ddp × 4"
    row = frame.iloc[-1]
    assert row["step_seconds_low"] <= row["step_seconds"] <= row["step_seconds_high"]
    assert row["step_seconds"] == pytest.approx(0.0125, rel=0.05)
    assert frame.attrs["units"]["step_seconds"] == "s"
    assert played.table("Strong scaling").to_dicts() == played.table().to_dicts()
    assert polars.DataFrame(played.table()).equals(played.table().to_polars())
    with pytest.raises(sl.ScalelabError, match="unknown table 'weather'"):
        played.table("weather")


def test_words_in_place_of_numbers_become_a_status() -> None:
    columns = (Column(key="run", header="run"), Column(key="step_seconds", header="step", quantity="seconds"))
    rows = ((Cell(value=1), Cell(value=0.5, low=0.4, high=0.6)), (Cell(value="b"), Cell(value="out of memory")))
    frame = make_frame(Table(columns=columns, rows=rows), "t")
    assert frame.to_dicts() == [
        {"run": "1", "step_seconds": 0.5, "step_seconds_low": 0.4, "step_seconds_high": 0.6, "status": None},
        {"run": "b", "step_seconds": None, "step_seconds_low": None, "step_seconds_high": None}
        | {"status": "out of memory"},
    ]
    assert frame.units == dict.fromkeys(("step_seconds", "step_seconds_low", "step_seconds_high"), "s")


def test_samples_are_the_raw_steps_of_all_ranks(played: sl.Run) -> None:
    samples = played.samples.to_pandas()
    assert len(samples) == sum(len(result.samples) for result in played.trials)
    assert set(samples["num_ranks"]) == {1, 2, 4}
    assert played.samples.units["step_seconds"] == "s"
    assert isinstance(samples, pandas.DataFrame)
    assert played.samples.to_arrow().schema.field("step_seconds").metadata == {b"unit": b"s"}


def test_a_run_shows_itself_in_a_notebook_without_scripts(played: sl.Run) -> None:
    page = played._repr_html_()
    assert "How much faster does the same job get" in page
    assert played.findings[0].text.split()[0] in page
    assert page.count("data:image/svg+xml") == 2
    assert "<script" not in page
    assert "ddp × 4" in repr(played)
    bundle = played.charts[0]._repr_mimebundle_()
    assert bundle["image/svg+xml"].startswith("<svg")


def test_a_report_has_the_format_of_its_suffix(played: sl.Run, tmp_path: Path) -> None:
    assert json.loads(played.report(tmp_path / "x.json").read_text())["title"] == "Strong scaling"
    assert "<!doctype html>" in played.report(tmp_path / "x.html").read_text()
    assert played.charts[0].save(tmp_path / "c.svg").read_text().startswith("<svg")
    with pytest.raises(sl.ScalelabError, match=r"must be one of \.html, \.pdf"):
        played.report(tmp_path / "x.docx")


def test_stored_runs_open_compare_and_resume(played: sl.Run) -> None:
    runs = played.path.parent
    again = run_played(runs, ranks=[1, 2, 4], global_batch=64, workload="mlp", dim=32)
    assert sl.open("last", runs_dir=runs).name == again.name
    assert sl.open(played.path, refresh=True).findings == played.findings
    rows = [row["run"] for row in sl.compare(played, again).table().to_dicts()]
    assert rows == [row["run"] for row in played.table().to_dicts() if row["run"] != "control"]
    assert sl.compare(again).document == sl.compare(played.name, again.name, runs_dir=runs).document
    assert sl.resume(again, progress=False).findings == again.findings
    with pytest.raises(sl.ScalelabError, match="the same run"):
        sl.compare(played, played)


def test_predictions_and_plans_are_answers_too(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("ranks,samples_per_second\n1,100\n2,190\n4,350\n")
    predicted = sl.predict(table=table, ranks=[8, 16])
    assert {8, 16} <= {row["ranks"] for row in predicted.table().to_dicts()}
    planned = sl.plan(parameters=7e9, devices=8)
    assert planned.findings
    with pytest.raises(sl.ScalelabError, match="unknown argument 'gpus'"):
        sl.plan(model="gpt2-small", gpus=8)


@pytest.mark.ranks
def test_functions_and_live_models_of_a_notebook_train_on_two_ranks(tmp_path: Path) -> None:
    width = 6
    data = torch.utils.data.TensorDataset(torch.randn(64, width), torch.randint(3, (64,)))

    def build(depth: int = 1) -> tuple[nn.Module, object, nn.Module]:
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]), data, nn.CrossEntropyLoss()

    few = {"runs_dir": tmp_path, "progress": False, "rounds": 2, "steps": 12, "control": False, "profile_steps": 2}
    run = sl.run("strong-scaling", workload=build, depth=2, ranks=[1, 2], global_batch=8, **few)
    assert {result.status for result in run.trials} == {sl.Status.COMPLETED}
    assert "def build" in Path(run.store.trials()[0].workload.rpartition(":")[0]).read_text()
    assert sl.trace(run).table("operators")
    model = nn.Linear(width, 3)
    live = sl.run("throughput", workload=model, batches=data, loss=nn.CrossEntropyLoss(), batch_per_rank=8, **few)
    assert live.trials[0].losses()


@pytest.mark.ranks
def test_a_trained_model_is_quantized_with_its_own_weights(tmp_path: Path) -> None:
    images = torch.randn(64, 1, 8, 8)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    test = [(images, model(images).argmax(1))]
    run = sl.quantize(model, [images[:32], images[32:]], test=test, tested=8, runs_dir=tmp_path, progress=False)
    stages = {stage.name: stage.predictions for stage in run.trials[0].quantized.stages}  # type: ignore[union-attr]
    assert list(stages["float"]) == test[0][1].tolist()
    assert (run.store.trial_directory(run.trials[0].trial.name) / "int8.onnx").is_file()
