"""How far the batch statistics of ranks are apart; and the narrow network that shows it in minutes."""

from __future__ import annotations

import pytest
import torch

from scalelab.worker.instruments.instruments import measure_spread
from scalelab.worker.models.networks import Resnet18
from scalelab.workloads.image_options import Resnet18Options


def test_ranks_with_the_same_samples_have_the_same_statistics() -> None:
    one = torch.tensor([[0.5, -1.0], [4.0, 9.0]])
    assert measure_spread(torch.stack([one, one])) == (0.0, 0.0, 2)


def test_spread_is_in_units_of_the_channel() -> None:
    """Means 1 apart at a standard deviation of 2; variances 3 and 5 at a mean of 4."""
    found = measure_spread(torch.tensor([[[0.0], [3.0]], [[1.0], [5.0]]]))
    assert found.mean == pytest.approx(0.5**0.5 / 2)
    assert found.variance == pytest.approx(2**0.5 / 4)


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_a_narrow_network_has_the_parameters_that_are_counted(norm: str) -> None:
    options = Resnet18Options(width=4, norm=norm)  # type: ignore[arg-type]
    model = Resnet18(norm == "batch", options.stages)
    assert sum(parameter.numel() for parameter in model.parameters()) == options.count_parameters()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
