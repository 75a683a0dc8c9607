"""Charts that every run with step samples has, whatever its study: distributions, steps in order, a profiled step.

They are added where a run is concluded, in sections that hold charts only; formats without figures leave those out.

A figure holds a bounded number of points. Longer series are thinned evenly, so that neither a time of day nor a
range of values is favoured; outliers and the warm-up stay as far as there is room. The captions say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from scalelab.analysis.quality import find_drift, find_outliers
from scalelab.analysis.stats import estimate_median, find_median
from scalelab.answers.trace.charts import plot_recorded_steps
from scalelab.records.trial import StepKind, Trial, TrialResult
from scalelab.report.charts.step_times import DRIFT, MEDIAN, OUTLIER, STEP, WARM_UP, plot_distribution, plot_steps
from scalelab.report.document import Chart, Document, Section
from scalelab.studies.shared.arms import (
    NOT_YET,
    Arm,
    count_rest,
    describe_failures,
    describe_status,
    group_arms,
    join_words,
    name_configuration,
)
from scalelab.studies.shared.study import Study
from scalelab.units import format_count, format_seconds, format_share

MOST_ROWS = 16
"""Configurations of the distribution."""
MOST_SERIES = 6
"""Configurations whose steps are drawn in order."""
DISTRIBUTED_POINTS = 1000
SERIES_POINTS = 1800
"""Points of all configurations together."""
MOST_LAUNCHES = 120
"""Launches of a configuration whose medians are drawn."""
WIDE_SPREAD = 1.2
"""The slowest launch over the fastest, from which a caption names both."""
MOST_JUDGED = 2000
"""Steps of a launch that a trend is looked for in: all pairs of them are compared."""
Made = dict[str, Any]


class DrawnStep(NamedTuple):
    """A step as a chart draws it."""

    place: int
    seconds: float
    launch: int
    step: int
    series: str


T = TypeVar("T")
MOST_TIMELINES = 2
"""Of a row of a recipe, which compares configurations."""


def add_general_charts(
    document: Document,
    study: Study,
    results: Sequence[TrialResult],
    planned: Iterable[Trial],
    find_directory: Callable[[str], Path],
) -> Document:
    """The document with what its steps look like; the same one where no step was timed."""
    arms = list_arms(study, results)
    missing = list_missing(arms, planned) if any(arm.is_measured for arm in arms) else {}
    charts = [plot_spread(study, arms, missing), *plot_series(study, arms)]
    sections = [Section(heading="Step by step", charts=tuple(chart for chart in charts if chart is not None))]
    parts: dict[str, list[Arm]] = {}
    for arm in arms:
        parts.setdefault(study.find_part(arm.trial), []).append(arm)
    own = list(document.sections)
    for part, members in parts.items():
        place = find_row(own, part)
        timelines = tuple(plot_recorded_steps(members, find_directory, 1 if place is None else MOST_TIMELINES))
        if timelines and place is not None:
            own[place] = replace(own[place], charts=(*own[place].charts, *timelines))
        elif timelines:
            sections.append(Section(heading="A profiled step", charts=timelines))
    return replace(document, sections=(*own, *(section for section in sections if section.charts)))


def find_row(sections: Sequence[Section], part: str) -> int | None:
    """The place of the section that a recipe's row has, of which this is a part; None outside of recipes."""
    row = part.partition(".")[0].upper()
    found = (place for place, section in enumerate(sections) if section.heading.partition(" · ")[0] == row)
    return next(found, None) if row else None


def list_arms(study: Study, results: Sequence[TrialResult]) -> list[Arm]:
    """The configurations that train to be timed, without the warm-up that the study drops."""
    trained = [result for result in results if result.trial.takes_steps and result.quantized is None]
    parts: dict[str, list[TrialResult]] = {}
    for result in map(study.count_steps, trained):
        parts.setdefault(study.find_part(result.trial), []).append(result)
    return [arm for part in parts.values() for arm in group_arms(part, study.find_warmup(part[0].trial)).values()]


def list_missing(arms: Sequence[Arm], planned: Iterable[Trial]) -> dict[str, str]:
    """The label and status of configurations without a step time."""
    known = {arm.configuration for arm in arms}
    found = {arm.label: describe_status(arm) for arm in arms if not arm.is_measured}
    for trial in planned:
        if trial.configuration not in known and trial.takes_steps:
            found.setdefault(name_configuration(trial), NOT_YET)
    return found


def plot_spread(study: Study, arms: Sequence[Arm], missing: Mapping[str, str]) -> Chart | None:
    """The distribution of step times of every configuration."""
    measured = [arm for arm in arms if arm.is_measured]
    if not measured:
        return None
    shown = measured[:MOST_ROWS]
    labels = name_apart(study, shown)
    rows: list[Made] = []
    points: list[Made] = []
    num_all = 0
    for arm, label in zip(shown, labels, strict=True):
        times = [seconds for steps in arm.clean for seconds in steps]
        low, high = (float(value) for value in np.quantile(times, (0.25, 0.75)))
        median = estimate_median(arm.clean)
        rows.append({"name": label, "seconds": median, "quarter": low, "three_quarters": high, "key": arm.label})
        every = [
            (number, step, seconds)
            for number, steps in enumerate(arm.clean, start=1)
            for step, seconds in enumerate(steps, start=arm.num_dropped)
        ]
        num_all += len(every)
        points += [
            {"name": label, "seconds": seconds, "launch": number, "step": step, "key": arm.label}
            for number, step, seconds in thin(every, DISTRIBUTED_POINTS // len(shown))
        ]
    failed: list[Made] = [{"name": name, "status": status} for name, status in list(missing.items())[:MOST_ROWS]]
    said = [
        "Points are steps after warm-up, one line of them per launch; boxes hold the middle half; thick strokes are the"
        " median and its 95 % confidence interval."
    ]
    if len(points) < num_all:
        said.append(f"{len(points)} of {num_all} steps are drawn, evenly spaced.")
    if len(measured) > len(shown):
        said.append(count_rest(len(measured) - len(shown), "configuration", "not drawn"))
    said += describe_failures(missing.items())
    title = "Distribution of step times"
    return plot_distribution(title=title, rows=rows, points=points, failed=failed, caption=" ".join(said))


def name_apart(study: Study, arms: Sequence[Arm]) -> list[str]:
    """The labels of arms; in a recipe, whose rows share some, with the row, and where need be with its part."""
    labels = [arm.label for arm in arms]
    for is_whole in (False, True):
        named = [name_in_row(study, arm, is_whole=is_whole) for arm in arms]
        labels = [name if labels.count(label) > 1 else label for label, name in zip(labels, named, strict=True)]
    return labels


def name_in_row(study: Study, arm: Arm, *, is_whole: bool) -> str:
    """`S2, plain loop` or `S2 strong, plain loop` for `s2.strong.single-1`; the configuration outside of recipes."""
    row, part = study.name_part(arm.trial)
    if not row:
        return arm.configuration
    return f"{row} {part}, {arm.label}" if is_whole and part else f"{row}, {arm.label}"


def plot_series(study: Study, arms: Sequence[Arm]) -> Iterator[Chart]:
    """The steps of every configuration in order."""
    measured = [arm for arm in arms if arm.is_measured]
    shown = measured[:MOST_SERIES]
    for arm, label in zip(shown, name_apart(study, shown), strict=True):
        chart = plot_arm(arm, label, SERIES_POINTS // len(shown))
        if arm is shown[-1] and len(measured) > len(shown):
            rest = count_rest(len(measured) - len(shown), "configuration", "not drawn step by step")
            chart = replace(chart, caption=f"{chart.caption} {rest}")
        yield chart


def plot_arm(arm: Arm, label: str, most: int) -> Chart:
    """One configuration: its steps, those of the warm-up and outliers marked, medians of launches, a trend."""
    outliers = {(one.round, one.step) for one in find_outliers(arm.clean)}
    points: list[DrawnStep] = []
    medians: list[list[Made]] = []
    for result in sorted(arm.completed, key=lambda result: result.trial.round):
        number, first = result.trial.round, len(points)
        times = list(result.step_seconds(StepKind.CLEAN).values())
        for step, seconds in enumerate(times):
            is_outlier = (number - 1, step - arm.num_dropped) in outliers
            kind = WARM_UP if step < arm.num_dropped else OUTLIER if is_outlier else STEP
            points.append(DrawnStep(len(points), seconds, number, step, kind))
        medians.append(mark_median(times[arm.num_dropped :], number, first + arm.num_dropped, len(points) - 1))
    kept = thin_marked(points, most)
    trend, words = find_trend(arm, len(points))
    dropped = format_count(arm.num_dropped, "step")
    said = [f"The first {dropped} of every launch dropped as warm-up." if arm.num_dropped else ""]
    said += [f"Outliers: {len(outliers)}." if outliers else "No outliers.", words]
    if len(kept) < len(points):
        said.append(f"{len(kept)} of {len(points)} steps are drawn, evenly spaced.")
    if len(medians) > MOST_LAUNCHES:
        said.append(f"Medians of {MOST_LAUNCHES} of {len(medians)} launches are drawn.")
    return plot_steps(
        title=f"Steps of {label}",
        points=[point._asdict() | {"key": arm.label} for point in kept],
        medians=[end for ends in thin(medians, MOST_LAUNCHES) for end in ends],
        trend=trend,
        caption=join_words(*said),
    )


def mark_median(times: Sequence[float], launch: int, first: int, last: int) -> list[Made]:
    """The two ends of the line at a launch's median."""
    if not times:
        return []
    height = find_median(times)
    return [
        {"place": place, "seconds": height, "launch": launch, "series": MEDIAN}
        for place in dict.fromkeys((first, last))
    ]


def describe_spread(arm: Arm) -> str:
    """What launches without a steady trend do: they may differ all the same."""
    medians = [find_median(steps) for steps in arm.clean if len(steps)]
    if len(medians) < 2 or max(medians) < WIDE_SPREAD * min(medians):
        return "No drift."
    low, high = (format_seconds(end) for end in (min(medians), max(medians)))
    return f"No steady drift, but medians of launches range from {low} to {high}."


def find_trend(arm: Arm, num_points: int) -> tuple[list[Made], str]:
    """The line of a trend over launches, and what there is of trends in words."""
    drift = find_drift([steps[-MOST_JUDGED:] for steps in arm.clean])
    if drift is None:
        return [], describe_spread(arm)
    said, ends = [], []
    change = drift.change_over_rounds
    if change is not None:
        middle = estimate_median(arm.clean).value
        heights = (middle * (1 - change / 2), middle * (1 + change / 2))
        ends = [
            {"place": place, "seconds": height, "launch": "all", "series": DRIFT}
            for place, height in zip((0, num_points - 1), heights, strict=True)
        ]
        said.append(f"Step times change by {format_share(change)} from the first launch to the last.")
    if drift.change_within_launches is not None:
        said.append(f"They change by {format_share(drift.change_within_launches)} within a launch.")
    return ends, " ".join(said)


def thin(points: Sequence[T], most: int) -> list[T]:
    """At most so many of them, evenly chosen, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    places = np.linspace(0, len(points) - 1, max(most, 2)).round().astype(int)
    return [points[place] for place in places]


def thin_marked(points: Sequence[DrawnStep], most: int) -> list[DrawnStep]:
    """The same, but what is marked has half of the room to itself."""
    if len(points) <= most:
        return list(points)
    marked = thin([point for point in points if point.series != STEP], most // 2)
    plain = thin([point for point in points if point.series == STEP], most - len(marked))
    return sorted([*marked, *plain])
