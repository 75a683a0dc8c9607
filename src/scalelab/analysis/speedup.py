"""Speedup, efficiency, the cost of communication, and the laws of scaling: Amdahl, Gustafson, USL.

    strong scaling   the same work on N ranks:   S = T₁ / T_N      efficiency S / N
    weak scaling     N times the work:           efficiency T₁ / T_N,   scaled speedup N · T₁ / T_N

The cost of communication is measured in two ways. By subtraction it is everything that keeps N ranks from the ideal:
that needs no instrument, and also counts memory contention, imbalance and the serial part. By ablation it is the part
of the step that vanishes without the gradient all-reduce: hidden communication does not count.

Both are compared round by round (`stats.py`), so their intervals hold on a machine that drifts.

Three laws are fitted to step times:

    Amdahl (1967)      T(N) = T₁ · (s + (1 − s) / N)       the speedup ends at 1 / s
    Gustafson (1988)   S(N) = N − s · (N − 1)              the scaled speedup keeps growing, with slope 1 − s

Both are straight lines in disguise: the time is a + b / N, the work per second under weak scaling is a + b · N, and in
both s = a / (a + b) with neither a nor b negative. So one fit serves both. The two fractions are not the same number:
Amdahl's is a share of the time on one rank, Gustafson's a share of the time on N. Two sizes determine s and leave no
residual; from three on, `residual_ratio` says how well the law fits. A residual well above the noise means
that something grows with N that neither law has.

The universal scalability law (Gunther, "Guerrilla Capacity Planning", 2007, chapters 4 to 6) adds to Amdahl's
contention σ a second loss κ, the cost of keeping N ranks coherent, which grows with their pairs:

    C(N) = X(N) / X(1) = N / (1 + σ (N − 1) + κ N (N − 1))

With κ = 0 it is Amdahl's law with s = σ; with κ > 0 the throughput peaks at N = √((1 − σ) / κ). N / X(N) is linear in
1 / X(1), σ / X(1) and κ / X(1): three coefficients, none negative, so at least three sizes. Three sizes leave no
residual and amplify their noise: from 1, 2 and 4 ranks σ is known to a few times the noise of a time.

All laws are linear in their coefficients, so a fit is a small least-squares problem, solved exactly. Residuals are
relative, as the noise of a step time is proportional to it. The number of a size is the centre of its launches'
medians, over the rounds that all sizes completed; what a round does to all sizes alike is removed first, so drift
leaves the shape of the law alone. Each round is also fitted on its own, which gives the intervals of the coefficients.

A delay d in every step is a serial part. With it Amdahl's law reads

    T_N(d) = T_N + d                      the step on N ranks
    S_N(d) = (T₁ + d) / (T_N + d)         its speedup over one rank with the same delay
    S_N(d) = (T₁ + d) / (T₁/N + d)        the same if everything but the delay scales perfectly

The second is calibrated with the measured T_N and only asks whether the delay adds up; the third also assumes
T_N = T₁/N. Both are computed from the rounds' own undelayed steps, so drift moves model and measurement alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import (
    Floats,
    Rounds,
    estimate_difference,
    estimate_location,
    estimate_median,
    estimate_over_rounds,
    estimate_ratio,
    pair_medians,
)


@dataclass(frozen=True, kw_only=True)
class ExposedCommunication:
    """The part of a step that waits for communication; slightly negative values are noise around nothing."""

    seconds: Estimate
    share: Estimate
    """Of the whole step."""


def estimate_speedup(base: Rounds, rounds: Rounds) -> Estimate:
    """How many times faster the steps of `rounds` are than those of the base."""
    return estimate_ratio(base, rounds)


def estimate_scaled_speedup(base: Rounds, rounds: Rounds, work: float) -> Estimate:
    """How many times the base's work per second is done when a step does `work` times the base's: as a rule as many
    times as there are ranks (Gustafson 1988)."""
    return estimate_ratio(base, rounds).map(lambda ratio: ratio * work)


def karp_flatt(speedup: Estimate, num_ranks: int) -> Estimate | None:
    """The serial fraction that explains one speedup over one rank: e = (1/S − 1/N) / (1 − 1/N).

    Karp & Flatt (1990). If it grows with N, the loss is overhead that grows and not a serial part; if it is
    negative, the speedup is more than N. One rank has none.
    """
    if num_ranks < 2:
        return None
    return speedup.map(lambda ratio: (1 / ratio - 1 / num_ranks) / (1 - 1 / num_ranks))


def communication_by_subtraction(base: Rounds, rounds: Rounds, num_ranks: int, *, is_weak: bool = False) -> Estimate:
    """The seconds by which a step is longer than its ideal: T_N − T₁ / N, or T_N − T₁ under weak scaling."""
    ideal_ratio = 1.0 if is_weak else 1 / num_ranks
    ideal = [[seconds * ideal_ratio for seconds in steps] for steps in base]
    return estimate_difference(rounds, ideal)


def communication_by_ablation(clean: Rounds, comm_free: Rounds) -> ExposedCommunication:
    """What leaving out the gradient all-reduce saves: blocks of both kinds from the same launches, by round."""
    return ExposedCommunication(
        seconds=estimate_difference(clean, comm_free),
        share=estimate_ratio(comm_free, clean).map(lambda ratio: 1 - ratio),
    )


def estimate_centre(rounds: Rounds) -> Estimate:
    """The centre of the launches' medians, on the log scale: what ratios of the same launches are consistent with.

    Where launches differ widely, the median of all their steps may be far from it.
    """
    return estimate_ratio(rounds, [[1.0]] * len(rounds))


def scale_exposed(clean: Rounds, comm_free: Rounds, step_seconds: float) -> Estimate:
    """The exposed share of a step in seconds of it: never more than the step, however much launches differ."""
    return communication_by_ablation(clean, comm_free).share.map(lambda share: share * step_seconds)


@dataclass(frozen=True, kw_only=True)
class SizeTable:
    """The measured numbers by size."""

    num_ranks: Floats
    """The sizes, ascending."""
    centres: Floats
    """One number per size."""
    per_round: Floats
    """A row per complete round, a column per size; no rows where the sizes share no rounds."""

    @property
    def largest_ranks(self) -> int:
        """Where measurement ends and extrapolation begins."""
        return int(self.num_ranks[-1])


def tabulate_sizes(series: Mapping[int, Rounds]) -> SizeTable:
    """The numbers that a law is fitted to; sizes that gave nothing are left out."""
    sizes = sorted(size for size, rounds in series.items() if any(len(steps) for steps in rounds))
    paired = pair_medians([series[size] for size in sizes]) if sizes else np.empty((0, 0))
    if paired.shape[1]:
        centres = _find_centres(paired)
    else:
        centres = np.array([estimate_median(series[size]).value for size in sizes])
    return SizeTable(num_ranks=np.array(sizes, dtype=np.float64), centres=centres, per_round=paired.T)


def _find_centres(paired: Floats) -> Floats:
    """The centre of each row over the rounds, on the log scale, free of what a round does to all rows."""
    logs = np.log(paired)
    levels = logs.mean(axis=0)
    shape = np.array([estimate_location(row).value for row in logs - levels])
    centres: Floats = np.exp(shape + estimate_location(levels).value)
    return centres


def solve_relative(columns: Floats, target: Floats) -> Floats:
    """The coefficients c, of either sign, that make columns · c ≈ target with the least relative squares."""
    scaled = columns / target[:, np.newaxis]
    return np.asarray(np.linalg.lstsq(scaled, np.ones(len(target)), rcond=None)[0], dtype=np.float64)


def solve_non_negative(columns: Floats, target: Floats) -> Floats:
    """The same under the condition that no coefficient is negative (Lawson & Hanson 1974, chapter 23).

    The answer is the unconditional one of some of the columns, so with two or three of them all choices are tried.
    """
    num_columns = columns.shape[1]
    best = np.zeros(num_columns)
    for num_used in range(1, num_columns + 1):
        for used in map(list, combinations(range(num_columns), num_used)):
            tried = np.zeros(num_columns)
            tried[used] = solve_relative(columns[:, used], target)
            is_better = measure_residual(columns, tried, target) < measure_residual(columns, best, target)
            if tried.min() >= 0 and is_better:
                best = tried
    return best


def measure_residual(columns: Floats, coefficients: Floats, target: Floats) -> float:
    """The root mean square of the relative residuals."""
    return float(np.sqrt(np.mean((columns @ coefficients / target - 1) ** 2)))


@dataclass(frozen=True, kw_only=True)
class AmdahlFit:
    """Amdahl's law as fitted to step times of the same work on several sizes."""

    serial_fraction: Estimate
    """The share of the one-rank time that does not shrink with ranks."""
    one_rank_seconds: float
    residual_ratio: float
    """The root mean square of the relative residuals."""
    largest_ranks: int
    """The largest size that was measured: beyond it, everything is extrapolated."""

    def predict_speedup(self, num_ranks: float) -> Estimate:
        """T(1) / T(N)."""
        return self.serial_fraction.map(lambda serial: 1 / (serial + (1 - serial) / num_ranks))


@dataclass(frozen=True, kw_only=True)
class GustafsonFit:
    """Gustafson's law as fitted to step times of work that grows with the ranks."""

    serial_fraction: Estimate
    """The share of the time on N ranks that one rank would not need longer for."""
    one_rank_seconds: float
    residual_ratio: float
    """The root mean square of the relative residuals."""
    largest_ranks: int
    """The largest size that was measured: beyond it, everything is extrapolated."""

    def predict_speedup(self, num_ranks: float) -> Estimate:
        """The work per second on N ranks over that on one."""
        return self.serial_fraction.map(lambda serial: num_ranks - serial * (num_ranks - 1))


def fit_amdahl(times: Mapping[int, Rounds]) -> AmdahlFit | None:
    """Fit T(N) = a + b / N to step times by number of ranks; None for fewer than two sizes."""
    table = tabulate_sizes(times)
    if len(table.num_ranks) < 2:
        return None
    columns = np.column_stack([np.ones_like(table.num_ranks), 1 / table.num_ranks])
    coefficients = solve_non_negative(columns, table.centres)
    return AmdahlFit(
        serial_fraction=_estimate_fraction(columns, table.centres, table.per_round),
        one_rank_seconds=float(coefficients.sum()),
        residual_ratio=measure_residual(columns, coefficients, table.centres),
        largest_ranks=table.largest_ranks,
    )


def fit_gustafson(times: Mapping[int, Rounds]) -> GustafsonFit | None:
    """Fit N / T(N) = a + b · N to step times by number of ranks, for work that grows with N.

    None for fewer than two sizes.
    """
    table = tabulate_sizes(times)
    if len(table.num_ranks) < 2:
        return None
    columns = np.column_stack([np.ones_like(table.num_ranks), table.num_ranks])
    rates = table.num_ranks / table.centres
    coefficients = solve_non_negative(columns, rates)
    return GustafsonFit(
        serial_fraction=_estimate_fraction(columns, rates, table.num_ranks / table.per_round),
        one_rank_seconds=float(1 / coefficients.sum()),
        residual_ratio=measure_residual(columns, coefficients, rates),
        largest_ranks=table.largest_ranks,
    )


def _estimate_fraction(columns: Floats, centres: Floats, per_round: Floats) -> Estimate:
    """The fraction a / (a + b), with an interval from fitting each round alone.

    Single rounds may come out negative, or their errors would not balance; the whole is then confined to
    0…1, which is what the non-negative fit of two coefficients gives.
    """
    fractions = [_find_fraction(solve_relative(columns, values)) for values in per_round]
    whole = estimate_over_rounds(_find_fraction(solve_relative(columns, centres)), fractions)
    return whole.map(lambda fraction: min(max(fraction, 0.0), 1.0))


def _find_fraction(coefficients: Floats) -> float:
    return float(coefficients[0] / coefficients.sum())


@dataclass(frozen=True, kw_only=True)
class UslFit:
    """The universal scalability law as fitted to throughputs on several sizes."""

    contention: Estimate
    """σ: the share that waits for what is shared."""
    coherency: Estimate
    """κ: what each pair of ranks costs."""
    one_rank_throughput: float
    residual_ratio: float
    """The root mean square of the relative residuals."""
    largest_ranks: int
    """The largest size that was measured: beyond it, everything is extrapolated."""

    @property
    def peak_ranks(self) -> float | None:
        """Where throughput is highest; None if the data show no peak: the interval of κ reaches 0."""
        if self.coherency.ends[0] <= 0:
            return None
        return math.sqrt(max(1 - self.contention.value, 0.0) / self.coherency.value)

    def predict_speedup(self, num_ranks: float) -> float:
        """X(N) / X(1)."""
        waiting = self.contention.value * (num_ranks - 1)
        agreeing = self.coherency.value * num_ranks * (num_ranks - 1)
        return num_ranks / (1 + waiting + agreeing)


def fit_usl(throughputs: Mapping[int, Rounds]) -> UslFit | None:
    """Fit the law to throughputs (of samples, say) by number of ranks; None for fewer than three sizes."""
    table = tabulate_sizes(throughputs)
    if len(table.num_ranks) < 3:
        return None
    sizes = table.num_ranks
    columns = np.column_stack([np.ones_like(sizes), sizes - 1, sizes * (sizes - 1)])
    target = sizes / table.centres
    coefficients = solve_non_negative(columns, target)
    if coefficients[0] <= 0:
        return None
    free = solve_relative(columns, target)
    rounds = [solve_relative(columns, values) for values in sizes / table.per_round]
    per_round = np.array(rounds).reshape(-1, 3)
    return UslFit(
        contention=_estimate_loss(1, coefficients, free, per_round),
        coherency=_estimate_loss(2, coefficients, free, per_round),
        one_rank_throughput=float(1 / coefficients[0]),
        residual_ratio=measure_residual(columns, coefficients, target),
        largest_ranks=table.largest_ranks,
    )


def _estimate_loss(index: int, coefficients: Floats, free: Floats, per_round: Floats) -> Estimate:
    """A coefficient of the non-negative fit, with an interval from fitting each round without that condition.

    The interval is confined to what is possible and always holds the value itself.
    """
    value = float(coefficients[index] / coefficients[0])
    if np.any(per_round[:, 0] <= 0) or free[0] <= 0:
        return Estimate(value=value)
    spread = estimate_over_rounds(float(free[index] / free[0]), per_round[:, index] / per_round[:, 0])
    if spread.low is None or spread.high is None:
        return Estimate(value=value)
    return Estimate(value=value, low=min(max(spread.low, 0.0), value), high=max(spread.high, value))


Predict = Callable[[Sequence[float]], float]
"""A model: from the medians of one round, in the order of the inputs, to the predicted number."""


def add_delay(rounds: Rounds, delay_seconds: float) -> list[list[float]]:
    """Every step with the delay added: what the model says of a step."""
    return [[seconds + delay_seconds for seconds in steps] for steps in rounds]


def predict_speedup(one_rank_seconds: float, seconds: float, delay_seconds: float) -> float:
    """(T₁ + d) / (T + d): Amdahl's law with the delay as a serial part, T being T_N or T₁/N."""
    return (one_rank_seconds + delay_seconds) / (seconds + delay_seconds)


def estimate_model(inputs: Sequence[Rounds], predict: Predict) -> Estimate | None:
    """What the model says, from each round's own inputs; None if no round has all of them."""
    medians = pair_medians(inputs)
    if not medians.shape[1]:
        return None
    logs = np.log([predict(column) for column in medians.T])
    return estimate_location(logs).map(lambda log: float(np.exp(log)))


def compare_with_model(
    measured: Sequence[Rounds], measure: Predict, inputs: Sequence[Rounds], predict: Predict
) -> Estimate | None:
    """The measured number over the model's, round by round; None if no round has all that both need."""
    medians = pair_medians([*measured, *inputs])
    if not medians.shape[1]:
        return None
    split = len(measured)
    logs = np.log([measure(column[:split]) / predict(column[split:]) for column in medians.T])
    return estimate_location(logs).map(lambda log: float(np.exp(log)))
