"""What an HTML page embeds: the raw files of its runs, and the JavaScript that draws its charts.

The archive holds the plan, the environment, and the samples and result of every trial, so that a reader can check the
report. Traces, logs and checkpoints are left out, and so are files that would make the page too large to mail; the page
names them.

The JavaScript is Vega, Vega-Lite and vega-embed, bundled by vl-convert. Bundling takes longer than the rest of the
report, so the bundle is cached in `$XDG_CACHE_HOME/scalelab` or `~/.cache/scalelab`, named by the version of vl-convert
and checked by its hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

from scalelab.errors import UsageError
from scalelab.records.files import write_atomically

MOST_BYTES = 3_000_000
"""Of an archive: with the program that draws, a page stays below 5 MB."""
MOST_FILES = 2_000
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


def pack_runs(paths: Sequence[Path], *, most_bytes: int = MOST_BYTES) -> Archive:
    """The raw files of runs, small ones first, as far as there is room."""
    files = list(islice(((path, file) for path in paths for file in list_raw_files(path)), MOST_FILES + 1))
    if len(files) > MOST_FILES:
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


PACKAGE = "vl-convert-python"
SNIPPET = "window.vegaEmbed = vegaEmbed;"
NOTICE = (
    "/* Vega, Vega-Lite, vega-embed and what they are made of: (c) University of Washington Interactive Data Lab and"
    " contributors, BSD-3-Clause and other permissive licences; https://vega.github.io */"
)


def find_version() -> str:
    """The version of vl-convert that is installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        raise UsageError(
            "--html draws charts with vl-convert, which is not installed: pip install 'scalelab[report]', or use"
            " --markdown or --json, which need no extra package"
        ) from None


def load_script() -> str:
    """The program, as text for a script element; it sets `vegaEmbed` and keeps its other names to itself."""
    place = find_cache_directory() / f"vega-{find_version()}.js"
    return read_kept(place) or make_script(place)


def find_cache_directory() -> Path:
    """Where a user's programs keep what they can make again (XDG Base Directory Specification)."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with contextlib.suppress(RuntimeError):  # no home directory
        chosen = chosen.expanduser()
    return chosen / "scalelab"


def read_kept(place: Path) -> str | None:
    """The text that was kept; None if there is none, or not the one that was written."""
    try:
        digest, _, script = place.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return script if digest == f"// {hash_text(script)}" else None


def make_script(place: Path) -> str:
    """Have vl-convert bundle the program, and keep it where that is possible."""
    import vl_convert

    # A script element ends at the first </script, wherever that stands.
    bundled = vl_convert.javascript_bundle(SNIPPET).replace("</script", "<\\/script").replace("<!--", "<\\!--")
    script = f"{NOTICE}\n(function () {{\n{bundled}\n}})();\n"
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, f"// {hash_text(script)}\n{script}")
    return script


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
