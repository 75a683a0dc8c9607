"""What an event is, by its category and name; and the part of Kineto's trace format that we read.

`COMMUNICATION` lists patterns of kernels that move data between ranks: collective libraries, and frameworks' own
kernels. `--communication PATTERN` adds to it (case-sensitive). The kind of a collective comes from its record if there
is one, else from its name.

Kineto (torch.profiler) writes Chrome's trace format: times in microseconds, with nanoseconds since torch 2.4. Fields
that are not named here are skipped while decoding.

Events and headers that differ from Kineto's format (other field types, separate begin and end events) are repaired.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgspec


class Kind(IntEnum):
    """What an event is."""

    COMPUTE = 0
    """A kernel on a device."""
    COMMUNICATION = 1
    """A kernel on a device that moves data between ranks, or a collective that a host's thread runs (gloo, MPI)."""
    COPY = 2
    """A copy or fill of memory on a device."""
    OPERATOR = 3
    """An operator on a host's thread."""
    ENCLOSING = 4
    """An operator that only calls others, or waits: DDP's forward, an autograd node, an optimizer's step, c10d."""
    LAUNCH = 5
    """A call that puts work on a device's queue."""
    RUNTIME = 6
    """Any other call of the device's library: synchronizing, allocating."""
    STEP = 7
    """A step of the profiler on the host."""
    DEVICE_STEP = 8
    """The same on a device."""
    OTHER = 9
    """Annotations, Python functions, overhead: not time of its own."""


MOST_NAMES = 100_000
"""Distinct names in one file; later ones are counted together."""
COMMUNICATION: tuple[str, ...] = (
    r"^(void )?(nccl|rccl|hccl|msccl|mscclpp)",
    r"\bnccl(Dev)?Kernel",
    r"\boneccl|\bccl_",
    r"nvshmem|userbuffers|symmetric_memory::",
    r"deep_ep::(?!layout)|(inter|intra)node(_ll)?::(dispatch|combine|notify|cached_notify)",
    r"cross_device_reduce_[12]stage|reduce_scatter_cross_device",
    r"(one|two)_?shot_(all_?)?reduce|(one|two)shotallreduce|multimem_(all_?reduce|all_?gather|one_shot|two_shot)",
    r"all_?reduce_fusion|lamport.*all_?reduce|quick_?reduce",
    r"\bpplx|moe_?all_?to_?all|moe_comm::",
)
"""Kernels that move data between ranks, as regular expressions that are searched in the name.

NCCL and what is built like it; oneCCL; NVSHMEM, Transformer Engine's userbuffers and torch's symmetric memory; DeepEP
(its layout kernels count tokens on one rank); the all-reduces of vLLM and aiter; those of torch and TensorRT-LLM;
those that are fused with a norm, and quick-reduce; exchanges of experts."""
COMPILED = re.compile(r"^triton_(poi|per|red|tem|for|spl)_")
"""Kernels that Inductor made. They are named after all operators around them, collectives too, and only compute."""

HOST_COMMUNICATION = re.compile(
    r"^(gloo|mpi|ucc):(?!:)|^P?MPI_I?(all|reduce|bcast|gather|scatter|send|recv|barrier)", re.IGNORECASE
)
"""Collectives that a thread of the host runs: torch's annotations, and MPI's own names."""

_KINDS: tuple[tuple[str, str], ...] = (
    (r"all_?reduce|cross_device_reduce|quick_?reduce|one_shot|two_shot", "all_reduce"),
    (r"reduce_?scatter", "reduce_scatter"),
    (r"all_?gather|allgather", "all_gather"),
    (r"all_?to_?all|alltoall|dispatch|combine", "all_to_all"),
    (r"broadcast|bcast", "broadcast"),
    (r"barrier", "barrier"),
    (r"send_?recv", "send_recv"),
    (r"\bgather|_gather|:gather", "gather"),
    (r"scatter", "scatter"),
    (r"reduce", "reduce"),
    (r"send", "send"),
    (r"recv", "recv"),
)
_KIND_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE), kind) for pattern, kind in _KINDS)

_WORK = re.compile(r"^(?!c10d|_c10d|autograd::|torch::autograd|FSDP::|nccl)\w+::|cpp_fused|triton_|^## Call Compiled")
"""Operators that do work themselves: they have a namespace (aten::mm, mine::fused), or were made by a compiler. What
is called otherwise (an autograd node, DDP's forward, an optimizer's step) calls such operators, and may wait too."""
_LAUNCH = re.compile(r"^(cu|hip|sycl|ur|ze)\w*(Launch|Memcpy|Memset|EnqueueKernel)", re.IGNORECASE)
_STEP = re.compile(r"^ProfilerStep\s*#?(\d+)")

_CATEGORIES = {
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "memcpy": Kind.COPY,
    "memset": Kind.COPY,
    "python_function": Kind.OTHER,
    "cuda_sync": Kind.OTHER,
    "overhead": Kind.OTHER,
    "trace": Kind.OTHER,
}
_RUNTIME = ("cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "xpu_runtime", "privateuse1_runtime")


class Classifier:
    """The kind of every event; what was found is remembered by category and name."""

    def __init__(self, more_communication: Sequence[str] = ()) -> None:
        self._communication = re.compile("|".join(COMMUNICATION), re.IGNORECASE)
        self._more_communication = [re.compile(pattern) for pattern in more_communication]
        self._known: dict[tuple[str, str], Kind] = {}

    def __call__(self, category: str, name: str) -> Kind:
        key = (category, name)
        found = self._known.get(key)
        if found is None:
            if len(self._known) > MOST_NAMES:
                self._known.clear()
            found = self._known[key] = self._classify(category.lower(), name)
        return found

    def _classify(self, category: str, name: str) -> Kind:
        if category == "kernel":
            return Kind.COMMUNICATION if self._communicates(name) else Kind.COMPUTE
        if category in _CATEGORIES:
            return _CATEGORIES[category]
        if category in _RUNTIME:
            return Kind.LAUNCH if _LAUNCH.search(name) else Kind.RUNTIME
        if category == "gpu_user_annotation":
            return Kind.DEVICE_STEP if _STEP.match(name) else Kind.OTHER
        if _STEP.match(name):
            return Kind.STEP
        if HOST_COMMUNICATION.search(name):
            return Kind.COMMUNICATION
        if category in ("cpu_op", "operator"):
            return Kind.OPERATOR if _WORK.search(name) else Kind.ENCLOSING
        return Kind.OTHER

    def _communicates(self, name: str) -> bool:
        if any(pattern.search(name) for pattern in self._more_communication):
            return True
        return bool(self._communication.search(name)) and not COMPILED.match(name)


def read_step_number(name: str) -> int:
    """The number of a profiler's step."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else -1


def find_collective_kind(name: str) -> str:
    """all_reduce, all_gather …: what a kernel, an operator or a record says it does; `other` where it does not."""
    for pattern, kind in _KIND_PATTERNS:
        if pattern.search(name):
            return kind
    return "other"


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
    input_dims: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input type")


NO_ARGUMENTS = Arguments()


class Event(msgspec.Struct, gc=False):
    """One event. Only those with a duration (`ph` X, or a pair of B and E) are kept by the reader."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float | None = None
    dur: float | None = None
    pid: int | str = 0
    tid: int | str = 0
    args: Arguments = NO_ARGUMENTS


class GroupInfo(msgspec.Struct):
    """A process group as the header describes it."""

    pg_name: str = ""
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
