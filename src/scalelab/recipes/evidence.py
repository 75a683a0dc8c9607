"""What findings of recipes are drawn from: measured arms, sums over trainings, tables beside the published ones.

Absolute times belong to a machine. What can be compared with a published number is a ratio, a share or an order, and
only that gets a quotient; times and bytes stand beside the published ones, and are divided by them in full size only.
A published figure is a text: it has the digits and the unit that it was printed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_ratio
from scalelab.recipes.recipe import Outcome, Size
from scalelab.records.trial import Option, Status, StepKind, TrialResult
from scalelab.report.document import Column, Table, make_row
from scalelab.report.tables import INTERVAL_NOTE
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.sweep import CONTROL
from scalelab.units import Quantity, format_quantity

OTHER_MACHINE = "published: of another machine and another size, so that only ratios and orders can be compared"
WITHOUT_UNIT: tuple[Quantity, ...] = ("ratio", "share", "accuracy")


def list_arms(outcome: Outcome | None) -> list[Arm]:
    """The arms that were measured, without the control."""
    arms = outcome.arms.values() if outcome else ()
    return [arm for arm in arms if arm.configuration != CONTROL and arm.is_measured]


def find_arm(outcome: Outcome | None, options: Mapping[str, Option] | None = None, **fields: object) -> Arm | None:
    """The first measured arm whose trial has these fields and options."""
    for arm in list_arms(outcome):
        is_wanted = all(getattr(arm.trial, name) == value for name, value in fields.items())
        if is_wanted and all(arm.trial.options.get(name) == value for name, value in (options or {}).items()):
            return arm
    return None


def divide_steps(numerator: Arm | None, denominator: Arm | None) -> Estimate | None:
    """The step time of one over that of the other, round by round; None where either is missing."""
    if numerator is None or denominator is None:
        return None
    return estimate_ratio(numerator.clean, denominator.clean)


def scale(estimate: Estimate | None, factor: float) -> Estimate | None:
    return None if estimate is None else estimate.map(lambda value: value * factor)


def find_completed(outcome: Outcome | None) -> TrialResult | None:
    """The first result that completed."""
    found = (result for result in outcome.results if result.status is Status.COMPLETED) if outcome else iter(())
    return next(found, None)


def sum_training(outcome: Outcome | None) -> float | None:
    """The time of all steps of a training, the slowest rank's, profiled ones included."""
    result = find_completed(outcome)
    if result is None:
        return None
    kinds = (StepKind.CLEAN, StepKind.PROFILED)
    return sum(seconds for kind in kinds for seconds in result.step_seconds(kind).values())


def list_losses(outcome: Outcome | None) -> list[float]:
    """The losses of a training, step by step."""
    result = find_completed(outcome)
    return [] if result is None else list(result.losses().values())


def quote(outcome: Outcome | None) -> tuple[str, ...]:
    """What a study says itself."""
    return outcome.document.summary if outcome and outcome.document else ()


class Compared(NamedTuple):
    """One line of a comparison."""

    what: str
    ours: Estimate | float | None
    published: float | None
    printed: str = ""
    """The published figure as it was printed, with its unit; empty: it is derived from such figures."""


def make_beside_table(
    quantity: Quantity,
    lines: Iterable[Compared],
    *,
    title: str,
    size: Size,
    notes: tuple[str, ...] = (),
    is_ratio: bool = False,
) -> Table | None:
    """Ours beside the published; None where there is nothing of ours. `is_ratio`: the number belongs to no machine."""
    listed = list(lines)
    if all(line.ours is None for line in listed):
        return None
    is_comparable = is_ratio or quantity in WITHOUT_UNIT or size == "full"
    columns = (
        Column(key="what", header="what", align="left"),
        Column(key="ours", header="ours", quantity=quantity),
        Column(key="published", header="published"),
        *((Column(key="quotient", header="ours / published", quantity="ratio"),) if is_comparable else ()),
    )
    rows = []
    for line in listed:
        quotient = (_divide(line.ours, line.published),) if is_comparable else ()
        there = None if line.published is None else line.printed or say(quantity, line.published)
        rows.append(make_row(line.what, line.ours, there, *quotient))
    has_interval = any(isinstance(line.ours, Estimate) and line.ours.low is not None for line in listed)
    explained = (*((INTERVAL_NOTE,) if has_interval else ()), *notes)
    return Table(title=title, columns=columns, rows=tuple(rows), notes=explained)


def _divide(ours: Estimate | float | None, published: float | None) -> Estimate | float | None:
    if ours is None or not published:
        return None
    if isinstance(ours, Estimate):
        return ours.map(lambda value: value / published)
    return ours / published


def keep_tables(*tables: Table | None) -> tuple[Table, ...]:
    return tuple(table for table in tables if table is not None)


def say(quantity: Quantity, value: Estimate | float | None) -> str:
    """A number in a sentence."""
    return format_quantity(quantity, value)
