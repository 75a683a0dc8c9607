"""`samples.csv`: one line per rank and step, readable by pandas and spreadsheets.

Times are written with `repr`, so that a value read back is the very value measured. An empty field is "not timed".
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Iterable
from pathlib import Path

from scalelab.errors import DamagedRun
from scalelab.trial import StepKind, StepSample

COLUMNS = StepSample._fields
FIRST_COLUMNS = COLUMNS[: COLUMNS.index("ready_seconds")]
"""What the first files had. Columns were only ever added behind them: a file with fewer is read as it is."""


def render_samples(samples: Iterable[StepSample]) -> str:
    """The whole file, header first."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(["" if value is None else value for value in sample] for sample in samples)
    return text.getvalue()


def parse_samples(text: str) -> list[StepSample]:
    """The samples in a file's text; raises `ValueError` on a line that is not one."""
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"it is no CSV: {error}") from error
    if not rows or len(rows[0]) < len(FIRST_COLUMNS) or tuple(rows[0]) != COLUMNS[: len(rows[0])]:
        raise ValueError(f"the header is {rows[0] if rows else None}, not {list(COLUMNS)}")
    return [_parse_row(row, len(rows[0])) for row in rows[1:]]


def read_samples(path: Path, checksum: str | None, count: int | None) -> list[StepSample]:
    """Read a trial's samples, refusing a file that is not the one its result was written with."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedRun(f"{path} cannot be read: {error.strerror}") from error
    if checksum != sha256_of(data):
        raise DamagedRun(f"{path} is not the file its result was written with: truncated or changed")
    try:
        samples = parse_samples(data.decode("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise DamagedRun(f"{path} is damaged: {error}") from error
    if len(samples) != count:
        raise DamagedRun(f"{path} holds {len(samples)} samples, its result says {count}")
    return samples


def read_partial_samples(path: Path) -> list[StepSample]:
    """The samples of a rank that may have died while writing: a last line that was cut is dropped."""
    try:
        text = path.read_text(encoding="utf-8")
        return parse_samples(text[: text.rfind("\n") + 1])
    except (OSError, ValueError):
        return []


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _parse_row(row: list[str], num_columns: int) -> StepSample:
    if len(row) != num_columns:
        raise ValueError(f"a line has {len(row)} fields, not {num_columns}: {row}")
    rank, step, kind, *numbers = row
    start, duration, *rest = (float(number) if number else None for number in numbers)
    if start is None or duration is None or not math.isfinite(duration):
        raise ValueError(f"a step has no time: {row}")
    return StepSample(int(rank), int(step), StepKind(kind), start, duration, *rest)
