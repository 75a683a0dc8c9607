"""Do the strategies train the same thing? Their losses, step by step, against the reference's.

Strategies take the same batches from the same weights, so that losses are equal up to the order in which numbers are
added. Steps are matched by their place in the training: other kinds of steps may run between them. After steps without
communication batches have moved on differently, and nothing is compared from there on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from scalelab.report.document import Column, Table, make_row
from scalelab.studies.arms import Arm
from scalelab.trial import StepKind, TrialResult

SAME = 1e-3
SAME_IN_16_BITS = 5e-2
"""Relative differences up to here are what another order of adding gives after some dozen steps."""


@dataclass(frozen=True, kw_only=True)
class LossPath:
    """The losses of one configuration that can be compared, in the order of the training."""

    losses: tuple[float, ...]

    def find_difference(self, reference: LossPath) -> float | None:
        """The largest difference of a step, relative to the reference; None where there is no common finite one."""
        pairs = zip(self.losses, reference.losses, strict=False)
        known = [(ours, theirs) for ours, theirs in pairs if math.isfinite(ours) and math.isfinite(theirs)]
        return max((abs(ours - theirs) / (abs(theirs) or 1.0) for ours, theirs in known), default=None)


def read_losses(arm: Arm) -> LossPath:
    """Of the first round that completed: all rounds train the same, or are warned of."""
    return LossPath(losses=tuple(_list_losses(arm.completed[0])) if arm.completed else ())


def _list_losses(result: TrialResult) -> list[float]:
    first = min((sample.step for sample in result.samples if sample.kind is StepKind.COMM_FREE), default=math.inf)
    return [loss for _, loss in takewhile(lambda entry: entry[0] < first, result.losses().items())]


def make_loss_table(arms: Sequence[Arm], reference: Arm | None) -> Table:
    """First and last loss of every strategy, and how far any step is from the reference's."""
    columns = (
        Column(key="run", header="run", align="left"),
        Column(key="first_loss", header="first loss", quantity="loss"),
        Column(key="last_loss", header="last loss", quantity="loss"),
        Column(key="largest_difference", header="largest difference", quantity="share"),
    )
    base = read_losses(reference) if reference is not None and reference.is_measured else None
    rows = []
    for arm in arms:
        path = read_losses(arm)
        first, last = (path.losses[0], path.losses[-1]) if path.losses else (None, None)
        difference = path.find_difference(base) if base is not None and arm is not reference else None
        rows.append(make_row(arm.label, first, last, difference))
    return Table(columns=columns, rows=tuple(rows), notes=("differences are relative to the first row's losses",))


def describe_losses(arms: Sequence[Arm], reference: Arm) -> str | None:
    """Whether all strategies trained the same thing."""
    base = read_losses(reference)
    found = [(read_losses(arm).find_difference(base), arm.label) for arm in arms if arm is not reference]
    known = [(difference, label) for difference, label in found if difference is not None]
    if not known:
        return None
    largest, label = max(known)
    if largest == 0:
        return f"All strategies had the very same losses as the {reference.label}."
    size = f"at most {largest:.1e} of the loss, {label}"
    if largest <= (SAME_IN_16_BITS if reference.trial.dtype in ("bfloat16", "float16") else SAME):
        return f"All strategies trained the same: losses differ by {size}, as adding in another order does."
    return (
        f"The strategies did not train the same: losses differ by {size}. Dropout draws other masks on every rank, and"
        " batch norm looks at a rank's own samples; without either, something is wrong."
    )
