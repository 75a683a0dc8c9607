"""`metered`: what a Meter recorded in your own training script.

There is one launch, as long as the script makes it. Intervals cover the steps of this launch and say nothing about the
next one; warm-up is detected as everywhere. The time of a step is the maximum over ranks. In synchronous training every
rank waits for the slowest, so step times of ranks differ little even if their work differs a lot: the phases show what
each rank waits for. The share of input wait comes from sums, because waiting comes in bursts that a median misses.

Steps with phases count as step times too: a Meter's phases are clock readings without device synchronization. Time
between two loops is in no number here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.quality import find_outliers
from scalelab.analysis.stats import estimate_median
from scalelab.errors import UsageError
from scalelab.launch.meter_result import rescue_result
from scalelab.records.store import RunStore
from scalelab.records.trial import PHASES, Status, StepKind, StepSample, Trial, TrialResult
from scalelab.report.document import Cell, Chart, Document, Section, Table, make_cell
from scalelab.report.findings import DETAIL, REASON, Caution, Finding, FindingKind
from scalelab.report.tables import bytes_column, make_table, rate_column, seconds_column, share_column, text_column
from scalelab.studies.shared.arms import Arm, describe_warmup, group_arms
from scalelab.studies.shared.breakdown import LOADER_WAIT
from scalelab.studies.shared.cautions import (
    DRIFT,
    FAILED,
    FEW_LAUNCHES,
    HEAVY_TAILS,
    LOADED_HOST,
    NOISY_STEPS,
    NON_FINITE,
    NOT_SETTLED,
    OUTLIERS,
    STOLEN_TIME,
    find_cautions,
)
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.losses import plot_losses
from scalelab.studies.shared.study import Study
from scalelab.studies.throughput import THROUGHPUT
from scalelab.units import format_count, format_known, format_quantity, format_share

RANK_LAG = FindingKind("rank-lag", "How much the slowest rank lags behind the fastest", REASON, ("rank", "lag"))
LOSS = FindingKind("loss", "The loss at the first and the last step", DETAIL, ("first", "last"))

MOST_JUDGED = 2000
"""Warnings look at this many last steps: a trend is sought among all pairs of them."""
NOTABLE_LAG = 0.02
"""Ranks whose medians differ by less run at the same speed."""
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class MeteredRun(Study):
    """A run that a Meter recorded: it is read like a study and cannot be planned."""

    name: ClassVar[str] = "metered"
    title: ClassVar[str] = "Metered run"
    is_recorded: ClassVar[bool] = True
    question: ClassVar[str] = "How long do the steps of my own script take, and what do they wait for?"

    label: str = ""
    """What the script called it."""
    job: Job = field(default_factory=Job)
    """Only its workload is known: the file that was run."""
    num_ranks: int = 1
    global_batch: int | None = None
    """Samples per step over all ranks; None: the script did not say."""

    def plan(self) -> list[Trial]:
        raise UsageError("a metered run is made by your own script: loop over scalelab.Meter(...).steps(loader) in it")

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        recordings = [read_recording(result, self.global_batch) for result in results]
        return Document(
            title=self.title,
            question=self.question,
            setting=self._describe_setting(recordings),
            sections=tuple(Section(tables=(make_ranks_table(one),), charts=_draw_loss(one)) for one in recordings),
            findings=tuple(finding for one in recordings for finding in summarise(one)),
            cautions=tuple(caution for one in recordings for caution in find_doubts(one)),
        )

    def count_steps(self, result: TrialResult) -> TrialResult:
        return count_all_steps(result)

    def rescue(self, store: RunStore) -> TrialResult | None:
        return rescue_result(store)

    def _describe_setting(self, recordings: Sequence[Recording]) -> str:
        parts = [self.label, self.job.workload, format_count(self.num_ranks, "rank")]
        parts.append("batch unknown" if self.global_batch is None else f"global batch {self.global_batch}")
        parts += [
            f"{format_count(one.arm.num_clean_steps, 'step')}, {describe_warmup(one.arm.num_dropped)} (auto)"
            for one in recordings
        ]
        return " · ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The one launch of a metered run."""

    result: TrialResult
    global_batch: int | None
    arm: Arm
    """Its steps, the maximum over ranks, also of a launch that failed later."""

    def kept(self, rank: int) -> list[StepSample]:
        """One rank's steps after warm-up."""
        steps = [s for s in self.result.samples if s.rank == rank and s.kind in (StepKind.CLEAN, StepKind.PHASES)]
        return steps[self.arm.num_dropped :]

    @property
    def has_phases(self) -> bool:
        return any(sample.kind is StepKind.PHASES for sample in self.result.samples)


def read_recording(result: TrialResult, global_batch: int | None) -> Recording:
    """A launch that failed was measured until then."""
    whole = replace(count_all_steps(result), status=Status.COMPLETED)
    (arm,) = group_arms([whole], None).values()
    named = replace(arm, trial=replace(arm.trial, label=arm.configuration))
    return Recording(result=result, global_batch=global_batch, arm=named)


def _draw_loss(recording: Recording) -> tuple[Chart, ...]:
    chart = plot_losses({"loss": recording.result})
    return (chart,) if chart is not None else ()


def count_all_steps(result: TrialResult) -> TrialResult:
    """The same result with its phase steps as clean ones: a Meter's phases add clock readings and nothing else."""
    samples = (s._replace(kind=StepKind.CLEAN) if s.kind is StepKind.PHASES else s for s in result.samples)
    return replace(result, samples=tuple(samples))


def make_ranks_table(recording: Recording) -> Table:
    """A row per rank, and one for the step of all of them."""
    ranks = range(recording.result.trial.num_ranks)
    steps = {str(rank): recording.kept(rank) for rank in ranks}
    peaks: dict[str, int | None] = {str(one.rank): one.peak_memory_bytes for one in recording.result.ranks}
    peaks[ALL] = recording.arm.peak_memory_bytes
    whole = recording.arm.step if recording.arm.is_measured else None
    rate = _find_rate(recording)

    def find_step(row: str) -> Cell | Estimate | None:
        if row == ALL:
            return whole
        return _find_median([s.step_seconds for s in steps[row]]) or make_cell("nothing recorded")

    def find_phase(name: str, row: str) -> Estimate | None:
        return _find_median([getattr(s, f"{name}_seconds") for s in steps.get(row, ())])

    phases = PHASES[1:] if recording.has_phases else ()
    rows = [*steps, ALL] if len(ranks) > 1 else list(steps)
    return make_table(
        rows,
        text_column("rank", "rank", lambda row: row),
        seconds_column("step_seconds", "step", find_step),
        rate_column(
            "samples_per_second", "samples/s", lambda row: rate if row == rows[-1] else None, shows_interval=False
        ),
        seconds_column("input_seconds", "input wait", partial(find_phase, "input")),
        share_column("input_share", "input wait / time", lambda row: find_input_share(steps.get(row, ()))),
        *(seconds_column(f"{phase}_seconds", phase, partial(find_phase, phase)) for phase in phases),
        bytes_column("peak_memory_bytes", "peak memory", lambda row: peaks.get(row)),
        notes=(
            "± is the 95 % CI half-width over the steps of this launch",
            "input wait / time: from sums over all steps, so it includes bursts that the median misses",
            *(
                ("all: a step ends when the last rank ends it; memory is the maximum over ranks",)
                if len(ranks) > 1
                else ()
            ),
        ),
    )


def _find_median(values: Sequence[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return estimate_median([known]) if known else None


def _find_rate(recording: Recording) -> Estimate | None:
    batch = recording.global_batch
    if batch is None or not recording.arm.is_measured:
        return None
    return recording.arm.step.map(lambda seconds: batch / seconds)


def find_input_share(steps: Sequence[StepSample]) -> float | None:
    """All input wait over all time; None if none was recorded."""
    known = [step for step in steps if step.input_seconds is not None]
    total = sum(step.step_seconds for step in known)
    return sum(step.input_seconds or 0.0 for step in known) / total if total else None


def summarise(recording: Recording) -> Iterator[Finding]:
    """Speed, the slowest rank, input wait and the loss."""
    arm, rate = recording.arm, _find_rate(recording)
    if arm.is_measured:
        speed = "" if rate is None else f", {format_quantity('rate', rate.value)} samples/s"
        text = f"A step takes {format_known('seconds', arm.step)}{speed}."
        yield THROUGHPUT(arm.label, text, step_seconds=arm.step, samples_per_second=rate)
    else:
        yield THROUGHPUT(arm.label, "No step was completed by all ranks.")
    yield from _name_slowest(recording)
    shares = [(find_input_share(recording.kept(rank)), rank) for rank in range(recording.result.trial.num_ranks)]
    known = [(share, rank) for share, rank in shares if share is not None]
    if known:
        share, rank = max(known)
        where = f" (maximum over ranks, on rank {rank})" if len(known) > 1 else ""
        yield LOADER_WAIT(
            arm.label, f"Input wait is {format_share(share)} of the step time{where}.", share=share, rank=rank
        )
    losses = list(recording.result.losses().items())
    if losses:
        (first, before), (last, after) = losses[0], losses[-1]
        text = f"The loss went from {before:.4f} at step {first} to {after:.4f} at step {last}."
        yield LOSS(arm.label, text, first=before, last=after)


def _name_slowest(recording: Recording) -> Iterator[Finding]:
    medians = {
        rank: median
        for rank in range(recording.result.trial.num_ranks)
        if (median := _find_median([s.step_seconds for s in recording.kept(rank)]))
    }
    if len(medians) < 2:
        return
    rank = max(medians, key=lambda rank: medians[rank].value)
    slow, fast = medians[rank], min(medians.values(), key=lambda median: median.value)
    lag = slow.value / fast.value - 1
    is_clear = slow.low is not None and fast.high is not None and slow.low > fast.high
    if lag < NOTABLE_LAG:
        text = f"All ranks are equally fast: their median steps differ by {format_share(lag)}."
    elif is_clear:
        text = f"Rank {rank} is the slowest: its median step is {format_share(lag)} longer than the fastest rank's."
    else:
        text = f"No rank is clearly the slowest: median steps differ by {format_share(lag)}, within their intervals."
    is_named = is_clear and lag >= NOTABLE_LAG
    yield RANK_LAG(f"rank {rank}" if is_named else "", text, rank=rank if is_named else None, lag=lag)


def find_doubts(recording: Recording) -> Iterator[Caution]:
    """What failed, what makes the numbers uncertain, and what one launch cannot show."""
    result, arm = recording.result, recording.arm
    if result.status is not Status.COMPLETED:
        yield FAILED(
            arm.label,
            f"{result.status.words}: {result.reason}; the numbers are from the steps before",
            "see the script's own output: a Meter keeps no logs",
            status=result.status.value,
            failed=1,
            rounds=1,
        )
    yield FEW_LAUNCHES(
        arm.label,
        "one launch: intervals cover its steps, not how launches differ",
        "launch the script several times before calling one version faster than another",
        launches=1,
    )
    last = _take_last_steps(arm)
    for caution in find_cautions([last]):
        if caution.kind != FEW_LAUNCHES.name:
            yield _word(caution, last)


def _take_last_steps(arm: Arm) -> Arm:
    surplus = max(0, sum(len(steps) for steps in arm.clean) - MOST_JUDGED)
    return replace(arm, clean=[steps[surplus:] for steps in arm.clean], num_dropped=arm.num_dropped + surplus)


def _word(caution: Caution, arm: Arm) -> Caution:
    """A study's warning for a script, which has no flags, no rounds and perhaps no known batch."""
    numbers = caution.values
    number = next((one for one in numbers.values() if isinstance(one, float)), 0.0)
    worst = max(find_outliers(arm.clean), key=lambda one: one.ratio, default=None)
    words = {
        NON_FINITE.name: f"the loss is not finite from step {numbers.get('step')} on (rank {numbers.get('rank')})",
        NOISY_STEPS.name: f"noisy host: steps vary by {format_share(number)} (standard deviation)",
        DRIFT.name: f"step times drift by {format_share(number)} over the launch",
        NOT_SETTLED.name: f"step times had not settled at step {numbers.get('step')} of {numbers.get('steps')}",
        LOADED_HOST.name: f"noisy host: its load was {number:.1f} before the launch",
        HEAVY_TAILS.name: f"the mean step is {number:.1f} times the median",
    }
    if caution.kind == OUTLIERS.name and worst is not None:
        step = list(arm.results[0].step_seconds(StepKind.CLEAN))[arm.num_dropped + worst.step]
        words[OUTLIERS.name] = (
            f"{numbers.get('outliers')} of {numbers.get('steps')} steps took over 1.5 times the median, worst"
            f" step {step} ({worst.ratio:.1f}×)"
        )
    is_noise = caution.kind in (NOISY_STEPS.name, DRIFT.name, NOT_SETTLED.name, STOLEN_TIME.name)
    return replace(
        caution,
        message=words.get(caution.kind, caution.message),
        next_step="measure more steps on a quiet machine, and launch the script several times"
        if is_noise
        else caution.next_step,
    )
