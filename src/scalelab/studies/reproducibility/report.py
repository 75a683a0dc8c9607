"""What launches of the same thing say about measuring: first steps, ways to time, spread between launches.

The charts of `reproducibility`: launches beside each other, the first steps, the ways to time a step.

The tables about measuring: the first steps, the ways to time, the launches that a precision takes.

Why seeds and why warm-up, in words with numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.quality import Warmup, count_launches, estimate_spread, predict_one_more
from scalelab.analysis.stats import Rounds, estimate_median, estimate_ratio
from scalelab.records.trial import StepKind, TrialResult
from scalelab.report.charts.amounts import plot_amounts
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import MOST_SERIES, plot_lines
from scalelab.report.document import Chart, Column, Table, make_row
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.losses import find_first_difference
from scalelab.studies.shared.sweep import INTERVAL_NOTE
from scalelab.units import format_interval, format_quantity, format_share

TEN = 10
"""Steps of the mean that is usually taken."""
PRECISIONS = (0.01, 0.02, 0.05)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to time a step."""

    label: str
    step: Estimate
    """With where one more measurement of the kind would fall; of the last way, with its confidence interval."""


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
        launches = [steps for steps in series if len(steps) > dropped]
        return cls(
            launches=launches,
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
        """What is left when the warm-up is taken off as it was found; everything, where nothing settled."""
        cut = self.warmup.num_steps if self.warmup.is_settled else 0
        return [steps[cut:] for steps in self.launches]

    @property
    def medians(self) -> list[float]:
        """One per launch, of its settled steps."""
        return [statistics.median(steps) for steps in self.settled]

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
    def ways(self) -> list[Way]:
        """The usual ways to time a step, each as if it had been done in one launch, and ours over all of them."""
        ten = [statistics.fmean(steps[:TEN]) for steps in self.settled if len(steps) >= TEN]
        first_ten = [statistics.fmean(steps[:TEN]) for steps in self.launches if len(steps) >= TEN]
        found = [("mean of all steps", [statistics.fmean(steps) for steps in self.launches])]
        found.append((f"mean without the first {self.dropped}", [statistics.fmean(steps) for steps in self.rest]))
        found.append((f"mean of the first {TEN} steps", first_ten))
        found.append((f"mean of {TEN} settled steps", ten))
        found.append(("median of settled steps", self.medians))
        ways = [Way(label=label, step=predict_one_more(values)) for label, values in found if values]
        whole = f"median of {len(self.launches)} launches"
        return [*ways, Way(label=whole, step=estimate_median(self.settled))]

    @property
    def spread(self) -> Estimate | None:
        """The relative standard deviation of launches' medians; None for a single launch."""
        return estimate_spread(self.medians)

    def count_launches(self, precision: float) -> tuple[int | None, int | None, int | None]:
        """Launches that a precision takes: by the spread as measured, at its lower and at its upper limit."""
        spread = self.spread
        if spread is None or spread.low is None or spread.high is None:
            return None, None, None
        expected, least, most = (count_launches(s, precision) for s in (spread.value, spread.low, spread.high))
        return expected, least, most


def find_unequal_step(results: Sequence[TrialResult]) -> int | None:
    """The first step whose loss differs between any of the results and the first of them; None: none does."""
    losses = [result.losses() for result in results]
    steps = [find_first_difference(other, losses[0]) for other in losses[1:]]
    return min((step for step in steps if step is not None), default=None)


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


def make_step_table(repeats: Repeats) -> Table:
    """Each of the first steps, all of them, and the rest."""
    columns = (
        Column(key="steps", header="steps", align="left"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="rest_ratio", header="× the rest", quantity="ratio"),
    )
    launches, dropped = repeats.launches, repeats.dropped
    rows = [
        make_row(f"{number}", estimate_median([[steps[number]] for steps in launches]), repeats.compare_step(number))
        for number in range(dropped)
    ]
    first = estimate_median([steps[:dropped] for steps in launches])
    rows.append(make_row(f"0 to {dropped - 1}", first, repeats.first_ratio))
    rows.append(make_row(f"{dropped} on", estimate_median(repeats.rest), 1.0))
    return Table(columns=columns, rows=tuple(rows), notes=(INTERVAL_NOTE,))


def make_way_table(repeats: Repeats) -> Table:
    """What each way of timing gives, how far it is from the last, and how far one more would be from it."""
    columns = (
        Column(key="way", header="way", align="left"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="against_last", header="× the last row", quantity="ratio"),
        Column(key="reach", header="reach", quantity="share"),
    )
    ways = repeats.ways
    best = ways[-1].step.value
    rows = []
    for way in ways:
        width = way.step.half_width
        reach = None if width is None else width / way.step.value
        rows.append(make_row(way.label, way.step, way.step.value / best, reach))
    notes = (
        "± of a way is where one more measurement of its kind, in one launch, falls in 95 of 100 cases",
        "± of the last row is a 95 % confidence interval",
    )
    return Table(columns=columns, rows=tuple(rows), notes=notes)


def make_launch_table(repeats: Repeats) -> Table:
    columns = (
        Column(key="precision", header="precision", align="left"),
        Column(key="launches", header="launches", quantity="count"),
        Column(key="least", header="at least", quantity="count"),
        Column(key="most", header="at most", quantity="count"),
    )
    rows = tuple(
        make_row(f"± {format_share(precision)}", *repeats.count_launches(precision)) for precision in PRECISIONS
    )
    notes = ("at least, at most: with the spread between launches at the ends of its 95 % interval",)
    return Table(columns=columns, rows=rows, notes=notes)


def summarise_repeats(repeats: Repeats, seeds: Mapping[int, int | None]) -> tuple[str, ...]:
    """The findings; `seeds` has the first step that differs under every other seed."""
    return tuple(_find_sentences(repeats, seeds))


def _find_sentences(repeats: Repeats, seeds: Mapping[int, int | None]) -> Iterator[str]:
    yield from _describe_losses(repeats)
    yield from _describe_seeds(seeds)
    if repeats.launches:
        yield from _describe_warmup(repeats)
        yield from _describe_ways(repeats)
        yield from _describe_spread(repeats)


def _describe_losses(repeats: Repeats) -> Iterator[str]:
    num_launches = len(repeats.launches)
    if num_launches < 2:
        return
    if repeats.unequal_step is None:
        yield (
            f"The same seed gives the same training: the losses of {num_launches} launches are bit-equal in all"
            f" {repeats.num_steps} steps."
        )
    else:
        yield (
            f"The same seed does not give the same training: of {num_launches} launches the losses differ from step"
            f" {repeats.unequal_step} on."
        )


def _describe_seeds(seeds: Mapping[int, int | None]) -> Iterator[str]:
    differing = [step for step in seeds.values() if step is not None]
    same = [seed for seed, step in seeds.items() if step is None]
    if differing:
        yield f"Another seed gives another training: losses differ from step {min(differing)} on."
    if same:
        listed = ", ".join(map(str, same))
        yield f"Seed {listed} gave the very same losses: the seed reaches neither weights nor data."


def _describe_warmup(repeats: Repeats) -> Iterator[str]:
    last = repeats.dropped - 1
    which = f"steps 0 to {last} take" if last else "step 0 takes"
    alone = f"; step 0 alone {format_quantity('ratio', repeats.compare_step(0))} times" if last else ""
    yield f"Why warm-up: {which} {format_interval('ratio', repeats.first_ratio)} times as long as the rest{alone}."
    error = repeats.mean_ratio.map(lambda ratio: ratio - 1)
    more = "longer" if error.value >= 0 else "shorter"
    size = format_quantity("share", error.map(lambda ratio: -ratio) if error.value < 0 else error)
    yield f"A mean that includes them is {size} {more} than one that leaves them out."
    found = repeats.warmup
    if not found.is_settled:
        yield f"The steps have not settled after {found.num_steps}: none of these numbers is that of a steady training."
    elif found.num_steps > repeats.dropped:
        yield f"The steps show a warm-up of {found.num_steps}: dropping {repeats.dropped} is too few."
    else:
        yield f"The steps show a warm-up of {found.num_steps}: dropping {repeats.dropped} is enough."


def _describe_ways(repeats: Repeats) -> Iterator[str]:
    ways = {way.label: way.step for way in repeats.ways}
    ten, ours = ways.get(f"mean of {TEN} settled steps"), repeats.ways[-1].step
    if ten is None or ten.half_width is None or ours.half_width is None:
        return
    yield (
        f"A mean of {TEN} settled steps of one launch falls within ± {format_share(ten.half_width / ten.value)}; the"
        f" median of {len(repeats.launches)} launches is known to ± {format_share(ours.half_width / ours.value)}."
    )


def _describe_spread(repeats: Repeats) -> Iterator[str]:
    spread = repeats.spread
    if spread is None:
        yield "One launch cannot say how launches differ."
        return
    needs = []
    for precision in (0.01, 0.05):
        expected, least, most = repeats.count_launches(precision)
        number = "–" if expected is None else str(expected)
        limits = f"{'–' if least is None else least} to {'–' if most is None else most}"
        needs.append(f"± {format_share(precision)} takes {number} launches ({limits})")
    yield f"Launches differ by {format_interval('share', spread)} (standard deviation): {', '.join(needs)}."
