"""The linear rule beside a plan, and what makes the difference.

The rule (`analysis.extrapolation`) takes the throughput of a small model on one device and divides it by how many more
parameters the large one has. A plan for N devices differs from it by three factors, which multiply to the ratio of the
two times exactly:

    devices      N, where the rule has one
    operations   6 per parameter and token by the rule; a plan counts attention and the logits, and embeddings not
    speed        operations per second of one device: what the small model got, against what the plan expects after
                 recomputing, communication and pipelines, in its own data type on its own device
"""

from __future__ import annotations

from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.growth import Extrapolation, extrapolate_training
from scalelab.checks import check_positive
from scalelab.predict.planning import SECONDS_PER_DAY, Plan, Totals

RULE_OPERATIONS = 6
"""Per parameter and token, forward and backward (Kaplan et al. 2020)."""


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """A small model that somebody has measured on one device."""

    tokens_per_second: float
    num_parameters: float

    def __post_init__(self) -> None:
        check_positive("measured_rate", self.tokens_per_second)
        check_positive("measured_parameters", self.num_parameters)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The linear rule and a plan for the same training."""

    linear: Extrapolation
    """On one device."""
    devices: float
    operations: float
    """The rule's operations over the plan's."""
    speed: float
    """The plan's operations per second and device over the rule's."""

    @property
    def ratio(self) -> float:
        """The rule's time over the plan's."""
        return self.devices * self.operations * self.speed


def compare_linear(plan: Plan, totals: Totals, small: SmallRun, num_tokens: float) -> Difference:
    """How the plan's time comes from the rule's."""
    model = plan.job.model
    linear = extrapolate_training(
        Estimate(value=small.tokens_per_second),
        small.num_parameters,
        target_parameters=model.num_parameters,
        target_tokens=num_tokens,
    )
    by_rule = RULE_OPERATIONS * model.num_parameters
    counted = model.count_operations(1) / model.sequence
    seconds = totals.days.value * SECONDS_PER_DAY
    planned_speed = counted * num_tokens / seconds / plan.num_devices
    return Difference(
        linear=linear,
        devices=plan.num_devices,
        operations=by_rule / counted,
        speed=planned_speed / (RULE_OPERATIONS * small.num_parameters * small.tokens_per_second),
    )
