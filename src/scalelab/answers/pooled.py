"""`pooled`: all metered runs of one name, as the strong- or weak-scaling table of the script.

A row is a number of ranks, a round of it one launch. The scaling is strong where every row takes the same global batch
and weak where every rank keeps its batch; other rows are compared by samples/s. Launches were made at different times,
so what changed on the machine between them is part of the ratio: alternate the numbers of ranks, and intervals over
launches show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.analysis.stats import estimate_median
from scalelab.answers.metered import count_all_steps
from scalelab.errors import UsageError
from scalelab.predict.scaling_table import ReadSeries, ScalingSeries
from scalelab.records.trial import Status, StepKind, Trial, TrialResult
from scalelab.report.document import Document, Section, Table
from scalelab.report.findings import Caution
from scalelab.report.tables import INTERVAL_NOTE, count_column, make_table, seconds_column, text_column
from scalelab.runs.pool import METERED, POOLED
from scalelab.studies.scaling.answer import ScalingAnswer
from scalelab.studies.scaling.report import conclude_scaling
from scalelab.studies.scaling.study import StrongScaling, WeakScaling
from scalelab.studies.shared.arms import Arm, describe_warmup
from scalelab.studies.shared.cautions import (
    DRIFT,
    FAILED,
    FEW_LAUNCHES,
    NOISY_LAUNCHES,
    NOISY_STEPS,
    NOT_SETTLED,
    UNEQUAL_LOSSES,
)
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Study
from scalelab.units import format_count

MORE_STEPS = "let the script train longer, on a quiet machine"
MORE_LAUNCHES = "launch the script more often under the same name, alternating the numbers of ranks"


@dataclass(frozen=True, kw_only=True)
class PooledRuns(Study):
    """Metered runs of one name: read like a study, never planned."""

    name: ClassVar[str] = POOLED
    title: ClassVar[str] = "Metered launches"
    is_recorded: ClassVar[bool] = True
    question: ClassVar[str] = "How long does a step of my own script take, launch by launch?"

    label: str = ""
    """What the script called them."""
    job: Job = field(default_factory=Job)
    is_batch_known: bool = True
    launches: dict[str, str] = field(default_factory=dict)
    """The run of each trial."""

    def plan(self) -> list[Trial]:
        raise UsageError("metered runs are made by your own script: launch it again under the same name")

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        answer = self.answer(results)
        counts = [arm.trial.num_ranks for arm in answer.spread]
        kind = StrongScaling if answer.is_strong else WeakScaling
        document = conclude_scaling(self, answer, "", counts)
        study_cautions = [one for one in document.cautions if one.kind != UNEQUAL_LOSSES.name]  # no common seed
        return replace(
            document,
            title=kind.title if len(counts) > 1 else self.title,
            question=kind.question if len(counts) > 1 else self.question,
            setting=self._describe_setting(answer, len(results)),
            sections=(*document.sections, Section(heading="Launches", tables=(self._list_launches(answer, results),))),
            cautions=(*self._warn_of_failed(results), *map(_word, study_cautions)),
        )

    def answer(self, results: Sequence[TrialResult]) -> ScalingAnswer:
        """The rows; raises an error where it is not known what they compare."""
        trials = [result.trial for result in results]
        if len({trial.num_ranks for trial in trials}) > 1 and not self.is_batch_known:
            raise UsageError(
                f"launches of {self.label} on different numbers of ranks do not record their batch: pass batch_size= to"
                f" the Meter, or show one of them: {', '.join(self.launches.values())}"
            )
        return ScalingAnswer.from_results(
            [split_phases(self.count_steps(result)) for result in results],
            METERED,
            None,
            is_strong=len({trial.global_batch for trial in trials}) == 1,
        )

    def count_steps(self, result: TrialResult) -> TrialResult:
        """What a launch recorded before it failed counts."""
        return replace(count_all_steps(result), status=Status.COMPLETED) if result.samples else result

    def _describe_setting(self, answer: ScalingAnswer, num_launches: int) -> str:
        arms = answer.spread
        batch = f"global batch {arms[0].step_samples}" if arms else ""
        if not answer.is_strong:
            batch = f"batch {arms[0].rank_samples} per rank" if answer.has_planned_work else "batch differs by row"
        dropped = arms[0].num_dropped if arms else 0
        words = [self.label, self.job.workload, batch if self.is_batch_known else "batch unknown"]
        words.append(f"{format_count(num_launches, 'launch')}, {describe_warmup(dropped)} (auto)")
        return " · ".join(filter(None, words))

    def _list_launches(self, answer: ScalingAnswer, results: Sequence[TrialResult]) -> Table:
        """Every launch with its own step time and run."""
        dropped = {arm.configuration: arm.num_dropped for arm in answer.arms.values()}

        def read_steps(result: TrialResult) -> list[float]:
            steps = list(self.count_steps(result).step_seconds(StepKind.CLEAN).values())
            return steps[dropped.get(result.trial.configuration, 0) :]

        return make_table(
            results,
            text_column("launch", "launch", lambda one: self.launches.get(one.trial.name, one.trial.name)),
            count_column("ranks", "ranks", lambda one: one.trial.num_ranks),
            count_column("steps", "steps", lambda one: len(read_steps(one))),
            seconds_column(
                "step_seconds", "step", lambda one: estimate_median([found]) if (found := read_steps(one)) else None
            ),
            text_column("status", "ended", lambda one: one.status.words),
            notes=(INTERVAL_NOTE, "intervals here cover the steps of one launch"),
        )

    def _warn_of_failed(self, results: Sequence[TrialResult]) -> Iterator[Caution]:
        for result in results:
            if result.status is not Status.COMPLETED:
                run = self.launches.get(result.trial.name, result.trial.name)
                yield FAILED(
                    run,
                    f"{run} {result.status.words}: {result.reason}; its steps until then count",
                    f"scalelab rm {run} deletes that launch",
                    status=result.status.value,
                    failed=1,
                    rounds=1,
                )


def _word(caution: Caution) -> Caution:
    """A study's warning for launches that no flag makes."""
    if caution.kind in (FEW_LAUNCHES.name, NOISY_LAUNCHES.name):
        return replace(caution, next_step=MORE_LAUNCHES)
    if caution.kind in (NOISY_STEPS.name, DRIFT.name, NOT_SETTLED.name):
        return replace(caution, next_step=MORE_STEPS)
    return caution


def split_phases(result: TrialResult) -> TrialResult:
    """Steps that have phases once more as phase steps: a Meter's phases add clock readings and nothing else."""
    timed = (sample._replace(kind=StepKind.PHASES) for sample in result.samples if sample.forward_seconds is not None)
    return replace(result, samples=(*result.samples, *timed))


def make_series(label: str, arms: Mapping[int, Arm]) -> ReadSeries:
    """Samples per second by number of ranks, as `predict` extrapolates them."""
    rates = {count: arm.step_samples / arm.step.value for count, arm in arms.items()}
    series = ScalingSeries(label=label, throughput=rates, unit="samples/s")
    return ReadSeries(series=series, utilization={}, job={})
