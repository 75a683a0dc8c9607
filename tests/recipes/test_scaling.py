"""The scaling assignment's one claim: bytes and operations grow alike."""

from __future__ import annotations

import pytest

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
    assert not check.holds
    assert check.id == "S3"
    assert "4P" in check.computed
    assert "6PB" in check.computed
