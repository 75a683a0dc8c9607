"""What if the same job had another batch, bucket size, communication hook, accumulation, link, delay or slow rank?

A change touches the part of the job that it names and nothing else. `search_best` ranks every combination of batch,
buckets, compression and accumulation that fits in memory. A rank's memory is a line through the measured peaks (fixed
bytes, and bytes per sample of a pass); if only one batch was measured, larger passes are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scalelab.errors import UsageError
from scalelab.predict.network_model import MEBIBYTE, LinkSpeed
from scalelab.predict.scaled_job import ScaledJob, ScaledStep, predict_step, scale_out
from scalelab.predict.split_step import PerSampleCost, fit_line_by_batch
from scalelab.records.settings import Dtype
from scalelab.records.strategies import find_strategy, list_strategies

Compression = Literal["none", "fp16", "bf16"]
WIDTHS: dict[str, float] = {"float64": 2.0, "float32": 1.0, "tf32": 1.0, "bfloat16": 0.5, "float16": 0.5, "float8": 0.5}
"""Bytes of a number over those of float32."""
COMPRESSIONS: dict[Compression, float] = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}
"""Bytes that are sent for float32 gradients; the work of compressing is not counted."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """What is different; None or the default: nothing."""

    batch: int | None = None
    """Samples per step: of all ranks where the run was strong scaling, of each where it was weak."""
    bucket_mb: float | None = None
    compression: Compression = "none"
    accumulation: int | None = None
    link: LinkSpeed | None = None
    between: LinkSpeed | None = None
    ranks_per_node: int | None = None
    delay_seconds: float = 0.0
    slow_factor: float = 1.0
    """How many times longer one rank computes than the others."""
    compute_factor: float = 1.0
    """How many times faster every rank computes: another device, another data type."""
    dtype: Dtype | None = None
    """Of parameters and gradients: changes their bytes. What it does to computing is `compute_factor`."""
    strategy: str | None = None
    num_units: int | None = None
    """Equal pieces that a sharded model is gathered in."""

    def __post_init__(self) -> None:
        if self.compression not in COMPRESSIONS:
            raise UsageError(f"--compression must be one of {', '.join(COMPRESSIONS)}, got {self.compression}")
        known = list_strategies(lambda strategy: strategy.has_processes)
        if self.strategy is not None and self.strategy not in known:
            raise UsageError(f"--strategy must be one of {', '.join(known)}, got {self.strategy}")
        if self.num_units is not None and self.num_units < 1:
            raise UsageError(f"--units must be ≥ 1, got {self.num_units}")
        for name, value in (("slow", self.slow_factor), ("compute", self.compute_factor)):
            if not value > 0:
                raise UsageError(f"--{name} must be a factor > 0, got {value:g}")
        if self.slow_factor < 1:
            raise UsageError(f"--slow must be ≥ 1 (others wait for the slow rank), got {self.slow_factor:g}")
        for flag, number in (("batch", self.batch), ("bucket-mb", self.bucket_mb), ("accumulation", self.accumulation)):
            if number is not None and number <= 0:
                raise UsageError(f"--{flag} must be > 0, got {number:g}")
        if self.delay_seconds < 0:
            raise UsageError(f"--delay must be ≥ 0, got {self.delay_seconds:g}")

    @property
    def changes(self) -> tuple[str, ...]:
        """What is different, in words."""
        between = None if self.between is None else self.between.words
        said = {
            f"batch {self.batch}": self.batch is not None,
            f"{self.bucket_mb or 0:g} MiB buckets": self.bucket_mb is not None,
            f"{self.compression} communication hook": self.compression != "none",
            f"{self.accumulation} accumulation steps": self.accumulation is not None,
            f"link {self.link.words if self.link else ''}": self.link is not None,
            f"{between} between nodes ({self.ranks_per_node} ranks each)": between is not None,
            f"{self.delay_seconds * 1e3:g} ms injected delay": self.delay_seconds > 0,
            f"one rank {self.slow_factor:g}× slower": self.slow_factor != 1,
            f"compute {self.compute_factor:g}× faster": self.compute_factor != 1,
            f"{self.dtype} parameters and gradients": self.dtype is not None,
            f"{self.strategy}": self.strategy is not None,
            f"{self.num_units} FSDP units": self.num_units is not None,
        }
        return tuple(words for words, is_changed in said.items() if is_changed)


def find_width(job: ScaledJob, change: WhatIf) -> float:
    """Bytes of a number over what they were."""
    return 1.0 if change.dtype is None else WIDTHS[change.dtype] / WIDTHS[job.dtype]


def change_job(job: ScaledJob, change: WhatIf) -> ScaledJob:
    """The job with a change."""
    network = job.network
    if change.link is not None:
        network = replace(network, inside=change.link)
    if change.between is not None or change.ranks_per_node is not None:
        network = replace(
            network,
            between=change.between or network.between or network.inside,
            ranks_per_node=change.ranks_per_node or network.ranks_per_node,
        )
    strategy = change.strategy or job.strategy
    if "gradient_hook" not in find_strategy(strategy).options and change.compression != "none":
        raise UsageError(f"--compression {change.compression} is a DDP communication hook; {strategy} has none")
    phases = job.phases
    if change.compute_factor != 1:
        phases = {name: phase.scale(1 / change.compute_factor) for name, phase in phases.items()}
    return replace(
        job,
        phases=phases,
        network=network,
        bucket_bytes=job.bucket_bytes if change.bucket_mb is None else change.bucket_mb * MEBIBYTE,
        compression=job.compression * COMPRESSIONS[change.compression] * find_width(job, change),
        strategy=strategy,
        num_units=change.num_units or job.num_units,
        units=() if change.num_units or change.strategy else job.units,
        accumulation=change.accumulation or job.accumulation,
        pass_samples=job.pass_samples if change.accumulation is None else None,
        delay_seconds=job.delay_seconds + change.delay_seconds,
        slow_factor=job.slow_factor * change.slow_factor,
    )


BUCKETS_MB: tuple[float | None, ...] = (None, 1.0, 5.0, 50.0, 100.0)
PASSES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that one rank needs, by samples of a pass."""

    line: PerSampleCost
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
        return Need(line=PerSampleCost(fixed=peak), largest_batch=batch, is_line=False)
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
    """The combinations with the most samples per second, best first, and how many did not fit in memory.

    `is_compressible`: whether to try compressing gradients; on CPU ranks its work outweighs what it saves.
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
            f"none of {num_left_out} combinations is known to fit in --memory: raise it, or measure a smaller batch"
        )
    found.sort(key=lambda one: (-one[0], len(one[1].changes)))
    best = []
    for _, change, per_rank, needed in found[:top]:
        batch = per_rank if is_weak else per_rank * num_ranks
        (step,) = scale_out(change_job(job, change), [num_ranks], batch=batch, is_weak=is_weak)
        best.append(Candidate(change=change, step=step, need_bytes=needed))
    return best, num_left_out
