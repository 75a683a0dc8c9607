"""P6: why gzip is slow, from epochs whose answer is known."""

from __future__ import annotations

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.fetches import FetchSeries, group_fetches
from scalelab.recipes.evidence import UNTOLD
from scalelab.recipes.polaris.formats import add_epochs, compare_patterns, doubt_faster, drop_impossible, judge_slow
from scalelab.records.observations import Fetch, RankReport, ReadingReport
from scalelab.records.tasks import Pass
from scalelab.records.trial import Status, TrialResult
from tests.readings import make_reading_trial

ONE = Pass()


def make_series(first: float, later: float) -> FetchSeries:
    """Three launches of two epochs of ten batches."""
    results = []
    for number in (1, 2, 3):
        fetches = [
            Fetch(0, ONE.order, ONE.access, ONE.cache, epoch, batch, 4, 0.0, seconds * (1 + number / 1000), 0.0)
            for epoch, seconds in enumerate((first, later))
            for batch in range(10)
        ]
        trial = make_reading_trial(num_ranks=1, passes=(ONE,), round=number)
        ranks = (RankReport(rank=0, reading=ReadingReport(num_samples=40, sample_bytes=128)),)
        results.append(TrialResult(trial=trial, status=Status.COMPLETED, fetches=tuple(fetches), ranks=ranks))
    (series,) = group_fetches(results).values()
    return series


@pytest.mark.parametrize(
    ("naive", "lazy", "verdict", "is_kept"),
    [
        ((0.2, 0.2), (0.01, 0.0001), "each chunk is inflated once instead of once per sample", True),
        ((0.01, 0.01), (0.2, 0.2), "reading by batches does not help, so decompression itself is the reason", False),
        ((0.2, 0.2), (0.2, 0.0001), "no difference is visible", True),
    ],
)
def test_the_first_epoch_decides_as_later_ones_may_read_what_is_kept(
    naive: tuple[float, float], lazy: tuple[float, float], verdict: str, is_kept: bool
) -> None:
    words = compare_patterns(make_series(*naive), make_series(*lazy))
    assert verdict in words
    slow = judge_slow(Estimate(value=2.3, low=2.1, high=2.5), make_series(*naive), make_series(*lazy))
    assert slow.startswith("Slower, yes")
    assert ("not for decompressing as such" in slow) is ("instead of once per sample" in verdict)
    assert judge_slow(Estimate(value=1.1, low=0.9, high=1.3), make_series(*naive), make_series(*lazy)) == UNTOLD
    assert ("data stay in memory" in words) is is_kept


def test_a_slower_first_epoch_is_in_the_sum_of_all() -> None:
    total = add_epochs(Estimate(value=1.65, low=1.5, high=1.7), Estimate(value=1.4, low=1.3, high=1.5), 5)
    assert total.value == pytest.approx(7.25)
    assert total.ends == pytest.approx((6.7, 7.7))


def test_nothing_is_compared_without_both() -> None:
    assert compare_patterns(None, make_series(0.1, 0.1)) == ""


def test_a_step_that_seems_faster_than_from_memory_is_doubted() -> None:
    assert "no slower" in doubt_faster(Estimate(value=0.88, low=0.8, high=0.96))
    assert not doubt_faster(Estimate(value=0.96, low=0.9, high=1.02))


def test_an_interval_that_reaches_zero_seconds_is_not_shown() -> None:
    vague, known = Estimate(value=5.7, low=-8.0, high=20.3), Estimate(value=5.7, low=5.0, high=6.0)
    assert drop_impossible(vague) == Estimate(value=5.7)
    assert drop_impossible(known) is known
