"""The charts of the comparison of strategies: time with memory, and the phases of a step."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import MOST_SERIES, plot_bars, plot_lines
from scalelab.report.document import Chart
from scalelab.studies.arms import Arm
from scalelab.studies.breakdown_charts import plot_phases
from scalelab.studies.status import count_rest, describe_failures, find_status, join_words
from scalelab.studies.sweep import CONTROL

BARS = "Thin lines are 95 % confidence intervals."


def plot_strategies(arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """A step of each, and what it holds in memory against its time."""
    shown = [arm for arm in arms if arm.configuration != CONTROL]
    charts = [plot_step_times(shown), _plot_memory(shown), plot_phases(shown)]
    return tuple(chart for chart in charts if chart is not None)


def plot_step_times(arms: Sequence[Arm], title: str = "Step time") -> Chart | None:
    """One bar for every configuration; what failed says so in its place."""
    measured = [arm for arm in arms if arm.is_measured]
    if not measured:
        return None
    failed = [{"bar": arm.label, "status": find_status(arm)} for arm in arms if not arm.is_measured]
    return plot_bars(
        title=title,
        x=Axis(field="seconds", title="step time", quantity="seconds"),
        y=Axis(field="bar", title="", quantity="text"),
        rows=[{"bar": arm.label, "seconds": arm.step, "key": arm.label} for arm in measured],
        failed=failed,
        is_stacked=False,
        caption=join_words(BARS, *describe_failures((row["bar"], row["status"]) for row in failed)),
    )


def _plot_memory(arms: Sequence[Arm]) -> Chart | None:
    """Memory against time, a point for each: down and to the left is better in both."""
    every = [arm for arm in arms if arm.is_measured and arm.peak_memory_bytes is not None]
    known, num_left = every[:MOST_SERIES], len(every[MOST_SERIES:])
    if len(known) < 2:
        return None
    rows = [
        {"series": arm.label, "seconds": arm.step, "bytes": arm.peak_memory_bytes, "key": arm.label} for arm in known
    ]
    return plot_lines(
        title="Memory against time",
        x=Axis(field="seconds", title="step time", quantity="seconds"),
        y=Axis(field="bytes", title="peak memory of the fullest rank", quantity="bytes"),
        rows=rows,
        is_joined=False,
        caption=join_words(
            "Down and to the left is better in both. Memory is the highest of any rank in any round.",
            count_rest(num_left, "configuration", "in the table only") if num_left else "",
            *describe_failures((arm.label, find_status(arm)) for arm in arms if not arm.is_measured),
        ),
    )
