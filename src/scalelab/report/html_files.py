"""What a page carries to be downloaded: the raw files of a run in one archive.

A report that convinces can be checked. So the page holds what it was derived from: plan, environment, and of every
trial its samples and its result. Traces, logs and checkpoints are left out, and so is whatever would make the page
heavier than a mail takes: what is missing is named.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 3_000_000
"""Of an archive: with the program that draws, a page stays below 5 MB."""
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


def pack_runs(paths: Sequence[Path], *, most_bytes: int = MOST_BYTES) -> Archive:
    """The raw files of runs, small ones first, as far as there is room."""
    files = [(path, file) for path in paths for file in list_raw_files(path)]
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


def list_raw_files(run: Path) -> Iterator[Path]:
    """What everything else of a run is derived from."""
    yield from (run / name for name in RUN_FILES if (run / name).is_file())
    for trial in sorted((run / "trials").glob("*")):
        yield from (trial / name for name in TRIAL_FILES if (trial / name).is_file())
