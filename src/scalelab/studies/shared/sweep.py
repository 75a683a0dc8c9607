"""Studies that vary one thing: `SweepStudy`, and the columns, charts and warnings that such studies share.

The first configuration is the reference. It is measured twice, the second time as `control`, unless --no-control: a
difference between the two comes from the machine. Charts draw columns of the table, without the control.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.quality import find_resolution
from scalelab.analysis.rounds import find_common_memory, find_memory
from scalelab.analysis.speedup import estimate_speedup
from scalelab.analysis.stats import Verdict, compare_together, estimate_ratio, judge, pair_medians
from scalelab.checks import check_at_least
from scalelab.records.strategies import StrategyName, choose_strategy, find_strategy
from scalelab.records.trial import Trial, TrialResult
from scalelab.report import tables
from scalelab.report.charts.column_charts import CONTROL as CONTROL
from scalelab.report.charts.column_charts import draw_columns, keep_charts
from scalelab.report.document import Chart, Document, Section, Table, make_cell
from scalelab.report.findings import DETAIL, MAIN, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import (
    INTERVAL_NOTE,
    Field,
    bytes_column,
    make_table,
    rate_column,
    seconds_column,
    text_column,
)
from scalelab.studies.shared.accelerators import make_device_sections, name_device_findings
from scalelab.studies.shared.arms import Arm, describe_status, describe_warmup, group_arms
from scalelab.studies.shared.cautions import find_cautions
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Configuration, Sampling, Study, plan_rounds
from scalelab.units import UNKNOWN, format_count, format_interval, format_share

JOINT_NOTE = "verdicts hold jointly: one table in twenty has a wrong one (Holm)"
PEAK_CAPTION = "The highest of any rank in any launch, all memory of the process included; it has no interval."
OVERSUBSCRIBED = "†"
NOT_FINITE = "‡"

FASTEST = FindingKind("fastest", "The fastest row, and its step time over the reference's", MAIN, ("ratio", "verdict"))
VERDICT = FindingKind(
    "verdict", "Step time over the reference's (compare: of B over A), and the verdict", DETAIL, ("ratio", "verdict")
)
CONTROL_FAILED = CautionKind(
    "control-failed", "The reference measured twice differs from itself", "control", ("ratio",)
)
CONTROL_UNRESOLVED = CautionKind(
    "control-unresolved",
    "Too noisy to see whether the reference measured twice equals itself",
    "control",
    ("ratio", "resolution"),
)
CORRELATED_ROUNDS = CautionKind(
    "correlated-rounds", "A row's ratio to the reference wanders from round to round", "noise", ("correlation",)
)


def plan_sweep(job: Job, sampling: Sampling, configurations: Sequence[Configuration]) -> list[Trial]:
    """Every configuration in every round, and the first once more as the control."""
    first, *others = configurations
    control = [replace(first, name=CONTROL, label=CONTROL, instruments=())] if sampling.control else []
    return plan_rounds(job, sampling, [first, *control, *others])


def step_column(header: str = "step", **options: Any) -> Field[Arm]:
    return seconds_column("step_seconds", header, lambda arm: arm.step, **options)


def samples_column(**options: Any) -> Field[Arm]:
    """Samples of all ranks per second."""
    return rate_column(
        "samples_per_second",
        "samples/s",
        lambda arm: arm.step.map(lambda seconds: arm.step_samples / seconds),
        **({"shows_interval": False} | options),
    )


def relative_column(reference: Arm | None, header: str = "× reference", **options: Any) -> Field[Arm]:
    """The step time over the reference's, round by round."""
    over = f"step time divided by that of {reference.label}; {tables.PAIRED_NOTE}" if reference else ""
    options = {"note": over} | options
    return tables.ratio_column("step_ratio", header, lambda arm: compare_steps(arm, reference), **options)


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
    name_header: str = "run",
    notes: Sequence[str] = (),
) -> Table:
    """One row per arm; one that gave nothing has its status instead of a time."""
    every = list(arms)
    return make_table(
        every,
        text_column("run", name_header, lambda arm: make_cell(arm.label, mark=find_marks(arm))),
        *columns,
        notes=(INTERVAL_NOTE, *explain_marks(every), *notes),
        status=lambda arm: None if arm.is_measured else describe_status(arm),
    )


def find_marks(arm: Arm) -> str:
    marks = OVERSUBSCRIBED if arm.trial.is_oversubscribed else ""
    if any(result.first_non_finite_loss for result in arm.results):
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
        found = tuple(warn_of_control(control, reference))
    return (*found, *find_cautions(arms.values()), *warn_of_correlation(arms.values(), reference))


def warn_of_control(control: Arm, reference: Arm) -> Iterator[Caution]:
    """The first thing to know: the machine made a difference where there is none, or is too noisy to see one."""
    ratio, label = estimate_ratio(control.clean, reference.clean), reference.label
    verdict = judge(ratio)
    if verdict is Verdict.UNRESOLVED:
        resolution = find_resolution(control.clean, reference.clean)
        missed = f"differences below {format_share(resolution)}" if (resolution or 0) < 1 else "even a factor of two"
        seen = "" if resolution is None else f"; {missed} would often be missed"
        yield CONTROL_UNRESOLVED(
            label,
            f"the control is unresolved: {label} measured twice differs by a factor of"
            f" {format_interval('ratio', ratio)}{seen}",
            "measure again on a quieter machine, with more --rounds",
            ratio=ratio,
            resolution=resolution,
        )
    if verdict in (Verdict.FASTER, Verdict.SLOWER):
        yield CONTROL_FAILED(
            label,
            f"the control failed: {label} measured twice differs by a factor of {format_interval('ratio', ratio)},"
            " so differences of this size mean nothing here",
            "measure again on a quieter machine, with more --rounds",
            ratio=ratio,
        )


def warn_of_correlation(arms: Iterable[Arm], reference: Arm | None) -> Iterator[Caution]:
    """Rounds that are not independent: the machine treats configurations differently for some rounds in a row."""
    if reference is None or not reference.is_measured:
        return
    others = [arm for arm in arms if arm is not reference and arm.is_measured]
    found: dict[str, float] = {}
    for arm in others:
        above, below = pair_medians([arm.clean, reference.clean])
        if (memory := find_memory(np.log(above / below))) is not None:
            found[arm.label] = memory
    common = find_common_memory(np.log(pair_medians([reference.clean, *(arm.clean for arm in others)])))
    correlation = max(found.values(), default=common)
    if correlation is None:
        return
    who = f"{', '.join(found)} over {reference.label}" if found else "rows"
    yield CORRELATED_ROUNDS(
        ", ".join(found),
        f"rounds are not independent: {who} wander from round to round (lag-1 correlation up to {correlation:.2f});"
        f" {'their intervals are widened' if found else 'verdicts allow for that'}",
        "raise --rounds, or repeat the run and see whether verdicts stay",
        correlation=correlation,
    )


def describe_measurement(
    job: Job, sampling: Sampling, arms: Iterable[Arm], *words: str, label: str | None = None
) -> str:
    """What was measured, in one line: the workload (or `label`), what the study adds, cores and launches."""
    every, how = list(arms), "" if sampling.warmup is not None else " (auto)"
    words = tuple(word for word in words if job.script is None or word != job.dtype)  # a script decides it itself
    threads = every[0].trial.threads_per_rank if every else job.threads_per_rank
    dropped = every[0].num_dropped if every else UNKNOWN
    cores = f"{UNKNOWN if threads is None else format_count(threads, 'core')} per rank"
    words = (*words, *filter(None, [describe_passes(every)]))
    launches = f"{sampling.launches} × {sampling.steps} steps, {describe_warmup(dropped)}{how}"
    return " · ".join([label or job.label, *words, cores, launches])


def describe_passes(arms: Sequence[Arm]) -> str:
    """How many backward passes and samples a step of a script has, where it has several; the first row's."""
    first = next((arm for arm in arms if arm.scripts), None)
    if first is None or (passes := first.scripts[0].num_passes or 1) == 1:
        return ""
    return f"{passes} backward passes per step: {format_count(first.step_samples, 'sample')}"


def describe_placement(strategy: str | None, num_ranks: int) -> str:
    """For the line that says what was measured."""
    chosen = choose_strategy(strategy, num_ranks)
    return "plain loop" if find_strategy(chosen).is_plain else f"{chosen} × {num_ranks}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What was measured: arms by configuration, and the one that the others are compared with."""

    arms: Mapping[str, Arm]
    reference: Arm | None

    @property
    def rows(self) -> list[Arm]:
        """All but the control."""
        return [arm for arm in self.arms.values() if arm.configuration != CONTROL]

    @property
    def measured(self) -> list[Arm]:
        return [arm for arm in self.rows if arm.is_measured]

    @property
    def ratios(self) -> dict[str, Estimate]:
        """By label: the step time of every other measured row over the reference's, round by round, judged together."""
        reference = self.reference
        if reference is None or not reference.is_measured:
            return {}
        return compare_together(
            {arm.label: (arm.clean, reference.clean) for arm in self.measured if arm is not reference}
        )


@dataclass(frozen=True, kw_only=True)
class SweepStudy(Study, is_abstract=True):
    """A study whose rows differ in one thing: it says which rows, which columns and what they mean.

    The rest is the same for all of them: the plan with its control, the main table with its charts, warnings, and the
    line that says what was measured.
    """

    row_header: ClassVar[str] = "run"
    """What the rows differ in: the header of the first column."""

    ranks: int = 1
    """Ranks of every row."""
    strategy: StrategyName | None = None
    """How training is distributed. None: single on one rank, ddp on more."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 1)

    @property
    def reference_name(self) -> str:
        """The configuration that the others are compared with."""
        raise NotImplementedError

    def list_rows(self) -> Iterable[Configuration]:
        """What is measured, the reference first."""
        raise NotImplementedError

    def list_columns(self, sweep: Sweep) -> Iterable[Field[Arm]]:
        """The columns of the main table after the name of the row."""
        raise NotImplementedError

    def list_notes(self, sweep: Sweep) -> Iterable[str]:
        """What the main table needs explained."""
        return ()

    def draw_charts(self, table: Table, sweep: Sweep) -> Iterable[Chart | None]:
        """The charts beside the main table; by default its step times."""
        yield draw_columns(table, ["step_seconds"], title=f"Step time by {self.row_header}")

    def list_sections(self, sweep: Sweep) -> Iterable[Section]:
        """What follows the main table."""
        return ()

    def list_findings(self, sweep: Sweep) -> Iterable[Finding]:
        raise NotImplementedError

    def list_cautions(self, sweep: Sweep) -> Iterable[Caution]:
        """Warnings beyond those of every measurement."""
        return ()

    def select_doubtful(self, sweep: Sweep) -> Mapping[str, Arm]:
        """The rows that the shared warnings look at; by default all of them."""
        return sweep.arms

    def list_settings(self) -> Iterable[str]:
        """What the rows have in common, for the setting line."""
        return ()

    def configure(
        self, name: str, batch_per_rank: int, job: Job | None = None, *, label: str | None = None
    ) -> Configuration:
        """A row on the ranks of the study."""
        return Configuration(
            name=name,
            label=label or name,
            strategy=choose_strategy(self.strategy, self.ranks),
            num_ranks=self.ranks,
            global_batch=batch_per_rank * self.ranks,
            job=job,
        )

    def plan(self) -> list[Trial]:
        return plan_sweep(self.job, self.sampling, list(self.list_rows()))

    def group(self, results: Sequence[TrialResult]) -> Sweep:
        arms = group_arms(results, self.sampling.warmup)
        return Sweep(arms=arms, reference=arms.get(self.reference_name))

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        sweep = self.group(results)
        is_script = self.job.script is not None
        place = self.job.name_ranks("", self.ranks) if is_script else describe_placement(self.strategy, self.ranks)
        settings = (place, *self.list_settings())
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(self.job, self.sampling, sweep.arms.values(), *settings),
            sections=(self.make_main_section(sweep), *self.list_sections(sweep), *make_device_sections(sweep.measured)),
            findings=(*self.list_findings(sweep), *name_device_findings(sweep.measured)),
            cautions=(
                *self.list_cautions(sweep),
                *find_sweep_cautions(self.select_doubtful(sweep), sweep.reference),
            ),
        )

    def make_main_section(self, sweep: Sweep) -> Section:
        """The main table, a row for every configuration, and its charts."""
        columns, notes = tuple(self.list_columns(sweep)), tuple(self.list_notes(sweep))
        if len(sweep.ratios) > 1:
            notes = (*notes, JOINT_NOTE)
        table = make_sweep_table(sweep.arms.values(), columns, name_header=self.row_header, notes=notes)
        return Section(tables=(table,), charts=keep_charts(*self.draw_charts(table, sweep)))


def name_fastest(sweep: Sweep, what: str) -> Iterator[Finding]:
    """The fastest row, where it is clearly faster than the reference, and the others one by one."""
    ratios, reference = sweep.ratios, sweep.reference
    if not ratios or reference is None:
        return
    best = min(ratios, key=lambda label: ratios[label].value)
    verdict = judge(ratios[best])
    if verdict is Verdict.FASTER:
        ratio = format_interval("ratio", ratios[best])
        text = f"{best} is the fastest {what}: {ratio} times the step time of {reference.label}."
        yield FASTEST(best, text, ratio=ratios[best], verdict=str(verdict))
    elif all(judge(ratio) is Verdict.SLOWER for ratio in ratios.values()):
        text = f"{reference.label} is the fastest {what}: all others are slower."
        yield FASTEST(reference.label, text, ratio=1.0, verdict=str(Verdict.SLOWER))
    else:
        text = f"No {what} is clearly faster than {reference.label}."
        yield FASTEST("", text, ratio=ratios[best], verdict=str(verdict))
    yield from (
        judge_row(label, ratio, reference.label)
        for label, ratio in ratios.items()
        if label != best or verdict is not Verdict.FASTER
    )


def judge_row(label: str, ratio: Estimate, reference: str, more: str = "", weight: int | None = None) -> Finding:
    """One row against the reference."""
    verdict = judge(ratio)
    text = f"{label} takes {format_interval('ratio', ratio)} times the step time of {reference}: {verdict}{more}."
    return VERDICT(label, text, ratio=ratio, verdict=str(verdict), weight=weight)
