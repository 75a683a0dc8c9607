"""The same job with something changed: batch, buckets, compression, accumulation, delay, a slow rank.

Each change says what of the job it touches, and nothing else moves. What follows from measurements only as far as they
go says so in its own docstring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from scalelab.errors import UsageError
from scalelab.predict.buckets import MEBIBYTE
from scalelab.predict.job import SHARDED, WHOLE, ScaledJob
from scalelab.predict.link_cost import LinkCost
from scalelab.settings import Dtype

Compression = Literal["none", "fp16", "bf16"]
WIDTHS: dict[str, float] = {"float64": 2.0, "float32": 1.0, "tf32": 1.0, "bfloat16": 0.5, "float16": 0.5}
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
    link: LinkCost | None = None
    between: LinkCost | None = None
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
            raise UsageError(f"--compression {self.compression} is unknown: use {', '.join(COMPRESSIONS)}")
        if self.strategy is not None and self.strategy not in (*SHARDED, *WHOLE):
            raise UsageError(f"--strategy {self.strategy} is not predicted: use {', '.join((*WHOLE, *SHARDED))}")
        if self.num_units is not None and self.num_units < 1:
            raise UsageError(f"--units {self.num_units} cannot be: use 1 or more")
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
        between = None if self.between is None else self.between.words
        said = {
            f"batch {self.batch}": self.batch is not None,
            f"buckets of {self.bucket_mb or 0:g} MiB": self.bucket_mb is not None,
            f"gradients sent as {self.compression}": self.compression != "none",
            f"{self.accumulation} passes per step": self.accumulation is not None,
            f"a link of {self.link.words if self.link else ''}": self.link is not None,
            f"{between} between nodes of {self.ranks_per_node} ranks": between is not None,
            f"{self.delay_seconds * 1e3:g} ms of delay": self.delay_seconds > 0,
            f"one rank {self.slow_factor:g} times slower": self.slow_factor != 1,
            f"computing {self.compute_factor:g} times faster": self.compute_factor != 1,
            f"numbers of {self.dtype}": self.dtype is not None,
            f"{self.strategy}": self.strategy is not None,
            f"{self.num_units} units": self.num_units is not None,
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
    if strategy in SHARDED and change.compression != "none":
        raise UsageError(f"--compression {change.compression} is a hook of ddp: {strategy} has none")
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
        accumulation=change.accumulation or job.accumulation,
        delay_seconds=job.delay_seconds + change.delay_seconds,
        slow_factor=job.slow_factor * change.slow_factor,
    )
