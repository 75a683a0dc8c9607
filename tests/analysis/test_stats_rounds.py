"""Rounds stay aligned when one of them gave nothing."""

from __future__ import annotations

import numpy as np

from scalelab.analysis.stats import drop_empty, find_medians, pair_medians


def test_an_empty_round_has_no_median() -> None:
    assert np.isnan(find_medians([[1.0, 2.0, 6.0], []])[1])


def test_empty_rounds_are_dropped() -> None:
    assert [part.tolist() for part in drop_empty([[1.0], [], [2.0]])] == [[1.0], [2.0]]


def test_only_rounds_that_all_completed_are_paired() -> None:
    paired = pair_medians([[[1.0], [], [3.0], [4.0]], [[10.0], [20.0], [], [40.0]]])
    assert paired.tolist() == [[1.0, 4.0], [10.0, 40.0]]


def test_series_of_unequal_length_share_no_round() -> None:
    assert pair_medians([[[1.0]], [[1.0], [2.0]]]).shape == (2, 0)
