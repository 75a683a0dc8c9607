"""Quantiles in a fixed amount of memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.trace.launches import EXACT_BELOW, NUM_BINS, DelayHistogram, find_bins


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=50), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_a_quantile_is_at_most_one_percent_off(times: list[int], share: float) -> None:
    histogram = DelayHistogram()
    histogram.add(np.array(times, dtype=np.int64))
    exact = float(np.quantile(times, share, method="inverted_cdf"))
    assert histogram.find_quantile(share) == pytest.approx(exact, rel=0.008)
    assert histogram.count == len(times)


def test_short_times_are_exact() -> None:
    histogram = DelayHistogram()
    histogram.add(np.arange(EXACT_BELOW))
    assert [histogram.find_quantile((n + 1) / EXACT_BELOW) for n in range(EXACT_BELOW)] == list(range(EXACT_BELOW))


def test_any_time_has_a_bin_and_longer_times_no_lower_one() -> None:
    times = np.array([0, 1, 127, 128, 129, 2**31, 2**52, 2**62], dtype=np.int64)
    bins = find_bins(times)
    assert (np.diff(bins) >= 0).all()
    assert bins[-1] < NUM_BINS


def test_nothing_has_no_quantile() -> None:
    assert DelayHistogram().find_quantile(0.5) is None
