"""What DistributedDataParallel says of its own steps: a third way to the cost of communication.

DDP keeps clocks of its own: when forward began, when backward began and had its last gradient, when the first bucket
was started and the last one came back. It samples every hundredth step; here it is asked for every one. What it says
after a step is about the step before, so that one more is run than is read. The steps are ordinary ones, after all
timed steps.

torch marks both calls as prototypes. Where they are missing, or say nothing, as without gradients, there is no record.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from scalelab.measure.step import mark_nothing, take_step
from scalelab.measure.training import Training
from scalelab.observations import DdpCounters, RankReport
from scalelab.trial import Trial

NUM_STEPS = 20
USUAL_SAMPLE_RATE = 100
"""torch's own: every so many steps are sampled."""
COUNTERS = {
    "forward_seconds": "forward_compute_time",
    "backward_seconds": "backward_compute_time",
    "communication_seconds": "backward_comm_time",
    "overlap_seconds": "backward_compute_comm_overlap_time",
}
"""Our names and DDP's, which counts nanoseconds."""


def watch_ddp_counters(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:  # noqa: ARG001 - an instrument's signature
    """The report with what DDP counted in steps of their own; unchanged under another strategy."""
    model = getattr(training.model, "_orig_mod", training.model)
    if not isinstance(model, DistributedDataParallel) or not hasattr(model, "_set_ddp_runtime_logging_sample_rate"):
        return report
    model._set_ddp_runtime_logging_sample_rate(1)
    said: list[dict[str, Any]] = []
    for _ in range(NUM_STEPS + 1):
        take_step(training, mark_nothing)
        training.synchronize()
        said.append(model._get_ddp_logging_data())
    model._set_ddp_runtime_logging_sample_rate(USUAL_SAMPLE_RATE)
    return replace(report, counters=make_counters(said[1:]))


def make_counters(said: list[dict[str, Any]]) -> DdpCounters | None:
    """One record from what DDP said after each step; None where it left anything out."""
    if not said or any(name not in step for step in said for name in COUNTERS.values()):
        return None
    times = {ours: tuple(step[name] / 1e9 for step in said) for ours, name in COUNTERS.items()}
    sizes = str(said[-1].get("rebuilt_bucket_sizes") or said[-1].get("bucket_sizes") or "")
    return DdpCounters(**times, bucket_bytes=tuple(int(size) for size in sizes.split(",") if size.strip()))
