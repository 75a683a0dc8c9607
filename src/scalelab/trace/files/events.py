"""The part of Kineto's trace format that we read.

Kineto (torch.profiler) writes Chrome's trace format: times in microseconds, with nanoseconds since torch 2.4. Fields
that are not named here are skipped while decoding.

Events and headers that differ from Kineto's format (other field types, separate begin and end events) are repaired.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

NO_RAW = msgspec.Raw(b"null")
Integer = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""One that fits an array."""


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """What an event carries besides its time."""

    correlation: Integer = -1
    """Ties a kernel to the call that launched it."""
    stream: Integer = -1
    device: int = -1
    external_id: int = msgspec.field(default=-1, name="External id")
    collective: str = msgspec.field(default="", name="Collective name")
    in_elements: int = msgspec.field(default=-1, name="In msg nelems")
    out_elements: int = msgspec.field(default=-1, name="Out msg nelems")
    element_type: str = msgspec.field(default="", name="dtype")
    group_size: int = msgspec.field(default=-1, name="Group size")
    group_name: str = msgspec.field(default="", name="Process Group Name")
    sequence: int = msgspec.field(default=-1, name="Seq")
    sender: int = msgspec.field(default=-1, name="Src Rank")
    """Of a receive, in the whole job; since torch 2.5."""
    receiver: int = msgspec.field(default=-1, name="Dst Rank")
    task_type: str = msgspec.field(default="", name="Task Type")
    """What an NPU's profiler says of a task on the device (AI_CORE, HCCL …), which no category marks."""
    input_dims: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input type")
    concrete_inputs: msgspec.Raw = msgspec.field(default=NO_RAW, name="Concrete Inputs")
    sequence_number: Integer = msgspec.field(default=-1, name="Sequence number")
    """Autograd's: that of a forward operator and of its backward are the same."""
    allocated_bytes: Integer = msgspec.field(default=-1, name="Total Allocated")
    reserved_bytes: Integer = msgspec.field(default=-1, name="Total Reserved")
    device_type: int = msgspec.field(default=-1, name="Device Type")
    """Of memory: 0 is the host, others are devices."""


NO_ARGUMENTS = Arguments()


class TimedEvent(msgspec.Struct, gc=False):
    """One event. Only those with a duration (`ph` X, or a pair of B and E) are kept by the reader."""

    cat: str = ""
    name: str = ""
    ts: Integer | float | None = None
    dur: Integer | float | None = None
    pid: int | str = 0
    tid: int | str = 0
    args: Arguments = NO_ARGUMENTS


class Event(TimedEvent, gc=False):
    """One of any phase."""

    ph: str = ""


class CompleteEvent(TimedEvent, gc=False, tag_field="ph", tag="X"):
    """Most events, with their duration."""


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """A moment: what the allocator holds."""

    name: str = ""
    ts: Integer | float | None = None
    args: Arguments = NO_ARGUMENTS


SKIPPED = tuple(
    msgspec.defstruct(f"Skipped{number}", (), gc=False, tag_field="ph", tag=phase)
    for number, phase in enumerate("sftMCbneNODPSTpFRIcvVa")
)
"""Events of other phases, such as arrows, without their fields."""


@dataclass(frozen=True)
class Batch:
    """Events that have a duration, in the order of the file, with their times in nanoseconds."""

    events: Sequence[TimedEvent]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]


MEMORY = "[memory]"
"""The name of events that say what an allocator holds."""
MOST_READINGS = 1 << 20


Readings = NDArray[np.int64]
"""What the allocator of a device held, a row per reading: nanoseconds, allocated bytes, reserved bytes."""
NO_READINGS: Readings = np.empty((0, 3), dtype=np.int64)
ToNanoseconds = Callable[[list[Any]], tuple[NDArray[np.int64], NDArray[np.bool_]]]


def read_memory(events: Iterable[Instant | Event], to_ns: ToNanoseconds) -> Readings:
    """What allocators of devices held, where moments say it."""
    known = [event for event in events if event.args.allocated_bytes >= 0 and event.args.device_type > 0]
    known = [event for event in known if event.name == MEMORY and event.ts is not None and is_time(event.ts)]
    if not known:
        return NO_READINGS
    times, is_usable = to_ns([event.ts for event in known])
    held = np.array([(event.args.allocated_bytes, event.args.reserved_bytes) for event in known], dtype=np.int64)
    return np.column_stack([times, held])[is_usable]


class GroupInfo(msgspec.Struct):
    """A process group as the header describes it."""

    pg_name: str = ""
    pg_desc: str = ""
    """What it is for, such as mesh_pp, where torch was given it."""
    pg_size: int = 0
    ranks: list[int] = []


class DistributedInfo(msgspec.Struct):
    """Who recorded the trace."""

    backend: str = ""
    rank: int | None = None
    world_size: int | None = None
    pg_config: list[GroupInfo] = []


class Header(msgspec.Struct):
    """What stands beside the events, before or after them."""

    distributed: DistributedInfo | None = msgspec.field(default=None, name="distributedInfo")
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    """To be added to every time of the file."""
    host_name: str = ""
    device_properties: list[dict[str, object]] = msgspec.field(default_factory=list, name="deviceProperties")
    merged_ranks: list[int] = msgspec.field(default_factory=list, name="mergedRanks")
    """Those whose traces we merged into one file."""


LARGEST_INTEGER = 2**62
LARGEST_TIME = 10**30
MOST_OPEN_EVENTS = 10_000
"""Of one thread; beginnings beyond have lost their end."""
MOST_THREADS = 10_000
"""That have open events."""

_FIELDS = msgspec.structs.fields(Arguments)
_RAW_ARGUMENTS = {field.encode_name: field.name for field in _FIELDS if field.type is msgspec.Raw}
_TEXTS = {field.encode_name: field.name for field in _FIELDS if field.type is str}
_INTEGERS = {f.encode_name: f.name for f in _FIELDS if f.encode_name not in (*_RAW_ARGUMENTS, *_TEXTS)}

Record = TypeVar("Record", Header, DistributedInfo)
OpenEvents = dict[tuple[int | str, int | str], list[Event]]
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read_header(text: bytes) -> Header:
    """A header, without the fields that are of another kind. Raises `msgspec.DecodeError` if it is not an object."""
    fields = _decode_fields(text)
    header = _read_record(Header, fields)
    if header.distributed is None and "distributedInfo" in fields:
        with suppress(msgspec.DecodeError):
            header.distributed = _read_record(DistributedInfo, _decode_fields(fields["distributedInfo"]))
    return header


def _read_record(kind: type[Record], found: Mapping[str, msgspec.Raw]) -> Record:
    """A record of the fields that are of the right kind."""
    record = kind()
    for field in msgspec.structs.fields(kind):
        if field.encode_name in found:
            try:
                value = msgspec.json.decode(found[field.encode_name], type=field.type, strict=False)
            except msgspec.DecodeError:
                continue
            setattr(record, field.name, value)
    return record


def repair_events(text: bytes, decode: Callable[[msgspec.Raw], Event]) -> tuple[list[Event], int]:
    """The events that make sense, and how many did not. Raises `msgspec.DecodeError` if the text is not a list."""
    events = []
    items = _decode_items(text)
    for item in items:
        try:
            events.append(decode(item))
        except msgspec.ValidationError:
            event = _repair(item)
            if event is not None:
                events.append(event)
    return events, len(items) - len(events)


def _repair(raw: msgspec.Raw) -> Event | None:
    try:
        item = _decode_anything(raw)
    except msgspec.DecodeError:
        return None
    if not isinstance(item, Mapping):
        return None
    args = item.get("args")
    return Event(
        ph=_read_text(item.get("ph")),
        cat=_read_text(item.get("cat")),
        name=_read_text(item.get("name")),
        ts=_read_time(item.get("ts")),  # type: ignore[arg-type]  # a decimal where a double would not be exact
        dur=_read_time(item.get("dur")),  # type: ignore[arg-type]
        pid=_read_label(item.get("pid")),
        tid=_read_label(item.get("tid")),
        args=_repair_arguments(args) if isinstance(args, Mapping) else NO_ARGUMENTS,
    )


def _repair_arguments(args: Mapping[str, Any]) -> Arguments:
    found: dict[str, Any] = {}
    for name, attribute in _INTEGERS.items():
        value = _read_integer(args.get(name))
        if value is not None:
            found[attribute] = value
    for name, attribute in _TEXTS.items():
        if isinstance(args.get(name), str):
            found[attribute] = args[name]
    for name, attribute in _RAW_ARGUMENTS.items():
        if isinstance(args.get(name), list):
            found[attribute] = msgspec.Raw(msgspec.json.encode(args[name]))
    return Arguments(**found)


def _read_decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


_decode_anything = msgspec.json.Decoder(float_hook=_read_decimal).decode


def _read_time(value: Any) -> Decimal | None:
    """A time as a number; None: there is none. A text that is a number is one."""
    time = _read_decimal(value) if isinstance(value, str) else value
    if isinstance(time, bool) or not isinstance(time, int | Decimal):
        return None
    time = Decimal(time)
    return time if is_time(time) else None


def is_time(time: Decimal | float | None) -> bool:
    """Whether one can calculate with it, or there is none."""
    return not isinstance(time, Decimal) or (time.is_finite() and abs(time) < LARGEST_TIME)


EXACT_MICROSECONDS = float(2**43)
"""Below, the nearest double of a time in microseconds is less than half a nanosecond off."""
EXACT_INTEGER = 2**53
"""Below, a double holds every whole number."""
LARGEST_NS = 3 * 10**18
"""95 years. The distance of any two ends of events then fits 64 bits."""


def needs_decimals(times: list[Any]) -> bool:
    """Whether a double would not hold them."""
    largest = max(times, default=0)
    if largest < EXACT_MICROSECONDS:
        return False
    return largest >= EXACT_INTEGER or not set(map(type, times)) <= {int}


def convert_times(
    ticks: list[Any], ns_per_tick: int, *, may_be_decimal: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Times as integer nanoseconds, and which of them can be had."""
    values = np.array(ticks, dtype=np.float64)
    with np.errstate(over="ignore"):
        is_usable = np.abs(values * ns_per_tick) < LARGEST_NS
    values[~is_usable] = 0.0
    whole = np.floor(values)
    found = whole.astype(np.int64) * ns_per_tick
    found += np.rint((values - whole) * ns_per_tick).astype(np.int64)
    if may_be_decimal:
        for index, tick in enumerate(ticks):
            if is_usable[index] and isinstance(tick, Decimal):
                found[index] = round(tick * ns_per_tick)
    return found, is_usable


def convert_plain_times(ticks: list[Any], ns_per_tick: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]] | None:
    """The same of whole numbers and doubles, unknown ones (None) among them; None: a double would not hold them."""
    with suppress(TypeError):  # unless all of them are whole
        values = np.frombuffer(array("q", ticks), dtype=np.int64)
        is_usable = np.abs(values) < LARGEST_NS // ns_per_tick
        return np.where(is_usable, values, 0) * ns_per_tick, is_usable
    if needs_decimals([tick for tick in ticks if tick is not None]):
        return None
    return convert_times(ticks, ns_per_tick, may_be_decimal=False)


def _read_integer(value: Any) -> int | None:
    number = _read_time(value)
    return int(number) if number is not None and abs(number) < LARGEST_INTEGER else None


def _read_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _read_label(value: Any) -> int | str:
    return value if isinstance(value, int | str) else str(value)


def pair_events(events: list[Event], begun: OpenEvents) -> list[Event]:
    """Events whose beginning (B) and end (E) were apart become one; `begun` keeps those that have not ended yet."""
    found = []
    for event in events:
        if event.ph == "B":
            if len(begun) < MOST_THREADS:
                stack = begun.setdefault((event.pid, event.tid), [])
                if len(stack) < MOST_OPEN_EVENTS:
                    stack.append(event)
        elif event.ph == "E":
            stack = begun.get((event.pid, event.tid), [])
            start = stack.pop() if stack else None
            if not stack:
                begun.pop((event.pid, event.tid), None)
            if start is not None:
                length = _subtract(event.ts, start.ts)
                found.append(msgspec.structs.replace(start, ph="X", dur=length))
        else:
            found.append(event)
    return found


def _subtract(end: Decimal | float | None, start: Decimal | float | None) -> Any:
    """The difference, None where there is none; a double becomes the shortest decimal that it may stand for."""
    if end is None or start is None or not is_time(end) or not is_time(start):
        return None
    return Decimal(str(end)) - Decimal(str(start))
