"""What launches of the same thing say about measuring: first steps, ways to time, spread between launches."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.repeatability import count_launches, estimate_spread, predict_one_more
from scalelab.analysis.rounds import Rounds
from scalelab.analysis.stats import estimate_median, estimate_ratio
from scalelab.analysis.warmup import Warmup
from scalelab.studies.arms import Arm
from scalelab.studies.losses import find_first_difference
from scalelab.trial import StepKind, TrialResult

TEN = 10
"""Steps of the mean that is usually taken."""
PRECISIONS = (0.01, 0.02, 0.05)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to time a step."""

    label: str
    step: Estimate
    """With where one more measurement of the kind would fall; of the last way, with its confidence interval."""


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """All launches with the first seed: the row itself and its control."""

    launches: Rounds
    """Clean steps from the very first on, one launch after the other."""
    dropped: int
    warmup: Warmup
    """As the steps of all rows show it."""
    unequal_step: int | None
    """The first step whose loss is not the same in all launches; None: there is none."""
    num_steps: int
    """Steps of a launch whose losses were compared."""

    @classmethod
    def from_arms(cls, arms: Iterable[Arm], seed: int, dropped: int) -> Repeats:
        same = [arm for arm in arms if arm.trial.seed == seed]
        results = [result for arm in same for result in arm.completed]
        series = [list(result.step_seconds(StepKind.CLEAN).values()) for result in results]
        launches = [steps for steps in series if len(steps) > dropped]
        return cls(
            launches=launches,
            dropped=dropped,
            warmup=Warmup(
                num_steps=max((arm.num_dropped for arm in same), default=0),
                is_settled=all(arm.warmup.is_settled for arm in same),
            ),
            unequal_step=find_unequal_step(results),
            num_steps=min((len(result.losses()) for result in results), default=0),
        )

    @property
    def rest(self) -> Rounds:
        return [steps[self.dropped :] for steps in self.launches]

    @property
    def settled(self) -> Rounds:
        """What is left when the warm-up is taken off as it was found; everything, where nothing settled."""
        cut = self.warmup.num_steps if self.warmup.is_settled else 0
        return [steps[cut:] for steps in self.launches]

    @property
    def medians(self) -> list[float]:
        """One per launch, of its settled steps."""
        return [statistics.median(steps) for steps in self.settled]

    def compare_step(self, number: int) -> Estimate:
        """One of the first steps over the median of the rest of its launch."""
        return estimate_ratio([[steps[number]] for steps in self.launches], self.rest)

    @property
    def first_ratio(self) -> Estimate:
        """The first steps over the rest: the ratio of their medians, launch by launch."""
        return estimate_ratio([steps[: self.dropped] for steps in self.launches], self.rest)

    @property
    def mean_ratio(self) -> Estimate:
        """The mean of all steps over the mean without the first ones, launch by launch."""
        whole = [[statistics.fmean(steps)] for steps in self.launches]
        return estimate_ratio(whole, [[statistics.fmean(steps)] for steps in self.rest])

    @property
    def ways(self) -> list[Way]:
        """The usual ways to time a step, each as if it had been done in one launch, and ours over all of them."""
        ten = [statistics.fmean(steps[:TEN]) for steps in self.settled if len(steps) >= TEN]
        first_ten = [statistics.fmean(steps[:TEN]) for steps in self.launches if len(steps) >= TEN]
        found = [("mean of all steps", [statistics.fmean(steps) for steps in self.launches])]
        found.append((f"mean without the first {self.dropped}", [statistics.fmean(steps) for steps in self.rest]))
        found.append((f"mean of the first {TEN} steps", first_ten))
        found.append((f"mean of {TEN} settled steps", ten))
        found.append(("median of settled steps", self.medians))
        ways = [Way(label=label, step=predict_one_more(values)) for label, values in found if values]
        whole = f"median of {len(self.launches)} launches"
        return [*ways, Way(label=whole, step=estimate_median(self.settled))]

    @property
    def spread(self) -> Estimate | None:
        """The relative standard deviation of launches' medians; None for a single launch."""
        return estimate_spread(self.medians)

    def count_launches(self, precision: float) -> tuple[int | None, int | None, int | None]:
        """Launches that a precision takes: by the spread as measured, at its lower and at its upper limit."""
        spread = self.spread
        if spread is None or spread.low is None or spread.high is None:
            return None, None, None
        expected, least, most = (count_launches(s, precision) for s in (spread.value, spread.low, spread.high))
        return expected, least, most


def find_unequal_step(results: Sequence[TrialResult]) -> int | None:
    """The first step whose loss differs between any of the results and the first of them; None: none does."""
    losses = [result.losses() for result in results]
    steps = [find_first_difference(other, losses[0]) for other in losses[1:]]
    return min((step for step in steps if step is not None), default=None)
