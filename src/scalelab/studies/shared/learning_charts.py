"""Charts of training runs: losses and accuracies by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scalelab.records.observations import CurvePoint
from scalelab.records.trial import TrialResult
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.lines import plot_curves
from scalelab.report.document import Chart
from scalelab.studies.shared.arms import join_words
from scalelab.units import format_count

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


def plot_losses(results: Mapping[str, TrialResult], title: str = "Loss by step") -> Chart | None:
    """The losses of measured steps, by what each is called."""
    return plot_pairs({name: list(result.losses().items()) for name, result in results.items()}, LOSS, title)


def plot_pairs(lines: Mapping[str, Sequence[tuple[int, float]]], y: Axis, title: str) -> Chart | None:
    """Lines of pairs of step and value; None where there is no line of two points."""
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
