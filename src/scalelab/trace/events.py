"""What a trace file holds, as far as we read it: one event, its arguments, the header.

The names are those of Kineto, torch's profiler, which writes Chrome's trace format: times in microseconds, to the
nanosecond since torch 2.4. What is not named here is skipped while decoding.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

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
