"""Tables of where the time goes: ranks and steps in parts, collectives, arrivals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from scalelab.answers.trace.view import NS, TraceView, divide
from scalelab.report.document import Table
from scalelab.report.tables import (
    Field,
    bytes_column,
    count_column,
    make_column,
    make_table,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.trace.linking import StepBasis
from scalelab.trace.rank_time import Parts
from scalelab.trace.waiting import KindSummary, summarise_transfers
from scalelab.trace.windows import ProfilerStep
from scalelab.units import format_count

MOST_RANKS_PER_STEP = 4
"""With more ranks, a step has one row: the mean over ranks."""
BARRIER = "barrier"
"""It has no payload."""
Read = Callable[[Any], Any]


class PartsRow(NamedTuple):
    """The time of a rank, of a step, or of a step on a rank, in parts."""

    name: str
    parts: Parts
    num_ranks: int = 1
    period_ns: float | None = None
    """From the first kernel of a step to that of the next."""


def latency_column(key: str, header: str, read: Read, **options: Any) -> Field[Any]:
    return make_column("latency", f"{key}_seconds", header, read, **options)


def bandwidth_column(key: str, header: str, read: Read) -> Field[Any]:
    return make_column("bandwidth", f"{key}_bandwidth", header, read)


def make_part_table(rows: Iterable[PartsRow], name: str, has_device: bool, *notes: str, title: str) -> Table:
    """Parts that add up to the span, and their shares of it."""

    def time(part: str, header: str, **options: Any) -> Field[PartsRow]:
        def read(row: PartsRow) -> float:
            return float(getattr(row.parts, f"{part}_ns") * NS / row.num_ranks)

        unit = {} if part == "span" else {"unit_of": "span_seconds"}
        return seconds_column(f"{part}_seconds", header, read, **unit, **options)

    def share(part: str, header: str, whole: str = "span", **options: Any) -> Field[PartsRow]:
        def read(row: PartsRow) -> float | None:
            return divide(getattr(row.parts, f"{part}_ns"), getattr(row.parts, f"{whole}_ns"))

        return share_column(f"{part}_share", header, read, **options)

    def read_period(row: PartsRow) -> float | None:
        return None if row.period_ns is None else row.period_ns * NS

    copies = "copies + " if has_device else ""
    return make_table(
        rows,
        text_column(name, name, lambda row: row.name),
        time("span", "span"),
        seconds_column("period_seconds", "to next step", read_period, unit_of="span_seconds", is_detail=True)
        if name == "step" and has_device
        else None,
        time("compute", "compute"),
        time("exposed", "exposed comm"),
        time("copy", "copies") if has_device else None,
        time("idle", "idle"),
        time("communication", "comm", is_detail=True),
        time("overlapped", "overlapped comm", is_detail=True),
        share("compute", "compute / span", is_detail=True),
        share("exposed", "exposed / span"),
        share("copy", "copies / span", is_detail=True) if has_device else None,
        share("idle", "idle / span"),
        share("communication", "comm / span", is_detail=True),
        share("overlapped", "overlapped / comm", "communication"),
        title=title,
        notes=(
            f"span = compute + exposed comm + {copies}idle, exactly; comm = exposed + overlapped",
            "compute: union of compute kernels"
            if has_device
            else "no device in the trace: compute is operators on host threads, idle when none runs",
            *notes,
        ),
    )


def make_ranks_table(view: TraceView) -> Table:
    """One row per rank: its span in parts."""
    rows = [PartsRow(f"rank {rank}", view.find_parts(trace)) for rank, trace in view.timed_ranks.items()]
    title = "Every rank" if view.steps is None else f"Every rank, step {', '.join(map(str, sorted(view.steps)))}"
    return make_part_table(rows, "rank", view.has_device, title=title)


def make_steps_table(view: TraceView) -> Table | None:
    """One row per step and rank, or per step if there are many ranks; None: there are no steps."""
    by_step: dict[int, dict[int, Parts]] = {}
    for rank, trace in view.timed_ranks.items():
        for step, parts in view.list_steps(trace).items():
            by_step.setdefault(step, {})[rank] = parts
    if not by_step:
        return None
    longest = sorted(by_step, key=lambda step: -max(parts.span_ns for parts in by_step[step].values()))
    shown = sorted(longest[: view.top])
    is_mean = len(view.ranks) > MOST_RANKS_PER_STEP
    periods = {rank: list_periods(trace.tables.steps) for rank, trace in view.timed_ranks.items()}
    if is_mean:
        means = ((step, by_step[step]) for step in shown)
        rows = [
            PartsRow(f"step {step}", sum(ranks.values(), start=Parts()), len(ranks), average_periods(periods, step))
            for step, ranks in means
        ]
    else:
        on = ", rank {}" if len(view.ranks) > 1 else ""
        rows = [
            PartsRow(f"step {step}{on.format(rank)}", parts, period_ns=periods[rank].get(step))
            for step in shown
            for rank, parts in by_step[step].items()
        ]
    notes = [describe_steps(view), *(["means over ranks"] if is_mean else [])]
    if len(by_step) > len(shown):
        notes.append(f"the {len(shown)} longest of {len(by_step)} steps; --top shows more")
    return make_part_table(rows, "step", view.has_device, *notes, title="Every step")


def list_periods(steps: Sequence[ProfilerStep]) -> dict[int, int]:
    """From the start of every step to that of the next, by number."""
    return {first.number: second.start - first.start for first, second in pairwise(steps)}


def average_periods(periods: Mapping[int, Mapping[int, int]], step: int) -> float | None:
    found = [one[step] for one in periods.values() if step in one]
    return sum(found) / len(found) if found else None


def describe_steps(view: TraceView) -> str:
    """What the steps of a table are."""
    bases = {trace.tables.step_basis for trace in view.job.ranks if trace.tables.steps}
    if bases != {StepBasis.LAUNCHES}:
        return "a step is the interval that the profiler marked"
    are_apart = all(
        first.end <= second.start for trace in view.job.ranks for first, second in pairwise(trace.tables.steps)
    )
    overlap = "" if are_apart else "; steps overlap"
    return f"a step: from its first kernel to the end of its last, by the launches of the host in it{overlap}"


def make_kinds_table(view: TraceView) -> Table | None:
    """The collectives of all ranks by kind; None: there are none."""
    summaries = view.kinds
    if not summaries:
        return None
    lacking = [one for one in summaries if one.num_sized < one.count and one.kind != BARRIER]
    unsized = ", ".join(f"{one.count - one.num_sized} of {one.count} {one.kind}" for one in lacking)
    return make_table(
        summaries,
        text_column("kind", "collective", name_kind),
        count_column("num_collectives", "count", lambda one: one.count),
        bytes_column("payload_bytes", "bytes", lambda one: one.payload_bytes),
        seconds_column("total_seconds", "total", lambda one: one.total_ns * NS),
        latency_column("mean", "mean", lambda one: one.mean_ns * NS),
        latency_column("p95", "p95", lambda one: one.p95_ns * NS),
        latency_column("max", "max", lambda one: one.max_ns * NS),
        bandwidth_column("algorithm", "algorithm bandwidth", lambda one: one.algorithm_bandwidth),
        bandwidth_column("bus", "bus bandwidth", lambda one: one.bus_bandwidth),
        title="Collectives by kind",
        notes=(
            f"counted on each of {format_count(len(view.ranks), 'rank')}; times include waiting for other ranks",
            "bytes: sum of the payloads; bandwidths follow from these times",
            *([f"size unknown: {unsized}"] if unsized else []),
        ),
    )


def name_kind(one: KindSummary) -> str:
    ran_as = f", run as {one.ran_as}" if one.ran_as else ""
    return f"{one.kind}{ran_as}{' (on the host)' if one.is_beside else ''}"


def make_transfers_table(view: TraceView) -> Table | None:
    """Matched collectives by kind, each counted once; None: none was matched."""
    summaries = summarise_transfers(view.matching) if view.matching is not None else []
    if not summaries:
        return None
    return make_table(
        summaries,
        text_column("kind", "collective", lambda one: one.kind),
        count_column("num_collectives", "matched", lambda one: one.count),
        bytes_column("payload_bytes", "bytes", lambda one: one.payload_bytes),
        latency_column("mean_transfer", "mean transfer", lambda one: one.mean_ns * NS),
        latency_column("p95_transfer", "p95 transfer", lambda one: one.p95_ns * NS),
        bandwidth_column("algorithm", "algorithm bandwidth", lambda one: one.algorithm_bandwidth),
        bandwidth_column("bus", "bus bandwidth", lambda one: one.bus_bandwidth),
        title="Collectives matched across ranks",
        notes=("transfer: the shortest time of any rank, that of the last to arrive; bandwidths exclude waiting",),
    )


def make_arrivals_table(view: TraceView) -> Table | None:
    """Which rank waits and which is late; None: nothing was matched."""
    arrivals = view.arrivals
    if arrivals is None:
        return None

    def late(name: str, one: Any) -> float | None:
        value = getattr(one, f"{name}_ns")
        return None if value is None else value * NS

    return make_table(
        arrivals.by_rank,
        text_column("rank", "rank", lambda one: f"rank {one.rank}"),
        count_column("num_collectives", "matched", lambda one: one.num_collectives),
        seconds_column("transfer_seconds", "transfer", lambda one: one.transfer_ns * NS),
        seconds_column("waiting_seconds", "waiting", lambda one: one.waiting_ns * NS, unit_of="transfer_seconds"),
        share_column(
            "waiting_share",
            "waiting / (transfer + waiting)",
            lambda one: divide(one.waiting_ns, one.waiting_ns + one.transfer_ns),
        ),
        count_column("num_last", "last", lambda one: one.num_last),
        seconds_column("median_late_seconds", "late by", partial(late, "median_late")),
        seconds_column("max_late_seconds", "at most", partial(late, "max_late"), unit_of="median_late_seconds"),
        seconds_column(
            "waited_for_seconds", "others waited", lambda one: one.waited_for_ns * NS, unit_of="transfer_seconds"
        ),
        title="Arrivals",
        notes=(
            "waiting: time in a collective beyond the transfer",
            "last: how often the rank was certainly last; late by: the median delay of these",
        ),
    )


def note_more(num_all: int, num_shown: int) -> Sequence[str]:
    return [f"{num_shown} of {num_all}; --top shows more"] if num_shown < num_all else []
