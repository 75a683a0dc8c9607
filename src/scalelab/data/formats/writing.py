"""Writing a set: whole or not at all.

A format writes beside the place, into a name that begins with a dot. What is there is then forced to the disk and takes
its place in one rename. A full disk, a signal or a refused array leaves nothing behind.

A file for libraries that cannot bear a full disk.

HDF5 keeps what it could not write, tries again when the file is closed and at last when the process ends, and ends it
with a signal; torch.save hides the cause behind an error of its own. So they write to a file that takes everything:
the first error is remembered, what comes after it is dropped, and the error is raised once the library has closed.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scalelab.data.formats.catalogue import load_format
from scalelab.data.formats.columns import Array, Arrays, Settings, check_arrays, refuse_options
from scalelab.errors import UsageError
from scalelab.records.files import storage_errors

MOST_FILES = 100
"""That are forced to the disk one by one; of more, everything at once takes less time."""


def write_set(
    path: Path,
    arrays: Arrays,
    *,
    format: str,  # noqa: A002
    options: Settings | None = None,
    overwrite: bool = False,
) -> int:
    """Write columns in a format; gives the bytes on disk."""
    check_arrays(arrays)
    form = load_format(format)
    refuse_options(format, options or {}, form.write_options)
    if path.exists() and not overwrite:
        raise UsageError(f"{path} already exists: choose another name, or use --overwrite")
    with taking_place(path) as scratch:
        form.write(scratch, {name: make_native(array) for name, array in arrays.items()}, options or {})
    return count_bytes(path)


def make_native(array: Array) -> Array:
    """The same numbers with their bytes in this machine's order: not every format knows another."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@contextmanager
def taking_place(path: Path) -> Iterator[Path]:
    """A path to write to; what is there in the end becomes `path`, and nothing stays after a failure."""
    scratch = path.with_name(f".{path.stem[:100]}.{os.getpid()}{path.suffix}")
    with storage_errors(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(scratch)
        try:
            yield scratch
            force_to_disk(scratch)
            put_into_place(scratch, path)
        except BaseException:
            remove(scratch)
            raise


def put_into_place(scratch: Path, path: Path) -> None:
    """In one rename; a directory, or a file that becomes one, is moved aside first and back if that fails."""
    if not path.exists() or not (path.is_dir() or scratch.is_dir()):
        scratch.replace(path)
        return
    aside = scratch.with_name(f"{scratch.name}.old")
    remove(aside)
    path.rename(aside)
    try:
        scratch.rename(path)
    except BaseException:
        aside.rename(path)
        raise
    remove(aside)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def force_to_disk(path: Path) -> None:
    """What is not on the disk may be lost after the rename, or be reported as full only later."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    if len(files) > MOST_FILES:
        os.sync()
        return
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def count_bytes(path: Path) -> int:
    """Of a file, or of all files in a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(found.stat().st_size for found in path.rglob("*") if found.is_file())


class RememberingFile(io.RawIOBase):
    """A new file whose writes never fail."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.error: OSError | None = None
        self._file = path.open("w+b", buffering=0)

    def write(self, data: Any) -> int:
        """All of it, or nothing from the first error on."""
        left = memoryview(data).cast("B")
        num_bytes = len(left)
        try:
            while len(left) and self.error is None:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error
        return num_bytes

    def truncate(self, size: int | None = None, /) -> int:
        try:
            return self._file.truncate(size)
        except OSError as error:
            self.error = self.error or error
            return self._file.tell() if size is None else size

    def readinto(self, data: Any) -> int | None:
        return self._file.readinto(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def remembering_errors(path: Path) -> Iterator[RememberingFile]:
    """A new file; what went wrong with it is raised at the end, whatever else was."""
    file = RememberingFile(path)
    try:
        yield file
    except Exception as error:
        if file.error is None:
            raise
        raise file.error from error
    finally:
        file.close()
    if file.error is not None:
        raise file.error
