"""A training loop with the smallest step that watching is measured on: `python small_step.py WIDTH`."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

BATCH = 16
LEAST_SECONDS = 1e-3


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
    )


def run_steps(model: nn.Module, inputs: torch.Tensor, num_steps: int) -> float:
    """Seconds per step of the processor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start = time.process_time()
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
    return (time.process_time() - start) / num_steps


def find_width() -> int:
    """The narrowest network whose step takes a millisecond here: its fastest, as the blocks in turns count it."""
    for width in range(96, 2048, 32):
        model, inputs = make_model(width), torch.randn(BATCH, width)
        run_steps(model, inputs, 5)
        if min(run_steps(model, inputs, 1) for _ in range(30)) >= LEAST_SECONDS:
            return width
    return 2048


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_steps(make_model(int(sys.argv[1])), torch.randn(BATCH, int(sys.argv[1])), 10**9)
