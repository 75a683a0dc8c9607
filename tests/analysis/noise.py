"""Step times as a shared two-core machine gives them, for simulations.

The log of a step time is a sum: what was asked for, a slow wander that launches close in time share, a
shift of the launch's own, and the noise of the step, right-skewed and with spikes. The defaults reproduce
what was measured with a small model on such a machine: robust spread of 6.5 % within a launch, 95th
percentile at 1.2 times the median, medians of 20 steps that vary by 3 % between launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SKEW = 1.8
"""How many times wider the slow side of a step's noise is than its fast side."""


def simulate_rounds(
    rng: np.random.Generator,
    median: float,
    num_rounds: int = 12,
    num_steps: int = 20,
    *,
    within: float = 0.065,
    between: float = 0.015,
    spike_share: float = 0.08,
    spike_scale: float = 0.25,
    drift: Floats | None = None,
) -> list[list[float]]:
    """The steps of several launches of a configuration; `drift` is shared by all configurations."""
    shape = (num_rounds, num_steps)
    normal = rng.standard_normal(shape)
    noise = np.where(normal > 0, SKEW, 1.0) * normal * within * 2 / (1 + SKEW)
    spikes = (normal > 0) & (rng.random(shape) < 2 * spike_share)
    noise += spikes * rng.exponential(spike_scale, shape)
    noise += between * rng.standard_normal((num_rounds, 1))
    if drift is not None:
        noise += drift[:, np.newaxis]
    times: list[list[float]] = (median * np.exp(noise)).tolist()
    return times


def simulate_drift(
    rng: np.random.Generator, num_rounds: int = 12, *, spread: float = 0.02, memory: float = 0.8
) -> Floats:
    """A wander of the machine's speed from round to round, in logs: a first-order autoregression."""
    drift = np.empty(num_rounds)
    drift[0] = rng.normal(0, spread)
    for index in range(1, num_rounds):
        drift[index] = memory * drift[index - 1] + np.sqrt(1 - memory**2) * rng.normal(0, spread)
    return drift


def find_true_median(rng: np.random.Generator, *, within: float = 0.065, between: float = 0.015) -> float:
    """The median of all steps of endlessly many launches of a configuration of median 1.

    Not quite 1: a symmetric shift of a skewed noise moves its median.
    """
    return float(np.median(simulate_rounds(rng, 1.0, 20_000, 20, within=within, between=between)))


def simulate_pair(
    rng: np.random.Generator, ratio: float, num_rounds: int = 12, num_steps: int = 20
) -> tuple[list[list[float]], list[list[float]]]:
    """Two configurations of medians `ratio` and 1, launched side by side under the same drift."""
    drift = simulate_drift(rng, num_rounds)
    return (
        simulate_rounds(rng, ratio, num_rounds, num_steps, drift=drift),
        simulate_rounds(rng, 1.0, num_rounds, num_steps, drift=drift),
    )


def simulate_sizes(
    rng: np.random.Generator, law: Callable[[int], float], sizes: Iterable[int], num_rounds: int = 12
) -> dict[int, list[list[float]]]:
    """One configuration per size, its median given by a law, launched side by side under the same drift."""
    drift = simulate_drift(rng, num_rounds)
    return {size: simulate_rounds(rng, law(size), num_rounds, drift=drift) for size in sizes}
