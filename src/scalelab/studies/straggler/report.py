"""Which rank of a row is slow, in which phase, by how much, who waits: the numbers, tables and sentences.

Everything comes from samples; the diagnosis does not look at what a trial was told to delay. The model of a step with
one slow rank is the maximum over ranks: T = max_r (own time of r) + all-reduce. A delay d on one rank of a balanced job
therefore adds to the step in full, T(d) = T + d, as a serial part does in Amdahl's law.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from scalelab.analysis.breakdown import (
    SMALLEST_EXCESS,
    Excess,
    LaunchSteps,
    RankBreakdown,
    find_excesses,
    find_slow_ranks,
)
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.scaling_laws import add_delay
from scalelab.analysis.stats import estimate_difference, estimate_median, estimate_ratio, judge
from scalelab.records.settings import Perturbation
from scalelab.records.trial import PHASES
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.columns import INTERVALS
from scalelab.report.charts.plot import plot_bars
from scalelab.report.document import Chart, Table
from scalelab.report.findings import ASIDE, DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind, Known
from scalelab.report.tables import (
    INTERVAL_NOTE,
    Field,
    make_table,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm, describe_status
from scalelab.studies.shared.breakdown import WAITING, break_arm, explain_strategy, tabulate_launches, waits_for_buffers
from scalelab.studies.shared.sweep import compare_steps, make_sweep_table, samples_column, step_column
from scalelab.units import format_interval, format_known, format_quantity, format_share

UNDELAYED, DELAYED = "undisturbed", "disturbed"
"""The configurations of a study that injects a delay, as runs on disk call them."""
LABELS = {UNDELAYED: "no delay", DELAYED: "delayed"}
MOST_NAMED = 3
"""How many slow ranks are named after the slowest; the others are in the table."""

STRAGGLER = FindingKind(
    "straggler",
    "The slow rank of a row, its phase and its excess over another rank; or that none is slow, or unresolved",
    MAIN,
    ("rank", "phase", "seconds", "share", "verdict"),
)
GAIN = FindingKind("straggler-gain", "What a step would save without the slow rank", REASON, ("seconds",))
INJECTED = FindingKind(
    "injected-delay", "Whether the diagnosis found the injected delay", REASON, ("is_found", "relative_error")
)
COST = FindingKind("delay-cost", "By how much the injected delay makes a step longer", REASON, ("seconds", "ratio"))
MODEL = FindingKind(
    "delay-model", "The measured step over the step without delay plus the delay", DETAIL, ("ratio", "verdict")
)
PARTLY_COMPARED = CautionKind("partly-compared", "Forward and backward of ranks could not be compared", "note")
BUFFERS = CautionKind("buffer-broadcast", "Ranks wait in forward for the buffers of rank 0", "note")


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The ranks of one row, compared with each other."""

    arm: Arm

    @cached_property
    def launches(self) -> list[LaunchSteps]:
        return [launch for launch in tabulate_launches(self.arm) if launch is not None]

    @cached_property
    def excesses(self) -> list[Excess]:
        """Every rank in every phase, the largest excess first; nothing where nothing can be compared."""
        launches = self.launches
        return find_excesses(launches) if self.arm.is_measured else []

    @cached_property
    def slow(self) -> list[Excess]:
        return find_slow_ranks(self.excesses)

    @property
    def main(self) -> Excess | None:
        """The largest that is certain."""
        return self.slow[0] if self.slow else None

    @cached_property
    def breakdown(self) -> list[RankBreakdown]:
        """Every rank's step in parts; nothing where they cannot be told apart."""
        return break_arm(self.arm) or []

    @property
    def longest_waiting(self) -> RankBreakdown | None:
        """The rank that waits most for others."""
        return max(self.breakdown, key=lambda parts: parts.parts["waiting"].value, default=None)

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
    def undelayed(self) -> Arm | None:
        return self._find_measured(UNDELAYED)

    @cached_property
    def delayed(self) -> Arm | None:
        return self._find_measured(DELAYED)

    def _find_measured(self, name: str) -> Arm | None:
        arm = self.arms.get(name)
        return arm if arm is not None and arm.is_measured else None

    @cached_property
    def diagnoses(self) -> dict[str, Diagnosis]:
        return {name: Diagnosis(arm=arm) for name, arm in self.arms.items()}

    @property
    def diagnosis(self) -> Diagnosis:
        """Of the row that is looked at."""
        assert self.looked_at is not None
        return self.diagnoses[self.looked_at.configuration]

    @cached_property
    def cost(self) -> Estimate | None:
        """By how much a delayed step is longer, round by round."""
        if self.delayed is None or self.undelayed is None:
            return None
        return estimate_difference(self.delayed.clean, self.undelayed.clean)

    @cached_property
    def model_seconds(self) -> Estimate | None:
        """The step without delay plus the delay."""
        if self.undelayed is None:
            return None
        return estimate_median(add_delay(self.undelayed.clean, self.perturbation.seconds))

    @cached_property
    def distance(self) -> Estimate | None:
        """The measured step over the model's, round by round."""
        if self.delayed is None or self.undelayed is None:
            return None
        return estimate_ratio(self.delayed.clean, add_delay(self.undelayed.clean, self.perturbation.seconds))


def make_straggler_table(answer: StragglerAnswer) -> Table:
    """The step, and the diagnosis of every row."""

    def read_main(arm: Arm, name: str) -> Known:
        diagnosis = answer.diagnoses[arm.configuration]
        main = diagnosis.main
        if name in ("seconds", "share"):
            return None if main is None else main.seconds if name == "seconds" else main.share
        if main is None:
            return "none" if diagnosis.excesses else None
        return f"rank {main.rank}" if name == "rank" else main.phase

    def read_waiting(arm: Arm) -> Estimate | None:
        longest = answer.diagnoses[arm.configuration].longest_waiting
        return None if longest is None else longest.parts["waiting"]

    is_delayed = answer.perturbation.seconds > 0
    columns: list[Field[Arm]] = [
        step_column(),
        samples_column(is_detail=is_delayed),
        ratio_column(
            "step_ratio",
            "× no delay",
            lambda arm: compare_steps(arm, answer.undelayed),
            is_detail=not is_delayed,
        ),
        text_column("slow_rank", "slow rank", lambda arm: read_main(arm, "rank")),
        text_column("slow_phase", "phase", lambda arm: read_main(arm, "phase")),
        seconds_column("excess_seconds", "excess", lambda arm: read_main(arm, "seconds")),
        share_column("excess_share", "of the step", lambda arm: read_main(arm, "share"), is_detail=True),
        seconds_column("waiting_seconds", "waiting", read_waiting),
    ]
    return make_sweep_table(
        answer.arms.values(), columns, notes=("waiting: of the rank that waits longest for the others",)
    )


def make_own_time_table(diagnosis: Diagnosis, *, title: str = "") -> Table:
    """Each rank's own time in each phase, and its excess over the rank that it is compared with."""

    def read_own(excess: Excess) -> Estimate:
        own = [launch.own[excess.phase][:, excess.rank] for launch in diagnosis.launches]
        return Estimate(value=float(np.median(np.concatenate(own))))

    return make_table(
        sorted(diagnosis.excesses, key=lambda excess: (PHASES.index(excess.phase), excess.rank)),
        text_column("phase", "phase", lambda excess: excess.phase),
        text_column("rank", "rank", lambda excess: f"rank {excess.rank}"),
        seconds_column("own_seconds", "own time", read_own),
        text_column("other", "against", lambda excess: f"rank {excess.other}"),
        seconds_column("excess_seconds", "excess", lambda excess: excess.seconds),
        share_column("excess_share", "of the step", lambda excess: excess.share),
        text_column("is_slow", "slow", lambda excess: "slow" if excess.is_alarm else "no"),
        title=title,
        notes=(
            INTERVAL_NOTE,
            "own time: the median, without waiting for others and without time in which other programs had the core",
            f"slow: the interval of the excess excludes zero, and it is at least {format_share(SMALLEST_EXCESS)} of the"
            " step without stalls (the slowest rank's own time and the exposed all-reduce)",
        ),
    )


def make_model_table(answer: StragglerAnswer) -> Table:
    """The measured step beside the one without delay plus the delay."""
    distance = answer.distance
    return make_table(
        [f"{LABELS[UNDELAYED]} + {answer.perturbation.delay}"],
        text_column("model", "model", lambda name: name),
        seconds_column("model_seconds", "step by the model", lambda _: answer.model_seconds),
        seconds_column("measured_seconds", "measured step", lambda _: answer.delayed.step if answer.delayed else None),
        ratio_column("distance", "measured / model", lambda _: distance),
        text_column("verdict", "verdict", lambda _: judge(distance).value if distance else None),
        notes=(INTERVAL_NOTE,),
    )


def plot_model(answer: StragglerAnswer) -> Chart | None:
    """The delayed step beside the model's, and the step without delay, which neither can be below."""
    if answer.undelayed is None or answer.model_seconds is None:
        return None
    model = f"model: {LABELS[UNDELAYED]} + {answer.perturbation.delay}"
    steps = {LABELS[UNDELAYED]: answer.undelayed.step, model: answer.model_seconds}
    rows: list[dict[str, Any]] = [{"bar": name, "seconds": step, "key": name} for name, step in steps.items()]
    failed = []
    name = LABELS[DELAYED]
    if answer.delayed is not None:
        rows.append({"bar": name, "seconds": answer.delayed.step, "key": name})
    else:
        failed.append({"bar": name, "status": describe_status(answer.arms.get(DELAYED))})
    return plot_bars(
        title="Against the model",
        x=Axis(field="seconds", title="step time", quantity="seconds"),
        y=Axis(field="bar", title="", quantity="text"),
        rows=rows,
        failed=failed,
        is_stacked=False,
        caption=INTERVALS,
    )


def find_findings(answer: StragglerAnswer) -> Iterator[Finding]:
    if answer.looked_at is None or not answer.looked_at.is_measured:
        return
    diagnosis = answer.diagnosis
    yield from name_slow_ranks(diagnosis)
    longest, main = diagnosis.longest_waiting, diagnosis.main
    if longest is not None and longest.share("waiting").value >= SMALLEST_EXCESS:
        waiting, share = longest.parts["waiting"], longest.share("waiting")
        text = (
            f"Rank {longest.rank} waits longest for the others: {format_known('seconds', waiting)} per step"
            f" ({format_share(share.value)} of it)."
        )
        yield WAITING(f"rank {longest.rank}", text, weight=REASON, seconds=waiting, share=share)
    if answer.perturbation.seconds:
        yield from _compare_with_injected(answer)
        yield from _name_cost(answer)
        if answer.undelayed is not None:
            yield from name_slow_ranks(answer.diagnoses[UNDELAYED], ASIDE, " without the delay")
    elif main is not None:
        saved = format_quantity("seconds", main.seconds.value)
        text = f"If rank {main.rank} were as fast as rank {main.other} there, a step would take up to {saved} less."
        yield GAIN(f"rank {main.rank}", text, seconds=main.seconds)


def name_slow_ranks(diagnosis: Diagnosis, weight: int = MAIN, when: str = "") -> Iterator[Finding]:
    """Who is slow, where, by how much; or that no rank is; or that it is unresolved."""
    label, excesses = diagnosis.arm.label, diagnosis.excesses
    for number, excess in enumerate(diagnosis.slow[: MOST_NAMED + 1]):
        longer, share = format_known("seconds", excess.seconds), format_share(excess.share.value)
        text = (
            f"Rank {excess.rank} is slow in {excess.phase}{when}: {longer} per step longer than rank {excess.other}"
            f" ({share} of the step)."
        )
        yield _make_straggler(label, text, excess, "slow", min(weight, REASON) if number else weight)
    if not excesses or diagnosis.slow:
        return
    largest = max(excesses, key=lambda excess: excess.share.high or excess.share.value)
    who = f"rank {largest.rank} in {largest.phase}, {format_quantity('seconds', largest.seconds)} per step"
    limit = format_share(SMALLEST_EXCESS)
    if largest.share.high is None or largest.share.high >= SMALLEST_EXCESS:
        share = format_quantity("share", largest.share)
        text = f"Unresolved whether a rank is slow{when}: {who} ({share} of the step) may be nothing or over {limit}."
        yield _make_straggler(label, text, largest, "unresolved", weight)
        return
    where = " in input or optimizer, the only phases compared" if diagnosis.missing_phases else ""
    text = f"No rank is slow{where}{when}: every excess over another rank is below {limit} of the step."
    yield _make_straggler(label, text, largest, "none", weight)


def _make_straggler(label: str, text: str, excess: Excess, verdict: str, weight: int) -> Finding:
    return STRAGGLER(
        label,
        text,
        weight=weight,
        rank=excess.rank,
        phase=excess.phase,
        seconds=excess.seconds,
        share=excess.share,
        verdict=verdict,
    )


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
    if answer.cost is None or answer.delayed is None or answer.distance is None or answer.model_seconds is None:
        return
    ratio = compare_steps(answer.delayed, answer.undelayed)
    times = f", {format_interval('ratio', ratio)} times the step without it" if isinstance(ratio, Estimate) else ""
    text = f"The delay makes a step {format_known('seconds', answer.cost)} longer{times}."
    yield COST(LABELS[DELAYED], text, seconds=answer.cost, ratio=ratio)
    verdict = judge(answer.distance)
    yield MODEL(
        LABELS[DELAYED],
        f"Model (step without delay + delay): {format_quantity('seconds', answer.model_seconds)}; measured is"
        f" {format_interval('ratio', answer.distance)} times that: {verdict}.",
        ratio=answer.distance,
        verdict=str(verdict),
    )


def warn_of_limits(answer: StragglerAnswer) -> Iterator[Caution]:
    """What the diagnosis cannot see here."""
    arm = answer.looked_at
    if arm is None or not arm.is_measured:
        return
    if answer.diagnosis.missing_phases:
        reason = explain_strategy(arm.trial) or "the last gradients were not timed"
        message = f"only input and optimizer were compared: {reason}"
        yield PARTLY_COMPARED(arm.label, message, "use --strategy ddp to compare forward and backward too")
    if any(waits_for_buffers(result) for result in arm.completed):
        message = "ranks wait in forward for rank 0's buffers: if rank 0 is late inside forward, all seem to be"
        yield BUFFERS(arm.label, message, "measure again with --no-broadcast-buffers")
