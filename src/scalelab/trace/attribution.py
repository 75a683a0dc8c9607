"""Device time by what asked for it: phase, operator, module, annotation, source line; and products with known work.

A kernel belongs to the call that launched it (they share a correlation number), and the call to everything that is open
on its thread at that moment: the innermost operator, `nn.Module`, annotation (`record_function`) and line of the user's
own code. Modules and lines are in the trace if it was recorded with stacks (`with_stack=True`).

    backward      launched inside an autograd node
    optimizer     launched inside `Optimizer.step` or `Optimizer.zero_grad`
    forward       launched inside any other operator or `nn.Module`
    unattributed  the rest: nothing around the launch says what it is for

A kernel of backward has the module, annotation and line of the forward operator with the same sequence number of
autograd. A CUDA graph hides what it runs: its kernels belong to where the graph was launched. Kernels without a
recorded launch belong to nothing. Times are sums of durations, overlaps on other streams included.

Work is that of the innermost product, convolution or attention with known shapes (`work.py`) around the launch; an
operator counts once, with all its kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.kinds import HOST_OPERATORS, Kind
from scalelab.trace.launches import MOST_PENDING, forget_oldest
from scalelab.trace.operators import find_owners
from scalelab.trace.rank_trace import Tables
from scalelab.trace.windows import Records, Steps, Window, choose_records, find_distinct, find_edges
from scalelab.trace.work import Work

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
UNATTRIBUTED, UNKNOWN = "unattributed", "no recorded launch"
PHASES = (UNATTRIBUTED, FORWARD, BACKWARD, OPTIMIZER)
GRAPH = "CUDA graph"
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)\b")
MOST_FORWARD = 1 << 18
"""Forward operators whose place is remembered for their backward."""

Numbers = NDArray[np.int64]


class Caller(NamedTuple):
    """What a kernel was launched for; empty texts: unknown."""

    phase: str
    operator: str
    modules: tuple[str, ...] = ()
    """The outermost first."""
    annotation: str = ""
    source: str = ""


@dataclass
class CallerTime:
    """All kernels that were launched for one thing."""

    asked: Caller
    count: int = 0
    total_ns: int = 0


@dataclass
class WorkTime:
    """All calls of one operator with the same shapes and types."""

    work: Work
    count: int = 0
    total_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The device time of one rank."""

    times: Sequence[CallerTime]
    """The most time first."""
    works: Sequence[WorkTime]
    has_modules: bool
    has_sources: bool
    has_shapes: bool

    @property
    def total_ns(self) -> int:
        return sum(one.total_ns for one in self.times)


NOWHERE = [0, -1, -1]
"""Where a call is in the user's program, if that is unknown: chain of modules, annotation, source line."""
LARGEST_CODE = 2**62


@dataclass
class _Paths:
    """Chains of modules by number; 0 is none."""

    chains: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    _numbers: dict[tuple[int, int], int] = field(default_factory=dict)

    def extend(self, parent: int, name: int) -> int:
        key = (parent, name)
        if key not in self._numbers:
            self._numbers[key] = len(self.chains)
            self.chains.append((*self.chains[parent], name))
        return self._numbers[key]

    def number(self, frames: Records) -> Numbers:
        """The chain that every module of a window is the last of."""
        found = np.zeros(len(frames), dtype=np.int64)
        stack: list[tuple[int, int, int]] = []
        order = np.lexsort((-frames["end"], frames["start"], frames["lane"]))
        for place in order.tolist():
            lane, start, end = (int(frames[name][place]) for name in ("lane", "start", "end"))
            while stack and (stack[-1][0] != lane or stack[-1][1] <= start):
                stack.pop()
            found[place] = self.extend(stack[-1][2] if stack else 0, int(frames["name"][place]))
            stack.append((lane, end, int(found[place])))
        return found


class AttributionCounter:
    """Follows launches to their kernels."""

    def __init__(self, tables: Tables, steps: Steps = None) -> None:
        self._names, self._works = tables.names, tables.works
        self._known_steps, self._steps = tables.steps, steps
        self._is_backward, self._is_optimizer = (
            np.array([bool(pattern.search(name)) for name in tables.names], dtype=np.bool_)
            for pattern in (_BACKWARD, _OPTIMIZER)
        )
        self._is_graph = np.array(["GraphLaunch" in name for name in tables.names], dtype=np.bool_)
        self._paths = _Paths()
        self._seen_kinds: set[int] = set()
        self._forward: dict[int, list[int]] = {}
        """Chain of modules, annotation and source line of forward operators, by sequence number."""
        self._launched: dict[int, tuple[int, int]] = {}
        """Thing asked for and event of work, by correlation number."""
        self._asked: dict[Caller, int] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._count, self._total = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        """By the number of what was asked for; the last is that of kernels without a launch."""
        self._running: dict[tuple[int, int], int] = {}
        self._event_work: list[int] = []
        self._ran: set[int] = set()
        """Events of work with a kernel that counts."""
        self._work_total = np.zeros(len(tables.works), dtype=np.int64)

    def take(self, window: Window) -> None:
        host = window.all_records.compress(~window.all_records["on_device"])
        begun = window.records.compress(~window.records["on_device"])
        self._seen_kinds.update(find_distinct(begun["kind"]).tolist())
        calls = begun.compress((begun["kind"] == Kind.LAUNCH) & (begun["correlation"] > 0))
        if len(calls) or Kind.MODULE in self._seen_kinds or Kind.SOURCE in self._seen_kinds:
            self._remember(host, begun, calls, window.end)
        kernels = window.records.compress(window.records["on_device"] & (window.records["kind"] <= Kind.COPY))
        kernels = kernels.compress(choose_records(kernels, self._known_steps, self._steps))
        if len(kernels):
            self._add(kernels)

    def _remember(self, host: Records, begun: Records, calls: Records, end: int) -> None:
        kind, name = host["kind"], host["name"]
        is_operator = np.isin(kind, HOST_OPERATORS)
        modules, nodes, operators, annotations, sources, updates = (
            Frames(host.compress(is_chosen))
            for is_chosen in (
                kind == Kind.MODULE,
                is_operator & self._is_backward[name],
                is_operator,
                (kind == Kind.ANNOTATION) & ~self._is_optimizer[name],
                kind == Kind.SOURCE,
                self._is_optimizer[name],
            )
        )
        chains = self._paths.number(modules.records)

        def place(events: Records) -> NDArray[np.int64]:
            others = [_pick(side.records["name"], side.find(events), -1) for side in (annotations, sources)]
            return np.array([_pick(chains, modules.find(events), 0), *others], dtype=np.int64)

        if any(len(frames.records) for frames in (modules, annotations, sources)):
            asking = begun.compress(np.isin(begun["kind"], HOST_OPERATORS) & (begun["correlation"] > 0))
            asking = asking.compress(nodes.find(asking) < 0)
            self._forward.update(zip(asking["correlation"].tolist(), place(asking).T.tolist(), strict=True))
            forget_oldest(self._forward, MOST_FORWARD)
        node, where = nodes.find(calls), place(calls)
        operator = _pick(operators.records["name"], operators.find(calls), -1)
        is_optimizer, is_inside = updates.find(calls) >= 0, (operator >= 0) | (where[0] > 0)
        is_backward = ~is_optimizer & (node >= 0)
        phase = np.where(is_optimizer, 3, np.where(is_backward, 2, is_inside))  # places in PHASES
        if self._forward:
            is_lost = is_backward & (where.T == NOWHERE).all(axis=1)
            sequence = _pick(nodes.records["correlation"], node, -1)[is_lost].tolist()
            where[:, is_lost] = np.array([self._forward.get(one, NOWHERE) for one in sequence]).reshape(-1, 3).T
        asked = self._number_asked(np.vstack([phase, calls["name"], operator, where]))
        events = self._number_works(host.compress(host["work"] >= 0), calls, end)
        self._launched.update(zip(calls["correlation"].tolist(), zip(asked, events, strict=True), strict=True))
        forget_oldest(self._launched, MOST_PENDING)

    def _number_asked(self, columns: NDArray[np.int64]) -> list[int]:
        """What every call was made for."""
        firsts, places = find_distinct_columns(columns)
        numbers = []
        for key in columns[:, firsts].T.tolist():
            asked = self._numbers.get(tuple(key))
            if asked is None:
                asked = self._numbers[tuple(key)] = self._number(*key)
            numbers.append(asked)
        found: list[int] = np.array(numbers, dtype=np.int64)[places].tolist()
        return found

    def _number(self, phase: int, call: int, operator: int, chain: int, annotated: int, line: int) -> int:
        names = self._names
        text = names[operator] if operator >= 0 else names[call]
        annotation = names[annotated] if annotated >= 0 else ""
        if self._is_graph[call]:
            text = f"{GRAPH} in {names[operator]}" if operator >= 0 else GRAPH
        source = names[line] if line >= 0 else ""
        modules = tuple(names[one] for one in self._paths.chains[chain])
        return self._asked.setdefault(Caller(PHASES[phase], text, modules, annotation, source), len(self._asked))

    def _number_works(self, frames: Records, calls: Records, end: int) -> list[int]:
        """The event of work around every call; -1: none."""
        found, running = [], {}
        lanes, starts, ends, works = (frames[name].tolist() for name in ("lane", "start", "end", "work"))
        for place in Frames(frames).find(calls).tolist():
            if place < 0:
                found.append(-1)
                continue
            key = lanes[place], starts[place]
            if key not in self._running:
                self._running[key] = len(self._event_work)
                self._event_work.append(works[place])
            found.append(self._running[key])
            if ends[place] > end:
                running[key] = self._running[key]
        self._running = running
        return found

    def _add(self, kernels: Records) -> None:
        launched = [self._launched.get(number, (-1, -1)) for number in kernels["correlation"].tolist()]
        asked, event = (np.array(column, dtype=np.int64) for column in zip(*launched, strict=True))
        length = kernels["end"] - kernels["start"]
        size = len(self._asked) + 1
        if len(self._total) < size:
            self._count, self._total = (_grow(one, size) for one in (self._count, self._total))
        np.add.at(self._count, asked, 1)
        np.add.at(self._total, asked, length)
        is_work = event >= 0
        if is_work.any():
            self._ran.update(event[is_work].tolist())
            works = np.array([self._event_work[one] for one in event[is_work].tolist()], dtype=np.int64)
            np.add.at(self._work_total, works, length[is_work])

    def finish(self) -> Attribution:
        unknown = Caller(UNKNOWN, "")
        times = [
            CallerTime(asked, int(self._count[number]), int(self._total[number]))
            for asked, number in ((unknown, len(self._total) - 1), *self._asked.items())
            if number < len(self._total) and self._count[number]
        ]
        counts = np.bincount([self._event_work[one] for one in self._ran], minlength=len(self._works))
        works = [
            WorkTime(work, int(count), int(total))
            for work, count, total in zip(self._works, counts, self._work_total, strict=True)
            if count
        ]
        return Attribution(
            times=sorted(times, key=lambda one: (-one.total_ns, one.asked)),
            works=sorted(works, key=lambda one: (-one.total_ns, one.work)),
            has_modules=Kind.MODULE in self._seen_kinds,
            has_sources=Kind.SOURCE in self._seen_kinds,
            has_shapes=bool(self._works),
        )


def _pick(values: NDArray[np.integer[Any]], places: NDArray[np.intp], nothing: int) -> NDArray[np.int64]:
    """The values at places; `nothing` where there is none."""
    if not len(values):
        return np.full(len(places), nothing, dtype=np.int64)
    return np.where(places >= 0, values[np.maximum(places, 0)], nothing).astype(np.int64)


def find_distinct_columns(columns: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where every different column of a table occurs first, and which of these each column is."""
    codes, size = np.zeros(columns.shape[1], dtype=np.int64), 1
    for row in columns if columns.shape[1] else ():
        low, width = int(row.min()), int(row.max()) - int(row.min()) + 1
        if size * width >= LARGEST_CODE:
            codes, size = _rank(codes)[1], columns.shape[1]
        codes, size = codes * width + (row - low), size * width
    return _rank(codes)


def _rank(codes: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The first place of every different code, in order of the codes, and the rank of each code among them."""
    order = np.argsort(codes, kind="stable")
    edges = find_edges(codes[order])
    ranks = np.empty(len(codes), dtype=np.intp)
    ranks[order] = np.repeat(np.arange(len(edges)), np.diff([*edges.tolist(), len(codes)]))
    return order[edges], ranks


def _grow(totals: Numbers, size: int) -> Numbers:
    """With more places; the last stays the last."""
    return np.concatenate([totals[:-1], np.zeros(size - len(totals), dtype=np.int64), totals[-1:]])


class Frames:
    """Events that others run in: which is the innermost at any time."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._lanes: dict[int, tuple[NDArray[np.int64], NDArray[np.intp]]] = {}
        """Of a thread: the edges of its frames, and the innermost from each to the next; -1: none."""

    def find(self, events: Records) -> NDArray[np.intp]:
        """For every event, the innermost frame that is open on its thread when it begins; -1: none."""
        found = np.full(len(events), -1, dtype=np.intp)
        if not len(self.records):
            return found
        for lane in find_distinct(events["lane"]).tolist():
            if lane not in self._lanes:
                own = np.flatnonzero(self.records["lane"] == lane)
                time, owner = find_owners(self.records.take(own))
                self._lanes[lane] = time, np.where(owner >= 0, own[owner] if len(own) else -1, -1)
            time, frame = self._lanes[lane]
            if len(time):  # not all of them are empty
                asking = np.flatnonzero(events["lane"] == lane)
                place = np.searchsorted(time, events["start"][asking], side="right") - 1
                found[asking] = np.where(place >= 0, frame[place], -1)
        return found


def add_asked(times: Iterable[CallerTime]) -> list[CallerTime]:
    """Several ranks together, the most time first."""
    found: dict[Caller, CallerTime] = {}
    for one in times:
        known = found.setdefault(one.asked, CallerTime(one.asked))
        known.count += one.count
        known.total_ns += one.total_ns
    return sorted(found.values(), key=lambda one: (-one.total_ns, one.asked))
