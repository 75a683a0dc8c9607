"""What is known of the memory of each configuration: its forecast and its measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scalelab.analysis.memory import estimate_states
from scalelab.records.observations import MemoryReport, RankReport
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.studies.shared.arms import name_configuration

FORECAST = "forecast-"
"""Prefix of the configurations whose memory is only forecast."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One strategy with one batch."""

    trial: Trial
    forecast_result: TrialResult | None = None
    measured_result: TrialResult | None = None

    @property
    def label(self) -> str:
        return name_configuration(self.trial)

    @property
    def batch(self) -> int:
        return self.trial.batch_per_rank

    @property
    def forecast(self) -> MemoryReport | None:
        return _find_highest(self.forecast_result)[0]

    @property
    def forecast_bytes(self) -> int | None:
        return self.forecast.peak_bytes if self.forecast else None

    @property
    def measured(self) -> MemoryReport | None:
        """Of the rank that took the most."""
        return _find_highest(self.measured_result)[0]

    @property
    def report(self) -> MemoryReport | None:
        """The measurement, or the forecast where there is none."""
        return self.measured or self.forecast

    @property
    def rank(self) -> RankReport | None:
        """The rank that took the most."""
        return _find_highest(self.measured_result)[1]

    @property
    def error(self) -> float | None:
        """How far the forecast is off, relative to the measurement."""
        if self.forecast is None or self.measured is None:
            return None
        return self.forecast.peak_bytes / self.measured.peak_bytes - 1

    @property
    def states_bytes(self) -> int | None:
        """Parameters, gradients and optimizer states: often taken for the whole."""
        if self.report is None:
            return None
        sizes = self.report.by_category
        return estimate_states(sizes.get("parameters", 0), sizes.get("optimizer", 0))

    @property
    def process_bytes(self) -> int | None:
        """The highest resident memory of any rank."""
        ranks = self.measured_result.ranks if self.measured_result else ()
        return max((rank.peak_memory_bytes for rank in ranks if rank.peak_memory_bytes is not None), default=None)

    @property
    def status(self) -> str:
        """What the row shows instead of a measured peak."""
        if self.measured_result is None:
            return "not measured"
        status = self.measured_result.status
        return "–" if status is Status.COMPLETED else status.words


def _find_highest(result: TrialResult | None) -> tuple[MemoryReport | None, RankReport | None]:
    if result is None or result.status is not Status.COMPLETED:
        return None, None
    found = [(rank.memory, rank) for rank in result.ranks if rank.memory is not None]
    return max(found, key=lambda pair: pair[0].peak_bytes, default=(None, None))


def collect_rows(results: Sequence[TrialResult]) -> list[MemoryRow]:
    """One row per configuration, in the order of the plan; memory is looked at in the first round only."""
    forecasts: dict[str, TrialResult] = {}
    measured: dict[str, TrialResult] = {}
    for result in results:
        name = result.trial.configuration
        if name.startswith(FORECAST):
            forecasts[name.removeprefix(FORECAST)] = result
        elif result.trial.round == 1:
            measured[name] = result
    return [
        MemoryRow(
            trial=(measured.get(name) or forecasts[name]).trial,
            forecast_result=forecasts.get(name),
            measured_result=measured.get(name),
        )
        for name in {**forecasts, **measured}
    ]


def find_failures(rows: Iterable[MemoryRow]) -> list[TrialResult]:
    """What did not complete; the same failure of forecast and measurement is named once."""
    found: list[TrialResult] = []
    for row in rows:
        failed = [
            result
            for result in (row.measured_result, row.forecast_result)
            if result is not None and result.status is not Status.COMPLETED
        ]
        reasons = {result.reason for result in failed}
        found += failed if len(reasons) == len(failed) else failed[:1]
    return found
