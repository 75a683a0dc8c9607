"""What the quantization assignment claims, recomputed from its own numbers."""

from __future__ import annotations

import pytest

from scalelab.recipes.quantization.published import (
    find_largest_error,
    find_points_lost,
    find_saturated_share,
    make_checks,
)


def test_255_clamped_at_127_saturates_the_upper_half() -> None:
    assert find_saturated_share(255) == pytest.approx(0.5)
    assert find_largest_error(255) == pytest.approx(128 / 255)


def test_127_saturates_nothing_and_errs_by_half_a_step() -> None:
    assert find_saturated_share(127) == 0
    assert find_largest_error(127) == pytest.approx(0.5 / 127)


def test_less_rounding_cost_more_points_than_all_of_it() -> None:
    assert find_points_lost("51.4") == pytest.approx(3.26)
    assert find_points_lost("54.49") == pytest.approx(0.17)


def test_what_holds_and_what_does_not() -> None:
    checks = make_checks()
    assert [(check.id, check.holds) for check in checks] == [("Q4", False), ("Q5", False), ("Q5", False), ("Q5", True)]
    assert "the upper 50 % of the range saturates at 127" in checks[0].computed
    assert "3.09 points would come from the bias" in checks[1].computed
    assert "127^5 = 3.3e+10" in checks[1].computed
    assert "reaches 54.1 %: 2.7 points more" in checks[2].computed
    assert "17 of 10,000 images" in checks[3].computed
    assert "± 0.98 points" in checks[3].computed
