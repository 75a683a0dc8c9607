"""The tables of the comparison of strategies.

The comparison of strategies in words: which is fastest, who varies, who idles and when, who holds more.

The charts of the comparison of strategies: time with memory, and the phases of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scalelab.analysis.quality import estimate_quantile, estimate_variation
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.analysis.utilization import IDLE, NUM_SLICES
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import MOST_SERIES, plot_bars, plot_lines
from scalelab.report.document import Chart, Column, Table, make_cell, make_row
from scalelab.report.findings import Finding
from scalelab.studies.shared.arms import Arm, count_rest, describe_failures, describe_status, join_words
from scalelab.studies.shared.breakdown import plot_phases
from scalelab.studies.shared.communication import (
    compare_methods,
    describe_traced,
    estimate_counted,
    estimate_traced_exposed,
    list_methods,
    measure_ablation,
)
from scalelab.studies.shared.sweep import (
    CONTROL,
    INTERVAL_NOTE,
    SweepColumn,
    make_sweep_table,
    memory_column,
    ratio_column,
    samples_column,
    step_column,
)
from scalelab.studies.strategies.answer import describe_losses, find_excess, list_devices
from scalelab.units import format_interval, format_quantity, format_share

TENSORS = "§"
"""The mark of memory that was added up from tensors."""


def make_main_table(arms: Sequence[Arm], reference: Arm | None) -> Table:
    """Time, how it varies, and memory, for every strategy."""
    columns = (
        step_column(),
        SweepColumn(
            column=Column(key="step_seconds_p95", header="95 % below", quantity="seconds"),
            read=lambda arm: estimate_quantile(arm.clean, 0.95),
        ),
        SweepColumn(
            column=Column(key="variation", header="variation", quantity="share"),
            read=lambda arm: estimate_variation(arm.clean),
        ),
        samples_column(),
        ratio_column(reference),
        memory_column(),
        SweepColumn(
            column=Column(key="device_0_excess_bytes", header="device 0 more by", quantity="bytes"),
            read=lambda arm: make_cell(find_excess(arm), mark=_mark_memory(arm)),
        ),
    )
    return make_sweep_table(arms, columns, notes=_explain_memory(arms))


def make_device_table(arms: Sequence[Arm]) -> Table:
    """How busy every device was, and what it held."""
    columns = (
        Column(key="device", header="device", align="left"),
        Column(key="busy", header="busy", quantity="share"),
        Column(key="busy_p5", header="5 % below", quantity="share"),
        Column(key="busy_p95", header="95 % below", quantity="share"),
        Column(key="idle", header="idle", quantity="share"),
        Column(key="memory_bytes", header="memory", quantity="bytes"),
    )
    rows = []
    for arm in arms:
        for device in list_devices(arm):
            seen = device.utilization
            memory = make_cell(device.memory, mark=_mark_memory(arm) if device.memory else "")
            known = (seen.busy, seen.low, seen.high, seen.idle) if seen else (None,) * 4
            rows.append(make_row(f"{arm.label}, {device.name}", *known, memory))
    idle = f"idle: intervals, of 50 ms or a pass of dp, in which the device was busy for less than {format_share(IDLE)}"
    return Table(columns=columns, rows=tuple(rows), notes=(INTERVAL_NOTE, idle, *_explain_memory(arms)))


def make_time_table(arms: Sequence[Arm]) -> Table:
    """The busy share of every device in each tenth of the time of clean steps."""
    tenths = range(1, NUM_SLICES + 1)
    columns = (
        Column(key="device", header="device", align="left"),
        *(Column(key=f"busy_{number}", header=f"{number}", quantity="share") for number in tenths),
    )
    rows = []
    for arm in arms:
        for device in list_devices(arm):
            slices = device.utilization.slices if device.utilization else (None,) * NUM_SLICES
            rows.append(make_row(f"{arm.label}, {device.name}", *slices))
    note = "the busy share in each tenth of the time from the first clean step that counts to the last, over launches"
    return Table(columns=columns, rows=tuple(rows), notes=(note,))


def make_communication_table(arms: Sequence[Arm]) -> Table | None:
    """Exposed communication by every way that a strategy has; None where none has any."""
    columns = (
        Column(key="run", header="run", align="left"),
        Column(key="ablation_seconds", header="comm by ablation", quantity="seconds"),
        Column(key="counted_seconds", header="comm by DDP counters", quantity="seconds"),
        Column(key="traced_exposed_seconds", header="comm by trace", quantity="seconds"),
    )
    ways = {arm.label: (measure_ablation(arm), estimate_counted(arm), estimate_traced_exposed(arm)) for arm in arms}
    rows = tuple(make_row(label, *found) for label, found in ways.items() if any(found))
    title = "Exposed communication, by every way to it"
    return Table(title=title, columns=columns, rows=rows, notes=(INTERVAL_NOTE,)) if rows else None


def _mark_memory(arm: Arm) -> str:
    return TENSORS if arm.trial.is_emulated else ""


def _explain_memory(arms: Sequence[Arm]) -> tuple[str, ...]:
    if not any(arm.trial.is_emulated and arm.is_measured for arm in arms):
        return ()
    return (f"{TENSORS} replicas share one process: their tensors are added up, which is no peak",)


CLEAR_EXCESS = 0.05
"""A device 0 that holds this share more than the others is worth a word."""


def summarise_strategies(arms: Sequence[Arm], reference: Arm | None) -> tuple[str | Finding, ...]:
    """The findings, the main one first; nothing where nothing was measured."""
    return tuple(_find_sentences(arms, reference))


def _find_sentences(arms: Sequence[Arm], reference: Arm | None) -> Iterator[str | Finding]:
    if not arms:
        return
    yield from _name_fastest(arms)
    if reference is not None and reference.is_measured:
        yield from _compare_all(arms, reference)
    yield from _compare_variation(arms)
    for arm in arms:
        yield from _describe_idling(arm)
    yield from _compare_memory(arms)
    for arm in arms:
        yield from describe_traced(arm)
        methods = list_methods(arm)
        yield from compare_methods(arm, {name: methods[name] for name in ("ablation", "counters", "trace")})
    if reference is not None and reference.is_measured:
        words = describe_losses(arms, reference)
        if words:
            yield words


def _name_fastest(arms: Sequence[Arm]) -> Iterator[str]:
    ranked = sorted(arms, key=lambda arm: arm.step.value)
    if len(ranked) < 2:
        return
    first, second = ranked[:2]
    ratio = estimate_ratio(second.clean, first.clean)
    step = format_quantity("seconds", first.step)
    if judge(ratio) is Verdict.SLOWER:
        yield (
            f"{_capital(first.label)} was the fastest with {step} a step; the next, {second.label}, took"
            f" {format_quantity('ratio', ratio)} times as long."
        )
    else:
        yield (
            f"{_capital(first.label)}, with {step} a step, and {second.label} were fastest and cannot be told apart:"
            f" the ratio is {format_interval('ratio', ratio)}."
        )


def _compare_all(arms: Sequence[Arm], reference: Arm) -> Iterator[str]:
    words = {
        Verdict.FASTER: "faster: {} of its time",
        Verdict.SLOWER: "slower: {} times as long",
        Verdict.NO_DIFFERENCE: "no different: {}",
        Verdict.UNRESOLVED: "unresolved: {}",
    }
    found = []
    for arm in arms:
        if arm is not reference:
            ratio = estimate_ratio(arm.clean, reference.clean)
            verdict = judge(ratio)
            said = format_share(ratio.value) if verdict is Verdict.FASTER else format_interval("ratio", ratio)
            found.append(f"{arm.label} is {words[verdict].format(said)}")
    if found:
        yield f"Against the {reference.label}: {'; '.join(found)}."


def _compare_variation(arms: Sequence[Arm]) -> Iterator[str]:
    """The steadiest and the least steady, where their intervals leave no doubt."""
    found = [(estimate_variation(arm.clean), arm) for arm in arms]
    known = sorted(((v, arm) for v, arm in found if v is not None), key=lambda entry: entry[0].value)
    if len(known) < 2:
        return
    (low, steady), (high, unsteady) = known[0], known[-1]
    said = (
        f"{unsteady.label} {format_quantity('share', high)} and of {steady.label} {format_quantity('share', low)}"
        " (standard deviation over mean)"
    )
    if low.high is not None and high.low is not None and high.low > low.high:
        yield f"Steps vary most under {unsteady.label}: those of {said}."
    else:
        yield f"No strategy's steps clearly vary more than another's: those of {said}."


def _describe_idling(arm: Arm) -> Iterator[str]:
    """Who idles, by how much, and in dp also when."""
    known = [(device.name, device.utilization.busy) for device in list_devices(arm) if device.utilization]
    if len(known) < 2 or len(known) < arm.trial.num_ranks:
        return
    shares = ", ".join(f"{name} {format_quantity('share', busy)}" for name, busy in known)
    yield f"Busy under {arm.label}: {shares}.{_explain_dp(arm) if arm.trial.strategy == 'dp' else ''}"


def _explain_dp(arm: Arm) -> str:
    """Taking the batch and updating are done once, by replica 0's device, while the others have nothing to do."""
    phases = {name: arm.phase(name) for name in ("input", "forward", "backward", "optimizer")}
    values = {name: phase.value for name, phase in phases.items() if phase is not None}
    if len(values) < len(phases) or not sum(values.values()):
        return ""
    alone = (values["input"] + values["optimizer"]) / sum(values.values())
    return (
        f" Device 0 alone takes the batch and updates the parameters, {format_share(alone)} of the step; within forward"
        " and backward it also copies parameters, scatters, gathers and sums, while the others wait."
    )


def _compare_memory(arms: Sequence[Arm]) -> Iterator[str]:
    for arm in arms:
        excess = find_excess(arm)
        devices = [device.memory for device in list_devices(arm) if device.memory]
        if excess is None or len(devices) < 2 or excess.low is None or excess.low <= 0:
            continue
        others = devices[0].value - excess.value
        if others > 0 and excess.value > CLEAR_EXCESS * others:
            basis = " (tensors added up)" if arm.trial.is_emulated else ""
            yield (
                f"Under {arm.label} device 0 holds {format_quantity('bytes', excess)} more than the others, which hold"
                f" {format_quantity('bytes', others)}{basis}."
            )


def _capital(text: str) -> str:
    return text if text.startswith(("ddp", "dp", "fsdp")) else text[:1].upper() + text[1:]


BARS = "Thin lines are 95 % confidence intervals."


def plot_strategies(arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """A step of each, and what it holds in memory against its time."""
    shown = [arm for arm in arms if arm.configuration != CONTROL]
    charts = [plot_step_times(shown), _plot_memory(shown), plot_phases(shown)]
    return tuple(chart for chart in charts if chart is not None)


def plot_step_times(arms: Sequence[Arm], title: str = "Step time") -> Chart | None:
    """One bar for every configuration; what failed says so in its place."""
    measured = [arm for arm in arms if arm.is_measured]
    if not measured:
        return None
    failed = [{"bar": arm.label, "status": describe_status(arm)} for arm in arms if not arm.is_measured]
    return plot_bars(
        title=title,
        x=Axis(field="seconds", title="step time", quantity="seconds"),
        y=Axis(field="bar", title="", quantity="text"),
        rows=[{"bar": arm.label, "seconds": arm.step, "key": arm.label} for arm in measured],
        failed=failed,
        is_stacked=False,
        caption=join_words(BARS, *describe_failures((row["bar"], row["status"]) for row in failed)),
    )


def _plot_memory(arms: Sequence[Arm]) -> Chart | None:
    """Memory against time, a point for each: down and to the left is better in both."""
    every = [arm for arm in arms if arm.is_measured and arm.peak_memory_bytes is not None]
    known, num_left = every[:MOST_SERIES], len(every[MOST_SERIES:])
    if len(known) < 2:
        return None
    rows = [
        {"series": arm.label, "seconds": arm.step, "bytes": arm.peak_memory_bytes, "key": arm.label} for arm in known
    ]
    return plot_lines(
        title="Memory against time",
        x=Axis(field="seconds", title="step time", quantity="seconds"),
        y=Axis(field="bytes", title="peak memory of the fullest rank", quantity="bytes"),
        rows=rows,
        is_joined=False,
        caption=join_words(
            "Down and to the left is better in both. Memory is the highest of any rank in any round.",
            count_rest(num_left, "configuration", "in the table only") if num_left else "",
            *describe_failures((arm.label, describe_status(arm)) for arm in arms if not arm.is_measured),
        ),
    )
