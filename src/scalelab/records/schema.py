"""Versions of the files of a run: this one is written, every released one is read.

1   scalelab 0.1: a trial is a header and optional records (plan, course, exchange, reading, quantization); its
    file has no version, and a result has no cause
2   scalelab 0.2: a trial is a header and one task; its file has a version
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from scalelab.errors import DamagedRun, UsageError
from scalelab.records.files import read_json, read_stored, write_json
from scalelab.records.trial import Cause, Status, Trial, TrialResult, from_builtins, to_builtins

SCHEMA_VERSION = 2
"""Incremented whenever a file of an older version would be misread."""
TRIAL_FILE = "trial.json"
OLD_RECORDS = ("plan", "course", "exchange", "reading", "quantization")
"""What schema 1 had instead of a task."""
OLD_FORECAST = "memory_forecast"
"""The instrument that made a trial of schema 1 a forecast."""
READ_SETTINGS = ("passes", "epochs", "budget_seconds")
"""What a `reading` of schema 1 had besides the dataset."""

Json = dict[str, Any]
T = TypeVar("T")


def write_trial(directory: Path, trial: Trial) -> None:
    """Write the `trial.json` of a trial's directory."""
    write_json(directory / TRIAL_FILE, {"schema_version": SCHEMA_VERSION} | to_builtins(trial))


def read_trial(directory: Path) -> Trial:
    """Read the `trial.json` of a trial's directory, of any schema; raises `DamagedRun` if that fails."""
    file = directory / TRIAL_FILE
    found = _decode(file, Trial)
    if found is not None:
        return found[0]
    data = read_json(file)
    version = check_schema(file, {"schema_version": 1} | data)
    return convert_file(file, upgrade_trial(data, version), Trial)


def read_result(file: Path) -> tuple[TrialResult, Json]:
    """A `result.json` of any schema and its other entries, such as checksums; raises `DamagedRun` if that fails."""
    found = _decode(file, TrialResult)
    if found is not None:
        return found
    header = read_json(file)
    version = check_schema(file, header)
    return convert_file(file, upgrade_result(header, version), TrialResult), header


class _Header(msgspec.Struct):
    """What files of this schema have besides their record."""

    schema_version: int = 0
    num_samples: int | None = None
    num_transfers: int | None = None
    num_fetches: int | None = None
    samples_sha256: str | None = None
    transfers_sha256: str | None = None
    fetches_sha256: str | None = None


def _decode(file: Path, kind: type[T]) -> tuple[T, Json] | None:
    """A file of this schema, five times as fast as by way of dicts; None: the slow way reads it, or names the error."""
    try:
        data = read_stored(file)
        header = msgspec.json.decode(data, type=_Header)
        if header.schema_version == SCHEMA_VERSION:
            return msgspec.json.decode(data, type=kind), msgspec.structs.asdict(header)
    except (OSError, ValueError, UsageError, RecursionError):
        pass
    return None


def convert_file(path: Path, data: Any, kind: type[T]) -> T:
    """A record from a file's contents; raises `DamagedRun` where they are not one."""
    try:
        return from_builtins(data, kind)
    except (ValueError, UsageError) as error:
        raise DamagedRun(f"{path} is damaged: {error}") from error


def check_schema(path: Path, data: Json) -> int:
    """The version of a file; raises `DamagedRun` if there is none, or it is newer than this scalelab."""
    version = data.get("schema_version")
    if not isinstance(version, int):
        raise DamagedRun(f"{path} has no schema_version: it was changed, or not written by scalelab")
    if version > SCHEMA_VERSION:
        raise DamagedRun(f"{path} has schema {version}, this version reads up to {SCHEMA_VERSION}: upgrade scalelab")
    return version


def upgrade_trial(trial: Json, version: int) -> Json:
    """A stored trial in today's schema."""
    if version > 1:
        return trial
    kept = {name: value for name, value in trial.items() if name not in OLD_RECORDS}
    if isinstance(trial.get("instruments"), list):
        kept["instruments"] = [name for name in trial["instruments"] if name != OLD_FORECAST]
    return kept | {"task": _make_task(trial)}


def upgrade_result(result: Json, version: int) -> Json:
    """A stored result in today's schema; the cause is unknown where 0.1 stored only a sentence."""
    if version > 1:
        return result
    if isinstance(result.get("trial"), dict):
        result = result | {"trial": upgrade_trial(result["trial"], version)}
    return {"cause": _infer_cause(result)} | result


def _make_task(trial: Json) -> Json:
    """The one task that the optional records of schema 1 amount to."""
    found: dict[str, Json] = {name: trial[name] for name in OLD_RECORDS if isinstance(trial.get(name), dict)}
    if OLD_FORECAST in (trial.get("instruments") or ()):
        return {"kind": "forecast"}
    if "exchange" in found:
        return {"kind": "exchange"} | found["exchange"]
    reading = found.get("reading")
    dataset = reading and {name: value for name, value in reading.items() if name not in READ_SETTINGS}
    if reading and not trial.get("workload"):
        settings = {name: reading[name] for name in READ_SETTINGS if name in reading}
        return {"kind": "read", "dataset": dataset} | settings
    if "quantization" in found:
        return {"kind": "quantize", "settings": found["quantization"], "run": found.get("course")}
    if "course" in found:
        return {"kind": "train", "run": found["course"]}
    return {"kind": "measure", "plan": found.get("plan", {}), "dataset": dataset}


def _infer_cause(result: Json) -> str | None:
    if "lacks this operation" in str(result.get("reason")):
        return Cause.UNSUPPORTED
    known: dict[Any, Cause] = {Status.OUT_OF_MEMORY: Cause.ALLOCATION, Status.TIMED_OUT: Cause.TIME_LIMIT}
    return known.get(result.get("status"))
