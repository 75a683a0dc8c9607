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
