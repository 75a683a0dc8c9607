"""The tables and the chart of `scalelab plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.predict.footprint import CATEGORIES, FREE_SHARE, Footprint
from scalelab.predict.linear import Difference
from scalelab.predict.planning import Plan, PlannedLayout, Totals, find_last_paying, sum_training
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.prediction import plot_fan
from scalelab.report.document import Cell, Chart, Column, Table, make_row
from scalelab.studies.predicted import show
from scalelab.units import format_share

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
