"""What studies share that vary one thing: the plan with its control, the columns, the warnings, the setting.

The first configuration is the reference. It is measured twice, as `control`, unless told otherwise: what differs there
is the machine.

Figures of what a sweep's table lists: a column or several by configuration, in the table's own words.

The control is the reference once more, and is left to the table.

The losses of two configurations side by side: do they train the same thing?

All rounds of a configuration train from the same seed on the same batches, so the losses of its first completed round
stand for all of them; where rounds differ, that is a warning of its own.

Where the rows of a study run that compares something else than ranks: one number of ranks, one strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import estimate_speedup
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.checks import check_at_least
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.charts.amounts import make_value_axis, plot_amounts, read_columns
from scalelab.report.document import Chart, Table, make_cell
from scalelab.report.findings import Caution, CautionKind
from scalelab.report.tables import INTERVAL_NOTE as INTERVAL_NOTE
from scalelab.report.tables import Field, bytes_column, make_table, rate_column, seconds_column, text_column
from scalelab.report.tables import ratio_column as make_ratio_column
from scalelab.strategies.catalogue import Strategy
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.cautions import find_cautions
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling, plan_rounds
from scalelab.units import format_interval

CONTROL = "control"
OVERSUBSCRIBED = "†"
NOT_FINITE = "‡"


def plan_sweep(job: Job, sampling: Sampling, configurations: Sequence[Configuration]) -> list[Trial]:
    """Every configuration in every round, and the first once more as the control."""
    first, *others = configurations
    control = [replace(first, name=CONTROL, label=CONTROL, instruments=())] if sampling.control else []
    return plan_rounds(job, sampling, [first, *control, *others])


SweepColumn = Field[Arm]
"""A column, and how a measured arm fills it."""

CONTROL_FAILED = CautionKind("control-failed", "The reference measured twice differs from itself", "noise", ("ratio",))


def step_column(header: str = "step", **options: Any) -> Field[Arm]:
    return seconds_column("step_seconds", header, lambda arm: arm.step, **options)


def samples_column(**options: Any) -> Field[Arm]:
    """Samples of all ranks per second."""
    return rate_column(
        "samples_per_second",
        "samples/s",
        lambda arm: arm.step.map(lambda seconds: arm.trial.global_batch / seconds),
        **({"shows_interval": False} | options),
    )


def ratio_column(reference: Arm | None, header: str = "× reference", **options: Any) -> Field[Arm]:
    """The step time over the reference's, round by round."""
    return make_ratio_column("step_ratio", header, lambda arm: compare_steps(arm, reference), **options)


def memory_column(**options: Any) -> Field[Arm]:
    return bytes_column("peak_memory_bytes", "peak memory", lambda arm: arm.peak_memory_bytes, **options)


def compare_steps(arm: Arm, reference: Arm | None) -> Estimate | float | None:
    """The step time over the reference's; exactly 1 for the reference itself, None without one."""
    if reference is None or not reference.is_measured or not arm.is_measured:
        return None
    return 1.0 if arm is reference else estimate_ratio(arm.clean, reference.clean)


def measure_speedup(arm: Arm, base: Arm | None) -> Estimate | float | None:
    """How many times as fast as the base; exactly 1 for the base itself, None without one."""
    if base is None:
        return None
    return 1.0 if arm is base else estimate_speedup(base.clean, arm.clean)


def divide_by_ranks(speedup: Estimate | float | None, arm: Arm) -> Estimate | float | None:
    """The efficiency that a speedup is; what is exactly 1 stays so."""
    return speedup.map(lambda ratio: ratio / arm.trial.num_ranks) if isinstance(speedup, Estimate) else speedup


def make_sweep_table(
    arms: Iterable[Arm],
    columns: Sequence[Field[Arm] | None],
    *,
    title: str = "",
    name_header: str = "run",
    notes: Sequence[str] = (),
) -> Table:
    """One row per arm; one that gave nothing has its status instead of a time."""
    every = list(arms)
    return make_table(
        every,
        text_column("run", name_header, lambda arm: make_cell(arm.label, mark=find_marks(arm))),
        *columns,
        title=title,
        notes=(INTERVAL_NOTE, *notes, *explain_marks(every)),
        status=lambda arm: None if arm.is_measured else describe_status(arm),
    )


def describe_status(arm: Arm) -> str:
    """What stands in the row of an arm that was not measured."""
    return arm.failure.status.words if arm.failure else "not run yet"


def find_marks(arm: Arm) -> str:
    marks = OVERSUBSCRIBED if arm.trial.is_oversubscribed else ""
    if any(result.first_non_finite_loss() for result in arm.results):
        marks += NOT_FINITE
    return marks


def explain_marks(arms: Iterable[Arm]) -> Iterator[str]:
    marks = "".join(find_marks(arm) for arm in arms)
    if OVERSUBSCRIBED in marks:
        yield f"{OVERSUBSCRIBED} oversubscribed: its ranks share cores"
    if NOT_FINITE in marks:
        yield f"{NOT_FINITE} its loss became NaN or infinite"


def find_sweep_cautions(arms: Mapping[str, Arm], reference: Arm | None) -> tuple[Caution, ...]:
    """A control that failed first, then everything that makes the numbers less certain than they look."""
    control = arms.get(CONTROL)
    found: tuple[Caution, ...] = ()
    if control is not None and reference is not None and control.is_measured and reference.is_measured:
        found = tuple(warn_of_control(estimate_ratio(control.clean, reference.clean), reference.label))
    return (*found, *find_cautions(arms.values()))


def warn_of_control(ratio: Estimate, label: str) -> Iterator[Caution]:
    """The first thing to know: the machine made a difference where there is none."""
    if judge(ratio) in (Verdict.FASTER, Verdict.SLOWER):
        yield CONTROL_FAILED(
            label,
            f"the control failed: {label} measured twice differs by a factor of {format_interval('ratio', ratio)},"
            " so differences of this size mean nothing here",
            "measure again on a quieter machine, with more --rounds",
            ratio=ratio,
        )


def describe_measurement(job: Job, sampling: Sampling, arms: Iterable[Arm], *words: str) -> str:
    """What was measured, in one line: the workload, what the study adds, cores and launches."""
    every = list(arms)
    threads = every[0].trial.threads_per_rank if every else job.threads_per_rank
    dropped = every[0].num_dropped if every else "–"
    how = "" if sampling.warmup is not None else " (auto)"
    cores = f"{threads} core{'s' if threads != 1 else ''} per rank"
    launches = f"{sampling.launches} × {sampling.steps} steps, first {dropped} dropped as warm-up{how}"
    return " · ".join([job.label, *words, cores, launches])


INTERVALS = "Thin lines are 95 % confidence intervals."


def draw_columns(
    table: Table,
    columns: Mapping[str, str] | Sequence[str],
    *,
    title: str,
    keys: Sequence[str] = (),
    axis_title: str = "",
    reference: float | None = None,
    from_zero: bool = True,
    caption: str = INTERVALS,
) -> Chart | None:
    """Columns of any table by the names of its rows; None where fewer than two numbers are known."""
    rows = read_columns(table, columns, keys, leaving_out=(CONTROL,))
    axis = make_value_axis(table, next(iter(columns)), axis_title, from_zero=from_zero)
    statuses = dict.fromkeys(f"{row['name']} ({row['status']})" for row in rows if _is_failed(row["status"]))
    missing = f" Without a number: {', '.join(statuses)}." if statuses else ""
    hidden = " The control is not drawn." if CONTROL in keys else ""
    name_title = table.columns[0].header
    return plot_amounts(
        title=title,
        x=axis,
        rows=rows,
        caption=f"{caption}{missing}{hidden}".strip(),
        reference=reference,
        name_title="" if name_title == "run" else name_title,
    )


def _is_failed(status: object) -> bool:
    return status not in ("", "–")


def list_keys(arms: Iterable[Arm]) -> list[str]:
    """What the rows of a sweep's table are called in all figures."""
    return [arm.label for arm in arms]


def keep_charts(*charts: Chart | None) -> tuple[Chart, ...]:
    """Those that there are."""
    return tuple(chart for chart in charts if chart is not None)


@dataclass(frozen=True, kw_only=True)
class LossComparison:
    """Losses against those of a reference."""

    last: float | None
    """Of the last step; None where it is no finite number."""
    difference: float | None
    """Of the last step that both have, relative to the reference; None where either is no finite number."""
    first_step: int | None
    """The first step whose losses are not bit-equal; None: all are."""


def read_losses(arm: Arm) -> dict[int, float]:
    """By step number, of the first round that completed."""
    return arm.completed[0].losses() if arm.completed else {}


def compare_losses(losses: dict[int, float], reference: dict[int, float]) -> LossComparison:
    """How far the losses are from those of the reference, over the steps that both have."""
    common = [step for step in losses if step in reference]
    last = losses[max(losses)] if losses else None
    difference = None
    if common:
        ours, theirs = losses[common[-1]], reference[common[-1]]
        if math.isfinite(ours) and math.isfinite(theirs):
            difference = abs(ours - theirs) / abs(theirs) if theirs else abs(ours - theirs)
    return LossComparison(
        last=last if last is not None and math.isfinite(last) else None,
        difference=difference,
        first_step=find_first_difference(losses, reference),
    )


def find_first_difference(left: dict[int, float], right: dict[int, float]) -> int | None:
    """The first common step whose losses are not the very same number; NaN equals NaN here."""
    return next((step for step in left if step in right and repr(left[step]) != repr(right[step])), None)


def is_non_finite(arm: Arm) -> bool:
    """Whether any loss of any round is NaN or infinite."""
    results: tuple[TrialResult, ...] = arm.results
    return any(result.first_non_finite_loss() is not None for result in results)


MaybeStrategy = Annotated[Strategy | None, tyro.conf.arg(metavar="NAME")]


def choose_strategy(strategy: str | None, num_ranks: int) -> str:
    """The one that was asked for; otherwise the plain loop on one rank and ddp on more."""
    return strategy or ("single" if num_ranks == 1 else "ddp")


def check_placement(num_ranks: int, batch_per_rank: int) -> None:
    check_at_least("ranks", num_ranks, 1)
    check_at_least("batch_per_rank", batch_per_rank, 1)


def describe_placement(strategy: str | None, num_ranks: int) -> str:
    """For the line that says what was measured."""
    chosen = choose_strategy(strategy, num_ranks)
    return "plain loop" if chosen == "single" else f"{chosen} × {num_ranks}"
