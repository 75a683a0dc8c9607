"""The numbers, tables and sentences that answer `delay`.

The charts of `delay`: steps and speedups against the delay, with what is expected of them.
"""

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
from scalelab.report.document import Chart, Column, Table, make_row
from scalelab.studies.shared.arms import Arm, describe_failures, describe_status, join_words
from scalelab.studies.shared.sweep import (
    INTERVAL_NOTE,
    SweepColumn,
    divide_by_ranks,
    make_sweep_table,
    measure_speedup,
    samples_column,
    step_column,
)
from scalelab.units import format_interval, format_quantity, format_share


def format_delay(seconds: float) -> str:
    """A delay as a person would type it: it was given, not measured, and has no digits of its own."""
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


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
    columns = [
        step_column(),
        samples_column(),
        SweepColumn(
            column=Column(key="added_seconds", header="added", quantity="seconds"), read=lambda arm: answer.added(arm)
        ),
        SweepColumn(
            column=Column(key="speedup", header="speedup", quantity="ratio"), read=lambda arm: answer.speedup(arm)
        ),
        SweepColumn(
            column=Column(key="efficiency", header="efficiency", quantity="share", shows_interval=False),
            read=lambda arm: answer.efficiency(arm),
        ),
    ]
    notes = (
        "added: by how much a step is longer than without the delay",
        "speedup: over one rank with the same delay",
    )
    return make_sweep_table(answer.arms.values(), columns, notes=notes)


def make_overlay_table(answer: DelayAnswer) -> Table | None:
    """Measured speedups beside both forms of the law; None where there is no speedup."""
    overlays = list(answer.overlays())
    if not overlays:
        return None
    columns = (
        Column(key="ranks", header="ranks", quantity="count"),
        Column(key="delay_seconds", header="delay", quantity="seconds"),
        Column(key="measured", header="measured speedup", quantity="ratio"),
        Column(key="calibrated", header="law with T_N", quantity="ratio"),
        Column(key="over_calibrated", header="measured / law", quantity="ratio"),
        Column(key="verdict", header="verdict", align="left"),
        Column(key="ideal", header="law with T_1/N", quantity="ratio"),
        Column(key="over_ideal", header="measured / ideal", quantity="ratio"),
        Column(key="ideal_verdict", header="and its verdict", align="left"),
    )
    rows = tuple(
        make_row(
            overlay.num_ranks,
            overlay.delay_seconds,
            overlay.measured,
            overlay.calibrated,
            overlay.over_calibrated,
            judge_model(overlay.over_calibrated),
            overlay.ideal,
            overlay.over_ideal,
            judge_model(overlay.over_ideal),
        )
        for overlay in overlays
    )
    notes = (
        INTERVAL_NOTE,
        "law with T_N: (T_1 + d) / (T_N + d); law with T_1/N: (T_1 + d) / (T_1/N + d); T without the delay",
        "without a delay the first is the measurement itself",
    )
    return Table(columns=columns, rows=rows, notes=notes)


def judge_model(ratio: Estimate | None) -> str | None:
    """A measured speedup over a model's, in words; the words of `judge` are about times, where more is slower."""
    if ratio is None:
        return None
    words = {"slower": "more than the law", "faster": "less than the law"}
    verdict = judge(ratio).value
    return words.get(verdict, verdict)


def summarise_delay(answer: DelayAnswer, phase: str) -> Iterator[str]:
    """The findings, the main one first."""
    overlays = list(answer.overlays())
    delayed = [overlay for overlay in overlays if overlay.delay_seconds]
    plain = {overlay.num_ranks: overlay for overlay in overlays if not overlay.delay_seconds}
    for overlay in delayed[-1:]:
        n, delay = overlay.num_ranks, format_delay(overlay.delay_seconds)
        without = plain.get(n)
        before = f" instead of {format_quantity('ratio', without.measured)}" if without else ""
        yield (
            f"With {delay} in {phase} of every step, {answer.strategy} on {n} ranks is"
            f" {format_quantity('ratio', overlay.measured)} times as fast as on one{before}."
        )
    for overlay in delayed:
        yield from _compare(overlay)
    yield from _name_added(answer)


def _compare(overlay: Overlay) -> Iterator[str]:
    where = f"{overlay.num_ranks} ranks, {format_delay(overlay.delay_seconds)}"
    law, over = overlay.calibrated, overlay.over_calibrated
    if law is not None and over is not None:
        yield (
            f"{where}: Amdahl's law with the delay as serial part and the measured T_{overlay.num_ranks} says"
            f" {format_quantity('ratio', law)}; measured is {format_interval('ratio', over)} times that,"
            f" {format_share(abs(over.value - 1))} apart: {judge_model(over)}."
        )
    ideal, over_ideal = overlay.ideal, overlay.over_ideal
    if ideal is not None and over_ideal is not None:
        yield (
            f"{where}: were everything else perfectly parallel it would be {format_quantity('ratio', ideal)}; measured"
            f" is {format_interval('ratio', over_ideal)} times that: {judge_model(over_ideal)}."
        )


def _name_added(answer: DelayAnswer) -> Iterator[str]:
    for delay in answer.delays:
        arms = [(n, answer.find(n, delay)) for n in answer.ranks]
        known = [(n, answer.added(arm)) for n, arm in arms if arm is not None]
        said = [
            f"{format_quantity('seconds', added)} on {n} rank{'s'[: n > 1]}" for n, added in known if added is not None
        ]
        if said:
            yield f"A delay of {format_delay(delay)} makes a step longer by {', '.join(said)}."


Made = dict[str, Any]
MOST_RANKS = 4
"""Numbers of ranks in one chart: each has a line and an expectation."""


def _name(num_ranks: int) -> str:
    return f"{num_ranks} rank{'s'[: num_ranks > 1]}"


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
        title="A step against the delay",
        x=_make_axis(answer),
        y=Axis(field="seconds", title="step time", quantity="seconds"),
        rows=rows,
        guides=guides,
        failed=failed,
        caption=join_words(
            "Bars are 95 % confidence intervals; dashed is the step without a delay plus the delay.",
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
            "Bars are 95 % confidence intervals. Amdahl's law takes the delay as serial part: once with the time"
            " that was measured without a delay, once with an N-th of one rank's.",
            _say_rest(answer, MOST_RANKS - 1),
        ),
    )
