"""What the profiled steps of a trial say: the ranks' traces, read by the parent when the ranks are gone.

The trial has its times already. A trace that is missing or cannot be read, or a disk that is full, leaves the trial
without this, and is no failure of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from scalelab.errors import ScalelabError
from scalelab.measure.agreement import trace_file
from scalelab.observations import Message, RankReport, TracedOperator, TracedStep
from scalelab.trace.collectives import Collective
from scalelab.trace.matching import find_steps
from scalelab.trace.operators import OperatorCounter
from scalelab.trace.rank import RankTrace
from scalelab.trace.ranks import JobTrace, read_ranks
from scalelab.trace.waiting import StepWaiting, sum_by_step

MOST_OPERATORS = 1000
"""What is kept of a trace with more names is their longest."""


def add_traced_steps(reports: Sequence[RankReport], directory: Path) -> tuple[RankReport, ...]:
    """The reports, with the steps that the ranks' traces hold."""
    files = [trace_file(directory, report.rank) for report in reports]
    if not files or not all(file.is_file() for file in files):
        return tuple(reports)
    try:
        job = read_ranks(files, counters=[OperatorCounter])
        traced = summarise_traces(job)
    except ScalelabError:
        return tuple(reports)
    operators = {0: list_operators(job.by_rank[0])} if 0 in job.by_rank else {}
    return tuple(
        replace(report, traced_steps=traced.get(report.rank, ()), traced_operators=operators.get(report.rank, ()))
        for report in reports
    )


def list_operators(trace: RankTrace) -> tuple[TracedOperator, ...]:
    """The operators of a trace that was read with their counter, the longest time themselves first."""
    (operators,) = trace.counted
    return tuple(
        TracedOperator(name=one.name, count=one.count, self_ns=one.self_ns) for one in operators[:MOST_OPERATORS]
    )


def summarise_traces(job: JobTrace) -> dict[int, tuple[TracedStep, ...]]:
    """The steps of every rank, in order."""
    matching, by_rank = job.matching, job.by_rank
    waiting = sum_by_step(matching, by_rank) if matching is not None else {}
    return {rank: _list_steps(trace, waiting.get(rank, {})) for rank, trace in by_rank.items()}


def _list_steps(trace: RankTrace, waiting: dict[int, StepWaiting]) -> tuple[TracedStep, ...]:
    collectives: dict[int, list[Collective]] = {}
    steps = find_steps(trace.tables.steps, [int(start) for start in trace.collectives.start_ns])
    for number, collective in zip(steps, trace.collectives, strict=True):
        if number is not None:
            collectives.setdefault(number, []).append(collective)
    found = []
    for step, parts in trace.breakdown.by_step.items():
        matched = waiting.get(step)
        found.append(
            TracedStep(
                span_ns=parts.span_ns,
                compute_ns=parts.compute_ns,
                overlapped_ns=parts.overlapped_ns,
                exposed_ns=parts.exposed_ns,
                copy_ns=parts.copy_ns,
                idle_ns=parts.idle_ns,
                transfer_ns=matched.transfer_ns if matched else None,
                waiting_ns=matched.waiting_ns if matched else None,
                num_matched=matched.num_collectives if matched else None,
                messages=count_messages(collectives.get(step, ())),
            )
        )
    return tuple(found)


def count_messages(collectives: Iterable[Collective]) -> tuple[Message, ...]:
    """By kind; the bytes are those of the collectives whose size was recorded."""
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for collective in collectives:
        counts[collective.kind] = counts.get(collective.kind, 0) + 1
        if collective.payload_bytes is not None:
            sizes[collective.kind] = sizes.get(collective.kind, 0) + collective.payload_bytes
    return tuple(Message(kind=kind, count=count, payload_bytes=sizes.get(kind)) for kind, count in counts.items())
