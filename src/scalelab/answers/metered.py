"""`metered`: what a Meter recorded in somebody's own training script.

There is one launch, and the script decides how long it is. So intervals cover the steps of this launch and say nothing
of the next one; warm-up is found as everywhere. The time of a step is the maximum over ranks. In synchronous training
every rank waits for the slowest, and step times of ranks differ little even where their work differs much: what each
waits for shows in its phases. The share of input wait is taken from sums, because waiting comes in bursts that a
median does not see.

Steps with phases count as step times too: the Meter's phases are clock readings and wait for no device. What happens
between two loops is in no number here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_median
from scalelab.errors import UsageError
from scalelab.measure.meter_result import rescue_result
from scalelab.records.store import RunStore
from scalelab.records.trial import PHASES, Status, StepKind, StepSample, Trial, TrialResult
from scalelab.report.document import Cell, Chart, Column, Document, Section, Table, make_cell, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.cautions import FEW_LAUNCHES, find_cautions
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.learning_charts import plot_losses
from scalelab.studies.shared.study import Study
from scalelab.units import format_quantity, format_share

MOST_JUDGED = 2000
"""Warnings look at this many last steps: a trend is sought among all pairs of them."""
NOTABLE_LAG = 0.02
"""Medians of ranks that differ by less are those of ranks that keep step."""
LONGER = "meter more steps on a quiet machine, and launch the script several times"


@dataclass(frozen=True, kw_only=True)
class MeteredRun(Study):
    """A run that a Meter recorded: it is read like a study and cannot be planned."""

    name: ClassVar[str] = "metered"
    title: ClassVar[str] = "Metered run"
    question: ClassVar[str] = "How long do the steps of my own training take, and what do they wait for?"
    is_recorded: ClassVar[bool] = True

    label: str = ""
    """What the script called it."""
    job: Job = field(default_factory=Job)
    """Only its workload is known: the file that was run."""
    num_ranks: int = 1
    global_batch: int | None = None
    """Samples per step over all ranks; None: the script did not say."""

    def plan(self) -> list[Trial]:
        raise UsageError(
            "a metered run is made by your own script: loop there over scalelab.Meter(...).steps(loader) instead"
        )

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        recordings = [read_recording(result, self.global_batch) for result in results]
        return Document(
            title=self.title,
            question=self.question,
            setting=self._describe_setting(recordings),
            sections=tuple(
                Section(tables=(make_table(recording),), charts=_draw_loss(recording)) for recording in recordings
            ),
            findings=as_findings(words for recording in recordings for words in summarise(recording)),
            cautions=tuple(caution for recording in recordings for caution in find_doubts(recording)),
        )

    def count_steps(self, result: TrialResult) -> TrialResult:
        return count_all_steps(result)

    def rescue(self, store: RunStore) -> TrialResult | None:
        return rescue_result(store)

    def _describe_setting(self, recordings: Sequence[Recording]) -> str:
        parts = [self.label, self.job.workload, f"{self.num_ranks} rank{'s' if self.num_ranks != 1 else ''}"]
        parts.append("batch unknown" if self.global_batch is None else f"global batch {self.global_batch}")
        parts += [f"{r.arm.num_clean_steps} steps, the first {r.arm.num_dropped} dropped as found" for r in recordings]
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
    """A launch that failed was measured all the same until it did."""
    whole = replace(count_all_steps(result), status=Status.COMPLETED)
    (arm,) = group_arms([whole], None).values()
    return Recording(result=result, global_batch=global_batch, arm=arm)


def _draw_loss(recording: Recording) -> tuple[Chart, ...]:
    chart = plot_losses({"loss": recording.result})
    return (chart,) if chart is not None else ()


def count_all_steps(result: TrialResult) -> TrialResult:
    """The same result with its phase steps as clean ones: a Meter's phases add clock readings and nothing else."""
    samples = (s._replace(kind=StepKind.CLEAN) if s.kind is StepKind.PHASES else s for s in result.samples)
    return replace(result, samples=tuple(samples))


def make_table(recording: Recording) -> Table:
    """A row for every rank, and one for the step that is over when all have ended it."""
    phases = PHASES[1:] if recording.has_phases else ()
    columns = (
        Column(key="rank", header="rank", align="left"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="samples_per_second", header="samples/s", quantity="rate", shows_interval=False),
        Column(key="input_seconds", header="input wait", quantity="seconds"),
        Column(key="input_share", header="input share", quantity="share"),
        *(Column(key=f"{phase}_seconds", header=phase, quantity="seconds") for phase in phases),
        Column(key="peak_memory_bytes", header="peak memory", quantity="bytes"),
    )
    rows = [_make_rank_row(recording, rank, phases) for rank in range(recording.result.trial.num_ranks)]
    if len(rows) > 1:
        step = recording.arm.step if recording.arm.is_measured else None
        empty: list[Cell] = [Cell()] * (2 + len(phases))
        rows.append(make_row("all", step, _find_rate(recording), *empty, recording.arm.peak_memory_bytes))
    notes = ["± is a 95 % confidence interval over the steps of this one launch, its longer arm"]
    notes.append("input share: all input wait over all steps' time, with the bursts that the median does not see")
    if len(rows) > 1:
        notes.append("all: a step is over when the last rank ends it; memory is the highest of any rank")
    return Table(columns=columns, rows=tuple(rows), notes=tuple(notes))


def _make_rank_row(recording: Recording, rank: int, phases: Sequence[str]) -> tuple[Cell, ...]:
    steps = recording.kept(rank)
    peak = next((r.peak_memory_bytes for r in recording.result.ranks if r.rank == rank), None)
    is_alone = recording.result.trial.num_ranks == 1
    return make_row(
        str(rank),
        _find_median([s.step_seconds for s in steps]) if steps else make_cell("nothing recorded"),
        _find_rate(recording) if is_alone else None,
        _find_median([s.input_seconds for s in steps]),
        find_input_share(steps),
        *(_find_median([getattr(s, f"{phase}_seconds") for s in steps]) for phase in phases),
        peak,
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
    """All input wait over all time; None where nothing was recorded."""
    total = sum(step.step_seconds for step in steps)
    return sum(step.input_seconds or 0.0 for step in steps) / total if total else None


def summarise(recording: Recording) -> Iterator[str]:
    """Speed, the slowest rank, input wait and the loss, in words."""
    arm, rate = recording.arm, _find_rate(recording)
    if arm.is_measured:
        speed = "" if rate is None else f", {format_quantity('rate', rate.value)} samples/s"
        yield f"A step takes {format_quantity('seconds', arm.step)}{speed}."
    else:
        yield "No step was completed by all ranks."
    yield from _name_slowest(recording)
    shares = [(find_input_share(recording.kept(rank)), rank) for rank in range(recording.result.trial.num_ranks)]
    known = [(share, rank) for share, rank in shares if share is not None]
    if known:
        share, rank = max(known)
        where = f" on rank {rank}, where it is most" if len(known) > 1 else ""
        yield f"Input wait is {format_share(share)} of the time{where}."
    losses = list(recording.result.losses().items())
    if losses:
        (first, before), (last, after) = losses[0], losses[-1]
        yield f"The loss went from {before:.4f} at step {first} to {after:.4f} at step {last}."


def _name_slowest(recording: Recording) -> Iterator[str]:
    medians = [
        (median.value, rank, median)
        for rank in range(recording.result.trial.num_ranks)
        if (median := _find_median([s.step_seconds for s in recording.kept(rank)]))
    ]
    if len(medians) < 2:
        return
    (_, _, fast), (_, rank, slow) = min(medians, key=lambda m: m[:2]), max(medians, key=lambda m: m[:2])
    lag = slow.value / fast.value - 1
    if lag < NOTABLE_LAG:
        yield f"The ranks keep step: their medians differ by {format_share(lag)}."
    elif slow.low is not None and fast.high is not None and slow.low > fast.high:
        yield f"Rank {rank} is the slowest: its median step is {format_share(lag)} longer than the fastest rank's."
    else:
        yield f"No rank is surely the slowest: medians differ by {format_share(lag)}, within their intervals."


def find_doubts(recording: Recording) -> Iterator[Caution]:
    """What failed, what makes the numbers uncertain, and what one launch cannot know."""
    result, arm = recording.result, recording.arm
    if result.status is not Status.COMPLETED:
        yield Caution(
            message=f"{result.status.words}: {result.reason}; the numbers are of the steps before",
            next_step="look at what the script printed: a Meter keeps no logs",
        )
    yield Caution(
        message="one launch: intervals cover its steps and not how launches differ",
        next_step="launch the script several times before calling one version faster than another",
    )
    for caution in find_cautions([_take_last_steps(arm)]):
        if caution.kind != FEW_LAUNCHES.name:
            yield _reword(caution, recording)


def _take_last_steps(arm: Arm) -> Arm:
    surplus = max(0, sum(len(steps) for steps in arm.clean) - MOST_JUDGED)
    return replace(arm, clean=[steps[surplus:] for steps in arm.clean], num_dropped=arm.num_dropped + surplus)


def _reword(caution: Caution, recording: Recording) -> Caution:
    """The warnings of studies in words that fit a script: it has no flags, no rounds, perhaps no known batch."""
    message = caution.message.replace(" of round 1", "").replace("the first trial", "the launch")
    message = message.replace(recording.arm.label, recording.arm.configuration)
    return Caution(
        message=message if recording.global_batch is not None else message.partition("; with its long steps")[0],
        next_step=LONGER if "--" in caution.next_step else caution.next_step,
    )
