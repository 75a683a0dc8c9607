"""Exports as text, read back by those who read them: Prometheus's parser, pandas, JSON, and the columns of others."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import scalelab as sl
from scalelab.errors import UsageError
from scalelab.export.text_files import (
    find_datatype,
    render_nccl_tests,
    render_openmetrics,
    render_osu,
    render_timeline,
    write_csv_files,
)
from scalelab.export.trackers import write_offline
from scalelab.records.observations import Transfer
from scalelab.records.tasks import Exchange
from scalelab.records.trial import Status, TrialResult
from tests.records import make_record, make_result
from tests.report.samples import build_strong_scaling

LABELS = {"run": 'a "run"\\', "host": "n1"}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> sl.Run:
    launcher = sl.FakeLauncher(lambda trial: 0.02 / trial.num_ranks)
    runs = tmp_path_factory.mktemp("runs")
    return sl.run("strong-scaling", workload="mlp", rounds=2, launcher=launcher, runs_dir=runs, progress=False)


def test_prometheus_reads_every_number_of_the_tables() -> None:
    document = build_strong_scaling()
    families = {one.name: one for one in text_string_to_metric_families(render_openmetrics(document, LABELS))}
    steps = families["scalelab_step_seconds"]
    assert (steps.type, steps.unit) == ("gauge", "seconds")
    table = document.tables[0]
    place = [column.key for column in table.columns].index("step_seconds")
    main = [sample.value for sample in steps.samples if sample.labels["table"] == document.title]
    assert main == [row[place].value for row in table.rows if row[place].estimate]
    assert steps.samples[0].labels["run"] == LABELS["run"]
    assert {"scalelab_step_seconds_low", "scalelab_step_seconds_high"} <= set(families)


def test_a_timeline_has_a_span_per_trial_and_a_step_per_sample(played: sl.Run) -> None:
    failed = replace(played.trials[0], status=Status.CRASHED, reason="killed", samples=())
    events = json.loads(render_timeline("study", [*played.trials, failed]))["traceEvents"]
    trials = [event for event in events if event.get("cat") == "trial"]
    assert [event["name"] for event in trials] == [result.trial.name for result in (*played.trials, failed)]
    assert trials[-1]["args"]["reason"] == "killed"
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) == sum(len(result.samples) for result in played.trials)
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in steps)
    assert steps[0]["dur"] == pytest.approx(1e6 * played.trials[0].samples[0].step_seconds)


def make_exchange() -> TrialResult:
    """An all-reduce on four ranks, at 1 GB/s behind 10 µs."""
    task = Exchange(operation="all_reduce", sizes=(1000, 1_000_000), repeats=3)
    trial = make_record(num_ranks=4, task=task, workload="", strategy="none")
    transfers = tuple(
        Transfer(rank, "all_reduce", size, repeat, 2, 1.0, 2 * (1e-5 + size / 1e9))
        for size in task.sizes
        for repeat in range(3)
        for rank in range(4)
    )
    return make_result(trial, transfers=transfers, samples=())


def test_collectives_have_the_columns_of_nccl_tests_and_of_osu() -> None:
    lines = [line.split() for line in render_nccl_tests([make_exchange()]).splitlines() if not line.startswith("#")]
    assert lines[1][:8] == ["1000000", "250000", "float", "sum", "-1", "1010.00", "0.99", "1.49"]
    osu = [line.split() for line in render_osu([make_exchange()]).splitlines() if line and not line.startswith("#")]
    assert osu == [["1000", "11.00", "11.00", "11.00", "6"], ["1000000", "1010.00", "1010.00", "1010.00", "6"]]
    with pytest.raises(UsageError, match="timed no collectives"):
        render_osu([])


def test_pandas_reads_csv_files_whose_units_are_beside_them(played: sl.Run, tmp_path: Path) -> None:
    files = {file.stem: file for file in write_csv_files(tmp_path, played)}
    frame = pandas.read_csv(files["strong-scaling"])
    assert frame["step_seconds"].tolist() == played.table().columns["step_seconds"]
    metadata = json.loads(files["strong-scaling"].with_name("strong-scaling.csv-metadata.json").read_text())
    columns = {column["name"]: column for column in metadata["tableSchema"]["columns"]}
    assert list(columns) == list(frame.columns)
    assert columns["step_seconds"] == {"name": "step_seconds", "datatype": "double", "schema:unitText": "s"}
    samples = next(file for stem, file in files.items() if stem.startswith("samples"))
    assert len(pandas.read_csv(samples)) == len(played.samples)


@pytest.mark.parametrize(
    ("values", "kind"),
    [([1, None], "integer"), ([1, 2.5], "double"), ([True], "boolean"), (["a", 1], "string"), ([None], "string")],
)
def test_a_column_has_the_type_of_its_values(values: list[object], kind: str) -> None:
    assert find_datatype(values) == kind


def list_records(data: bytes) -> Iterator[bytes]:
    """The records of an offline file: LevelDB's log format behind seven bytes, in blocks of 32 KiB."""
    place, whole, block = 7, b"", 32768
    while place + 7 <= len(data):
        left = block - place % block
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb: pip install 'scalelab[wandb]'")
@pytest.mark.filterwarnings("ignore")
def test_wandb_reads_back_what_was_written_offline(played: sl.Run, tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    results = played.trials[:2]
    places = write_offline(tmp_path, "lab", played.name, played.document, results, {"job.workload": "mlp"})
    assert len(places) == 3
    found: list[dict[str, str]] = []
    for place in places:
        values: dict[str, str] = {}
        for data in list_records(next(place.glob("*.wandb")).read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            values |= {"name": record.run.display_name} if record.run.display_name else {}
            for item in (*record.history.item, *record.summary.update):
                values[item.key or "/".join(item.nested_key)] = item.value_json
        found.append(values)
    assert [one["name"] for one in found] == [played.name, *(result.trial.name for result in results)]
    assert float(found[1]["step_seconds/clean"]) > 0
    assert any(key.endswith("step_seconds") and key.startswith("answer/") for key in found[0])


def test_without_wandb_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'scalelab\[wandb\]'"):
        write_offline(tmp_path, "p", "n", build_strong_scaling(), [], {})
