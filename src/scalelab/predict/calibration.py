"""`plan` for a machine that was measured, instead of a device of the table: what one rank does in a step, and its link.

Two numbers are fitted, so that the step of one rank takes as long as it did:

    peak      operations per second, from the step with the most samples
    tile      rows that a product costs besides its own, from the step with the fewest: a pass of few samples takes
              longer per sample

The memory rate is that of the optimizer phase, but never so low that norms and activations alone explain half of the
step. The link is that of an all-reduce on two ranks. Nothing is fitted to a layout.

If n ranks share c < n cores, each of them waits while others compute. A rank that computes for b seconds then takes
n/c · b, less what it would have stood still in the pipeline's bubble anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scalelab.analysis.estimate import Prediction
from scalelab.errors import UsageError
from scalelab.predict.devices import Accelerator
from scalelab.predict.layout_cost import Efficiency, StepCost, time_step
from scalelab.predict.layouts import Layout, PlannedJob
from scalelab.predict.network_model import LinkSpeed
from scalelab.predict.planning import enclose_step
from scalelab.predict.transformer_shape import Transformer

THIS_MACHINE = "this machine"
MOST_MOVES = 0.5
"""Of forward and backward, by what is not a matrix product."""
MOST_TILE = 1e6
RATES = (1e3, 1e18)
"""Operations per second between which a peak is looked for."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRank:
    """One rank of a machine, training a model alone, and the link between two."""

    steps: Mapping[int, float]
    """Seconds of a whole step, by its samples."""
    optimizer_seconds: float
    link: LinkSpeed
    num_cores: float | None = None
    """That all ranks share, in cores of one rank; None: each has its own."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A planned job on the machine that was measured."""

    job: PlannedJob
    efficiency: Efficiency
    num_cores: float | None = None

    def time(self, layout: Layout) -> StepCost:
        return time_step(self.job, layout, self.efficiency)

    def find_crowding(self, layout: Layout) -> float:
        """What ranks wait for each other's cores."""
        if self.num_cores is None:
            return 0.0
        cost = self.time(layout)
        busy = cost.products + cost.moves + cost.launches + cost.optimizer
        return max(0.0, (layout.num_devices / self.num_cores - 1) * busy - cost.bubble)

    def predict(self, layout: Layout) -> Prediction:
        """Seconds of a step with plan's own interval, waiting for cores included."""
        alone, crowding = enclose_step(self.job, layout, self.efficiency), self.find_crowding(layout)
        factor = 1 + crowding / alone.value
        return alone.map(lambda seconds: seconds * factor)


def calibrate(model: Transformer, rank: MeasuredRank, *, dtype: str, global_batch: int) -> Calibrated:
    """The machine as `plan` describes one, from what one rank was measured to do."""
    if not rank.steps or min(rank.steps.values()) <= rank.optimizer_seconds:
        raise UsageError("one rank was not measured, which a calibrated plan needs: run it again with more --rounds")
    most, fewest = max(rank.steps), min(rank.steps)
    link = rank.link
    job = PlannedJob(
        model=model, device=_describe(dtype, link), dtype=dtype, global_batch=global_batch, is_deepspeed=False
    )  # fmt: skip
    plain = Efficiency(
        gemm=1.0, tile=0.0, depth=0.0, memory=1.0, link=1.0, link_latency=link.latency_seconds, node=1.0,
        node_latency=link.latency_seconds, launch_seconds=0.0,
    )  # fmt: skip
    job = _set_memory_rate(job, rank, most, plain)

    def fit(tile: float) -> tuple[PlannedJob, Efficiency]:
        share = replace(plain, tile=tile)
        return _set_peak(job, share, most, rank.steps[most]), share

    from scipy import optimize  # not at start-up: the help of studies reads this module

    def miss(log_tile: float) -> float:
        fitted, share = fit(math.expm1(log_tile))
        return _time_alone(fitted, fewest, share) - rank.steps[fewest]

    tile = 0.0
    if len(rank.steps) > 1 and miss(0.0) < 0:
        top = math.log1p(MOST_TILE)
        tile = MOST_TILE if miss(top) < 0 else math.expm1(float(optimize.brentq(miss, 0.0, top, xtol=1e-4)))
    fitted, share = fit(tile)
    return Calibrated(job=fitted, efficiency=share, num_cores=rank.num_cores)


def _describe(dtype: str, link: LinkSpeed) -> Accelerator:
    rate = link.bytes_per_second
    return Accelerator(
        name=THIS_MACHINE,
        peaks={dtype: 1.0},
        memory_bytes=1.0,
        memory_rate=1.0,
        link_rate=rate,
        per_node=1 << 20,
        node_rate=rate,
        source="measured",
    )


def _time_alone(job: PlannedJob, samples: int, share: Efficiency) -> float:
    return time_step(replace(job, global_batch=samples), Layout(micro_batch=samples), share).seconds


def _set_memory_rate(job: PlannedJob, rank: MeasuredRank, samples: int, share: Efficiency) -> PlannedJob:
    """That of the optimizer phase, unless what lies between products would need more time than is left for it."""
    cost = time_step(replace(job, global_batch=samples), Layout(micro_batch=samples), share)
    passes = rank.steps[samples] - rank.optimizer_seconds
    rate = max(cost.moves / (MOST_MOVES * passes), cost.optimizer / max(rank.optimizer_seconds, 1e-9))
    return replace(job, device=replace(job.device, memory_rate=rate))


def _set_peak(job: PlannedJob, share: Efficiency, samples: int, seconds: float) -> PlannedJob:
    """The job on a device whose peak makes the step of one rank take so long."""
    from scipy import optimize

    def with_peak(log_peak: float) -> PlannedJob:
        return replace(job, device=replace(job.device, peaks={job.dtype: math.exp(log_peak)}))

    low, high = map(math.log, RATES)

    def miss(log_peak: float) -> float:
        return _time_alone(with_peak(log_peak), samples, share) - seconds

    if miss(high) > 0:
        raise UsageError("one rank was faster than its memory rate allows: measure again with more --rounds")
    return with_peak(float(optimize.brentq(miss, low, high, xtol=1e-6)))


def correlate_ranks(planned: Sequence[float], measured: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None for fewer than three, or where all are alike."""
    if len(planned) < 3 or len(set(planned)) < 2 or len(set(measured)) < 2:
        return None
    from scipy import stats

    return float(stats.spearmanr(planned, measured).statistic)
