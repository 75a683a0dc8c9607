"""Events that are not as Kineto writes them: fields of another kind, beginnings and ends apart."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from scalelab.trace.events import NO_ARGUMENTS, Arguments, Event

LARGEST_INTEGER = 2**62
MOST_OPEN_EVENTS = 10_000
"""Of one thread; beginnings beyond have lost their end."""

_INTEGERS = {field.encode_name: field.name for field in msgspec.structs.fields(Arguments) if field.type is int}
_TEXTS = {field.encode_name: field.name for field in msgspec.structs.fields(Arguments) if field.type is str}


def repair_events(items: list[Any]) -> tuple[list[Event], int]:
    """The events that make sense, and how many did not."""
    events = [event for event in map(_repair, items) if event is not None]
    return events, len(items) - len(events)


def _repair(item: Any) -> Event | None:
    if not isinstance(item, Mapping):
        return None
    try:
        start, length = _read_time(item.get("ts")), _read_time(item.get("dur"))
    except (ValueError, InvalidOperation):
        return None
    args = item.get("args")
    return Event(
        ph=_read_text(item.get("ph")),
        cat=_read_text(item.get("cat")),
        name=_read_text(item.get("name")),
        ts=start,  # type: ignore[arg-type]  # a decimal where a double would not be exact
        dur=length,  # type: ignore[arg-type]
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
    return Arguments(**found)


def _read_time(value: Any) -> Decimal | None:
    """A time as a number; None: there is none. A text that is a number is one."""
    if value is None or isinstance(value, bool):
        return None
    time = Decimal(value)
    if not time.is_finite():
        raise ValueError(value)
    return time


def _read_integer(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < LARGEST_INTEGER else None


def _read_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _read_label(value: Any) -> int | str:
    return value if isinstance(value, int | str) else str(value)


def pair_events(events: list[Event], begun: dict[tuple[int | str, int | str], list[Event]]) -> list[Event]:
    """Events whose beginning (B) and end (E) were apart become one; `begun` keeps those that have not ended yet."""
    found = []
    for event in events:
        if event.ph == "B":
            stack = begun.setdefault((event.pid, event.tid), [])
            if len(stack) < MOST_OPEN_EVENTS:
                stack.append(event)
        elif event.ph == "E":
            stack = begun.get((event.pid, event.tid), [])
            start = stack.pop() if stack else None
            if start is not None and start.ts is not None and event.ts is not None:
                found.append(msgspec.structs.replace(start, ph="X", dur=event.ts - start.ts))
        else:
            found.append(event)
    return found
