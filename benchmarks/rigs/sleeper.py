"""A training whose computing is sleep and whose communication is real.

Ranks that sleep do not need cores: eight of them run honestly on a laptop with two, and what a step takes longer on
more ranks is communication alone. That is how predictions are checked:

    scalelab run weak-scaling --workload benchmarks/rigs/sleeper.py:build --ranks 1 2 4 8

Every layer has weights that get a gradient and are sent, and sleeps for a fixed time and a time per sample, in forward
and twice as long in backward. Nothing is learnt, and the optimizer only sleeps.
"""

import time

import torch
from torch import nn


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, activations, weights, seconds):
        context.seconds, context.weights = seconds, weights
        time.sleep(seconds)
        return activations.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.seconds)
        return gradient.clone(), torch.zeros_like(context.weights), None


class SleepingLayer(nn.Module):
    def __init__(self, num_numbers, fixed_seconds, sample_seconds):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_numbers))
        self.fixed_seconds, self.sample_seconds = fixed_seconds, sample_seconds

    def forward(self, activations):
        return Sleep.apply(activations, self.weights, self.fixed_seconds + len(activations) * self.sample_seconds)


class SleepingOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters, seconds):
        super().__init__(parameters, {"lr": 0.0})
        self.seconds = seconds

    def step(self, _closure=None):
        time.sleep(self.seconds)


def build(
    batch_size,
    layers: int = 8,
    layer_mb: float = 2.0,
    fixed_ms: float = 1.0,
    sample_ms: float = 0.5,
    optimizer_ms: float = 2.0,
):
    """LAYERS layers of LAYER_MB each."""
    numbers = max(1, round(layer_mb * 1e6 / 4))
    model = nn.Sequential(*(SleepingLayer(numbers, fixed_ms / 1e3, sample_ms / 1e3) for _ in range(layers)))
    batches = [torch.zeros(batch_size, 1, requires_grad=True)]
    return model, batches, lambda model, batch: model(batch).sum(), lambda p: SleepingOptimizer(p, optimizer_ms / 1e3)
