"""What `run` and `resume` share: measure what is missing, answer, say where the run is and what to do next.

Progress goes to stderr: of a study, a bar with the time left on a terminal and lines elsewhere; of a training run, its
lines as rank 0 writes them: step, epoch, loss, accuracy, learning rate, time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from scalelab.answers.train import TrainStudy
from scalelab.checks import clean_lines, clean_text, find_unguarded
from scalelab.cli.app import say, say_if_slow
from scalelab.cli.output import Output, write_outputs
from scalelab.cli.study_flags import Execution
from scalelab.errors import DamagedRun, Terminated, UsageError
from scalelab.launch.agreement import curve_file, start_file
from scalelab.launch.launcher import Launcher, choose_launcher, try_trial
from scalelab.launch.ranks.discovery import find_membership
from scalelab.records.environment import installed_version
from scalelab.records.files import read_json
from scalelab.records.observations import CurvePoint
from scalelab.records.store import RUNS_DIR, RunStore, find_runs
from scalelab.records.trial import Status, Trial, from_builtins
from scalelab.report.document import Document
from scalelab.runs.experiment import execute_run, find_failed, find_waiting
from scalelab.runs.scheduler import Event, TrialEnded, TrialStarted
from scalelab.studies.shared.expectation import can_try, expect_seconds, render_plan
from scalelab.studies.shared.study import Study
from scalelab.units import (
    format_count,
    format_duration,
    format_learning_rate,
    format_loss,
    format_quantity,
    format_seconds,
)


def measure_and_report(store: RunStore, study: Study, launcher: Launcher, output: Output) -> int:
    """Run the trials that have no result, print and export the answer; gives the exit code."""
    try:
        with make_reporter(store, study) as progress:
            document = execute_run(store, study, launcher, progress)
    except KeyboardInterrupt as interruption:
        message = f"Interrupted; results so far are kept  ·  scalelab resume {refer_to(store)}"
        print(message, file=sys.stderr)  # noqa: T201
        return interruption.exit_code if isinstance(interruption, Terminated) else 130
    return report_run(store, study, document, output)


def make_reporter(store: RunStore, study: Study) -> ProgressReporter | LineReporter:
    """Progress by trial, or by line of a training run."""
    first = store.trials()[0]
    is_training = store.record.study == TrainStudy.name
    return (
        LineReporter(store.trial_directory(first.name)) if is_training else ProgressReporter(is_search=study.is_search)
    )


def refer_to(store: RunStore) -> str:
    """How to name a run in a command: `last` if it is, its path otherwise."""
    return "last" if find_runs(RUNS_DIR)[-1:] == [store.path] else str(store.path)


def report_run(store: RunStore, study: Study, document: Document, output: Output) -> int:
    """Print and export the document; 3 when some trials failed."""
    write_outputs(document, output, [store.path])
    failed = find_failed(store, study)
    traceback = next((result.traceback for result in failed if result.traceback), "")
    if traceback:
        print(f"\n{traceback}", file=sys.stderr)  # noqa: T201
    waiting = find_waiting(store)
    if waiting:
        names = f"{format_count(len(waiting), 'trial')} got no batch job"
        again = f"scalelab resume {refer_to(store)} submits them again, with other flags if needed"
        print(f"\n{names}: {again}", file=sys.stderr)  # noqa: T201
    stream = sys.stderr if output.takes_stdout else sys.stdout
    print(f"\nSaved to {store.path}  ·  scalelab report {refer_to(store)} --html report.html", file=stream)
    return 3 if failed else 0


def refuse_ranks() -> None:
    """Refuse to run under a launcher: every rank would measure the whole study at once."""
    # Scripts may export WORLD_SIZE without RANK: this process is then no rank, and its ranks get their own.
    is_half = "RANK" not in os.environ
    member = find_membership({name: own for name, own in os.environ.items() if not (is_half and name == "WORLD_SIZE")})
    if member is not None and member.num_ranks > 1:
        is_typed = member.launcher == "Slurm" and os.environ.get("SLURM_PTY_PORT")
        shell = ". A srun --pty shell needs one task (-n 1 --cpus-per-task N)" if is_typed else ""
        raise UsageError(
            f"{member.launcher} started this as rank {member.rank} of {member.num_ranks}: start it once and let"
            f" --launcher start the ranks; only train, resume and doctor run under a launcher{shell}"
        )


def print_plan(trials: Sequence[Trial], execution: Execution, *, may_try: bool = True) -> None:
    """What a run would do, and how long it would take; `may_try` launches a few steps where nothing else says."""
    runs = find_runs(execution.runs_dir)
    with contextlib.ExitStack() as stack:
        launcher = choose_launcher(trials[0], trials) if may_try and all(map(can_try, trials)) else None
        attempt = None
        if launcher is not None and installed_version("torch") is not None:
            stack.callback(launcher.close)
            attempt = partial(try_trial, launcher=launcher)
        stack.enter_context(say_if_slow("running a few steps of each configuration to estimate the time …"))
        expected = expect_seconds(trials, runs, attempt)
    sys.stdout.write(render_plan(trials, expected, is_full=execution.output.full))


class ProgressReporter:
    """A listener for the scheduler's events. A context manager, because the bar must be removed."""

    def __init__(self, *, is_search: bool = False) -> None:
        """`is_search`: results decide about further trials, so their number is not known."""
        self._is_search = is_search
        self._last_seconds: float | None = None
        self._console = Console(file=find_unguarded(sys.stderr), highlight=False)
        self._is_live = self._console.is_terminal and not os.environ.get("NO_COLOR")
        self._started = time.monotonic()
        self._num_measured = 0
        self._bar: Progress | None = None
        self._silence = contextlib.ExitStack()
        """Ends with the trial that is running."""

    def __enter__(self) -> ProgressReporter:
        if self._is_live:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[count]}{task.fields[left]}"),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None, count="", left="importing torch")
        return self

    def __exit__(self, *_: object) -> None:
        self._silence.close()
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        self._silence.close()
        if isinstance(event, TrialEnded) and not event.is_from_disk:
            if not self._num_measured:
                self._started = time.monotonic() - event.result.wall_seconds  # loading torch happens once
            self._num_measured += 1
            self._last_seconds = event.result.wall_seconds
        left = self._describe_left(event)
        if isinstance(event, TrialStarted):
            warn_of_neighbours(event, self.say)
            if self._is_search and self._bar is None:  # a probe may take minutes, and its batch is news
                self.say(f"[{event.number}/{event.num_trials}] {event.trial.name} started")
            elif self._bar is None and not self._num_measured:
                words = f"[{event.number}/{event.num_trials}] {event.trial.name} is running (loading torch first)"
                self._silence.enter_context(say_if_slow(words))
        if self._bar is not None:
            trial = event.trial if isinstance(event, TrialStarted) else event.result.trial
            done = event.number - 1 if isinstance(event, TrialStarted) else event.number
            count = f"{done}/{event.num_trials} trials · "
            self._bar.update(
                self._task,
                description=clean_text(trial.name),
                total=event.num_trials,
                completed=done,
                count=count,
                left=left,
            )
        if isinstance(event, TrialEnded):
            self._say_end(event, left)

    def say(self, words: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(clean_lines(words), markup=False)
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
        if self._is_search:
            return f"more may follow, the last took {format_duration(self._last_seconds)}"
        if done == event.num_trials:
            return "all done"
        mean = (time.monotonic() - self._started) / self._num_measured
        return f"{format_duration(mean * (event.num_trials - done))} left"


def warn_of_neighbours(event: TrialStarted, say: Callable[[str], None]) -> None:
    """Say at once that another run disturbs this one, and is disturbed: it may still be stopped."""
    for neighbour in event.neighbours:
        say(f"warning: scalelab also measures {neighbour} on the same cores: both get slower; let one wait")


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

    def __exit__(self, *_: object) -> None:
        self._stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrialStarted):
            warn_of_neighbours(event, self.say)
            start_file(self._directory).unlink(missing_ok=True)
            self._thread.start()
        elif not event.is_from_disk:
            self._stop()
            if self._last is None:
                self._see_start()
            self._print_new(tuple(sorted((*event.result.curve, *event.result.epochs), key=find_place)))
            if event.result.status is not Status.COMPLETED:
                say(f"{event.result.status.words}: {event.result.reason}")

    def say(self, words: str) -> None:
        """Print a line among those of the training."""
        say(words)

    def _stop(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _follow(self) -> None:
        position = 0
        with say_if_slow("loading torch, the model and its data …"):
            while not (self._see_start() or self._is_over.wait(POLL_SECONDS)):
                pass
        while not self._is_over.wait(POLL_SECONDS):
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
            say(f"warning: {words}; skipped")
        if start["step"]:
            say(f"resuming from the checkpoint after step {start['step']}")
        return True

    def _print_new(self, points: tuple[CurvePoint, ...]) -> None:
        """Print the lines after the last printed one."""
        for point in points:
            place = find_place(point)
            if self._last is None or place > self._last:
                self._last = place
                say(describe_line(point))


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
    more = "".join(f"  {name} {value:.4g}" for name, value in point.metrics.items())
    score = f"loss {format_loss(point.loss)}{accuracy}{more}"
    return f"{what} {point.step:>6}  epoch {point.epoch:6.2f}  {score}{rate}  {time}"
