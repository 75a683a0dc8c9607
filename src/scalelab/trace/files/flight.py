"""What ranks were doing when a job hung, from the dumps of torch's flight recorder.

torch keeps the last collectives of every rank in a ring buffer (`TORCH_FR_BUFFER_SIZE`) and writes them to a file per
rank when a collective times out (`nccl_trace_rank_0`), or when a program asks for them
(`torch._C._distributed_c10d._dump_fr_trace`). A dump is a pickle or JSON. A pickle is read without any class or
function, only lists, tuples, dicts, texts and numbers, so a dump from a stranger cannot run code.

Collectives of a group are numbered. The collective that the job hangs in is the first that not every rank has
completed. Ranks without an entry for it never called it: they are elsewhere, and their last entries say where. If all
ranks have called it, but with other kinds, sizes or types, they wait for different things. The buffer has a limited
number of entries: what it no longer holds is not compared.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from scalelab.errors import TraceUnreadable
from scalelab.trace.kinds import find_collective_kind

RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|bin))?$")
LARGEST_DUMP = 1 << 30
PICKLE = b"\x80"
FOREIGN = re.compile(r"site-packages|dist-packages|(^|/)lib/python\d|^<")
EQUAL_SIZES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
"""Collectives whose inputs have the same size on all ranks."""


class FlightEntry(NamedTuple):
    """One collective that a rank called."""

    group: str
    sequence: int
    kind: str
    sizes: str
    """Of its inputs, as text."""
    dtypes: str
    is_completed: bool
    is_started: bool
    created_ns: int | None
    source: str
    """The innermost line of the user's own code, `train.py:12`; empty: unknown."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.sequence}"


@dataclass(frozen=True, kw_only=True)
class FlightDump:
    """What one rank recorded."""

    path: Path
    rank: int
    entries: Sequence[FlightEntry]
    """Collectives; sends and receives have no number that ranks share."""
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of every group, as far as the dump says."""
    descriptions: Mapping[str, str] = field(default_factory=dict)


class _PlainUnpickler(pickle.Unpickler):
    """Knows no class and no function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which no dump of torch has")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it refers to another object ({pid!r})")


def is_dump(path: Path) -> bool:
    """Whether a file looks like a dump: a pickle, or JSON with entries instead of events."""
    try:
        with path.open("rb") as file:
            start = file.read(1 << 12)
    except OSError:
        return False
    if start[:1] == PICKLE:
        return True
    is_object = start.lstrip()[:1] == b"{" and b'"traceEvents"' not in start
    return is_object and (b'"entries"' in start or b'"comm_lib_version"' in start)


def find_dumps(paths: Sequence[Path]) -> list[Path]:
    """The dumps that paths lead to, if everything given is one: files, or directories without anything else."""
    found = []
    for path in paths:
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        if not files or not all(is_dump(file) for file in files):
            return []
        found += files
    return found


def read_dumps(paths: Sequence[Path]) -> list[FlightDump]:
    """Every rank's dump, in order of the ranks. Raises `TraceUnreadable` if one cannot be read."""
    found: dict[int, FlightDump] = {}
    for path in paths:
        dump = read_dump(path)
        if dump.rank in found:
            raise TraceUnreadable(f"{found[dump.rank].path} and {path} are both of rank {dump.rank}: give one of them")
        found[dump.rank] = dump
    return [found[rank] for rank in sorted(found)]


def read_dump(path: Path) -> FlightDump:
    """One rank's dump; the rank is the number that its name ends with."""
    match = RANK.search(path.name)
    if match is None:
        raise TraceUnreadable(f"cannot read {path}: its name has no rank; name dumps as torch does, nccl_trace_rank_0")
    content = _load(path)
    if not isinstance(content, dict) or not isinstance(content.get("entries", []), list | tuple):
        raise TraceUnreadable(f"cannot read {path}: not a dump of torch's flight recorder, which has a list of entries")
    groups = content.get("pg_config")
    groups = groups if isinstance(groups, dict) else {}
    status = content.get("pg_status")
    completed = {
        str(name): int(number)
        for name, one in (status.items() if isinstance(status, dict) else ())
        if isinstance(one, dict) and (number := str(one.get("last_completed_collective"))).isdecimal()
    }
    entries = [one for one in content.get("entries", []) if isinstance(one, dict)]
    return FlightDump(
        path=path,
        rank=int(match.group(1)),
        entries=[found for one in entries if (found := _read_entry(one, completed)) is not None],
        members={name: ranks for name, one in groups.items() if (ranks := _read_ranks(one))},
        descriptions=dict(_list_descriptions(entries)),
    )


def _load(path: Path) -> Any:
    try:
        if path.stat().st_size > LARGEST_DUMP:
            raise TraceUnreadable(f"cannot read {path}: larger than {LARGEST_DUMP >> 30} GiB, so not a dump")
        text = path.read_bytes()
    except OSError as error:
        raise TraceUnreadable(f"cannot read {path}: {error.strerror or error}") from None
    try:
        return _PlainUnpickler(io.BytesIO(text)).load() if text[:1] == PICKLE else msgspec.json.decode(text)
    except Exception as error:  # noqa: BLE001  # a damaged pickle raises anything
        raise TraceUnreadable(
            f"cannot read {path}: damaged, or not a dump of torch's flight recorder ({error})"
        ) from None


def _read_entry(one: Mapping[Any, Any], completed: Mapping[str, int]) -> FlightEntry | None:
    group = one.get("process_group")
    name = str(group[0]) if isinstance(group, list | tuple) and group else ""
    sequence, created = one.get("collective_seq_id"), one.get("time_created_ns")
    if one.get("is_p2p") or not isinstance(sequence, int) or sequence <= 0:
        return None
    state, called = one.get("state"), str(one.get("profiling_name") or "")
    # What NCCL retired without completing it has timed out; others, such as gloo, only say when they are done with it.
    is_retired = bool(one.get("retired")) and not called.startswith("nccl")
    is_completed = state == "completed" or is_retired or sequence <= completed.get(name, 0)
    return FlightEntry(
        group=name,
        sequence=sequence,
        kind=find_collective_kind(called),
        sizes=str(one.get("input_sizes") or "").replace("(", "[").replace(")", "]"),
        dtypes=", ".join(map(str, dtypes)) if isinstance(dtypes := one.get("input_dtypes"), list | tuple) else "",
        is_completed=is_completed,
        is_started=is_completed or state == "started",
        created_ns=created if isinstance(created, int) and created > 0 else None,
        source=_find_source(one.get("frames")),
    )


def _find_source(frames: Any) -> str:
    for frame in frames if isinstance(frames, list | tuple) else ():
        name = str(frame.get("filename") or "") if isinstance(frame, dict) else ""
        if name and not FOREIGN.search(name):
            return f"{name.rsplit('/', 1)[-1]}:{frame.get('line')}"
    return ""


def _read_ranks(group: Any) -> tuple[int, ...]:
    ranks = group.get("ranks") if isinstance(group, dict) else None
    listed = re.findall(r"\d{1,9}", ranks) if isinstance(ranks, str) else ranks if isinstance(ranks, list) else []
    return tuple(sorted({int(rank) for rank in listed if str(rank).isdigit()}))


def _list_descriptions(entries: Sequence[Mapping[Any, Any]]) -> Iterator[tuple[str, str]]:
    for one in entries:
        group = one.get("process_group")
        if isinstance(group, list | tuple) and len(group) > 1 and str(group[1]) != "undefined":
            yield str(group[0]), str(group[1])


@dataclass(frozen=True, kw_only=True)
class GroupFlight:
    """The collectives of one group."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """All members, as far as known."""
    undumped: tuple[int, ...]
    """Members without a dump."""
    last_completed: Mapping[int, int]
    """The highest number that a rank completed, and those before it; by rank with a dump."""
    last_called: Mapping[int, int]
    stuck: FlightEntry | None
    """The first collective that some rank called and not every rank completed; None: there is none."""
    waiting: tuple[int, ...] = ()
    """Ranks that called it and have not completed it."""
    missing: tuple[int, ...] = ()
    """Ranks that have not called it."""
    mismatch: Mapping[int, FlightEntry] = field(default_factory=dict)
    """The first collective whose kind, size or type ranks do not agree on, by rank."""


def inspect_flight(dumps: Sequence[FlightDump]) -> list[GroupFlight]:
    """Every group that called a collective, those that hang first."""
    names = sorted({entry.group for dump in dumps for entry in dump.entries})
    found = [_inspect_group(name, dumps) for name in names]
    return sorted(found, key=lambda group: (group.stuck is None, not group.missing, group.name))


def _inspect_group(name: str, dumps: Sequence[FlightDump]) -> GroupFlight:
    entries = {dump.rank: {e.sequence: e for e in dump.entries if e.group == name} for dump in dumps}
    stated = next((dump.members[name] for dump in dumps if dump.members.get(name)), ())
    ranks = stated or tuple(rank for rank, own in entries.items() if own)
    known = [rank for rank in ranks if rank in entries]
    completed = {rank: _find_completed(entries[rank]) for rank in known}
    called = {rank: max(entries[rank], default=0) for rank in known}
    least = min(completed.values(), default=0)
    after = sorted({number for rank in known for number in entries[rank] if number > least})
    stuck = next((entries[rank][after[0]] for rank in known if after and after[0] in entries[rank]), None)
    number = stuck.sequence if stuck is not None else 0
    return GroupFlight(
        name=name,
        description=next((dump.descriptions[name] for dump in dumps if name in dump.descriptions), ""),
        ranks=ranks,
        undumped=tuple(rank for rank in ranks if rank not in entries),
        last_completed=completed,
        last_called=called,
        stuck=stuck,
        waiting=tuple(rank for rank in known if stuck and number in entries[rank] and completed[rank] < number),
        missing=tuple(rank for rank in known if stuck and called[rank] < number),
        mismatch=_find_mismatch({rank: entries[rank] for rank in known}),
    )


def _find_completed(entries: Mapping[int, FlightEntry]) -> int:
    """The last number before the first that is not completed; 0: none is known."""
    found = 0
    for number in sorted(entries):
        if not entries[number].is_completed:
            return found or number - 1
        found = number
    return found


def _find_mismatch(entries: Mapping[int, Mapping[int, FlightEntry]]) -> dict[int, FlightEntry]:
    for number in sorted({number for own in entries.values() for number in own}):
        same = {rank: own[number] for rank, own in entries.items() if number in own}
        if len({(e.kind, e.dtypes, e.sizes if e.kind in EQUAL_SIZES else "") for e in same.values()}) > 1:
            return same
    return {}
