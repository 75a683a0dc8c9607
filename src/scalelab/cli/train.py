"""`scalelab train`: a real training run, alone or as one of torchrun's ranks."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scalelab.answers.train import TrainStudy, reopen_training
from scalelab.cli.batch import prepare, show_jobs, start_and_submit
from scalelab.cli.measuring import measure_and_report, print_plan
from scalelab.cli.study_flags import add_project, parse_kind
from scalelab.errors import UsageError
from scalelab.launch.joined import JoinedLauncher, find_member, run_member
from scalelab.launch.launcher import choose_launcher
from scalelab.launch.ranks.discovery import Membership
from scalelab.records.files import storage_errors
from scalelab.records.launchers import find_scheduler
from scalelab.records.store import RunStore, find_runs
from scalelab.records.strategies import DEFAULT, STRATEGIES
from scalelab.runs.experiment import start_run


def main(args: Sequence[str]) -> int:
    member = find_member(os.environ)
    args = add_project(TrainStudy, args, is_told=member is None)
    train, execution = parse_kind(TrainStudy, args, "train")
    train = join_ranks(train, member) if member else train
    train = place_checkpoints(train, is_first=member is None or member.rank == 0)
    record, scheduler = None, None
    if member is None:
        execution.submission.check_unused(train.job.launcher)
        scheduler = find_scheduler(train.job.launcher, os.environ)
    if scheduler is not None:
        train, record = prepare(train, execution.submission, scheduler)
    (trial,) = train.plan()
    if execution.dry_run:
        print_plan([trial], execution, may_try=member is None)
        sys.stdout.write(show_jobs(train, [trial], record, execution, ["scalelab", "train", *args]))
        return 0
    if member and member.rank > 0:
        return run_member(member, execution.runs_dir)
    execution.output.check()
    command = ["scalelab", "train", *args]
    if record is not None:
        return start_and_submit(train, record, execution, command)
    launcher = JoinedLauncher(member, execution.runs_dir) if member else choose_launcher(train.job, [trial])
    launcher.check()
    store = find_earlier(command, execution.runs_dir) if member and member.num_restarts else None
    store = store or start_run(train, execution.runs_dir, command, name=execution.name, note=execution.note)
    return measure_and_report(store, train, launcher, execution.output)


def join_ranks(train: TrainStudy, member: Membership) -> TrainStudy:
    """The training run on the ranks that were launched."""
    if train.ranks not in (1, member.num_ranks):
        raise UsageError(f"--ranks {train.ranks} contradicts the {member.num_ranks} launched ranks: leave it out")
    if member.num_ranks > 1 and train.strategy is not None and not STRATEGIES[train.strategy].has_processes:
        raise UsageError(
            f"--strategy {train.strategy} runs one process, {member.num_ranks} were launched: use {DEFAULT}"
        )
    return dataclasses.replace(train, ranks=member.num_ranks, local_ranks=member.num_local_ranks)


def find_earlier(command: Sequence[str], runs_dir: Path) -> RunStore | None:
    """The newest unfinished run of the same command: torchrun has restarted the job."""
    for path in reversed(find_runs(runs_dir)):
        store = RunStore.open(path)
        if store.record.command == tuple(command):
            reopen_training(store)
            return None if store.has_result(store.record.trials[0]) else store
    return None


def place_checkpoints(train: TrainStudy, *, is_first: bool) -> TrainStudy:
    """Checkpoints in an absolute directory, so that ranks and later resumes find it; checked to be writable."""
    given = train.course.checkpoints
    if given is None:
        return train
    place = Path(given).resolve()
    if is_first and place.exists() and not place.is_dir():
        raise UsageError(f"--checkpoints {given} is a file: give a directory")
    if is_first:
        with storage_errors(place, "--checkpoints"):
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
    return dataclasses.replace(train, course=dataclasses.replace(train.course, checkpoints=str(place)))
