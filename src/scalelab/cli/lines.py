"""The lines of a training run on standard error, as rank 0 writes them: step, epoch, loss, accuracy, rate, time."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import TracebackType

from scalelab.measure.agreement import checkpoint_directory, count_saved_steps, curve_file, keep_curve
from scalelab.measure.scheduler import Event, TrialEnded
from scalelab.settings import Course
from scalelab.trial import CurvePoint, Status, from_builtins
from scalelab.units import format_learning_rate, format_quantity, format_seconds

POLL_SECONDS = 0.2


class LineReporter:
    """Follows `curve.jsonl` while the training runs. Use as a context manager: its thread must end.

    The file is gone once the training has completed; what was not printed by then is in the result.
    """

    def __init__(self, directory: Path, course: Course) -> None:
        self._path = curve_file(directory)
        num_done = count_saved_steps(checkpoint_directory(directory, course))
        self._last = (num_done - 1, True)
        keep_curve(self._path, num_done)  # what lies beyond is trained, and printed, again
        if num_done:
            _say(f"going on after {num_done} steps, from the last checkpoint")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> LineReporter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrialEnded):
            self._stop()
            self._print_new(event.result.curve)
            if event.result.status is not Status.COMPLETED:
                _say(f"{event.result.status.words}: {event.result.reason}")

    def _stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _follow(self) -> None:
        position = 0
        while not self._is_over.wait(POLL_SECONDS):
            try:
                if self._path.stat().st_size < position:
                    position = 0  # the rank took an earlier checkpoint and dropped more
                with self._path.open("rb") as file:
                    file.seek(position)
                    whole = file.read().rpartition(b"\n")[0]
            except OSError:
                continue
            position += len(whole) + 1 if whole else 0
            self._print_new(tuple(from_builtins(json.loads(line), CurvePoint) for line in whole.splitlines()))

    def _print_new(self, points: tuple[CurvePoint, ...]) -> None:
        """Print what comes after the last that was printed; an evaluation comes after the step of its number."""
        for point in points:
            place = (point.step, point.is_evaluation)
            if place > self._last:
                self._last = place
                _say(describe_line(point))


def describe_line(point: CurvePoint) -> str:
    """One line for a reader."""
    accuracy = "" if point.accuracy is None else f"  accuracy {format_quantity('accuracy', point.accuracy)}"
    rate = f"  lr {format_learning_rate(point.learning_rate)}" if point.learning_rate is not None else ""
    what = "test" if point.is_evaluation else "step"
    time = format_seconds(point.seconds)
    return f"{what} {point.step:>6}  epoch {point.epoch:6.2f}  loss {point.loss:.4f}{accuracy}{rate}  {time}"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201
