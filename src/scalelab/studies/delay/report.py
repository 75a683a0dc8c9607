"""Tables, charts and findings of injected delays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import judge
from scalelab.report import tables
from scalelab.report.charts.column_charts import draw_lines
from scalelab.report.charts.plot import Axis
from scalelab.report.document import Chart, Table
from scalelab.report.findings import ASIDE, DETAIL, REASON, Finding, FindingKind, Known
from scalelab.studies.delay.answer import DelayAnswer, Overlay, format_delay, name_label, name_row
from scalelab.studies.scaling.answer import SPEEDUP
from scalelab.studies.shared import sweep
from scalelab.studies.shared.arms import Arm, describe_status
from scalelab.units import format_count, format_interval, format_known, format_quantity

MOST_RANKS = 4
"""Numbers of ranks in one chart: each has a line and an expectation; the others are in the table."""
AMDAHL_OVERLAY = FindingKind(
    "amdahl-overlay", "A measured speedup over Amdahl's prediction", REASON, ("ratio", "predicted", "verdict")
)
ADDED = FindingKind(
    "delay-added", "By how much a delay makes a step longer, on the most ranks", DETAIL, ("seconds", "delay_seconds")
)


MODEL_WORDS = {"unresolved": "the interval includes the law", "no difference": "as the law"}
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
    notes = ("speedup: over one rank with the same delay", "added: to the step without the delay")
    return sweep.make_sweep_table(answer.arms.values(), columns, notes=notes)


def make_overlay_table(answer: DelayAnswer) -> Table | None:
    """Measured speedups beside both forms of the law; None where there is no speedup."""
    overlays = list(answer.overlays())
    if not overlays:
        return None
    return tables.make_table(
        overlays,
        tables.count_column("ranks", "ranks", lambda one: one.num_ranks),
        tables.seconds_column("delay_seconds", "delay", lambda one: one.delay_seconds),
        tables.ratio_column("measured", "measured speedup", lambda one: one.measured),
        tables.ratio_column("calibrated", "law with T_N", lambda one: one.calibrated),
        tables.ratio_column("over_calibrated", "measured / law", lambda one: one.over_calibrated),
        tables.text_column("verdict", "verdict", lambda one: judge_model(one.over_calibrated)),
        tables.ratio_column("ideal", "law with T_1/N", lambda one: one.ideal),
        tables.ratio_column("over_ideal", "measured / ideal", lambda one: one.over_ideal),
        tables.text_column("ideal_verdict", "ideal verdict", lambda one: judge_model(one.over_ideal)),
        notes=(
            tables.INTERVAL_NOTE,
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
    rows = {one: name_row(answer.strategy, one.num_ranks, one.delay_seconds) for one in delayed}
    fair = [one for one, name in rows.items() if not answer.arms[name].trial.is_oversubscribed]
    main = next(reversed(fair or delayed), None)
    if main is not None:
        overlay = main
        n, delay, without = overlay.num_ranks, format_delay(overlay.delay_seconds), plain.get(overlay.num_ranks)
        before = f" (without the delay: {format_known('ratio', without.measured)})" if without else ""
        yield SPEEDUP(
            name_label(answer.strategy, n, overlay.delay_seconds),
            f"With {delay} in {phase} of every step, the speedup of {answer.strategy} on {n} ranks over 1 is"
            f" {format_known('ratio', overlay.measured)}{before}.",
            speedup=overlay.measured,
            efficiency=overlay.measured.map(lambda ratio: ratio / n),
        )
    for overlay in delayed:
        yield from _compare(answer.strategy, overlay, is_last=overlay is main)
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
            f" {format_interval('ratio', over)} times that: {MODEL_WORDS.get(verdict, verdict)}.",
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
            "law with measured T": read(lambda one: one.calibrated or (None if one.delay_seconds else one.measured)),
            "law with ideal T": read(lambda one: one.ideal),
        },
        "Speedup over one rank",
        "Bars are 95 % confidence intervals. Amdahl's law has the delay as serial part, with the step measured without"
        " delay or with 1/N of one rank's.",
    )
