"""Memory: what a training step takes on one rank, what for, and whether it fits a device.

Every configuration is examined twice. A forecast runs a step on fake tensors, so it works for models that do not fit
this machine; the strategy's share is added by rule. Then the step is run and every call of the allocator is recorded.
Both are split into the same categories at the peak of the step.

The same step takes the same bytes every time, so one launch of a few steps is enough and there are no intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scalelab.checks import check_at_least, parse_bytes, read_flag
from scalelab.errors import UsageError
from scalelab.records.environment import find_gpus, read_available_memory
from scalelab.records.observations import RankReport
from scalelab.records.settings import MaybeBytes, find_kind
from scalelab.records.strategies import SCRIPT, StrategyName, find_strategy
from scalelab.records.tasks import Forecast
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.studies.memory.answer import FORECAST, MemoryRow, collect_rows
from scalelab.studies.memory.report import (
    draw_categories,
    draw_fit,
    draw_peaks,
    find_memory_cautions,
    make_category_table,
    make_fit_table,
    make_peak_table,
    make_reading_table,
    summarise_memory,
)
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import (
    Configuration,
    Sampling,
    Study,
    check_fake,
    mark_fake,
    plan_forecast,
    plan_rounds,
    was_refused,
)
from scalelab.studies.strategies.study import check_strategies, fit_job, name_row
from scalelab.units import format_bytes, format_count


def make_short_sampling() -> Sampling:
    """Memory is the same in every launch and in every step but the first."""
    return Sampling(rounds=1, steps=4, phase_steps=0, comm_free_steps=0, control=False)


@dataclass(frozen=True, kw_only=True)
class Memory(Study):
    """Peak memory of one rank by category, forecast and measured."""

    forecasts_memory: ClassVar[bool] = True
    takes_script: ClassVar[bool] = True

    strategies: tuple[StrategyName, ...] = ("single", "ddp", "fsdp-full")
    """Strategies to compare; single runs on one rank."""
    ranks: int = 2
    """Ranks of every strategy but single."""
    batches: tuple[int, ...] = (4, 8)
    """Samples per step on each rank."""
    device_memory: MaybeBytes = None
    """Memory of a device to fit into, for example 40GB, judged by forecast. None: not judged."""
    fake: bool = False
    """Start no ranks: forecast on fake tensors only, so --ranks 1024 --device cuda works without GPUs."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=make_short_sampling)

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 1)
        check_strategies(self.strategies)
        for name in self.strategies:
            if find_strategy(name).memory is None:
                raise UsageError(
                    f"--strategies {name} has no memory rules (records/strategies.py): leave it out, or use scalelab"
                    " run strategies"
                )
        if not self.batches:
            raise UsageError("--batches needs at least one number, for example --batches 4 8")
        for batch in self.batches:
            check_at_least("batches", batch, 1)
        if len(set(self.batches)) < len(self.batches):
            raise UsageError(f"--batches {' '.join(map(str, self.batches))} names a batch twice: give each once")
        if self.device_bytes is not None:
            check_at_least("device_memory", self.device_bytes, 1)
        check_fake(self.fake, self.job)
        if self.fake and self.job.shape.compile:
            raise UsageError(
                "--fake forecasts the memory of eager operators, and the kernels that --compile would generate for"
                f" {self.job.device} keep less: drop one of the two"
            )

    @property
    def device_bytes(self) -> int | None:
        return None if self.device_memory is None else read_flag("device_memory", self.device_memory, parse_bytes)

    def plan(self) -> list[Trial]:
        """All forecasts, which are quick, then the measurements that this machine has devices for."""
        rows = self._list_rows()
        if self.job.script is not None:
            return plan_rounds(self.job, self.sampling, rows)  # fake tensors cannot run a script
        forecasts = self.plan_forecasts()
        if self.fake:
            return forecasts
        measured = [row for row in rows if row.num_ranks <= self._most_ranks] or rows
        return [*forecasts, *plan_rounds(self.job, self.sampling, measured)]

    def plan_forecasts(self) -> list[Trial]:
        return [plan_forecast(self.job, row, Forecast(), FORECAST) for row in self._list_rows()]

    @property
    def _most_ranks(self) -> int:
        return len(find_gpus()) if find_kind(self.job.found_device).is_listed else self.ranks

    def _list_rows(self) -> list[Configuration]:
        if self.job.script is not None:
            return self._list_script_rows()
        return [
            Configuration(
                name=f"{name_row(strategy, self.ranks)}-b{batch}",
                strategy=strategy,
                num_ranks=num_ranks,
                global_batch=num_ranks * batch,
                job=fit_job(self.job, strategy, self.strategies),
                label=f"{find_strategy(strategy).name_on(num_ranks)}, batch {batch}",
                instruments=("memory",),
            )
            for strategy in self.strategies
            for num_ranks in (find_strategy(strategy).count_ranks(self.ranks),)
            for batch in sorted(self.batches)
        ]

    def _list_script_rows(self) -> list[Configuration]:
        self.job.check_sets_batch(self.name)
        label = self.job.name_ranks("", self.ranks)
        return [
            Configuration(
                name=f"{SCRIPT.name}-{self.ranks}-b{batch}",
                strategy=SCRIPT.name,
                num_ranks=self.ranks,
                global_batch=self.ranks * batch,
                label=f"{label}, batch {batch}",
                instruments=("memory",),
            )
            for batch in sorted(self.batches)
        ]

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        """A machine that runs out of memory may kill more than the trial."""
        if trial.is_forecast or trial.device != "cpu":
            return None
        found = [result for result in results if result.trial.configuration == f"{FORECAST}{trial.configuration}"]
        forecast = collect_rows(found)[0].forecast if found else None
        available = read_available_memory()
        if forecast is None or forecast.peak_bytes * trial.num_processes <= available:
            return None
        each = f"{trial.num_processes} ranks of " if trial.num_processes > 1 else ""
        needed = f"{each}{format_bytes(forecast.peak_bytes)} by forecast"
        return f"it does not fit into this machine: {needed}, {format_bytes(available)} is free"

    def expects(self, result: TrialResult) -> bool:
        """A row that this machine cannot hold, or that fake tensors cannot forecast, is part of the answer."""
        if result.trial.is_forecast:
            return result.status is Status.INVALID
        return was_refused(result)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        rows = collect_rows(results)
        peaks = make_peak_table(rows)
        sections = [Section(tables=(peaks,), charts=draw_peaks(peaks))]
        categories = make_category_table(rows)
        if categories.rows:
            charts = draw_categories(categories)
            sections.append(Section(heading="Categories at the peak", tables=(categories,), charts=charts))
            sections.append(Section(heading="Other readings", tables=(make_reading_table(rows),)))
        if self.device_bytes is not None and rows:
            heading = f"Does it fit into {format_bytes(self.device_bytes)}?"
            table = make_fit_table(rows, self.device_bytes)
            sections.append(Section(heading=heading, tables=(table,), charts=draw_fit(table, self.device_bytes)))
        document = Document(
            title=self.title,
            question=self.question,
            setting=self._describe(rows),
            sections=tuple(sections),
            findings=tuple(summarise_memory(rows, self.device_bytes)),
            cautions=tuple(find_memory_cautions(rows, self.device_bytes, self._name_unplanned(rows))),
        )
        return mark_fake(document, self.job, format_count(self.ranks, "rank")) if self.fake else document

    def _describe(self, rows: Sequence[MemoryRow]) -> str:
        counts = [rank.num_parameters for row in rows for rank in _list_ranks(row) if rank.num_parameters]
        parameters = f"{max(counts):,} parameters".replace(",", "\u202f") if counts else "parameters unknown"
        precision = f"{self.job.dtype}{' (autocast)' if self.job.shape.autocast else ''}"
        words = () if self.job.script is not None else (precision,)
        return " · ".join([self.job.label, parameters, *words, format_count(self.ranks, "rank")])

    def _name_unplanned(self, rows: Sequence[MemoryRow]) -> list[str]:
        """Configurations that only a machine with more devices could measure."""
        if self.fake or not find_kind(self.job.found_device).is_listed:
            return []
        return [row.label for row in rows if row.measured_result is None and row.trial.num_ranks > self._most_ranks]


def _list_ranks(row: MemoryRow) -> list[RankReport]:
    results = [result for result in (row.forecast_result, row.measured_result) if result is not None]
    return [rank for result in results for rank in result.ranks]
