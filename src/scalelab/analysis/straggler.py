"""Which rank is slow, in which phase, and by how much: from the times alone.

What is compared is each rank's own time in a phase: waiting for others is taken off, or a slow rank would make all the
others look as slow in the phase in which they wait for it; and so is the time in which its core was given to other
programs (`breakdown.py` has both).

    other          the rank that ranks are compared with: of all but the one looked at, the lower median by own time;
                   so two slow ranks of four, or of three, are both seen. Of two ranks it is simply the other one
    excess         lower quartile of the rank's own times in a launch, less that of the other
    over rounds    their Hodges–Lehmann centre with its interval (`location.py`)

The lower quartile, because what disturbs a step only ever makes it longer: a delay that is in every step moves the
quartile as it moves the median, and a machine that others use moves it far less. The price: a rank that is late in
fewer than three steps of four is not called slow here. Its lateness shows as waiting of the others.

A rank is called slow where the interval excludes zero and the excess is at least `SMALLEST_EXCESS` of the step: of the
step as it would be without stalls, the slowest rank's own time and the exposed exchange (`find_quiet_step`). On a quiet
machine that is the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.breakdown import LaunchSteps
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import FEWEST_STEPS, Floats, estimate_location, estimate_median
from scalelab.records.trial import PHASES

SMALLEST_EXCESS = 0.03
"""A smaller share of the step is what two cores of one machine may differ by."""

QUARTILE = 0.25


@dataclass(frozen=True, kw_only=True)
class Excess:
    """By how much one rank's own time in a phase is longer than another's."""

    rank: int
    other: int
    """The rank that it is compared with."""
    phase: str
    seconds: Estimate
    share: Estimate
    """Of the step without stalls."""

    @property
    def is_alarm(self) -> bool:
        return self.seconds.low is not None and self.seconds.low > 0 and self.share.value >= SMALLEST_EXCESS


def find_quiet_step(launches: Sequence[LaunchSteps]) -> float:
    """The step without stalls: the slowest rank's own time, and what is exposed of the exchange after it.

    The lower quartile of a launch, the median over launches. Without the moment of the last gradient it is the step.
    """
    quiet = []
    for launch in launches:
        steps = launch.step.max(axis=1)
        if launch.parts is not None:
            own = launch.parts["input"] + launch.parts["compute"]
            steps = own.max(axis=1) + launch.parts["exposed"].min(axis=1)
        quiet.append(np.quantile(steps, QUARTILE))
    return float(np.median(quiet))


def find_excesses(launches: Sequence[LaunchSteps]) -> list[Excess]:
    """Every rank in every phase whose own time is known, the largest excess first; nothing for one rank."""
    if not launches or launches[0].start.shape[1] < 2:
        return []
    step_seconds = find_quiet_step(launches)
    phases = [phase for phase in PHASES if all(phase in launch.own for launch in launches)]
    found = [
        _compare(launches, phase, rank, step_seconds) for phase in phases for rank in range(launches[0].start.shape[1])
    ]
    return sorted(found, key=lambda excess: -excess.seconds.value)


def find_slow_ranks(excesses: Sequence[Excess]) -> list[Excess]:
    """The excesses that are certain and large enough, the largest first."""
    return [excess for excess in excesses if excess.is_alarm]


def _compare(launches: Sequence[LaunchSteps], phase: str, rank: int, step_seconds: float) -> Excess:
    own = [launch.own[phase] for launch in launches]
    levels = np.array([np.quantile(times, QUARTILE, axis=0) for times in own])
    other = _choose_other(np.median(levels, axis=0), rank)
    seconds = _estimate_excess(own, levels, rank, other)
    return Excess(
        rank=rank,
        other=other,
        phase=phase,
        seconds=seconds,
        share=seconds.map(lambda value: value / step_seconds),
    )


def _choose_other(levels: Floats, rank: int) -> int:
    """The lower median of the other ranks."""
    others = sorted((float(level), number) for number, level in enumerate(levels) if number != rank)
    return others[(len(others) - 1) // 2][1]


def _estimate_excess(own: Sequence[Floats], levels: Floats, rank: int, other: int) -> Estimate:
    """Over rounds; of a single launch, from how its steps differ one by one, which cannot see how launches differ."""
    if len(own) > 1:
        return estimate_location(levels[:, rank] - levels[:, other])
    differences = own[0][:, rank] - own[0][:, other]
    value = float(levels[0, rank] - levels[0, other])
    if len(differences) < FEWEST_STEPS:
        return Estimate(value=value)
    middle = estimate_median([list(differences)])
    return middle.map(lambda end: end - middle.value + value)
