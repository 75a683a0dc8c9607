"""A fake launcher whose ranks have memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import MemoryReport, RankReport
from scalelab.records.trial import Status, Trial, TrialResult


class MemoryLauncher(FakeLauncher):
    """Plays ranks that need `bytes_of(trial, rank)` and run out of memory beyond the trial's limit.

    `forecast_of(trial)` is what a forecast says; without it none can be made.
    """

    def __init__(
        self,
        bytes_of: Callable[[Trial, int], float],
        *,
        step_seconds: Callable[[Trial], float] = lambda _: 0.1,
        failures: Mapping[str, Status] | None = None,
        noise: float = 0.0,
        forecast_of: Callable[[Trial], float] | None = None,
    ) -> None:
        super().__init__(step_seconds, failures=failures, noise=noise)
        self._bytes_of = bytes_of
        self._forecast_of = forecast_of
        self.forecast_parts: Mapping[str, int] = {}

    @property
    def probed(self) -> list[str]:
        """The names of the trials that were no forecasts."""
        return [name for name in self.launched if not name.startswith("forecast")]

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        if trial.is_forecast:
            self.launched.append(trial.name)
            return self._play_forecast(trial)
        result = super().launch(trial, directory)
        if result.status is not Status.COMPLETED:
            return result
        limit = trial.memory_limit_bytes
        taken = [round(self._bytes_of(trial, rank)) for rank in range(trial.num_processes)]
        if limit is not None and max(taken) > limit:
            reason = f"rank {taken.index(max(taken))} ran out of memory"
            return TrialResult(trial=trial, status=Status.OUT_OF_MEMORY, reason=reason)
        ranks = tuple(
            RankReport(rank=rank, peak_memory_bytes=size, limited_bytes=size, limit_bytes=limit)
            for rank, size in enumerate(taken)
        )
        return replace(result, ranks=ranks)

    def _play_forecast(self, trial: Trial) -> TrialResult:
        if self._forecast_of is None or trial.configuration in self._failures:
            return TrialResult(trial=trial, status=Status.INVALID, reason="the memory cannot be forecast")
        memory = MemoryReport(peak_bytes=round(self._forecast_of(trial)), by_category=self.forecast_parts)
        return TrialResult(trial=trial, status=Status.COMPLETED, ranks=(RankReport(rank=0, memory=memory),))
