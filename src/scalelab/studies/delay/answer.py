"""Delay: what a fixed time in every step does to the speedup.

A delay that every rank sits out is a serial part: more ranks do not shorten it. Amdahl's law predicts its effect,
S_N(d) = (T₁ + d) / (T_N + d), and the study compares that with the measurement (`analysis/speedup.py`): once with
the measured T_N, which asks only whether the delay adds up, and once with T_N = T₁ / N, which also assumes that
everything else scales perfectly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import compare_with_model, estimate_model, estimate_speedup, predict_speedup
from scalelab.analysis.stats import estimate_difference
from scalelab.studies.shared import sweep
from scalelab.studies.shared.arms import Arm


def format_delay(seconds: float) -> str:
    """A delay as a person would type it: it was given, not measured, and has no digits of its own."""
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


def name_label(strategy: str, num_ranks: int, delay_seconds: float) -> str:
    """What tables call it."""
    return f"{strategy} × {num_ranks}{f' + {format_delay(delay_seconds)}' if delay_seconds else ''}"


def name_row(strategy: str, num_ranks: int, delay_seconds: float) -> str:
    """The configuration's name, without a character that a directory could not have."""
    return f"{strategy}-{num_ranks}{f'-{delay_seconds * 1e6:.0f}us' if delay_seconds else ''}"


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """A measured speedup beside what the law says of it."""

    num_ranks: int
    delay_seconds: float
    measured: Estimate
    calibrated: Estimate | None
    """(T₁ + d) / (T_N + d)."""
    ideal: Estimate | None
    """(T₁ + d) / (T₁/N + d)."""
    over_calibrated: Estimate | None
    """Measured over the model's, round by round."""
    over_ideal: Estimate | None


@dataclass(frozen=True, kw_only=True)
class DelayAnswer:
    """The arms of the study by number of ranks and delay."""

    arms: Mapping[str, Arm]
    strategy: str
    delays: tuple[float, ...]
    ranks: tuple[int, ...]

    def find(self, num_ranks: int, delay_seconds: float) -> Arm | None:
        """The arm, if it was measured."""
        arm = self.arms.get(name_row(self.strategy, num_ranks, delay_seconds))
        return arm if arm is not None and arm.is_measured else None

    def base_of(self, arm: Arm) -> Arm | None:
        """One rank with the same delay."""
        return self.find(1, arm.trial.perturbation.seconds)

    def speedup(self, arm: Arm) -> Estimate | float | None:
        return sweep.measure_speedup(arm, self.base_of(arm))

    def efficiency(self, arm: Arm) -> Estimate | float | None:
        return sweep.divide_by_ranks(self.speedup(arm), arm)

    def added(self, arm: Arm) -> Estimate | None:
        """By how much a step is longer than without the delay."""
        undelayed = self.find(arm.trial.num_ranks, 0.0)
        if undelayed is None or not arm.trial.perturbation.seconds:
            return None
        return estimate_difference(arm.clean, undelayed.clean)

    def overlays(self) -> Iterator[Overlay]:
        """Every delay on every number of ranks above one that has all that its model needs."""
        for delay in self.delays:
            for num_ranks in self.ranks:
                found = self._overlay(num_ranks, delay) if num_ranks > 1 else None
                if found is not None:
                    yield found

    def _overlay(self, num_ranks: int, delay: float) -> Overlay | None:
        one, many = self.find(1, 0.0), self.find(num_ranks, 0.0)
        delayed_one, delayed_many = self.find(1, delay), self.find(num_ranks, delay)
        if delayed_one is None or delayed_many is None:
            return None
        measured = [delayed_one.clean, delayed_many.clean]
        ideal = one and [one.clean]
        both = one and many and delay and [one.clean, many.clean]

        def predict_ideal(times: Sequence[float]) -> float:
            return predict_speedup(times[0], times[0] / num_ranks, delay)

        def predict_calibrated(times: Sequence[float]) -> float:
            return predict_speedup(times[0], times[1], delay)

        return Overlay(
            num_ranks=num_ranks,
            delay_seconds=delay,
            measured=estimate_speedup(delayed_one.clean, delayed_many.clean),
            calibrated=estimate_model(both, predict_calibrated) if both else None,
            ideal=Estimate(value=num_ranks) if not delay else estimate_model(ideal, predict_ideal) if ideal else None,
            over_calibrated=compare_with_model(measured, divide, both, predict_calibrated) if both else None,
            over_ideal=compare_with_model(measured, divide, ideal, predict_ideal) if ideal else None,
        )


def divide(times: Sequence[float]) -> float:
    """The measured speedup of one round: one rank's step over that of many."""
    return times[0] / times[1]
