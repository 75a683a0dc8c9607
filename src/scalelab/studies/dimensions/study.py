"""Dimensions: the same training with a longer sequence, a wider model, more data, one option at a time.

The job's own options are the base. Every dimension is an option of the workload, or several that must move together
(the width of the data and that of the model), and gets each of its values while the others stay at the base. Options
that cannot work together are launched all the same: how torch refuses them is the answer, and stands in the row as
`invalid` with torch's own words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.errors import UsageError
from scalelab.records.trial import Option, Status, Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.report.findings import as_findings
from scalelab.studies.dimensions.answer import fit_growth, make_growth_table
from scalelab.studies.dimensions.report import draw_grids, draw_growth, draw_rows, summarise_dimensions
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import (
    MaybeStrategy,
    SweepColumn,
    check_placement,
    choose_strategy,
    describe_measurement,
    describe_placement,
    find_sweep_cautions,
    make_sweep_table,
    memory_column,
    plan_sweep,
    ratio_column,
    samples_column,
    step_column,
)
from scalelab.studies.shared.variations import Variation, read_base, read_variations
from scalelab.studies.shared.work import operations_column, parameters_column, speed_column
from scalelab.workloads.catalogue import BUILT_IN, make_options

BASE = "base"


@dataclass(frozen=True, kw_only=True)
class Dimensions(Study):
    """Options of the workload are varied, one at a time or all combined, against the job as it is."""

    name: ClassVar[str] = "dimensions"
    title: ClassVar[str] = "Dimensions"
    question: ClassVar[str] = "How do time and memory grow with the dimensions of model and data?"

    vary: tuple[str, ...] = ("features+d_model=256,512", "tgt_length=20,50")
    """What to vary: option=value,value, or a+b=value,value for options that get the same value."""
    grid: bool = False
    """All combinations of the values instead of one dimension at a time."""
    ranks: int = 1
    """Ranks of every row."""
    strategy: MaybeStrategy = None
    """How the training is spread. None: single on one rank, ddp on more."""
    batch_per_rank: int = 32
    """Samples per step on each rank."""
    job: Job = field(default_factory=lambda: Job(workload="transformer"))
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0))

    def __post_init__(self) -> None:
        check_placement(self.ranks, self.batch_per_rank)
        if not self.vary:
            raise UsageError("--vary needs at least one option with values, for example --vary tgt_length=20,50")
        names = [name for variation in self.variations for name in variation.names]
        shared = next((name for name in names if names.count(name) > 1), None)
        if self.grid and shared:
            raise UsageError(
                f"--grid cannot combine two dimensions of {shared}: give all its values in one --vary item"
            )

    @property
    def variations(self) -> tuple[Variation, ...]:
        return read_variations("vary", self.vary, self.job.workload)

    def plan(self) -> list[Trial]:
        base = self._configure(BASE, BASE, self.job)
        return plan_sweep(self.job, self.sampling, [base, *self._list_rows()])

    def _list_rows(self) -> Iterator[Configuration]:
        """One row for every set of values but the base's own."""
        names: set[str] = set()
        for changes in self._list_changes():
            options = {name: value for variation, value in changes for name, value in variation.assign(value).items()}
            if options == read_base(options, self.job):
                continue
            label = ", ".join(f"{variation.label} = {value}" for variation, value in changes)
            name = "-".join(f"{'.'.join(variation.names)}-{_clean(value)}" for variation, value in changes)
            if name in names:
                raise UsageError(
                    f"--vary: two rows would be called {name}: use values that differ in letters or digits"
                )
            names.add(name)
            job = replace(self.job, options={**self.job.options, **options}, sees_failure=True)
            yield self._configure(name, label, job)

    def _list_changes(self) -> Iterator[tuple[tuple[Variation, Option], ...]]:
        pairs = [[(variation, value) for value in variation.values] for variation in self.variations]
        if self.grid:
            yield from itertools.product(*pairs)
        else:
            yield from ((pair,) for dimension in pairs for pair in dimension)

    def _configure(self, name: str, label: str, job: Job) -> Configuration:
        return Configuration(
            name=name,
            label=label,
            strategy=choose_strategy(self.strategy, self.ranks),
            num_ranks=self.ranks,
            global_batch=self.batch_per_rank * self.ranks,
            job=job,
        )

    def _is_foreseen(self, result: TrialResult) -> bool:
        """Whether options that are known not to work together were varied to see just that."""
        if result.status not in (Status.INVALID, Status.NOT_RUN) or result.trial.workload not in BUILT_IN:
            return False
        try:
            make_options(result.trial.workload, result.trial.options).check()
        except UsageError:
            return True
        return False

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        base = arms.get(BASE)
        growths = fit_growth(arms.values(), self.variations, self.job)
        columns: list[SweepColumn] = [
            step_column(),
            samples_column(),
            ratio_column(base, "× base"),
            memory_column(),
            parameters_column(),
            operations_column(),
            speed_column(),
        ]
        table = make_sweep_table(arms.values(), columns)
        charts = (*draw_rows(table, arms), *(draw_grids(arms, self.variations, self.job) if self.grid else ()))
        sections = [Section(tables=(table,), charts=charts)]
        if growths:
            drawn = draw_growth(arms, self.variations, self.job, growths)
            heading = "How the step grows"
            sections.append(Section(heading=heading, tables=(make_growth_table(growths),), charts=drawn))
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(
                self.job,
                self.sampling,
                arms.values(),
                describe_placement(self.strategy, self.ranks),
                f"batch {self.batch_per_rank} per rank",
                f"base {self._describe_base()}",
            ),
            sections=tuple(sections),
            findings=as_findings(summarise_dimensions(arms, base, growths)),
            cautions=find_sweep_cautions(self._leave_out_expected(arms), base),
        )

    def _leave_out_expected(self, arms: Mapping[str, Arm]) -> dict[str, Arm]:
        """A failure that was to be seen is a finding and no warning."""
        return {name: arm for name, arm in arms.items() if not all(self._is_foreseen(result) for result in arm.results)}

    def _describe_base(self) -> str:
        names = dict.fromkeys(name for variation in self.variations for name in variation.names)
        return ", ".join(f"{name} {value}" for name, value in read_base(names, self.job).items())


def _clean(value: Option) -> str:
    """A value as a part of a directory's name."""
    return re.sub(r"[^A-Za-z0-9._]+", "_", str(value))
