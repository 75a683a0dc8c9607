"""How many steps at the start of a launch are slow because it is the start.

First steps allocate, compile, fill caches and meet the allocator's first requests: 3.5, 1.6, 1.2 and 1.1
times a steady step is what a small model on a CPU shows. How long that lasts is a property of the
configuration, so all its launches are read together: the median over launches of the first step, of the
second, and so on.

The last third of that series is taken as steady. A step is slow when it lies above the steady median by
more than the noise (1.5 robust standard deviations, from the median absolute deviation) and by more than
10 %. The warm-up is the prefix with the highest score, where a slow step counts +1 and any other −2: Page's
(1954) cumulative sum run from the start. So one fast step inside a long warm-up does not end it, and a
later spike never extends it: it would have to make up for every steady step before it.

Simulated with the noise of the tests, for warm-ups of 0 to 20 steps of 30 or 45 that are 1.3 times as slow
or slower: 8 launches find the length to one step in 99 of 100 cases, a single launch in 93 of 100.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelab.analysis.rounds import Floats, Rounds

NOISE_DEVIATIONS = 1.5
"""How many robust standard deviations above the steady median a slow step lies."""

SMALLEST_SLOWDOWN = 0.1
"""And by which share of the steady median at least."""

PENALTY = 2.0
"""What a step that is not slow takes from the score of a prefix; a slow one adds 1."""

MAD_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution in median absolute deviations (Rousseeuw & Croux 1993)."""


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """The slow beginning of a configuration's launches."""

    num_steps: int
    """How many leading steps are slow."""
    is_settled: bool
    """Whether at least half of the steps came after it; if not, run more steps."""


def find_warmup(rounds: Rounds) -> Warmup:
    """The number of leading slow steps, given every step of each launch from its first on."""
    series = find_step_medians(rounds)
    if not len(series):
        return Warmup(num_steps=0, is_settled=False)
    steady = series[-max(len(series) // 3, 1) :]
    centre = float(np.median(steady))
    noise = MAD_TO_DEVIATION * float(np.median(np.abs(steady - centre)))
    is_slow = series > centre + max(NOISE_DEVIATIONS * noise, SMALLEST_SLOWDOWN * centre)
    scores = np.concatenate([[0.0], np.cumsum(np.where(is_slow, 1.0, -PENALTY))])
    num_steps = int(np.argmax(scores))
    return Warmup(num_steps=num_steps, is_settled=num_steps <= len(series) / 2)


def find_step_medians(rounds: Rounds) -> Floats:
    """The median over launches of the first step, the second, …, as far as every launch got."""
    launches = [steps for steps in rounds if len(steps)]
    if not launches:
        return np.empty(0)
    length = min(len(steps) for steps in launches)
    medians: Floats = np.median(np.array([steps[:length] for steps in launches], dtype=np.float64), axis=0)
    return medians
