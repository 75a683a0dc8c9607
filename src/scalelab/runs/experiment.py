"""A run from start to end: plan, store, measure, conclude. The command line and Python callers share it."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scalelab import __version__
from scalelab.errors import DamagedRun, NothingMeasured, ScalelabError, StudyFailed, UsageError
from scalelab.launch.launcher import Launcher, choose_launcher
from scalelab.launch.outcome import warn_of_ended
from scalelab.records.environment import Environment, Gpu, read_environment
from scalelab.records.launchers import LAUNCHERS, find_own_job
from scalelab.records.running import Occupation, read_neighbours
from scalelab.records.store import JOBS_FILE, RUNS_DIR, RunStore
from scalelab.records.tasks import Script
from scalelab.records.trial import Cause, Status, Trial, TrialResult, from_builtins, to_builtins
from scalelab.report.document import Document, render_json
from scalelab.report.findings import Caution, CautionKind
from scalelab.runs.scheduler import Guidance, Listener, TrialStarted, ignore_event, run_trials
from scalelab.units import format_bytes, list_some

if TYPE_CHECKING:
    from scalelab.studies.shared.study import Study

DAMAGED_TRIAL = CautionKind("damaged-trial", "a file of a trial is corrupt or missing", "failure")
UNFINISHED = CautionKind("unfinished", "planned trials have no result yet", "failure", ("num_missing", "num_trials"))
RECORDING = CautionKind("recording", "the script that records this run is still running", "note")
OTHER_HOST = CautionKind("other-host", "ranks ran on another host than the one described", "note", ("num_hosts",))
NEIGHBOUR = CautionKind("neighbour", "another run measured on the same cores at the same time", "noise", ("num_runs",))
MOST_NAMED = 3
"""Runs that the warning names."""


def run_study(
    study: Study,
    *,
    runs_dir: Path = RUNS_DIR,
    launcher: Launcher | None = None,
    listener: Listener | None = None,
) -> tuple[RunStore, Document]:
    """Measure a study into a new run and answer its question."""
    store = start_run(study, runs_dir, sys.argv)
    launcher = launcher or choose_launcher(study.job, store.trials())
    return store, execute_run(store, study, launcher, listener or ignore_event)


def start_run(
    study: Study, runs_dir: Path, command: Sequence[str], *, name: str | None = None, note: str = ""
) -> RunStore:
    """Create the directory of a new run with its plan; nothing is created if the study cannot be planned or stored."""
    if name is not None and not re.fullmatch(r"[\w.+-]{1,80}", name):
        raise UsageError(f"--name {name!r} must be letters, digits, and . _ + - (at most 80)")
    trials = plan_trials(study)
    fields = to_builtins(study)
    if from_builtins(fields, type(study)) != study:
        raise UsageError(f"the fields of {type(study).__name__} do not survive JSON: use numbers, text and dataclasses")
    return RunStore.create(
        runs_dir,
        study=study.name,
        study_class=find_class(study),
        fields=fields,
        trials=trials,
        environment=read_environment(__version__),
        command=command,
        label=name or study.label,
        note=note,
    )


def plan_trials(study: Study) -> list[Trial]:
    """The study's plan; what a study of the user's own raises has a name."""
    with own_errors(study, "plan"):
        return study.plan()


def find_class(study: Study) -> str | None:
    """Where the class of the user's own study is, `/path/file.py:Class`; None for a study of scalelab."""
    kind = type(study)
    if kind.__module__.partition(".")[0] == "scalelab":
        return None
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return f"{Path(file).resolve() if file else kind.__module__}:{kind.__qualname__}"


class own_errors:  # noqa: N801 - reads as a statement
    """Give an exception inside the user's own study a name; the traceback goes with it as a note."""

    def __init__(self, study: Study, method: str) -> None:
        self._is_own = find_class(study) is not None
        self._where = f"{type(study).__name__}.{method}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._is_own and isinstance(error, Exception) and not isinstance(error, ScalelabError):
            failure = StudyFailed(f"{self._where} raised {type(error).__name__}: {error}")
            failure.add_note("".join(traceback.format_exception(error)).rstrip())
            raise failure from error


def execute_run(store: RunStore, study: Study, launcher: Launcher, listener: Listener) -> Document:
    """Run what has no result yet and write the document; raises `NothingMeasured` if every trial failed."""
    if study.is_recorded:
        raise UsageError(f"{store.name} was recorded by a Meter: run its script again, or scalelab show {store.name}")
    with store.claim(job=find_own_job(os.environ)):
        guidance = Guidance(plan_more=study.plan_more, refuse=study.refuse)
        try:
            with watch_neighbours(store, study, listener) as watched:
                results = run_trials(store, launcher, watched, guidance)
        finally:
            launcher.close()
        document = conclude_run(store, study)
        store.save_document(render_json(document))
    check_something_measured(results, store, study)
    return document


@contextmanager
def watch_neighbours(store: RunStore, study: Study, listener: Listener) -> Iterator[Listener]:
    """A listener that learns with every trial of other runs on the same cores; other machines are not watched."""
    if not LAUNCHERS[study.job.launcher].is_on_this_machine:
        yield listener
        return
    with Occupation(store.path).hold() as occupation:
        yield lambda event: listener(
            replace(event, neighbours=occupation.look_around()) if isinstance(event, TrialStarted) else event
        )


def warn_of_neighbours(store: RunStore) -> Iterator[Caution]:
    names = list(dict.fromkeys(Path(run).name for run in read_neighbours(store.path)))
    if names:
        which = "another run" if len(names) == 1 else f"{len(names)} other runs"
        yield NEIGHBOUR(
            ", ".join(names),
            f"{which} of scalelab measured on the same cores at the same time: {list_some(names, MOST_NAMED)}",
            "measure again when nothing else runs, or give each its own cores with taskset",
            num_runs=len(names),
        )


def find_failed(store: RunStore, study: Study) -> list[TrialResult]:
    """The results that did not complete, except failures that the study looks for."""
    return study.find_unexpected(store.results()[0])


def find_waiting(store: RunStore) -> list[TrialResult]:
    """The trials that did not run because their batch job was rejected or cancelled: `resume` submits them again."""
    return [result for result in store.results()[0] if result.batch is not None and result.batch.may_come]


def conclude_run(store: RunStore, study: Study) -> Document:
    """The document of what has been measured so far; files that cannot be read become cautions."""
    results, damaged = read_results(store, study)
    with own_errors(study, "conclude"):
        document = study.make_report(results, store.trials(results), store.trial_directory)
    environment = store.environment()
    cautions = [
        *list_damaged(store, study, damaged),
        *list_missing(store, study, num_missing=len(store.record.trials) - len(results) - len(damaged)),
        *look_at_hosts(results, environment),
        *warn_of_neighbours(store),
        *warn_of_ended(store),
    ]
    return replace(
        document,
        cautions=(*cautions, *document.cautions),
        environment=describe_environment(environment, store),
    )


def list_damaged(store: RunStore, study: Study, damaged: Sequence[DamagedRun]) -> Iterator[Caution]:
    again = "run the script again" if study.is_recorded else f"scalelab resume {store.name} measures it again"
    yield from (DAMAGED_TRIAL("", str(error), again) for error in damaged)


def list_missing(store: RunStore, study: Study, num_missing: int) -> Iterator[Caution]:
    if num_missing > 0 and study.is_recorded:
        yield RECORDING("", "the script is still running", "check again when it has ended")
    elif num_missing > 0:
        num_trials = len(store.record.trials)
        yield UNFINISHED(
            "",
            f"{num_missing} of {num_trials} trials have not run yet",
            f"{say_when(store)}scalelab resume {store.name}",
            num_missing=num_missing,
            num_trials=num_trials,
        )


def look_at_hosts(results: Sequence[TrialResult], environment: Environment) -> Iterator[Caution]:
    """Ranks that ran on other nodes than the one described, as when the run was started on a login node."""
    started = (result for result in results if not LAUNCHERS[result.trial.launcher].is_on_this_machine)
    hosts = sorted({rank.host for result in started for rank in result.ranks if rank.host})
    if hosts and environment.host not in hosts:
        yield OTHER_HOST(
            "",
            f"ranks ran on {list_some(hosts, 1)}, but the recorded processor, memory and GPUs are those of"
            f" {environment.host}",
            "start it on a node of the allocation, or submit it from outside",
            num_hosts=len(hosts),
        )


def say_when(store: RunStore) -> str:
    """What to wait for before resuming: a batch job of the run must have ended."""
    return "when its batch job has ended (see scalelab list): " if (store.path / JOBS_FILE).is_file() else ""


def read_results(store: RunStore, study: Study) -> tuple[list[TrialResult], list[DamagedRun]]:
    """All readable results, and what could not be read; of a killed training run, what is there."""
    if not any(store.has_result(name) for name in store.record.trials):
        rescued = study.rescue(store)
        return ([] if rescued is None else [rescued]), []
    return store.results()


def check_something_measured(results: Sequence[TrialResult], store: RunStore, study: Study) -> None:
    """Raise the first failure as an error, with the user's own traceback, if no trial completed or the rest is moot."""
    failed = [result for result in results if result.status is not Status.COMPLETED]
    is_stopped = any(result.status is Status.NOT_RUN and result.cause is Cause.OTHER_BATCH for result in failed)
    if (len(failed) < len(results) and not is_stopped) or is_answer(results, study):
        return
    first = next((result for result in failed if result.status is not Status.NOT_RUN), failed[0])
    file, colon, function = first.trial.workload.rpartition(":")
    label = f"{Path(file).name}:{function}" if colon else function
    workload = f" of --workload {label}" if label else ""
    if isinstance(first.trial.task, Script):
        workload = f" of {Path(first.trial.task.target).name}"
    is_told = first.trial.trains_nothing and first.status is Status.INVALID  # the reason names the flag
    may_come = first.batch is not None and first.batch.may_come
    again = f", then scalelab resume {store.path} submits it again" if may_come else ""
    advice = "" if is_told or not first.advice else f": {first.advice}{again}"
    reason = first.reason.rstrip(".") if advice else first.reason
    said = "the other trials were left out" if is_stopped else "no trial completed"
    error = NothingMeasured(
        f"{said}; {first.trial.configuration}{workload} was {first.status.words}:"
        f" {reason}{advice} (logs: {store.trial_directory(first.trial.name)})"
    )
    if first.status is Status.TIMED_OUT:
        error.exit_code = 124
    if first.traceback:
        error.add_note(first.traceback)
    raise error


def is_answer(results: Sequence[TrialResult], study: Study) -> bool:
    """Whether the study expects that nothing ran: rows of a recipe whose jobs are rejected, as published."""
    return all(result.status is Status.NOT_RUN and study.expects(result) for result in results)


def describe_environment(environment: Environment, store: RunStore) -> tuple[tuple[str, str], ...]:
    """What the run was measured on."""
    commit = environment.git_commit
    changed = " with uncommitted changes" if environment.git_is_dirty else ""
    gpus = ", ".join(map(describe_gpu, environment.gpus)) + (", shared by MPS" if environment.has_mps else "")
    cores = f"{environment.num_cores} of {environment.num_machine_cores} cores usable"
    load = environment.load_average
    rows = [
        ("run", store.name),
        (
            "command",
            " ".join([Path(store.record.command[0]).name, *store.record.command[1:]]) if store.record.command else "–",
        ),
        ("measured", store.record.created_at[:19].replace("T", " ") + " UTC"),
        ("host", f"{environment.host}, {environment.system}"),
        ("processor", f"{environment.processor or '–'}, {cores}"),
        ("memory", format_bytes(environment.memory_bytes)),
        ("GPUs", gpus or "none"),
        ("load before", "–" if load is None else f"{load:.2f}"),
        ("torch", environment.torch or "–"),
        ("Python", environment.python),
        ("scalelab", environment.scalelab),
        ("git", f"{commit[:12]}{changed}" if commit else "–"),
    ]
    rows += sorted(environment.variables.items())
    return tuple(rows)


def describe_gpu(gpu: Gpu) -> str:
    ecc = {True: ", ECC", False: ", no ECC", None: ""}[gpu.has_ecc]
    return f"{gpu.name} ({format_bytes(gpu.memory_bytes)}{ecc}{', MIG' if gpu.has_mig else ''})"
