"""The flags by which a run is handed to a batch system, and what they come to."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from scalelab.checks import check_positive, read_flag
from scalelab.errors import UsageError
from scalelab.measure.launchers.batch import BatchRecord, size_job
from scalelab.measure.launchers.jobscripts import (
    JobRequest,
    check_psij,
    make_executor,
    make_job,
    render_launch,
    render_script,
)
from scalelab.measure.launchers.site import SCHEDULERS, Site, combine_sites, load_site
from scalelab.measure.launchers.trial_jobs import request_run, request_trial
from scalelab.ranks.allocation import Scheduler, find_allocation
from scalelab.studies.study import Job, Study
from scalelab.trial import Trial
from scalelab.units import parse_seconds


@dataclass(frozen=True, kw_only=True)
class Submission:
    """With --launcher slurm, pbs or lsf outside an allocation: a job is submitted."""

    site_file: Annotated[str | None, tyro.conf.arg(name="site", metavar="FILE")] = None
    """Where the flags below have their defaults. None: ~/.config/scalelab/site.toml, if there is one."""
    detach: bool = False
    """Submit and leave; scalelab list tells how far it is."""
    job_per_trial: bool = False
    """A job for every trial instead of one for all, on as many nodes as that trial needs."""
    queue_timeout: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """How long a job may wait in the queue before it is cancelled. None: as long as it takes."""
    asked: Site = field(default_factory=Site)

    def __post_init__(self) -> None:
        if self.queue_seconds is not None:
            check_positive("queue_timeout", self.queue_seconds)

    @property
    def queue_seconds(self) -> float | None:
        return None if self.queue_timeout is None else read_flag("queue_timeout", self.queue_timeout, parse_seconds)

    def make_record(self, scheduler: Scheduler, earlier: BatchRecord | None = None) -> BatchRecord:
        """What a run asks for: by flags, else as before, else by the site's file."""
        if earlier is not None and self.site_file is None:
            site = combine_sites(self.asked, earlier.site)
        else:
            site = load_site(self.asked, self.site_file, scheduler)
        is_per_trial = self.job_per_trial or bool(earlier and earlier.is_per_trial)
        return BatchRecord(scheduler=scheduler, site=site, is_per_trial=is_per_trial)


def find_scheduler(job: Job, variables: Mapping[str, str]) -> Scheduler | None:
    """The batch system that a job must be submitted to; None: it can be run here, or in the allocation we are in."""
    scheduler = next((name for name in SCHEDULERS if name == job.launcher), None)
    allocation = find_allocation(variables) if scheduler else None
    return None if allocation is not None and allocation.scheduler == scheduler else scheduler


def check_unused(submission: Submission, job: Job) -> None:
    """Refuse flags of a batch system where none is asked for, and where its job has begun: they would do nothing."""
    is_inside = job.launcher in SCHEDULERS and find_scheduler(job, os.environ) is None
    if submission == Submission() or (job.launcher in SCHEDULERS and not is_inside):
        return
    for record in (submission, submission.asked):
        for one in dataclasses.fields(record):
            value = getattr(record, one.name)
            if value not in (None, (), False) and not isinstance(value, Site):
                name = "site" if one.name == "site_file" else one.name
                if is_inside:
                    raise UsageError(
                        f"--{name.replace('_', '-')} is for a job that is submitted, and this is inside one of"
                        f" {job.launcher}: leave it out, or start it outside"
                    )
                raise UsageError(
                    f"--{name.replace('_', '-')} is for batch systems, and --launcher is {job.launcher}: use"
                    f" {', '.join(SCHEDULERS)}, or leave it out"
                )


def prepare(study: Study, submission: Submission) -> tuple[Any, BatchRecord | None]:
    """The study as the site has it, and what is asked of a batch system; None: it is run from here."""
    check_unused(submission, study.job)
    scheduler = find_scheduler(study.job, os.environ)
    if scheduler is None:
        return study, None
    record = submission.make_record(scheduler)
    return set_ranks_per_node(study, record.site), record


def set_ranks_per_node(study: Study, site: Site) -> Study:
    """The study with the number of ranks on a node, where no flag gave one: by the site, or as its nodes have it."""
    if study.job.ranks_per_node is not None:
        return study
    _, per_node = size_job([trial.num_processes for trial in study.plan()], site, None)
    changeable: Any = study
    job = dataclasses.replace(study.job, ranks_per_node=per_node)
    return dataclasses.replace(changeable, job=job)  # type: ignore[no-any-return]


def show_scripts(study: Study, trials: Sequence[Trial], record: BatchRecord, runs_dir: Path) -> str:
    """The scripts of the jobs that would be submitted: of all trials, or of every different one."""
    check_psij()
    texts: list[str] = []
    place = runs_dir.resolve() / "RUN"
    with tempfile.TemporaryDirectory(prefix="scalelab-") as scratch:
        run = Path(scratch)
        for request in list_requests(study, trials, record, run):
            executor = make_executor(record.scheduler, request.batch_directory)
            script = render_script(executor, make_job(request, record.site, record.scheduler))
            lines = [line for line in script.splitlines() if line.strip()]
            texts += [
                f"\nThe job script for {record.scheduler}, not submitted:\n",
                *lines,
                f"\nIt runs {request.launch_file}:\n",
                render_launch(request, record.site),
            ]
        return "\n".join(texts).replace(str(run.resolve()), str(place))


def list_requests(study: Study, trials: Sequence[Trial], record: BatchRecord, run: Path) -> list[JobRequest]:
    """One job for all, or one for each configuration: its rounds differ in nothing but their names."""
    per_node = study.job.ranks_per_node
    if not record.is_per_trial:
        return [request_run(list(trials), run, record, per_node)]
    return [request_trial(trial, run, record, per_node) for trial in trials if trial.round == 1]


def say(words: str) -> None:
    """A line of progress."""
    print(words, file=sys.stderr, flush=True)  # noqa: T201
