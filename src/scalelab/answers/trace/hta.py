"""The time of devices by the definitions of HolisticTraceAnalysis, as a document.

It imports little, because most of its time would go into that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scalelab.report.document import Document, Section
from scalelab.report.findings import MAIN, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import Field, make_table, seconds_column, share_column, text_column
from scalelab.trace.hta import HtaBreakdown
from scalelab.units import format_count, format_share

OVERLAP = FindingKind("hta-overlap", "Overlap and idle time as HTA defines them", MAIN, ("overlap", "idle"))
NO_KERNELS = CautionKind("no-kernels", "A rank without kernels, which HTA needs", "failure")
US = 1e-6


def describe_hta(ranks: Mapping[int, HtaBreakdown]) -> Document:
    """The numbers of HolisticTraceAnalysis, one row per rank."""

    def time(part: str, header: str) -> Field[Any]:
        unit = {} if part == "kernel" else {"unit_of": "kernel_seconds"}
        return seconds_column(f"{part}_seconds", header, lambda row: getattr(row[1], f"{part}_us") * US, **unit)

    def share(part: str, header: str) -> Field[Any]:
        def divide(row: Any) -> float | None:
            return getattr(row[1], f"{part}_us") / row[1].kernel_us if row[1].kernel_us else None

        return share_column(f"{part}_share", header, divide)

    table = make_table(
        ranks.items(),
        text_column("rank", "rank", lambda row: f"rank {row[0]}"),
        time("kernel", "kernel time"),
        time("compute", "compute"),
        time("non_compute", "non-compute"),
        time("idle", "idle"),
        share("compute", "compute / kernel time"),
        share("non_compute", "non-compute / kernel time"),
        share("idle", "idle / kernel time"),
        share_column("overlap_share", "overlap / comm", lambda row: row[1].overlap),
        notes=(
            "kernel time: from the first kernel's start to the last one's end; with several steps, without the last",
            "starts are rounded up and ends down to whole microseconds; comm: union of communication kernels",
        ),
    )
    return Document(
        title="Traces",
        question="What does HolisticTraceAnalysis report?",
        setting=f"{format_count(len(ranks), 'rank')} · temporal breakdown and overlap by its definitions",
        sections=(Section(tables=(table,)),),
        findings=tuple(_summarise_hta(ranks)),
        cautions=tuple(_find_hta_doubts(ranks)),
    )


def _summarise_hta(ranks: Mapping[int, HtaBreakdown]) -> Iterator[Finding]:
    for rank, one in ranks.items():
        if one.kernel_us and one.overlap is not None:
            idle = one.idle_us / one.kernel_us
            text = (
                f"Rank {rank}: {format_share(one.overlap)} of communication overlaps with compute, {format_share(idle)}"
                " of the kernel time is idle."
            )
            yield OVERLAP(f"rank {rank}", text, overlap=one.overlap, idle=idle)


def _find_hta_doubts(ranks: Mapping[int, HtaBreakdown]) -> Iterator[Caution]:
    for rank, one in ranks.items():
        if not one.num_kernels:
            message = f"rank {rank}: no kernel to count; HolisticTraceAnalysis reads device traces"
            yield NO_KERNELS(f"rank {rank}", message, "leave out --hta")
