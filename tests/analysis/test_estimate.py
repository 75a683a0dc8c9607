"""What a number can be, and what is left of its interval."""

from __future__ import annotations

import math

import pytest

from scalelab.analysis.estimate import Domain, Estimate, confine


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
