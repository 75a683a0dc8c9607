"""The numbers, tables, charts and sentences that answer `delay`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.scaling_laws import compare_with_model, estimate_model, predict_speedup
from scalelab.analysis.speedup import estimate_speedup
from scalelab.analysis.stats import estimate_difference, judge
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import plot_lines
from scalelab.report.document import Chart, Table
from scalelab.report.findings import ASIDE, DETAIL, REASON, Finding, FindingKind
from scalelab.report.tables import (
    INTERVAL_NOTE,
    Field,
    count_column,
    make_table,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.scaling.findings import SPEEDUP
from scalelab.studies.shared.arms import Arm, describe_failures, describe_status, join_words
from scalelab.studies.shared.sweep import (
    divide_by_ranks,
    make_sweep_table,
    measure_speedup,
    samples_column,
    step_column,
)
from scalelab.units import format_count, format_interval, format_known, format_quantity

AMDAHL_OVERLAY = FindingKind(
    "amdahl-overlay",
    "A measured speedup over the one that Amdahl's law predicts with the delay as serial part",
    REASON,
    ("ratio", "predicted", "verdict"),
)
ADDED = FindingKind(
    "delay-added", "By how much a delay makes a step longer, on the most ranks", DETAIL, ("seconds", "delay_seconds")
)


def format_delay(seconds: float) -> str:
    """A delay as a person would type it: it was given, not measured, and has no digits of its own."""
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


def name_label(strategy: str, num_ranks: int, delay_seconds: float) -> str:
    """What tables call it."""
    return f"{strategy} × {num_ranks}{f' + {format_delay(delay_seconds)}' if delay_seconds else ''}"


def name_row(strategy: str, num_ranks: int, delay_seconds: float) -> str:
    """The configuration's name, without a character that a directory could not have."""
    microseconds = f"-{delay_seconds * 1e6:.0f}us" if delay_seconds else ""
    return f"{strategy}-{num_ranks}{microseconds}"


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
        arm = self.arms.get(name_row(self.strategy, num_ranks, delay_seconds))
        return arm if arm is not None and arm.is_measured else None

    def base_of(self, arm: Arm) -> Arm | None:
        """One rank with the same delay."""
        return self.find(1, arm.trial.perturbation.seconds)

    def speedup(self, arm: Arm) -> Estimate | float | None:
        return measure_speedup(arm, self.base_of(arm))

    def efficiency(self, arm: Arm) -> Estimate | float | None:
        return divide_by_ranks(self.speedup(arm), arm)

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


def make_delay_table(answer: DelayAnswer) -> Table:
    """Step, what the delay adds, and the speedup over one rank with the same delay."""
    columns: list[Field[Arm]] = [
        step_column(),
        samples_column(),
        seconds_column("added_seconds", "added", answer.added),
        ratio_column("speedup", "speedup", answer.speedup),
        share_column("efficiency", "efficiency", answer.efficiency, shows_interval=False),
    ]
    notes = (
        "speedup: over one rank with the same delay",
        "added: by how much a step is longer than without the delay",
    )
    return make_sweep_table(answer.arms.values(), columns, notes=notes)


def make_overlay_table(answer: DelayAnswer) -> Table | None:
    """Measured speedups beside both forms of the law; None where there is no speedup."""
    overlays = list(answer.overlays())
    if not overlays:
        return None
    return make_table(
        overlays,
        count_column("ranks", "ranks", lambda one: one.num_ranks),
        seconds_column("delay_seconds", "delay", lambda one: one.delay_seconds),
        ratio_column("measured", "measured speedup", lambda one: one.measured),
        ratio_column("calibrated", "law with T_N", lambda one: one.calibrated),
        ratio_column("over_calibrated", "measured / law", lambda one: one.over_calibrated),
        text_column("verdict", "verdict", lambda one: judge_model(one.over_calibrated)),
        ratio_column("ideal", "law with T_1/N", lambda one: one.ideal),
        ratio_column("over_ideal", "measured / ideal", lambda one: one.over_ideal),
        text_column("ideal_verdict", "ideal verdict", lambda one: judge_model(one.over_ideal)),
        notes=(
            INTERVAL_NOTE,
            "law with T_N: (T_1 + d) / (T_N + d); law with T_1/N: (T_1 + d) / (T_1/N + d); T without the delay",
            "without a delay the first is the measurement itself",
        ),
    )


def judge_model(ratio: Estimate | None) -> str | None:
    """A measured speedup over a model's, in words; the words of `judge` are about times, where more is slower."""
    if ratio is None:
        return None
    words = {"slower": "more than the law", "faster": "less than the law"}
    verdict = judge(ratio).value
    return words.get(verdict, verdict)


def find_findings(answer: DelayAnswer, phase: str) -> Iterator[Finding]:
    overlays = list(answer.overlays())
    delayed = [overlay for overlay in overlays if overlay.delay_seconds]
    plain = {overlay.num_ranks: overlay for overlay in overlays if not overlay.delay_seconds}
    if delayed:
        overlay = delayed[-1]
        n, delay = overlay.num_ranks, format_delay(overlay.delay_seconds)
        without = plain.get(n)
        before = f" (without the delay: {format_known('ratio', without.measured)})" if without else ""
        yield SPEEDUP(
            name_label(answer.strategy, n, overlay.delay_seconds),
            f"With {delay} in {phase} of every step, the speedup of {answer.strategy} on {n} ranks over 1 is"
            f" {format_known('ratio', overlay.measured)}{before}.",
            speedup=overlay.measured,
            efficiency=overlay.measured.map(lambda ratio: ratio / n),
        )
    for overlay in delayed:
        yield from _compare(answer.strategy, overlay, is_last=overlay is delayed[-1])
    yield from _name_added(answer)


def _compare(strategy: str, overlay: Overlay, *, is_last: bool) -> Iterator[Finding]:
    """The measured speedup beside both forms of the law; of the largest one first."""
    n, label = overlay.num_ranks, name_label(strategy, overlay.num_ranks, overlay.delay_seconds)
    pairs = (
        (f"the delay as serial part and the measured T_{n}", overlay.calibrated, overlay.over_calibrated),
        (f"the delay as the only serial part (T_{n} = T_1/{n})", overlay.ideal, overlay.over_ideal),
    )
    for number, (words, law, over) in enumerate(pairs):
        if law is None or over is None:
            continue
        verdict = judge_model(over) or ""
        weight = (DETAIL if number else REASON) if is_last else ASIDE
        yield AMDAHL_OVERLAY(
            label,
            f"{label}: Amdahl's law with {words} predicts {format_quantity('ratio', law)}; measured is"
            f" {format_interval('ratio', over)} times that, {verdict}.",
            weight=weight,
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


Made = dict[str, Any]
MOST_RANKS = 4
"""Numbers of ranks in one chart: each has a line and an expectation."""


def _name(num_ranks: int) -> str:
    return format_count(num_ranks, "rank")


def _say_rest(answer: DelayAnswer, most: int) -> str:
    left_out = [str(num_ranks) for num_ranks in answer.ranks[most:]]
    return f"In the table only: {', '.join(left_out)} ranks." if left_out else ""


def _make_axis(answer: DelayAnswer) -> Axis:
    return Axis(field="delay", title="delay in every step", quantity="seconds", ticks=answer.delays)


def plot_delayed_steps(answer: DelayAnswer) -> Chart | None:
    """The step of every number of ranks against the delay, beside the step without it plus the delay."""
    rows: list[Made] = []
    guides: list[Made] = []
    failed: list[Made] = []
    for num_ranks in answer.ranks[:MOST_RANKS]:
        for delay in answer.delays:
            place = {"series": _name(num_ranks), "delay": delay}
            arm = answer.find(num_ranks, delay)
            if arm is not None:
                rows.append(place | {"seconds": arm.step, "key": arm.label})
            else:
                known = answer.arms.get(name_row(answer.strategy, num_ranks, delay))
                failed.append(
                    place | {"status": describe_status(known), "key": f"{_name(num_ranks)}, {delay * 1e3:g} ms"}
                )
        plain = answer.find(num_ranks, 0.0)
        if plain is not None:
            guides += [
                {"series": f"{_name(num_ranks)}, plus the delay", "delay": d, "seconds": plain.step.value + d}
                for d in (0.0, max(answer.delays))
            ]
    if len(rows) < 2:
        return None
    return plot_lines(
        title="Step time against the delay",
        x=_make_axis(answer),
        y=Axis(field="seconds", title="step time", quantity="seconds"),
        rows=rows,
        guides=guides,
        failed=failed,
        caption=join_words(
            "Bars are 95 % confidence intervals; dashed: the step without delay plus the delay.",
            _say_rest(answer, MOST_RANKS),
            *describe_failures((row["key"], row["status"]) for row in failed),
        ),
        extra={"key": "configuration"},
    )


def plot_delayed_speedups(answer: DelayAnswer) -> Chart | None:
    """The speedup over one rank with the same delay, beside both forms of the law."""
    overlays = [overlay for overlay in answer.overlays() if overlay.num_ranks in answer.ranks[: MOST_RANKS - 1]]
    if len(overlays) < 2:
        return None
    rows: list[Made] = [
        {
            "series": _name(one.num_ranks),
            "delay": one.delay_seconds,
            "speedup": one.measured,
            "key": _name(one.num_ranks),
        }
        for one in overlays
    ]
    guides: list[Made] = []
    for one in overlays:
        laws = {"measured T": one.calibrated or (one.measured if not one.delay_seconds else None), "ideal T": one.ideal}
        guides += [
            {"series": f"{_name(one.num_ranks)}, law with {name}", "delay": one.delay_seconds, "speedup": law.value}
            for name, law in laws.items()
            if law is not None
        ]
    return plot_lines(
        title="Speedup against the delay",
        x=_make_axis(answer),
        y=Axis(field="speedup", title="speedup over one rank", quantity="ratio"),
        rows=rows,
        guides=guides,
        caption=join_words(
            "Bars are 95 % confidence intervals. Amdahl's law takes the delay as serial part: with the step measured"
            " without delay, and with 1/N of one rank's.",
            _say_rest(answer, MOST_RANKS - 1),
        ),
    )
