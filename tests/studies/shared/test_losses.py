"""Losses side by side."""

from __future__ import annotations

import math

import pytest

from scalelab.studies.shared.losses import compare_last_losses, find_first_difference, read_last_loss


def test_equal_losses_do_not_differ() -> None:
    losses = {0: 2.0, 1: 1.0}
    assert compare_last_losses(losses, dict(losses)) == 0.0
    assert find_first_difference(losses, dict(losses)) is None


def test_the_last_common_step_is_compared_and_the_first_differing_one_named() -> None:
    losses, reference = {0: 2.0, 1: 1.1, 2: 0.5}, {0: 2.0, 1: 1.0}
    assert compare_last_losses(losses, reference) == pytest.approx(0.1)
    assert find_first_difference(losses, reference) == 1
    assert read_last_loss(losses) == 0.5


def test_a_loss_that_is_not_finite_has_no_difference() -> None:
    assert compare_last_losses({0: math.nan}, {0: 1.0}) is None
    assert read_last_loss({0: math.inf}) is None
    assert find_first_difference({0: math.nan}, {0: 1.0}) == 0
    assert find_first_difference({0: math.nan}, {0: math.nan}) is None


def test_nothing_has_nothing_to_compare() -> None:
    assert compare_last_losses({}, {0: 1.0}) is None
    assert read_last_loss({}) is None


def test_a_reference_of_zero_has_an_absolute_difference() -> None:
    assert compare_last_losses({0: 0.5}, {0: 0.0}) == 0.5
