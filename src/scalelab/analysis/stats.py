"""Medians, ratios and differences of step times, each with a 95 % interval, and the verdict on a ratio.

Every configuration is launched once per round, and the rounds of all configurations are interleaved. So steps of one
launch resemble each other more than steps of two launches, and round `i` of one configuration ran next to round `i` of
every other, under the same conditions. The first is why a round, not a step, is the unit of an interval; the second is
why configurations are compared round by round. A round without results is an empty sequence and keeps its place.

    median       of all steps together; its interval turns the share of steps below it into limits (Woodruff 1952), with
                 the spread of that share over launches as the error
    ratio        round by round: the centre of the logs of the launches' ratios; of differences, without the logs

Step times are skewed, spiky and correlated within a launch: nothing here assumes a normal distribution or counts 240
steps of 12 launches as 240 facts. Comparing round by round removes what neighbours in time share: a machine that slows
down by 30 % half-way moves every median and no ratio. This is also why a ratio may differ, on a noisy machine, from the
quotient of the two printed medians, which has the larger error.

The centre is that of a few numbers, one per round: the log of a ratio, a difference, a fitted fraction. Now and then a
launch is hit by a burst of other work and its number is far off; if one launch in twenty is hit, the error of the mean
doubles. The Hodges–Lehmann estimate (Hodges & Lehmann 1963) gives up 5 % of the mean's efficiency and hardly moves. Its
interval is Wilcoxon's signed-rank test inverted (Hollander & Wolfe, "Nonparametric Statistical Methods", chapter 3),
exact for every symmetric distribution, and the log of the ratio of two equal configurations is symmetric by
construction. With fewer than six numbers the signed-rank test cannot reach 95 %, and Student's interval is put around
the same centre. One number has no interval.

The speed of a machine wanders from round to round, so that neighbouring rounds resemble each other and say less than
independent ones. Intervals of medians and ratios are widened for that (`rounds.py`): with a wander of 3 % and a memory
of 0.8 from round to round those of medians cover 93 to 97 %, which they would not do half of the time otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.rounds import find_common_memory, find_memory, find_position, find_widening, select_averages

Rounds = Sequence[Sequence[float]]
"""Positive numbers, one sequence per round, in the order in which the rounds ran."""
Floats = NDArray[np.float64]


class Launches(list[list[float]]):
    """The rounds of one configuration, which many ratios are taken of: their medians are found once."""

    @cached_property
    def medians(self) -> Floats:
        return find_medians(iter(self))


FEW_ROUNDS = 50
"""Their medians are found faster one by one."""


def find_medians(rounds: Iterable[Sequence[float] | Floats]) -> Floats:
    """The median of each round; a round that gave nothing has NaN.

    By sorting, because numpy takes 20 µs for a dozen values; many rounds of one length are one call of it.
    """
    if isinstance(rounds, Launches):
        return rounds.medians
    every = list(rounds)
    lengths = set(map(len, every))
    if len(lengths) == 1 and 0 not in lengths and len(every) > FEW_ROUNDS:
        return np.asarray(np.median(np.array(every, dtype=np.float64), axis=1))
    return np.array([find_median(steps) if len(steps) else np.nan for steps in every], dtype=np.float64)


def find_median(values: Sequence[float] | Floats) -> float:
    """The median of a few values; of many, numpy's is faster."""
    return float(statistics.median(values.tolist() if isinstance(values, np.ndarray) else values))


def drop_empty(rounds: Rounds) -> list[Floats]:
    """The rounds that gave something, as arrays."""
    return [np.asarray(steps, dtype=np.float64) for steps in rounds if len(steps)]


def pair_medians(configurations: Sequence[Rounds]) -> Floats:
    """The medians of the rounds that all configurations completed: a row for each, a column per round.

    Series of unequal length were not run in the same rounds and share none.
    """
    if len({len(rounds) for rounds in configurations}) != 1:
        return np.empty((len(configurations), 0))
    medians = np.array([find_medians(rounds) for rounds in configurations])
    return medians[:, np.isfinite(medians).all(axis=0)]


CONFIDENCE = 0.95
"""What an interval promises, everywhere in this package."""
TAIL = (1 - CONFIDENCE) / 2

FEWEST_FOR_SIGNED_RANK = 6
"""With five numbers the widest signed-rank interval, smallest to largest, covers 1 − 2 / 2⁵ = 93.75 %."""


def estimate_location(values: Sequence[float] | Floats, tail: float = TAIL) -> Estimate:
    """The Hodges–Lehmann centre of one or more independent values, with its 95 % interval, or one of other tails."""
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        raise ValueError("no values: leave out a configuration without steps")
    num_pairs = len(data) * (len(data) + 1) // 2
    if len(data) < 2:
        return Estimate(value=float(data[0]))
    middle = [(num_pairs - 1) // 2, num_pairs // 2]
    if len(data) < FEWEST_FOR_SIGNED_RANK or tail < 0.5 ** len(data):
        centre = sum(select_averages(data, middle)) / 2
        arm = find_t_quantile(len(data) - 1, tail) * float(data.std(ddof=1)) / math.sqrt(len(data))
        return Estimate(value=centre, low=centre - arm, high=centre + arm)
    position = find_position(len(data), tail)
    rank, part = int(position), position - int(position)
    limits = [rank, rank + 1, num_pairs - rank - 2, num_pairs - rank - 1]
    *both, first, second, third, fourth = select_averages(data, middle + limits)
    return Estimate(value=sum(both) / 2, low=first + part * (second - first), high=fourth + part * (third - fourth))


def find_t_quantile(degrees_of_freedom: float, tail: float = TAIL) -> float:
    """Student's t at 97.5 %: how many standard errors an arm of the interval has."""
    from scipy.special import stdtrit  # here, because loading it takes longer than --help

    return float(stdtrit(degrees_of_freedom, 1 - tail))


FEWEST_LAUNCHES_FOR_SHARES = 5
"""Fewer launches give shares that often coincide by chance, and then seem to have no spread."""

FEWEST_STEPS = 10
"""A single launch with fewer steps gets no interval: its simulated coverage falls below 93 %."""

STEPS_PER_BATCH = 5
FEWEST_BATCHES = 4
MOST_BATCHES = 10
"""How a single launch is cut: batches must be longer than neighbours resemble each other (Schmeiser 1982)."""

WIDEST_FACTOR = 100.0
"""An interval whose ends differ by more than this factor, as two launches can give, says nothing and is not given."""

SMALLEST_EFFECT = 0.02
"""A smaller difference is never called faster or slower: one in twenty A/A comparisons would be."""

TOLERANCE = 0.05
"""Two configurations whose ratio surely lies within 1 ± 5 % do not differ in practice."""


class Verdict(StrEnum):
    """What a ratio of times, candidate over reference, says about the candidate."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"
    UNRESOLVED = "unresolved"


DIFFERENT = (Verdict.FASTER, Verdict.SLOWER)

Estimators = Mapping[str, Callable[[float], Estimate]]
"""Ratios by label, each with the interval of a tail."""


@dataclass(frozen=True, kw_only=True)
class JointRatio(Estimate):
    """One of several ratios of a table: its own 95 % interval, and the wider one that its verdict rests on."""

    judged: Estimate


def judge(ratio: Estimate) -> Verdict:
    """Faster or slower where the interval excludes 1 and the effect is large enough to be worth a word.

    No difference where the whole interval is within the tolerance, which is the equivalence test by interval
    inclusion (Westlake 1972). Otherwise unresolved, which unlike "no difference" is not a finding.
    """
    if ratio.low is None or ratio.high is None:
        return Verdict.UNRESOLVED
    if isinstance(ratio, JointRatio) and not (ratio.low <= 1 <= ratio.high) and judge(ratio.judged) not in DIFFERENT:
        return Verdict.UNRESOLVED
    if ratio.low > 1 and ratio.value >= 1 + SMALLEST_EFFECT:
        return Verdict.SLOWER
    if ratio.high < 1 and ratio.value <= 1 - SMALLEST_EFFECT:
        return Verdict.FASTER
    if ratio.low > 1 - TOLERANCE and ratio.high < 1 + TOLERANCE:
        return Verdict.NO_DIFFERENCE
    return Verdict.UNRESOLVED


def estimate_median(rounds: Rounds) -> Estimate:
    """The median of all steps, with a 95 % interval that counts launches and not steps.

    Five launches or more: Woodruff's inversion (1952). The share of steps below the median is one half; its
    standard error comes from how that share differs between launches, with Student's t for as many; its
    limits are taken on the logit scale, to stay between 0 and 1 (Agresti, "Categorical Data Analysis",
    chapter 3); and the quantiles at those limits are the interval.

    Two to four launches: Student's interval of the logs of the launches' medians, around the same centre.

    One launch: Woodruff's inversion with contiguous batches as launches. It cannot see how launches differ.
    """
    series = drop_empty(rounds)
    if not series:
        raise ValueError("no steps: leave out a configuration without steps")
    steps = np.concatenate(series)
    centre = float(np.median(steps))
    if len(series) == 1:
        return _estimate_one_launch(steps, centre)
    if len(series) < FEWEST_LAUNCHES_FOR_SHARES:
        return _spread_logs(find_medians(series), centre)
    found = _invert_shares(steps, series, centre)
    medians = find_medians(rounds)
    if np.any(medians <= 0):
        return found
    return _widen(found, find_widening(np.log(medians)))


def _widen(estimate: Estimate, factor: float) -> Estimate:
    """A positive estimate with so many times the arms, on the log scale."""
    if estimate.low is None or estimate.high is None or estimate.low <= 0:
        return estimate
    return Estimate(
        value=estimate.value,
        low=estimate.value * (estimate.low / estimate.value) ** factor,
        high=estimate.value * (estimate.high / estimate.value) ** factor,
    )


def _estimate_one_launch(steps: Floats, centre: float) -> Estimate:
    """The interval within a launch, by batches."""
    if len(steps) < FEWEST_STEPS:
        return Estimate(value=centre)
    num_batches = min(max(len(steps) // STEPS_PER_BATCH, FEWEST_BATCHES), MOST_BATCHES)
    return _invert_shares(steps, np.array_split(steps, num_batches), centre)


def _invert_shares(steps: Floats, clusters: Sequence[Floats], centre: float) -> Estimate:
    """Woodruff's limits, from how the number of steps below the centre differs between clusters.

    Never narrower than one binomial standard error, for shares can coincide by chance.
    """
    lengths = np.array([len(part) for part in clusters])
    is_below = (steps < centre) + (steps == centre) / 2
    excess = (np.add.reduceat(is_below, np.cumsum(lengths) - lengths) - lengths / 2).tolist()
    variance = len(excess) / (len(excess) - 1) * sum(count * count for count in excess) / len(steps) ** 2
    arm = max(find_t_quantile(len(excess) - 1) * math.sqrt(variance), 0.5 / math.sqrt(len(steps)))
    share = 1 / (1 + math.exp(-4 * arm))
    low, high = np.quantile(steps, [1 - share, share], method="hazen")
    return Estimate(value=centre, low=min(float(low), centre), high=max(float(high), centre))


def _spread_logs(medians: Floats, centre: float) -> Estimate:
    """Student's interval of the logs of a few launches' medians, around the centre of all steps."""
    if centre <= 0 or np.any(medians <= 0):
        return Estimate(value=centre)
    spread = float(np.log(medians).std(ddof=1)) / math.sqrt(len(medians))
    arm = find_t_quantile(len(medians) - 1) * spread
    if 2 * arm > math.log(WIDEST_FACTOR):
        return Estimate(value=centre)
    return Estimate(value=centre, low=centre * math.exp(-arm), high=centre * math.exp(arm))


def leave_logs(logs: Estimate) -> Estimate:
    """The estimate of the number itself; limits further apart than `WIDEST_FACTOR` count as unknown."""
    if logs.low is None or logs.high is None or logs.high - logs.low > math.log(WIDEST_FACTOR):
        return Estimate(value=math.exp(logs.value))
    return logs.map(math.exp)


def compare_together(pairs: Mapping[str, tuple[Rounds, Rounds]], tail: float = TAIL) -> dict[str, Estimate]:
    """The ratios of one table: at most one table of twenty calls anything different that is not (Holm 1979).

    Where the configurations together show that rounds are not independent, verdicts rest on widened intervals.
    """
    arms = {id(rounds): rounds for pair in pairs.values() for rounds in pair}
    is_wandering = find_common_memory(np.log(pair_medians(list(arms.values())))) is not None
    return judge_together(
        {label: partial(estimate_ratio, *pair) for label, pair in pairs.items()},
        {label: partial(estimate_ratio, *pair, is_wandering=is_wandering) for label, pair in pairs.items()},
        tail,
    )


def judge_together(own: Estimators, joint: Estimators, tail: float = TAIL) -> dict[str, Estimate]:
    """Ratios with their own intervals and Holm's verdicts, by those of `joint`.

    Of k ratios each is tested at 5 % / k, or less by `tail`; if some differ, the others once more among themselves.
    """
    found: dict[str, Estimate] = {}
    left = dict(joint)
    while left:
        judged = {label: estimate(tail / len(left)) for label, estimate in left.items()}
        sure = [label for label, ratio in judged.items() if judge(ratio) in DIFFERENT]
        for label in sure or list(left):
            del left[label]
            ratio = own[label](TAIL)
            found[label] = JointRatio(value=ratio.value, low=ratio.low, high=ratio.high, judged=judged[label])
    return {label: found[label] for label in joint}


def estimate_ratio(
    numerator: Rounds, denominator: Rounds, tail: float = TAIL, *, is_wandering: bool = False
) -> Estimate:
    """How many times as long the numerator takes as the denominator, with its 95 % interval.

    Equally many rounds on both sides are compared round by round. Otherwise the logs of the launches' medians are
    compared as two independent samples (Welch 1947). Fewer than two rounds give no interval. It is widened where the
    rounds of these two are surely correlated, or are known to be (`is_wandering`).
    """
    above, below = pair_medians([numerator, denominator])
    if len(above) > 1:
        logs = np.log(above / below)
        found = leave_logs(estimate_location(logs, tail))
        return _widen(found, find_widening(logs)) if is_wandering or find_memory(logs) is not None else found
    return estimate_unpaired_ratio(numerator, denominator)


def estimate_unpaired_ratio(numerator: Rounds, denominator: Rounds) -> Estimate:
    """The same for launches that were not interleaved: two independent samples."""
    above, below = find_medians(drop_empty(numerator)), find_medians(drop_empty(denominator))
    return leave_logs(_compare_samples(np.log(above), np.log(below)))


RUN_SPREAD = 0.01
"""Assumed standard deviation of a run's speed beyond what its own rounds show: other hours, clocks and neighbours."""


def estimate_run_ratio(
    numerator: Rounds, denominator: Rounds, yardsticks: tuple[Rounds, Rounds] | None, tail: float = TAIL
) -> Estimate:
    """The ratio of two runs that were measured at different times.

    With `yardsticks`, the same thing measured in the rounds of either run, both sides are first divided by theirs,
    round by round: how the machine moved between the runs is in both and cancels. Without, each run's wander widens the
    interval (`rounds.py`), and `RUN_SPREAD` is added for either.
    """
    samples = [np.log(find_medians(rounds)) for rounds in (numerator, denominator)]
    widenings, spread = [find_widening(sample) for sample in samples], RUN_SPREAD
    if yardsticks is not None:
        pairs = zip((numerator, denominator), yardsticks, strict=True)
        divided = [np.log(np.divide(*pair_medians(pair))) for pair in pairs]
        if min(map(len, divided)) > 1:
            samples, spread = divided, RUN_SPREAD / 2
            widenings = [1.0 if find_memory(sample) is None else find_widening(sample) for sample in samples]
    known = [sample[np.isfinite(sample)] for sample in samples]
    return leave_logs(_compare_samples(known[0], known[1], widenings, spread, tail))


def estimate_difference(minuend: Rounds, subtrahend: Rounds) -> Estimate:
    """By how much the minuend takes longer than the subtrahend, with its interval, as in `estimate_ratio`."""
    longer, shorter = pair_medians([minuend, subtrahend])
    if len(longer) > 1:
        return estimate_location(longer - shorter)
    return _compare_samples(find_medians(drop_empty(minuend)), find_medians(drop_empty(subtrahend)))


def estimate_over_rounds(value: float, per_round: Sequence[float] | Floats) -> Estimate:
    """An interval for any derived number that was also computed from each round alone.

    The value comes from all rounds together; its arms are those of the centre of the rounds' values.
    """
    if len(per_round) < 2:
        return Estimate(value=value)
    centre = estimate_location(per_round)
    return centre.map(lambda end: end - centre.value + value)


def estimate_positive_over_rounds(value: float, per_round: Sequence[float] | Floats) -> Estimate:
    """The same of a number that cannot be negative, such as a rate: on the log scale, so that its limits are not."""
    return leave_logs(estimate_over_rounds(math.log(value), np.log(per_round)))


def _compare_samples(
    left: Floats,
    right: Floats,
    widenings: Sequence[float] = (1.0, 1.0),
    spread: float = 0.0,
    tail: float = TAIL,
) -> Estimate:
    """The difference of the centres of two independent samples, with Welch's interval (1947).

    The variance of a Hodges–Lehmann centre is π/3 of that of the mean. `widenings` are those of either's error,
    `spread` is the deviation of a shift that a whole sample has.
    """
    difference = estimate_location(left).value - estimate_location(right).value
    if min(len(left), len(right)) < 2:
        return Estimate(value=difference)
    errors = [
        math.pi / 3 * widening**2 * float(sample.var(ddof=1)) / len(sample) + spread**2
        for sample, widening in zip((left, right), widenings, strict=True)
    ]
    weights = [error**2 / (len(sample) - 1) for error, sample in zip(errors, (left, right), strict=True)]
    if not sum(weights):
        return Estimate(value=difference, low=difference, high=difference)
    arm = find_t_quantile(sum(errors) ** 2 / sum(weights), tail) * math.sqrt(sum(errors))
    return Estimate(value=difference, low=difference - arm, high=difference + arm)
