"""When a cost has come back."""

from __future__ import annotations

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.studies.compile import find_break_even


def test_the_cost_comes_back_after_cost_over_saving_steps() -> None:
    assert find_break_even(Estimate(value=20.0), Estimate(value=0.5)) == Estimate(value=40.0)


def test_the_interval_pairs_the_least_favourable_ends() -> None:
    found = find_break_even(Estimate(value=20.0, low=18.0, high=24.0), Estimate(value=0.5, low=0.4, high=0.6))
    assert found == Estimate(value=40.0, low=pytest.approx(30.0), high=pytest.approx(60.0))


def test_a_cost_that_was_seen_once_has_the_interval_of_the_saving() -> None:
    found = find_break_even(Estimate(value=20.0), Estimate(value=0.5, low=0.4, high=1.0))
    assert found == Estimate(value=40.0, low=pytest.approx(20.0), high=pytest.approx(50.0))


@pytest.mark.parametrize("saving", [Estimate(value=-0.1), Estimate(value=0.1, low=-0.1, high=0.3), Estimate(value=0.0)])
def test_a_saving_that_may_be_nothing_has_no_break_even(saving: Estimate) -> None:
    assert find_break_even(Estimate(value=20.0), saving) is None


def test_no_cost_has_come_back_at_once() -> None:
    assert find_break_even(Estimate(value=-1.0), Estimate(value=0.5)) == Estimate(value=0.0)
