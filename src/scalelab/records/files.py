"""Files of a run: atomic writes, operating-system errors as messages for the user, and versions.

This version's schema is written, every released one is read:

1   scalelab 0.1: a trial is a header and optional records (plan, course, exchange, reading, quantization); its
    file has no version, and a result has no cause
2   scalelab 0.2: a trial is a header and one task; its file has a version
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from scalelab.errors import DamagedRun, NotWritable, StorageFull, UsageError
from scalelab.records.trial import Cause, Status, Trial, TrialResult, from_builtins, to_builtins

RUNS_DIR = Path("runs")
"""Default directory of the runs."""
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
"""What the operating system says of a place that no retry will make writable."""


BROKEN = {errno.EIO, errno.ESTALE, errno.EFBIG, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENXIO}
"""What a failing disk, a lost file server and `ulimit -f` give."""
NUM_TRIES = 4
MOST_BYTES = 2**30
"""Of a file of a run that is read whole: the document of 10,000 trials has a hundredth of it."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside the file, force it to the disk, then take its place: readers see all of it or none.

    A stale handle of a shared file system is opened anew, a few times.
    """
    for number in range(1, NUM_TRIES + 1):
        try:
            _write_once(path, content)
        except OSError as error:
            if error.errno != errno.ESTALE or number == NUM_TRIES:
                raise
            time.sleep(0.05 * 4 ** (number - 1))
        else:
            return


def _write_once(path: Path, content: str | bytes) -> None:
    with replacing(path) as scratch, scratch.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside a file: what is written there takes the file's place at the end, and is removed after an error."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        scratch.replace(path)
    except BaseException:
        with suppress(OSError):  # what went wrong first is what the user must read
            scratch.unlink(missing_ok=True)
        raise


def sync_to_disk(path: Path) -> None:
    """Flush a file or directory to disk, so a rename cannot overtake its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, data: Any) -> None:
    write_atomically(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


@contextmanager
def open_stored(path: Path) -> Iterator[io.FileIO]:
    """A file of a run, which a stranger may have sent: no pipe, which would wait, and no endless device."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if found.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than a file of a run may have")
        yield file


def read_stored(path: Path) -> bytes:
    with open_stored(path) as file:
        return file.readall()


def load_json(path: Path) -> Any:
    """Whatever a JSON file of a run holds; `ValueError` where it holds none, or nothing that could be read."""
    try:
        return json.loads(read_stored(path).decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; raises `DamagedRun` naming the file when it is not one."""
    try:
        data = load_json(path)
    except FileNotFoundError:
        raise DamagedRun(f"{path} is missing") from None
    except OSError as error:
        raise DamagedRun(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedRun(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise DamagedRun(f"{path} is damaged: it holds a {type(data).__name__}, not an object")
    return data


def read_if_whole(path: Path) -> dict[str, Any] | None:
    """The same; None for a file that is missing or not yet whole."""
    try:
        return read_json(path)
    except DamagedRun:
        return None


@contextmanager
def storage_errors(path: Path, flag: str = "--runs-dir") -> Iterator[None]:
    """Turn a full or failing disk, a limit or a missing permission into an error with the place and the next step."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(_existing_parent(path)).free
            again = (
                "'scalelab resume' continues from here"
                if flag == "--runs-dir"
                else f"try again, or choose another {flag}"
            )
            raise StorageFull(f"no space left for {path} ({free} bytes free): free some space, then {again}") from error
        if error.errno in UNWRITABLE:
            raise NotWritable(f"{path} cannot be written ({error.strerror}): choose another {flag}") from error
        if error.errno in BROKEN:
            cure = "raise ulimit -f" if error.errno == errno.EFBIG else "check the file system"
            again = ", then 'scalelab resume' continues from here" if flag == "--runs-dir" else ""
            raise NotWritable(f"{path} cannot be written ({error.strerror}): {cure}{again}") from error
        raise


def _existing_parent(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


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


MOST_ARCHIVE_BYTES = 3_000_000
"""Of an archive: with the program that draws, a page stays below 5 MB."""
MOST_ARCHIVED_FILES = 2_000
"""A run of more files stays whole on disk: packing some of its trials would not help to check the report."""
MOST_RAW_BYTES = 60_000_000
"""Before compression: more would take seconds."""
RUN_FILES = ("run.json", "environment.json")
TRIAL_FILES = ("trial.json", "result.json", "samples.csv", "transfers.csv", "fetches.csv")
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The same files give the same archive."""


@dataclass(frozen=True, kw_only=True)
class Archive:
    """Files to download as one."""

    name: str
    content: bytes
    num_files: int
    left_out: tuple[str, ...] = ()
    """Files that were too large, by name."""


def pack_runs(paths: Sequence[Path], *, most_bytes: int = MOST_ARCHIVE_BYTES) -> Archive:
    """The raw files of runs for a reader to check a report by, small ones first, as far as there is room.

    Traces, logs and checkpoints are left out, and so are files that would make a page too large to mail; it names them.
    """
    import zipfile  # here: ranks need none

    files = list(islice(((path, file) for path in paths for file in list_raw_files(path)), MOST_ARCHIVED_FILES + 1))
    if len(files) > MOST_ARCHIVED_FILES:
        return pack_plans(paths)
    files.sort(key=lambda pair: pair[1].stat().st_size)
    buffer, left_out, num_files, num_raw_bytes = io.BytesIO(), [], 0, 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for run, file in files:
            name = f"{run.resolve().name}/{file.relative_to(run)}"
            num_raw_bytes += file.stat().st_size
            # Numbers as text shrink to about a third.
            if num_raw_bytes > MOST_RAW_BYTES or buffer.tell() + file.stat().st_size / 3 > most_bytes:
                left_out.append(name)
                continue
            archive.writestr(zipfile.ZipInfo(name, LONG_AGO), file.read_bytes(), zipfile.ZIP_DEFLATED)
            num_files += 1
    name = f"{paths[0].resolve().name}.zip" if len(paths) == 1 else "runs.zip"
    return Archive(name=name, content=buffer.getvalue(), num_files=num_files, left_out=tuple(left_out))


def pack_plans(paths: Sequence[Path]) -> Archive:
    """Only what runs were and where, if they have too many trials."""
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            for name in RUN_FILES:
                text = (path / name).read_bytes() if is_plain(path / name) else b""
                archive.writestr(zipfile.ZipInfo(f"{path.resolve().name}/{name}", LONG_AGO), text, zipfile.ZIP_DEFLATED)
    name = f"{paths[0].resolve().name}.zip" if len(paths) == 1 else "runs.zip"
    num_trials = sum(len(list_names(path / "trials")) for path in paths)
    left_out = (f"the files of {num_trials} trials",)
    return Archive(name=name, content=buffer.getvalue(), num_files=len(paths) * len(RUN_FILES), left_out=left_out)


def list_raw_files(run: Path) -> Iterator[Path]:
    """What everything else of a run is derived from."""
    yield from (run / name for name in RUN_FILES if is_plain(run / name))
    for trial in map((run / "trials").joinpath, sorted(list_names(run / "trials"))):
        if not trial.is_symlink():
            yield from (trial / name for name in TRIAL_FILES if is_plain(trial / name))


def list_names(directory: Path) -> list[str]:
    """What a directory holds; nothing if there is none."""
    return os.listdir(directory) if directory.is_dir() else []  # noqa: PTH208 - paths of 10,000 trials take longer


def is_plain(file: Path) -> bool:
    """Whether it is a file and not a link, which in a run from someone else may point to any file of the reader's."""
    return file.is_file() and not file.is_symlink()
