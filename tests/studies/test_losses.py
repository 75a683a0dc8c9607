"""Losses side by side."""

from __future__ import annotations

import math

import pytest

from scalelab.studies.shared.sweep import compare_losses, find_first_difference


def test_equal_losses_do_not_differ() -> None:
    found = compare_losses({0: 2.0, 1: 1.0}, {0: 2.0, 1: 1.0})
    assert (found.last, found.difference, found.first_step) == (1.0, 0.0, None)


def test_the_last_common_step_is_compared_and_the_first_differing_one_named() -> None:
    found = compare_losses({0: 2.0, 1: 1.1, 2: 0.5}, {0: 2.0, 1: 1.0})
    assert found.difference == pytest.approx(0.1)
    assert (found.last, found.first_step) == (0.5, 1)


def test_a_loss_that_is_no_number_has_no_difference() -> None:
    found = compare_losses({0: math.nan}, {0: 1.0})
    assert (found.last, found.difference, found.first_step) == (None, None, 0)
    assert find_first_difference({0: math.nan}, {0: math.nan}) is None


def test_nothing_has_nothing_to_compare() -> None:
    found = compare_losses({}, {0: 1.0})
    assert (found.last, found.difference, found.first_step) == (None, None, None)


def test_a_reference_of_zero_has_an_absolute_difference() -> None:
    assert compare_losses({0: 0.5}, {0: 0.0}).difference == 0.5
