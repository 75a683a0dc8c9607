"""The dimensions of a training in words with numbers: what grows, how fast, and what does not run at all.

The figures of `dimensions`: every row, how the step grows with each dimension, and heat maps of a grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, judge
from scalelab.records.trial import Option, Status
from scalelab.report.charts.grid import plot_grid
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Table
from scalelab.report.findings import Value
from scalelab.studies.dimensions.answer import Growth, read_size, select_series
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sweep import CONTROL, compare_steps, describe_status, draw_columns, keep_charts, list_keys
from scalelab.studies.shared.variations import Variation, read_base
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


MOST_DIMENSIONS = 4
"""A dimension has a line and a fit: more could not be told apart."""
MOST_GRIDS = 4
MOST_TICKS = 9


def draw_rows(table: Table, arms: Mapping[str, Arm]) -> tuple[Chart, ...]:
    """Step and memory of every row."""
    keys = list_keys(arms.values())
    return keep_charts(
        draw_columns(table, ["step_seconds"], title="Step of every row", keys=keys),
        draw_columns(
            table,
            ["peak_memory_bytes"],
            title="Memory of every row",
            keys=keys,
            caption="The highest of any rank in any launch, with all that the process holds; without intervals.",
        ),
    )


def draw_growth(
    arms: Mapping[str, Arm], variations: Sequence[Variation], job: Job, growths: Sequence[Growth]
) -> tuple[Chart, ...]:
    """The step over the smallest's against the size over the smallest, both logarithmic: a power is a line."""
    measured = [arm for arm in arms.values() if arm.is_measured and arm.configuration != CONTROL]
    rows: list[Row] = []
    guides: list[Row] = []
    for growth in growths[:MOST_DIMENSIONS]:
        variation, fit = growth.variation, growth.fit
        others = [name for other in variations for name in other.names if name not in variation.names]
        series = sorted(select_series(measured, variation, others, job).items())
        smallest, first = series[0]
        for size, arm in series:
            rows.append(
                {
                    "growth": size / smallest,
                    "ratio": compare_steps(arm, first),
                    "series": variation.label,
                    "key": arm.label,
                    "size": f"{size:g}",
                }
            )
        guides += [
            {"growth": factor, "ratio": factor**fit.exponent.value, "series": f"{variation.label}: power"}
            for factor in (1.0, fit.largest / fit.smallest)
        ]
    left_out = (
        f" {len(growths) - MOST_DIMENSIONS} more are in the table only." if len(growths) > MOST_DIMENSIONS else ""
    )
    failed = [arm.label for arm in arms.values() if not arm.is_measured]
    missing = f" Not measured: {'; '.join(failed)}." if failed else ""
    sizes = sorted({float(str(row["growth"])) for row in rows})
    chart = plot_lines(
        title="The step against each dimension",
        x=Axis(
            field="growth",
            title="size over the smallest",
            quantity="number",
            is_log=True,
            ticks=tuple(sizes) if len(sizes) <= MOST_TICKS else (),
        ),
        y=Axis(field="ratio", title="step over that of the smallest", quantity="ratio", is_log=True),
        rows=rows,
        guides=guides,
        is_joined=False,
        extra={"size": "size"},
        caption="Everything else is at the base. Vertical lines are 95 % confidence intervals; dashed lines are powers"
        f" of the size, as fitted.{left_out}{missing}",
    )
    return (chart,) if len(rows) > 1 else ()


def draw_grids(arms: Mapping[str, Arm], variations: Sequence[Variation], job: Job) -> tuple[Chart, ...]:
    """Two dimensions as a heat map of the step, one for every combination of the others."""
    if len(variations) < 2:
        return ()
    across, down, *rest = variations
    combinations = list(itertools.product(*(variation.values for variation in rest)))
    charts = [
        _draw_grid(arms, across, down, dict(zip(rest, values, strict=True)), job)
        for values in combinations[:MOST_GRIDS]
    ]
    return keep_charts(*charts)


def _draw_grid(
    arms: Mapping[str, Arm], across: Variation, down: Variation, others: Mapping[Variation, Option], job: Job
) -> Chart | None:
    fixed = {name: value for variation, value in others.items() for name in variation.names}
    rows: list[Row] = []
    for column, line in itertools.product(_sort_values(across), _sort_values(down)):
        wanted = {**across.assign(column), **down.assign(line), **fixed}
        arm = find_arm(arms, wanted, job)
        rows.append({"across": str(column), "down": str(line), **describe_cell(arm)})
    beside = ", ".join(f"{variation.label} = {value}" for variation, value in others.items())
    return plot_grid(
        title=f"Step by {across.label} and {down.label}{f' at {beside}' if beside else ''}",
        x=Axis(field="across", title=across.label, quantity="text"),
        y=Axis(field="down", title=down.label, quantity="text"),
        value=Axis(field="step_seconds", title="step", quantity="seconds"),
        rows=rows,
        extra={"reason": "reason"},
        caption="Numbers are medians; their 95 % intervals are in the table. Cells in italics were not measured.",
    )


def describe_cell(arm: Arm | None) -> dict[str, Value | Estimate]:
    """What a heat map says of an arm: its step, or why there is none."""
    if arm is None:
        return {"step_seconds": None, "status": "not run yet", "reason": ""}
    if arm.is_measured:
        return {"key": arm.label, "step_seconds": arm.step, "status": "", "reason": ""}
    reason = arm.failure.reason if arm.failure else ""
    return {"key": arm.label, "step_seconds": None, "status": describe_status(arm), "reason": reason}


def find_arm(arms: Mapping[str, Arm], wanted: Mapping[str, Option], job: Job) -> Arm | None:
    """The arm with these options, the base among them."""
    base = read_base(wanted, job)
    for arm in arms.values():
        if arm.configuration != CONTROL and all(arm.trial.options.get(k, base[k]) == v for k, v in wanted.items()):
            return arm
    return None


def _sort_values(variation: Variation) -> list[Option]:
    """Sizes by size, words as they were given."""
    sizes = [read_size(value) for value in variation.values]
    if None in sizes:
        return list(variation.values)
    return sorted(variation.values, key=lambda value: read_size(value) or 0.0)
