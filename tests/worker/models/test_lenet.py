"""LeNet: its layers and which of them have a bias."""

from __future__ import annotations

import pytest
import torch

from scalelab.worker.models.networks import Lenet
from tests.worker.models.built import build, compute_loss


@pytest.mark.parametrize(
    ("bias", "expected"),
    [("none", []), ("last", ["fc3"]), ("all", ["conv1", "conv2", "fc1", "fc2", "fc3"])],
)
def test_only_the_layers_that_are_asked_for_have_a_bias(bias: str, expected: list[str]) -> None:
    names = [name.removesuffix(".bias") for name, _ in Lenet(bias).named_parameters() if name.endswith(".bias")]
    assert names == expected


def test_it_gives_ten_logits() -> None:
    assert Lenet()(torch.zeros(3, 3, 32, 32)).shape == (3, 10)


def test_it_learns_its_batch() -> None:
    torch.manual_seed(0)
    workload = build("lenet", {}, batch_size=8)
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=0.01)
    batch = next(iter(workload.batches))
    for _ in range(40):
        loss = compute_loss(workload, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
