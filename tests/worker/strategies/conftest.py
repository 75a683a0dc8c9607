"""torch loads its compiler with the first optimizer and sets a variable for it: that is done before tests watch."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _load_optimizers() -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).zero_grad()
