"""A file for libraries that cannot bear a full disk.

HDF5 keeps what it could not write, tries again when the file is closed and at last when the process ends, and ends it
with a signal; torch.save hides the cause behind an error of its own. So they write to a file that takes everything:
the first error is remembered, what comes after it is dropped, and the error is raised once the library has closed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
