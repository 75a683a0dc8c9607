"""Run a script as a rank, with the variables that torchrun sets, and report what was seen of it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scalelab.launch.agreement import Assignment, copied_directory, samples_file, trace_file
from scalelab.records.observations import Instrument, RankReport, ScriptReport
from scalelab.records.samples import render_samples
from scalelab.records.tasks import Script
from scalelab.records.trial import StepSample, Trial
from scalelab.worker.script.execution import giving_up, run_script, taking_part_in_spawn
from scalelab.worker.script.instrumented import name_strategy
from scalelab.worker.script.observers import choose_observer
from scalelab.worker.script.prelude import make_variables, move_to_copy
from scalelab.worker.script.session import MakeObserver, ScriptSession

GIVE_UP_SHARE = 0.9
"""Of the time limit: a script without a step until then has none."""
LEAVE_SECONDS = 10.0
"""How long a script's exit handlers and threads may take after its last step."""


class SampleFile:
    """A rank's samples: in a list, and after every block on disk."""

    def __init__(self, path: Path, samples: list[Any]) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._samples = samples
        self._num_written = 0
        self.clear()

    def append(self, sample: StepSample) -> None:
        self._samples.append(sample)

    def flush(self) -> None:
        self._file.write(render_samples(self._samples[self._num_written :]).partition("\n")[2])
        self._file.flush()
        self._num_written = len(self._samples)

    def clear(self) -> None:
        self._samples.clear()
        self._num_written = 0
        self._file.seek(0)
        self._file.truncate()
        self._file.write(render_samples(()))

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        self._file.close()


def measure_script(
    trial: Trial, script: Script, assignment: Assignment, directory: Path, report: RankReport, samples: list[Any]
) -> RankReport:
    """Run the script on this rank and record its steps; what was seen of it is in the report."""
    store = open_store(trial, assignment)
    os.environ.update(make_variables(trial, assignment))
    if script.is_scratch:
        script = move_to_copy(script, copied_directory(directory))
    if script.directory:
        os.chdir(script.directory)
    rank = report.rank
    with SampleFile(samples_file(directory, rank), samples) as sink:
        session = ScriptSession(
            *(script.plan.blocks, rank, trace_file(directory, rank), sink, trial.batch_per_rank),
            is_told=script.is_told_batch,
            step_at=script.step_at,
            delays=find_delays(trial, rank),
            observers={name: plan_observer(name, trial, directory, rank) for name in trial.instruments},
        )
        try:
            with (
                taking_part_in_spawn(assignment.local_rank, int(os.environ["LOCAL_WORLD_SIZE"])),
                giving_up(session, GIVE_UP_SHARE * trial.timeout_seconds),
            ):
                run_script(script, session)
            wait_for_all(store, trial.num_ranks)
        finally:
            leave_script()
    report = replace(report, script=describe_script(session), num_parameters=count_parameters(session))
    for observer in session.observed:
        report = observer.complete(report)
    return report


def find_delays(trial: Trial, rank: int) -> dict[str, float]:
    """The injected delay on this rank, by phase."""
    seconds = trial.perturbation.seconds_on(rank)
    return {trial.perturbation.delay_phase: seconds} if seconds else {}


def plan_observer(name: Instrument, trial: Trial, directory: Path, rank: int) -> MakeObserver:
    """Makes the observer of an instrument once the script's steps are known."""
    return lambda session: choose_observer(name, session.watch, session.passes, trial, directory, rank)


def open_store(trial: Trial, assignment: Assignment) -> TCPStore:
    """The store that the script's process group will meet at, served by rank 0 as torchrun's agent would."""
    is_host = assignment.rank == 0
    return TCPStore(
        assignment.address,
        assignment.port,
        trial.num_ranks,
        is_host,
        timeout=timedelta(seconds=trial.timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=assignment.listen_fd if is_host else None,
    )


def wait_for_all(store: TCPStore, num_ranks: int) -> None:
    """Stay until every rank has taken its last step: a socket that closes earlier looks like a lost rank."""
    if store.add("scalelab/ended", 1) == num_ranks:
        store.set("scalelab/all", "1")
    with contextlib.suppress(RuntimeError):  # another rank failed, and has said so
        store.wait(["scalelab/all"], timedelta(seconds=LEAVE_SECONDS))


def describe_script(session: ScriptSession) -> ScriptReport:
    rule, apart = session.watch.rule, session.num_apart
    return ScriptReport(
        num_optimizers=rule.num_optimizers,
        num_passes=session.num_passes,
        num_samples=session.step_samples,
        batch_samples=session.batch_samples,
        num_uneven=session.num_uneven,
        is_regular=rule.is_regular or not session.watch.uses_rule,
        num_evaluations=apart["evaluation"],
        num_checkpoints=apart["checkpoint"],
        num_skipped=apart["skipped"],
        obstacle=session.obstacle,
        strategy=name_strategy(session.watch.trained),
        left_out=session.left_out,
        has_group=dist.is_initialized(),
    )


def count_parameters(session: ScriptSession) -> int | None:
    """Parameters of the trained modules on this rank; None: no module was seen."""
    sizes = {id(one): one.numel() for module in session.watch.trained for one in module.parameters()}
    return sum(sizes.values()) or None


def leave_script() -> None:
    """What an interpreter does at its end, bounded in time: threads, exit handlers, logs, children."""
    gc.collect()
    leaving = threading.Thread(target=_run_exit_handlers, daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    for child in multiprocessing.active_children():
        child.terminate()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def _run_exit_handlers() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread is not threading.main_thread() and not thread.daemon:
            thread.join(LEAVE_SECONDS)
    atexit._run_exitfuncs()
    logging.shutdown()
