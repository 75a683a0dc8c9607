"""The largest batch that fits in a memory limit, and where larger batches stop paying.

The memory of a step is close to a + b · batch: parameters, gradients and optimizer state on one side, activations and
the batch itself on the other. A probe runs a batch and gives its peak, or runs out of memory. So

1. the first probe gives p₁ = a + b · s. With a ≥ 0, b is at most p₁ / s, and s · limit / p₁ samples must fit: that is
   the second probe, and it cannot fail if memory is a line (but it is at least four times the first, since one sample
   is often computed in another way than a few);
2. two probes give a line, and the line a prediction. Its error follows from the distance of the two probes and from
   `NOISE`; if that is more than a sample, the next probe stays on the safe side, and the line is fitted again;
3. the predicted maximum is run, and then one sample more, which must fail.

The search ends only when a batch has run and the next one has failed. If memory is not a line the result is as exact,
after more probes: an unexpected failure makes it step back, a success beyond the line makes it step on, with growing
steps until the truth lies between, and then it bisects. It assumes that one sample more needs more memory; noise in
the last few kilobytes is not seen. With a forecast (`hint`), steps 1 and 2 are shorter: the first probe goes half-way
to the predicted maximum, the second most of the rest, a third most of what is left if that is still much.

How a step grows with its batch:

    T(B) = t₀ + c · B         throughput  B / T(B) = (1/c) · B / (B + B½)         B½ = t₀ / c

t₀ is the fixed cost of a step (launching, the update, communication), c the cost of a sample. Throughput rises like the
rate of an enzyme with its substrate (Michaelis & Menten 1913; for vectors, Hockney's n½, 1985): at B½ it is half of its
limit, at 19 · B½ 95 %. Neither number can be negative. Two batches determine both; from three on `residual_ratio` says
how well a line describes the steps: caches, threads and padding bend it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import measure_residual, solve_non_negative, solve_relative, tabulate_sizes
from scalelab.analysis.stats import Floats, Rounds, estimate_over_rounds

NOISE = 0.001
LEAST_NOISE_BYTES = 64 * 1024
"""By how much, of the limit or in bytes, a peak may lie off its line: allocators round, and Python's own objects are
not the same in every launch."""
CURVATURE = 0.02
"""By how much the slope further on may differ from that of the line so far."""
BOLDNESS = 0.75
"""Where the safe side of a prediction is at least this share of it, a first failure is risked for the prediction."""
REACH = 3
MIDWAY = 0.6
"""Where the limit lies more than `REACH` levers ahead, the next probe goes only part of the way: at small batches the
peak is often in another place of the step, and rises more slowly."""
FIRST_SHARE, SECOND_SHARE = 0.5, 0.9
"""How far towards the maximum that a forecast sees the first probe goes, and of the rest the second."""
MUCH = 0.05
"""The share of a limit that is worth a third approach."""
UNSEEN = 0.1
"""The share of a limit that libraries may take without a forecast seeing it."""
MOST_PROBES = 40
"""A search that needs more is given up: its memory does not depend on the batch, or cannot be observed."""
SECOND = 4
"""How many times the first batch the second is at least: libraries compute one or two samples in other ways."""
FARTHEST = 128
"""How many times the largest batch so far the next may be."""
FLAT = 15
"""How many times the largest batch the next may lie ahead while the probes differ by no more than noise: a few samples
may hide in what the process takes anyway, and show nothing of what many need."""
LEVER, SHORT_LEVER = 0.75, 0.98
"""A line is drawn from the largest batch to the largest that is at most this share of it. The short one is for memory
that has failed the line twice: it bends, and only nearby points predict it."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A batch that was tried."""

    batch: int
    fits: bool
    peak_bytes: int | None = None
    """What it took of the limit; None: unknown, or it did not fit."""


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """Memory as a function of the batch: fixed + per sample · batch."""

    fixed_bytes: float
    sample_bytes: float
    lever: int
    """How many samples lie between the two probes that it was drawn through."""

    def predict_bytes(self, batch: int) -> float:
        return self.fixed_bytes + self.sample_bytes * batch


def choose_next_batch(
    probes: Sequence[Probe],
    *,
    limit_bytes: int | None,
    start: int = 1,
    most: int | None = None,
    hint: MemoryLine | None = None,
    tolerance: float = 0.0,
) -> int | None:
    """What to try next, given all probes so far in their order; None: the search is over.

    With a tolerance it is over where a failure, or the line through the probes, leaves no more than this share above
    the largest batch that ran.
    """
    if not probes:
        return min(max(start, _guess_first(hint, limit_bytes)), most or math.inf)  # type: ignore[return-value]
    if len(probes) >= MOST_PROBES:
        return None
    failed = min((probe.batch for probe in probes if not probe.fits), default=None)
    largest = find_largest(probes)
    if largest is None:
        return None if failed == 1 else max(1, (failed or 0) // 4) if hint else 1
    end = min(bound for bound in (failed, most + 1 if most else None, math.inf) if bound is not None)
    if end <= largest + 1 or is_close(probes, limit_bytes, tolerance):
        return None
    guess = _follow_hint(probes, hint, limit_bytes)
    if guess is None:
        guess = _guess_batch(probes, largest, limit_bytes, is_near=hint is not None)
    if failed is not None and (guess >= failed or not any(probe.fits for probe in probes[-2:])):
        guess = _step_back(probes, largest, failed)
    return int(min(max(guess, largest + 1), end - 1))


def is_close(probes: Sequence[Probe], limit_bytes: int | None, tolerance: float) -> bool:
    """Whether the largest batch that ran is within the tolerance of the largest that fits."""
    largest = find_largest(probes)
    if not tolerance or largest is None:
        return False
    room = largest * (1 + tolerance)
    failed = min((probe.batch for probe in probes if not probe.fits), default=None)
    if failed is not None:
        return failed <= room + 1
    line = draw_line(probes)
    predicted = None if line is None or limit_bytes is None else predict_largest(line, limit_bytes)
    return predicted is not None and largest <= predicted <= room


def _guess_first(hint: MemoryLine | None, limit_bytes: int | None) -> int:
    """A part of the way to the maximum that a forecast sees; 1 without one."""
    if hint is None or limit_bytes is None:
        return 1
    largest = predict_largest(hint, math.floor((1 - UNSEEN) * limit_bytes))
    return max(1, math.floor(FIRST_SHARE * (largest or 0)))


def _follow_hint(probes: Sequence[Probe], hint: MemoryLine | None, limit_bytes: int | None) -> int | None:
    """The second probe, and the third where much is left: most of the rest.

    The second goes by a slope between two. What the first probe took beyond the forecast is fixed, and the slope is the
    forecast's, or it grows with the batch, and then the slope is larger: the mean of both is taken.
    """
    if hint is None or hint.sample_bytes <= 0 or limit_bytes is None or len(probes) > 2:
        return None
    first, last = probes[0], probes[-1]
    if not last.fits or first.peak_bytes is None or last.peak_bytes is None:
        return None
    if len(probes) == 2:
        line, room = draw_line(probes), limit_bytes - last.peak_bytes
        if line is None or line.sample_bytes <= 0 or room < MUCH * limit_bytes:
            return None
        return last.batch + max(1, math.floor(SECOND_SHARE * room / line.sample_bytes))
    steepest = max(hint.sample_bytes, (first.peak_bytes - hint.fixed_bytes) / first.batch)
    rest = (limit_bytes - first.peak_bytes) / ((hint.sample_bytes + steepest) / 2)
    return first.batch + max(1, math.floor(SECOND_SHARE * rest))


def find_largest(probes: Sequence[Probe]) -> int | None:
    """The largest batch that ran to completion."""
    return max((probe.batch for probe in probes if probe.fits), default=None)


def draw_line(probes: Sequence[Probe], *, is_near: bool = False) -> MemoryLine | None:
    """The line through the largest batch whose peak is known and one well below it; None with fewer than two.

    `is_near` takes one as near as the noise allows: for probes that were all placed near the limit.
    """
    known = sorted((probe.batch, probe.peak_bytes) for probe in probes if probe.peak_bytes is not None)
    if len({batch for batch, _ in known}) < 2:
        return None
    batch, peak = known[-1]
    share = LEVER if sum(not probe.fits for probe in probes) < 2 and not is_near else SHORT_LEVER
    below = [point for point in known if point[0] <= share * batch] or known[:1]
    lever = batch - below[-1][0]
    slope = (peak - below[-1][1]) / lever
    return MemoryLine(fixed_bytes=peak - slope * batch, sample_bytes=slope, lever=lever)


def predict_largest(line: MemoryLine, limit_bytes: int) -> int | None:
    """The largest batch that the line sees below the limit; None if it does not rise."""
    if line.sample_bytes <= 0:
        return None
    return math.floor((limit_bytes - line.fixed_bytes) / line.sample_bytes)


def _guess_batch(probes: Sequence[Probe], largest: int, limit_bytes: int | None, *, is_near: bool) -> int:
    """Where the maximum should be, or as far on the way there as is safe."""
    peak = next((probe.peak_bytes for probe in probes if probe.fits and probe.batch == largest), None)
    if limit_bytes is None or peak is None:
        return 2 * largest
    num_surprises = _count_surprises(probes, limit_bytes)
    line = draw_line(probes, is_near=is_near)
    if line is None:
        least = SECOND * largest if len(probes) == 1 else largest + 1
        return min(max(largest * limit_bytes // max(peak, 1), least), FARTHEST * largest)
    room, slope = limit_bytes - peak, max(line.sample_bytes, 0.0)
    likely = room / slope if slope else math.inf
    safe = room / (slope + _doubt_slope(probes, line, limit_bytes, likely))
    ahead = safe
    if likely - safe < 1 or (all(probe.fits for probe in probes) and safe > BOLDNESS * likely):
        ahead = likely
    if likely > REACH * line.lever:
        ahead = min(ahead, max(MIDWAY * likely, REACH * line.lever))
    is_flat = line.sample_bytes * line.lever < 2 * max(NOISE * limit_bytes, LEAST_NOISE_BYTES)
    return largest + max(1 << num_surprises, math.floor(min(ahead, (FLAT if is_flat else FARTHEST) * largest)))


def _doubt_slope(probes: Sequence[Probe], line: MemoryLine, limit_bytes: int, likely: float) -> float:
    """By how many bytes per sample the slope may be too small: as noise and lever allow, or as was seen.

    What was seen is by how much the line before missed the last probe, if that was as far ahead as the limit is now.
    """
    noise = max(NOISE * limit_bytes, LEAST_NOISE_BYTES)
    doubt = CURVATURE * abs(line.sample_bytes) + 2 * noise / line.lever
    *earlier, last = sorted((p for p in probes if p.peak_bytes is not None), key=lambda probe: probe.batch)
    before = draw_line(earlier)
    distance = last.batch - earlier[-1].batch
    if before is None or last.peak_bytes is None or distance < likely or not probes[-1].fits:
        return doubt
    return min(doubt, abs(last.peak_bytes - before.predict_bytes(last.batch)) / distance)


def _count_surprises(probes: Sequence[Probe], limit_bytes: int) -> int:
    """How many probes ran although the line that was known before saw no room for them."""
    count = 0
    for number, probe in enumerate(probes):
        line = draw_line(probes[:number])
        largest = None if line is None else predict_largest(line, limit_bytes)
        count += probe.fits and largest is not None and probe.batch > largest
    return count


def _step_back(probes: Sequence[Probe], largest: int, failed: int) -> int:
    """Below a failure that the line did not see: by a little, and by half once that has failed too."""
    gap = failed - largest
    is_second = len(probes) > 1 and not probes[-2].fits
    return failed - ((gap + 1) // 2 if is_second else math.ceil(CURVATURE * gap))


SATURATED_SHARE = 0.95
"""Throughput above which a batch counts as saturated, relative to the maximum of any batch."""


@dataclass(frozen=True, kw_only=True)
class SaturationFit:
    """T(B) = t₀ + c · B as fitted to step times of several batches."""

    fixed_seconds: Estimate
    """t₀."""
    sample_seconds: Estimate
    """c."""
    half_batch: Estimate | None
    """B½ = t₀ / c; None if a sample costs nothing that could be measured."""
    residual_ratio: float | None
    """The root mean square of the relative residuals; None for two batches, which determine the line."""
    largest_batch: int

    @property
    def most_samples_per_second(self) -> Estimate | None:
        """What throughput tends to with ever larger batches; without an interval where a sample may cost nothing."""
        if self.half_batch is None:
            return None
        cost = self.sample_seconds
        return cost.map(lambda seconds: 1 / seconds) if cost.low else Estimate(value=1 / cost.value)

    @property
    def saturated_batch(self) -> Estimate | None:
        """The batch that reaches `SATURATED_SHARE` of that."""
        factor = SATURATED_SHARE / (1 - SATURATED_SHARE)
        return None if self.half_batch is None else self.half_batch.map(lambda batch: batch * factor)

    def predict_seconds(self, batch: float) -> float:
        return self.fixed_seconds.value + self.sample_seconds.value * batch


def fit_saturation(times: Mapping[int, Rounds]) -> SaturationFit | None:
    """Fit the line to step times by batch; None for fewer than two batches that gave any."""
    table = tabulate_sizes(times)
    if len(table.num_ranks) < 2:
        return None
    batches = table.num_ranks
    columns = np.column_stack([np.ones_like(batches), batches])
    fixed, slope = solve_non_negative(columns, table.centres)
    rounds = [solve_relative(columns, values) for values in table.per_round]
    half = None
    if slope > 0:
        halves = [float(found[0] / found[1]) for found in rounds if found[1] > 0]
        half = _confine(estimate_over_rounds(float(fixed / slope), halves))
    return SaturationFit(
        fixed_seconds=_estimate(fixed, rounds, 0),
        sample_seconds=_estimate(slope, rounds, 1),
        half_batch=half,
        residual_ratio=(
            measure_residual(columns, np.array([fixed, slope]), table.centres) if len(batches) > 2 else None
        ),
        largest_batch=table.largest_ranks,
    )


def _estimate(value: float, rounds: list[Floats], index: int) -> Estimate:
    return _confine(estimate_over_rounds(float(value), [float(found[index]) for found in rounds]))


def _confine(estimate: Estimate) -> Estimate:
    """Neither a time nor a batch is below 0."""
    return estimate.map(lambda end: max(end, 0.0))
