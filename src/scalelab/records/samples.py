"""`samples.csv`, one line per rank and step; `transfers.csv`, one per rank and timing of an exchange; `fetches.csv`,
one per rank and batch of a stored set.

All are readable by pandas and spreadsheets. Times are written with `repr`, so that a value read back is the very
value measured. An empty field is "not timed".
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

from scalelab.errors import DamagedRun
from scalelab.records.files import read_stored
from scalelab.records.observations import Fetch, Transfer
from scalelab.records.tasks import Exchange, Read
from scalelab.records.trial import StepKind, StepSample, TrialResult

COLUMNS = StepSample._fields
FIRST_COLUMNS = COLUMNS[: COLUMNS.index("ready_seconds")]
"""What the first files had. Columns were only ever added behind them: a file with fewer is read as it is."""

KINDS = {kind.value: kind for kind in StepKind}
_MAKE_SAMPLE = partial(tuple.__new__, StepSample)
"""A sample of all its fields, in a third of the time of the call by name."""

TRANSFER_COLUMNS = Transfer._fields
FETCH_COLUMNS = Fetch._fields

RAW_FILES = ("samples", "transfers", "fetches")
"""What stands beside `result.json`, as CSV; see `list_raw`."""

Line = TypeVar("Line", StepSample, Transfer, Fetch)


def list_raw(result: TrialResult) -> dict[str, Sequence[tuple[object, ...]]]:
    """The lines of every raw file that a trial has: samples, and what is timed where nothing is trained."""
    found: dict[str, Sequence[tuple[object, ...]]] = {"samples": result.samples}
    match result.trial.task:
        case Exchange():
            found["transfers"] = result.transfers
        case Read():
            found["fetches"] = result.fetches
    return found


def render_raw(name: str, lines: Iterable[tuple[object, ...]]) -> str:
    """The whole of one of `RAW_FILES`, header first."""
    columns = {"samples": COLUMNS, "transfers": TRANSFER_COLUMNS, "fetches": FETCH_COLUMNS}[name]
    return _render(columns, lines)


def read_raw(path: Path, checksum: str | None, count: int | None) -> list[Any]:
    """Read one of `RAW_FILES`; raises `DamagedRun` if it does not match the checksum in its result."""
    parsers: dict[str, Callable[[str], list[Any]]] = {
        "samples": parse_samples, "transfers": parse_transfers, "fetches": parse_fetches,
    }  # fmt: skip
    return _read(path, checksum, count, parsers[path.stem])


def render_samples(samples: Iterable[StepSample]) -> str:
    """The whole file, header first."""
    return _render(COLUMNS, samples)


def render_transfers(transfers: Iterable[Transfer]) -> str:
    """The same for the timings of an exchange."""
    return _render(TRANSFER_COLUMNS, transfers)


def _render(columns: Sequence[str], lines: Iterable[tuple[object, ...]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if value is None else value for value in line] for line in lines)
    return text.getvalue()


def parse_samples(text: str) -> list[StepSample]:
    """The samples in a file's text; raises `ValueError` on a line that is not one."""
    found = _parse_columns(text)
    if found is not None:
        return found
    rows = _split_rows(text)
    if not rows or not _is_header(rows[0]):
        raise ValueError(f"the header is {rows[0] if rows else None}, not {list(COLUMNS)}")
    return [_parse_row(row, len(rows[0])) for row in rows[1:]]


def _is_header(names: list[str]) -> bool:
    return len(names) >= len(FIRST_COLUMNS) and tuple(names) == COLUMNS[: len(names)]


def parse_transfers(text: str) -> list[Transfer]:
    """The same for the timings of an exchange."""
    rows = _split_rows(text)
    if not rows or tuple(rows[0]) != TRANSFER_COLUMNS:
        raise ValueError(f"the header is {rows[0] if rows else None}, not {list(TRANSFER_COLUMNS)}")
    return [_parse_transfer(row) for row in rows[1:]]


def parse_fetches(text: str) -> list[Fetch]:
    """The same for the batches of a stored set."""
    rows = _split_rows(text)
    if not rows or tuple(rows[0]) != FETCH_COLUMNS:
        raise ValueError(f"the header is {rows[0] if rows else None}, not {list(FETCH_COLUMNS)}")
    return [_parse_fetch(row) for row in rows[1:]]


def _split_rows(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"it is not valid CSV: {error}") from error


def _read(path: Path, checksum: str | None, count: int | None, parse: Callable[[str], list[Line]]) -> list[Line]:
    try:
        data = read_stored(path)
    except OSError as error:
        raise DamagedRun(f"{path} cannot be read: {error.strerror}") from error
    if checksum != sha256_of(data):
        raise DamagedRun(f"{path} does not match the checksum in its result: it was truncated or modified")
    try:
        lines = parse(data.decode("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise DamagedRun(f"{path} is damaged: {error}") from error
    if len(lines) != count:
        raise DamagedRun(f"{path} has {len(lines)} {path.stem}, but its result lists {count}")
    return lines


def read_partial_samples(path: Path) -> list[StepSample]:
    """The samples of a rank that may have died while writing: a last line that was cut is dropped."""
    return _read_partial(path, parse_samples)


def read_partial_transfers(path: Path) -> list[Transfer]:
    """The same for the timings of an exchange."""
    return _read_partial(path, parse_transfers)


def _read_partial(path: Path, parse: Callable[[str], list[Line]]) -> list[Line]:
    try:
        text = read_stored(path).decode("utf-8")
        return parse(text[: text.rfind("\n") + 1])
    except (OSError, ValueError):
        return []


def read_partial_fetches(path: Path) -> list[Fetch]:
    """The same for the batches of a stored set."""
    return _read_partial(path, parse_fetches)


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _parse_columns(text: str) -> list[StepSample] | None:
    """Samples column by column, in a fifth of the time; None where a line is wrong, which `_parse_row` then names."""
    header, _, body = text.partition("\n")
    names = header.split(",")
    if not _is_header(names) or {line.count(",") for line in body.splitlines()} != {len(names) - 1}:
        return None
    fields = body.replace("\n", ",").split(",")
    if fields.pop():  # after the last line
        return None
    ranks, steps, kinds, *times = (fields[place :: len(names)] for place in range(len(names)))
    try:
        starts, seconds = (list(map(float, column)) for column in times[:2])
        if not all(map(math.isfinite, seconds)):
            return None
        columns = [starts, seconds, *map(_parse_column, times[2:])]
        missing = [[None] * len(seconds)] * (len(COLUMNS) - len(names))
        rows = zip(map(int, ranks), map(int, steps), map(KINDS.__getitem__, kinds), *columns, *missing, strict=True)
        return list(map(_MAKE_SAMPLE, rows))
    except (ValueError, KeyError):
        return None


def _parse_column(column: list[str]) -> Iterable[float | None]:
    """Numbers, some of which may be missing; often all of them are, or none."""
    if "" not in column:
        return map(float, column)
    return [float(number) if number else None for number in column] if any(column) else repeat(None, len(column))


def _parse_row(row: list[str], num_columns: int) -> StepSample:
    if len(row) != num_columns:
        raise ValueError(f"a line has {len(row)} fields, not {num_columns}: {row}")
    rank, step, kind, start, duration, *rest = row
    if not start or not duration or not math.isfinite(seconds := float(duration)):
        raise ValueError(f"a step has no time: {row}")
    known = KINDS.get(kind) or StepKind(kind)
    others = [float(number) if number else None for number in rest]
    return StepSample(int(rank), int(step), known, float(start), seconds, *others)


def _parse_transfer(row: list[str]) -> Transfer:
    if len(row) != len(TRANSFER_COLUMNS):
        raise ValueError(f"a line has {len(row)} fields, not {len(TRANSFER_COLUMNS)}: {row}")
    rank, operation, payload, repeat, calls, start, seconds = row
    found = Transfer(int(rank), operation, int(payload), int(repeat), int(calls), float(start), float(seconds))
    if not math.isfinite(found.seconds) or found.num_calls < 1:
        raise ValueError(f"a timing has no time: {row}")
    return found


def _parse_fetch(row: list[str]) -> Fetch:
    if len(row) != len(FETCH_COLUMNS):
        raise ValueError(f"a line has {len(row)} fields, not {len(FETCH_COLUMNS)}: {row}")
    rank, order, access, cache, *numbers = row
    epoch, batch, samples = map(int, numbers[:3])
    found = Fetch(int(rank), order, access, cache, epoch, batch, samples, *map(float, numbers[3:]))
    if not math.isfinite(found.fetch_seconds + found.copy_seconds) or found.num_samples < 1:
        raise ValueError(f"a batch has no time: {row}")
    return found
