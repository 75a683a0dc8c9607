"""An export of Nsight Systems as a trace: `nsys export --type sqlite`.

Kernels, copies and fills come from CUPTI's tables, with the call that launched each (`correlationId`, a number of its
process). Ranges of NVTX are annotations. A range named after a step (`step 3`, `iteration_3`, `ProfilerStep#3`) marks a
step; one of torch's `emit_nvtx` (`aten::mm, seq = 4, …`) is an operator. NVIDIA documents the schema as subject to
change, so a column that is missing is unknown, and other tables are ignored.

The times of a file count from the begin of its session, whose time of day is in it. Process groups and message sizes
are not: a collective is known by the name of its kernel.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from scalelab.errors import TraceUnreadable
from scalelab.trace.files.events import LARGEST_NS, NO_READINGS, Arguments, Batch, Header, Readings, TimedEvent

BATCH_ROWS = 4096
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES = "NVTX_EVENTS"
ACTIVITIES = {KERNELS: "kernel", "CUPTI_ACTIVITY_KIND_MEMCPY": "gpu_memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "gpu_memset"}
"""What a device did, by table, with the category of torch's profiler."""
COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
PUSHED, STARTED = 59, 60
"""Types of NVTX events: ranges of a thread, and ranges that may end on another."""
STEP = re.compile(
    r"^(?:ProfilerStep#|(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?)[ _#:=-]*)(\d{1,9})$", re.IGNORECASE
)
OPERATOR = re.compile(r"^([\w:]+)(?:, (?:seq|op_id) = (\d{1,18}))")
VERSION = re.compile(r"_v\d+$")
"""What CUPTI appends to the names of calls."""
PID_BITS = 24
PROCESS_SHIFT = 40
"""Numbers of other processes than the first begin here: every process counts its own calls."""


class NsysFile:
    """One export. `batches` may be gone through once; the header is complete only afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = Header()
        self.num_bytes = path.stat().st_size
        self.num_unusable = 0
        """Rows that were left out: no time, no end, an end before the start."""
        self.memory: Readings = NO_READINGS
        self._processes: dict[int, int] = {}

    def error(self, what: str) -> TraceUnreadable:
        return TraceUnreadable(f"cannot read {self.path}: {what}")

    def batches(self) -> Iterator[Batch]:
        """Everything that has a duration, table by table."""
        try:
            address = f"file:{quote(str(self.path.absolute()))}?mode=ro&immutable=1"
            with closing(sqlite3.connect(address, uri=True)) as database:
                database.text_factory = lambda text: text.decode(errors="replace")
                database.execute("PRAGMA trusted_schema = OFF")
                yield from self._read(database)
        except sqlite3.Error as error:
            raise self.error(f"not a readable SQLite database ({error}): export it again") from None

    def _read(self, database: sqlite3.Connection) -> Iterator[Batch]:
        columns = _list_columns(database)
        if not {KERNELS, CALLS, RANGES} & columns.keys():
            raise self.error("the database has no activity of CUDA: give an export of nsys (--trace=cuda,nvtx)")
        self._read_header(database, columns)
        for table, category in ACTIVITIES.items():
            if table in columns:
                yield from self._take(_select_activity(database, table, columns), category)
        if CALLS in columns:
            rows = _select(database, CALLS, columns, ("start", "end", "globalTid", "correlationId"), "nameId")
            yield from self._take((_read_call(row) for row in rows), "cuda_runtime")
        if RANGES in columns:
            rows = _select(database, RANGES, columns, ("start", "end", "globalTid", "eventType", "text"), "textId")
            kept = (row for row in rows if row[3] in (PUSHED, STARTED))
            yield from self._take((_read_range(row) for row in kept), "user_annotation")

    def _read_header(self, database: sqlite3.Connection, columns: dict[str, set[str]]) -> None:
        for (start,) in _query(database, "TARGET_INFO_SESSION_START_TIME", columns, ("utcEpochNs",)):
            self.header.base_ns = start if isinstance(start, int) and 0 <= start < LARGEST_NS else 0
        for name, value in _query(database, "TARGET_INFO_SYSTEM_ENV", columns, ("name", "value")):
            if name == "Hostname" and isinstance(value, str):
                self.header.host_name = value
        devices = _query(database, "TARGET_INFO_GPU", columns, ("id", "name", "totalMemory"))
        self.header.device_properties = [
            {"id": number, "name": str(name or ""), "totalGlobalMem": memory} for number, name, memory in devices
        ]

    def _take(self, rows: Iterator[tuple[Any, ...]], category: str) -> Iterator[Batch]:
        """Batches of rows: start, end, process and thread of the host or device and stream, correlation, name."""
        chunk: list[tuple[Any, ...]] = []
        for row in rows:
            start, end, process, lane, correlation, name = row
            numbers = (start, end, process, lane, correlation)
            if not all(isinstance(one, int) for one in numbers) or not 0 <= start <= end < LARGEST_NS:
                self.num_unusable += 1
                continue
            chunk.append((start, end, process, lane, correlation, str(name or "")))
            if len(chunk) >= BATCH_ROWS:
                yield self._make_batch(chunk, category)
                chunk = []
        if chunk:
            yield self._make_batch(chunk, category)

    def _make_batch(self, rows: Sequence[tuple[int, int, int, int, int, str]], category: str) -> Batch:
        on_device, events = category in ACTIVITIES.values(), []
        for _, _, process, lane, correlation, name in rows:
            owner = process >> PID_BITS
            number = self._processes.setdefault(owner, len(self._processes))
            known = correlation + (number << PROCESS_SHIFT) if 0 < correlation < 1 << PROCESS_SHIFT else -1
            sequence, kind = -1, category
            operator = OPERATOR.match(name) if category == "user_annotation" else None
            step = STEP.match(name) if category == "user_annotation" else None
            if operator is not None:
                name, sequence, kind = operator[1], int(operator[2]), "cpu_op"
            elif step is not None:
                name = f"ProfilerStep#{int(step[1])}"
            event = TimedEvent(
                cat=kind,
                name=name,
                pid=lane >> 32 if on_device else owner & (1 << PID_BITS) - 1,
                tid=lane & (1 << 32) - 1 if on_device else lane & (1 << PID_BITS) - 1,
                args=Arguments(correlation=known, sequence_number=sequence),
            )
            events.append(event)
        start, end = (np.array([row[side] for row in rows], dtype=np.int64) for side in (0, 1))
        return Batch(events, start, end)


def _list_columns(database: sqlite3.Connection) -> dict[str, set[str]]:
    """The columns of every table that is looked for."""
    tables = (*ACTIVITIES, CALLS, RANGES, "StringIds", "TARGET_INFO_SESSION_START_TIME", "TARGET_INFO_SYSTEM_ENV")
    found = {}
    for table in (*tables, "TARGET_INFO_GPU"):
        names = {row[1] for row in database.execute(f'PRAGMA table_info("{table}")')}
        if names:
            found[table] = names
    return found


def _query(
    database: sqlite3.Connection, table: str, columns: dict[str, set[str]], wanted: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """Rows of a table, without names; a column that is missing is unknown."""
    if table in columns:
        named = ", ".join(f't."{name}"' if name in columns[table] else "NULL" for name in wanted)
        yield from database.execute(f'SELECT {named} FROM "{table}" AS t')  # names are ours


def _select(
    database: sqlite3.Connection, table: str, columns: dict[str, set[str]], wanted: Sequence[str], key: str
) -> Iterator[tuple[Any, ...]]:
    """The same with the text that a column refers to."""
    named = ", ".join(f't."{name}"' if name in columns[table] else "NULL" for name in wanted)
    if key in columns[table] and "StringIds" in columns:
        join = f'LEFT JOIN StringIds AS text ON text.id = t."{key}"'
        yield from database.execute(f'SELECT {named}, text.value FROM "{table}" AS t {join}')
    else:
        yield from database.execute(f'SELECT {named}, NULL FROM "{table}" AS t')


def _select_activity(
    database: sqlite3.Connection, table: str, columns: dict[str, set[str]]
) -> Iterator[tuple[Any, ...]]:
    """What a device did; its lane is device and stream."""
    wanted = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId", "copyKind")
    key = "demangledName" if "demangledName" in columns[table] else "shortName"
    for start, end, process, device, stream, correlation, copy, name in _select(database, table, columns, wanted, key):
        if table != KERNELS:
            name = f"Memcpy {COPIES.get(copy, '')}".strip() if "MEMCPY" in table else "Memset"
        are_known = all(isinstance(one, int) and 0 <= one < 1 << 31 for one in (device, stream))
        lane = (device << 32) + stream if are_known else None
        yield start, end, process or 0, lane, correlation if isinstance(correlation, int) else -1, name


def _read_call(row: tuple[Any, ...]) -> tuple[Any, ...]:
    start, end, thread, correlation, name = row
    number = correlation if isinstance(correlation, int) else -1
    return start, end, thread, thread, number, VERSION.sub("", str(name or ""))


def _read_range(row: tuple[Any, ...]) -> tuple[Any, ...]:
    start, end, thread, _, text, registered = row
    return start, end, thread, thread, -1, text or registered
