"""The same job with something changed: batch, buckets, compression, accumulation, delay, a slow rank.

Each change says what of the job it touches, and nothing else moves. What follows from measurements only as far as they
go says so in its own docstring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from scalelab.errors import UsageError
from scalelab.predict.buckets import MEBIBYTE
from scalelab.predict.job import ScaledJob, predict_step
from scalelab.predict.link_cost import LinkCost

Compression = Literal["none", "fp16", "bf16"]
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
    link: LinkCost | None = None
    between: LinkCost | None = None
    ranks_per_node: int | None = None
    delay_seconds: float = 0.0
    slow_factor: float = 1.0
    """How many times longer one rank computes than the others."""
    compute_factor: float = 1.0
    """How many times faster every rank computes: another device, another data type."""

    def __post_init__(self) -> None:
        if self.compression not in COMPRESSIONS:
            raise UsageError(f"--compression {self.compression} is unknown: use {', '.join(COMPRESSIONS)}")
        for name, value in (("slow", self.slow_factor), ("compute", self.compute_factor)):
            if not value > 0:
                raise UsageError(f"--{name} {value:g} cannot be: use a factor above 0")
        if self.slow_factor < 1:
            raise UsageError(
                f"--slow {self.slow_factor:g} would be a faster rank, which others wait for: use 1 or more"
            )
        for flag, number in (("batch", self.batch), ("bucket-mb", self.bucket_mb), ("accumulation", self.accumulation)):
            if number is not None and number <= 0:
                raise UsageError(f"--{flag} {number:g} cannot be: use a number above 0")
        if self.delay_seconds < 0:
            raise UsageError(f"--delay {self.delay_seconds:g} cannot be: use 0 or more")

    @property
    def changes(self) -> tuple[str, ...]:
        """What is different, in words."""
        found = []
        if self.batch is not None:
            found.append(f"batch {self.batch}")
        if self.bucket_mb is not None:
            found.append(f"buckets of {self.bucket_mb:g} MiB")
        if self.compression != "none":
            found.append(f"gradients sent as {self.compression}")
        if self.accumulation is not None:
            found.append(f"{self.accumulation} passes per step")
        if self.link is not None:
            found.append(f"a link of {self.link.words}")
        if self.between is not None:
            found.append(f"{self.between.words} between nodes of {self.ranks_per_node} ranks")
        if self.delay_seconds:
            found.append(f"{self.delay_seconds * 1e3:g} ms of delay")
        if self.slow_factor != 1:
            found.append(f"one rank {self.slow_factor:g} times slower")
        if self.compute_factor != 1:
            found.append(f"computing {self.compute_factor:g} times faster")
        return tuple(found)


def change_job(job: ScaledJob, change: WhatIf, batch_per_rank: float) -> ScaledJob:
    """The job with a change. A slow rank holds up all others by what it computes longer."""
    network = job.network
    if change.link is not None:
        network = replace(network, inside=change.link)
    if change.between is not None or change.ranks_per_node is not None:
        network = replace(
            network,
            between=change.between or network.between or network.inside,
            ranks_per_node=change.ranks_per_node or network.ranks_per_node,
        )
    phases = job.phases
    if change.compute_factor != 1:
        phases = {name: phase.scale(1 / change.compute_factor) for name, phase in phases.items()}
    changed = replace(
        job,
        phases=phases,
        network=network,
        bucket_bytes=job.bucket_bytes if change.bucket_mb is None else change.bucket_mb * MEBIBYTE,
        compression=job.compression * COMPRESSIONS[change.compression],
        accumulation=change.accumulation or job.accumulation,
    )
    held_up = change.delay_seconds
    if change.slow_factor > 1:
        parts = predict_step(changed, 1, batch_per_rank)
        held_up += (change.slow_factor - 1) * (parts.forward_seconds + parts.backward_seconds)
    return replace(changed, delay_seconds=job.delay_seconds + held_up)
