"""A job's traces, and what of them is looked at: which steps, and how many rows.

The tables of `scalelab trace` about time and communication: parts of spans and steps, collectives, ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from scalelab.answers.trace.charts import Timeline, TimelineCounter
from scalelab.errors import UsageError
from scalelab.report.document import Cell, Column, Table, make_row
from scalelab.trace.breakdown import Parts
from scalelab.trace.collectives import Collective
from scalelab.trace.idle import LaneCounter, LaneTimes
from scalelab.trace.kinds import KindSummary, summarise_kinds, summarise_transfers
from scalelab.trace.matching import Matching, find_steps
from scalelab.trace.operators import KernelCounter, KernelTime, OperatorCounter, OperatorTime
from scalelab.trace.rank import MakeCounter, RankTrace
from scalelab.trace.ranks import JobTrace
from scalelab.trace.waiting import JobArrivals, find_arrivals, select_steps
from scalelab.trace.windows import Steps

LONGEST_NAME = 60
"""Longer names of kernels and operators are shortened."""
_PARAMETERS = re.compile(r"\([^()]*\)")


class Counted(NamedTuple):
    """What the counters found on one rank, in the order of `make_counters`."""

    kernels: Sequence[KernelTime]
    operators: Sequence[OperatorTime]
    lanes: LaneTimes
    timeline: Timeline


def make_counters(steps: Steps) -> list[MakeCounter]:
    """Everything that a trace is asked besides its breakdown and its collectives."""
    return [partial(kind, steps=steps) for kind in (KernelCounter, OperatorCounter, LaneCounter, TimelineCounter)]


@dataclass(frozen=True, kw_only=True)
class TraceView:
    """The traces of a job, read with `make_counters`."""

    job: JobTrace
    steps: Steps = None
    """The steps that are shown; None: the whole traces."""
    top: int = 10
    """The most rows of a table of names, gaps, streams or steps."""

    @property
    def ranks(self) -> dict[int, RankTrace]:
        return self.job.by_rank

    @property
    def has_device(self) -> bool:
        return any(trace.tables.has_device for trace in self.job.ranks)

    @cached_property
    def counted(self) -> dict[int, Counted]:
        return {rank: Counted(*trace.counted) for rank, trace in self.ranks.items()}

    @cached_property
    def matching(self) -> Matching | None:
        """The collectives that the ranks share and that begin in what is shown; None with one rank."""
        whole = self.job.matching
        return whole if whole is None or self.steps is None else select_steps(whole, self.ranks, self.steps)

    @cached_property
    def arrivals(self) -> JobArrivals | None:
        """Who waited for whom in these; None where there are none."""
        return find_arrivals(self.matching) if self.matching is not None and self.matching.num_matched else None

    def check(self) -> None:
        """Refuse steps that no trace has."""
        known = {step.number for trace in self.job.ranks for step in trace.tables.steps}
        missing = sorted((self.steps or frozenset()) - known)
        if missing:
            listed = ", ".join(map(str, sorted(known)[:20])) + (" …" if len(known) > 20 else "")
            raise UsageError(
                f"--step {missing[0]} is in no trace: they have {f'steps {listed}' if known else 'no steps'}"
            )

    def find_parts(self, trace: RankTrace) -> Parts:
        """A rank's time in parts: of its whole span, or of the chosen steps together."""
        if self.steps is None:
            return trace.breakdown.whole
        return sum((p for step, p in trace.breakdown.by_step.items() if step in self.steps), start=Parts())

    def list_steps(self, trace: RankTrace) -> dict[int, Parts]:
        return {step: p for step, p in trace.breakdown.by_step.items() if self.steps is None or step in self.steps}

    def list_collectives(self) -> Iterator[Collective]:
        """Those of all ranks that begin in what is shown."""
        for trace in self.job.ranks:
            if self.steps is None:
                yield from trace.collectives
                continue
            starts = [collective.start_ns for collective in trace.collectives]
            for collective, step in zip(trace.collectives, find_steps(trace.tables.steps, starts), strict=True):
                if step in self.steps:
                    yield collective


def shorten_names(names: Sequence[str], longest: int = LONGEST_NAME) -> list[str]:
    """Names that fit a table, without arguments and the end; two that differ stay different, as far as they can."""
    short = {name: _shorten(name, longest) for name in names}
    taken = list(short.values())
    return [
        short[name] if len(name) <= longest or taken.count(short[name]) == 1 else _cut_middle(name, longest)
        for name in names
    ]


def _shorten(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    plain, before = name.removeprefix("void ").replace("(anonymous namespace)::", ""), ""
    while plain != before:
        before, plain = plain, _PARAMETERS.sub("", plain)
    plain = plain or name
    return plain if len(plain) <= longest else f"{plain[: longest - 1]}…"


def _cut_middle(name: str, longest: int) -> str:
    head = longest // 2
    return f"{name[:head]}…{name[head + 1 - longest :]}"


MOST_RANKS_PER_STEP = 4
"""With more ranks, a step has one row: the mean over ranks."""
BARRIER = "barrier"
"""It has no message, so that its size is not missing."""
NS = 1e-9


def divide(part: float, whole: float) -> float | None:
    """A share; None of nothing."""
    return part / whole if whole else None


def _seconds(key: str, header: str, *, unit_of: str = "") -> Column:
    return Column(key=f"{key}_seconds", header=header, quantity="seconds", unit_of=unit_of and f"{unit_of}_seconds")


def _share(key: str, header: str) -> Column:
    return Column(key=f"{key}_share", header=header, quantity="share")


def _list_part_columns(has_device: bool) -> tuple[Column, ...]:
    copies = (_seconds("copy", "copies", unit_of="span"),) if has_device else ()
    copy_share = (_share("copy", "copies / span"),) if has_device else ()
    return (
        _seconds("span", "span"),
        _seconds("compute", "compute", unit_of="span"),
        _seconds("exposed", "exposed comm", unit_of="span"),
        *copies,
        _seconds("idle", "idle", unit_of="span"),
        _seconds("communication", "comm", unit_of="span"),
        _seconds("overlapped", "overlapped comm", unit_of="span"),
        _share("compute", "compute / span"),
        _share("exposed", "exposed / span"),
        *copy_share,
        _share("idle", "idle / span"),
        _share("communication", "comm / span"),
        _share("overlapped", "overlapped / comm"),
    )


def _list_part_cells(parts: Parts, num_ranks: int, has_device: bool) -> list[float | None]:
    scale = NS / num_ranks
    copies = [parts.copy_ns] if has_device else []
    in_span = [parts.compute_ns, parts.exposed_ns, *copies, parts.idle_ns, parts.communication_ns]
    return [
        *(time * scale for time in (parts.span_ns, *in_span, parts.overlapped_ns)),
        *(divide(time, parts.span_ns) for time in in_span),
        divide(parts.overlapped_ns, parts.communication_ns),
    ]


def _note_parts(has_device: bool) -> tuple[str, ...]:
    copies = "copies + " if has_device else ""
    return (
        f"span = compute + exposed comm + {copies}idle, exactly; comm = exposed + overlapped",
        "compute: unions of computing kernels"
        if has_device
        else "no device in the trace: compute is operators on threads of the host; idle, none of them runs",
    )


def make_parts_table(view: TraceView) -> Table:
    """One row per rank: its span in parts."""
    rows = [
        make_row(f"rank {rank}", *_list_part_cells(view.find_parts(trace), 1, view.has_device))
        for rank, trace in view.ranks.items()
    ]
    title = "Every rank" if view.steps is None else f"Every rank, step {', '.join(map(str, sorted(view.steps)))}"
    columns = (Column(key="rank", header="rank", align="left"), *_list_part_columns(view.has_device))
    return Table(title=title, columns=columns, rows=tuple(rows), notes=_note_parts(view.has_device))


def make_steps_table(view: TraceView) -> Table | None:
    """One row per step and rank, or per step where ranks are many; None: there are no steps."""
    by_step: dict[int, dict[int, Parts]] = {}
    for rank, trace in view.ranks.items():
        for step, parts in view.list_steps(trace).items():
            by_step.setdefault(step, {})[rank] = parts
    if not by_step:
        return None
    longest = sorted(by_step, key=lambda step: -max(parts.span_ns for parts in by_step[step].values()))
    shown = sorted(longest[: view.top])
    rows: list[tuple[Cell, ...]] = []
    for step in shown:
        ranks = by_step[step]
        if len(view.ranks) > MOST_RANKS_PER_STEP:
            cells = _list_part_cells(sum(ranks.values(), start=Parts()), len(ranks), view.has_device)
            rows.append(make_row(f"step {step}", *cells))
            continue
        for rank, parts in ranks.items():
            cells = _list_part_cells(parts, 1, view.has_device)
            rows.append(make_row(f"step {step}, rank {rank}" if len(view.ranks) > 1 else f"step {step}", *cells))
    notes = ["a step reaches from its beginning to its end as the profiler marked it"]
    if len(view.ranks) > MOST_RANKS_PER_STEP:
        notes.append("means over ranks")
    if len(by_step) > len(shown):
        notes.append(f"the {len(shown)} longest of {len(by_step)} steps; --top shows more")
    columns = (Column(key="step", header="step", align="left"), *_list_part_columns(view.has_device))
    return Table(title="Every step", columns=columns, rows=tuple(rows), notes=tuple(notes))


def make_kinds_table(view: TraceView) -> Table | None:
    """The collectives of all ranks by kind; None: there are none."""
    summaries = summarise_kinds(view.list_collectives())
    if not summaries:
        return None
    columns = (
        Column(key="kind", header="collective", align="left"),
        Column(key="num_collectives", header="count", quantity="count"),
        Column(key="payload_bytes", header="bytes", quantity="bytes"),
        _seconds("total", "total"),
        Column(key="mean_seconds", header="mean", quantity="latency"),
        Column(key="p95_seconds", header="p95", quantity="latency"),
        Column(key="max_seconds", header="max", quantity="latency"),
        Column(key="algorithm_bandwidth", header="algorithm", quantity="bandwidth"),
        Column(key="bus_bandwidth", header="bus", quantity="bandwidth"),
    )
    notes = [
        f"of {_count_ranks(view)}, each counting its own; times are as a rank sees them, with waiting",
        "bytes: of whole messages, added up; algorithm and bus: bandwidth by these times",
        *_note_unsized(summaries),
    ]
    return Table(
        title="Collectives by kind", columns=columns, rows=tuple(map(_make_kind_row, summaries)), notes=tuple(notes)
    )


def _make_kind_row(summary: KindSummary) -> tuple[Cell, ...]:
    name = summary.kind + (f", run as {summary.ran_as}" if summary.ran_as else "")
    return make_row(
        name,
        summary.count,
        summary.payload_bytes,
        summary.total_ns * NS,
        summary.mean_ns * NS,
        summary.p95_ns * NS,
        summary.max_ns * NS,
        summary.algorithm_bandwidth,
        summary.bus_bandwidth,
    )


def _note_unsized(summaries: Iterable[KindSummary]) -> list[str]:
    lacking = [s for s in summaries if s.num_sized < s.count and s.kind != BARRIER]
    unsized = [f"{s.count - s.num_sized} of {s.count} {s.kind}" for s in lacking]
    return [f"size unknown: {', '.join(unsized)}"] if unsized else []


def _count_ranks(view: TraceView) -> str:
    return f"{len(view.ranks)} rank{'s' if len(view.ranks) > 1 else ''}"


def make_transfers_table(view: TraceView) -> Table | None:
    """Matched collectives by kind, each counted once; None: none was matched."""
    matching = view.matching
    summaries = summarise_transfers(matching) if matching is not None else []
    if not summaries:
        return None
    columns = (
        Column(key="kind", header="collective", align="left"),
        Column(key="num_collectives", header="matched", quantity="count"),
        Column(key="payload_bytes", header="bytes", quantity="bytes"),
        Column(key="mean_transfer_seconds", header="mean transfer", quantity="latency"),
        Column(key="p95_transfer_seconds", header="p95 transfer", quantity="latency"),
        Column(key="algorithm_bandwidth", header="algorithm", quantity="bandwidth"),
        Column(key="bus_bandwidth", header="bus", quantity="bandwidth"),
    )
    rows = [
        make_row(
            summary.kind,
            summary.count,
            summary.payload_bytes,
            summary.mean_ns * NS,
            summary.p95_ns * NS,
            summary.algorithm_bandwidth,
            summary.bus_bandwidth,
        )
        for summary in summaries
    ]
    notes = ["transfer: the shortest time of any rank, that of the last to come; bandwidth without waiting"]
    return Table(title="The same, matched over ranks", columns=columns, rows=tuple(rows), notes=tuple(notes))


def make_arrivals_table(view: TraceView) -> Table | None:
    """Who waits and who is waited for; None: nothing was matched."""
    arrivals = view.arrivals
    if arrivals is None:
        return None
    columns = (
        Column(key="rank", header="rank", align="left"),
        Column(key="num_collectives", header="matched", quantity="count"),
        _seconds("transfer", "transfer"),
        _seconds("waiting", "waiting", unit_of="transfer"),
        _share("waiting", "waiting / both"),
        Column(key="num_last", header="last", quantity="count"),
        _seconds("median_late", "late by"),
        _seconds("max_late", "at most", unit_of="median_late"),
        _seconds("waited_for", "others waited", unit_of="transfer"),
    )
    rows = [
        make_row(
            f"rank {one.rank}",
            one.num_collectives,
            one.transfer_ns * NS,
            one.waiting_ns * NS,
            divide(one.waiting_ns, one.waiting_ns + one.transfer_ns),
            one.num_last,
            None if one.median_late_ns is None else one.median_late_ns * NS,
            None if one.max_late_ns is None else one.max_late_ns * NS,
            one.waited_for_ns * NS,
        )
        for one in arrivals.by_rank
    ]
    notes = [
        "waiting: what a rank spends in a collective beyond its transfer; both: transfer + waiting",
        "last: how often it surely came last; late by: the median behind the others, of those times",
    ]
    return Table(title="Who waits for whom", columns=columns, rows=tuple(rows), notes=tuple(notes))
