"""The answer of strategies: which is fastest, who varies, who idles and when, who holds more, and do they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.quality import estimate_quantile, estimate_variation
from scalelab.analysis.stats import Verdict, compare_together, estimate_ratio, judge
from scalelab.records.settings import find_kind
from scalelab.records.strategies import find_strategy
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.column_charts import draw_columns, keep_charts
from scalelab.report.charts.plot import MOST_SERIES, plot_lines
from scalelab.report.document import Chart, Table, make_cell
from scalelab.report.findings import DETAIL, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import (
    INTERVAL_NOTE,
    Field,
    bytes_column,
    make_column,
    make_table,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm, count_rest, describe_failures, describe_status, join_words
from scalelab.studies.shared.breakdown import plot_phases
from scalelab.studies.shared.communication import (
    compare_methods,
    describe_traced,
    estimate_counted,
    estimate_traced_exposed,
    measure_ablation,
)
from scalelab.studies.shared.losses import LOSSES_EQUAL
from scalelab.studies.shared.sweep import (
    CONTROL,
    FASTEST,
    judge_row,
    make_sweep_table,
    memory_column,
    relative_column,
    samples_column,
    step_column,
)
from scalelab.studies.strategies.answer import (
    IDLE,
    NUM_SLICES,
    OTHERS,
    DeviceSummary,
    describe_utilization,
    find_excess,
    find_loss_difference,
    is_same_training,
    list_devices,
    list_launches,
    read_loss_path,
)
from scalelab.units import format_interval, format_known, format_quantity, format_share, format_times

TENSORS = "§"
"""The mark of memory that is a sum of tensors."""
CLEAR_EXCESS = 0.05
"""Device 0 is named if it holds this share more than the others."""
UNEVEN = 0.1
"""Devices whose busy shares differ by more idle at different times."""
MOST_OTHERS = 0.05
"""A share of the cores' time above which other programs are named."""

VARIATION = FindingKind(
    "variation", "Variation of step times (standard deviation over mean)", DETAIL, ("share",), free=("share",)
)
UTILIZATION = FindingKind("utilization", "How busy the devices of a strategy are", DETAIL, ("least", "most"))
EXCESS = FindingKind(
    "device-0-memory",
    "How much more memory device 0 holds than the others",
    REASON,
    ("excess_bytes",),
    free=("excess_bytes",),
)

NOT_OBSERVED = CautionKind("no-utilization", "How busy devices were could not be observed", "note")
OTHER_PROGRAMS = CautionKind("other-programs", "Other programs used the cores of the ranks", "noise", ("share",))


def make_main_table(arms: Sequence[Arm], reference: Arm | None) -> Table:
    """Time, how it varies, and memory, for every strategy."""
    columns: list[Field[Arm]] = [
        step_column(),
        seconds_column("step_seconds_p95", "p95", lambda arm: estimate_quantile(arm.clean, 0.95), is_detail=True),
        share_column("variation", "variation", lambda arm: estimate_variation(arm.clean)),
        samples_column(),
        relative_column(reference),
        memory_column(),
        bytes_column(
            "device_0_excess_bytes",
            "device 0 excess",
            lambda arm: make_cell(find_excess(arm), mark=_mark_memory(arm)),
            is_detail=True,
        ),
    ]
    return make_sweep_table(arms, columns, notes=_explain_memory(arms))


def _list_rows(arms: Sequence[Arm]) -> list[tuple[Arm, DeviceSummary]]:
    return [(arm, device) for arm in arms for device in list_devices(arm)]


def make_device_table(arms: Sequence[Arm]) -> Table:
    """How busy every device was, and what it held."""

    def busy_column(key: str, header: str, name: str) -> Field[tuple[Arm, DeviceSummary]]:
        return share_column(
            key, header, lambda row: getattr(row[1].utilization, name) if row[1].utilization is not None else None
        )

    return make_table(
        _list_rows(arms),
        text_column("device", "device", lambda row: f"{row[0].label}, {row[1].name}"),
        busy_column("busy", "busy", "busy"),
        busy_column("busy_p5", "p5", "low"),
        busy_column("busy_p95", "p95", "high"),
        busy_column("idle", "idle", "idle"),
        bytes_column(
            "memory_bytes",
            "memory",
            lambda row: make_cell(row[1].memory, mark=_mark_memory(row[0]) if row[1].memory else ""),
        ),
        notes=(
            INTERVAL_NOTE,
            f"idle: intervals (50 ms, or a pass of dp) in which the device was busy less than {format_share(IDLE)}",
            *_explain_memory(arms),
        ),
    )


def make_time_table(arms: Sequence[Arm]) -> Table:
    """The busy share of every device in each tenth of the time of clean steps."""

    def slice_column(number: int) -> Field[tuple[Arm, DeviceSummary]]:
        return share_column(
            f"busy_{number + 1}",
            f"{number + 1}",
            lambda row: row[1].utilization.slices[number] if row[1].utilization is not None else None,
        )

    return make_table(
        _list_rows(arms),
        text_column("device", "device", lambda row: f"{row[0].label}, {row[1].name}"),
        *map(slice_column, range(NUM_SLICES)),
        notes=("busy share in each tenth of the time from the first to the last clean step that counts",),
    )


def make_communication_table(arms: Sequence[Arm]) -> Table | None:
    """Exposed communication by every method that a strategy has; None if none has any."""
    ways = [(arm, measure_ablation(arm), estimate_counted(arm), estimate_traced_exposed(arm)) for arm in arms]
    known = [row for row in ways if any(row[1:])]
    if not known:
        return None
    return make_table(
        known,
        text_column("run", "run", lambda row: row[0].label),
        seconds_column("ablation_seconds", "comm by ablation", lambda row: row[1]),
        seconds_column("counted_seconds", "comm by DDP counters", lambda row: row[2]),
        seconds_column("traced_exposed_seconds", "comm by trace", lambda row: row[3]),
        title="Exposed communication by method",
        notes=(INTERVAL_NOTE,),
    )


def make_loss_table(arms: Sequence[Arm], reference: Arm | None) -> Table:
    """First and last loss of every strategy, and how far any step is from the reference's."""
    base = read_loss_path(reference) if reference is not None and reference.is_measured else None

    def find_difference(arm: Arm) -> float | None:
        return read_loss_path(arm).find_difference(base) if base is not None and arm is not reference else None

    return make_table(
        arms,
        text_column("run", "run", lambda arm: arm.label),
        make_column("loss", "first_loss", "first loss", lambda arm: next(iter(read_loss_path(arm).losses), None)),
        make_column("loss", "last_loss", "last loss", lambda arm: next(reversed(read_loss_path(arm).losses), None)),
        share_column("largest_difference", "largest difference", find_difference),
        notes=("differences are relative to the losses of the first row",),
    )


def _mark_memory(arm: Arm) -> str:
    return TENSORS if arm.trial.is_emulated else ""


def _explain_memory(arms: Sequence[Arm]) -> tuple[str, ...]:
    if not any(arm.trial.is_emulated and arm.is_measured for arm in arms):
        return ()
    return (f"{TENSORS} replicas share one process: the sum of their tensors, not a peak",)


def summarise_strategies(arms: Sequence[Arm], reference: Arm | None) -> Iterator[Finding]:
    """The findings, the main one first; nothing if nothing was measured."""
    has_reference = reference is not None and reference.is_measured
    yield from _name_fastest(arms)
    if reference is not None and has_reference:
        others = {arm.label: (arm.clean, reference.clean) for arm in arms if arm is not reference}
        for label, ratio in compare_together(others).items():
            yield judge_row(label, ratio, reference.label, weight=REASON)
        yield from _describe_losses(arms, reference)
    for arm in arms:
        yield from _describe_idling(arm)
        yield from _describe_excess(arm)
    yield from _compare_variation(arms)
    for arm in arms:
        yield from describe_traced(arm)
        ways = {"ablation": measure_ablation(arm), "counters": estimate_counted(arm)}
        if any(ways.values()):
            yield from compare_methods(arm, ways | {"trace": estimate_traced_exposed(arm)})


def _name_fastest(arms: Sequence[Arm]) -> Iterator[Finding]:
    ranked = sorted(arms, key=lambda arm: arm.step.value)
    if len(ranked) < 2:
        return
    first, second = ranked[:2]
    ratio = estimate_ratio(second.clean, first.clean)
    verdict, step = judge(ratio), format_known("seconds", first.step)
    if verdict is Verdict.SLOWER:
        text = f"{first.label} is the fastest, {step} per step; the next, {second.label}, takes"
        text = f"{text} {format_times(ratio)} as long."
    else:
        text = f"{first.label}, {step} per step, and {second.label} are the fastest and cannot be distinguished: ratio"
        text = f"{text} {format_interval('ratio', ratio)}."
    yield FASTEST(first.label, text, ratio=ratio, verdict=str(verdict))


def _compare_variation(arms: Sequence[Arm]) -> Iterator[Finding]:
    """The steadiest and the least steady, and whether their intervals leave no doubt."""
    found = [(estimate_variation(arm.clean), arm) for arm in arms]
    known = sorted(((v, arm) for v, arm in found if v is not None), key=lambda entry: entry[0].value)
    if len(known) < 2:
        return
    (low, _), (high, unsteady) = known[0], known[-1]
    is_clear = low.high is not None and high.low is not None and high.low > low.high
    each = ", ".join(f"{format_known('share', share)} under {arm.label}" for share, arm in reversed(known))
    said = f"{each} (standard deviation over mean)"
    text = f"Step times vary most under {unsteady.label}: {said}."
    if not is_clear:
        text = f"No strategy's step times clearly vary more than another's: {said}."
    yield VARIATION(unsteady.label if is_clear else "", text, share=high)


def _describe_idling(arm: Arm) -> Iterator[Finding]:
    """Who idles, by how much, and in dp also when."""
    known = [(device.name, device.utilization.busy) for device in list_devices(arm) if device.utilization]
    if len(known) < 2 or len(known) < arm.trial.num_ranks:
        return
    shares = ", ".join(f"{name} {format_known('share', busy)}" for name, busy in known)
    least, most = min(busy.value for _, busy in known), max(busy.value for _, busy in known)
    is_one_process = find_strategy(arm.trial.strategy).has_replicas
    text = f"Busy under {arm.label}: {shares}.{_explain_replicas(arm) if is_one_process else ''}"
    weight = REASON if most - least > UNEVEN else DETAIL
    yield UTILIZATION(arm.label, text, weight=weight, least=least, most=most)


def _explain_replicas(arm: Arm) -> str:
    """Taking the batch and updating are done once, on device 0, while the others have nothing to do."""
    phases = {name: arm.phase(name) for name in ("input", "forward", "backward", "optimizer")}
    values = {name: phase.value for name, phase in phases.items() if phase is not None}
    if len(values) < len(phases) or not sum(values.values()):
        return ""
    alone = (values["input"] + values["optimizer"]) / sum(values.values())
    return (
        f" Device 0 alone takes the batch and updates the parameters, {format_share(alone)} of the step; in forward and"
        " backward it also copies parameters, scatters, gathers and sums while the others wait."
    )


def _describe_excess(arm: Arm) -> Iterator[Finding]:
    excess = find_excess(arm)
    devices: list[Estimate] = [device.memory for device in list_devices(arm) if device.memory]
    if excess is None or len(devices) < 2 or not excess.is_above(0):
        return
    others = devices[0].value - excess.value
    if others > 0 and excess.value > CLEAR_EXCESS * others:
        basis = " (sum of tensors)" if arm.trial.is_emulated else ""
        yield EXCESS(
            arm.label,
            f"Under {arm.label} device 0 holds {format_quantity('bytes', excess)} more than the others, which hold"
            f" {format_quantity('bytes', others)}{basis}.",
            excess_bytes=excess,
        )


def _describe_losses(arms: Sequence[Arm], reference: Arm) -> Iterator[Finding]:
    """Whether all strategies trained the same thing."""
    found = find_loss_difference(arms, reference)
    if found is None:
        return
    largest, label = found
    is_same = is_same_training(largest, reference.trial.dtype)
    size = f"at most {largest:.1e} of the loss ({label})"
    if largest == 0:
        text = f"All strategies have exactly the losses of the {reference.label}."
    elif is_same:
        text = f"All strategies train the same: losses differ by {size}, as expected from another order of summation."
    else:
        text = (
            f"The strategies do not train the same: losses differ by up to {format_share(largest)} ({label}). Dropout"
            " draws different masks on every rank, and batch norm sees only a rank's own samples; without either, check"
            " whether ranks split the batch."
        )
    weight = DETAIL if is_same else REASON
    yield LOSSES_EQUAL("" if is_same else label, text, weight=weight, is_equal=is_same, difference=largest)


def warn_of_devices(arms: Sequence[Arm]) -> Iterator[Caution]:
    """Where utilization is unknown, or not that of the training alone."""
    unknown = [arm for arm in arms if all(device.utilization is None for device in list_devices(arm))]
    blind = [arm for arm in unknown if not any(result.loads for result in arm.completed)]
    short = ", ".join(arm.label for arm in unknown if arm not in blind)
    if blind:
        on_gpu = any(find_kind(arm.trial.device).is_listed for arm in blind)
        labels = ", ".join(arm.label for arm in blind)
        yield NOT_OBSERVED(
            labels,
            f"device utilization was not observed for {labels}",
            "pip install 'scalelab[gpu]'" if on_gpu else "use --launcher local",
        )
    if short:
        yield NOT_OBSERVED(
            short,
            f"the launches of {short} are too short to measure device utilization",
            "use more --steps: devices are sampled 20 times a second",
        )
    found = [(describe_utilization(list_launches(arm, OTHERS)), arm.label) for arm in arms]
    shares = {label: seen.busy.value for seen, label in found if seen is not None and seen.busy.value > MOST_OTHERS}
    if shares:
        named = ", ".join(f"{format_share(share)} under {label}" for label, share in shares.items())
        yield OTHER_PROGRAMS(
            ", ".join(shares),
            f"other programs used the cores of the ranks: {named}",
            "close them: ranks that wait for a core appear idle",
            share=max(shares.values()),
        )


def plot_strategies(table: Table, arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """A step of each, what it holds in memory against its time, and its phases."""
    shown = [arm for arm in arms if arm.configuration != CONTROL]
    return keep_charts(
        draw_columns(table, ["step_seconds"], title="Step time", axis_title="step time"),
        _plot_memory(shown),
        plot_phases(shown),
    )


def _plot_memory(arms: Sequence[Arm]) -> Chart | None:
    """Memory against time, a point for each."""
    every = [arm for arm in arms if arm.is_measured and arm.peak_memory_bytes is not None]
    known, num_left = every[:MOST_SERIES], len(every[MOST_SERIES:])
    if len(known) < 2:
        return None
    return plot_lines(
        title="Memory against time",
        x=Axis(field="seconds", title="step time", quantity="seconds"),
        y=Axis(field="bytes", title="peak memory of the fullest rank", quantity="bytes"),
        rows=[
            {"series": arm.label, "seconds": arm.step, "bytes": arm.peak_memory_bytes, "key": arm.label}
            for arm in known
        ],
        is_joined=False,
        caption=join_words(
            "Down and to the left is better. Memory is the highest of any rank in any round.",
            count_rest(num_left, "configuration", "in the table only") if num_left else "",
            *describe_failures((arm.label, describe_status(arm)) for arm in arms if not arm.is_measured),
        ),
    )
