"""How good a measurement is: outliers, drift, noise, warm-up, and how many launches a precision takes.

Everything is relative to a median and robust: a spike must not hide another, and must not look like noise. Variation
of steps is computed within a launch, so a launch that is slower as a whole does not count; its interval is that of the
launches' values.

Warm-up: first steps allocate, compile and fill caches: 3.5, 1.6, 1.2 and 1.1 times a steady step is what a small model
on a CPU shows. How long that lasts is a property of the configuration, so all its launches are read together: the
median over launches of the first step, of the second, and so on. The last third of that series is taken as steady. A
step is slow if it lies above the steady median by more than the noise (1.5 robust standard deviations, from the median
absolute deviation) and by more than 10 %. The warm-up is the prefix with the highest score, where a slow step counts +1
and any other −2: Page's (1954) cumulative sum run from the start. So one fast step inside a long warm-up does not end
it, and a later spike never extends it. Simulated with the noise of the tests, for warm-ups of 0 to 20 steps of 30 or 45
that are at least 1.3 times as slow: 8 launches find the length to one step in 99 of 100 cases, one launch in 93.

Repeatability, on the log scale, where spreads are relative:

    spread      the standard deviation of the logs of launches' medians, from their median absolute deviation, so one
                disturbed launch does not decide it; its interval is that of a normal distribution's standard deviation
                (chi-square), with the 37 % efficiency of the median absolute deviation (Rousseeuw & Croux 1993)
    one more    where one further measurement falls in 95 of 100 cases: centre ± t · s · √(1 + 1/n) (Hahn & Meeker,
                "Statistical Intervals", 1991, chapter 4), with the plain standard deviation, as it may be disturbed
    launches    the smallest n with t₍ₙ₋₁₎ · s / √n ≤ log(1 + precision): a guide, not a promise, since s is known to a
                factor of about two from two dozen launches
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.rounds import find_memory, find_widening
from scalelab.analysis.stats import (
    SMALLEST_EFFECT,
    TAIL,
    Floats,
    Rounds,
    drop_empty,
    estimate_location,
    estimate_over_rounds,
    find_median,
    find_medians,
    find_t_quantile,
    pair_medians,
)


def estimate_variation(rounds: Rounds) -> Estimate | None:
    """The standard deviation of steps over their mean, within a launch: the centre over launches.

    None where no launch has two steps. The lower end is never below 0.
    """
    ratios = [float(steps.std(ddof=1) / steps.mean()) for steps in drop_empty(rounds) if len(steps) > 1]
    if not ratios:
        return None
    centre = estimate_location(ratios)
    return centre.map(lambda end: max(0.0, end))


def estimate_quantile(rounds: Rounds, share: float) -> Estimate | None:
    """The step time below which a share of all steps lies, with the interval of the launches' own quantiles."""
    series = drop_empty(rounds)
    if not series:
        return None
    value = float(np.quantile(np.concatenate(series), share))
    return estimate_over_rounds(value, [float(np.quantile(steps, share)) for steps in series])


NOISE_DEVIATIONS = 1.5
"""How many robust standard deviations above the steady median a slow step lies."""

SMALLEST_SLOWDOWN = 0.1
"""And by which share of the steady median at least."""

PENALTY = 2.0
"""What a step that is not slow takes from the score of a prefix; a slow one adds 1."""

MAD_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution in median absolute deviations (Rousseeuw & Croux 1993)."""


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """The slow beginning of a configuration's launches."""

    num_steps: int
    """How many leading steps are slow."""
    is_settled: bool
    """Whether at least half of the steps came after it; if not, run more steps."""


def find_warmup(rounds: Rounds) -> Warmup:
    """The number of leading slow steps, given every step of each launch from its first on."""
    series = find_step_medians(rounds)
    if not len(series):
        return Warmup(num_steps=0, is_settled=False)
    steady = series[-max(len(series) // 3, 1) :]
    centre = float(np.median(steady))
    noise = MAD_TO_DEVIATION * float(np.median(np.abs(steady - centre)))
    is_slow = series > centre + max(NOISE_DEVIATIONS * noise, SMALLEST_SLOWDOWN * centre)
    scores = np.concatenate([[0.0], np.cumsum(np.where(is_slow, 1.0, -PENALTY))])
    num_steps = int(np.argmax(scores))
    return Warmup(num_steps=num_steps, is_settled=num_steps <= len(series) / 2)


def find_step_medians(rounds: Rounds) -> Floats:
    """The median over launches of the first step, the second, …, as far as every launch got."""
    launches = [steps for steps in rounds if len(steps)]
    if not launches:
        return np.empty(0)
    length = min(len(steps) for steps in launches)
    medians: Floats = np.median(np.array([steps[:length] for steps in launches], dtype=np.float64), axis=0)
    return medians


OUTLIER_DEVIATIONS = 3.5
"""Iglewicz & Hoaglin (1993): a modified z-score above 3.5 marks an outlier."""

OUTLIER_RATIO = 1.5
"""And it must be half as long again as the median: a tight series has harmless outliers."""

MOST_PAIRED = 500
"""Values whose pairs a trend is read from; of more, the medians of so many neighbourhoods."""

DRIFT_CHANCE = 0.02
"""How often a series without a trend may be taken for one with it; five values can reach that."""

SMALLEST_DRIFT = 0.03
"""A trend that changes times by less than 3 % from first to last is not worth a warning."""


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A step that took much longer than the others of its launch."""

    round: int
    """Index into the rounds, from 0."""
    step: int
    """Index into the steps of that round, from 0."""
    ratio: float
    """Its time over the median of its launch."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A trend of the step time: relative changes from first to last, None where there is no trend."""

    change_over_rounds: float | None
    change_within_launches: float | None


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Robust relative standard deviations; None where there is too little data."""

    within_ratio: float | None
    """Of the steps of a launch around its median: the median over launches."""
    between_ratio: float | None
    """Of the launches' medians."""


def find_outliers(rounds: Rounds) -> list[Outlier]:
    """The steps that are far above the median of their launch, by both its noise and its length."""
    found: list[Outlier] = []
    medians = find_medians(rounds).tolist()
    spreads = _measure_spreads(rounds).tolist()
    for index, steps in enumerate(rounds):
        limit = medians[index] * max(1 + OUTLIER_DEVIATIONS * spreads[index], OUTLIER_RATIO)
        found += [
            Outlier(round=index, step=step, ratio=seconds / medians[index])
            for step, seconds in enumerate(steps)
            if seconds > limit
        ]
    return found


def find_disturbed(rounds: Rounds) -> dict[int, float]:
    """Rounds that are as far above the others as a step that is an outlier: by number from 1, over their median."""
    measured = [index for index, steps in enumerate(rounds) if len(steps)]
    found = find_outliers([find_medians([rounds[index] for index in measured]).tolist()]) if measured else []
    return {measured[one.step] + 1: one.ratio for one in found}


def measure_noise(rounds: Rounds) -> Noise:
    """The robust relative spread within launches, and of the launches' medians."""
    series = drop_empty(rounds)
    within = _measure_spreads([steps for steps in series if len(steps) > 1])
    return Noise(
        within_ratio=float(np.median(within)) if len(within) else None,
        between_ratio=float(_measure_spreads([find_medians(series)])[0]) if len(series) > 1 else None,
    )


def find_drift(rounds: Rounds) -> Drift | None:
    """The trend over the rounds and within the launches, where there is one of any consequence."""
    series = drop_empty(rounds)
    medians = find_medians(series)
    relative = [(steps / median).tolist() for steps, median in zip(series, medians, strict=True)]
    over_rounds = find_trend(medians)
    within_launches = find_trend(find_step_medians(relative))
    if over_rounds is None and within_launches is None:
        return None
    return Drift(change_over_rounds=over_rounds, change_within_launches=within_launches)


def _measure_spreads(rounds: Iterable[Sequence[float] | Floats]) -> Floats:
    """The median absolute deviation of each round, as a standard deviation relative to its median."""
    every = list(rounds)
    centres = find_medians(every)
    deviations = find_medians(np.abs(np.subtract(steps, centre)) for steps, centre in zip(every, centres, strict=True))
    return MAD_TO_DEVIATION * deviations / centres


def find_trend(values: Floats) -> float | None:
    """The relative change from first to last, where it is both significant and large enough.

    The slope is the median of the slopes of all pairs (Theil 1950, Sen 1968); whether there is one is Mann's test
    (1945), which is Kendall's of the values against their order.
    """
    if len(values) < 2 or np.ptp(values) == 0:
        return None
    if len(values) > MOST_PAIRED:
        values = np.array([find_median(part) for part in np.array_split(values, MOST_PAIRED)])
    earlier, later = np.triu_indices(len(values), k=1)
    rises = values[later] - values[earlier]
    change = float(np.median(rises / (later - earlier))) * (len(values) - 1) / float(np.median(values))
    if abs(change) < SMALLEST_DRIFT:
        return None
    chance = _test_order(int(np.sign(rises).sum()), np.unique(values, return_counts=True)[1].tolist())
    return change if chance <= DRIFT_CHANCE else None


MOST_COUNTED = 33
"""Values whose orders are counted; of more, Mann's sum is as good as normal."""


def _test_order(rises: int, ties: Sequence[int]) -> float:
    """How often values in random order have as many more rises than falls, or falls than rises, among their pairs.

    Without ties among a few values, by counting the orders with so many falls; otherwise by the normal distribution
    with the variance for ties (Kendall, "Rank Correlation Methods", 1970, chapters 4 and 5).
    """
    num_values = sum(ties)
    if len(ties) == num_values <= MOST_COUNTED:
        orders = np.ones(1)
        for number in range(2, num_values + 1):  # one value more has 0 to all others after it that are smaller
            orders = np.convolve(orders, np.full(number, 1 / number))
        num_fewer = (len(orders) - 1 - abs(rises)) // 2
        return min(1.0, 2 * float(orders[: num_fewer + 1].sum()))
    variance = sum(sign * n * (n - 1) * (2 * n + 5) for sign, n in ((1, num_values), *((-1, tie) for tie in ties))) / 18
    return math.erfc(abs(rises) / math.sqrt(2 * variance))


MAD_EFFICIENCY = 0.37
"""Of the median absolute deviation against the standard deviation, for normal numbers (Rousseeuw & Croux 1993)."""

MOST_LAUNCHES = 10_000
"""More than these are not a plan but a sign that the machine cannot be measured on."""


def estimate_spread(values: Sequence[float]) -> Estimate | None:
    """The relative standard deviation of positive numbers, with its interval; None for fewer than two."""
    if len(values) < 2:
        return None
    logs = np.log(values)
    freedom = max(1.0, MAD_EFFICIENCY * (len(values) - 1))
    deviation = MAD_TO_DEVIATION * float(np.median(np.abs(logs - np.median(logs))))
    from scipy.special import chdtri  # here, because loading it takes longer than --help

    low, high = (deviation * math.sqrt(freedom / float(chdtri(freedom, tail))) for tail in (TAIL, 1 - TAIL))
    return Estimate(value=deviation, low=low, high=high)


POWER = 0.8
"""How often a difference of the size that a run can resolve would be found."""


def find_resolution(numerator: Rounds, denominator: Rounds) -> float | None:
    """The relative difference that so many rounds with this noise would find in 8 of 10 studies; None: unknown.

    Student's t of both errors times the standard error of the log of the ratio (Cohen, "Statistical Power Analysis for
    the Behavioral Sciences", 1988, chapter 2), and never less than `SMALLEST_EFFECT`.
    """
    above, below = pair_medians([numerator, denominator])
    if len(above) < 2:
        return None
    from scipy.special import stdtrit

    logs = np.log(above / below)
    freedom = len(logs) - 1
    reach = find_t_quantile(freedom) + float(stdtrit(freedom, POWER))
    widened = 1.0 if find_memory(logs) is None else find_widening(logs)
    return max(SMALLEST_EFFECT, math.expm1(reach * widened * float(logs.std(ddof=1)) / math.sqrt(len(logs))))


def predict_one_more(values: Sequence[float]) -> Estimate:
    """The centre of positive numbers, and the limits between which one more of them will probably fall."""
    logs = np.log(values)
    centre = float(logs.mean())
    if len(values) < 2:
        return Estimate(value=math.exp(centre))
    arm = find_t_quantile(len(values) - 1) * float(logs.std(ddof=1)) * math.sqrt(1 + 1 / len(values))
    return Estimate(value=math.exp(centre), low=math.exp(centre - arm), high=math.exp(centre + arm))


def count_launches(spread: float, precision: float) -> int | None:
    """Launches after which the interval of a median reaches no further than `precision`; None: beyond all reason."""
    wanted = math.log1p(precision)
    needed = (n for n in range(2, MOST_LAUNCHES + 1) if find_t_quantile(n - 1) * spread / math.sqrt(n) <= wanted)
    return next(needed, None)
