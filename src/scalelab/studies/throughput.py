"""Throughput: tokens per second of the job as it is, and what that means for a model of another size.

A few steps of warm-up, then timed steps, repeated in fresh processes so that the interval covers how launches differ.
Beside the median stands the rate over all timed steps together: where the two differ, long steps are the reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.growth import Extrapolation, extrapolate_training
from scalelab.analysis.stats import estimate_over_rounds
from scalelab.checks import check_at_least, check_positive
from scalelab.report.charts.amounts import plot_amounts
from scalelab.report.charts.plot import Axis, Row
from scalelab.report.document import Chart, Section, Table
from scalelab.report.findings import ASIDE, DETAIL, MAIN, REASON, Finding, FindingKind
from scalelab.report.tables import INTERVAL_NOTE, Field, make_column, make_table, rate_column
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.study import Configuration, Sampling
from scalelab.studies.shared.sweep import Sweep, SweepStudy, memory_column, step_column
from scalelab.studies.shared.work import (
    count_if_own,
    count_parameters,
    count_tokens,
    measure_rate,
    measure_speed,
    name_samples,
    parameters_column,
    speed_column,
)
from scalelab.units import format_known, format_quantity

RUN = "throughput"
MEDIAN, TOTAL = "median step", "all steps"

THROUGHPUT = FindingKind(
    "throughput",
    "Tokens or samples per second of all ranks together, by the median step",
    MAIN,
    ("step_seconds", "samples_per_second", "tokens_per_second"),
)
TOTAL_RATE = FindingKind("total-rate", "Throughput over all timed steps together", DETAIL, ("per_second",))
SPEED = FindingKind("flops", "FLOP/s of the matrix products", REASON, ("per_second",))
LARGER_MODEL = FindingKind(
    "larger-model",
    "What a larger model would take at the same FLOP/s",
    REASON,
    ("parameters", "tokens", "tokens_per_second", "days", "years"),
)
ASSUMPTIONS = FindingKind("assumptions", "What an extrapolation assumes, or why there is none", ASIDE)


@dataclass(frozen=True, kw_only=True)
class Throughput(SweepStudy):
    """Steps, tokens and FLOPs per second, and how long a larger model would train at the same speed."""

    takes_script: ClassVar[bool] = True

    batch_per_rank: int = 8
    """Samples per step on each rank."""
    target_parameters: float = 1e12
    """Parameters of the larger model."""
    target_tokens: float = 1e13
    """Tokens that the larger model is trained on."""
    sampling: Sampling = field(
        default_factory=lambda: Sampling(steps=25, warmup=5, phase_steps=0, comm_free_steps=0, control=False)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        check_positive("target_parameters", self.target_parameters)
        check_positive("target_tokens", self.target_tokens)

    @property
    def reference_name(self) -> str:
        return RUN

    def list_rows(self) -> Iterable[Configuration]:
        row = self.configure(RUN, self.batch_per_rank, label=self.job.label)
        yield replace(row, instruments=count_if_own(self.job))

    def list_settings(self) -> Iterable[str]:
        yield f"batch {self.batch_per_rank} per rank"

    def list_columns(self, sweep: Sweep) -> Iterable[Field[Arm]]:
        yield step_column()
        yield rate_column("steps_per_second", "steps/s", lambda arm: arm.step.map(lambda seconds: 1 / seconds))
        unit = name_samples(self.job, sweep.rows)
        yield rate_column(f"{unit}_per_second", f"{unit}/s", measure_rate)
        yield rate_column("stopwatch_rate", "over all steps", measure_total_rate)
        yield speed_column()
        yield memory_column()
        yield parameters_column(is_detail=True)

    def draw_charts(self, table: Table, sweep: Sweep) -> Iterable[Chart | None]:
        arm = sweep.reference
        if arm is not None and arm.is_measured and len(arm.completed) > 1:
            yield draw_launches(arm, name_samples(self.job, [arm]))

    def extrapolate(self, arm: Arm, rate: Estimate | None = None) -> Extrapolation | None:
        """What the larger model would need, by the median step or another rate of it.

        None if nothing was measured, or samples have no tokens.
        """
        num_parameters = count_parameters(arm)
        if not arm.is_measured or num_parameters is None or name_samples(self.job, [arm]) != "tokens":
            return None
        return extrapolate_training(
            rate or measure_rate(arm),
            num_parameters,
            target_parameters=self.target_parameters,
            target_tokens=self.target_tokens,
        )

    def list_sections(self, sweep: Sweep) -> Iterable[Section]:
        future = self.extrapolate(sweep.reference) if sweep.reference else None
        if future is not None:
            table = make_table(
                [future],
                rate_column("target_parameters", "model parameters", lambda _: self.target_parameters),
                rate_column("target_tokens", "training tokens", lambda _: self.target_tokens),
                make_column("number", "tokens_per_second", "extrapolated tokens/s", lambda row: row.tokens_per_second),
                make_column("number", "days", "days", lambda row: row.days),
                make_column("number", "years", "years", lambda row: row.years),
                notes=(INTERVAL_NOTE, "a year has 365 days"),
            )
            yield Section(heading="A larger model", tables=(table,))

    def list_findings(self, sweep: Sweep) -> Iterator[Finding]:
        arm = sweep.reference
        if arm is None or not arm.is_measured:
            return
        rate, steps = measure_rate(arm), arm.step.map(lambda seconds: 1 / seconds)
        unit = name_samples(self.job, [arm])
        text = (
            f"{arm.label} processes {format_quantity('rate', rate)} {unit}/s"
            f" ({format_quantity('rate', steps)} steps/s)."
        )
        samples = arm.step.map(lambda seconds: arm.step_samples / seconds)
        tokens = rate if unit == "tokens" else None
        yield THROUGHPUT(arm.label, text, step_seconds=arm.step, samples_per_second=samples, tokens_per_second=tokens)
        speed, total = measure_speed(arm), measure_total_rate(arm)
        if speed is not None:
            text = f"That is {format_quantity('rate', speed)} FLOP/s, counting matrix products."
            yield SPEED(arm.label, text, per_second=speed)
        text = f"{unit.capitalize()}/s over all timed steps, long ones included: {format_known('rate', total)}."
        yield TOTAL_RATE(arm.label, text, per_second=total)
        yield from self._describe_future(self.extrapolate(arm))

    def _describe_future(self, future: Extrapolation | None) -> Iterator[Finding]:
        if future is None:
            yield ASSUMPTIONS("", "No extrapolation: the workload does not say how many tokens a sample has.")
            return
        parameters, tokens = (format_quantity("rate", n) for n in (self.target_parameters, self.target_tokens))
        rate, days, years = (
            format_quantity("number", found) for found in (future.tokens_per_second, future.days, future.years)
        )
        yield LARGER_MODEL(
            "",
            f"A model of {parameters} parameters would process {rate} tokens/s here: {days} days ({years} years) for"
            f" {tokens} tokens.",
            parameters=self.target_parameters,
            tokens=self.target_tokens,
            tokens_per_second=future.tokens_per_second,
            days=future.days,
            years=future.years,
        )
        yield ASSUMPTIONS(
            "",
            "The extrapolation assumes the same FLOP/s, a cost proportional to the parameters, no communication and"
            " enough memory: it is an order of magnitude, not a forecast.",
        )


def measure_total_rate(arm: Arm) -> Estimate:
    """Tokens or samples per second over all timed steps together: their number over their total time."""
    launches = [steps for steps in arm.clean if len(steps)]
    whole = count_tokens(arm) / statistics.fmean(seconds for steps in launches for seconds in steps)
    return estimate_over_rounds(whole, [count_tokens(arm) / statistics.fmean(steps) for steps in launches])


def draw_launches(arm: Arm, unit: str) -> Chart | None:
    """Every launch by its median step and over all its steps, and all of them together."""
    rows: list[Row] = []
    for number, steps in enumerate(arm.clean, start=1):
        found = {MEDIAN: statistics.median(steps), TOTAL: statistics.fmean(steps)} if len(steps) else {}
        for series in (MEDIAN, TOTAL):
            rate = count_tokens(arm) / found[series] if found else None
            status = "" if found else "not measured"
            rows.append({"name": f"launch {number}", "series": series, "rate": rate, "status": status})
    for series, whole in ((MEDIAN, measure_rate(arm)), (TOTAL, measure_total_rate(arm))):
        rows.append({"name": "all launches", "series": series, "rate": whole})
    return plot_amounts(
        title=f"{unit.capitalize()} per second by launch",
        x=Axis(field="rate", title=f"{unit}/s", quantity="rate", from_zero=False),
        rows=rows,
        caption="Thin lines are 95 % confidence intervals over all launches; the axis need not begin at zero. The rate"
        f" over {TOTAL} includes long steps, the {MEDIAN} does not.",
    )
