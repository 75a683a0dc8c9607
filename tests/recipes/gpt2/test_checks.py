"""The gpt2 assignment's claims, to the digit of its description."""

from __future__ import annotations

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.gpt2 import published
from scalelab.recipes.gpt2.published import (
    bound_peak_megabytes,
    estimate_states,
    extrapolate_from,
    extrapolate_published,
    find_learning_rate,
    find_nearby_rate,
    fit_batch_memory,
    make_checks,
)


def list_holds(row: str) -> list[bool]:
    return [check.holds for check in make_checks() if check.id == row]


def test_states_are_estimated_as_published() -> None:
    assert [f"{megabytes:.2f}" for megabytes in estimate_states().values()] == [
        "474.70", "474.70", "949.40", "1898.80",
    ]  # fmt: skip


def test_what_was_called_the_peak_is_less_than_what_must_be_alive_at_once() -> None:
    assert bound_peak_megabytes() > 3076.27
    assert list_holds("G1") == [True, True, False]


def test_a_trillion_parameters_to_the_digit() -> None:
    found = extrapolate_published()
    assert f"{found.tokens_per_second.value:.3f}" == "4.055"
    assert f"{found.years.value:,.1f}" == "78,208.0"
    days = [f"{number or 0:,.0f}" for number in (found.days.value, found.days.low, found.days.high)]
    assert days == ["28,545,907", "28,545,864", "28,545,951"]
    assert list_holds("G3") == [True]


def test_the_published_days_follow_from_a_throughput_that_is_printed_as_the_published() -> None:
    assert find_nearby_rate() == 32_582.396
    assert f"{find_nearby_rate():,.1f}" == "32,582.4"
    assert f"{extrapolate_from(Estimate(value=find_nearby_rate())).days.value:,.0f}" == "28,545,911"


def test_the_first_two_rows_of_the_batch_sweep_are_stale() -> None:
    fixed, per_sample = fit_batch_memory()
    for batch, megabytes in ((8, 16_104), (16, 30_224), (32, 58_438)):
        assert fixed + per_sample * batch == pytest.approx(megabytes, rel=0.005)
    assert fixed + per_sample * 4 < 0.6 * 15_619
    assert list_holds("G4") == [False, True]


@pytest.mark.parametrize(("step", "rate"), [(0, "2.98e-04"), (10, "1.44e-04")])
def test_the_cosine_gives_the_published_learning_rates(step: int, rate: str) -> None:
    assert f"{find_learning_rate(step):.2e}" == rate


def test_losses_stand_beside_the_steps_that_printed_them() -> None:
    assert published.LOSSES == {0: 11.0901, 10: 7.9705}
    assert published.BASELINE_LOSSES == {0: 11.0429, 10: 7.9564}
    (apart,) = (check for check in make_checks() if "two GPUs train" in check.claim)
    assert "differ by 0.0472 at step 0" in apart.computed


def test_steps_per_second_follow_from_tokens_per_second() -> None:
    assert list_holds("G2") == [True]


def test_the_training_begins_at_chance_and_gains_alike_from_every_strategy() -> None:
    assert list_holds("G5") == [True, True, False, True]
