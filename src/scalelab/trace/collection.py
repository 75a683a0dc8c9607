"""The collectives of one rank as its trace records them: kind, times, bytes, group.

On a device, a collective is a communication kernel. The arguments on the kernel come first; if there are none (older
traces, RCCL's generic kernel), what the host said around the call that launched it: torch's record
(`record_param_comms`), its annotation (`nccl:all_to_all`) or the operator (`c10d::alltoall_base_`). The launch is found
by correlation number (`linking.py`); if it is not in the trace, the record by external id. Otherwise the kind comes
from the kernel's name and the size is unknown.

On a host, a collective is the annotation of the thread that ran it (gloo, MPI). Kind and size come from the operator
that requested it (`linking.py`), which may be something else: gloo runs a reduce-scatter as an all-reduce of the whole
tensor. Nested annotations on one thread are one collective. NCCL's host annotations (`nccl:all_reduce`) do not count:
the kernel does. A kernel of unknown name that one of them launched, with no other that communicates, is a collective.

A collective and a request take 168 bytes each while a file is read; this is the part that grows with the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.collectives import (
    REQUESTS,
    CollectiveList,
    CollectiveRow,
    CollectiveRows,
    MessageSize,
    Texts,
    count_received_bytes,
    count_recorded_bytes,
    read_annotated_message,
    read_operator_message,
)
from scalelab.trace.files.events import Arguments, GroupInfo, Header, TimedEvent
from scalelab.trace.kinds import KERNEL_CATEGORIES, MOST_NAMES, RECORD, REQUEST, find_collective_kind, find_peer
from scalelab.trace.linking import (
    CollectiveCall,
    CollectiveRun,
    HostCall,
    Links,
    Requests,
    RequestSpans,
    StepBasis,
    Unnamed,
    assign_calls,
    drop_nested,
    find_around,
    find_spans,
)
from scalelab.trace.windows import ProfilerStep, find_among, find_distinct, place_in_steps

OPERATORS = "c10d::"
UNKNOWN = -1
NUM_OWN = CollectiveRow._fields.index("kind")
"""Fields at the begin of a row that every event has of its own."""
LARGEST = 2**62
"""A number beyond is broken."""
LONGEST_SHAPES = 1 << 12
"""Bytes of shapes and types beyond which a call is read each time."""
LARGEST_GROUP = 2**31
"""More ranks no group has."""
BARRIER = "barrier"
NCCL_PAIRS = "send_recv"
"""How NCCL's kernel is called that runs every all-to-all, gather and scatter: nothing else that was run instead."""


def _find_steps(rows: CollectiveRows, links: Links, host_steps: Sequence[ProfilerStep]) -> NDArray[np.int64]:
    """The step in which each was launched, or begins if no kernel of the trace has a launch."""
    is_linked = links.basis is StepBasis.LAUNCHES
    on_device = rows.column("on_device").astype(np.bool_)
    starts, is_known = rows.column("start_ns"), ~on_device | (not is_linked)
    correlations = rows.column("correlation")
    for place in np.flatnonzero(on_device).tolist() if is_linked else ():
        launch = links.launches.get(int(correlations[place]))
        if launch is not None:
            starts[place], is_known[place] = launch.start, True
    on_host, of_device = (
        np.array([*(_bound(step.number) for step in steps), UNKNOWN])[place_in_steps(steps, starts)]
        for steps in (host_steps, links.steps)
    )
    return np.where(is_known, np.where(on_device & (not is_linked), of_device, on_host), UNKNOWN)


class CollectiveCollector:
    """Takes what a trace says of collectives, event by event in the order of the file."""

    def __init__(self) -> None:
        self._texts = Texts()
        self._found = CollectiveRows()
        self._calls = CollectiveRows()
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        """What is the same for all events of one thing."""

    def take(self, event: TimedEvent, start_ns: int, end_ns: int, lane: int, *, is_run: bool) -> None:
        """An event that is communication (`is_run`), or something on the host that may have asked for some."""
        args = event.args
        key = (is_run, event.cat, event.name, args.collective, args.in_elements, args.out_elements, args.element_type,
               args.group_name, args.group_size, args.sender, args.receiver, bytes(args.input_dims),
               bytes(args.input_types))  # fmt: skip
        same = self._known.get(key)
        if same is None:
            same = (self._read_collective if is_run else self._read_call)(event)[NUM_OWN:]
            if len(self._known) < MOST_NAMES and len(key[-2]) + len(key[-1]) < LONGEST_SHAPES:
                self._known[key] = same
        external_id = UNKNOWN if args.external_id == args.correlation else _bound(args.external_id)
        own = (start_ns, end_ns, lane, _bound(args.sequence), external_id, _bound(args.correlation), UNKNOWN)
        (self._found if is_run else self._calls).append((*own, *same))

    def list_correlations(self) -> list[int]:
        """The numbers of the launches that are looked for."""
        return [int(number) for number in find_distinct(self._found.column("correlation")) if number > 0]

    def list_annotations(self) -> dict[int, RequestSpans]:
        """Where every thread announced a collective of a kernel."""
        names = [place for place, name in enumerate(self._texts.texts) if REQUEST.match(name)]
        is_named = find_among(self._calls.column("name"), names)
        return find_spans(self._calls, np.flatnonzero(is_named))

    def take_unnamed(self, kernels: Sequence[Unnamed], names: Sequence[str]) -> None:
        """Kernels that communicate because a collective was announced where they were launched."""
        for kernel in kernels:
            event = TimedEvent(name=names[kernel.name], cat="kernel", args=Arguments(correlation=kernel.correlation))
            self.take(event, kernel.start, kernel.end, kernel.lane, is_run=True)

    def _read_collective(self, event: TimedEvent) -> CollectiveRow:
        on_device = event.cat.lower() in KERNEL_CATEGORIES
        ran = find_collective_kind(event.name)
        asked = find_collective_kind(event.args.collective) if event.args.collective else "other"
        kind = ran if asked == "other" else asked
        size = MessageSize() if on_device else read_annotated_message(ran, event.args)
        ran_as = "" if ran in (kind, "other", NCCL_PAIRS) else ran
        return self._make_row(event, kind=kind, ran_as=ran_as, size=size, on_device=on_device)

    def _read_call(self, event: TimedEvent) -> CollectiveRow:
        request = REQUESTS.get(event.name.removeprefix(OPERATORS))
        if request is not None:
            kind, size = request.kind, read_operator_message(request, event.args)
        elif event.name == RECORD:
            kind, size = find_collective_kind(event.args.collective), MessageSize()
        else:
            kind = find_collective_kind(event.name)
            size = read_annotated_message(kind, event.args)
        return self._make_row(event, kind=kind, ran_as="", size=size, on_device=False)

    def _make_row(
        self, event: TimedEvent, *, kind: str, ran_as: str, size: MessageSize, on_device: bool
    ) -> CollectiveRow:
        """What is the same for all events of one thing."""
        args, number = event.args, self._texts.number
        payload_bytes, received_bytes = count_recorded_bytes(kind, args), count_received_bytes(kind, args)
        return CollectiveRow(
            start_ns=UNKNOWN,
            end_ns=UNKNOWN,
            thread=UNKNOWN,
            sequence=UNKNOWN,
            external_id=UNKNOWN,
            correlation=UNKNOWN,
            step=UNKNOWN,
            kind=number(kind),
            ran_as=number(ran_as),
            name=number(event.name),
            on_device=int(on_device),
            group=number(args.group_name),
            group_size=_bound(args.group_size, LARGEST_GROUP),
            payload_bytes=UNKNOWN if payload_bytes is None else payload_bytes,
            peer=find_peer(event.name),
            num_elements=UNKNOWN if size.num_elements is None else _bound(size.num_elements),
            element_bytes=UNKNOWN if size.element_bytes is None else size.element_bytes,
            is_piece=int(size.is_piece),
            received_bytes=UNKNOWN if received_bytes is None else received_bytes,
            peer_rank=_bound({"send": args.receiver, "recv": args.sender}.get(kind, UNKNOWN), LARGEST_GROUP),
            is_record=int(event.name == RECORD),
        )

    def finish(self, header: Header, links: Links, host_steps: Sequence[ProfilerStep]) -> CollectiveList:
        """The collectives in the order of their start."""
        groups = _Groups(header)
        on_device = self._found.column("on_device").astype(np.bool_)
        order = np.argsort(self._found.column("start_ns"), kind="stable")
        on_host = drop_nested([self._found[place] for place in order[~on_device[order]].tolist()])
        finished = CollectiveRows()
        for row in self._fill_from_requests(order[on_device[order]].tolist(), links.launches):
            finished.append(self._complete(row, groups))
        for row in self._fill_from_calls(on_host, groups):
            finished.append(self._complete(row, groups))
        self._found = self._calls = CollectiveRows()
        self._known = {}
        if on_host:
            finished = finished.take(np.argsort(finished.column("start_ns"), kind="stable"))
        finished.set_column("step", _find_steps(finished, links, host_steps))
        return CollectiveList(finished, self._texts.texts)

    def _fill_from_requests(self, places: Sequence[int], launches: Mapping[int, HostCall]) -> Iterator[CollectiveRow]:
        """Kernels that say nothing themselves, filled with what the host said where it launched them."""
        other = self._texts.number("other")
        filled: dict[tuple[Any, ...], CollectiveRow] = {}
        """By what is the same for all calls of one thing."""
        kinds, transfers = self._found.column("kind"), [self._texts.number(kind) for kind in ("send", "recv")]
        has_peer = np.maximum(self._found.column("peer"), self._found.column("peer_rank")) >= 0
        is_lacking = (self._found.column("payload_bytes") < 0) | (kinds == other)
        is_lacking |= find_among(kinds, transfers) & ~has_peer
        pairs = zip(
            *(self._found.column(name)[places].tolist() for name in ("external_id", "correlation")), strict=True
        )
        lacking = [pair for pair, is_one in zip(pairs, is_lacking[places].tolist(), strict=True) if is_one]
        requests = Requests(self._calls) if lacking else None
        external_ids = {external_id for external_id, number in lacking if number not in launches} - {UNKNOWN, 0}
        calls = self._find_calls(external_ids) if external_ids else {}
        for place in places:
            row = self._found[place]
            launch = launches.get(row.correlation)
            if requests is None or not is_lacking[place]:
                yield row
            elif launch is not None:
                yield self._fill_once(row, requests.find_around(launch), filled)
            else:
                yield self._fill_once(row, [calls[row.external_id]] if row.external_id in calls else [], filled)

    def _fill_once(
        self, row: CollectiveRow, calls: Sequence[CollectiveRow], filled: dict[tuple[Any, ...], CollectiveRow]
    ) -> CollectiveRow:
        """As `_fill`, which takes longer; what it gives depends on nothing that calls have of their own, but for the
        number in the group."""
        key = (row[NUM_OWN:], *(call[NUM_OWN:] for call in calls))
        known = filled.get(key)
        if known is None:
            known = filled[key] = self._fill(row, calls)
        sequence = max([row.sequence, *(call.sequence for call in calls)])
        place = CollectiveRow._fields.index("sequence")
        return CollectiveRow._make((*row[:place], sequence, *row[place + 1 : NUM_OWN], *known[NUM_OWN:]))

    def _fill(self, row: CollectiveRow, calls: Sequence[CollectiveRow]) -> CollectiveRow:
        """What a kernel does not say, from the calls around its launch, the innermost first."""
        if not calls:
            return row
        if row.payload_bytes >= 0 and row.kind != self._texts.number("other"):
            return row._replace(peer=max(row.peer, *(call.peer for call in calls)))
        other, pairs = self._texts.number("other"), self._texts.number(NCCL_PAIRS)
        asked = next((call.kind for call in calls if call.kind != other), row.kind)
        ran = row.ran_as if row.ran_as else row.kind
        sized = [call for call in calls if call.num_elements >= 0 and call.element_bytes >= 0]
        size = min(sized, key=lambda call: call.is_piece, default=calls[0])
        return row._replace(
            kind=asked,
            ran_as=0 if ran in (asked, other, pairs) else ran,
            group=row.group or next((call.group for call in calls if call.group), 0),
            group_size=max(row.group_size, *(call.group_size for call in calls)),
            payload_bytes=max(row.payload_bytes, *(call.payload_bytes for call in calls)),
            received_bytes=max(row.received_bytes, *(call.received_bytes for call in calls)),
            peer=max(row.peer, *(call.peer for call in calls)),
            num_elements=size.num_elements,
            element_bytes=size.element_bytes,
            is_piece=size.is_piece,
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
        for place in np.flatnonzero(is_record & find_among(external, external_ids)):
            record = self._calls[int(place)]
            around = find_around(operators.get(record.thread, []), record)
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
            (
                CollectiveCall(text[row.kind], row.start_ns, row.size)
                for row in calls
                if text[row.name].startswith(OPERATORS)
            ),
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
        peer = row.peer if row.peer >= 0 else groups.find_place(name, row.peer_rank)
        number = self._texts.number(name)
        return row._replace(group=number, group_size=group_size, payload_bytes=payload_bytes, peer=peer)


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

    def find_place(self, name: str, rank: int) -> int:
        """Of a rank of the job within a group; the rank itself if its ranks are not listed."""
        ranks = self._groups[name].ranks if name in self._groups else []
        return ranks.index(rank) if rank in ranks else UNKNOWN if ranks else rank

    def _find_listed(self, name: str) -> int | None:
        if name in self._groups:
            return self._groups[name].pg_size or len(self._groups[name].ranks) or None
        sizes = {group.pg_size for group in self._groups.values()}
        if not sizes:
            return self._world_size
        return sizes.pop() or None if len(sizes) == 1 else None


def _bound(number: int, limit: int = LARGEST) -> int:
    return number if 0 <= number < limit else UNKNOWN
