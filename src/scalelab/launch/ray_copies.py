"""Ranks on Ray nodes that do not see the trial's directory: what is sent there, and what comes back.

Such a node gets one archive: the trial's directory, and the working directory if the trial names a file of it. The
paths in its `trial.json` are those of the copy. While its ranks run, the files that they write are handed back, each as
far as it is new, so that the launcher reads them where it always does; larger things (traces, checkpoints) come when
the rank has ended. The address at which rank 0 listens goes the other way. A node that dies has handed back all but its
last second.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scalelab.errors import LaunchFailed
from scalelab.launch.agreement import scratch_directory
from scalelab.records.files import TRIAL_FILE, write_atomically
from scalelab.records.running import hold_directory, remove_leftovers
from scalelab.units import format_bytes

MOST_BYTES = 500_000_000
"""Of what a node is sent: Ray's own limit for a working directory."""
GROWING = (".csv", ".log", ".jsonl")
"""Files that ranks only ever add to."""
MEETING = "rendezvous-*.json"


class FilePart(NamedTuple):
    """What is new of a file."""

    name: str
    """Below the trial's directory."""
    offset: int
    content: bytes


class Packed(NamedTuple):
    """What a node is sent."""

    archive: bytes
    moved: Mapping[str, str]
    """Where paths of this machine are in the archive."""


def pack_trial(directory: Path, working: Path) -> Packed:
    """The files of a trial; raises `LaunchFailed` where they are too many for a network."""
    trial = json.loads((directory / TRIAL_FILE).read_text(encoding="utf-8"))
    named = [Path(words.partition(":")[0]) for words in _list_texts(trial) if words]
    files = {file for file in (working / name for name in named) if file.is_file()}
    moved = {str(directory): "trial", str(working): "workdir"}
    sent = {file: f"trial/{file.relative_to(directory)}" for file in _walk(directory, directory)}
    if any(file.is_relative_to(working) for file in files):
        sent |= {file: f"workdir/{file.relative_to(working)}" for file in _walk(working, directory)}
    for number, file in enumerate(sorted(files - sent.keys())):
        sent[file] = moved[str(file)] = f"files/{number}/{file.name}"
    size = sum(file.stat().st_size for file in sent)
    if size > MOST_BYTES:
        raise LaunchFailed(
            f"a Ray node does not see {directory}, and {working} has {format_bytes(size)}, of which at most"
            f" {format_bytes(MOST_BYTES)} are sent: start in a directory without data, or share a file system"
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for file, name in sent.items():
            archive.add(file, name, recursive=False)
    return Packed(buffer.getvalue(), moved)


def _list_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _list_texts(one)


def _walk(root: Path, directory: Path) -> Iterator[Path]:
    """The files below, without hidden ones, caches and the directory of runs that this trial is in."""
    left_out = set() if root == directory else {directory, *directory.parents}
    for place, names, files in os.walk(root):
        here = Path(place)
        names[:] = [name for name in names if name[0] != "." and name != "__pycache__" and here / name not in left_out]
        yield from (here / name for name in files if name[0] != "." and (here / name).is_file())


class Copy:
    """A trial on a node that does not see its directory."""

    def __init__(self, packed: Packed) -> None:
        remove_leftovers()  # of a node, or an actor, that was killed
        self._held = contextlib.ExitStack()
        self.place = self._held.enter_context(hold_directory("ray"))
        self.directory, self.working = self.place / "trial", self.place / "workdir"
        self.working.mkdir()
        with tarfile.open(fileobj=io.BytesIO(packed.archive)) as archive:
            archive.extractall(self.place, filter="data")
        trial = self.directory / TRIAL_FILE
        moved = {old: str(self.place / new) for old, new in packed.moved.items()}
        trial.write_text(json.dumps(relocate(json.loads(trial.read_text(encoding="utf-8")), moved)), encoding="utf-8")
        self._known: dict[str, tuple[int, int]] = {}
        self.collect(is_last=True)  # what was sent is not sent back

    def collect(self, *, is_last: bool) -> list[FilePart]:
        """What is new since the last call; what lies in directories of the trial only if it is the last."""
        scratch = scratch_directory(self.directory)
        files = _walk(self.directory, self.directory) if is_last else _list_files(self.directory)
        return [piece for file in files if not file.is_relative_to(scratch) for piece in self._read_new(file)]

    def _read_new(self, file: Path) -> Iterator[FilePart]:
        name = str(file.relative_to(self.directory))
        size, changed = self._known.get(name, (0, 0))
        with contextlib.suppress(FileNotFoundError), file.open("rb") as stream:
            found = os.fstat(stream.fileno())
            if (found.st_size, found.st_mtime_ns) != (size, changed):
                offset = size if file.suffix in GROWING and found.st_size >= size else 0
                stream.seek(offset)
                content = stream.read()
                self._known[name] = (offset + len(content), found.st_mtime_ns)
                yield FilePart(name, offset, content)

    def put(self, name: str, content: bytes) -> None:
        """A file that another rank has written."""
        file = self.directory / name
        if not file.exists():
            write_atomically(file, content)

    def remove(self) -> None:
        self._held.close()


def _list_files(directory: Path) -> list[Path]:
    return [file for file in directory.iterdir() if not file.name.startswith(".") and file.is_file()]


def relocate(value: Any, moved: Mapping[str, str]) -> Any:
    """A record in which paths of the launcher's machine are those of the copy."""
    if isinstance(value, dict):
        return {name: relocate(one, moved) for name, one in value.items()}
    if isinstance(value, list):
        return [relocate(one, moved) for one in value]
    if isinstance(value, str):
        for old in sorted(moved, key=len, reverse=True):
            if value == old or value.startswith((f"{old}/", f"{old}:")):
                return moved[old] + value[len(old) :]
    return value


def write_piece(directory: Path, piece: FilePart) -> None:
    """Put what a node handed back where the launcher reads it."""
    file = directory / piece.name
    file.parent.mkdir(parents=True, exist_ok=True)
    if piece.offset and file.exists():
        with file.open("r+b") as stream:
            stream.seek(piece.offset)
            stream.write(piece.content)
    else:
        write_atomically(file, piece.content)
