"""Batch scaling: a fixed number of ranks, larger and larger batches.

A batch can be read in two ways. As a global one, N ranks share it, and the plain loop does the same work (strong
scaling). As one per rank, N ranks do N times the work of the plain loop (weak scaling). Both are answered from one set
of trials: the plain loop on every batch, and the strategy on every global batch that either reading asks for.

The model: a rank's own work is a straight line in its batch, taken from the plain loop, and the exchange of gradients
costs the same whatever the batch, for they are as many. Their sum is what a step should take.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from scalelab.analysis.batch_size import SaturationFit, fit_saturation
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_ablation
from scalelab.analysis.stats import estimate_ratio
from scalelab.checks import check_at_least, check_divisible
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import plot_lines
from scalelab.report.document import Cell, Chart, Column, Document, Section, Table, make_cell, make_row
from scalelab.report.findings import as_findings
from scalelab.strategies.catalogue import Spread
from scalelab.studies.batch_size.study import check_batches, describe_saturation, warn_of_fit
from scalelab.studies.shared.arms import Arm, describe_failures, describe_status, group_arms, join_words
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import (
    INTERVAL_NOTE,
    describe_measurement,
    explain_marks,
    find_marks,
    find_sweep_cautions,
    plan_sweep,
)
from scalelab.units import format_quantity, format_share

Reading = Literal["global", "per-rank"]
LARGE_GAIN = 1.05
"""A doubling of the batch that raises throughput by less counts as saturation."""


@dataclass(frozen=True, kw_only=True)
class BatchScaling(Study):
    """Batches against speedup, efficiency and throughput, at a fixed number of ranks."""

    name: ClassVar[str] = "batch-scaling"
    title: ClassVar[str] = "Batch scaling"
    question: ClassVar[str] = "How does the gain from more ranks depend on the batch, and where does it saturate?"

    batches: tuple[int, ...] = (32, 64, 128, 256)
    """Samples per step, ascending."""
    reading: Literal["global", "per-rank", "both"] = "both"
    """Whether a batch is what all ranks share, or what each of them has."""
    ranks: int = 2
    """Ranks of the strategy."""
    strategy: Spread = "ddp"
    """How the training is spread."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 2)
        check_batches(self.batches)
        if "global" in self.readings:
            for batch in self.batches:
                check_divisible(batch, self.ranks)

    @property
    def readings(self) -> tuple[Reading, ...]:
        return ("global", "per-rank") if self.reading == "both" else (self.reading,)

    def spread_batch(self, batch: int, reading: Reading) -> int:
        """The global batch that a batch means."""
        return batch if reading == "global" else batch * self.ranks

    def plan(self) -> list[Trial]:
        plain = [
            Configuration(
                name=f"single-b{batch}",
                label=f"plain loop, {batch}",
                strategy="single",
                num_ranks=1,
                global_batch=batch,
            )
            for batch in self.batches
        ]
        wanted = sorted({self.spread_batch(batch, reading) for batch in self.batches for reading in self.readings})
        spread = [
            Configuration(
                name=f"{self.strategy}-{self.ranks}-b{batch}",
                label=f"{self.strategy} × {self.ranks}, {batch}",
                strategy=self.strategy,
                num_ranks=self.ranks,
                global_batch=batch,
            )
            for batch in wanted
        ]
        return plan_sweep(self.job, self.sampling, [*plain, *spread])

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        answer = BatchAnswer(study=self, arms=arms)
        sections = [
            Section(
                heading=READING_WORDS[reading],
                tables=(make_reading_table(answer, reading),),
                charts=plot_gains(answer) if reading == self.readings[0] else (),
            )
            for reading in self.readings
        ]
        if answer.model is not None:
            model = Section(
                heading="The model beside the measurement",
                tables=(make_model_table(answer),),
                charts=(plot_model(answer),),
            )
            sections.append(model)
        where = f"{self.strategy} × {self.ranks}"
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(self.job, self.sampling, arms.values(), where, self.job.dtype),
            sections=tuple(sections),
            findings=as_findings(find_sentences(answer)),
            cautions=(*find_sweep_cautions(arms, answer.plain(self.batches[0])), *warn_of_fit(answer.plain_fit)),
        )


READING_WORDS: dict[Reading, str] = {
    "global": "The batch as the global one",
    "per-rank": "The batch as that of each rank",
}


SERIES_WORDS: dict[Reading, str] = {"global": "shared by all ranks", "per-rank": "on each rank"}


@dataclass(frozen=True, kw_only=True)
class BatchAnswer:
    """The arms of the study, and what can be asked of them."""

    study: BatchScaling
    arms: dict[str, Arm]

    def plain(self, batch: int) -> Arm | None:
        return self.arms.get(f"single-b{batch}")

    def spread(self, global_batch: int) -> Arm | None:
        return self.arms.get(f"{self.study.strategy}-{self.study.ranks}-b{global_batch}")

    @property
    def measured(self) -> list[Arm]:
        """The strategy's rows that were measured, by batch."""
        found = [arm for arm in self.arms.values() if arm.trial.strategy != "single" and arm.is_measured]
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
        """The exposed exchange of gradients: the median over the batches."""
        found = [communication_by_ablation(arm.clean, arm.comm_free) for arm in self.measured if any(arm.comm_free)]
        return statistics.median(max(one.seconds.value, 0.0) for one in found) if found else None

    @property
    def model(self) -> SaturationFit | None:
        """The straight line of a rank's own work; None where it or the exchange is not known."""
        return self.plain_fit if self.exchange_seconds is not None and self.measured else None

    def predict_seconds(self, arm: Arm) -> float | None:
        """What a step should take: the line at the rank's own batch, and the exchange."""
        if self.model is None or self.exchange_seconds is None:
            return None
        return self.model.predict_seconds(arm.trial.batch_per_rank) + self.exchange_seconds


def make_reading_table(answer: BatchAnswer, reading: Reading) -> Table:
    """One row per batch: the plain loop, the strategy, and what the ranks gain."""
    study = answer.study
    columns = (
        Column(key="batch", header="batch", quantity="count"),
        Column(key="plain_seconds", header="plain loop", quantity="seconds"),
        Column(key="step_seconds", header=f"{study.strategy} × {study.ranks}", quantity="seconds"),
        Column(key="samples_per_second", header="samples/s", quantity="rate", shows_interval=False),
        Column(key="speedup", header="speedup", quantity="ratio"),
        Column(key="efficiency", header="efficiency", quantity="share", shows_interval=False),
    )
    rows = []
    for batch in study.batches:
        spread = answer.spread(study.spread_batch(batch, reading))
        speedup = answer.speedup(batch, reading)
        rate = None
        if spread is not None and spread.is_measured:
            work = spread.trial.global_batch
            rate = spread.step.map(lambda seconds, work=work: work / seconds)  # type: ignore[misc]
        efficiency = None if speedup is None else speedup.map(lambda ratio: ratio / study.ranks)
        rows.append(make_row(batch, _show_step(answer.plain(batch)), _show_step(spread), rate, speedup, efficiency))
    over = "the same batch" if reading == "global" else "the batch of one rank"
    notes = (INTERVAL_NOTE, f"speedup: samples/s over the plain loop's on {over}", *explain_marks(answer.arms.values()))
    return Table(columns=columns, rows=tuple(rows), notes=notes)


def _show_step(arm: Arm | None) -> Cell:
    if arm is None:
        return Cell()
    return make_cell(arm.step if arm.is_measured else describe_status(arm), mark=find_marks(arm))


def plot_gains(answer: BatchAnswer) -> tuple[Chart, ...]:
    """The speedup by batch, in every reading: from the plain loop's work to that of as many ranks."""
    study = answer.study
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for reading in study.readings:
        for batch in study.batches:
            place = {"series": SERIES_WORDS[reading], "batch": batch, "key": f"batch {batch}"}
            speedup = answer.speedup(batch, reading)
            if speedup is not None:
                rows.append(place | {"speedup": speedup})
            else:
                spread, plain = answer.spread(study.spread_batch(batch, reading)), answer.plain(batch)
                lost = plain if plain is None or not plain.is_measured else spread
                failed.append(place | {"status": describe_status(lost)})
    if not rows:
        return ()
    ends = (study.batches[0], study.batches[-1])
    chart = plot_lines(
        title="Speedup against the batch",
        x=Axis(field="batch", title="batch", quantity="count", is_log=True, ticks=study.batches),
        y=Axis(field="speedup", title="samples/s over the plain loop's", quantity="ratio"),
        rows=rows,
        guides=[{"series": "ideal", "batch": batch, "speedup": float(study.ranks)} for batch in ends],
        failed=failed,
        caption=join_words(
            "Bars are 95 % confidence intervals.", *describe_failures((row["key"], row["status"]) for row in failed)
        ),
    )
    return (chart,)


def plot_model(answer: BatchAnswer) -> Chart:
    """The measured step of every global batch, and what the model says of it."""
    pairs = [(arm, answer.predict_seconds(arm)) for arm in answer.measured]
    return plot_lines(
        title="A step against the global batch",
        x=Axis(field="batch", title="global batch", quantity="count"),
        y=Axis(field="seconds", title="step time", quantity="seconds"),
        rows=[
            {"series": "measured", "batch": arm.trial.global_batch, "seconds": arm.step, "key": arm.label}
            for arm, _ in pairs
        ],
        guides=[
            {"series": "model", "batch": arm.trial.global_batch, "seconds": seconds}
            for arm, seconds in pairs
            if seconds is not None
        ],
        caption="Bars are 95 % confidence intervals.",
    )


def make_model_table(answer: BatchAnswer) -> Table:
    columns = (
        Column(key="batch", header="global batch", quantity="count"),
        Column(key="batch_per_rank", header="per rank", quantity="count"),
        Column(key="measured_seconds", header="measured", quantity="seconds"),
        Column(key="model_seconds", header="model", quantity="seconds"),
        Column(key="distance", header="off by", quantity="share"),
    )
    rows = []
    for arm in answer.measured:
        model = answer.predict_seconds(arm)
        off = arm.step.map(lambda seconds, model=model: seconds / model - 1) if model else None  # type: ignore[misc]
        rows.append(make_row(arm.trial.global_batch, arm.trial.batch_per_rank, arm.step, model, off))
    exchange = format_quantity("seconds", answer.exchange_seconds)
    note = f"model: the plain loop's straight line at the rank's own batch, and {exchange} of exposed exchange"
    return Table(columns=columns, rows=tuple(rows), notes=(INTERVAL_NOTE, note))


def find_sentences(answer: BatchAnswer) -> Iterator[str]:
    for reading in answer.study.readings:
        yield from describe_gain(answer, reading)
    yield from describe_doubling(answer)
    measured = answer.measured
    if len(measured) > 1:
        yield from describe_saturation(
            measured, fit_saturation({arm.trial.batch_per_rank: arm.clean for arm in measured})
        )
    yield from describe_model(answer)


def describe_gain(answer: BatchAnswer, reading: Reading) -> Iterator[str]:
    """How the speedup changes from the smallest to the largest batch."""
    known = [(batch, found) for batch in answer.study.batches if (found := answer.speedup(batch, reading)) is not None]
    if not known:
        return
    study = answer.study
    ends = [known[0], known[-1]] if len(known) > 1 else known
    words = " and ".join(f"{format_quantity('ratio', found)} at batch {batch}" for batch, found in ends)
    how = "shared by all ranks" if reading == "global" else "on each rank"
    yield f"With the batch {how}, {study.strategy} on {study.ranks} ranks does {words} times the plain loop's work."


def describe_doubling(answer: BatchAnswer) -> Iterator[str]:
    """The first batch from which on a doubling gains little."""
    rates = {arm.trial.global_batch: arm for arm in answer.measured}
    doubled = {batch: rates[2 * batch] for batch in rates if 2 * batch in rates}
    for batch, double in doubled.items():
        arm = rates[batch]
        gain = estimate_ratio(arm.clean, double.clean).map(lambda ratio: 2 * ratio)
        if gain.value < LARGE_GAIN:
            yield (
                f"Throughput saturates at global batch {batch}: twice as many samples raise it by a factor of"
                f" {format_quantity('ratio', gain)} only."
            )
            return
    if doubled:
        last = 2 * max(doubled)
        yield f"Throughput has not saturated at global batch {last}: each doubling still gained 5 % or more."


def describe_model(answer: BatchAnswer) -> Iterator[str]:
    """How far the model and the measurement are apart."""
    pairs = [(arm, answer.predict_seconds(arm)) for arm in answer.measured]
    distances = [(abs(arm.step.value / model - 1), arm) for arm, model in pairs if model]
    if not distances:
        return
    worst, arm = max(distances, key=lambda pair: pair[0])
    yield (
        f"The model, a straight line in the batch and a constant exchange, is off by {format_share(worst)} at most, at"
        f" global batch {arm.trial.global_batch}"
        f" (by {format_share(statistics.median(distance for distance, _ in distances))} in the median)."
    )
