"""What strong and weak scaling share: which configurations to measure, and the numbers that answer them.

Two bases are measured, because they answer different questions. The plain loop (no process group) is what a user has
today. One rank under the strategy separates the cost of more ranks from the overhead of the strategy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.scaling_laws import AmdahlFit, GustafsonFit, UslFit, fit_amdahl, fit_gustafson, fit_usl
from scalelab.analysis.speedup import (
    ExposedCommunication,
    communication_by_ablation,
    communication_by_subtraction,
    estimate_scaled_speedup,
    estimate_speedup,
)
from scalelab.analysis.stats import Rounds, estimate_ratio
from scalelab.errors import UnknownName
from scalelab.records.observations import Instrument
from scalelab.records.strategies import PLAIN, STRATEGIES, find_strategy
from scalelab.records.trial import Trial, TrialResult
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.communication import list_methods
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling, plan_rounds


def plan_scaling(
    job: Job, sampling: Sampling, strategy: str, ranks: Sequence[int], batch_on: Callable[[int], int]
) -> list[Trial]:
    """The plain loop, its control, and the strategy on one rank and on each number of ranks."""
    if strategy not in STRATEGIES:
        raise UnknownName("strategy", strategy, STRATEGIES)
    names = ["single-1", "control"] if sampling.control else ["single-1"]
    configurations = [Configuration(name=name, strategy=PLAIN, num_ranks=1, global_batch=batch_on(1)) for name in names]
    configurations += [
        Configuration(
            name=f"{strategy}-{n}",
            strategy=strategy,
            num_ranks=n,
            global_batch=batch_on(n),
            instruments=choose_instruments(strategy, n),
        )
        for n in sorted({1, *ranks})
    ]
    return plan_rounds(job, sampling, configurations)


def choose_instruments(strategy: str, num_ranks: int) -> tuple[Instrument, ...]:
    """One rank and two show when gradients are ready, what predictions need; more than one what DDP counts."""
    wanted = {"gradients": num_ranks <= 2, "counters": num_ranks > 1}
    return tuple(name for name in find_strategy(strategy).instruments if wanted.get(name))


@dataclass(frozen=True, kw_only=True)
class ScalingAnswer:
    """The arms of a scaling study and the questions that can be asked of them."""

    arms: dict[str, Arm]
    strategy: str
    is_strong: bool

    @classmethod
    def from_results(
        cls, results: Sequence[TrialResult], strategy: str, forced_warmup: int | None, *, is_strong: bool
    ) -> ScalingAnswer:
        return cls(arms=group_arms(results, forced_warmup), strategy=strategy, is_strong=is_strong)

    @cached_property
    def plain(self) -> Arm | None:
        return self._measured("single-1")

    @cached_property
    def control(self) -> Arm | None:
        return self._measured("control")

    @cached_property
    def one_rank(self) -> Arm | None:
        return self._measured(f"{self.strategy}-1")

    @cached_property
    def spread(self) -> list[Arm]:
        """The strategy's arms that were measured, by number of ranks."""
        arms = [arm for arm in self.arms.values() if arm.trial.strategy == self.strategy and arm.is_measured]
        return sorted(arms, key=lambda arm: arm.trial.num_ranks)

    @cached_property
    def fair(self) -> list[Arm]:
        """Those whose ranks have cores of their own: the only ones that a law of scaling can be fitted to."""
        return [arm for arm in self.spread if not arm.trial.is_oversubscribed]

    @cached_property
    def largest(self) -> Arm | None:
        """The most ranks with cores of their own; None where only one rank was measured so."""
        return next((arm for arm in reversed(self.fair) if arm.trial.num_ranks > 1), None)

    @property
    def base(self) -> Arm | None:
        """What speedups refer to first: the plain loop, or one rank of the strategy when that failed."""
        return self.plain or self.one_rank

    def speedup(self, arm: Arm, base: Arm | None) -> Estimate | None:
        """Work per second over that of the base; under weak scaling the work grows with the ranks."""
        if base is None or arm is base or not arm.is_measured:
            return None
        if self.is_strong:
            return estimate_speedup(base.clean, arm.clean)
        return estimate_scaled_speedup(base.clean, arm.clean, arm.trial.num_ranks)

    def efficiency(self, arm: Arm, base: Arm | None) -> Estimate | None:
        speedup = self.speedup(arm, base)
        return None if speedup is None else speedup.map(lambda ratio: ratio / arm.trial.num_ranks)

    def exposed(self, arm: Arm) -> ExposedCommunication | None:
        """What a step saves without the gradient all-reduce; there is none without a process group."""
        if find_strategy(arm.trial.strategy).is_plain or not any(len(steps) for steps in arm.comm_free):
            return None
        return communication_by_ablation(arm.clean, arm.comm_free)

    def excess(self, arm: Arm) -> Estimate | None:
        """By how much a step is longer than the ideal: T_N − T_1/N, or T_N − T_1 under weak scaling."""
        if self.one_rank is None or arm.trial.num_ranks == 1 or find_strategy(arm.trial.strategy).is_plain:
            return None
        return communication_by_subtraction(
            self.one_rank.clean, arm.clean, arm.trial.num_ranks, is_weak=not self.is_strong
        )

    def list_methods(self, arm: Arm) -> dict[str, Estimate | None]:
        """Seconds of communication per step by every method; subtraction counts all that keeps ranks from the ideal."""
        return list_methods(arm) | {"subtraction": self.excess(arm)}

    @cached_property
    def control_ratio(self) -> Estimate | None:
        """The plain loop measured again, over itself: what is not 1 here is the machine."""
        if self.plain is None or self.control is None:
            return None
        return estimate_ratio(self.control.clean, self.plain.clean)

    @cached_property
    def amdahl(self) -> AmdahlFit | None:
        return fit_amdahl(self._times()) if self.is_strong else None

    @cached_property
    def gustafson(self) -> GustafsonFit | None:
        return None if self.is_strong else fit_gustafson(self._times())

    @cached_property
    def usl(self) -> UslFit | None:
        return fit_usl({arm.trial.num_ranks: _throughputs(arm) for arm in self.fair})

    def _times(self) -> dict[int, Rounds]:
        return {arm.trial.num_ranks: arm.clean for arm in self.fair}

    def _measured(self, configuration: str) -> Arm | None:
        arm = self.arms.get(configuration)
        return arm if arm is not None and arm.is_measured else None


def _throughputs(arm: Arm) -> Rounds:
    return [[arm.trial.global_batch / seconds for seconds in steps] for steps in arm.clean]
