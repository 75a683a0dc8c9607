"""Reproducibility: what a seed fixes, what warm-up is, and how far a step time can be trusted.

The same job is launched several times with the same seed, and with others. A seed should fix every loss bit for bit.
It cannot fix a time: the same launches show how good the usual ways of timing a step are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.quality import Warmup, count_launches, estimate_spread, predict_one_more
from scalelab.analysis.stats import Rounds, Verdict, estimate_median, estimate_ratio, judge
from scalelab.checks import check_at_least, check_divisible
from scalelab.errors import UsageError
from scalelab.records.trial import StepKind, TrialResult
from scalelab.report.charts.column_charts import draw_columns, keep_charts
from scalelab.report.charts.plot import MOST_SERIES, Axis, Row, plot_lines
from scalelab.report.document import Chart, Section, Table
from scalelab.report.findings import ASIDE, DETAIL, MAIN, REASON, Finding, FindingKind
from scalelab.report.tables import (
    INTERVAL_NOTE,
    Field,
    count_column,
    make_table,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.losses import LOSSES_EQUAL, find_first_difference, read_losses
from scalelab.studies.shared.study import Configuration, Sampling
from scalelab.studies.shared.sweep import Sweep, SweepStudy, relative_column, samples_column, step_column
from scalelab.units import UNKNOWN, format_interval, format_quantity, format_share, is_known

TEN = 10
"""Steps of the mean that is usually taken."""
PRECISIONS = (0.01, 0.02, 0.05)
REACH = "where 95 of 100 further measurements of the kind would fall; for the last row, the 95 % confidence interval"

OTHER_SEED = FindingKind("seed-effect", "The first step whose loss differs under another seed", DETAIL, ("step",))
WARMUP = FindingKind("warmup", "First steps over the rest, and the warm-up", REASON, ("ratio", "found", "dropped"))
MEAN_ERROR = FindingKind("mean-error", "What the first steps do to a mean over all steps", DETAIL, ("error",))
PRECISION = FindingKind(
    "precision", "Half-widths of the mean of ten steps and of the median over launches", REASON, ("ten", "launches")
)
SPREAD = FindingKind("launch-spread", "Standard deviation between launches, relative", REASON, ("spread",))


@dataclass(frozen=True, kw_only=True)
class Reproducibility(SweepStudy):
    """The same job with the same seed and with others: are losses bit-equal, and how far do times agree?"""

    global_batch: int = 64
    """Samples per step, over all ranks."""
    seeds: int = 2
    """Number of seeds, starting at --seed."""
    dropped: int = 5
    """First steps that are compared with the rest."""
    sampling: Sampling = field(default_factory=lambda: Sampling(phase_steps=0, comm_free_steps=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("global_batch", "seeds", "dropped"):
            check_at_least(name, getattr(self, name), 1)
        check_divisible(self.global_batch, self.ranks)
        if self.dropped >= self.sampling.steps:
            raise UsageError(
                f"--dropped {self.dropped} leaves nothing of --steps {self.sampling.steps}: use fewer, or --steps"
                f" {self.dropped + 20}"
            )

    @property
    def reference_name(self) -> str:
        return f"seed-{self.job.seed}"

    def list_rows(self) -> Iterator[Configuration]:
        for seed in range(self.job.seed, self.job.seed + self.seeds):
            job = replace(self.job, seed=seed)
            yield self.configure(f"seed-{seed}", self.global_batch // self.ranks, job, label=f"seed {seed}")

    def list_settings(self) -> Iterable[str]:
        yield f"global batch {self.global_batch}"

    def list_columns(self, sweep: Sweep) -> Iterable[Field[Arm]]:
        expected = read_losses(sweep.reference)

        def compare_launches(arm: Arm) -> str | None:
            return describe_equality(find_unequal_step(arm.completed)) if len(arm.completed) > 1 else None

        def compare_seeds(arm: Arm) -> str | None:
            if not expected or arm is sweep.reference:
                return None
            return describe_equality(find_first_difference(read_losses(arm), expected))

        yield step_column()
        yield samples_column()
        yield relative_column(sweep.reference, f"× seed {self.job.seed}")
        yield text_column("repeats", "losses of its launches", compare_launches)
        yield text_column("against_first", f"losses against seed {self.job.seed}", compare_seeds)

    def draw_charts(self, table: Table, sweep: Sweep) -> Iterable[Chart | None]:
        yield draw_launches([arm for arm in sweep.arms.values() if arm.is_measured])

    def read_repeats(self, sweep: Sweep) -> Repeats:
        """All launches with the first seed, with a warm-up of their own, whatever --warmup is."""
        arms = group_arms([result for arm in sweep.arms.values() for result in arm.results], None)
        return Repeats.from_arms(arms.values(), self.job.seed, self.dropped)

    def list_sections(self, sweep: Sweep) -> Iterator[Section]:
        repeats = self.read_repeats(sweep)
        if repeats.launches:
            first, ways = make_step_table(repeats), make_way_table(repeats)
            yield Section(heading="The first steps", tables=(first,), charts=(draw_first_steps(repeats),))
            chart = draw_columns(
                ways, ["step_seconds"], title="Ways to time a step", from_zero=False, caption=f"Thin lines: {REACH}."
            )
            yield Section(heading="Ways to time a step", tables=(ways,), charts=keep_charts(chart))
        if repeats.spread is not None:
            yield Section(heading="Launches for a precision", tables=(make_launch_table(repeats),))

    def list_findings(self, sweep: Sweep) -> Iterator[Finding]:
        repeats = self.read_repeats(sweep)
        yield from describe_losses(repeats)
        yield from self._describe_seeds(sweep)
        if repeats.launches:
            yield describe_warmup(repeats)
            yield describe_mean(repeats)
            yield from describe_precision(repeats)
            yield describe_spread(repeats)

    def _describe_seeds(self, sweep: Sweep) -> Iterator[Finding]:
        expected = read_losses(sweep.reference)
        for arm in sweep.rows:
            if arm is sweep.reference or not arm.completed or not expected:
                continue
            step = find_first_difference(read_losses(arm), expected)
            if step is None:
                text = f"With {arm.label}, losses are the same: the seed reaches neither weights nor data."
                yield OTHER_SEED(arm.label, text, step=None, weight=REASON)
            else:
                yield OTHER_SEED(arm.label, f"With {arm.label}, losses differ from step {step} on.", step=step)


def describe_equality(step: int | None) -> str:
    return "bit-equal" if step is None else f"differ from step {step} on"


def find_unequal_step(results: Sequence[TrialResult]) -> int | None:
    """The first step whose loss differs between any of the results and the first of them; None: none does."""
    losses = [result.losses() for result in results]
    steps = [find_first_difference(other, losses[0]) for other in losses[1:]]
    return min((step for step in steps if step is not None), default=None)


Way = tuple[str, Estimate]
"""One way to time a step, with where one more measurement would fall; the last one has its confidence interval."""


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """All launches with the first seed: the row itself and its control."""

    launches: Rounds
    """Clean steps from the very first on, one launch after the other."""
    dropped: int
    warmup: Warmup
    """As the steps of all rows show it."""
    unequal_step: int | None
    """The first step whose loss is not the same in all launches; None: there is none."""
    num_steps: int
    """Steps of a launch whose losses were compared."""

    @classmethod
    def from_arms(cls, arms: Iterable[Arm], seed: int, dropped: int) -> Repeats:
        same = [arm for arm in arms if arm.trial.seed == seed]
        results = [result for arm in same for result in arm.completed]
        series = [list(result.step_seconds(StepKind.CLEAN).values()) for result in results]
        return cls(
            launches=[steps for steps in series if len(steps) > dropped],
            dropped=dropped,
            warmup=Warmup(
                num_steps=max((arm.num_dropped for arm in same), default=0),
                is_settled=all(arm.warmup.is_settled for arm in same),
            ),
            unequal_step=find_unequal_step(results),
            num_steps=min((len(result.losses()) for result in results), default=0),
        )

    @property
    def rest(self) -> Rounds:
        return [steps[self.dropped :] for steps in self.launches]

    @property
    def settled(self) -> Rounds:
        """Steps without the warm-up that was found; all of them, if nothing settled."""
        cut = self.warmup.num_steps if self.warmup.is_settled else 0
        return [steps[cut:] for steps in self.launches]

    def compare_step(self, number: int) -> Estimate:
        """One of the first steps over the median of the rest of its launch."""
        return estimate_ratio([[steps[number]] for steps in self.launches], self.rest)

    @property
    def first_ratio(self) -> Estimate:
        """The first steps over the rest: the ratio of their medians, launch by launch."""
        return estimate_ratio([steps[: self.dropped] for steps in self.launches], self.rest)

    @property
    def mean_ratio(self) -> Estimate:
        """The mean of all steps over the mean without the first ones, launch by launch."""
        whole = [[statistics.fmean(steps)] for steps in self.launches]
        return estimate_ratio(whole, [[statistics.fmean(steps)] for steps in self.rest])

    @property
    def median(self) -> Estimate:
        """Ours: the median over all launches."""
        return estimate_median(self.settled)

    @property
    def ten_steps(self) -> Estimate | None:
        """The mean of ten settled steps, as if measured in one launch; None if no launch has as many."""
        found = [statistics.fmean(steps[:TEN]) for steps in self.settled if len(steps) >= TEN]
        return predict_one_more(found) if found else None

    @property
    def ways(self) -> list[Way]:
        """The usual ways to time a step, each as if measured in one launch, and ours over all launches."""
        first = [statistics.fmean(steps[:TEN]) for steps in self.launches if len(steps) >= TEN]
        found: list[tuple[str, Estimate | None]] = [
            ("mean of all steps", predict_one_more([statistics.fmean(steps) for steps in self.launches])),
            (f"mean without the first {self.dropped}", predict_one_more([statistics.fmean(s) for s in self.rest])),
            (f"mean of the first {TEN} steps", predict_one_more(first) if first else None),
            (f"mean of {TEN} settled steps", self.ten_steps),
            ("median of settled steps", predict_one_more([statistics.median(steps) for steps in self.settled])),
            (f"median of {len(self.launches)} launches", self.median),
        ]
        return [(label, step) for label, step in found if step is not None]

    @property
    def spread(self) -> Estimate | None:
        """The relative standard deviation of launches' medians; None for a single launch."""
        return estimate_spread([statistics.median(steps) for steps in self.settled])

    def count_launches(self, precision: float) -> tuple[int | None, int | None, int | None]:
        """Launches that a precision takes: by the spread as measured, at its lower and at its upper limit."""
        spread = self.spread
        if spread is None or spread.low is None or spread.high is None:
            return None, None, None
        expected, least, most = (count_launches(s, precision) for s in (spread.value, spread.low, spread.high))
        return expected, least, most


def draw_launches(measured: Sequence[Arm]) -> Chart | None:
    """The median of every launch: what the same thing gives when measured again."""
    rows: list[Row] = [
        {"series": arm.label, "launch": number, "seconds": estimate_median([steps]), "key": arm.label}
        for arm in measured[:MOST_SERIES]
        for number, steps in enumerate(arm.clean, start=1)
        if len(steps)
    ]
    if len(rows) < 2:
        return None
    more = f" {len(measured) - MOST_SERIES} more are not drawn." if len(measured) > MOST_SERIES else ""
    return plot_lines(
        title="Step time by launch",
        x=Axis(field="launch", title="launch", quantity="count", from_zero=False),
        y=Axis(field="seconds", title="step", quantity="seconds", from_zero=False),
        rows=rows,
        caption="Medians of launches. Vertical lines are 95 % confidence intervals over the steps of a launch: they do"
        f" not cover how launches differ.{more}",
    )


def draw_first_steps(repeats: Repeats) -> Chart:
    shown = min(3 * repeats.dropped, min(map(len, repeats.launches)))
    rows: list[Row] = [
        {"series": "step", "step": number, "ratio": repeats.compare_step(number)} for number in range(shown)
    ]
    return plot_lines(
        title="The first steps of a launch",
        x=Axis(field="step", title="step", quantity="count", from_zero=False),
        y=Axis(field="ratio", title="time over the median of the rest", quantity="ratio"),
        rows=rows,
        guides=[{"series": "the rest", "step": place, "ratio": 1.0} for place in (0, shown - 1)],
        caption="Vertical lines are 95 % confidence intervals.",
    )


def make_step_table(repeats: Repeats) -> Table:
    """Each of the first steps, all of them, and the rest."""
    launches, dropped = repeats.launches, repeats.dropped
    singles = [
        (str(number), estimate_median([[steps[number]] for steps in launches]), repeats.compare_step(number))
        for number in range(dropped)
    ]
    first = (f"0 to {dropped - 1}", estimate_median([steps[:dropped] for steps in launches]), repeats.first_ratio)
    rest = (f"{dropped} on", estimate_median(repeats.rest), Estimate(value=1.0))
    return make_table(
        [*singles, first, rest],
        text_column("steps", "steps", lambda row: row[0]),
        seconds_column("step_seconds", "step", lambda row: row[1]),
        ratio_column("rest_ratio", "× the rest", lambda row: row[2]),
        notes=(INTERVAL_NOTE,),
    )


def make_way_table(repeats: Repeats) -> Table:
    """What each way of timing gives, how far it is from the last, and how far one more would be from it."""

    def reach(way: Way) -> float | None:
        return None if way[1].half_width is None else way[1].half_width / way[1].value

    return make_table(
        repeats.ways,
        text_column("way", "way", lambda way: way[0]),
        seconds_column("step_seconds", "step", lambda way: way[1]),
        ratio_column("against_last", "× the last row", lambda way: way[1].value / repeats.median.value),
        share_column("reach", "±", reach),
        notes=(f"±: {REACH}",),
    )


def make_launch_table(repeats: Repeats) -> Table:
    return make_table(
        [(precision, repeats.count_launches(precision)) for precision in PRECISIONS],
        text_column("precision", "precision", lambda row: f"± {format_share(row[0])}"),
        count_column("launches", "launches", lambda row: row[1][0]),
        count_column("least", "at least", lambda row: row[1][1]),
        count_column("most", "at most", lambda row: row[1][2]),
        notes=("at least, at most: at the ends of the 95 % interval of the spread between launches",),
    )


def describe_losses(repeats: Repeats) -> Iterator[Finding]:
    num_launches, step = len(repeats.launches), repeats.unequal_step
    if num_launches < 2:
        return
    if step is None:
        text = f"The same seed gives bit-equal losses in all {repeats.num_steps} steps of {num_launches} launches."
    else:
        text = f"The same seed does not give the same losses: {num_launches} launches differ from step {step} on."
    yield LOSSES_EQUAL("", text, is_equal=step is None, first_step=step, weight=MAIN)


def describe_warmup(repeats: Repeats) -> Finding:
    last, found, ratio = repeats.dropped - 1, repeats.warmup, repeats.first_ratio
    which = f"Steps 0 to {last} take" if last else "Step 0 takes"
    alone = f" (step 0 alone {format_quantity('ratio', repeats.compare_step(0))})" if last else ""
    if not found.is_settled:
        verdict = f"steps have not settled after {found.num_steps}, so these are not steady step times"
    else:
        enough = "too few" if found.num_steps > repeats.dropped else "enough"
        slow = [str(n) for n in range(repeats.dropped) if judge(repeats.compare_step(n)) is Verdict.SLOWER]
        named = f"only step{'s' if len(slow) > 1 else ''} {' and '.join(slow)}" if slow else "no single step"
        verdict = f"clearly slower than the rest: {named}; dropping {repeats.dropped} is {enough}"
    text = f"{which} {format_interval('ratio', ratio)} times as long as the rest by medians{alone}; {verdict}."
    return WARMUP("", text, ratio=ratio, found=found.num_steps, dropped=repeats.dropped)


def describe_mean(repeats: Repeats) -> Finding:
    error = repeats.mean_ratio.map(lambda ratio: ratio - 1)
    more, size = ("longer", error) if error.value >= 0 else ("shorter", error.map(lambda ratio: -ratio))
    than = f"{more} than without the first {repeats.dropped}"
    text = f"The mean of all {min(map(len, repeats.launches))} steps is {format_quantity('share', size)} {than}."
    if not is_known(error):
        text = "What the first steps do to a mean over all steps is unknown: the interval includes 0."
    return MEAN_ERROR("", text, error=error)


def describe_precision(repeats: Repeats) -> Iterator[Finding]:
    ten, ours = repeats.ten_steps, repeats.median
    if ten is None or ten.half_width is None or ours.half_width is None:
        return
    widths = ten.half_width / ten.value, ours.half_width / ours.value
    text = (
        f"A mean of {TEN} settled steps of one launch is good to ± {format_share(widths[0])}, the median of"
        f" {len(repeats.launches)} launches to ± {format_share(widths[1])} with their outliers."
    )
    yield PRECISION("", text, ten=widths[0], launches=widths[1])


def describe_spread(repeats: Repeats) -> Finding:
    if repeats.spread is None:
        return SPREAD("", "A single launch does not show how launches differ.", weight=ASIDE)
    needs = []
    for precision in (0.01, 0.05):
        expected, least, most = (UNKNOWN if n is None else str(n) for n in repeats.count_launches(precision))
        spread = f"{least} or more" if most == UNKNOWN else f"{least} to {most}"
        needs.append(f"± {format_share(precision)} takes {expected} launches ({spread})")
    differ = f"Apart from outliers, launches differ by {format_interval('share', repeats.spread)} (standard deviation)"
    return SPREAD("", f"{differ}: {', '.join(needs)}.", spread=repeats.spread)
