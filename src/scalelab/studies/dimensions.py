"""Dimensions: the same training run with a longer sequence, a wider model, more data, one option at a time.

The job's own options are the base. A dimension is an option of the workload, or several that move together, and takes
each of its values while the others stay at the base. Options that cannot work together are launched all the same: the
row says `invalid`, with torch's own words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.growth import PowerFit, find_exponent, fit_power
from scalelab.analysis.stats import Verdict, judge
from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.trial import Option, Status, TrialResult
from scalelab.report.charts.column_charts import draw_columns
from scalelab.report.charts.grid import plot_grid
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Section, Table
from scalelab.report.findings import DETAIL, MAIN, REASON, Finding, FindingKind, Known
from scalelab.report.tables import (
    INTERVAL_NOTE,
    Field,
    make_column,
    make_table,
    ratio_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm, describe_failures, describe_status, join_words
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Configuration, Sampling
from scalelab.studies.shared.sweep import (
    PEAK_CAPTION,
    Sweep,
    SweepStudy,
    compare_steps,
    judge_row,
    memory_column,
    relative_column,
    samples_column,
    step_column,
)
from scalelab.studies.shared.variations import Variation, read_base, read_variations
from scalelab.studies.shared.work import (
    count_if_own,
    count_operations,
    count_parameters,
    operations_column,
    parameters_column,
    speed_column,
)
from scalelab.units import format_quantity, is_known
from scalelab.workloads.catalogue import BUILT_IN, make_options

BASE = "base"
IN_PROPORTION = 0.05
"""An exponent that certainly lies within 1 ± this is called proportional growth."""
WIDE = 1.0
"""An exponent with a wider interval says nothing."""
MOST_DIMENSIONS = 4
"""A dimension has points and a fit: more could not be distinguished in one chart."""
MOST_GRIDS = 4
MOST_TICKS = 9

GROWTH = FindingKind(
    "cost-exponent",
    "Exponent of the step time (and of FLOPs) over the size of one dimension",
    MAIN,
    ("exponent", "flops_exponent", "smallest", "largest"),
)
NO_DIFFERENCE = FindingKind("no-difference", "Rows whose step time equals the reference's", DETAIL, ("rows",))
REFUSED = FindingKind("refused", "Options that do not work together, in torch's words", REASON, ("reason",))


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One dimension, with everything else at the base."""

    variation: Variation
    series: Mapping[float, Arm]
    """By size, ascending."""
    fit: PowerFit

    def fit_counts(self, counts: Iterable[float | None]) -> float | None:
        """The exponent of what a closed form counts for the same sizes; None if it is unknown."""
        known = [(size, float(count)) for size, count in zip(self.series, counts, strict=True) if count]
        if len(known) < 2:
            return None
        sizes, numbers = zip(*known, strict=True)
        return 0.0 if len(set(numbers)) == 1 else find_exponent(sizes, numbers)

    @property
    def flops_exponent(self) -> float | None:
        return self.fit_counts(map(count_operations, self.series.values()))

    @property
    def parameters_exponent(self) -> float | None:
        return self.fit_counts(map(count_parameters, self.series.values()))


@dataclass(frozen=True, kw_only=True)
class Dimensions(SweepStudy):
    """Vary workload options, one at a time or all combined, and compare with the unchanged job."""

    vary: tuple[str, ...] = ("features+d_model=256,512", "tgt_length=20,50")
    """What to vary: option=value,value, or a+b=value,value for options that take the same value."""
    grid: bool = False
    """Measure all combinations of the values instead of one dimension at a time."""
    batch_per_rank: int = 32
    """Samples per step on each rank."""
    job: Job = field(default_factory=lambda: Job(workload="transformer"))
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        if not self.vary:
            raise UsageError("--vary needs at least one option with values, for example --vary tgt_length=20,50")
        names = [name for variation in self.variations for name in variation.names]
        shared = next((name for name in names if names.count(name) > 1), None)
        if self.grid and shared:
            raise UsageError(
                f"--grid cannot combine two dimensions of {shared}: give all its values in one --vary item"
            )

    @property
    def variations(self) -> tuple[Variation, ...]:
        return read_variations("vary", self.vary, self.job.workload)

    @property
    def reference_name(self) -> str:
        return BASE

    def list_rows(self) -> Iterator[Configuration]:
        """The base, and one row for every set of values that is not its own."""
        names, counted = set[str](), count_if_own(self.job)
        yield replace(self.configure(BASE, self.batch_per_rank, self.job), instruments=counted)
        for changes in self._list_changes():
            options = {name: value for variation, value in changes for name, value in variation.assign(value).items()}
            if options == read_base(options, self.job):
                continue
            label = ", ".join(f"{variation.label} = {value}" for variation, value in changes)
            name = "-".join(f"{'.'.join(variation.names)}-{_clean(value)}" for variation, value in changes)
            if name in names:
                raise UsageError(f"--vary: two rows would be called {name}: use values with other letters or digits")
            names.add(name)
            job = replace(self.job, options={**self.job.options, **options}, sees_failure=True)
            yield replace(self.configure(name, self.batch_per_rank, job, label=label), instruments=counted)

    def _list_changes(self) -> Iterator[tuple[tuple[Variation, Option], ...]]:
        pairs = [[(variation, value) for value in variation.values] for variation in self.variations]
        if self.grid:
            yield from itertools.product(*pairs)
        else:
            yield from ((pair,) for dimension in pairs for pair in dimension)

    def list_settings(self) -> Iterable[str]:
        names = dict.fromkeys(name for variation in self.variations for name in variation.names)
        base = ", ".join(f"{name} {value}" for name, value in read_base(names, self.job).items())
        return f"batch {self.batch_per_rank} per rank", f"base {base}"

    def list_columns(self, sweep: Sweep) -> Iterable[Field[Arm]]:
        yield step_column()
        yield samples_column(is_detail=True)
        yield relative_column(sweep.reference, "× base")
        yield memory_column()
        yield parameters_column()
        yield operations_column(is_detail=True)
        yield speed_column()

    def draw_charts(self, table: Table, sweep: Sweep) -> Iterator[Chart | None]:
        yield draw_columns(table, ["step_seconds"], title="Step time of every row")
        yield draw_columns(table, ["peak_memory_bytes"], title="Peak memory of every row", caption=PEAK_CAPTION)
        if not self.grid or len(self.variations) < 2:
            return
        across, down, *rest = self.variations
        combinations = itertools.product(*(variation.values for variation in rest))
        for values in itertools.islice(combinations, MOST_GRIDS):
            yield draw_grid(sweep, across, down, dict(zip(rest, values, strict=True)), self.job)

    def list_sections(self, sweep: Sweep) -> Iterable[Section]:
        growths = self.fit_growth(sweep)
        if growths:
            table, chart = make_growth_table(growths), draw_growth(growths, sweep)
            yield Section(heading="How the step time grows", tables=(table,), charts=(chart,))

    def fit_growth(self, sweep: Sweep) -> list[Growth]:
        """Every dimension that was measured at two sizes or more."""
        found = []
        for variation in self.variations:
            series = self._select_series(sweep, variation)
            fit = fit_power({size: arm.clean for size, arm in series.items()})
            if fit is not None:
                found.append(Growth(variation=variation, series=series, fit=fit))
        return found

    def _select_series(self, sweep: Sweep, variation: Variation) -> dict[float, Arm]:
        """The measured rows that differ from the base in this dimension only, the base among them, by size."""
        others = [name for one in self.variations for name in one.names if name not in variation.names]
        base = read_base([*variation.names, *others], self.job)
        series: dict[float, Arm] = {}
        for arm in sweep.measured:
            options = {name: arm.trial.options.get(name, base[name]) for name in base}
            sizes = {options[name] for name in variation.names}
            size = read_size(sizes.pop()) if len(sizes) == 1 else None
            if size is not None and all(options[name] == base[name] for name in others):
                series[size] = arm
        return dict(sorted(series.items()))

    def list_findings(self, sweep: Sweep) -> Iterator[Finding]:
        growths = sorted(self.fit_growth(sweep), key=lambda growth: -growth.fit.exponent.value)
        yield from (describe_growth(growth, MAIN if growth is growths[0] else REASON) for growth in growths)
        ratios = sweep.ratios
        if ratios:
            slowest = max(ratios, key=lambda label: ratios[label].value)
            if judge(ratios[slowest]) is Verdict.SLOWER:
                yield judge_row(slowest, ratios[slowest], f"the {BASE}")
            alike = [label for label, ratio in ratios.items() if judge(ratio) is Verdict.NO_DIFFERENCE]
            if labels := ", ".join(alike):
                yield NO_DIFFERENCE(labels, f"No difference in step time from the base: {labels}.", rows=len(alike))
        yield from describe_refusals(arm for arm in sweep.rows if self._is_refused(arm))

    def select_doubtful(self, sweep: Sweep) -> Mapping[str, Arm]:
        """A refusal that the study was meant to show is a finding and not a warning."""
        return {name: arm for name, arm in sweep.arms.items() if not self._is_refused(arm)}

    def _is_refused(self, arm: Arm) -> bool:
        return all(self._is_foreseen(result) for result in arm.results)

    def _is_foreseen(self, result: TrialResult) -> bool:
        """Whether its options are known not to work together."""
        if result.status not in (Status.INVALID, Status.NOT_RUN) or result.trial.workload not in BUILT_IN:
            return False
        try:
            make_options(result.trial.workload, result.trial.options).check()
        except UsageError:
            return True
        return False


def read_size(value: Option | None) -> float | None:
    """A value as a size that something can grow with; None: a word, a truth, nothing, or not above 0."""
    if value is None or isinstance(value, bool | str) or value <= 0:
        return None
    return float(value)


def make_growth_table(growths: Sequence[Growth]) -> Table:
    return make_table(
        growths,
        text_column("dimension", "dimension", lambda growth: growth.variation.label),
        make_column("number", "smallest", "from", lambda growth: growth.fit.smallest),
        make_column("number", "largest", "to", lambda growth: growth.fit.largest),
        ratio_column("step_exponent", "step exponent", lambda growth: growth.fit.exponent),
        ratio_column("operations_exponent", "FLOPs exponent", lambda growth: growth.flops_exponent),
        ratio_column("parameters_exponent", "parameters exponent", lambda growth: growth.parameters_exponent),
        share_column("residual_ratio", "residual", lambda growth: growth.fit.residual_ratio),
        notes=(INTERVAL_NOTE,),
    )


def describe_growth(growth: Growth, weight: int) -> Finding:
    fit, flops, label = growth.fit, growth.flops_exponent, growth.variation.label
    grows = _judge_growth(fit.exponent)
    exponent = f": exponent {format_quantity('ratio', fit.exponent)}" if is_known(fit.exponent) else ""
    beside = "" if flops is None else f"; the exponent of FLOPs is {format_quantity('ratio', flops)}"
    return GROWTH(
        label,
        f"From {label} = {fit.smallest:g} to {fit.largest:g} the step time {grows}{exponent}{beside}.",
        exponent=fit.exponent,
        flops_exponent=flops,
        smallest=fit.smallest,
        largest=fit.largest,
        weight=weight,
    )


def _judge_growth(exponent: Estimate) -> str:
    low, high = exponent.low, exponent.high
    if low is None or high is None:
        return "grows (too few launches for an interval)"
    if high - low > WIDE:
        return "may or may not grow"
    if high < 0:
        return "falls"
    if low <= 0:
        return "hardly grows, if at all"
    if low > 1 - IN_PROPORTION and high < 1 + IN_PROPORTION:
        return "grows in proportion"
    if high < 1:
        return "grows less than in proportion"
    return "grows more than in proportion" if low > 1 else "grows about in proportion"


def describe_refusals(refused: Iterable[Arm]) -> Iterator[Finding]:
    """Rows that were refused alike share a sentence."""
    alike: dict[str, list[str]] = {}
    for arm in refused:
        if arm.failure is not None:
            alike.setdefault(arm.failure.reason, []).append(arm.label)
    for reason, labels in alike.items():
        listed = ", ".join(labels)
        yield REFUSED(listed, f"{listed} did not run, for a reason other than memory: {reason}.", reason=reason)


def draw_growth(growths: Sequence[Growth], sweep: Sweep) -> Chart:
    """Step time over size, both relative to the smallest and logarithmic: a power is a straight line."""
    rows: list[Row] = []
    guides: list[Row] = []
    for growth in growths[:MOST_DIMENSIONS]:
        label, fit = growth.variation.label, growth.fit
        smallest, first = next(iter(growth.series.items()))
        for size, arm in growth.series.items():
            place = {"growth": size / smallest, "ratio": compare_steps(arm, first), "size": f"{size:g}"}
            rows.append(place | {"series": label, "key": arm.label})
        guides += [
            {"growth": factor, "ratio": factor**fit.exponent.value, "series": f"{label}: power"}
            for factor in (1.0, fit.largest / fit.smallest)
        ]
    sizes = tuple(sorted({float(str(row["growth"])) for row in rows}))
    left_out = len(growths) - MOST_DIMENSIONS
    return plot_lines(
        title="Step time by size of each dimension",
        x=Axis(
            field="growth",
            title="size over the smallest",
            quantity="number",
            is_log=True,
            ticks=sizes if len(sizes) <= MOST_TICKS else (),
        ),
        y=Axis(field="ratio", title="step time over the smallest's", quantity="ratio", is_log=True),
        rows=rows,
        guides=guides,
        is_joined=False,
        extra={"size": "size"},
        caption=join_words(
            "Everything else is at the base. Vertical lines are 95 % confidence intervals, dashed lines fitted powers.",
            f"{left_out} more are in the table only." if left_out > 0 else "",
            *describe_failures((arm.label, describe_status(arm)) for arm in sweep.rows if not arm.is_measured),
        ),
    )


def draw_grid(
    sweep: Sweep, across: Variation, down: Variation, others: Mapping[Variation, Option], job: Job
) -> Chart | None:
    """Two dimensions as a heat map of the step time, at given values of the others."""
    fixed = {name: value for variation, value in others.items() for name in variation.names}
    rows: list[Row] = []
    for column, line in itertools.product(_sort_values(across), _sort_values(down)):
        arm = find_arm(sweep, {**across.assign(column), **down.assign(line), **fixed}, job)
        rows.append({"across": str(column), "down": str(line), **describe_cell(arm)})
    beside = ", ".join(f"{variation.label} = {value}" for variation, value in others.items())
    return plot_grid(
        title=f"Step time by {across.label} and {down.label}{f' at {beside}' if beside else ''}",
        x=Axis(field="across", title=across.label, quantity="text"),
        y=Axis(field="down", title=down.label, quantity="text"),
        value=Axis(field="step_seconds", title="step", quantity="seconds"),
        rows=rows,
        extra={"reason": "reason"},
        caption="Medians; their 95 % intervals are in the table. Cells in italics were not measured.",
    )


def describe_cell(arm: Arm | None) -> dict[str, Known]:
    """What a heat map shows of an arm: its step time, or why there is none."""
    if arm is not None and arm.is_measured:
        return {"key": arm.label, "step_seconds": arm.step, "status": "", "reason": ""}
    named = {} if arm is None else {"key": arm.label}
    reason = arm.failure.reason if arm is not None and arm.failure else ""
    return {**named, "step_seconds": None, "status": describe_status(arm), "reason": reason}


def find_arm(sweep: Sweep, wanted: Mapping[str, Option], job: Job) -> Arm | None:
    """The row with these options, the base among them."""
    base = read_base(wanted, job)
    rows = sweep.rows
    return next((arm for arm in rows if all(arm.trial.options.get(k, base[k]) == v for k, v in wanted.items())), None)


def _sort_values(variation: Variation) -> list[Option]:
    """Sizes by size, words as they were given."""
    return sorted(variation.values, key=lambda value: read_size(value) or 0.0)


def _clean(value: Option) -> str:
    """A value as a part of a directory's name."""
    return re.sub(r"[^A-Za-z0-9._]+", "_", str(value))
