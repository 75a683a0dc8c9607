"""Amdahl's law with a delay, laid over steps that obey it and steps that do not."""

from __future__ import annotations

import pytest

from scalelab.analysis.speedup import add_delay, compare_with_model, estimate_model, predict_speedup

ONE = [[0.4] * 5, [0.5] * 5]
TWO = [[0.2] * 5, [0.25] * 5]


def test_without_a_delay_the_law_is_the_speedup_itself() -> None:
    assert predict_speedup(0.4, 0.1, 0.0) == 4


def test_an_endless_delay_leaves_no_speedup() -> None:
    assert predict_speedup(0.4, 0.1, 1e9) == pytest.approx(1)


def test_a_delay_is_added_to_every_step() -> None:
    assert add_delay([[1.0, 2.0], []], 0.5) == [[1.5, 2.5], []]


def test_steps_that_obey_the_law_are_no_distance_from_it() -> None:
    delayed = [add_delay(ONE, 0.1), add_delay(TWO, 0.1)]
    distance = compare_with_model(
        delayed, lambda t: t[0] / t[1], [ONE, TWO], lambda t: predict_speedup(t[0], t[1], 0.1)
    )
    assert distance is not None
    assert distance.value == pytest.approx(1)
    model = estimate_model([ONE, TWO], lambda t: predict_speedup(t[0], t[1], 0.1))
    assert model is not None
    assert model.low is not None
    assert model.low < 5 / 3 < 12 / 7 < (model.high or 0)


def test_steps_that_hide_the_delay_are_as_far_from_it_as_it_is_wrong() -> None:
    distance = compare_with_model(
        [ONE, TWO], lambda t: t[0] / t[1], [ONE], lambda t: predict_speedup(t[0], t[0] / 2, 1e9)
    )
    assert distance is not None
    assert distance.value == pytest.approx(2)


def test_rounds_that_do_not_meet_give_nothing() -> None:
    assert estimate_model([[[0.4], []], [[], [0.2]]], lambda t: t[0]) is None
    assert compare_with_model([[[0.4], []]], lambda t: t[0], [[[], [0.2]]], lambda t: t[0]) is None
