"""How step, operations and parameters grow with each dimension: their exponents, and a table of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scalelab.analysis.growth import PowerFit, find_exponent, fit_power
from scalelab.records.trial import Option
from scalelab.report.document import Column, Table, make_row
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sweep import CONTROL, INTERVAL_NOTE
from scalelab.studies.shared.variations import Variation, read_base
from scalelab.studies.shared.work import count_operations, count_parameters


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One dimension, with everything else at the base."""

    variation: Variation
    fit: PowerFit
    operations_exponent: float | None
    """Of the operations of a sample, by closed form over the same values; None where nobody can say."""
    parameters_exponent: float | None


def fit_growth(arms: Iterable[Arm], variations: Sequence[Variation], job: Job) -> list[Growth]:
    """The exponents of every dimension that was measured at two sizes or more."""
    measured = [arm for arm in arms if arm.is_measured and arm.configuration != CONTROL]
    found = []
    for variation in variations:
        others = [name for other in variations for name in other.names if name not in variation.names]
        series = select_series(measured, variation, others, job)
        fit = fit_power({size: arm.clean for size, arm in series.items()})
        if fit is not None:
            found.append(
                Growth(
                    variation=variation,
                    fit=fit,
                    operations_exponent=_fit_counts({size: count_operations(arm) for size, arm in series.items()}),
                    parameters_exponent=_fit_counts({size: count_parameters(arm) for size, arm in series.items()}),
                )
            )
    return found


def select_series(arms: Sequence[Arm], variation: Variation, others: Sequence[str], job: Job) -> dict[float, Arm]:
    """The rows that differ from the base in this dimension only, the base among them, by size."""
    base = read_base([*variation.names, *others], job)
    series: dict[float, Arm] = {}
    for arm in arms:
        options = {name: arm.trial.options.get(name, base[name]) for name in base}
        sizes = {options[name] for name in variation.names}
        size = read_size(sizes.pop()) if len(sizes) == 1 else None
        if size is not None and all(options[name] == base[name] for name in others):
            series[size] = arm
    return series


def read_size(value: Option | None) -> float | None:
    """A value as a size that something can grow with; None: a word, a truth, nothing, or not above 0."""
    if value is None or isinstance(value, bool | str) or value <= 0:
        return None
    return float(value)


def _fit_counts(counts: dict[float, int | float] | dict[float, float | None] | dict[float, int | None]) -> float | None:
    known = {size: count for size, count in sorted(counts.items()) if count}
    if len(known) > 1 and len(set(known.values())) == 1:
        return 0.0
    return find_exponent(list(known), [float(count) for count in known.values()]) if len(known) > 1 else None


def make_growth_table(growths: Sequence[Growth]) -> Table:
    columns = (
        Column(key="dimension", header="dimension", align="left"),
        Column(key="smallest", header="from", quantity="number"),
        Column(key="largest", header="to", quantity="number"),
        Column(key="step_exponent", header="step exponent", quantity="ratio"),
        Column(key="operations_exponent", header="operations exponent", quantity="ratio"),
        Column(key="parameters_exponent", header="parameters exponent", quantity="ratio"),
        Column(key="residual_ratio", header="residual", quantity="share"),
    )
    rows = tuple(
        make_row(
            growth.variation.label,
            growth.fit.smallest,
            growth.fit.largest,
            growth.fit.exponent,
            growth.operations_exponent,
            growth.parameters_exponent,
            growth.fit.residual_ratio,
        )
        for growth in growths
    )
    return Table(columns=columns, rows=rows, notes=(INTERVAL_NOTE,))
