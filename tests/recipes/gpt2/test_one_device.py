"""Numbers of G1 to G4 in words."""

from __future__ import annotations

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.gpt2.one_device import say_large


def test_a_large_number_that_is_hardly_known_has_both_ends() -> None:
    assert say_large(Estimate(value=238e6, low=153e6, high=531e6)) == "238 million (153 to 531)"
    assert say_large(Estimate(value=108e6, low=80e6, high=144e6)) == "108 ± 36 million"
