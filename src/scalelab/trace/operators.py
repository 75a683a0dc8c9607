"""Host operators and device kernels by name: count, total, self time, maximum.

Operators call each other: `aten::linear` runs `aten::addmm`, which may launch a kernel. The self time of an operator
excludes the operators and library calls inside it. At any moment the time of a thread belongs to the innermost open
event, so self times add up exactly to the time in any operator. The total counts an operator that calls one of its own
name twice, as torch's tables do. Chosen steps are those of the host, which runs ahead of its device. Events of one
thread nest; if rounding in a file breaks that, the event that began last ends first.

A kernel counts in the step in which the host launched it. Its total is the sum of durations, overlaps on other streams
included, so it may exceed the span: a share of it shows which kernels to look at, not how much faster training would
be.

Two traces are compared name by name, per rank and per step if both have steps, so traces of different lengths can be
compared; what runs between steps is divided by the number of steps too. Operators are compared by self time, so a slow
one does not make its callers slow; kernels by duration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.kinds import HOST_OPERATORS, Kind
from scalelab.trace.rank_trace import Tables
from scalelab.trace.windows import Records, Steps, Window, choose_records, find_among, join_records

COUNTED = (Kind.COMMUNICATION, *HOST_OPERATORS, Kind.LAUNCH, Kind.RUNTIME)
"""Kinds of events on a host's thread that have time of their own."""


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """All calls of one operator."""

    name: str
    count: int
    total_ns: int
    self_ns: int
    """Without what it called."""
    longest_ns: int


class OperatorCounter:
    """Adds operators up by name."""

    def __init__(self, tables: Tables, steps: Steps = None) -> None:
        self._names = tables.names
        self._steps = None if steps is None else [step for step in tables.host_steps if step.number in steps]
        size = len(tables.names)
        self._count = np.zeros(size, dtype=np.int64)
        self._total = np.zeros(size, dtype=np.int64)
        self._self = np.zeros(size, dtype=np.int64)
        self._longest = np.zeros(size, dtype=np.int64)

    def take(self, window: Window) -> None:
        begun = _select(window.records)
        running = join_records([_select(window.carried), begun])
        if self._steps is None:
            self._add(begun, running, window.start, window.end)
            return
        for step in self._steps:
            if step.start <= window.end and step.end > window.start:
                is_own = (begun["start"] >= step.start) & (begun["start"] < step.end)
                self._add(begun.compress(is_own), running, max(step.start, window.start), min(step.end, window.end))

    def _add(self, begun: Records, running: Records, low: int, high: int) -> None:
        """Count what begins, and the time between the edges of what runs."""
        length = begun["end"] - begun["start"]
        np.add.at(self._count, begun["name"], 1)
        np.add.at(self._total, begun["name"], length)
        np.maximum.at(self._longest, begun["name"], length)
        owners, lengths = split_by_innermost(running, low, high)
        np.add.at(self._self, running["name"][owners], lengths)

    def finish(self) -> Sequence[OperatorTime]:
        """The longest time itself first."""
        found = [
            OperatorTime(
                name=self._names[key],
                count=int(self._count[key]),
                total_ns=int(self._total[key]),
                self_ns=int(self._self[key]),
                longest_ns=int(self._longest[key]),
            )
            for key in map(int, np.flatnonzero(self._count))
        ]
        return sorted(found, key=lambda operator: (-operator.self_ns, operator.name))


def _select(records: Records) -> Records:
    return records.compress(~records["on_device"] & find_among(records["kind"], COUNTED))


def split_by_innermost(records: Records, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Stretches of [low, high) in which some event is the innermost of its lane: its index, and their lengths."""
    time, owner = find_owners(records, low, high)
    is_open = owner[:-1] >= 0
    return owner[:-1][is_open], np.diff(time)[is_open]


def find_owners(
    records: Records, low: int | None = None, high: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The edges of events, lane by lane, and the innermost event from each edge to the next; -1: none is open.

    Only what lies between `low` and `high`, where they are given.
    """
    start = records["start"] if low is None else np.maximum(records["start"], low)
    end = records["end"] if high is None else np.minimum(records["end"], high)
    usable = np.flatnonzero(end > start)
    usable = usable[np.lexsort((-records["end"][usable], records["start"][usable], records["lane"][usable]))]
    lane, start, end = records["lane"][usable], start[usable], end[usable]
    number = np.arange(len(usable))
    # All edges of all lanes in order: at the same moment ends come before beginnings, outer beginnings before inner.
    time = np.concatenate([start, end])
    is_begin = np.repeat([True, False], len(usable))
    order = np.lexsort((np.concatenate([number, number]), is_begin, time, np.concatenate([lane, lane])))
    time, is_begin = time[order], is_begin[order]
    depth = np.cumsum(np.where(is_begin, 1, -1))
    # After an end, the event that began last at the remaining depth is the innermost again. Sorted by depth, that is
    # the highest number so far, once every depth has numbers above all those of the depths before.
    base = depth * (len(usable) + 1)
    event = np.where(is_begin, base + np.concatenate([number, number])[order], -1)
    by_depth = np.argsort(depth, kind="stable")
    owner = np.empty(len(order), dtype=np.int64)
    owner[by_depth] = np.maximum.accumulate(event[by_depth])
    owner -= base
    is_open = depth > 0
    return time, np.where(is_open, usable[np.where(is_open, owner, 0)] if len(usable) else -1, -1)


KINDS = {Kind.COMPUTE: "compute", Kind.COMMUNICATION: "communication", Kind.COPY: "copy"}


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """All runs of one kernel."""

    name: str
    kind: str
    """compute, communication or copy."""
    count: int
    total_ns: int
    longest_ns: int

    @property
    def mean_ns(self) -> float:
        return self.total_ns / self.count


class KernelCounter:
    """Adds kernels up by name."""

    def __init__(self, tables: Tables, steps: Steps = None) -> None:
        self._names = tables.names
        self._known_steps = tables.steps
        self._steps = steps
        size = len(KINDS) * len(tables.names)
        self._count = np.zeros(size, dtype=np.int64)
        self._total = np.zeros(size, dtype=np.int64)
        self._longest = np.zeros(size, dtype=np.int64)

    def take(self, window: Window) -> None:
        records = window.records.compress(window.records["on_device"] & (window.records["kind"] <= Kind.COPY))
        records = records.compress(choose_records(records, self._known_steps, self._steps))
        if not len(records):
            return
        keys = records["name"].astype(np.int64) * len(KINDS) + records["kind"]
        length = records["end"] - records["start"]
        np.add.at(self._count, keys, 1)
        np.add.at(self._total, keys, length)
        np.maximum.at(self._longest, keys, length)

    def finish(self) -> Sequence[KernelTime]:
        """The longest total first."""
        found = [
            KernelTime(
                name=self._names[key // len(KINDS)],
                kind=KINDS[Kind(key % len(KINDS))],
                count=int(self._count[key]),
                total_ns=int(self._total[key]),
                longest_ns=int(self._longest[key]),
            )
            for key in map(int, np.flatnonzero(self._count))
        ]
        return sorted(found, key=lambda kernel: (-kernel.total_ns, kernel.name))


class OperatorChange(StrEnum):
    """What became of a name from A to B."""

    ADDED = "added"
    REMOVED = "removed"
    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"


NOTABLE = 0.05
"""A change of its time by less than this share is none."""


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How often one name ran in a trace, and for how long."""

    name: str
    count: int
    total_ns: int


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of two traces: what ran on all its ranks."""

    amounts: Sequence[Amount]
    num_ranks: int
    num_steps: int | None
    """Of every rank; None: they have none, or not the same number."""


@dataclass(frozen=True, kw_only=True)
class OperatorDifference:
    """One name in two traces, per rank, and per step where `is_per_step`."""

    name: str
    change: OperatorChange
    count_a: float
    count_b: float
    seconds_a: float
    seconds_b: float

    @property
    def more_seconds(self) -> float:
        """What B takes more than A."""
        return self.seconds_b - self.seconds_a


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All names of two traces."""

    differences: Sequence[OperatorDifference]
    """The largest change of time first."""
    is_per_step: bool
    """Whether numbers are per step; else they are of the whole traces."""

    def list_changed(self, *changes: OperatorChange) -> list[OperatorDifference]:
        return [difference for difference in self.differences if difference.change in changes]


def compare_operators(a: Side, b: Side) -> Comparison:
    """Compare two traces name by name."""
    is_per_step = bool(a.num_steps and b.num_steps)
    before, after = (_add_up(side.amounts) for side in (a, b))
    shares = [1 / max(1, side.num_ranks) / ((side.num_steps or 1) if is_per_step else 1) for side in (a, b)]
    differences = [
        _compare(name, before.get(name, (0, 0)), after.get(name, (0, 0)), shares)
        for name in dict.fromkeys([*before, *after])
    ]
    ordered = sorted(differences, key=lambda found: (-abs(found.more_seconds), found.name))
    return Comparison(differences=ordered, is_per_step=is_per_step)


def _add_up(amounts: Iterable[Amount]) -> dict[str, tuple[int, int]]:
    """Count and time by name, over all ranks."""
    found: dict[str, tuple[int, int]] = {}
    for amount in amounts:
        count, total = found.get(amount.name, (0, 0))
        found[amount.name] = (count + amount.count, total + amount.total_ns)
    return found


def _compare(name: str, before: tuple[int, int], after: tuple[int, int], shares: Sequence[float]) -> OperatorDifference:
    seconds_a, seconds_b = before[1] * shares[0] / 1e9, after[1] * shares[1] / 1e9
    if not before[0]:
        change = OperatorChange.ADDED
    elif not after[0]:
        change = OperatorChange.REMOVED
    elif abs(seconds_b - seconds_a) <= NOTABLE * max(seconds_a, seconds_b):
        change = OperatorChange.SAME
    else:
        change = OperatorChange.SLOWER if seconds_b > seconds_a else OperatorChange.FASTER
    return OperatorDifference(
        name=name,
        change=change,
        count_a=before[0] * shares[0],
        count_b=after[0] * shares[1],
        seconds_a=seconds_a,
        seconds_b=seconds_b,
    )
