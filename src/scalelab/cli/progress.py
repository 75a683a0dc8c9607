"""Progress on stderr: a bar with the time left on a terminal, the same words as lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from scalelab.records.trial import Status
from scalelab.runs.scheduler import Event, TrialEnded, TrialStarted
from scalelab.units import format_duration, format_seconds


class ProgressReporter:
    """A listener for the scheduler's events. Use as a context manager: the bar must be taken down again."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._is_live = self._console.is_terminal and not os.environ.get("NO_COLOR")
        self._started = time.monotonic()
        self._num_measured = 0
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressReporter:
        if self._is_live:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.completed}/{task.total} trials · {task.fields[left]}"),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None, left="loading torch")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrialEnded) and not event.is_from_disk:
            self._num_measured += 1
        left = self._describe_left(event)
        if self._bar is not None:
            name = event.trial.name if isinstance(event, TrialStarted) else event.result.trial.name
            done = event.number - 1 if isinstance(event, TrialStarted) else event.number
            self._bar.update(self._task, description=name, total=event.num_trials, completed=done, left=left)
        if isinstance(event, TrialEnded):
            self._say_end(event, left)

    def say(self, words: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(words, markup=False)
        else:
            print(words, file=sys.stderr, flush=True)  # noqa: T201

    def _say_end(self, event: TrialEnded, left: str) -> None:
        """A line per trial without a terminal; with one, only for trials that failed."""
        result = event.result
        failed = result.status is not Status.COMPLETED
        if (self._bar is not None and not failed) or (result.status is Status.NOT_RUN and result.trial.round > 1):
            return
        words = f"[{event.number}/{event.num_trials}] {result.trial.name} {result.status.words}"
        if event.is_from_disk:
            words += " (measured before)"
        elif not failed:
            words += f" in {format_seconds(result.wall_seconds)} · {left}"
        else:
            words += f": {result.reason}"
        self.say(words)

    def _describe_left(self, event: Event) -> str:
        """The time left, from the mean of the trials measured so far."""
        done = event.number - 1 if isinstance(event, TrialStarted) else event.number
        if not self._num_measured:
            return "time left unknown"
        mean = (time.monotonic() - self._started) / self._num_measured
        return f"{format_duration(mean * (event.num_trials - done))} left"
