"""The document of `scalelab trace --hta`: the numbers of HolisticTraceAnalysis, by its definitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scalelab.report.document import Caution, Column, Document, Section, Table, make_row
from scalelab.studies.traced_tables import divide
from scalelab.trace.hta import HtaBreakdown
from scalelab.units import format_share

US = 1e-6


def describe_hta(ranks: Mapping[int, HtaBreakdown]) -> Document:
    """One row per rank."""
    columns = (
        Column(key="rank", header="rank", align="left"),
        Column(key="kernel_seconds", header="kernel time", quantity="seconds"),
        Column(key="compute_seconds", header="compute", quantity="seconds", unit_of="kernel_seconds"),
        Column(key="non_compute_seconds", header="non-compute", quantity="seconds", unit_of="kernel_seconds"),
        Column(key="idle_seconds", header="idle", quantity="seconds", unit_of="kernel_seconds"),
        Column(key="compute_share", header="compute / kernel time", quantity="share"),
        Column(key="non_compute_share", header="non-compute / kernel time", quantity="share"),
        Column(key="idle_share", header="idle / kernel time", quantity="share"),
        Column(key="overlap_share", header="overlap / comm", quantity="share"),
    )
    rows = [
        make_row(
            f"rank {rank}",
            one.kernel_us * US,
            one.compute_us * US,
            one.non_compute_us * US,
            one.idle_us * US,
            divide(one.compute_us, one.kernel_us),
            divide(one.non_compute_us, one.kernel_us),
            divide(one.idle_us, one.kernel_us),
            one.overlap,
        )
        for rank, one in ranks.items()
    ]
    notes = (
        "kernel time: from the first kernel's start to the last one's end; the last of two or more steps is dropped",
        "starts are rounded up and ends down to whole microseconds; comm: the union of communication kernels",
    )
    table = Table(columns=columns, rows=tuple(rows), notes=notes)
    return Document(
        title="Traces",
        question="What would HolisticTraceAnalysis say?",
        setting=f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} · breakdown and overlap by its definitions",
        sections=(Section(tables=(table,)),),
        summary=tuple(_summarise(ranks)),
        cautions=tuple(_find_doubts(ranks)),
    )


def _summarise(ranks: Mapping[int, HtaBreakdown]) -> Iterator[str]:
    for rank, one in ranks.items():
        if one.kernel_us and one.overlap is not None:
            overlap, idle = format_share(one.overlap), format_share(one.idle_us / one.kernel_us)
            yield f"Rank {rank}: {overlap} of communication lies beside compute, {idle} of the kernel time is idle."


def _find_doubts(ranks: Mapping[int, HtaBreakdown]) -> Iterator[Caution]:
    empty = [str(rank) for rank, one in ranks.items() if not one.num_kernels]
    if empty:
        yield Caution(
            message=f"rank {', '.join(empty[:8])}: no kernel is left to count; HolisticTraceAnalysis reads devices",
            next_step="leave out --hta",
        )
