"""The collectives of one rank as its trace records them: kind, times, bytes, group.

On a device, a collective is a communication kernel. The arguments on the kernel come first; if there are none (older
traces, RCCL's generic kernel), the record that torch made on the host at launch (`record_param_comms`, by external
id), or the operator around it. Otherwise the kind comes from the kernel's name and the size is unknown.

On a host, a collective is the annotation of the thread that ran it (gloo, MPI). Kind and size come from the operator
that requested it, which may be something else: gloo runs a reduce-scatter as an all-reduce of the whole tensor. The
threads serve calls in order, so the k-th call and the k-th annotation belong together. If their numbers differ, as when
a trace begins between the two, an annotation gets the last free call before it that agrees in size. Nested annotations
on one thread are one collective. NCCL's host annotations (`nccl:all_reduce`) do not count: the kernel does.

A collective and an operator take 128 bytes each while a file is read; this is the part that grows with the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from scalelab.trace.collectives import (
    REQUESTS,
    CollectiveList,
    CollectiveRow,
    CollectiveRows,
    MessageSize,
    Texts,
    count_recorded_bytes,
    read_annotated_message,
    read_operator_message,
)
from scalelab.trace.events import Event, GroupInfo, Header, Kind, find_collective_kind

RUN_AS = {"reduce_scatter": "all_reduce"}
"""What gloo runs instead of a collective that it does not have."""
MOST_LOOKS = 64
"""How many calls before an annotation are looked at."""


class CollectiveCall(NamedTuple):
    """An operator that asked for a collective."""

    kind: str
    start_ns: int
    size: MessageSize


class CollectiveRun(NamedTuple):
    """What a thread ran."""

    kind: str
    start_ns: int
    size: MessageSize


def assign_calls(ran: Sequence[CollectiveRun], calls: Sequence[CollectiveCall]) -> list[CollectiveCall | None]:
    """For everything that ran, in order of its start, the call behind it; None: there is none."""
    kinds = {run.kind for run in ran}
    found: list[CollectiveCall | None] = [None] * len(ran)
    for kind in kinds:
        places = [place for place, run in enumerate(ran) if run.kind == kind]
        asked = [call for call in calls if _name_run(call.kind, kinds) == kind]
        runs = [ran[place] for place in places]
        for place, call in zip(places, _assign_alike(runs, asked), strict=True):
            found[place] = call
    return found


def _name_run(kind: str, kinds: set[str]) -> str:
    """What a call is run as, given all that was run."""
    return kind if kind in kinds else RUN_AS.get(kind, kind)


def _assign_alike(runs: Sequence[CollectiveRun], calls: Sequence[CollectiveCall]) -> list[CollectiveCall | None]:
    """The calls of one kind of run."""
    if len(runs) == len(calls):
        pairs = list(zip(runs, calls, strict=True))
        if all(call.start_ns <= run.start_ns and _may_agree(run, call) for run, call in pairs):
            return list(calls)
    starts = [call.start_ns for call in calls]
    is_free = [True] * len(calls)
    found: list[CollectiveCall | None] = []
    for run in runs:
        last = bisect_right(starts, run.start_ns) - 1
        near = range(last, max(-1, last - MOST_LOOKS), -1)
        place = next((place for place in near if is_free[place] and _may_agree(run, calls[place])), None)
        found.append(None if place is None else calls[place])
        if place is not None:
            is_free[place] = False
    return found


def _may_agree(run: CollectiveRun, call: CollectiveCall) -> bool:
    """Whether the sizes may be those of one message; an unknown one may be any."""
    known = (run.size.num_elements, call.size.num_elements)
    return None in known or run.size.is_piece != call.size.is_piece or known[0] == known[1]


RECORD = "record_param_comms"
OPERATORS = "c10d::"
UNKNOWN = -1
LARGEST = 2**62
"""A number beyond is broken."""
LARGEST_GROUP = 2**31
"""More ranks no group has."""
BARRIER = "barrier"


class CollectiveCollector:
    """Takes what a trace says of collectives, event by event in the order of the file."""

    def __init__(self) -> None:
        self._texts = Texts()
        self._threads: dict[tuple[int | str, int | str], int] = {}
        self._found = CollectiveRows()
        self._calls = CollectiveRows()

    def take(self, event: Event, start_ns: int, end_ns: int, kind: Kind) -> None:
        """An event that is communication, or an operator that may have asked for some."""
        if kind is Kind.COMMUNICATION:
            self._found.append(self._read_collective(event, start_ns, end_ns))
        elif event.name.startswith(OPERATORS) or event.name == RECORD:
            self._calls.append(self._read_call(event, start_ns, end_ns))

    def _read_collective(self, event: Event, start_ns: int, end_ns: int) -> CollectiveRow:
        on_device = event.cat.lower() == "kernel"
        ran = find_collective_kind(event.name)
        asked = find_collective_kind(event.args.collective) if event.args.collective else "other"
        kind = ran if asked == "other" else asked
        size = MessageSize() if on_device else read_annotated_message(ran, event.args)
        return self._make_row(event, start_ns, end_ns, kind, "" if ran in (kind, "other") else ran, size, on_device)

    def _read_call(self, event: Event, start_ns: int, end_ns: int) -> CollectiveRow:
        request = REQUESTS.get(event.name.removeprefix(OPERATORS))
        if request is not None:
            kind, size = request.kind, read_operator_message(request, event.args)
        else:
            kind, size = find_collective_kind(event.args.collective), MessageSize()
        return self._make_row(event, start_ns, end_ns, kind, "", size, False)

    def _make_row(
        self, event: Event, start_ns: int, end_ns: int, kind: str, ran_as: str, size: MessageSize, on_device: bool
    ) -> CollectiveRow:
        args, number = event.args, self._texts.number
        thread = self._threads.setdefault((event.pid, event.tid), len(self._threads))
        payload_bytes = count_recorded_bytes(kind, args)
        return CollectiveRow(
            start_ns=start_ns,
            end_ns=end_ns,
            kind=number(kind),
            ran_as=number(ran_as),
            name=number(event.name),
            thread=thread,
            on_device=int(on_device),
            group=number(args.group_name),
            group_size=_bound(args.group_size, LARGEST_GROUP),
            sequence=_bound(args.sequence),
            payload_bytes=UNKNOWN if payload_bytes is None else payload_bytes,
            external_id=_bound(args.external_id),
            num_elements=UNKNOWN if size.num_elements is None else _bound(size.num_elements),
            element_bytes=UNKNOWN if size.element_bytes is None else size.element_bytes,
            is_piece=int(size.is_piece),
            is_record=int(event.name == RECORD),
        )

    def finish(self, header: Header) -> CollectiveList:
        """The collectives in the order of their start."""
        groups = _Groups(header)
        order = [int(place) for place in np.argsort(self._found.column("start_ns"), kind="stable")]
        rows = [self._found[place] for place in order]
        on_device = self._fill_from_records([row for row in rows if row.on_device])
        on_host = self._fill_from_calls(drop_nested([row for row in rows if not row.on_device]), groups)
        finished = CollectiveRows()
        for row in sorted([*on_device, *on_host], key=lambda row: row.start_ns):
            finished.append(self._complete(row, groups))
        self._found = self._calls = CollectiveRows()
        return CollectiveList(finished, self._texts.texts)

    def _fill_from_records(self, rows: list[CollectiveRow]) -> Iterator[CollectiveRow]:
        """Kernels that say nothing themselves, filled from the host's record of the call."""
        other = self._texts.number("other")
        lacking = {row.external_id for row in rows if row.payload_bytes < 0 or row.kind == other} - {UNKNOWN, 0}
        calls = self._find_calls(lacking) if lacking else {}
        for row in rows:
            call = calls.get(row.external_id)
            if call is None or (row.payload_bytes >= 0 and row.kind != other):
                yield row
                continue
            ran = row.ran_as if row.ran_as else row.kind
            kind = row.kind if call.kind == other else call.kind
            yield row._replace(
                kind=kind,
                ran_as=0 if ran in (kind, other) else ran,
                group=row.group or call.group,
                group_size=max(row.group_size, call.group_size),
                sequence=max(row.sequence, call.sequence),
                payload_bytes=max(row.payload_bytes, call.payload_bytes),
                num_elements=call.num_elements,
                element_bytes=call.element_bytes,
                is_piece=call.is_piece,
            )

    def _find_calls(self, external_ids: set[int]) -> dict[int, CollectiveRow]:
        """The records and operators by external id; a record without a size takes that of the operator around it."""
        operators: dict[int, list[CollectiveRow]] = {}
        found: dict[int, CollectiveRow] = {}
        is_record = self._calls.column("is_record").astype(bool)
        external = self._calls.column("external_id")
        for place in np.argsort(self._calls.column("start_ns"), kind="stable"):
            if not is_record[place]:
                row = self._calls[int(place)]
                operators.setdefault(row.thread, []).append(row)
                if row.external_id in external_ids:
                    found.setdefault(row.external_id, row)
        for place in np.flatnonzero(is_record & np.isin(external, list(external_ids))):
            record = self._calls[int(place)]
            around = _find_around(operators.get(record.thread, []), record)
            if record.payload_bytes < 0 and around is not None:
                kind = record.kind if record.kind != self._texts.number("other") else around.kind
                size = {name: getattr(around, name) for name in ("num_elements", "element_bytes", "is_piece")}
                record = record._replace(kind=kind, **size)
            found[record.external_id] = record
        return found

    def _fill_from_calls(self, rows: list[CollectiveRow], groups: _Groups) -> Iterator[CollectiveRow]:
        """What threads of the host ran, with kind and size of the operator that asked for it."""
        text, number = self._texts.texts, self._texts.number
        calls = [self._calls[place] for place in range(len(self._calls))] if rows else []
        asked = sorted(
            (CollectiveCall(text[row.kind], row.start_ns, row.size) for row in calls if not row.is_record),
            key=lambda call: call.start_ns,
        )
        ran = [CollectiveRun(text[row.kind], row.start_ns, row.size) for row in rows]
        for row, run, call in zip(rows, ran, assign_calls(ran, asked), strict=True):
            size, kind = row.size, row.kind
            if call is not None:
                kind = number(call.kind)
                if call.size.num_elements is not None:
                    size = call.size._replace(element_bytes=call.size.element_bytes or run.size.element_bytes)
            payload_bytes = size.count_bytes(groups.find_size(text[row.group]))
            yield row._replace(
                kind=kind,
                ran_as=0 if kind == row.kind else row.kind,
                payload_bytes=max(row.payload_bytes, UNKNOWN if payload_bytes is None else payload_bytes),
            )

    def _complete(self, row: CollectiveRow, groups: _Groups) -> CollectiveRow:
        """Group and size by the header, where the event does not say them."""
        text = self._texts.texts
        name = text[row.group] or groups.only_name
        group_size = row.group_size if row.group_size > 0 else groups.find_size(name) or UNKNOWN
        payload_bytes = row.payload_bytes
        if payload_bytes < 0:
            counted = row.size.count_bytes(group_size if group_size > 0 else None)
            payload_bytes = UNKNOWN if counted is None else counted
        if text[row.kind] == BARRIER:
            payload_bytes = UNKNOWN
        return row._replace(group=self._texts.number(name), group_size=group_size, payload_bytes=payload_bytes)


class _Groups:
    """The process groups of a header."""

    def __init__(self, header: Header) -> None:
        distributed = header.distributed
        self._world_size = distributed.world_size if distributed else None
        self._groups: dict[str, GroupInfo] = {g.pg_name: g for g in (distributed.pg_config if distributed else ())}

    @property
    def only_name(self) -> str:
        """The name of the one group; empty where there are several, or none is listed."""
        return next(iter(self._groups)) if len(self._groups) == 1 else ""

    def find_size(self, name: str) -> int | None:
        """The ranks of a group. Where none is listed, or all are alike, the name does not matter."""
        found = self._find_listed(name)
        return found if found is not None and 0 < found < LARGEST_GROUP else None

    def _find_listed(self, name: str) -> int | None:
        if name in self._groups:
            return self._groups[name].pg_size or len(self._groups[name].ranks) or None
        sizes = {group.pg_size for group in self._groups.values()}
        if not sizes:
            return self._world_size
        return sizes.pop() or None if len(sizes) == 1 else None


def drop_nested(rows: Sequence[CollectiveRow]) -> list[CollectiveRow]:
    """Without those inside another on the same thread; rows are in order of their start."""
    reach: dict[int, int] = {}
    kept = []
    for row in sorted(rows, key=lambda row: (row.start_ns, -row.end_ns)):
        if row.end_ns <= reach.get(row.thread, row.start_ns - 1):
            continue
        reach[row.thread] = max(row.end_ns, reach.get(row.thread, row.end_ns))
        kept.append(row)
    return kept


def _find_around(operators: Sequence[CollectiveRow], record: CollectiveRow) -> CollectiveRow | None:
    """The last operator of the thread that began before the record and ends after it; operators are in order."""
    low, high = 0, len(operators)
    while low < high:
        middle = (low + high) // 2
        if operators[middle].start_ns <= record.start_ns:
            low = middle + 1
        else:
            high = middle
    found = operators[low - 1] if low else None
    return found if found is not None and found.end_ns >= record.end_ns else None


def _bound(number: int, limit: int = LARGEST) -> int:
    return number if 0 <= number < limit else UNKNOWN
