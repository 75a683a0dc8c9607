"""`scalelab resume`: go on with a run that was interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from scalelab import __version__
from scalelab.cli.finish import measure_and_report
from scalelab.cli.flags import parse_flags
from scalelab.cli.output import Output, RunsDir
from scalelab.environment import read_environment
from scalelab.errors import DamagedRun, UsageError
from scalelab.measure.launchers.hosts import choose_launcher
from scalelab.measure.launchers.joined import JoinedLauncher, Membership, find_membership, run_member
from scalelab.store import RUNS_DIR, RunStore, hash_workload, open_run
from scalelab.studies.train import Train
from scalelab.trial import Status


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Go on with a run that was interrupted: trials that have a result are not run again."""

    run: Annotated[str, tyro.conf.Positional] = "last"
    """Its name, the beginning of its name, its path, or last."""
    runs_dir: RunsDir = RUNS_DIR
    output: Output = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    resume = parse_flags(Resume, args, "resume")
    resume.output.check()
    store = open_run(resume.run, resume.runs_dir)
    member = find_membership(os.environ)
    if member and member.rank > 0:
        return run_member("-", store.trials()[0].device)
    warn_of_changes(store)
    reopen_training(store)
    launcher = join_launcher(store, member) if member else choose_launcher(store.trials())
    return measure_and_report(store, launcher, resume.output)


def join_launcher(store: RunStore, member: Membership) -> JoinedLauncher:
    """Under torchrun only a training goes on, and on as many ranks as it had."""
    trial = store.trials()[0]
    if trial.course is None:
        raise UsageError(f"{store.name} is no training: resume it without torchrun, it starts its ranks itself")
    if trial.num_processes != member.num_ranks:
        raise UsageError(
            f"{store.name} had {trial.num_processes} ranks, {member.num_ranks} were launched: launch as many"
        )
    return JoinedLauncher()


def reopen_training(store: RunStore) -> None:
    """A training that failed, or was killed, goes on from its last checkpoint; other failures are results."""
    name = store.record.trials[0]
    if store.record.study == Train.name and store.has_result(name):
        try:
            is_over = store.result(name).status is Status.COMPLETED
        except DamagedRun:
            return  # the scheduler sets it aside
        if not is_over:
            store.reopen(name)


def warn_of_changes(store: RunStore) -> None:
    """A run that goes on elsewhere, or with another workload file, mixes the times of two jobs."""
    before, now = store.environment(), read_environment(__version__)
    changes = [
        f"{name} was {getattr(before, name)}, is {getattr(now, name)}"
        for name in ("host", "processor", "num_cores", "torch")
        if getattr(before, name) != getattr(now, name)
    ]
    if hash_workload(store.trials()[0].workload) != store.record.workload_sha256:
        changes.append("the workload's file has changed")
    if changes:
        print(f"warning: this is not what the run began on: {'; '.join(changes)}", file=sys.stderr)  # noqa: T201
