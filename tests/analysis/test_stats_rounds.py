"""Rounds stay aligned when one of them gave nothing."""

from __future__ import annotations

import numpy as np
import pytest

from scalelab.analysis.stats import drop_empty, estimate_run_ratio, find_medians, pair_medians


def test_an_empty_round_has_no_median() -> None:
    assert np.isnan(find_medians([[1.0, 2.0, 6.0], []])[1])


def test_empty_rounds_are_dropped() -> None:
    assert [part.tolist() for part in drop_empty([[1.0], [], [2.0]])] == [[1.0], [2.0]]


def test_only_rounds_that_all_completed_are_paired() -> None:
    paired = pair_medians([[[1.0], [], [3.0], [4.0]], [[10.0], [20.0], [], [40.0]]])
    assert paired.tolist() == [[1.0, 4.0], [10.0, 40.0]]


def test_series_of_unequal_length_share_no_round() -> None:
    assert pair_medians([[[1.0]], [[1.0], [2.0]]]).shape == (2, 0)


def test_two_rounds_of_a_yardstick_are_enough_to_divide_by_it() -> None:
    """The second run is on a machine half as fast: only the yardstick shows that nothing changed."""
    before, after = [[1.0], [1.01]], [[2.0], [2.02]]
    assert estimate_run_ratio(after, before, (after, before)).value == pytest.approx(1.0)
    assert estimate_run_ratio(after, before, None).value == pytest.approx(2.0)
    assert estimate_run_ratio(after[:1], before[:1], (after[:1], before[:1])).value == pytest.approx(2.0)
