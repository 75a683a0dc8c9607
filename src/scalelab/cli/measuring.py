"""What `run` and `resume` share: measure what is missing, answer, say where it is and what to do next."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from scalelab.answers.train import Train
from scalelab.cli.output import Output, write_outputs
from scalelab.cli.progress import LineReporter, ProgressReporter
from scalelab.cli.study_flags import Execution
from scalelab.errors import UsageError
from scalelab.measure.launchers.joined import find_member
from scalelab.measure.launchers.launcher import Launcher
from scalelab.records.store import RUNS_DIR, RunStore, find_runs
from scalelab.records.trial import Trial
from scalelab.report.document import Document
from scalelab.runs.experiment import execute_run, find_failed, find_waiting
from scalelab.studies.shared.expectation import expect_seconds, render_plan
from scalelab.studies.shared.study import Study


class Terminated(KeyboardInterrupt):
    """SIGTERM, as batch systems send it: the run ends as it does on Ctrl-C."""


def measure_and_report(store: RunStore, study: Study, launcher: Launcher, output: Output) -> int:
    """Run the trials that have no result, print and export the answer; gives the exit code."""
    previous = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        with make_reporter(store) as progress:
            document = execute_run(store, study, launcher, progress)
    except KeyboardInterrupt as interruption:
        message = f"Interrupted; what was measured is kept  ·  scalelab resume {refer_to(store)}"
        print(message, file=sys.stderr)  # noqa: T201
        return 143 if isinstance(interruption, Terminated) else 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return report_run(store, study, document, output)


def make_reporter(store: RunStore) -> ProgressReporter | LineReporter:
    """How the run is followed: trial by trial, or line by line where it is a training."""
    first = store.trials()[0]
    is_training = store.record.study == Train.name
    return LineReporter(store.trial_directory(first.name)) if is_training else ProgressReporter()


def raise_terminated(*_: object) -> None:
    """What SIGTERM does while a run is executed."""
    raise Terminated


def refer_to(store: RunStore) -> str:
    """What to call a run in a command: `last` where that is it, its path otherwise."""
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
        names = f"{len(waiting)} trial{'s had no jobs' if len(waiting) > 1 else ' had no job'}"
        again = f"scalelab resume {refer_to(store)} submits again what was refused"
        print(f"\n{names}: {again}, with other flags if need be", file=sys.stderr)  # noqa: T201
    stream = sys.stderr if output.takes_stdout else sys.stdout
    print(f"\nSaved to {store.path}  ·  scalelab report {refer_to(store)} --html report.html", file=stream)
    return 3 if failed else 0


def refuse_ranks() -> None:
    """A study that a launcher starts once per rank would be measured as often at once, each beside the others."""
    # WORLD_SIZE without RANK, as scripts export it, makes nobody a rank, and the study tells its ranks theirs.
    is_half = "RANK" not in os.environ
    member = find_member({name: own for name, own in os.environ.items() if not (is_half and name == "WORLD_SIZE")})
    if member is not None and member.num_ranks > 1:
        is_typed = member.launcher == "Slurm" and os.environ.get("SLURM_PTY_PORT")
        shell = ". A shell of srun --pty must have one task (-n 1 --cpus-per-task N)" if is_typed else ""
        raise UsageError(
            f"{member.launcher} has started this as rank {member.rank} of {member.num_ranks}: start it once, and let"
            f" --launcher start its ranks; only train, resume and doctor may be started by rank{shell}"
        )


def print_plan(trials: Sequence[Trial], execution: Execution) -> None:
    """What a run would do, and how long it would take."""
    expected = expect_seconds(trials, find_runs(execution.runs_dir))
    sys.stdout.write(render_plan(trials, expected, is_full=execution.output.full))
