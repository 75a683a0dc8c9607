"""Traces of several ranks with known answers: when each comes to a collective, when it ends, what its clock says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalelab.trace.job_trace import JobTrace, read_ranks
from scalelab.trace.matching import Matching, match_collectives
from tests.trace.build import TraceBuilder

SECOND_US = 1_000_000


class GroupedBuilder(TraceBuilder):
    """A rank of a job with several process groups."""

    groups: Mapping[str, Sequence[int]] = {}

    @property
    def header(self) -> dict[str, Any]:
        header = super().header
        if self.groups:
            header["distributedInfo"]["pg_config"] = [
                {"pg_name": name, "pg_size": len(ranks), "ranks": list(ranks)} for name, ranks in self.groups.items()
            ]
        return header


def write_job(directory: Path, builders: Sequence[TraceBuilder]) -> JobTrace:
    """The files of a job, read."""
    return read_ranks([builder.write(directory / f"rank{builder.rank}.json") for builder in builders])


def match(job: JobTrace) -> Matching:
    return match_collectives(job.by_rank)


def reduce_on_time(
    arrivals_us: Sequence[Sequence[float]],
    *,
    transfer_us: float = 50,
    ahead_us: Sequence[float] = (),
    drift: Sequence[float] = (),
    period_us: float = 1000,
    with_sequence: bool = True,
) -> list[TraceBuilder]:
    """All-reduces, one per row of arrivals (a number per rank); all ranks leave when the last has come and transferred.

    `ahead_us` and `drift` say how far each rank's clock is ahead, and by how much it runs faster.
    """
    num_ranks = len(arrivals_us[0])
    builders = [TraceBuilder(rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for number, row in enumerate(arrivals_us):
        end = number * period_us + max(row) + transfer_us
        for rank, (builder, arrival) in enumerate(zip(builders, row, strict=True)):
            ahead = ahead_us[rank] if ahead_us else 0.0
            rate = 1 + (drift[rank] if drift else 0.0)
            start, stop = ((number * period_us + arrival) * rate + ahead, end * rate + ahead)
            extra = {"Seq": number} if with_sequence else {}
            builder.collective("allreduce", round(start, 3), round(stop - start, 3), **extra)
    return builders
