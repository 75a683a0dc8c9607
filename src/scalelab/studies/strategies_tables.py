"""The tables of the comparison of strategies."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.analysis.spread import estimate_quantile, estimate_variation
from scalelab.analysis.utilization import IDLE, NUM_SLICES
from scalelab.report.document import Column, Table, make_cell, make_row
from scalelab.studies.arms import Arm
from scalelab.studies.communication import estimate_counted, measure_ablation
from scalelab.studies.profiled import estimate_traced_exposed
from scalelab.studies.strategies_devices import find_excess, list_devices
from scalelab.studies.sweep import (
    INTERVAL_NOTE,
    SweepColumn,
    make_sweep_table,
    memory_column,
    ratio_column,
    samples_column,
    step_column,
)
from scalelab.units import format_share

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
