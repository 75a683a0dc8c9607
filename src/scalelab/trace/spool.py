"""Records of a trace, given in the order of the file and taken back in the order of time, in bounded memory.

Profilers write events thread by thread. They are sorted as one sorts what does not fit in memory: pieces that do are
sorted and written to a temporary file without a name, then merged block by block. A trace of fewer records than one
piece never touches the disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import NDArray

from scalelab.errors import StorageFull

RECORD = np.dtype(
    [
        ("start", np.int64),
        ("end", np.int64),
        ("correlation", np.int64),
        ("name", np.int32),
        ("lane", np.int32),
        ("kind", np.uint8),
        ("on_device", np.bool_),
    ]
)
"""An event: times in nanoseconds, numbers of its name and lane in the tables of the rank."""
Records = NDArray[np.void]

PIECE_RECORDS = 1 << 17


class Spool:
    """Takes records in any order, gives them back by their start."""

    def __init__(self, piece_records: int | None = None) -> None:
        self._piece_records = piece_records or PIECE_RECORDS
        self._pending: list[Records] = []
        self._num_pending = 0
        self._file: IO[bytes] | None = None
        self._pieces: list[tuple[int, int]] = []
        """Offset and number of records of every sorted piece in the file."""

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could not be written is not missed any more
                self._file.close()

    def add(self, records: Records) -> None:
        self._pending.append(records)
        self._num_pending += len(records)
        if self._num_pending >= self._piece_records:
            self._write_piece(self._take_pending())

    def in_order(self) -> Iterator[Records]:
        """All records in blocks: within a block and from block to block, no start is before the last one."""
        if not self._pieces:
            yield self._take_pending()
            return
        if self._num_pending:
            self._write_piece(self._take_pending())
        block = max(256, 2 * self._piece_records // len(self._pieces))
        places = [list(piece) for piece in self._pieces]
        loaded = [np.empty(0, dtype=RECORD) for _ in places]
        while True:
            for index, (place, records) in enumerate(zip(places, loaded, strict=True)):
                if not len(records) and place[1]:
                    loaded[index] = self._load(place, block)
            # Beyond the first start that is not loaded yet of any piece, more may follow.
            bound = min((r["start"][-1] for r, place in zip(loaded, places, strict=True) if place[1]), default=None)
            ready = []
            for index, records in enumerate(loaded):
                cut = len(records) if bound is None else int(np.searchsorted(records["start"], bound, side="right"))
                ready.append(records[:cut])
                loaded[index] = records[cut:]
            if sum(map(len, ready)):
                yield sort_by_start(np.concatenate(ready))
            if bound is None:
                return

    def _take_pending(self) -> Records:
        records = np.concatenate(self._pending) if self._pending else np.empty(0, dtype=RECORD)
        self._pending, self._num_pending = [], 0
        return sort_by_start(records)

    def _write_piece(self, records: Records) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="scalelab-")  # noqa: SIM115  # closed by __exit__
            offset = self._file.seek(0, 2)
            self._file.write(records.tobytes())
            self._file.flush()
        except OSError as error:
            raise StorageFull(
                f"cannot sort the trace in {tempfile.gettempdir()}: {error.strerror}: free space there, or set TMPDIR"
            ) from None
        self._pieces.append((offset, len(records)))

    def _load(self, place: list[int], block: int) -> Records:
        """The next records of a piece; `place` moves on."""
        assert self._file is not None
        count = min(block, place[1])
        self._file.seek(place[0])
        records = np.frombuffer(self._file.read(count * RECORD.itemsize), dtype=RECORD)
        place[0] += count * RECORD.itemsize
        place[1] -= count
        return records


def sort_by_start(records: Records) -> Records:
    return records[np.argsort(records["start"], kind="stable")]
