"""Straggler: which rank is slow, where, and what it costs the others.

One slow rank makes every step slow, and the others wait for it in backward, whatever phase it was late in. So each
rank's own time is separated from waiting, and the ranks are compared phase by phase (`analysis/step_parts.py`).

With a delay (`--delay 20ms --delay-rank 0`) the job without it is measured in the same rounds. That shows what the
delay costs, and whether it adds in full to the step, as the model says. The diagnosis does not know of the delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import add_delay
from scalelab.analysis.stats import estimate_difference, estimate_median, estimate_ratio, judge
from scalelab.analysis.step_parts import SMALLEST_EXCESS, Excess, LaunchSteps, RankBreakdown, find_excesses, find_slow
from scalelab.checks import check_at_least, check_divisible
from scalelab.errors import UsageError
from scalelab.records.settings import Perturbation
from scalelab.records.strategies import DEFAULT, ParallelStrategy, find_strategy
from scalelab.records.trial import PHASES, Trial, TrialResult
from scalelab.report import tables
from scalelab.report.charts.column_charts import draw_columns, keep_charts
from scalelab.report.document import Document, Section, Table
from scalelab.report.findings import ASIDE, DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind, Known
from scalelab.studies.shared import breakdown, sweep
from scalelab.studies.shared.arms import Arm, find_measured, group_arms
from scalelab.studies.shared.cautions import find_cautions
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Configuration, Sampling, Study, plan_rounds
from scalelab.units import format_interval, format_known, format_quantity, format_share

UNDELAYED, DELAYED = "undisturbed", "disturbed"
"""The configurations of a study that injects a delay, as runs on disk call them."""
LABELS = {UNDELAYED: "no delay", DELAYED: "delayed"}
BASE = "the step without stalls"
OF_BASE = f"of {BASE}"
STALLS = "excess over the slowest rank's own time and the exposed all-reduce"
EXCESS_NOTE = "excess: extra time of the slow rank in that phase, over the rank it is compared with"
WAITING_NOTE = "waiting: of the rank that waits longest for the others"
MOST_NAMED = 3
"""How many slow ranks are named after the slowest; the others are in the table."""

EXCESS_VALUES = ("rank", "phase", "seconds", "share", "verdict")
STRAGGLER = FindingKind(
    "straggler", "The slow rank of a row, or that none is slow", MAIN, EXCESS_VALUES, free=("seconds", "share")
)
GAIN = FindingKind("straggler-gain", "What a step would save without the slow rank", REASON, ("seconds",))
INJECTED = FindingKind("injected-delay", "Whether the injected delay was found", REASON, ("is_found", "relative_error"))
COST = FindingKind("delay-cost", "By how much the injected delay makes a step longer", REASON, ("seconds", "ratio"))
MODEL = FindingKind("delay-model", "The measured step over the model's", DETAIL, ("ratio", "verdict"))
PARTLY_COMPARED = CautionKind("partly-compared", "Forward and backward of ranks could not be compared", "note")
BUFFERS = CautionKind("buffer-broadcast", "Ranks wait in forward for the buffers of rank 0", "note")


@dataclass(frozen=True, kw_only=True)
class RankComparison:
    """The ranks of one row, compared with each other."""

    arm: Arm

    @cached_property
    def launches(self) -> list[LaunchSteps]:
        return [launch for launch in breakdown.tabulate_launches(self.arm) if launch is not None]

    @cached_property
    def excesses(self) -> list[Excess]:
        """Every rank in every phase, the largest excess first; nothing if nothing can be compared."""
        return find_excesses(self.launches) if self.arm.is_measured else []

    @cached_property
    def slow(self) -> list[Excess]:
        """Those that are certain."""
        return find_slow(self.excesses)

    @property
    def main(self) -> Excess | None:
        return self.slow[0] if self.slow else None

    @cached_property
    def longest_waiting(self) -> RankBreakdown | None:
        """The rank that waits most for others; None if waiting is unknown."""
        ranks = breakdown.break_arm(self.arm) or []
        return max(ranks, key=lambda parts: parts.parts["waiting"].value, default=None)

    @property
    def missing_phases(self) -> bool:
        """Whether forward and backward could not be looked at."""
        return bool(self.excesses) and not any(excess.phase == "backward" for excess in self.excesses)


@dataclass(frozen=True, kw_only=True)
class StragglerAnswer:
    """The rows of the study, and what can be asked of them."""

    arms: Mapping[str, Arm]
    perturbation: Perturbation
    """What was injected: for the model, never for the diagnosis."""

    @cached_property
    def looked_at(self) -> Arm | None:
        """The row that is diagnosed: the delayed one, or the only one."""
        if self.perturbation.seconds:
            return self.arms.get(DELAYED)
        return next(iter(self.arms.values()), None)

    @cached_property
    def diagnoses(self) -> dict[str, RankComparison]:
        return {name: RankComparison(arm=arm) for name, arm in self.arms.items()}

    @property
    def diagnosis(self) -> RankComparison:
        """Of the row that is looked at."""
        assert self.looked_at is not None
        return self.diagnoses[self.looked_at.configuration]

    def find(self, name: str) -> Arm | None:
        """The row, if it was measured."""
        return find_measured(self.arms, name)

    @cached_property
    def model(self) -> list[list[float]] | None:
        """The steps without delay plus the delay."""
        undelayed = self.find(UNDELAYED)
        return None if undelayed is None else add_delay(undelayed.clean, self.perturbation.seconds)

    @cached_property
    def distance(self) -> Estimate | None:
        """The measured step over the model's, round by round."""
        delayed = self.find(DELAYED)
        return None if delayed is None or self.model is None else estimate_ratio(delayed.clean, self.model)


def make_straggler_table(answer: StragglerAnswer) -> Table:
    """The step, and the diagnosis of every row."""

    def read_main(read: Callable[[Excess], Known], nothing: str | None = None) -> Callable[[Arm], Known]:
        def read_row(arm: Arm) -> Known:
            found = answer.diagnoses[arm.configuration]
            return read(found.main) if found.main else nothing if found.excesses else None

        return read_row

    def read_waiting(arm: Arm) -> Estimate | None:
        longest = answer.diagnoses[arm.configuration].longest_waiting
        return None if longest is None else longest.parts["waiting"]

    undelayed, is_delayed = answer.find(UNDELAYED), answer.perturbation.seconds > 0
    read_ratio = partial(sweep.compare_steps, reference=undelayed)
    columns = [
        sweep.step_column(),
        sweep.samples_column(is_detail=is_delayed),
        tables.ratio_column("step_ratio", "× no delay", read_ratio, is_detail=not is_delayed),
        tables.text_column("slow_rank", "slow rank", read_main(lambda main: f"rank {main.rank}", "none")),
        tables.text_column("slow_phase", "phase", read_main(lambda main: main.phase, "none")),
        tables.seconds_column("excess_seconds", "excess", read_main(lambda main: main.seconds)),
        tables.share_column("excess_share", OF_BASE, read_main(lambda main: main.share), is_detail=True, note=STALLS),
        tables.seconds_column("waiting_seconds", "waiting", read_waiting),
    ]
    paired = (tables.PAIRED_NOTE,) if is_delayed else ()
    return sweep.make_sweep_table(answer.arms.values(), columns, notes=(*paired, EXCESS_NOTE, WAITING_NOTE))


def make_own_time_table(diagnosis: RankComparison, *, title: str = "") -> Table:
    """Each rank's own time in each phase, and its excess over the rank that it is compared with."""

    def read_own(excess: Excess) -> Estimate:
        own = [launch.own[excess.phase][:, excess.rank] for launch in diagnosis.launches]
        return Estimate(value=float(np.median(np.concatenate(own))))

    return tables.make_table(
        sorted(diagnosis.excesses, key=lambda excess: (PHASES.index(excess.phase), excess.rank)),
        tables.text_column("phase", "phase", lambda excess: excess.phase),
        tables.text_column("rank", "rank", lambda excess: f"rank {excess.rank}"),
        tables.seconds_column("own_seconds", "own time", read_own),
        tables.text_column("other", "against", lambda excess: f"rank {excess.other}"),
        tables.seconds_column("excess_seconds", "excess", lambda excess: excess.seconds),
        tables.share_column("excess_share", OF_BASE, lambda excess: excess.share),
        tables.text_column("is_slow", "slow", lambda excess: "slow" if excess.is_alarm else "no"),
        title=title,
        notes=(
            tables.INTERVAL_NOTE,
            "own time: the median, without waiting for others and without time in which other programs had the core",
            f"slow: the interval of the excess excludes zero, and it is at least {format_share(SMALLEST_EXCESS)} of the"
            " step without stalls (the slowest rank's own time and the exposed all-reduce)",
        ),
    )


def make_model_table(answer: StragglerAnswer) -> Table:
    """The measured step beside the one without delay plus the delay."""
    distance, delayed, model = answer.distance, answer.find(DELAYED), answer.model
    return tables.make_table(
        [f"{LABELS[UNDELAYED]} + {answer.perturbation.delay}"],
        tables.text_column("model", "model", lambda name: name),
        tables.seconds_column("model_seconds", "model step", lambda _: estimate_median(model) if model else None),
        tables.seconds_column("measured_seconds", "measured step", lambda _: delayed.step if delayed else None),
        tables.ratio_column("distance", "measured / model", lambda _: distance),
        tables.text_column("verdict", "verdict", lambda _: judge(distance).value if distance else None),
        notes=(tables.INTERVAL_NOTE,),
    )


def find_findings(answer: StragglerAnswer) -> Iterator[Finding]:
    if answer.looked_at is None or not answer.looked_at.is_measured:
        return
    diagnosis = answer.diagnosis
    yield from name_slow_ranks(diagnosis)
    longest, main = diagnosis.longest_waiting, diagnosis.main
    if longest is not None and longest.share("waiting").value >= SMALLEST_EXCESS:
        waiting, share = longest.parts["waiting"], longest.share("waiting")
        of_main = waiting.value * main.share.value / main.seconds.value if main else share.value
        part = f"{format_share(min(1.0, of_main))} of {BASE if main else 'the step'}"
        who, waits = f"rank {longest.rank}", f"{format_known('seconds', waiting)} per step ({part})"
        text = f"Rank {longest.rank} waits longest for the others: {waits}."
        yield breakdown.WAITING(who, text, weight=REASON, seconds=waiting, share=share)
    if answer.perturbation.seconds:
        yield from _compare_with_injected(answer)
        yield from _name_cost(answer)
        if answer.find(UNDELAYED) is not None:
            yield from name_slow_ranks(answer.diagnoses[UNDELAYED], ASIDE, " without the delay")
    elif main is not None:
        saved = format_quantity("seconds", main.seconds.value)
        text = f"If rank {main.rank} were as fast as rank {main.other} there, a step would be up to {saved} shorter."
        yield GAIN(f"rank {main.rank}", text, seconds=main.seconds)


def name_slow_ranks(diagnosis: RankComparison, weight: int = MAIN, when: str = "") -> Iterator[Finding]:
    """Who is slow, where, by how much; or that no rank is; or that it is unresolved."""
    label, excesses = diagnosis.arm.label, diagnosis.excesses
    for number, excess in enumerate(diagnosis.slow[: MOST_NAMED + 1]):
        longer, share = format_known("seconds", excess.seconds), format_share(excess.share.value)
        text = (
            f"Rank {excess.rank} is slow in {excess.phase}{when}: {longer} per step longer than rank {excess.other}"
            f" ({share} of {BASE})."
        )
        yield _make_straggler(label, text, excess, "slow", min(weight, REASON) if number else weight)
    if not excesses or diagnosis.slow:
        return
    largest = max(excesses, key=lambda excess: excess.share.high or excess.share.value)
    limit = format_share(SMALLEST_EXCESS)
    if not largest.share.is_below(SMALLEST_EXCESS):
        share = format_interval("share", largest.share)
        text = (
            f"Unresolved whether a rank is slow{when}: rank {largest.rank} in {largest.phase} exceeds the others by"
            f" {share} of the step (slow: {limit} or more); use more --rounds."
        )
        yield _make_straggler(label, text, largest, "unresolved", weight)
        return
    where = " in input or optimizer, the only phases compared" if diagnosis.missing_phases else ""
    text = f"No rank is slow{where}{when}: every excess over another rank is below {limit} of the step."
    yield _make_straggler(label, text, largest, "none", weight)


def _make_straggler(label: str, text: str, one: Excess, verdict: str, weight: int) -> Finding:
    excess: dict[str, Known] = {"rank": one.rank, "phase": one.phase, "seconds": one.seconds, "share": one.share}
    return STRAGGLER(label, text, weight=weight, verdict=verdict, **excess)


def _compare_with_injected(answer: StragglerAnswer) -> Iterator[Finding]:
    """The diagnosis beside what was injected, which it did not know."""
    told, main = answer.perturbation, answer.diagnosis.main
    injected = f"Injected delay: {told.delay} in {told.delay_phase} of rank {told.delay_rank}"
    is_found = main is not None and (main.rank, main.phase) == (told.delay_rank, told.delay_phase)
    if main is not None and is_found:
        error = main.seconds.value / told.seconds - 1
        text = f"{injected}; rank and phase were found, the delay within {format_share(abs(error))}."
        yield INJECTED(f"rank {told.delay_rank}", text, is_found=True, relative_error=error)
    else:
        yield INJECTED(f"rank {told.delay_rank}", f"{injected}; it was not found.", is_found=False)


def _name_cost(answer: StragglerAnswer) -> Iterator[Finding]:
    undelayed, delayed, distance = answer.find(UNDELAYED), answer.find(DELAYED), answer.distance
    if undelayed is None or delayed is None or distance is None or answer.model is None:
        return
    cost, ratio = estimate_difference(delayed.clean, undelayed.clean), estimate_ratio(delayed.clean, undelayed.clean)
    times = f"{format_interval('ratio', ratio)} times the step without it"
    text = f"The delay makes a step {format_known('seconds', cost)} longer, {times}."
    yield COST(LABELS[DELAYED], text, seconds=cost, ratio=ratio)
    model, verdict = format_known("seconds", estimate_median(answer.model)), judge(distance)
    text = (
        f"Model (step without delay + delay): {model}; measured is {format_interval('ratio', distance)} times that:"
        f" {verdict}."
    )
    yield MODEL(LABELS[DELAYED], text, ratio=distance, verdict=str(verdict))


def warn_of_limits(answer: StragglerAnswer) -> Iterator[Caution]:
    """What the diagnosis cannot see here."""
    arm = answer.looked_at
    if arm is None or not arm.is_measured:
        return
    if answer.diagnosis.missing_phases:
        reason = breakdown.explain_strategy(arm.trial) or "the last gradients were not timed"
        message = f"only input and optimizer were compared: {reason}"
        yield PARTLY_COMPARED(arm.label, message, "use --strategy ddp to compare forward and backward too")
    if any(breakdown.waits_for_buffers(result) for result in arm.completed):
        message = "ranks wait in forward for rank 0's buffers: if rank 0 is late inside forward, all seem to be"
        yield BUFFERS(arm.label, message, "measure again with --no-broadcast-buffers")


@dataclass(frozen=True, kw_only=True)
class Straggler(Study):
    """Compare the ranks of one job phase by phase; with --delay on one rank, also with the job without the delay."""

    takes_script: ClassVar[bool] = True

    ranks: int = 2
    """Ranks of the job."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    strategy: ParallelStrategy = "ddp"
    """How training is distributed; only ddp separates forward and backward from waiting."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(
        default_factory=lambda: Sampling(rounds=8, steps=18, phase_steps=20, comm_free_steps=0, control=False)
    )

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        check_at_least("ranks", self.ranks, 2)
        check_divisible(self.global_batch, self.ranks)
        if not find_strategy(self.strategy).has_processes:
            raise UsageError(
                f"--strategy {self.strategy} is one process, whose replicas are not timed separately: use {DEFAULT}"
            )
        if not self.sampling.phase_steps:
            raise UsageError("--phase-steps 0 leaves nothing to compare: use 20")
        told = self.job.perturbation
        if told.seconds and told.delay_rank is None:
            raise UsageError(f"--delay {told.delay} delays all ranks: add --delay-rank 0, or use scalelab run delay")
        if told.delay_rank is not None and told.delay_rank >= self.ranks:
            raise UsageError(f"--delay-rank {told.delay_rank} does not exist: the last rank is {self.ranks - 1}")

    @property
    def is_delayed(self) -> bool:
        return self.job.perturbation.seconds > 0

    def plan(self) -> list[Trial]:
        quiet = replace(self.job, perturbation=Perturbation())
        alone = f"{self.job.name_strategy(self.strategy)}-{self.ranks}"
        rows = {UNDELAYED: quiet, DELAYED: self.job} if self.is_delayed else {alone: self.job}
        configurations = [
            Configuration(
                name=name,
                strategy=self.strategy,
                num_ranks=self.ranks,
                global_batch=self.global_batch,
                job=job,
                label=LABELS.get(name, ""),
            )
            for name, job in rows.items()
        ]
        return plan_rounds(self.job, self.sampling, configurations)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        answer = StragglerAnswer(arms=arms, perturbation=self.job.perturbation)
        words = (self.job.name_ranks(self.strategy, self.ranks), self.job.dtype, f"global batch {self.global_batch}")
        return Document(
            title=self.title,
            question=self.question,
            setting=sweep.describe_measurement(self.job, self.sampling, arms.values(), *words),
            sections=tuple(self._make_sections(answer)),
            findings=tuple(find_findings(answer)),
            cautions=(
                *find_cautions(arms.values()),
                *(caution for arm in arms.values() for caution in breakdown.warn_of_rest(arm)),
                *warn_of_limits(answer),
            ),
        )

    def _make_sections(self, answer: StragglerAnswer) -> Iterator[Section]:
        yield Section(tables=(make_straggler_table(answer),))
        looked_at = answer.looked_at
        if looked_at is not None and looked_at.is_measured:
            title = f"Own time of every rank of {looked_at.label}"
            yield Section(heading="Who is slow", tables=(make_own_time_table(answer.diagnosis, title=title),))
        measured = [arm for arm in answer.arms.values() if arm.is_measured]
        if measured:
            parts = tuple(breakdown.make_breakdown_table(arm, title=f"Every rank of {arm.label}") for arm in measured)
            charts = tuple(chart for arm in measured if (chart := breakdown.plot_rank_parts(arm)) is not None)
            yield Section(heading="Where the time goes", tables=parts, charts=charts)
        if self.is_delayed:
            model = make_model_table(answer)
            columns = {"model_seconds": "model", "measured_seconds": "measured"}
            chart = draw_columns(model, columns, title="Against the model", axis_title="step time")
            yield Section(heading="Against the model", tables=(model,), charts=keep_charts(chart))
