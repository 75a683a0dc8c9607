"""How much work a row does: tokens, parameters, FLOPs and FLOP/s."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.records.observations import Instrument
from scalelab.records.trial import Trial
from scalelab.report.tables import Field, count_column, rate_column
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.workloads.catalogue import BUILT_IN, make_options
from scalelab.workloads.workload import WorkloadOptions


def read_options(trial: Trial) -> WorkloadOptions | None:
    """The options of a built-in workload; None for one of the user's own."""
    return make_options(trial.workload, trial.options) if trial.workload in BUILT_IN else None


def count_parameters(arm: Arm) -> int | None:
    """By closed form; of a workload of the user's own, what a rank counted."""
    options = read_options(arm.trial)
    if options is not None:
        return options.count_parameters()
    found: int | None = _read_said(arm, "num_parameters")
    return found


def _read_said(arm: Arm, name: str) -> Any:
    """What the ranks of an arm say of their workload; None if none does."""
    said = (getattr(rank, name) for result in arm.results for rank in result.ranks)
    return next((value for value in said if value is not None), None)


def count_operations(arm: Arm) -> float | None:
    """Floating-point operations of one sample's step; of a user's own workload, as it says or a rank counted."""
    options = read_options(arm.trial)
    found: float | None = _read_said(arm, "flops_per_sample")
    return found if options is None else options.flops_per_sample()


def count_if_own(job: Job) -> tuple[Instrument, ...]:
    """The instruments that count operations, where no closed form gives them."""
    return ("flops",) if job.built_in is None and job.script is None else ()


def measure_speed(arm: Arm) -> Estimate | None:
    """Operations per second of all ranks together."""
    operations = count_operations(arm)
    if operations is None or not arm.is_measured:
        return None
    work = operations * arm.step_samples
    return arm.step.map(lambda seconds: work / seconds)


def has_tokens(arm: Arm) -> bool:
    """Whether what a step processes is counted in tokens."""
    return bool(_read_tokens(arm))


def name_samples(job: Job, arms: Iterable[Arm]) -> str:
    """What throughput counts: tokens where samples have them."""
    return "tokens" if getattr(job.built_in, "num_tokens", None) or any(map(has_tokens, arms)) else "samples"


def count_tokens(arm: Arm) -> float:
    """What one step processes: tokens where samples have them, otherwise samples."""
    return arm.step_samples * (_read_tokens(arm) or 1)


def _read_tokens(arm: Arm) -> float | None:
    """Tokens of a sample; None: it has none."""
    found: float | None = getattr(read_options(arm.trial), "num_tokens", None)
    return found if found is not None else _read_said(arm, "tokens_per_sample")


def measure_rate(arm: Arm) -> Estimate:
    """Tokens or samples per second, by the median step."""
    return arm.step.map(lambda seconds: count_tokens(arm) / seconds)


def parameters_column(**options: Any) -> Field[Arm]:
    return count_column("num_parameters", "parameters", count_parameters, **options)


def operations_column(**options: Any) -> Field[Arm]:
    return rate_column("operations_per_sample", "FLOPs/sample", count_operations, **options)


def speed_column(**options: Any) -> Field[Arm]:
    return rate_column("operations_per_second", "FLOP/s", measure_speed, **({"shows_interval": False} | options))
