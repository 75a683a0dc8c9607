"""The charts of `reproducibility`: launches beside each other, the first steps, the ways to time a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from scalelab.analysis.stats import estimate_median
from scalelab.report.charts.amounts import plot_amounts
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import MOST_SERIES, plot_lines
from scalelab.report.document import Chart
from scalelab.studies.arms import Arm
from scalelab.studies.repeats import Repeats

Made = dict[str, Any]
SECONDS = Axis(field="seconds", title="step time", quantity="seconds", from_zero=False)


def plot_launches(arms: Iterable[Arm]) -> Chart | None:
    """The median of every launch: what the same thing gives when it is measured again."""
    measured = [arm for arm in arms if arm.is_measured]
    rows: list[Made] = [
        {"series": arm.label, "launch": number, "seconds": estimate_median([steps]), "key": arm.label}
        for arm in measured[:MOST_SERIES]
        for number, steps in enumerate(arm.clean, start=1)
        if len(steps)
    ]
    if len(rows) < 2:
        return None
    more = f" {len(measured) - MOST_SERIES} more are not drawn." if len(measured) > MOST_SERIES else ""
    return plot_lines(
        title="The same again, launch by launch",
        x=Axis(field="launch", title="launch", quantity="count", from_zero=False),
        y=SECONDS,
        rows=rows,
        caption="Medians of launches; bars are 95 % confidence intervals over the steps of a launch, which do not say"
        f" how far launches lie apart.{more}",
    )


def plot_first_steps(repeats: Repeats) -> Chart:
    """The first steps over the rest of their launch."""
    shown = min(3 * repeats.dropped, min(map(len, repeats.launches)))
    rows: list[Made] = [
        {"series": "step", "step": number, "ratio": repeats.compare_step(number)} for number in range(shown)
    ]
    raw: list[Made] = [
        {"series": "step", "step": number, "ratio": steps[number] / float(np.median(steps[repeats.dropped :]))}
        for steps in repeats.launches
        for number in range(shown)
    ]
    guide: list[Made] = [{"series": "the rest", "step": place, "ratio": 1.0} for place in (0, shown - 1)]
    return plot_lines(
        title="The first steps of a launch",
        x=Axis(field="step", title="step", quantity="count", from_zero=False),
        y=Axis(field="ratio", title="time over the rest's median", quantity="ratio"),
        rows=rows,
        raw=raw,
        guides=guide,
        caption="Bars are 95 % confidence intervals, faint points single launches.",
    )


def plot_ways(repeats: Repeats) -> Chart | None:
    """Every way to time a step, with where one more measurement of its kind would fall."""
    rows: list[Made] = [{"name": way.label, "seconds": way.step} for way in repeats.ways]
    return plot_amounts(
        title="Ways to time a step",
        x=SECONDS,
        rows=rows,
        caption="Thin lines: where one more measurement of the kind falls in 95 of 100 cases; of the last, a 95 %"
        " confidence interval.",
    )
