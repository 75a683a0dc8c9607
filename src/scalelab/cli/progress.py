"""Progress on stderr: of a study, a bar with the time left on a terminal and lines elsewhere; of a training run, its
lines as rank 0 writes them: step, epoch, loss, accuracy, learning rate, time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from scalelab.errors import DamagedRun
from scalelab.launch.agreement import curve_file, start_file
from scalelab.records.files import read_json
from scalelab.records.observations import CurvePoint
from scalelab.records.trial import Status, from_builtins
from scalelab.runs.experiment import Event, TrialEnded, TrialStarted
from scalelab.units import format_duration, format_learning_rate, format_loss, format_quantity, format_seconds


class ProgressReporter:
    """A listener for the scheduler's events. A context manager, because the bar must be removed."""

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
            self._task = self._bar.add_task("starting", total=None, left="importing torch")
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
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(words, markup=False)
        else:
            print(words, file=sys.stderr, flush=True)  # noqa: T201

    def _say_end(self, event: TrialEnded, left: str) -> None:
        """Print a line per trial; on a terminal, only for trials that failed."""
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
        """Time left, from the mean of the trials so far."""
        done = event.number - 1 if isinstance(event, TrialStarted) else event.number
        if not self._num_measured:
            return "time left unknown"
        mean = (time.monotonic() - self._started) / self._num_measured
        return f"{format_duration(mean * (event.num_trials - done))} left"


POLL_SECONDS = 0.2


class LineReporter:
    """Follows `curve.jsonl` while the training runs. A context manager, because its thread must end.

    Rank 0 first drops the lines after the checkpoint that it resumes from and then writes `start.json`: lines are read
    only from then on. The file is removed when the training has completed; lines not printed by then are in the result.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: tuple[int, int] | None = None
        """Position of the last printed line; None until the training has started."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> LineReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrialStarted):
            start_file(self._directory).unlink(missing_ok=True)
            self._thread.start()
        elif not event.is_from_disk:
            self._stop()
            if self._last is None:
                self._see_start()
            self._print_new(tuple(sorted((*event.result.curve, *event.result.epochs), key=find_place)))
            if event.result.status is not Status.COMPLETED:
                _say(f"{event.result.status.words}: {event.result.reason}")

    def say(self, words: str) -> None:
        """Print a line among those of the training."""
        _say(words)

    def _stop(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _follow(self) -> None:
        position = 0
        while not self._is_over.wait(POLL_SECONDS):
            if self._last is None and not self._see_start():
                continue
            try:
                with curve_file(self._directory).open("rb") as file:
                    file.seek(position)
                    whole = file.read().rpartition(b"\n")[0]
            except OSError:
                continue
            position += len(whole) + 1 if whole else 0
            self._print_new(tuple(from_builtins(json.loads(line), CurvePoint) for line in whole.splitlines()))

    def _see_start(self) -> bool:
        """Say where the training resumes, once rank 0 knows."""
        try:
            start = read_json(start_file(self._directory))
        except DamagedRun:
            return False
        self._last = (start["step"] - 1, 2)
        for words in start["damaged"]:
            _say(f"warning: {words}; skipped")
        if start["step"]:
            _say(f"resuming from the checkpoint after step {start['step']}")
        return True

    def _print_new(self, points: tuple[CurvePoint, ...]) -> None:
        """Print the lines after the last printed one."""
        for point in points:
            place = find_place(point)
            if self._last is None or place > self._last:
                self._last = place
                _say(describe_line(point))


def find_place(point: CurvePoint) -> tuple[int, int]:
    """The order of lines: after a step, the epoch that ends with it, then an evaluation."""
    return point.step, 2 if point.is_evaluation else int(point.is_epoch)


def describe_line(point: CurvePoint) -> str:
    """One line for a reader."""
    accuracy = "" if point.accuracy is None else f"  accuracy {format_quantity('accuracy', point.accuracy)}"
    if point.is_epoch:
        compute = f" ({format_seconds(point.compute_seconds)} without loading)" if point.compute_seconds else ""
        mean = f"mean loss {format_loss(point.loss)}{accuracy}"
        return f"epoch {point.epoch:.0f} done in {format_seconds(point.seconds)}{compute}  {mean}"
    rate = f"  lr {format_learning_rate(point.learning_rate)}" if point.learning_rate is not None else ""
    what = "test" if point.is_evaluation else "step"
    since = "" if point.elapsed_seconds is None else f"  at {format_seconds(point.elapsed_seconds)}"
    time = f"{format_seconds(point.seconds)}{since}"
    return f"{what} {point.step:>6}  epoch {point.epoch:6.2f}  loss {format_loss(point.loss)}{accuracy}{rate}  {time}"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201
