"""Batch scaling: a fixed number of ranks, larger and larger batches.

A batch has two readings. As a global batch, N ranks share it, and the plain loop does the same work (strong scaling).
As a batch per rank, N ranks do N times the work of the plain loop (weak scaling). One set of trials answers both: the
plain loop on every batch, and the strategy on every global batch that either reading needs.

The model: a rank's own work is a straight line in its batch, fitted to the plain loop, and the gradient all-reduce
costs the same whatever the batch, because there are as many gradients. Their sum is what a step should take.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from scalelab.analysis.batch_limits import SaturationFit, fit_saturation
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_ablation
from scalelab.analysis.stats import estimate_ratio
from scalelab.checks import check_at_least, check_divisible
from scalelab.records.strategies import PLAIN, ParallelStrategy, find_strategy
from scalelab.report.charts.column_charts import INTERVALS, draw_lines, keep_charts
from scalelab.report.charts.plot import Axis, Row
from scalelab.report.document import Cell, Chart, Section, Table, make_cell
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, Finding, FindingKind
from scalelab.report.tables import (
    INTERVAL_NOTE,
    PAIRED_NOTE,
    count_column,
    make_table,
    rate_column,
    ratio_column,
    seconds_column,
    share_column,
)
from scalelab.studies.batch_size import check_batches, describe_saturation, warn_of_fit
from scalelab.studies.shared.arms import Arm, describe_status
from scalelab.studies.shared.study import Configuration
from scalelab.studies.shared.sweep import Sweep, SweepStudy, explain_marks, find_marks
from scalelab.units import format_interval, format_known, format_quantity, format_share

Reading = Literal["global", "per-rank"]
READING_WORDS: dict[Reading, str] = {"global": "batch shared by all ranks", "per-rank": "batch on each rank"}
LARGE_GAIN = 1.05
"""A doubling of the batch that raises throughput by less counts as saturation."""

GAIN = FindingKind(
    "speedup-by-batch",
    "Throughput over the plain loop's, at the smallest and the largest batch",
    MAIN,
    ("smallest", "largest"),
)
DOUBLING = FindingKind(
    "doubling", "The first batch from which a doubling gains less than 5 %", REASON, ("global_batch", "gain")
)
MODEL_ERROR = FindingKind("model-error", "How far the model is from the steps", DETAIL, ("largest", "median"))


@dataclass(frozen=True, kw_only=True)
class BatchScaling(SweepStudy):
    """Batches against speedup, efficiency and throughput, at a fixed number of ranks."""

    batches: tuple[int, ...] = (32, 64, 128, 256)
    """Samples per step, ascending."""
    reading: Literal["global", "per-rank", "both"] = "both"
    """global: the ranks share each of --batches; per-rank: every rank gets a batch of that size; both: measure both."""
    ranks: int = 2
    """Ranks of the strategy."""
    strategy: ParallelStrategy = "ddp"
    """How training is distributed."""

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 2)
        check_batches(self.batches)
        if "global" in self.readings:
            for batch in self.batches:
                check_divisible(batch, self.ranks)

    @property
    def readings(self) -> tuple[Reading, ...]:
        return ("global", "per-rank") if self.reading == "both" else (self.reading,)

    @property
    def reference_name(self) -> str:
        return f"single-b{self.batches[0]}"

    def spread_batch(self, batch: int, reading: Reading) -> int:
        """The global batch that a batch means."""
        return batch if reading == "global" else batch * self.ranks

    def list_rows(self) -> Iterator[Configuration]:
        for batch in self.batches:
            name, label = f"single-b{batch}", f"plain loop, {batch}"
            yield Configuration(name=name, label=label, strategy=PLAIN, num_ranks=1, global_batch=batch)
        for batch in sorted({self.spread_batch(batch, reading) for batch in self.batches for reading in self.readings}):
            yield Configuration(
                name=f"{self.strategy}-{self.ranks}-b{batch}",
                label=f"{self.strategy} × {self.ranks}, {batch}",
                strategy=self.strategy,
                num_ranks=self.ranks,
                global_batch=batch,
            )

    def list_settings(self) -> Iterable[str]:
        yield self.job.dtype

    def make_main_section(self, sweep: Sweep) -> Section:
        return self._make_reading(BatchAnswer(study=self, arms=sweep.arms), self.readings[0])

    def _make_reading(self, answer: BatchAnswer, reading: Reading) -> Section:
        table = make_reading_table(answer, reading)
        return Section(
            heading=READING_WORDS[reading].capitalize(), tables=(table,), charts=draw_gain(table, self, reading)
        )

    def list_sections(self, sweep: Sweep) -> Iterator[Section]:
        answer = BatchAnswer(study=self, arms=sweep.arms)
        yield from (self._make_reading(answer, reading) for reading in self.readings[1:])
        if answer.model is not None:
            table = make_model_table(answer)
            chart = draw_lines(
                table,
                Axis(field="batch", title="global batch", quantity="count"),
                {"measured_seconds": "measured"},
                title="Step time by global batch",
                axis_title="step",
                guides={"model_seconds": "model"},
            )
            yield Section(heading="Model and measurement", tables=(table,), charts=keep_charts(chart))

    def list_findings(self, sweep: Sweep) -> Iterator[Finding]:
        answer = BatchAnswer(study=self, arms=sweep.arms)
        for reading in self.readings:
            yield from describe_gain(answer, reading)
        yield from describe_doubling(answer)
        measured = answer.measured
        if len(measured) > 1:
            fit = fit_saturation({arm.trial.batch_per_rank: arm.clean for arm in measured})
            yield from describe_saturation(measured, fit)
        yield from describe_model(answer)

    def list_cautions(self, sweep: Sweep) -> Iterable[Caution]:
        return warn_of_fit(BatchAnswer(study=self, arms=sweep.arms).plain_fit)


@dataclass(frozen=True, kw_only=True)
class BatchAnswer:
    """The arms of the study, and what they show."""

    study: BatchScaling
    arms: Mapping[str, Arm]

    def plain(self, batch: int) -> Arm | None:
        return self.arms.get(f"single-b{batch}")

    def spread(self, global_batch: int) -> Arm | None:
        return self.arms.get(f"{self.study.strategy}-{self.study.ranks}-b{global_batch}")

    @property
    def measured(self) -> list[Arm]:
        """The measured rows of the strategy, by batch."""
        measured = [arm for arm in self.arms.values() if arm.is_measured]
        found = [arm for arm in measured if not find_strategy(arm.trial.strategy).is_plain]
        return sorted(found, key=lambda arm: arm.trial.global_batch)

    def speedup(self, batch: int, reading: Reading) -> Estimate | None:
        """Samples per second over those of the plain loop on the same batch."""
        plain, spread = self.plain(batch), self.spread(self.study.spread_batch(batch, reading))
        if plain is None or spread is None or not plain.is_measured or not spread.is_measured:
            return None
        work = spread.trial.global_batch / batch
        return estimate_ratio(plain.clean, spread.clean).map(lambda ratio: ratio * work)

    @property
    def plain_fit(self) -> SaturationFit | None:
        found = [arm for batch in self.study.batches if (arm := self.plain(batch)) is not None and arm.is_measured]
        return fit_saturation({arm.trial.global_batch: arm.clean for arm in found})

    @property
    def exchange_seconds(self) -> float | None:
        """The exposed gradient all-reduce: the median over the batches."""
        found = [communication_by_ablation(arm.clean, arm.comm_free) for arm in self.measured if any(arm.comm_free)]
        return statistics.median(max(one.seconds.value, 0.0) for one in found) if found else None

    @property
    def model(self) -> SaturationFit | None:
        """The straight line of a rank's own work; None if it or the all-reduce is unknown."""
        return self.plain_fit if self.exchange_seconds is not None and self.measured else None

    def predict_seconds(self, arm: Arm) -> float | None:
        """What a step should take: the line at the rank's own batch, plus the all-reduce."""
        if self.model is None or self.exchange_seconds is None:
            return None
        return self.model.predict_seconds(arm.trial.batch_per_rank) + self.exchange_seconds

    def measure_error(self, arm: Arm) -> Estimate | None:
        """The step time over the model's, less 1."""
        model = self.predict_seconds(arm)
        return arm.step.map(lambda seconds: seconds / model - 1) if model else None


def make_reading_table(answer: BatchAnswer, reading: Reading) -> Table:
    """One row per batch: the plain loop, the strategy, and what the ranks gain."""
    study = answer.study

    def find_spread(batch: int) -> Arm | None:
        return answer.spread(study.spread_batch(batch, reading))

    def measure_rate(batch: int) -> Estimate | None:
        arm = find_spread(batch)
        if arm is None or not arm.is_measured:
            return None
        return arm.step.map(lambda seconds: arm.trial.global_batch / seconds)

    def measure_efficiency(batch: int) -> Estimate | None:
        speedup = answer.speedup(batch, reading)
        return speedup.map(lambda ratio: ratio / study.ranks) if speedup else None

    def is_shown(batch: int) -> bool:
        """Whether this run has it: an older one may lack batches that were added since."""
        return answer.plain(batch) is not None or find_spread(batch) is not None

    def name_batch(batch: int) -> int:
        return batch

    def show_spread(batch: int) -> Cell:
        return show_step(find_spread(batch))

    same = "the same batch" if reading == "global" else "the batch of one rank"
    others = (arm.trial.global_batch for arm in answer.measured) if reading == "global" else ()
    batches = sorted({*study.batches, *others})
    has_gaps = any(is_shown(batch) and answer.plain(batch) is None for batch in batches)
    return make_table(
        [batch for batch in batches if is_shown(batch)] or study.batches,
        count_column("batch", "batch", name_batch),
        seconds_column("plain_seconds", "plain loop", lambda batch: show_step(answer.plain(batch))),
        seconds_column("step_seconds", f"{study.strategy} × {study.ranks}", show_spread),
        rate_column("samples_per_second", "samples/s", measure_rate, shows_interval=False),
        ratio_column("speedup", "speedup", lambda batch: answer.speedup(batch, reading)),
        share_column("efficiency", "efficiency", measure_efficiency, shows_interval=False),
        notes=(
            INTERVAL_NOTE,
            f"speedup: samples/s over those of the plain loop (no process group) on {same}",
            f"samples/s: of {study.strategy} × {study.ranks}",
            PAIRED_NOTE,
            *(("–: the plain loop was not run at this batch",) if has_gaps else ()),
            *explain_marks(answer.arms.values()),
        ),
    )


def show_step(arm: Arm | None) -> Cell:
    if arm is None:
        return Cell()
    return make_cell(arm.step if arm.is_measured else describe_status(arm), mark=find_marks(arm))


def draw_gain(table: Table, study: BatchScaling, reading: Reading) -> tuple[Chart, ...]:
    """The speedup by batch, beside that of perfect scaling."""
    known = (row[0].value for row in table.rows if row[-1].value is not None)
    batches = tuple(float(batch) for batch in known if isinstance(batch, int | float)) or (float(study.batches[0]),)
    ideal: list[Row] = [
        {"batch": batch, "value": float(study.ranks), "series": "ideal"} for batch in (batches[0], batches[-1])
    ]
    chart = draw_lines(
        table,
        Axis(field="batch", title="batch", quantity="count", is_log=True, ticks=batches),
        ["speedup"],
        title=f"Speedup, {READING_WORDS[reading]}",
        axis_title="samples/s over the plain loop's",
        levels=ideal,
        caption=INTERVALS,
    )
    return keep_charts(chart)


def make_model_table(answer: BatchAnswer) -> Table:
    exchange = format_quantity("seconds", answer.exchange_seconds)
    return make_table(
        answer.measured,
        count_column("batch", "global batch", lambda arm: arm.trial.global_batch),
        count_column("batch_per_rank", "per rank", lambda arm: arm.trial.batch_per_rank),
        seconds_column("measured_seconds", "measured", lambda arm: arm.step),
        seconds_column("model_seconds", "model", answer.predict_seconds),
        share_column("distance", "error", answer.measure_error),
        notes=(
            INTERVAL_NOTE,
            f"model: the plain loop's straight line at the rank's own batch, plus {exchange} of exposed all-reduce",
        ),
    )


def describe_gain(answer: BatchAnswer, reading: Reading) -> Iterator[Finding]:
    """How the speedup changes from the smallest to the largest batch."""
    study = answer.study
    known = [(batch, found) for batch in study.batches if (found := answer.speedup(batch, reading)) is not None]
    if not known:
        return
    ends = [known[0], known[-1]] if len(known) > 1 else known
    words = ", ".join(f"{format_known('ratio', found)} at batch {batch}" for batch, found in ends)
    who = f"{study.strategy} on {study.ranks} ranks over the plain loop"
    text = f"Speedup of {who}, {READING_WORDS[reading]}: {words}."
    yield GAIN(reading, text, smallest=ends[0][1], largest=ends[-1][1])


def describe_doubling(answer: BatchAnswer) -> Iterator[Finding]:
    """The first batch from which a doubling gains little."""
    by_batch = {arm.trial.global_batch: arm for arm in answer.measured}
    gains = {
        batch: estimate_ratio(arm.clean, by_batch[2 * batch].clean).map(lambda ratio: 2 * ratio)
        for batch, arm in by_batch.items()
        if 2 * batch in by_batch
    }
    for batch, gain in gains.items():
        if gain.value < LARGE_GAIN:
            text = f"{judge_doubling(gain)} at global batch {batch}: doubling it gives {say_gain(gain)}."
            yield DOUBLING("", text, global_batch=batch, gain=gain)
            return
    if gains:
        last = max(gains)
        gain = gains[last]
        text = (
            f"{judge_doubling(gain)} at global batch {2 * last}, the largest: doubling {last} to {2 * last} gives"
            f" {say_gain(gain)}."
        )
        yield DOUBLING("", text, global_batch=None, gain=gain)


def judge_doubling(gain: Estimate) -> str:
    """Whether throughput saturates, by what one doubling gains; open where the interval includes the limit."""
    if gain.low is not None and gain.high is not None and gain.low < LARGE_GAIN <= gain.high:
        return "Unresolved whether throughput has saturated"
    return f"Throughput {'saturates' if gain.value < LARGE_GAIN else 'has not saturated'}"


def say_gain(gain: Estimate) -> str:
    """`1.12 (1.02 to 1.23) times as much, and less than 1.05 times counts as saturated`."""
    return f"{format_interval('ratio', gain)} times as much, and less than {LARGE_GAIN:g} times counts as saturated"


def describe_model(answer: BatchAnswer) -> Iterator[Finding]:
    """How far model and measurement are apart."""
    errors = [(abs(error.value), arm) for arm in answer.measured if (error := answer.measure_error(arm)) is not None]
    if not errors:
        return
    worst, arm = max(errors, key=lambda pair: pair[0])
    median = statistics.median(error for error, _ in errors)
    text = (
        "The model (a straight line in the batch plus a constant all-reduce) is off by at most"
        f" {format_share(worst)}, at global batch {arm.trial.global_batch}, {format_share(median)} (median)."
    )
    yield MODEL_ERROR(arm.label, text, largest=worst, median=median)
