"""Losses of two configurations side by side: do they train the same thing? And charts of losses and accuracies by step.

All rounds of a configuration train from the same seed on the same batches, so the losses of its first completed round
stand for all of them; rounds that differ are a warning of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scalelab.records.observations import CurvePoint
from scalelab.records.trial import TrialResult
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.column_charts import plot_curves
from scalelab.report.document import Chart
from scalelab.report.findings import DETAIL, FindingKind
from scalelab.studies.shared.arms import Arm, join_words
from scalelab.units import format_count

LOSSES_EQUAL = FindingKind(
    "losses-equal",
    "Whether losses match the reference's (data types: within a tolerance; seeds: bit by bit)",
    DETAIL,
    ("is_equal", "difference", "first_step"),
)
Losses = dict[int, float]
"""By step number."""


def read_losses(arm: Arm | None) -> Losses:
    """Of the first round that completed."""
    return arm.completed[0].losses() if arm is not None and arm.completed else {}


def read_last_loss(losses: Losses) -> float | None:
    """Of the last step; None if it is not finite."""
    last = losses[max(losses)] if losses else math.nan
    return last if math.isfinite(last) else None


def compare_last_losses(losses: Losses, reference: Losses) -> float | None:
    """The relative difference in the last step that both have; None if either loss is not finite."""
    common = [step for step in losses if step in reference]
    if not common:
        return None
    ours, theirs = losses[common[-1]], reference[common[-1]]
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return None
    return abs(ours - theirs) / abs(theirs) if theirs else abs(ours - theirs)


def find_first_difference(left: Losses, right: Losses) -> int | None:
    """The first common step whose losses are not bit-equal; NaN equals NaN here."""
    return next((step for step in left if step in right and repr(left[step]) != repr(right[step])), None)


def is_non_finite(arm: Arm) -> bool:
    """Whether any loss of any round is NaN or infinite."""
    return any(result.first_non_finite_loss is not None for result in arm.results)


MOST_POINTS = 400
"""Points of one line; longer ones are thinned evenly."""
MOST_LINES = 8
Made = dict[str, Any]
STEP = Axis(field="step", title="step", quantity="count")
LOSS = Axis(field="loss", title="loss", quantity="loss", from_zero=False)
ACCURACY = Axis(field="accuracy", title="accuracy", quantity="accuracy", from_zero=False)


def plot_learning(curve: Sequence[CurvePoint]) -> tuple[Chart, ...]:
    """Loss and accuracy of one training run, on its own batches and on the test data."""
    parts = {"train": [p for p in curve if not p.is_evaluation], "test": [p for p in curve if p.is_evaluation]}
    charts = []
    for axis, words in ((LOSS, "Loss"), (ACCURACY, "Accuracy")):
        known = {
            name: [(p.step, value) for p in points if (value := getattr(p, axis.field)) is not None]
            for name, points in parts.items()
        }
        chart = plot_pairs(known, axis, f"{words} by step")
        charts += [chart] if chart is not None else []
    return tuple(charts)


def plot_losses(results: Mapping[str, TrialResult]) -> Chart | None:
    """The losses of measured steps, by what each is called."""
    return plot_pairs({name: list(result.losses().items()) for name, result in results.items()}, LOSS, "Loss by step")


def plot_pairs(lines: Mapping[str, Sequence[tuple[int, float]]], y: Axis, title: str) -> Chart | None:
    """Lines of pairs of step and value; None if there is no line of two points."""
    finite = {name: [(s, v) for s, v in pairs if math.isfinite(v)] for name, pairs in list(lines.items())[:MOST_LINES]}
    if max((len(pairs) for pairs in finite.values()), default=0) < 2:
        return None
    rows: list[Made] = [
        {"series": name, "step": step, y.field: value}
        for name, pairs in finite.items()
        for step, value in _thin(pairs, MOST_POINTS)
    ]
    num_all = sum(map(len, finite.values()))
    num_odd = sum(map(len, list(lines.values())[:MOST_LINES])) - num_all
    said = [
        f"{len(rows)} of {num_all} points are drawn, evenly spaced." if len(rows) < num_all else "",
        f"Not drawn, because NaN or infinite: {format_count(num_odd, 'value')}." if num_odd else "",
        f"{len(lines) - MOST_LINES} more are not drawn." if len(lines) > MOST_LINES else "",
    ]
    return plot_curves(title=title, x=STEP, y=y, rows=rows, caption=join_words(*said))


def _thin(pairs: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    if len(pairs) <= most:
        return list(pairs)
    return [pairs[round(place * (len(pairs) - 1) / (most - 1))] for place in range(most)]
