"""What `run` and `resume` share: measure what is missing, answer, say where the run is and what to do next."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from scalelab.answers.train import TrainStudy
from scalelab.cli.output import Output, write_outputs
from scalelab.cli.progress import LineReporter, ProgressReporter
from scalelab.cli.study_flags import Execution
from scalelab.errors import Terminated, UsageError
from scalelab.launch.launcher import Launcher
from scalelab.launch.ranks.discovery import find_membership
from scalelab.records.store import RUNS_DIR, RunStore, find_runs
from scalelab.records.trial import Trial
from scalelab.report.document import Document
from scalelab.runs.experiment import execute_run, find_failed, find_waiting
from scalelab.studies.shared.expectation import expect_seconds, render_plan
from scalelab.studies.shared.study import Study
from scalelab.units import format_count


def measure_and_report(store: RunStore, study: Study, launcher: Launcher, output: Output) -> int:
    """Run the trials that have no result, print and export the answer; gives the exit code."""
    previous = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        with make_reporter(store) as progress:
            document = execute_run(store, study, launcher, progress)
    except KeyboardInterrupt as interruption:
        message = f"Interrupted; results so far are kept  ·  scalelab resume {refer_to(store)}"
        print(message, file=sys.stderr)  # noqa: T201
        return 143 if isinstance(interruption, Terminated) else 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return report_run(store, study, document, output)


def make_reporter(store: RunStore) -> ProgressReporter | LineReporter:
    """Progress by trial, or by line of a training run."""
    first = store.trials()[0]
    is_training = store.record.study == TrainStudy.name
    return LineReporter(store.trial_directory(first.name)) if is_training else ProgressReporter()


def raise_terminated(*_: object) -> None:
    """The SIGTERM handler during a run."""
    raise Terminated


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


def print_plan(trials: Sequence[Trial], execution: Execution) -> None:
    """What a run would do, and how long it would take."""
    expected = expect_seconds(trials, find_runs(execution.runs_dir))
    sys.stdout.write(render_plan(trials, expected, is_full=execution.output.full))
