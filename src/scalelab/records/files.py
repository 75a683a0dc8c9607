"""Atomic writes, and operating-system errors as messages for the user."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from scalelab.errors import DamagedRun, NotWritable, StorageFull

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
            time.sleep(0.05 * 4**number / 4)
        else:
            return


def _write_once(path: Path, content: str | bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        with suppress(OSError):  # what went wrong first is what the user must read
            scratch.unlink(missing_ok=True)
        raise


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
