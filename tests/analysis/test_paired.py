"""Paired predictions: what is won and lost, the interval of the difference, and chance."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from scalelab.analysis.paired import (
    PairedCounts,
    count_pairs,
    estimate_paired_difference,
    estimate_share,
    find_chance,
    measure_agreement,
)


def make_counts(both: int, won: int, lost: int, neither: int) -> PairedCounts:
    return PairedCounts(both=both, won=won, lost=lost, neither=neither)


def test_samples_are_counted_by_who_was_right() -> None:
    counts = count_pairs((1, 1, 2, 0), (1, 0, 1, 2), (1, 1, 1, 1))
    assert counts == make_counts(1, 1, 1, 1)
    assert counts.accuracy == 0.5
    assert count_pairs((), (), ()) is None


def test_predictions_of_other_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        count_pairs((1, 2), (1,), (1, 2))


def test_the_interval_is_that_of_the_published_example() -> None:
    difference = estimate_paired_difference(make_counts(36, 12, 2, 0))
    assert difference.value == pytest.approx(0.2)
    assert (difference.low, difference.high) == (pytest.approx(0.0569, abs=1e-4), pytest.approx(0.3404, abs=1e-4))


def test_models_that_agree_everywhere_still_have_an_interval() -> None:
    difference = estimate_paired_difference(make_counts(350, 0, 0, 5))
    assert difference.value == 0
    assert difference.low is not None
    assert difference.high is not None
    assert -0.02 < difference.low < 0 < difference.high < 0.02


@pytest.mark.parametrize("counts", [(10, 0, 0, 0), (0, 0, 0, 10), (0, 10, 0, 0), (0, 0, 10, 0), (1, 0, 0, 0)])
def test_empty_margins_give_an_interval_within_one(counts: tuple[int, int, int, int]) -> None:
    difference = estimate_paired_difference(make_counts(*counts))
    assert difference.low is not None
    assert difference.high is not None
    assert -1 <= difference.low <= difference.value <= difference.high <= 1


def test_pairing_gives_a_narrower_interval_than_two_accuracies_apart() -> None:
    paired = estimate_paired_difference(make_counts(5200, 5, 8, 4787))
    apart = estimate_share(5205, 10_000)
    assert paired.half_width is not None
    assert apart.half_width is not None
    assert paired.half_width < apart.half_width / 10


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draw, truth, covered = random.Random(1), 0.01 - 0.03, 0
    for _ in range(400):
        kinds = draw.choices(range(4), weights=(0.76, 0.01, 0.03, 0.2), k=500)
        difference = estimate_paired_difference(make_counts(*(kinds.count(kind) for kind in range(4))))
        assert difference.low is not None
        assert difference.high is not None
        covered += difference.low <= truth <= difference.high
    assert 0.92 <= covered / 400 <= 0.99


def test_chance_is_the_exact_test_of_a_coin() -> None:
    assert find_chance(make_counts(90, 0, 0, 10)) == 1.0
    assert find_chance(make_counts(90, 3, 3, 4)) == 1.0
    assert find_chance(make_counts(90, 0, 6, 4)) == pytest.approx(2 * 0.5**6)
    assert find_chance(make_counts(90, 6, 0, 4)) == find_chance(make_counts(90, 0, 6, 4))


def test_agreement_counts_right_and_wrong_alike() -> None:
    agreement = measure_agreement((1, 2, 3, 3), (1, 2, 3, 4))
    assert agreement is not None
    assert agreement.value == 0.75
    assert measure_agreement((), ()) is None
    whole = measure_agreement((1,) * 50, (1,) * 50)
    assert whole is not None
    assert whole.high == 1.0
    assert whole.low is not None
    assert math.isclose(whole.low, 50 / (50 + 1.96**2), rel_tol=1e-4)


def test_all_or_none_of_the_samples_bound_a_share_exactly() -> None:
    full, none = estimate_share(10, 10), estimate_share(0, 10)
    assert (full.value, full.high, none.value, none.low) == (1.0, 1.0, 0.0, 0.0)
    assert full.low == pytest.approx(10 / (10 + 1.959964**2), abs=1e-6)
    assert none.high == pytest.approx(1 - 10 / (10 + 1.959964**2), abs=1e-6)


def find_wilson(count: int, num: int) -> tuple[float, float]:
    """The shares p for which (count / n − p)² = z² p (1 − p) / n."""
    share, square = count / num, 1.959964**2 / num
    low, high = sorted(np.roots([1 + square, -(2 * share + square), share**2]).real.tolist())
    return low, high


@pytest.mark.parametrize(
    ("counts", "phi"),
    [
        ((20, 5, 1, 10), (200 - 5 - 18) / math.sqrt(25 * 11 * 21 * 15)),
        ((3, 1, 1, 1), 0.0),  # 3 − 1, and less than half of 6 off it
        ((2, 7, 4, 3), (6 - 28) / math.sqrt(9 * 7 * 6 * 10)),
        ((0, 10, 0, 0), 0.0),
    ],
)
def test_the_interval_is_newcombes_from_wilsons_and_the_correlation(
    counts: tuple[int, int, int, int], phi: float
) -> None:
    both, won, lost, _ = counts
    num = sum(counts)
    mine, theirs = (both + won) / num, (both + lost) / num
    (low, high), (other_low, other_high) = find_wilson(both + won, num), find_wilson(both + lost, num)

    def join(first: float, second: float) -> float:
        return math.sqrt(first**2 - 2 * phi * first * second + second**2)

    found = estimate_paired_difference(make_counts(*counts))
    assert found.value == pytest.approx((won - lost) / num)
    assert found.low == pytest.approx(found.value - join(mine - low, other_high - theirs), abs=1e-6)
    assert found.high == pytest.approx(min(1, found.value + join(theirs - other_low, high - mine)), abs=1e-6)


def test_a_difference_ends_at_one_in_both_directions() -> None:
    assert estimate_paired_difference(make_counts(0, 0, 10, 0)).low == -1.0
    assert estimate_paired_difference(make_counts(0, 10, 0, 0)).high == 1.0


def test_chance_counts_all_splits_that_are_as_uneven() -> None:
    assert find_chance(make_counts(90, 1, 5, 4)) == pytest.approx(2 * (1 + 6) / 64)
    assert find_chance(make_counts(90, 1, 0, 9)) == 1.0
