"""The fastest of what could be changed: every combination of batch, buckets, compression and accumulation, ranked.

Only what fits memory is ranked. What a rank needs is a line through what was measured, fixed bytes and bytes per
sample of a pass; where only one batch was measured, nothing is known of others and larger passes are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scalelab.errors import UsageError
from scalelab.predict.job import Line, ScaledJob, fit_line_by_batch, predict_step
from scalelab.predict.scale_out import ScaledStep, scale_out
from scalelab.predict.what_if import COMPRESSIONS, WhatIf, change_job

BUCKETS_MB: tuple[float | None, ...] = (None, 1.0, 5.0, 50.0, 100.0)
PASSES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that one rank needs, by samples of a pass."""

    line: Line
    largest_batch: float
    """Of those that were measured: beyond it only a line of two batches says anything."""
    is_line: bool

    def find_bytes(self, per_pass: float) -> float | None:
        """None: nothing is known of that many samples."""
        if not self.is_line:
            return self.line.at(self.largest_batch) if per_pass <= self.largest_batch else None
        return self.line.at(per_pass)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One combination."""

    change: WhatIf
    step: ScaledStep
    need_bytes: float | None
    """None: unknown."""


def fit_need(peaks: Mapping[float, float]) -> Need | None:
    """What a rank needs, from its peaks by batch; None: nothing was measured."""
    if not peaks:
        return None
    if len(peaks) == 1:
        ((batch, peak),) = peaks.items()
        return Need(line=Line(fixed=peak), largest_batch=batch, is_line=False)
    return Need(line=fit_line_by_batch(dict(peaks)), largest_batch=max(peaks), is_line=True)


def list_changes(job: ScaledJob, base: WhatIf, batches: Sequence[int], *, is_compressible: bool) -> Iterator[WhatIf]:
    """Every combination, with what was asked for kept."""
    buckets = BUCKETS_MB if base.bucket_mb is None else (base.bucket_mb,)
    kinds = tuple(COMPRESSIONS) if is_compressible and base.compression == "none" else (base.compression,)
    passes = PASSES if base.accumulation is None else (base.accumulation,)
    for batch, bucket, kind, count in itertools.product(batches, buckets, kinds, passes):
        yield replace(
            base,
            batch=batch,
            bucket_mb=bucket,
            compression=kind,
            accumulation=None if count == job.accumulation else count,
        )


def search_best(
    job: ScaledJob,
    base: WhatIf,
    num_ranks: int,
    batches: Sequence[int],
    *,
    is_weak: bool,
    need: Need | None,
    memory_bytes: float | None,
    top: int,
    is_compressible: bool,
) -> tuple[list[Candidate], int]:
    """The combinations with the most samples per second, best first, and how many did not fit into memory.

    `is_compressible`: whether compressing gradients is worth trying; on cores its work outweighs what it saves.
    """
    found: list[tuple[float, WhatIf, float, float | None]] = []
    num_left_out = 0
    for change in list_changes(job, base, batches, is_compressible=is_compressible):
        assert change.batch is not None
        per_rank = change.batch if is_weak else change.batch / num_ranks
        per_pass = per_rank / (change.accumulation or job.accumulation)
        if per_pass < 1 or per_pass != int(per_pass):
            continue
        needed = None if need is None else need.find_bytes(per_pass)
        if memory_bytes is not None and (needed is None or needed > memory_bytes):
            num_left_out += 1
            continue
        seconds = predict_step(change_job(job, change), num_ranks, per_rank).seconds
        found.append((per_rank * num_ranks / seconds, change, per_rank, needed))
    if not found:
        raise UsageError(
            f"nothing fits: {num_left_out} combinations need more than the memory that was given, or more than is known"
            " of; raise --memory, or measure a smaller batch"
        )
    found.sort(key=lambda one: (-one[0], len(one[1].changes)))
    best = []
    for _, change, per_rank, needed in found[:top]:
        batch = per_rank if is_weak else per_rank * num_ranks
        (step,) = scale_out(change_job(job, change), [num_ranks], batch=batch, is_weak=is_weak)
        best.append(Candidate(change=change, step=step, need_bytes=needed))
    return best, num_left_out
