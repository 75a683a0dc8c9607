"""Delay: what a fixed time in every step does to the speedup.

A delay that every rank sits out is a serial part: more ranks do not shorten it. Amdahl's law predicts its effect,
S_N(d) = (T₁ + d) / (T_N + d), and the study compares that with the measurement (`analysis/speedup.py`): once with
the measured T_N, which asks only whether the delay adds up, and once with T_N = T₁ / N, which also assumes that
everything else scales perfectly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import compare_with_model, estimate_model, estimate_speedup, predict_speedup
from scalelab.analysis.stats import estimate_difference, judge
from scalelab.checks import check_at_least, parse_seconds, read_flag
from scalelab.errors import UsageError
from scalelab.records.strategies import ParallelStrategy
from scalelab.records.trial import Trial, TrialResult
from scalelab.report import tables
from scalelab.report.charts.column_charts import draw_lines, keep_charts
from scalelab.report.charts.plot import Axis
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import ASIDE, DETAIL, REASON, Finding, FindingKind, Known
from scalelab.studies.scaling.answer import SPEEDUP
from scalelab.studies.shared import sweep
from scalelab.studies.shared.arms import Arm, describe_status, find_measured, group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Configuration, Sampling, Study, check_ranks
from scalelab.units import format_count, format_interval, format_known, format_quantity


def format_delay(seconds: float) -> str:
    """A delay as a person would type it: it was given, not measured, and has no digits of its own."""
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


def name_label(strategy: str, num_ranks: int, delay_seconds: float) -> str:
    """What tables call it."""
    return f"{strategy} × {num_ranks}{f' + {format_delay(delay_seconds)}' if delay_seconds else ''}"


def name_row(strategy: str, num_ranks: int, delay_seconds: float) -> str:
    """The configuration's name, without a character that a directory could not have."""
    return f"{strategy}-{num_ranks}{f'-{delay_seconds * 1e6:.0f}us' if delay_seconds else ''}"


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """A measured speedup beside what the law says of it."""

    num_ranks: int
    delay_seconds: float
    measured: Estimate
    calibrated: Estimate | None
    """(T₁ + d) / (T_N + d)."""
    ideal: Estimate | None
    """(T₁ + d) / (T₁/N + d)."""
    over_calibrated: Estimate | None
    """Measured over the model's, round by round."""
    over_ideal: Estimate | None


@dataclass(frozen=True, kw_only=True)
class DelayAnswer:
    """The arms of the study by number of ranks and delay."""

    arms: Mapping[str, Arm]
    strategy: str
    delays: tuple[float, ...]
    ranks: tuple[int, ...]

    def find(self, num_ranks: int, delay_seconds: float) -> Arm | None:
        """The arm, if it was measured."""
        return find_measured(self.arms, name_row(self.strategy, num_ranks, delay_seconds))

    def speedup(self, arm: Arm) -> Estimate | float | None:
        """Over one rank with the same delay."""
        return sweep.measure_speedup(arm, self.find(1, arm.trial.perturbation.seconds))

    def efficiency(self, arm: Arm) -> Estimate | float | None:
        return sweep.divide_by_ranks(self.speedup(arm), arm)

    def added(self, arm: Arm) -> Estimate | None:
        """By how much a step is longer than without the delay."""
        undelayed = self.find(arm.trial.num_ranks, 0.0)
        if undelayed is None or not arm.trial.perturbation.seconds:
            return None
        return estimate_difference(arm.clean, undelayed.clean)

    def overlays(self) -> Iterator[Overlay]:
        """Every delay on every number of ranks above one that has all that its model needs."""
        for delay in self.delays:
            for num_ranks in self.ranks:
                found = self._overlay(num_ranks, delay) if num_ranks > 1 else None
                if found is not None:
                    yield found

    def _overlay(self, num_ranks: int, delay: float) -> Overlay | None:
        one, many = self.find(1, 0.0), self.find(num_ranks, 0.0)
        delayed_one, delayed_many = self.find(1, delay), self.find(num_ranks, delay)
        if delayed_one is None or delayed_many is None:
            return None
        measured = [delayed_one.clean, delayed_many.clean]
        ideal = one and [one.clean]
        both = one and many and delay and [one.clean, many.clean]

        def predict_ideal(times: Sequence[float]) -> float:
            return predict_speedup(times[0], times[0] / num_ranks, delay)

        def predict_calibrated(times: Sequence[float]) -> float:
            return predict_speedup(times[0], times[1], delay)

        return Overlay(
            num_ranks=num_ranks,
            delay_seconds=delay,
            measured=estimate_speedup(delayed_one.clean, delayed_many.clean),
            calibrated=estimate_model(both, predict_calibrated) if both else None,
            ideal=Estimate(value=num_ranks) if not delay else estimate_model(ideal, predict_ideal) if ideal else None,
            over_calibrated=compare_with_model(measured, divide, both, predict_calibrated) if both else None,
            over_ideal=compare_with_model(measured, divide, ideal, predict_ideal) if ideal else None,
        )


def divide(times: Sequence[float]) -> float:
    """The measured speedup of one round: one rank's step over that of many."""
    return times[0] / times[1]


MOST_RANKS = 4
"""Numbers of ranks in one chart: each has a line and an expectation; the others are in the table."""
AMDAHL_OVERLAY = FindingKind(
    "amdahl-overlay", "A measured speedup over Amdahl's prediction", REASON, ("ratio", "predicted", "verdict")
)
ADDED = FindingKind(
    "delay-added", "By how much a delay makes a step longer, on the most ranks", DETAIL, ("seconds", "delay_seconds")
)
MODEL_WORDS = {"unresolved": "the interval includes it", "no difference": "as predicted"}
"""What a sentence says of a verdict that is not about more or less."""


def make_delay_table(answer: DelayAnswer) -> Table:
    """Step, what the delay adds, and the speedup over one rank with the same delay."""
    columns: list[tables.Field[Arm]] = [
        sweep.step_column(),
        sweep.samples_column(),
        tables.seconds_column("added_seconds", "added", answer.added),
        tables.ratio_column("speedup", "speedup", answer.speedup),
        tables.share_column("efficiency", "efficiency", answer.efficiency, shows_interval=False),
    ]
    notes = ("speedup: over one rank with the same delay", "added: to the step without the delay", tables.PAIRED_NOTE)
    return sweep.make_sweep_table(answer.arms.values(), columns, notes=notes)


def make_overlay_table(answer: DelayAnswer) -> Table | None:
    """Measured speedups beside the additive model and Amdahl's law; None where there is no speedup."""
    overlays = list(answer.overlays())
    if not overlays:
        return None
    return tables.make_table(
        overlays,
        tables.count_column("ranks", "ranks", lambda one: one.num_ranks),
        tables.seconds_column("delay_seconds", "delay", lambda one: one.delay_seconds),
        tables.ratio_column("measured", "measured speedup", lambda one: one.measured),
        tables.ratio_column("calibrated", "additive model", lambda one: one.calibrated),
        tables.ratio_column("over_calibrated", "measured / model", lambda one: one.over_calibrated),
        tables.text_column("verdict", "verdict", lambda one: judge_model(one.over_calibrated)),
        tables.ratio_column("ideal", "Amdahl's law", lambda one: one.ideal),
        tables.ratio_column("over_ideal", "measured / law", lambda one: one.over_ideal),
        tables.text_column("ideal_verdict", "verdict on the law", lambda one: judge_model(one.over_ideal)),
        notes=(
            tables.INTERVAL_NOTE,
            "additive model: (T_1 + d) / (T_N + d), T without a delay; without one it is the measurement",
            "Amdahl's law: 1 / (f + (1 − f)/N) with f = d / (T_1 + d), which is (T_1 + d) / (T_1/N + d)",
            "verdicts: the measured speedup is more or less than that",
        ),
    )


def judge_model(ratio: Estimate | None) -> str | None:
    """A measured speedup over a model's, in words; the words of `judge` are about times, where more is slower."""
    if ratio is None:
        return None
    words = {"slower": "more", "faster": "less"}
    verdict = judge(ratio).value
    return words.get(verdict, verdict)


def find_findings(answer: DelayAnswer, phase: str) -> Iterator[Finding]:
    overlays = list(answer.overlays())
    delayed = [overlay for overlay in overlays if overlay.delay_seconds]
    plain = {overlay.num_ranks: overlay for overlay in overlays if not overlay.delay_seconds}
    rows = {one: name_row(answer.strategy, one.num_ranks, one.delay_seconds) for one in delayed}
    fair = [one for one, name in rows.items() if not answer.arms[name].trial.is_oversubscribed]
    main = next(reversed(fair or delayed), None)
    if main is not None:
        n, delay, without = main.num_ranks, format_delay(main.delay_seconds), plain.get(main.num_ranks)
        before = f" (without the delay: {format_known('ratio', without.measured)})" if without else ""
        yield SPEEDUP(
            name_label(answer.strategy, n, main.delay_seconds),
            f"With {delay} in {phase} of every step, the speedup of {answer.strategy} on {n} ranks over 1 is"
            f" {format_known('ratio', main.measured)}{before}.",
            speedup=main.measured,
            efficiency=main.measured.map(lambda ratio: ratio / n),
        )
    for overlay in delayed:
        yield from _compare(answer.strategy, overlay, is_last=overlay is main)
    yield from _name_added(answer)


def _compare(strategy: str, overlay: Overlay, *, is_last: bool) -> Iterator[Finding]:
    """The measured speedup beside both forms of the law; of the largest one first."""
    n, label = overlay.num_ranks, name_label(strategy, overlay.num_ranks, overlay.delay_seconds)
    pairs = (
        (f"the additive model, with the measured T_{n},", overlay.calibrated, overlay.over_calibrated),
        (f"Amdahl's law, with the delay as the only serial part (T_{n} = T_1/{n}),", overlay.ideal, overlay.over_ideal),
    )
    for number, (words, law, over) in enumerate(pairs):
        if law is None or over is None:
            continue
        verdict = judge_model(over) or ""
        yield AMDAHL_OVERLAY(
            label,
            f"{label}: {words} predicts {format_quantity('ratio', law)}; measured over that, launch by launch, is"
            f" {format_interval('ratio', over)}: {MODEL_WORDS.get(verdict, f'{verdict} than predicted')}.",
            weight=(DETAIL if number else REASON) if is_last else ASIDE,
            ratio=over,
            predicted=law,
            verdict=verdict,
        )


def _name_added(answer: DelayAnswer) -> Iterator[Finding]:
    for delay in answer.delays:
        arms = [(n, answer.find(n, delay)) for n in answer.ranks]
        known = [(n, added) for n, arm in arms if arm is not None and (added := answer.added(arm)) is not None]
        if known:
            said = ", ".join(f"{format_known('seconds', added)} on {format_count(n, 'rank')}" for n, added in known)
            text = f"A delay of {format_delay(delay)} makes a step longer by {said}."
            yield ADDED(format_delay(delay), text, seconds=known[-1][1], delay_seconds=delay)


def _draw_over_delay(
    answer: DelayAnswer,
    ranks: Sequence[int],
    column: Callable[..., tables.Field[float]],
    read: Callable[[int, float], Known],
    laws: Mapping[str, Callable[[int, float], Known]],
    title: str,
    caption: str,
) -> Chart | None:
    """A line per number of ranks over the delay, and what each law expects of it."""

    def make_column(name: str, num_ranks: int, value: Callable[[int, float], Known]) -> tables.Field[float]:
        return column(f"{name} {num_ranks}", name, lambda delay: value(num_ranks, delay))

    delays: tables.Field[float] = tables.seconds_column("delay_seconds", "delay", lambda delay: delay)
    pivot = tables.make_table(
        answer.delays,
        tables.text_column("delay", "delay", format_delay),
        delays,
        *(make_column("measured", n, read) for n in ranks),
        *(make_column(name, n, law) for n in ranks for name, law in laws.items()),
    )
    axis = Axis(field="delay_seconds", title="delay in every step", quantity="seconds", ticks=answer.delays)
    lines = {f"measured {n}": format_count(n, "rank") for n in ranks}
    guides = {f"{name} {n}": f"{format_count(n, 'rank')}, {name}" for n in ranks for name in laws}
    return draw_lines(
        pivot, axis, lines, guides=guides, axis_title=title.lower(), title=f"{title} against the delay", caption=caption
    )


def draw_steps(answer: DelayAnswer) -> Chart | None:
    """The step of every number of ranks against the delay, beside the step without it plus the delay."""

    def read_step(num_ranks: int, delay: float) -> Known:
        arm = answer.find(num_ranks, delay)
        return arm.step if arm else describe_status(answer.arms.get(name_row(answer.strategy, num_ranks, delay)))

    def add_up(num_ranks: int, delay: float) -> Known:
        plain = answer.find(num_ranks, 0.0)
        return None if plain is None else plain.step.value + delay

    return _draw_over_delay(
        answer,
        answer.ranks[:MOST_RANKS],
        tables.seconds_column,
        read_step,
        {"plus the delay": add_up},
        "Step time",
        "Bars are 95 % confidence intervals; dashed: the step without delay plus the delay.",
    )


def draw_speedups(answer: DelayAnswer) -> Chart | None:
    """The speedup over one rank with the same delay, beside both forms of the law."""
    found = {(one.num_ranks, one.delay_seconds): one for one in answer.overlays()}

    def read(value: Callable[[Overlay], Known]) -> Callable[[int, float], Known]:
        return lambda num_ranks, delay: value(found[num_ranks, delay]) if (num_ranks, delay) in found else None

    return _draw_over_delay(
        answer,
        [n for n in answer.ranks[:MOST_RANKS] if n > 1],
        tables.ratio_column,
        read(lambda one: one.measured),
        {
            "additive model": read(lambda one: one.calibrated or (None if one.delay_seconds else one.measured)),
            "Amdahl's law": read(lambda one: one.ideal),
        },
        "Speedup over one rank",
        "Bars are 95 % confidence intervals. The additive model adds the delay to the steps measured without it,"
        " Amdahl's law to one rank's and to 1/N of it.",
    )


@dataclass(frozen=True, kw_only=True)
class Delay(Study):
    """Measure every delay at every world size; --delay-phase sets where in the step."""

    takes_script: ClassVar[bool] = True

    delays: tuple[str, ...] = ("0ms", "10ms")
    """Delays to inject into every step of every rank; 0ms is always included."""
    ranks: tuple[int, ...] = (1, 2)
    """World sizes to measure; one rank is always measured."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    strategy: ParallelStrategy = "ddp"
    """How training is distributed."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0))

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        check_ranks(self.ranks, self.global_batch)
        seconds = [read_flag("delays", text, parse_seconds) for text in self.delays]
        if not seconds or len(set(seconds)) < len(seconds):
            raise UsageError(f"--delays {' '.join(self.delays)} needs at least one time, each once")
        told = self.job.perturbation
        if told.seconds:
            raise UsageError(f"--delay {told.delay} is not used here: use --delays 0ms {told.delay}")
        if told.delay_rank is not None:
            raise UsageError(
                f"--delay-rank {told.delay_rank} would delay one rank only: leave it out, or use scalelab run straggler"
            )

    @property
    def _strategy(self) -> str:
        return self.job.name_strategy(self.strategy)

    @property
    def delay_seconds(self) -> tuple[float, ...]:
        return tuple(sorted({0.0, *(parse_seconds(text) for text in self.delays)}))

    @property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(sorted({1, *self.ranks}))

    def plan(self) -> list[Trial]:
        return sweep.plan_sweep(self.job, self.sampling, list(self._configure()))

    def _configure(self) -> Iterator[Configuration]:
        for delay in self.delay_seconds:
            perturbation = replace(self.job.perturbation, delay=f"{delay * 1e3:.6g}ms")
            for num_ranks in self.all_ranks:
                yield Configuration(
                    name=name_row(self._strategy, num_ranks, delay),
                    strategy=self._strategy,
                    num_ranks=num_ranks,
                    global_batch=self.global_batch,
                    job=replace(self.job, perturbation=perturbation),
                    label=name_label(self._strategy, num_ranks, delay),
                )

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        answer = DelayAnswer(arms=arms, strategy=self._strategy, delays=self.delay_seconds, ranks=self.all_ranks)
        phase = self.job.perturbation.delay_phase
        words = (self._strategy, self.job.dtype, f"global batch {self.global_batch}", f"delays in {phase}")
        sections = [Section(tables=(make_delay_table(answer),), charts=keep_charts(draw_steps(answer)))]
        if (overlay := make_overlay_table(answer)) is not None:
            charts = keep_charts(draw_speedups(answer))
            sections.append(Section(heading="Against Amdahl's law", tables=(overlay,), charts=charts))
        return Document(
            title=self.title,
            question=self.question,
            setting=sweep.describe_measurement(self.job, self.sampling, arms.values(), *words),
            sections=tuple(sections),
            findings=tuple(find_findings(answer, phase)),
            cautions=sweep.find_sweep_cautions(arms, answer.find(1, 0.0)),
        )
