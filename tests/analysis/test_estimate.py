"""What a number can be, and what is left of its interval."""

from __future__ import annotations

import math

import pytest

from scalelab.analysis.estimate import Domain, Estimate, Prediction, confine, enclose, find_domain


@pytest.mark.parametrize(
    ("value", "domain", "kept"),
    [
        (1.0, "part", True),
        (0.0, "part", True),
        (1.0 + 1e-12, "part", True),
        (1.001, "part", False),
        (-0.001, "part", False),
        (1.001, "amount", True),
        (-0.001, "amount", False),
        (-0.001, "signed", True),
        (math.nan, "signed", False),
    ],
)
def test_a_value_outside_its_domain_is_unknown(value: float, domain: Domain, kept: bool) -> None:
    assert (confine(Estimate(value=value), domain) is not None) is kept


def test_an_interval_ends_where_its_domain_does() -> None:
    found = confine(Estimate(value=0.9, low=-0.2, high=1.4), "part")
    assert found is not None
    assert (found.low, found.value, found.high) == (0.0, 0.9, 1.0)


def test_a_side_is_taken_by_the_whole_interval_or_by_none() -> None:
    found = Estimate(value=1.2, low=1.1, high=1.3)
    assert (found.is_above(1.0), found.is_above(1.1), found.is_below(1.3), found.is_below(1.4)) == (
        True, False, False, True,
    )  # fmt: skip
    alone = Estimate(value=1.2)
    assert not alone.is_above(1.0), "how sure it is is not known"
    assert not alone.is_below(2.0)


def test_the_ends_of_what_has_no_interval_are_the_value() -> None:
    assert Estimate(value=1.2).ends == (1.2, 1.2)
    assert Estimate(value=1.2, low=1.0).ends == (1.0, 1.2)
    assert Estimate(value=1.2, low=1.0, high=2.0).holds(2.0)
    assert not Estimate(value=1.2).holds(1.1)


@pytest.mark.parametrize(
    ("name", "usual", "domain"),
    [
        ("exposed_share", "part", "part"),
        ("residual_share", "part", "amount"),
        ("step_seconds", "amount", "amount"),
        ("most_seconds", "amount", "amount"),
        ("most_points", "signed", "signed"),
        ("excess_seconds", "amount", "signed"),
        ("efficiency_change", "part", "signed"),
    ],
)
def test_words_of_a_name_say_what_a_number_can_be(name: str, usual: Domain, domain: Domain) -> None:
    assert find_domain(name, usual) == domain


def test_what_lies_within_its_domain_is_left_as_it_is() -> None:
    whole = Prediction(value=0.5, low=0.0, high=1.0)
    assert confine(whole, "part") is whole
    assert confine(whole, "amount") is whole
    assert confine(Estimate(value=-1e-12, low=-1.0, high=3.0), "amount") == Estimate(value=0.0, low=0.0, high=3.0)
    assert confine(Estimate(value=-1e-8), "amount") is None
    assert confine(Estimate(value=1 + 1e-8), "part") is None
    assert confine(Estimate(value=0.5, high=math.inf), "amount") is None


def test_a_rate_of_times_that_reach_below_nothing_has_no_interval() -> None:
    def invert(seconds: float) -> float:
        return 1 / seconds

    assert Estimate(value=2.0, low=1.0, high=4.0).map(invert) == Estimate(value=0.5, low=0.25, high=1.0)
    assert Estimate(value=2.0, low=-1.0, high=4.0).map(invert) == Estimate(value=0.5)
    assert Estimate(value=2.0, low=1.0).map(invert) == Estimate(value=0.5)
    assert Estimate(value=2.0, low=2.0, high=2.0).map(invert) == Estimate(value=0.5, low=0.5, high=0.5)
    assert Prediction(value=2.0, low=1.0, high=4.0).map(invert) == Prediction(value=0.5, low=0.25, high=1.0)


def test_draws_give_the_interval_of_eight_in_ten_and_always_hold_the_value() -> None:
    drawn = [float(number) for number in range(101)]
    assert enclose(50.0, drawn) == Prediction(value=50.0, low=pytest.approx(10.0), high=pytest.approx(90.0))
    assert enclose(95.0, drawn).high == 95.0
    assert enclose(5.0, drawn).low == 5.0
