"""`scalelab resume`: continue an interrupted run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from scalelab import __version__
from scalelab.answers.interleaved import Interleaved, SidedLauncher
from scalelab.answers.train import reopen_training
from scalelab.cli.batch import (
    check_output,
    check_unused_by_rows,
    conclude,
    make_record,
    make_submitter,
    submit_run,
)
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.measuring import measure_and_report, report_run
from scalelab.cli.output import Output
from scalelab.errors import NothingMeasured, UnknownName, UsageError
from scalelab.launch.batch.handover import check_no_job, check_trials_free
from scalelab.launch.batch.site import Submission
from scalelab.launch.batch.system import BatchSystem, read_record
from scalelab.launch.joined import JoinedLauncher, find_member, run_member
from scalelab.launch.launcher import Launcher, choose_launcher
from scalelab.launch.ranks.discovery import Membership
from scalelab.records.environment import read_environment
from scalelab.records.launchers import find_own_job, find_scheduler, name_job
from scalelab.records.store import RUNS_DIR, RunStore, hash_workload, open_run
from scalelab.records.tasks import Script
from scalelab.records.trial import Trial
from scalelab.runs.experiment import find_waiting
from scalelab.studies.catalogue import read_study
from scalelab.studies.shared.study import Study
from scalelab.units import format_count
from scalelab.workloads.catalogue import BUILT_IN


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Continue an interrupted run: trials that have a result are not repeated."""

    run: Annotated[str, tyro.conf.Positional] = "last"
    """Name, unique prefix or path of a run, or last."""
    runs_dir: RunsDir = RUNS_DIR
    only: Annotated[str | None, tyro.conf.arg(metavar="TRIAL")] = None
    """Run only this trial, even while others run: what a job of --job-per-trial does."""
    trust: bool = False
    """Execute what a run names that was not made here: its workload, script or study."""
    submission: Submission = field(default_factory=Submission)
    output: Output = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    resume = parse_flags(Resume, args, "resume")
    resume.output.check()
    store = open_run(resume.run, resume.runs_dir)
    check_origin(store, is_trusted=resume.trust)
    member = find_member(os.environ)
    joined = join_launcher(store, member, resume.runs_dir) if member else None
    if member and member.rank > 0:
        return run_member(member, resume.runs_dir)
    study = read_study(store)
    if resume.only is not None:
        return run_only(store, study, resume.only)
    if study.has_own_launchers:
        check_unused_by_rows(resume.submission, study, store.trials())
    else:
        resume.submission.check_unused(study.job.launcher)
    if member is None and find_scheduler(study.job.launcher, os.environ) is not None:
        return resume_by_job(store, study, resume)
    check_trials_free(store)
    note_place(store)
    reopen_training(store)
    launcher = joined or open_launchers(store, study, resume)
    reopen_waiting(store)
    note_missing(store)
    try:
        return measure_and_report(store, study, launcher, resume.output)
    except NothingMeasured as error:
        if is_own_job(store):  # the process that waits for this job must know that every trial has a result
            error.exit_code = 3
        raise


def check_origin(store: RunStore, *, is_trusted: bool) -> None:
    """Refuse to execute what another user's run names until this user has looked at it."""
    if store.is_own:
        return
    if is_trusted:
        store.trust()
        return
    code = {name for trial in store.trials() for name in list_code(trial)} | {*list_programs(store.record.fields)}
    named = ", ".join(sorted(filter(None, {*code, store.record.study_class or ""}))) or "no file of its own"
    command = shlex.join(store.record.command) or "–"
    raise UsageError(
        f"{store.name} was not made here (it was copied, sent or made by another user). Measuring it again repeats:"
        f" {command}; and executes: {named}. If you trust that: scalelab resume {shlex.quote(str(store.path))} --trust"
    )


def list_code(trial: Trial) -> Iterator[str]:
    """The files that a trial executes."""
    if isinstance(trial.task, Script):
        yield trial.task.target
    elif trial.workload and trial.workload not in BUILT_IN:
        yield trial.workload
    if trial.mpiexec:
        yield trial.mpiexec


def list_programs(fields: Any) -> Iterator[str]:
    """The programs that the fields of a study name, however deep: mpiexec, and the interpreter of a side."""
    if isinstance(fields, list | tuple):
        for one in fields:
            yield from list_programs(one)
    elif isinstance(fields, dict):
        yield from (str(fields[name]) for name in ("mpiexec", "python") if fields.get(name))
        yield from list_programs(list(fields.values()))


def open_launchers(store: RunStore, study: Study, resume: Resume) -> Launcher:
    """The launcher of a run; an interleaved comparison has one per side."""
    if isinstance(study, Interleaved):
        return SidedLauncher(study, store.trials())
    return choose_launcher(study.job, store.trials(), make_submitter(study, resume.submission))


def resume_by_job(store: RunStore, study: Study, resume: Resume) -> int:
    """Submit the rest of the run to a batch system; a complete run is only shown."""
    check_output(resume.submission, resume.output)
    earlier = check_no_job(store)
    reopen_training(store)
    scheduler = find_scheduler(study.job.launcher, os.environ)
    assert scheduler is not None
    record = make_record(resume.submission, scheduler, earlier)
    is_over = all(store.has_result(name) for name in store.record.trials) and not find_waiting(store)
    if not record.is_per_trial and is_over:
        return report_run(store, study, conclude(store, study), resume.output)
    BatchSystem(scheduler, store.path).check()
    reopen_waiting(store)
    return submit_run(store, study, record, resume.submission, resume.output)


def run_only(store: RunStore, study: Study, name: str) -> int:
    """Run one trial and store its result, in a batch job of its own."""
    trial = next((trial for trial in store.trials() if trial.name == name), None)
    if trial is None:
        raise UnknownName("trial", name, store.record.trials)
    if not any(store.has_result(other) for other in store.record.trials):
        store.save_environment(read_environment(__version__))
    launcher = choose_launcher(study.job, [trial])
    launcher.check()
    try:
        store.save_result(launcher.launch(trial, store.trial_directory(name)))
    finally:
        launcher.close()
    return 0


def note_place(store: RunStore) -> None:
    """Record the environment of the node that measures first, if the run was planned on a login node."""
    is_submitted = read_record(store.path) is not None
    if is_submitted and not any(store.has_result(name) for name in store.record.trials):
        store.save_environment(read_environment(__version__))
    else:
        warn_of_changes(store)


def join_launcher(store: RunStore, member: Membership, runs_dir: Path) -> JoinedLauncher:
    """Under an external launcher only a training run resumes, with the same number of ranks."""
    trial = store.trials()[0]
    if trial.training_run is None:
        raise UsageError(
            f"{store.name} is not a training run: resume it without {member.launcher}; it starts its ranks itself"
        )
    if trial.num_processes != member.num_ranks:
        raise UsageError(
            f"{store.name} had {trial.num_processes} ranks, got {member.num_ranks}: launch {trial.num_processes}"
        )
    return JoinedLauncher(member, runs_dir)


def reopen_waiting(store: RunStore) -> None:
    """Reopen trials whose batch job was rejected or cancelled."""
    for result in find_waiting(store):
        store.set_aside(result.trial.name, "before")


def note_missing(store: RunStore) -> None:
    """How much there is left to do."""
    names = store.record.trials
    missing = sum(not store.has_result(name) for name in names)
    words = f"{missing} of {format_count(len(names), 'trial')} to run" if missing else "every trial has a result"
    print(f"note: {words}", file=sys.stderr)  # noqa: T201


def is_own_job(store: RunStore) -> bool:
    """Whether this process runs in a batch job of the run."""
    record = read_record(store.path)
    own = find_own_job(os.environ)
    return record is not None and any(name_job(record.scheduler, job.id) == own for job in record.jobs)


def warn_of_changes(store: RunStore) -> None:
    """Warn if the machine or the workload file changed: the run would mix two jobs."""
    before, now = store.environment(), read_environment(__version__)
    changes = [
        f"{name} was {getattr(before, name)}, now {getattr(now, name)}"
        for name in ("host", "processor", "num_cores", "torch")
        if getattr(before, name) != getattr(now, name)
    ]
    if hash_workload(store.trials()[0].workload) != store.record.workload_sha256:
        changes.append("the workload file changed")
    if changes:
        print(f"warning: the run started under other conditions: {'; '.join(changes)}", file=sys.stderr)  # noqa: T201
