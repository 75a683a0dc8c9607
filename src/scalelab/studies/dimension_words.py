"""The dimensions of a training in words with numbers: what grows, how fast, and what does not run at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, judge
from scalelab.studies.arms import Arm
from scalelab.studies.dimension_growth import Growth
from scalelab.studies.sweep import CONTROL, compare_steps
from scalelab.trial import Status
from scalelab.units import format_interval, format_quantity

IN_PROPORTION = 0.05
"""An exponent that surely lies within 1 ± this is called growth in proportion."""


def summarise_dimensions(arms: Mapping[str, Arm], base: Arm | None, growths: Sequence[Growth]) -> tuple[str, ...]:
    """The findings, the main one first."""
    ordered = sorted(growths, key=lambda growth: -growth.fit.exponent.value)
    rows = [arm for arm in arms.values() if arm is not base and arm.configuration != CONTROL]
    return (
        *(_describe_growth(growth) for growth in ordered),
        *_describe_extremes(rows, base),
        *describe_failures(rows),
    )


def _describe_growth(growth: Growth) -> str:
    fit = growth.fit
    expected = ""
    if growth.operations_exponent is not None:
        expected = f"; its operations grow with the power {format_quantity('ratio', growth.operations_exponent)}"
    return (
        f"From {growth.variation.label} = {fit.smallest:g} to {fit.largest:g} the step grows"
        f" {_judge_growth(fit.exponent)}, with the power {format_quantity('ratio', fit.exponent)}{expected}."
    )


def _judge_growth(exponent: Estimate) -> str:
    low, high = exponent.low, exponent.high
    if low is None or high is None:
        return "(measured too rarely to say how surely)"
    if high < 0:
        return "not at all but falls"
    if low <= 0:
        return "hardly, if at all"
    if low > 1 - IN_PROPORTION and high < 1 + IN_PROPORTION:
        return "in proportion"
    if high < 1:
        return "less than in proportion"
    return "more than in proportion" if low > 1 else "about in proportion"


def _describe_extremes(rows: Sequence[Arm], base: Arm | None) -> Iterator[str]:
    """The row that costs most and what it costs."""
    ratios = [(arm, compare_steps(arm, base)) for arm in rows]
    known = [(arm, ratio) for arm, ratio in ratios if isinstance(ratio, Estimate)]
    if not known:
        return
    arm, ratio = max(known, key=lambda pair: pair[1].value)
    if judge(ratio) is Verdict.SLOWER:
        yield f"The slowest row, {arm.label}, takes {format_interval('ratio', ratio)} times the step of the base."
    alike = [arm.label for arm, ratio in known if judge(ratio) is Verdict.NO_DIFFERENCE]
    if alike:
        yield f"No difference in the step against the base: {', '.join(alike)}."


def describe_failures(rows: Sequence[Arm]) -> Iterator[str]:
    """What did not run and why; rows that failed alike share a sentence."""
    alike: dict[tuple[Status, str], list[str]] = {}
    for arm in rows:
        if not arm.is_measured and arm.failure is not None:
            alike.setdefault((arm.failure.status, arm.failure.reason), []).append(arm.label)
    for (status, reason), labels in alike.items():
        memory = "; that is no lack of memory" if status is Status.INVALID else ""
        yield f"{', '.join(labels)} did not run, {status.words}: {reason}{memory}."
