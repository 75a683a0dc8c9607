"""Run a script as a rank: as `python FILE` or `python -m MODULE` would, with the variables that torchrun sets."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import runpy
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scalelab.errors import UsageError
from scalelab.launch.agreement import Assignment, samples_file, trace_file
from scalelab.records.observations import RankReport, ScriptReport
from scalelab.records.samples import render_samples
from scalelab.records.tasks import Script
from scalelab.records.trial import StepSample, Trial
from scalelab.worker.script.session import ScriptEnded, ScriptSession, refuse_samples

LEAVE_SECONDS = 10.0
"""How long a script's exit handlers and threads may take after its last step."""


class ScriptFinished(UsageError):
    """The script came to its end before all planned steps were taken."""


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
    if script.directory:
        os.chdir(script.directory)
    check = refuse_samples(trial.batch_per_rank) if script.checks_batch else None
    with SampleFile(samples_file(directory, report.rank), samples) as sink:
        session = ScriptSession(script.plan.blocks, report.rank, trace_file(directory, report.rank), sink, check)
        try:
            run_script(script, session)
            wait_for_all(store, trial.num_ranks)
        finally:
            leave_script()
    return replace(report, script=describe_script(session), num_parameters=count_parameters(session))


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
        is_regular=rule.is_regular,
        num_evaluations=apart["evaluation"],
        num_checkpoints=apart["checkpoint"],
        num_skipped=apart["skipped"],
        obstacle=session.obstacle,
    )


def count_parameters(session: ScriptSession) -> int | None:
    """Parameters of the trained modules on this rank; None: no module was seen."""
    sizes = {id(one): one.numel() for module in session.watch.trained for one in module.parameters()}
    return sum(sizes.values()) or None


def make_variables(trial: Trial, assignment: Assignment) -> dict[str, str]:
    """What torchrun sets for a rank."""
    rank, local_size = assignment.rank, trial.ranks_per_host if trial.num_hosts > 1 else trial.num_ranks
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_size))
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": assignment.local_rank,
        "WORLD_SIZE": trial.num_ranks,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": rank // local_size,
        "GROUP_WORLD_SIZE": -(-trial.num_ranks // local_size),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": trial.num_ranks,
        "MASTER_PORT": assignment.port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "OMP_NUM_THREADS": trial.threads_per_rank,
    }
    words = {
        "MASTER_ADDR": assignment.address,
        "TORCHELASTIC_RUN_ID": "scalelab",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return {name: str(number) for name, number in numbers.items()} | words


def run_script(script: Script, session: ScriptSession) -> None:
    """Run the script until the session ends it; raises `ScriptFinished` where the script ended by itself before."""
    sys.argv = [script.target, *script.arguments]
    try:
        with session:
            if script.is_module:
                sys.path.insert(0, str(Path.cwd()))
                runpy.run_module(script.target, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(script.target).resolve().parent))
                runpy.run_path(script.target, run_name="__main__")
    except ScriptEnded:
        return
    except SystemExit as error:
        if error.code not in (None, 0):
            words = f"the script exited with {describe_code(error.code)} after {count_steps(session)}"
            raise ScriptFinished(f"{words}: see the rank's log") from error
    except KeyboardInterrupt as error:
        raise ScriptFinished(f"the script was interrupted after {count_steps(session)}") from error
    raise ScriptFinished(describe_early_end(session))


def describe_code(code: object) -> str:
    return f"code {code}" if isinstance(code, int) else f"the message {str(code).strip().splitlines()[0]!r}"


def count_steps(session: ScriptSession) -> str:
    return f"{session.num_steps} of {session.num_planned} planned steps"


def describe_early_end(session: ScriptSession) -> str:
    """What to do about a script that ended too early, by what was seen of it."""
    if session.num_steps:
        return f"the script ended after {count_steps(session)}: let it train longer, or lower --steps"
    seen = f"{len(session.watch.trained)} trained modules and {session.watch.num_backward} backward passes were seen"
    return f"the script ended without an optimizer step ({seen}): pass --step-at where a step ends elsewhere"


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
