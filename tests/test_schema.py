"""Files of every released schema are read: 0.1.0 wrote `schemas/1`, and `schemas/2` says the same today."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scalelab.errors import DamagedRun
from scalelab.records.files import SCHEMA_VERSION, TRIAL_FILE, read_trial, upgrade_result, upgrade_trial, write_trial
from scalelab.records.tasks import Exchange, Forecast, Measure, Quantize, Read, Train
from scalelab.records.trial import Cause, Trial, TrialResult, from_builtins, to_builtins
from tests.records import make_record

SCHEMAS = Path(__file__).parent / "schemas"
KINDS = {
    "measure": Measure,
    "stored": Measure,
    "train": Train,
    "exchange": Exchange,
    "read": Read,
    "forecast": Forecast,
    "quantize": Quantize,
}


def put_example(version: int, name: str, directory: Path) -> Path:
    shutil.copy(SCHEMAS / str(version) / f"{name}.json", directory / TRIAL_FILE)
    return directory


@pytest.mark.parametrize("name", KINDS)
def test_every_task_of_schema_1_is_read_as_the_same_trial(name: str, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    old = read_trial(put_example(1, name, tmp_path / "1"))
    assert old == read_trial(put_example(2, name, tmp_path / "2"))
    assert isinstance(old.task, KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_a_trial_is_written_as_the_stored_example(name: str, tmp_path: Path) -> None:
    example = put_example(SCHEMA_VERSION, name, tmp_path) / TRIAL_FILE
    before = example.read_text()
    write_trial(tmp_path, read_trial(tmp_path))
    assert example.read_text() == before


def test_nothing_of_an_old_task_is_lost(tmp_path: Path) -> None:
    stored = read_trial(put_example(1, "stored", tmp_path))
    old = json.loads((tmp_path / TRIAL_FILE).read_text())
    assert stored.step_plan is not None
    assert to_builtins(stored.step_plan) == old["plan"]
    assert stored.dataset is not None
    assert old["reading"].items() >= json.loads(json.dumps(to_builtins(stored.dataset))).items()
    quantize = read_trial(put_example(1, "quantize", tmp_path)).task
    old = json.loads((tmp_path / TRIAL_FILE).read_text())
    found = json.loads(json.dumps(to_builtins(quantize)))
    assert found == {"kind": "quantize", "settings": old["quantization"], "run": old["course"]}


def test_a_result_of_schema_1_is_read_as_the_same_result() -> None:
    old, new = (json.loads((SCHEMAS / version / "result.json").read_text()) for version in ("1", "2"))
    read = from_builtins(upgrade_result(old, 1), TrialResult)
    assert read == from_builtins(upgrade_result(new, 2), TrialResult)
    assert isinstance(read.trial.task, Exchange)


@pytest.mark.parametrize(
    ("status", "reason", "cause"),
    [
        ("out_of_memory", "rank 0 ran out of memory", Cause.ALLOCATION),
        ("timed_out", "not finished after 5 s", Cause.TIME_LIMIT),
        ("invalid", "gloo lacks this operation", Cause.UNSUPPORTED),
        ("crashed", "rank 1 exited with code 3", None),
    ],
)
def test_the_cause_of_an_old_failure_is_inferred_or_unknown(status: str, reason: str, cause: Cause | None) -> None:
    old = json.loads((SCHEMAS / "1" / "result.json").read_text()) | {"status": status, "reason": reason}
    assert from_builtins(upgrade_result(old, 1), TrialResult).cause is cause


def test_a_trial_of_a_newer_schema_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write_trial(tmp_path, make_record())
    data = json.loads((tmp_path / TRIAL_FILE).read_text())
    (tmp_path / TRIAL_FILE).write_text(json.dumps(data | {"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(DamagedRun, match=rf"schema {SCHEMA_VERSION + 1}, .*: upgrade scalelab"):
        read_trial(tmp_path)


@pytest.mark.parametrize("task", [{"kind": "guess"}, {"plan": {}}, {"kind": "exchange", "operation": "all_reduce"}])
def test_a_task_that_is_none_is_damage_with_the_file(task: dict[str, object], tmp_path: Path) -> None:
    write_trial(tmp_path, make_record())
    data = json.loads((tmp_path / TRIAL_FILE).read_text())
    (tmp_path / TRIAL_FILE).write_text(json.dumps(data | {"task": task}))
    with pytest.raises(DamagedRun, match=r"trial\.json is damaged: .*task"):
        read_trial(tmp_path)


def test_today_s_trial_is_not_upgraded() -> None:
    data = to_builtins(make_record())
    assert upgrade_trial(data, SCHEMA_VERSION) is data
    assert from_builtins(data, Trial) == make_record()
