"""Files of every released schema are read: 0.1.0 wrote `schemas/1`, and `schemas/2` says the same today."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from scalelab.errors import DamagedRun
from scalelab.records.environment import Environment
from scalelab.records.files import (
    SCHEMA_VERSION,
    TRIAL_FILE,
    load_json,
    read_trial,
    upgrade_result,
    upgrade_trial,
    write_trial,
)
from scalelab.records.tasks import Exchange, Forecast, Measure, Quantize, Read, Train
from scalelab.records.trial import Cause, Trial, TrialResult, from_builtins, to_builtins
from tests.records import make_record

SCHEMAS = Path(__file__).parent / "schemas"
RECORDS = (inspect.DataclassType, inspect.StructType, inspect.NamedTupleType)
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


def test_a_field_that_a_file_lacks_means_what_it_always_did() -> None:
    """Optional fields of everything that is stored; one that is new is added to `defaults.json`."""
    assert list_defaults(TrialResult) | list_defaults(Environment) == load_json(SCHEMAS / "defaults.json")


def list_defaults(kind: type) -> dict[str, dict[str, object]]:
    """The defaults of a record and of all records in it, by class."""
    found: dict[str, dict[str, object]] = {}
    left: list[inspect.Type] = [inspect.type_info(kind)]
    while left:
        one = left.pop()
        for name in ("types", "item_types"):
            left += getattr(one, name, ())
        for name in ("item_type", "key_type", "value_type"):
            left += [getattr(one, name)] if hasattr(one, name) else []
        if isinstance(one, RECORDS) and one.cls.__name__ not in found:
            left += [field.type for field in one.fields]
            found[one.cls.__name__] = {
                field.encode_name: read_default(field) for field in one.fields if not field.required
            }
    return json.loads(json.dumps({name: fields for name, fields in found.items() if fields}))


def read_default(field: inspect.Field) -> object:
    has_factory = field.default_factory is not msgspec.NODEFAULT
    return to_builtins(field.default_factory() if has_factory else field.default)


def test_today_s_trial_is_not_upgraded() -> None:
    data = to_builtins(make_record())
    assert upgrade_trial(data, SCHEMA_VERSION) is data
    assert from_builtins(data, Trial) == make_record()
