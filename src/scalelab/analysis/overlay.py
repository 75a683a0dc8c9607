"""A model's curve laid over a measurement: how far apart they are, round by round.

A delay d in every step is a serial part that no rank can take off another. With it Amdahl's law (1967) reads

    T_N(d) = T_N + d                      the step on N ranks
    S_N(d) = (T₁ + d) / (T_N + d)         its speedup over one rank with the same delay
    S_N(d) = (T₁ + d) / (T₁/N + d)        the same where all but the delay scales perfectly

The second is calibrated with the measured T_N and asks one question only: does the delay add up? The third also
believes in T_N = T₁/N. Both are computed from the rounds' own undelayed steps, so that a machine that drifts moves
model and measurement alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.location import estimate_location
from scalelab.analysis.rounds import Rounds, pair_medians

Predict = Callable[[Sequence[float]], float]
"""A model: from the medians of one round, in the order of the inputs, to the predicted number."""


def add_delay(rounds: Rounds, delay_seconds: float) -> list[list[float]]:
    """Every step with the delay added: what the model says of a step."""
    return [[seconds + delay_seconds for seconds in steps] for steps in rounds]


def predict_speedup(one_rank_seconds: float, seconds: float, delay_seconds: float) -> float:
    """(T₁ + d) / (T + d): Amdahl's law with the delay as a serial part, T being T_N or T₁/N."""
    return (one_rank_seconds + delay_seconds) / (seconds + delay_seconds)


def estimate_model(inputs: Sequence[Rounds], predict: Predict) -> Estimate | None:
    """What the model says, from each round's own inputs; None where no round has all of them."""
    medians = pair_medians(inputs)
    if not medians.shape[1]:
        return None
    logs = np.log([predict(column) for column in medians.T])
    return estimate_location(logs).map(lambda log: float(np.exp(log)))


def compare_with_model(
    measured: Sequence[Rounds], measure: Predict, inputs: Sequence[Rounds], predict: Predict
) -> Estimate | None:
    """The measured number over the model's, round by round; None where no round has all that both need."""
    medians = pair_medians([*measured, *inputs])
    if not medians.shape[1]:
        return None
    split = len(measured)
    logs = np.log([measure(column[:split]) / predict(column[split:]) for column in medians.T])
    return estimate_location(logs).map(lambda log: float(np.exp(log)))
