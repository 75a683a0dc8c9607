"""From a measured run to the job model that `scalelab predict RUN` scales.

One rank gives the phases of a step and when each gradient is ready. Two ranks give the same phases with half the batch
(strong scaling), the link, and a whole step to fit contention and residual to. Larger sizes are not needed; if the run
has them, they are shown beside the prediction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.link import LinkFit, fit_links
from scalelab.analysis.stats import drop_empty, find_t_quantile
from scalelab.errors import NothingMeasured, TooNoisy, UsageError
from scalelab.predict.network_model import MEBIBYTE, Gradient, LinkSpeed, NetworkModel, find_hop, share_cores
from scalelab.predict.scaled_job import MOST_FACTOR, NUM_UNITS, InputErrors, ScaledJob, settle_on_two
from scalelab.predict.split_step import (
    PerSampleCost,
    Splitting,
    count_reduced_bytes,
    find_slot_seconds,
    fit_line_by_batch,
    is_meshed,
)
from scalelab.predict.what_if import WIDTHS
from scalelab.records.observations import GradientTimes
from scalelab.records.settings import find_kind
from scalelab.records.strategies import SCRIPT, find_strategy
from scalelab.records.trial import PHASES, TrialResult
from scalelab.report.charts.column_charts import CONTROL
from scalelab.studies.shared.arms import Arm, group_arms, read_counted
from scalelab.studies.shared.study import LINK
from scalelab.units import format_count

LAUNCH_SPREAD = 0.05
"""Assumed relative standard deviation of launches where only one was measured."""
LINK_FREEDOM = 5.0
"""Degrees of freedom of a fitted link: six rounds, the default of `collectives`."""
TRACED_SPREAD = 0.2
"""Relative uncertainty of a bandwidth from a few profiled steps."""
LEAST_SPREAD = 0.01
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ScalingRun:
    """The measured arms of a strong- or weak-scaling run."""

    strategy: str
    """Of a script: the one that it applies itself, `script` if that is none of scalelab's."""
    is_strong: bool
    arms: Mapping[int, Arm]
    """Of the strategy, by number of ranks."""
    link: FoundLink | None = None
    """What its own all-reduces on two ranks say, where it timed any."""

    @classmethod
    def from_results(
        cls, results: Sequence[TrialResult], strategy: str, forced_warmup: int | None, *, is_strong: bool
    ) -> ScalingRun:
        measured = [arm for name, arm in group_arms(results, forced_warmup).items() if name != CONTROL]
        arms = {
            arm.trial.num_ranks: arm
            for arm in measured
            if arm.is_measured and arm.trial.strategy in (strategy, SCRIPT.name)
        }
        scripts = [script for arm in arms.values() for script in arm.scripts]
        found = scripts[0].strategy if scripts else strategy
        timed = any(one.trial.configuration == LINK for one in results)
        link = find_measured_link(results, "its own all-reduces on 2 ranks") if timed else None
        return cls(strategy=found or SCRIPT.name, is_strong=is_strong, arms=dict(sorted(arms.items())), link=link)


@dataclass(frozen=True, kw_only=True)
class FoundLink:
    """The link between ranks, and how it is known."""

    cost: LinkSpeed
    source: str
    latency_spread: float = 0.2
    bandwidth_spread: float = 0.1


@dataclass(frozen=True, kw_only=True)
class MeasuredJob:
    """A run as a job."""

    job: ScaledJob
    batch: int
    """Global (strong) or per rank (weak)."""
    is_weak: bool
    link: FoundLink
    device: str
    measured: Mapping[int, Estimate]
    """Step times by number of ranks, as they were measured."""


def read_job(run: ScalingRun, link: FoundLink | None = None, cores: int | None = None) -> MeasuredJob:
    """The job of a scaling run. `link` overrides its own link; `cores`: all ranks share those of one host."""
    one, two = find_bases(run)
    batch = one.step_samples
    passes = {arm.trial.num_ranks: count_accumulated(arm) for arm in (one, two)}
    batches = {arm.rank_samples / passes[arm.trial.num_ranks]: arm for arm in (two, one)}  # the same: one rank is alone
    times = find_gradients(one, run.strategy)
    phases = find_phases(batches, passes)
    found = link or run.link or find_own_link(two)
    alone, pair = find_step_error(one), find_step_error(two)
    is_gloo = find_kind(one.trial.device).backend == "gloo"
    network, core_seconds = NetworkModel(inside=found.cost, is_gloo=is_gloo), 0.0
    splitting = find_splitting(one, two)
    if cores is not None:
        busy, total = find_busy(one, two), float(sum(times.payload_bytes))
        sent = count_reduced_bytes(run.strategy, two.rank_samples, splitting, total) or total
        network = share_cores(found.cost, cores, *busy, sent)
        core_seconds = find_core_seconds(network, *busy, sent)
    job = ScaledJob(
        phases=phases,
        gradients=share_times(
            [Gradient(*pair) for pair in zip(times.ready_seconds, times.payload_bytes, strict=True)],
            times.ready_seconds[-1],
        ),
        network=network,
        core_seconds=core_seconds,
        strategy=run.strategy,
        units=find_units(two),
        splitting=splitting,
        dtype=one.trial.dtype,
        bucket_bytes=None if one.trial.spreading.bucket_mb is None else one.trial.spreading.bucket_mb * MEBIBYTE,
        accumulation=passes[1],
        pass_samples=None if passes[1] == passes[2] else one.rank_samples / passes[1],
        jitter_ratio=find_jitter(one) / one.step.value,
        known=InputErrors(
            compute=alone.deviation,
            pair=pair.deviation,
            freedom={"compute": alone.freedom, "pair": pair.freedom},
            latency=found.latency_spread,
            bandwidth=found.bandwidth_spread,
        ),
    )
    settled = settle_on_two(job, two.step.value, two.rank_samples)
    return MeasuredJob(
        job=settled,
        batch=batch,
        is_weak=not run.is_strong,
        link=found,
        device=one.trial.device,
        measured={count: arm.step for count, arm in run.arms.items()},
    )


def find_core_seconds(network: NetworkModel, one_seconds: float, two_seconds: float, sent_bytes: float) -> float:
    """How long a step keeps a core busy without its bytes, from what it does on one and on two ranks."""
    return one_seconds + max(0.0, two_seconds - one_seconds - sent_bytes * network.byte_core_seconds)


def share_times(gradients: Sequence[Gradient], backward_seconds: float) -> tuple[Gradient, ...]:
    """Gradients with their times as shares of backward."""
    return tuple(
        Gradient(min(1.0, max(0.0, gradient.ready_seconds / backward_seconds)), gradient.payload_bytes)
        for gradient in gradients
    )


def find_bases(run: ScalingRun) -> tuple[Arm, Arm]:
    """The arms on one and on two ranks."""
    missing = [count for count in (1, 2) if count not in run.arms]
    if missing:
        raise NothingMeasured(
            f"{run.strategy} was not measured on {format_count(missing[0], 'rank')};"
            " a prediction needs 1 and 2: run it with --ranks 1 2"
        )
    return run.arms[1], run.arms[2]


def find_busy(one: Arm, two: Arm) -> tuple[float, float]:
    """Core seconds of a step on one rank and on two; if not recorded, the whole step."""
    found = [(find_recorded_busy(arm), arm.step.value) for arm in (one, two)]
    (first, alone), (second, pair) = found
    return alone if first is None else first, pair if second is None else second


def find_recorded_busy(arm: Arm) -> float | None:
    """Core seconds of a rank's step; None if not recorded."""
    said = [rank.gradients.core_seconds for rank in arm.reports if rank.gradients]
    seconds = [value for value in said if value is not None]
    return statistics.median(seconds) if seconds else None


def find_gradients(arm: Arm, strategy: str) -> GradientTimes:
    """When gradients are ready on one rank; for sharded models, which record none, evenly over backward."""
    found = [rank.gradients for rank in arm.reports if rank.gradients is not None]
    counts = [rank.num_parameters for rank in arm.reports if rank.num_parameters]
    if not found and is_meshed(strategy) and counts:
        size = round(max(counts) * WIDTHS[arm.trial.dtype] * FLOAT_BYTES / NUM_UNITS)
        ready = tuple((number + 1) / NUM_UNITS for number in range(NUM_UNITS))
        return GradientTimes(ready_seconds=ready, payload_bytes=(size,) * NUM_UNITS, backward_seconds=1.0)
    if not found and arm.scripts:
        why = arm.scripts[0].left_out.get("gradients") or "too few steps were left for it"
        raise UsageError(f"this run did not record when gradients are ready, which a prediction needs: {why}")
    if not found:
        raise UsageError(
            "this run did not record when gradients are ready (it is too old): run strong-scaling or weak-scaling again"
        )
    return found[0]


def find_units(arm: Arm) -> tuple[float, ...]:
    """Bytes of every unit of a sharded model; empty where they were not counted."""
    report = read_counted(arm)
    if report is None or report.message_basis is None:
        return ()
    return tuple(float(size) for size in report.message_basis.unit_bytes if size)


def find_splitting(one: Arm, arm: Arm) -> Splitting:
    """What split layers and stages send, per sample; a reduce-scatter and an all-gather count as one all-reduce."""
    report, trial = read_counted(arm), arm.trial
    busy = [find_recorded_busy(found) for found in (one, arm)]
    is_known = trial.mesh.pp == trial.num_ranks and None not in busy
    if report is None or report.message_basis is None or not find_strategy(trial.strategy).splits_model:
        return Splitting(micro_batch=trial.shape.micro_batch)
    basis, samples = report.message_basis, max(1, arm.rank_samples)
    sent = [message for message in report.messages if message.axis == "tp" and message.purpose == "activations"]
    calls = sum(message.count for message in sent)
    halves = sum((*basis.gathered_bytes, *basis.scattered_bytes))
    return Splitting(
        num_reductions=calls if not halves else calls // 2,
        reduced_bytes=(sum(basis.reduced_bytes) + halves / 2) / samples,
        hop_bytes=basis.hop_bytes / samples,
        slot_seconds=find_slot_seconds(busy[0] or 0.0, busy[1] or 0.0, trial.num_micro_batches) if is_known else 0.0,
        micro_batch=trial.shape.micro_batch,
    )


def count_accumulated(arm: Arm) -> int:
    """Batches that one step of a rank accumulates."""
    seen = next((one for one in arm.scripts if one.num_samples and one.batch_samples), None)
    if seen is None or not seen.num_samples or not seen.batch_samples:
        return arm.trial.accumulation
    return max(1, seen.num_samples // seen.batch_samples)


def find_phases(batches: Mapping[float, Arm], passes: Mapping[int, int]) -> dict[str, PerSampleCost]:
    """The phases of one pass, by a line through its batches; they add up to the clean step of one rank.

    On two ranks backward is what steps without communication leave for it. The optimizer comes once per step.
    """
    seconds: dict[str, dict[float, float]] = {name: {} for name in PHASES}
    for batch, arm in batches.items():
        if arm.trial.num_ranks > 1 and not any(arm.comm_free):
            continue  # its phases are not those of compute alone
        timed = {name: estimate.value for name in PHASES if (estimate := arm.phase(name)) is not None}
        if len(timed) < len(PHASES):
            raise UsageError("this run did not time its phases: run it again with --phase-steps ≥ 4")
        whole = arm.step.value
        if arm.trial.num_ranks > 1:
            whole = statistics.median([float(step) for steps in drop_empty(arm.comm_free) for step in steps])
        rest = sum(timed[name] for name in PHASES if name != "backward")
        timed["backward"] = max(whole - rest, 0.1 * whole)
        factor = whole / sum(timed.values())
        for name in PHASES:
            share = 1 if name == "optimizer" else passes[arm.trial.num_ranks]
            seconds[name][batch] = timed[name] * factor / share
    return {name: fit_line_by_batch(found) for name, found in seconds.items()}


def find_jitter(arm: Arm) -> float:
    """The standard deviation of a rank's steps within a launch, from their quartiles."""
    spreads = []
    for steps in drop_empty(arm.clean):
        if len(steps) >= 4:
            low, _, high = statistics.quantiles(steps.tolist(), n=4)
            spreads.append((high - low) / 1.349)
    return statistics.median(spreads) if spreads else 0.0


class StepError(NamedTuple):
    """How well a measured step is known: the deviation of its log, and the degrees of freedom of Student's t."""

    deviation: float
    freedom: float


def find_step_error(arm: Arm) -> StepError:
    """From the interval of a step; one launch does not show how launches differ, which is assumed then."""
    num_launches = len(drop_empty(arm.clean))
    step = arm.step
    if num_launches < 2:
        return StepError(math.hypot(LAUNCH_SPREAD, find_spread(step, math.inf)), math.inf)
    if step.half_width is None:
        raise TooNoisy(
            f"this run is too noisy to predict from: {num_launches} launches of {arm.label} differ too much for an"
            " interval; measure again with more --rounds"
        )
    return StepError(find_spread(step, num_launches - 1), num_launches - 1)


def find_spread(estimate: Estimate, freedom: float) -> float:
    """The standard deviation of the log of a value that a 95 % interval of so many degrees of freedom stands for."""
    if estimate.low is None or estimate.high is None or estimate.value <= 0:
        return 0.1
    low, high = max(estimate.low, estimate.value / MOST_FACTOR), max(estimate.high, estimate.value)
    arm = max(math.log(high / estimate.value), math.log(estimate.value / low))
    return max(LEAST_SPREAD, arm / find_t_quantile(freedom))


def says_link(run: ScalingRun) -> bool:
    """Whether the run measured its link."""
    return run.link is not None or bool(find_rates(find_bases(run)[1])[0])


def find_own_link(arm: Arm) -> FoundLink:
    """The bandwidth of the run's own messages."""
    rates, source = find_rates(arm)
    if not rates:
        raise UsageError(
            "this run did not measure its link: use --link 10GB/s,5us, or --collectives RUN (from scalelab collectives)"
        )
    cost = LinkSpeed(latency_seconds=0.0, bytes_per_second=statistics.median(rates))
    return FoundLink(cost=cost, source=source, bandwidth_spread=TRACED_SPREAD)


def find_rates(arm: Arm) -> tuple[list[float], str]:
    """Bytes per second in profiled steps, or else by DDP's counters, and which of the two."""
    rates = [
        step.payload_bytes / (step.transfer_ns * 1e-9)
        for rank in arm.reports
        for step in rank.traced_steps
        if step.payload_bytes and step.transfer_ns
    ]
    if rates:
        return rates, "from its profiled steps"
    rates = [
        sum(rank.counters.bucket_bytes) / statistics.median(rank.counters.communication_seconds)
        for rank in arm.reports
        if rank.counters is not None and rank.counters.bucket_bytes
    ]
    return rates, "from DDP's counters, waiting included"


def find_measured_link(results: Sequence[TrialResult], source: str) -> FoundLink:
    """One hop of an all-reduce on two ranks, from a run of `collectives`."""
    fits = [fit for fit in fit_links(results) if fit.operation == "all_reduce" and fit.num_ranks == 2]
    if not fits:
        raise UsageError(f"{source} did not measure all_reduce on 2 ranks: run scalelab collectives --ranks 2")
    fit = fits[0]
    return FoundLink(
        cost=find_hop(fit.line),
        source=f"from {source}",
        latency_spread=_spread_of(fit, "latency_seconds"),
        bandwidth_spread=math.hypot(_spread_of(fit, "byte_seconds"), fit.line.residual_ratio / 2),
    )


def _spread_of(fit: LinkFit, name: str) -> float:
    estimate: Estimate | None = getattr(fit.line, name)
    return 0.3 if estimate is None else find_spread(estimate, LINK_FREEDOM)
