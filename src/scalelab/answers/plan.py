"""The document of `scalelab plan`: a training that nobody has run, laid over devices that one may not have.

The tables and the chart of `scalelab plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.answers.prediction.report import plot_planned_memory, plot_planned_times, show
from scalelab.predict.footprint import CATEGORIES, FREE_SHARE, Footprint
from scalelab.predict.linear import Difference, SmallRun, compare_linear
from scalelab.predict.planning import FOUND_ON, Plan, PlannedLayout, Totals, find_last_paying, sum_training
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.scaling import plot_fan
from scalelab.report.document import Cell, Chart, Column, Document, Section, Table, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.units import format_bytes, format_quantity, format_share

INTERVAL_NOTE = "± is an 80 % interval of the prediction"
PART_WORDS = {
    "products": "matrix products",
    "moves": "norms, gelu, dropout, loss (memory)",
    "launches": "waiting for launches",
    "tensor": "tensor-parallel all-reduces",
    "bubble": "pipeline bubble",
    "stage_sends": "sends between stages",
    "data": "gradients and shards, not hidden",
    "optimizer": "optimizer",
}


def make_layout_table(plan: Plan, num_tokens: float) -> Table:
    columns = (
        Column(key="tensor", header="tensor", quantity="count"),
        Column(key="pipeline", header="pipeline", quantity="count"),
        Column(key="interleave", header="rounds", quantity="count"),
        Column(key="data", header="data", quantity="count"),
        Column(key="zero", header="ZeRO", quantity="count"),
        Column(key="micro_batch", header="micro", quantity="count"),
        Column(key="checkpointing", header="recomputed", align="left"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="mfu", header="MFU", quantity="share", shows_interval=False),
        Column(key="device_bytes", header="memory", quantity="bytes"),
        Column(key="days", header="days", quantity="number", shows_interval=False),
    )
    rows = tuple(make_layout_row(plan, planned, num_tokens) for planned in plan.ranked)
    notes = (
        INTERVAL_NOTE,
        f"{plan.num_fitting} layouts fit and {plan.num_too_large} do not; these are the fastest",
        f"memory: of one device, with {format_share(FREE_SHARE)} for its allocator, and its context",
    )
    return Table(columns=columns, rows=rows, notes=notes)


def make_layout_row(plan: Plan, planned: PlannedLayout, num_tokens: float) -> tuple[Cell, ...]:
    layout = planned.layout
    return (
        *make_row(
            layout.tensor, layout.pipeline, layout.interleave, layout.data, layout.zero, layout.micro_batch,
            {"none": "nothing", "selective": "some", "full": "blocks"}[layout.checkpointing],
        ),
        show(planned.step),
        show(planned.mfu),
        Cell(value=planned.footprint.device_bytes),
        show(sum_training(plan, num_tokens, planned).days),
    )  # fmt: skip


def make_parts_table(planned: PlannedLayout) -> Table:
    """Where the step of a layout goes."""
    columns = (
        Column(key="part", header="part", align="left"),
        Column(key="seconds", header="time", quantity="seconds"),
        Column(key="share", header="of the step", quantity="share"),
    )
    parts = {words: getattr(planned.cost, name) for name, words in PART_WORDS.items()}
    rows = [make_row(words, seconds, seconds / planned.cost.seconds) for words, seconds in parts.items() if seconds]
    rows.append(make_row("the step", planned.cost.seconds, 1.0))
    return Table(columns=columns, rows=tuple(rows))


def make_memory_table(footprint: Footprint) -> Table:
    columns = (
        Column(key="category", header="what", align="left"),
        Column(key="bytes", header="per device", quantity="bytes"),
        Column(key="share", header="of it", quantity="share"),
    )
    total = footprint.total_bytes
    found = footprint.by_category
    rows = [make_row(name, found[name], found[name] / total) for name in CATEGORIES if found[name]]
    rows.append(make_row("allocated", total, 1.0))
    moments = {
        "loss": "when backward begins", "first block": "in the first block of backward",
        "last block": "in the last block of backward", "optimizer": "in the optimizer",
    }  # fmt: skip
    return Table(columns=columns, rows=tuple(rows), notes=(f"the highest point is {moments[footprint.moment]}",))


def make_totals_table(totals: Totals) -> Table:
    columns = (
        Column(key="steps", header="steps", quantity="number"),
        Column(key="days", header="days", quantity="number"),
        Column(key="device_hours", header="device-hours", quantity="rate"),
        Column(key="watt_hours", header="Wh", quantity="rate"),
        Column(key="dollars", header="dollars", quantity="rate"),
    )
    energy = totals.kilowatt_hours
    row = (
        Cell(value=round(totals.num_steps)),
        show(totals.days),
        show(totals.device_hours),
        show(None if energy is None else energy.map(lambda number: number * 1000)),
        show(totals.dollars),
    )
    notes = (INTERVAL_NOTE, "energy: the devices at their limit, without hosts and cooling; cost: at the hourly price")
    return Table(columns=columns, rows=(row,), notes=notes)


def make_linear_table(totals: Totals, difference: Difference) -> Table:
    """The linear rule and the plan, and the factors between."""
    columns = (
        Column(key="what", header="", align="left"),
        Column(key="days", header="days", quantity="number"),
        Column(key="factor", header="divided by", quantity="number"),
    )
    days = difference.linear.days.value
    after_devices = days / difference.devices
    after_operations = after_devices / difference.operations
    rows = (
        make_row("linear rule, one device", days, None),
        make_row("as many devices as planned", after_devices, difference.devices),
        make_row("operations counted, not 6 a parameter", after_operations, difference.operations),
        make_row("operations/s of a device as planned", totals.days.value, difference.speed),
    )
    return Table(columns=columns, rows=rows, notes=("each row is the one above, divided by its factor",))


def make_obstacle_table(obstacles: Mapping[str, str]) -> Table:
    columns = (
        Column(key="layout", header="division", align="left"),
        Column(key="reason", header="why not", align="left"),
    )
    return Table(columns=columns, rows=tuple(make_row(name, reason) for name, reason in obstacles.items()))


def make_sweep_table(plans: Sequence[Plan], refused: Mapping[int, str], num_tokens: float) -> Table:
    columns = (
        Column(key="devices", header="devices", quantity="count"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="days", header="days", quantity="number"),
        Column(key="mfu", header="MFU", quantity="share", shows_interval=False),
        Column(key="device_hours", header="device-hours", quantity="rate", shows_interval=False),
        Column(key="gain", header="gain", quantity="ratio"),
        Column(key="layout", header="layout", align="left"),
    )
    rows = []
    for number, plan in enumerate(plans):
        best, totals = plan.best, sum_training(plan, num_tokens)
        before = plans[number - 1] if number else None
        gain = None if before is None else before.best.step.value / best.step.value
        layout = f"{best.layout.tensor}·{best.layout.pipeline}·{best.layout.data}·{best.layout.zero}"
        rows.append(
            (
                *make_row(plan.num_devices),
                show(best.step),
                show(totals.days),
                show(best.mfu),
                show(totals.device_hours),
                *make_row(gain, layout),
            )
        )
    rows += [make_row(size, *([None] * 5), "none fits") for size in refused]
    rows.sort(key=lambda row: float(row[0].value or 0))
    notes = (
        INTERVAL_NOTE,
        "gain: how many times shorter the step is than with the devices of the row above",
        "layout: tensor · pipeline · data · ZeRO",
    )
    return Table(columns=columns, rows=tuple(rows), notes=notes)


def make_sweep_chart(plans: Sequence[Plan], refused: Mapping[int, str], num_tokens: float) -> Chart:
    """Days against devices, both logarithmic, with the interval, and where more devices stop paying."""
    last = find_last_paying(plans)
    rows: list[dict[str, Any]] = []
    for plan in plans:
        days = sum_training(plan, num_tokens).days
        estimate = Estimate(value=days.value, low=days.low, high=days.high)
        rows.append({"series": "predicted", "ranks": plan.num_devices, "days": estimate})
    failed: list[dict[str, Any]] = [{"series": "predicted", "ranks": size, "status": "none fits"} for size in refused]
    paying = (
        f" Beyond {last} device{'s' if last > 1 else ''}, more of them stop paying."
        if last is not None and last < plans[-1].num_devices
        else ""
    )
    return plot_fan(
        title="Days by number of devices",
        y=Axis(field="days", title="days", quantity="number", is_log=True),
        rows=rows,
        failed=failed,
        x_title="devices",
        caption=f"The band is the 80 % interval of the prediction.{paying}",
    )


MANY_DAYS = 365
"""From here on a plan is one that nobody would carry out."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The same job on other numbers of devices."""

    plans: Sequence[Plan]
    refused: Mapping[int, str]


def describe_plan(plan: Plan, num_tokens: float, small: SmallRun, sweep: Sweep | None = None) -> Document:
    """Layouts, the fastest one in parts, the whole training, and the linear rule beside it."""
    totals = sum_training(plan, num_tokens)
    difference = compare_linear(plan, totals, small, num_tokens)
    job, best = plan.job, plan.best
    times, memory = draw_best(plan)
    sections = [
        Section(paragraphs=(describe_model(plan),), tables=(make_layout_table(plan, num_tokens),)),
        Section(heading="The whole training", tables=(make_totals_table(totals),)),
        Section(heading="Where the step of the fastest goes", tables=(make_parts_table(best),), charts=times),
        Section(heading="What a device holds in it", tables=(make_memory_table(best.footprint),), charts=memory),
        Section(
            heading="Beside the linear rule",
            paragraphs=(describe_small(small),),
            tables=(make_linear_table(totals, difference),),
        ),
    ]
    if sweep is not None and sweep.plans:
        table = make_sweep_table(sweep.plans, sweep.refused, num_tokens)
        chart = make_sweep_chart(sweep.plans, sweep.refused, num_tokens)
        sections.append(Section(heading="More and fewer devices", tables=(table,), charts=(chart,)))
    if plan.obstacles:
        sections.append(Section(heading="What cannot be", tables=(make_obstacle_table(plan.obstacles),)))
    return Document(
        title="Plan",
        question="How would this training be laid out, and how long would it take?",
        setting=f"{job.model.words} · {job.dtype} · {plan.num_devices} × {job.device.words} · batch {job.global_batch}",
        sections=tuple(sections),
        findings=as_findings(summarise(plan, totals, difference, sweep)),
        cautions=tuple(find_cautions(plan, totals)),
        environment=(("device", job.device.source),),
    )


def draw_best(plan: Plan) -> tuple[tuple[Chart, ...], tuple[Chart, ...]]:
    """Where the step and the memory of the fastest layout go."""
    best = plan.best
    times = plot_planned_times({words: getattr(best.cost, name) for name, words in PART_WORDS.items()})
    memory = plot_planned_memory(
        {name: best.footprint.by_category[name] for name in CATEGORIES}, plan.job.device.memory_bytes
    )
    return (times,) if times else (), (memory,) if memory else ()


def describe_model(plan: Plan) -> str:
    model = plan.job.model
    per_token = model.count_operations(1) / model.sequence
    return (
        f"The model has {format_quantity('number', model.num_parameters)} parameters. A token costs"
        f" {per_token:.3g} operations without recomputing, {per_token / model.num_parameters:.2f} per parameter:"
        " products forward and backward, attention and logits counted."
    )


def describe_small(small: SmallRun) -> str:
    return (
        f"The rule starts from {format_quantity('number', small.tokens_per_second)} tokens/s of a model of"
        f" {format_quantity('number', small.num_parameters)} parameters on one device, and assumes that nothing but the"
        " number of parameters matters."
    )


def summarise(plan: Plan, totals: Totals, difference: Difference, sweep: Sweep | None) -> Iterator[str]:
    """The fastest layout, the training, and why the linear rule says otherwise."""
    best, days = plan.best, totals.days
    yield (
        f"{format_quantity('number', days.value)} days ({format_quantity('number', days.low)} to"
        f" {format_quantity('number', days.high)}) on {plan.num_devices} × {plan.job.device.name}, as"
        f" {best.layout.words}, at an MFU of {format_share(best.mfu.value)}."
    )
    lost = {
        "the pipeline bubble": best.cost.bubble, "tensor-parallel all-reduces": best.cost.tensor,
        "gradients and shards": best.cost.data, "work between products": best.cost.moves,
    }  # fmt: skip
    most = max(lost, key=lambda name: lost[name])
    yield (
        f"Matrix products take {format_share(best.cost.products / best.cost.seconds)} of a step; the largest of the"
        f" rest is {most} with {format_share(lost[most] / best.cost.seconds)}."
    )
    linear = difference.linear
    yield (
        f"The linear rule says {format_quantity('number', linear.days.value)} days"
        f" ({format_quantity('number', linear.years.value)} years) on one device,"
        f" {format_quantity('number', difference.ratio)} times the plan's: the plan has {plan.num_devices} devices, and"
        f" each does {difference.speed:.2g} times the operations per second that the small model got; counting"
        f" attention and logits changes the work by {abs(1 / difference.operations - 1):.1%}."
    )
    if sweep is not None and sweep.plans:
        yield describe_sweep(sweep)


def describe_sweep(sweep: Sweep) -> str:
    last, largest = find_last_paying(sweep.plans), sweep.plans[-1].num_devices
    if last == largest:
        return f"Up to {largest} devices, more of them pay: each row brings more than half of what its devices promise."
    devices = "1 device" if last == 1 else f"{last} devices"
    return f"Beyond {devices} more stop paying: the next row brings less than half of what its devices promise."


def find_cautions(plan: Plan, totals: Totals) -> Iterator[Caution]:
    job = plan.job
    if job.device.name not in FOUND_ON and job.device.reach == 1:
        yield Caution(
            message=f"how much of its peak {job.device.name} reaches was taken from A100s: its interval is wider",
            next_step="measure a model on it with scalelab run throughput, and scale --device-peak by what it reaches",
        )
    margin = 1 - plan.best.footprint.device_bytes / job.device.memory_bytes
    if margin < 0.05:
        yield Caution(
            message=f"the fastest layout leaves {format_share(max(margin, 0.0))} of"
            f" {format_bytes(job.device.memory_bytes)} free",
            next_step="take the next that needs less, or confirm it with scalelab run max-batch on the device",
        )
    if totals.days.value > MANY_DAYS:
        yield Caution(
            message=f"{format_quantity('number', totals.days.value)} days is longer than devices stay in service, and"
            " failures, restarts and checkpoints are not counted",
            next_step="look at more devices with --sweep-devices, or train fewer tokens",
        )
