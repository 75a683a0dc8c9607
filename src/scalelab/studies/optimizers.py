"""Optimizers: the same training run, updated by one optimizer after the other.

Forward and backward do not depend on the optimizer, so what differs is the update: how many numbers it reads and
writes per parameter, and how many of them it keeps. Every optimizer keeps a known number of tensors as large as the
parameters, so its memory can be forecast before anything runs; both are shown.

The losses are for information and are not a ranking: a few steps at torch's default learning rates do not show which
optimizer trains better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.strategies import find_strategy
from scalelab.report.charts.column_charts import draw_columns, keep_charts
from scalelab.report.document import Chart, Section, Table
from scalelab.report.findings import DETAIL, MAIN, REASON, Finding, FindingKind
from scalelab.report.tables import Field, bytes_column, make_column, seconds_column
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import estimate_phase_share
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.losses import read_last_loss, read_losses
from scalelab.studies.shared.study import Configuration, Sampling
from scalelab.studies.shared.sweep import (
    Sweep,
    SweepStudy,
    judge_row,
    make_sweep_table,
    memory_column,
    relative_column,
    samples_column,
    step_column,
)
from scalelab.units import format_bytes, format_known, format_quantity

OptimizerName = Literal["sgd", "nesterov", "adagrad", "adadelta", "adam", "adamw"]

KEPT_TENSORS = {"sgd": 0, "nesterov": 1, "adagrad": 1, "adadelta": 2, "adam": 2, "adamw": 2}
"""Tensors as large as the parameters that each keeps: momentum; sum of squares; averages of squares, of updates, of
gradients. Step counters add a few bytes for each tensor of the model."""
KEPT_DTYPE_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 2}

UPDATE_SHARE = FindingKind("update-share", "Share of the step that the optimizer's update takes", REASON, ("share",))
STATE = FindingKind(
    "optimizer-state", "The optimizers that keep least and most between steps", DETAIL, ("least_bytes", "most_bytes")
)


@dataclass(frozen=True, kw_only=True)
class Optimizers(SweepStudy):
    """The first optimizer is the reference."""

    row_header: ClassVar[str] = "optimizer"

    optimizers: tuple[OptimizerName, ...] = ("sgd", "nesterov", "adagrad", "adadelta", "adam")
    """Optimizers to measure; the first is the reference."""
    batch_per_rank: int = 128
    """Samples per step on each rank."""
    job: Job = field(default_factory=lambda: Job(workload="resnet18"))
    sampling: Sampling = field(default_factory=lambda: Sampling(phase_steps=8, comm_free_steps=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        if not self.optimizers:
            raise UsageError("--optimizers needs at least one name, for example --optimizers sgd adam")
        if len(set(self.optimizers)) < len(self.optimizers):
            raise UsageError(f"--optimizers {' '.join(self.optimizers)} names one twice: give each once")
        wanted = self.job.optimization
        if wanted.optimizer is not None and wanted.momentum is None:
            raise UsageError(
                f"--optimizer {wanted.optimizer}: this study varies the optimizer: use --optimizers {wanted.optimizer}"
            )

    @property
    def reference_name(self) -> str:
        return self.optimizers[0]

    def list_rows(self) -> Iterator[Configuration]:
        return (self.configure(name, self.batch_per_rank, self._choose_optimizer(name)) for name in self.optimizers)

    def _choose_optimizer(self, name: OptimizerName) -> Job:
        """The job with one optimizer; momentum applies to those that have it."""
        wanted = self.job.optimization
        momentum = wanted.momentum if name in ("sgd", "nesterov") else None
        return replace(self.job, optimization=replace(wanted, optimizer=name, momentum=momentum))

    def list_settings(self) -> Iterable[str]:
        return self.job.dtype, f"batch {self.batch_per_rank} per rank"

    def list_columns(self, sweep: Sweep) -> Iterable[Field[Arm]]:
        yield step_column()
        yield relative_column(sweep.reference, f"× {self.reference_name}")
        yield seconds_column("optimizer_seconds", "update", lambda arm: arm.phase("optimizer"), unit_of="step_seconds")
        yield samples_column()

    def list_notes(self, sweep: Sweep) -> Iterable[str]:
        yield "update: optimizer.step() alone"

    def draw_charts(self, table: Table, sweep: Sweep) -> Iterable[Chart | None]:
        times = {"step_seconds": "whole step", "optimizer_seconds": "update"}
        yield draw_columns(table, times, title="Step and update by optimizer", axis_title="time")

    def list_sections(self, sweep: Sweep) -> Iterable[Section]:
        columns = [
            bytes_column("state_bytes", "state", read_state_bytes, note="on the rank that keeps most"),
            bytes_column("forecast_bytes", "forecast", forecast_state_bytes, note="from the parameters alone"),
            memory_column(),
            make_column(
                "loss",
                "last_loss",
                "last loss",
                lambda arm: read_last_loss(read_losses(arm)),
                note="for information, not a ranking",
            ),
        ]
        table = make_sweep_table(sweep.rows, columns, name_header=self.row_header)
        table = replace(table, notes=table.notes[1:])  # none of its numbers has an interval
        chart = draw_columns(
            table,
            {"state_bytes": "measured", "forecast_bytes": "forecast"},
            title="Optimizer state",
            axis_title="state on the rank that keeps most",
            caption="Counted, so without intervals; the forecast uses the parameters alone.",
        )
        yield Section(heading="Optimizer state", tables=(table,), charts=keep_charts(chart))

    def list_findings(self, sweep: Sweep) -> Iterator[Finding]:
        """The most expensive first, then the others, then what they keep."""
        reference = sweep.reference
        if reference is None or not reference.is_measured:
            return
        ratios = sweep.ratios
        others = [arm for arm in sweep.measured if arm is not reference]
        for number, arm in enumerate(sorted(others, key=lambda arm: -ratios[arm.label].value)):
            more = compare_updates(arm, reference)
            weight = DETAIL if number else MAIN
            yield judge_row(arm.label, ratios[arm.label], reference.label, more, weight)
        share = estimate_phase_share(reference, "optimizer")
        if share is not None:
            text = f"{reference.label} spends {format_quantity('share', share)} of its own step on the update."
            yield UPDATE_SHARE(reference.label, text, share=share)
        yield from compare_states(sweep.measured)


def read_state_bytes(arm: Arm) -> int | None:
    """What the optimizer keeps on the rank that keeps most."""
    found = [rank.optimizer_bytes for rank in arm.reports]
    return max((size for size in found if size is not None), default=None)


def forecast_state_bytes(arm: Arm) -> int | None:
    """Kept tensors × parameters × bytes of each; sharded strategies keep an equal piece on every rank."""
    trial, chosen = arm.trial, arm.trial.optimization
    parameters = next((rank.num_parameters for rank in arm.reports), None)
    if parameters is None or chosen.optimizer is None:
        return None
    kept = 1 if chosen.optimizer == "sgd" and chosen.momentum else KEPT_TENSORS[chosen.optimizer]
    size = 4 if trial.shape.autocast else KEPT_DTYPE_BYTES[trial.dtype]
    strategy = find_strategy(trial.strategy)
    num_shards = strategy.count_shards("optimizer", trial.mesh.fsdp if strategy.axes else trial.num_ranks)
    return math.ceil(kept * parameters * size / num_shards)


def compare_updates(arm: Arm, reference: Arm) -> str:
    ours, theirs = arm.phase("optimizer"), reference.phase("optimizer")
    if ours is None or theirs is None:
        return ""
    times = [format_known("seconds", update) for update in (ours, theirs)]
    return f" (update: {times[0]}, that of {reference.label}: {times[1]})"


def compare_states(measured: Iterable[Arm]) -> Iterator[Finding]:
    known = [(size, arm.label) for arm in measured if (size := read_state_bytes(arm)) is not None]
    if known:
        (least, lightest), (most, heaviest) = min(known), max(known)
        kept = "nothing" if least == 0 else format_bytes(least)
        text = f"{lightest} keeps {kept} between steps, {heaviest} {format_bytes(most)} per rank."
        yield STATE(heaviest, text, least_bytes=least, most_bytes=most)
