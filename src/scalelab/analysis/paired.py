"""Two models on the same test samples: what one wins and loses against the other, and the difference in accuracy.

Two accuracies of 98 % on 10,000 samples, each with its own interval, could differ by half a point in either direction.
But a model and its int8 form mostly err on the same samples, and only those on which one is right and the other is not
tell them apart. So samples are paired:

    won    wrong before, right now        lost   right before, wrong now
    difference = (won − lost) / n

The interval is Newcombe's for paired data (Statistics in Medicine 17, 2635, 1998; method 10): Wilson's score intervals
of both accuracies, combined with the correlation φ of their being right. Unlike the usual ± 1.96 standard errors it
stays within [−1, 1] and has a width where nothing was won or lost. Whether there is a difference at all is McNemar's
exact test (Psychometrika 12, 153, 1947): under "none", as many are won as lost, by the toss of a coin.

Limits: the interval speaks of test samples that might have been drawn instead; not of other trainings of the model,
nor of other calibration data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import TAIL


@dataclass(frozen=True, kw_only=True)
class PairedCounts:
    """How often two models were right on the same samples."""

    both: int
    won: int
    """The candidate alone was right."""
    lost: int
    """The reference alone was right."""
    neither: int

    @property
    def num_samples(self) -> int:
        return self.both + self.won + self.lost + self.neither

    @property
    def accuracy(self) -> float:
        """Of the candidate."""
        return (self.both + self.won) / self.num_samples


def count_pairs(candidate: Sequence[int], reference: Sequence[int], labels: Sequence[int]) -> PairedCounts | None:
    """Who was right on what, by the predictions of both and the true classes; None without a sample."""
    if not labels:
        return None
    pairs = [(mine == true, theirs == true) for mine, theirs, true in zip(candidate, reference, labels, strict=True)]
    return PairedCounts(
        both=pairs.count((True, True)),
        won=pairs.count((True, False)),
        lost=pairs.count((False, True)),
        neither=pairs.count((False, False)),
    )


def measure_agreement(candidate: Sequence[int], reference: Sequence[int]) -> Estimate | None:
    """The share of samples that both put into the same class, right or wrong; with Wilson's interval."""
    if not reference:
        return None
    num_same = sum(mine == theirs for mine, theirs in zip(candidate, reference, strict=True))
    return estimate_share(num_same, len(reference))


def estimate_share(count: int, num_samples: int) -> Estimate:
    """A share with its score interval (Wilson, JASA 22, 209, 1927)."""
    from scipy.special import ndtri  # here, because loading it takes longer than --help

    share, square = count / num_samples, float(ndtri(1 - TAIL)) ** 2
    centre = (count + square / 2) / (num_samples + square)
    arm = math.sqrt(square * share * (1 - share) * num_samples + square**2 / 4) / (num_samples + square)
    return Estimate(value=share, low=max(0.0, min(centre - arm, share)), high=min(1.0, max(centre + arm, share)))


def estimate_paired_difference(counts: PairedCounts) -> Estimate:
    """Accuracy of the candidate less that of the reference, with Newcombe's interval."""
    num = counts.num_samples
    mine, theirs = (estimate_share(counts.both + alone, num) for alone in (counts.won, counts.lost))
    phi = _correlate(counts)
    assert mine.low is not None
    assert mine.high is not None
    assert theirs.low is not None
    assert theirs.high is not None
    below = _join(mine.value - mine.low, theirs.high - theirs.value, phi)
    above = _join(theirs.value - theirs.low, mine.high - mine.value, phi)
    difference = (counts.won - counts.lost) / num
    return Estimate(value=difference, low=max(-1.0, difference - below), high=min(1.0, difference + above))


def _join(first: float, second: float, phi: float) -> float:
    """The arm of a difference from one arm of each of its terms, which go together by φ."""
    return math.sqrt(max(0.0, first**2 - 2 * phi * first * second + second**2))


def _correlate(counts: PairedCounts) -> float:
    """φ of the fourfold table, with half a table taken off where it is positive; 0 where a margin is empty."""
    both, won, lost, neither = counts.both, counts.won, counts.lost, counts.neither
    margins = (both + won) * (lost + neither) * (both + lost) * (won + neither)
    if not margins:
        return 0.0
    excess = float(both * neither - won * lost)
    if excess > 0:
        excess = max(excess - counts.num_samples / 2, 0.0)
    return excess / math.sqrt(margins)


def find_chance(counts: PairedCounts) -> float:
    """How likely so uneven a split of what was won and lost is by chance: McNemar's exact test, both sides."""
    discordant = counts.won + counts.lost
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(counts.won, counts.lost), discordant, 0.5))) if discordant else 1.0
