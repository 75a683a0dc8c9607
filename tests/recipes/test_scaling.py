"""The scaling assignment's one claim: bytes and operations grow alike."""

from __future__ import annotations

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import UNTOLD
from scalelab.recipes.scaling.challenge import describe_curve
from scalelab.recipes.scaling.questions import judge_sizes
from scalelab.recipes.scaling.rows import count_bytes, count_operations, make_checks
from scalelab.workloads.options import MlpOptions


@pytest.mark.parametrize(("dim", "depth"), [(1024, 2), (8192, 8), (8192, 6)])
def test_bytes_and_operations_are_both_proportional_to_parameters(dim: int, depth: int) -> None:
    options = MlpOptions(dim=dim, depth=depth)
    weights = dim * dim * depth
    assert count_bytes(options) == 4 * (weights + dim * depth)
    assert count_operations(options) == 6 * weights * 64


def test_a_larger_model_is_not_more_compute_by_itself() -> None:
    (check,) = make_checks()
    assert check.holds is None
    assert check.id == "S3"
    assert "4P" in check.computed
    assert "6PB" in check.computed


def around(value: float, width: float = 0.01) -> Estimate:
    return Estimate(value=value, low=value - width, high=value + width)


@pytest.mark.parametrize(
    ("change", "apart", "words"),
    [
        (0.4, 0.1, "does not degrade, it rises, and non-linearly: fast at first and then ever more slowly"),
        (0.4, -0.1, "does not degrade, it rises, and non-linearly: slowly at first and then ever faster"),
        (-0.4, -0.1, "It degrades, and non-linearly: fast at first and then ever more slowly"),
        (-0.4, 0.1, "It degrades, and non-linearly: slowly at first and then ever faster"),
        (-0.4, 0.001, "It degrades; whether linearly, this run does not show"),
        (0.001, 0.1, UNTOLD),
    ],
)
def test_a_curve_is_named_by_its_direction_and_its_bend(change: float, apart: float, words: str) -> None:
    assert words in describe_curve(around(change), around(apart))


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        ({2: 0, 4: 1}, "In the large one: clear on 4 ranks; not resolved on 2 ranks."),
        ({2: -1, 4: -1}, "In the small one: clear on 2 and 4 ranks."),
        ({2: -1, 4: 1}, "In the large one: clear on 4 ranks. In the small one: clear on 2 ranks."),
        ({2: 0, 4: 0}, f"{UNTOLD}, as the intervals overlap."),
    ],
)
def test_the_model_that_gains_more_is_named_for_every_number_of_ranks(verdicts: dict[int, int], words: str) -> None:
    assert judge_sizes(verdicts) == words
