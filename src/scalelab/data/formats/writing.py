"""Write a dataset atomically.

A format writes to a hidden name beside the target, which is synced and renamed into place. A full disk, a signal or a
refused array leaves nothing behind.

Some libraries cannot handle a full disk: HDF5 retries when the file is closed and at exit, and then crashes; torch.save
hides the cause. They write to a `RememberingFile`, whose writes never fail: the first error is kept, later writes are
dropped, and the error is raised once the library has closed it.
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
from scalelab.records.files import storage_errors, sync_to_disk

MOST_FILES = 100
"""Files synced one by one; for more, one sync of everything is faster."""


def write_set(
    path: Path,
    arrays: Arrays,
    *,
    format: str,  # noqa: A002
    options: Settings | None = None,
    overwrite: bool = False,
) -> int:
    """Write columns in a format; returns the bytes on disk."""
    check_arrays(arrays)
    form = load_format(format)
    refuse_options(format, options or {}, form.write_options)
    if path.exists() and not overwrite:
        raise UsageError(f"{path} already exists: choose another name, or use --overwrite")
    with taking_place(path) as scratch:
        form.write(scratch, {name: make_native(array) for name, array in arrays.items()}, options or {})
    return count_bytes(path)


def make_native(array: Array) -> Array:
    """The same values in native byte order: some formats have no other."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@contextmanager
def taking_place(path: Path) -> Iterator[Path]:
    """A scratch path that becomes `path` at the end, and is removed after a failure."""
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
    """Rename; a directory in the way is moved aside first, and back if that fails."""
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
    """Unsynced data may be lost after the rename, or fail only later."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    if len(files) > MOST_FILES:
        os.sync()
        return
    for file in files:
        sync_to_disk(file)


def count_bytes(path: Path) -> int:
    """Of a file, or all files in a directory."""
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
        """Write all of it, or nothing after the first error."""
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
    """A new file whose first error is raised at the end."""
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
