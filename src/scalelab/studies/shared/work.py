"""Columns that say how much work a row's model is: parameters, operations, and how fast they are done."""

from __future__ import annotations

from scalelab.analysis.estimate import Estimate
from scalelab.records.trial import Trial
from scalelab.report.document import Column
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.sweep import SweepColumn
from scalelab.workloads.catalogue import BUILT_IN, WorkloadOptions, make_options


def read_options(trial: Trial) -> WorkloadOptions | None:
    """The options of a built-in workload; None for one of the user's own."""
    return make_options(trial.workload, trial.options) if trial.workload in BUILT_IN else None


def count_parameters(arm: Arm) -> int | None:
    """By closed form; of a workload of the user's own, what a rank counted."""
    options = read_options(arm.trial)
    if options is not None:
        return options.count_parameters()
    counted = (rank.num_parameters for result in arm.results for rank in result.ranks)
    return next((number for number in counted if number is not None), None)


def count_operations(arm: Arm) -> float | None:
    """Floating-point operations of one sample's step; None for a workload of the user's own."""
    options = read_options(arm.trial)
    return None if options is None else options.flops_per_sample()


def measure_speed(arm: Arm) -> Estimate | None:
    """Operations per second of all ranks together."""
    operations = count_operations(arm)
    if operations is None or not arm.is_measured:
        return None
    work = operations * arm.trial.global_batch
    return arm.step.map(lambda seconds: work / seconds)


def parameters_column() -> SweepColumn:
    return SweepColumn(
        column=Column(key="num_parameters", header="parameters", quantity="count"), read=count_parameters
    )


def operations_column() -> SweepColumn:
    return SweepColumn(
        column=Column(key="operations_per_sample", header="operations/sample", quantity="rate"), read=count_operations
    )


def speed_column() -> SweepColumn:
    return SweepColumn(
        column=Column(key="operations_per_second", header="operations/s", quantity="rate", shows_interval=False),
        read=measure_speed,
    )
