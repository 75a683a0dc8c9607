"""The lines of a training run on standard error, as rank 0 writes them: step, epoch, loss, accuracy, rate, time."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import TracebackType

from scalelab.errors import DamagedRun
from scalelab.measure.agreement import curve_file, start_file
from scalelab.records.files import read_json
from scalelab.records.observations import CurvePoint
from scalelab.records.trial import Status, from_builtins
from scalelab.runs.scheduler import Event, TrialStarted
from scalelab.units import format_learning_rate, format_loss, format_quantity, format_seconds

POLL_SECONDS = 0.2


class LineReporter:
    """Follows `curve.jsonl` while the training runs. Use as a context manager: its thread must end.

    Rank 0 first drops what lies beyond the checkpoint that it goes on from and then says so in `start.json`: only from
    then on are lines read. The lines' file is gone once the training has completed; what was not printed by then is
    in the result.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: tuple[int, bool] | None = None
        """The place of the last line that was printed; None until the training has begun."""
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
            self._print_new(event.result.curve)
            if event.result.status is not Status.COMPLETED:
                _say(f"{event.result.status.words}: {event.result.reason}")

    def say(self, words: str) -> None:
        """A line among those of the training."""
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
        """Say where the training goes on from, once rank 0 knows."""
        try:
            start = read_json(start_file(self._directory))
        except DamagedRun:
            return False
        self._last = (start["step"] - 1, True)
        for words in start["damaged"]:
            _say(f"warning: {words}; it was passed over")
        if start["step"]:
            _say(f"going on after {start['step']} steps, from the last checkpoint")
        return True

    def _print_new(self, points: tuple[CurvePoint, ...]) -> None:
        """Print what comes after the last that was printed; an evaluation comes after the step of its number."""
        for point in points:
            place = (point.step, point.is_evaluation)
            if self._last is None or place > self._last:
                self._last = place
                _say(describe_line(point))


def describe_line(point: CurvePoint) -> str:
    """One line for a reader."""
    accuracy = "" if point.accuracy is None else f"  accuracy {format_quantity('accuracy', point.accuracy)}"
    rate = f"  lr {format_learning_rate(point.learning_rate)}" if point.learning_rate is not None else ""
    what = "test" if point.is_evaluation else "step"
    time = format_seconds(point.seconds)
    return f"{what} {point.step:>6}  epoch {point.epoch:6.2f}  loss {format_loss(point.loss)}{accuracy}{rate}  {time}"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201
